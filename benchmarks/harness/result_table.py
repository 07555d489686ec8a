"""Samples, rows, ratios and goals, as a table and as JSON."""

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_DIM_STYLE = "dim"


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: a value that was really measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class SampleSet:
    """What was measured of one side, in the row's unit."""

    name: str
    values: list[float]

    def statistic(self, measure: str) -> float:
        match measure:
            case "p50":
                return statistics.median(self.values)
            case "p99":
                return percentile(self.values, 0.99)
            case "max":
                return max(self.values)
            case "mean":
                return statistics.fmean(self.values)
            case unknown:
                raise ValueError(f"no such measure: {unknown}")

    def summary(self, measures: Sequence[str]) -> dict[str, Any]:
        told = {measure: round(self.statistic(measure), 6) for measure in measures}
        return {"name": self.name, **told, "n": len(self.values)}


@dataclass(frozen=True)
class ResultRow:
    """One line of the table.

    ratios tell how many times less than the reference ours takes, by measure; `goals` are the least ratios to
    reach. `limits` are the most that ours may take, whatever the reference does. A row that is not `gated` has
    goals and no ratchet: its ratio depends on how busy the machine is, whatever the reference does.
    """

    key: str
    title: str
    unit: str
    ours: SampleSet
    reference: SampleSet | None = None
    goals: dict[str, float] = field(default_factory=dict[str, float])
    limits: dict[str, float] = field(default_factory=dict[str, float])
    measures: tuple[str, ...] = ("p50", "p99")
    note: str = ""
    gated: bool = True

    def ratio(self, measure: str) -> float | None:
        if self.reference is None or not self.ours.statistic(measure):
            return None
        return self.reference.statistic(measure) / self.ours.statistic(measure)

    def meets_goals(self) -> dict[str, bool]:
        found = {measure: (self.ratio(measure) or 0) >= goal for measure, goal in self.goals.items()}
        for measure, most in self.limits.items():
            found[measure] = found.get(measure, True) and self.ours.statistic(measure) <= most
        return found

    def as_json(self) -> dict[str, Any]:
        ratios = {measure: self.ratio(measure) for measure in self.measures}
        told: dict[str, Any] = {
            "title": self.title,
            "unit": self.unit,
            "ours": self.ours.summary(self.measures),
        }
        if self.reference is not None:
            told["reference"] = self.reference.summary(self.measures)
            told["ratios"] = {name: round(value, 3) for name, value in ratios.items() if value is not None}
        if self.goals:
            told["goals"] = self.goals
        if self.limits:
            told["limits"] = self.limits
        if self.goals or self.limits:
            told["reached"] = self.meets_goals()
        if not self.gated:
            told["gated"] = False
        if self.note:
            told["note"] = self.note
        return told


def build_table(title: str, rows: Sequence[ResultRow]) -> Table:
    shown = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("figure", "ours p50 / p99", "reference p50 / p99", "ratio", "goal", "reached"):
        shown.add_column(name, justify="left" if name == "figure" else "right")
    for row in rows:
        reached = row.meets_goals()
        verdict = "–" if not reached else "[green]yes[/]" if all(reached.values()) else "[red]no[/]"
        reference = (
            "–" if row.reference is None else f"{_format_samples(row, row.reference)}\n{row.reference.name}"
        )
        title = row.title + (f"\n[{_DIM_STYLE}]{row.note}[/]" if row.note else "")
        shown.add_row(
            title, _format_samples(row, row.ours), reference, _format_ratios(row), _format_goals(row), verdict
        )
    return shown


def _format_samples(row: ResultRow, samples: SampleSet) -> str:
    return " / ".join(_format_number(samples.statistic(measure)) for measure in row.measures) + f" {row.unit}"


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _format_ratios(row: ResultRow) -> str:
    ratios = [row.ratio(measure) for measure in row.measures]
    return " / ".join("–" if ratio is None else f"{_format_number(ratio)}x" for ratio in ratios)


def _format_goals(row: ResultRow) -> str:
    goals = [f"≥ {goal:.3g}x {measure}" for measure, goal in row.goals.items()]
    return "\n".join([*goals, *(f"≤ {most:g} {row.unit}" for most in row.limits.values())]) or "–"


def describe_machine(versions: dict[str, str]) -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return {
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "architecture": platform.machine(),
        "kernel": ".".join(platform.release().split("-")[0].split(".")[:2]),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
        "load": round(os.getloadavg()[0], 1),
        **versions,
    }


def write_json(path: Path, benchmark: str, facts: dict[str, Any], rows: Sequence[ResultRow]) -> None:
    told = {"benchmark": benchmark, "machine": facts, "rows": {row.key: row.as_json() for row in rows}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_results(benchmark: str, facts: dict[str, Any], rows: Sequence[ResultRow]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(build_table(benchmark, rows))
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style=_DIM_STYLE)
