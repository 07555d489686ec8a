"""Compares a benchmark's ratios with the best so far, within a margin.

    python -m tools.bench_check RESULT.json … [--ratchet benchmarks/ratchet.json] [--update]

Only ratios to a reference of the same run are compared, never times: machines differ, and are shared. With `--update`
the ratchet is raised where a ratio is better than the best so far; it is never lowered by this program.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

RATCHET = Path("benchmarks/ratchet.json")
# How far below the best a run may stay: tails and short runs vary more than medians and sums.
MARGINS = {"p50": 0.3, "p99": 0.6, "mean": 0.2, "max": 0.6}


class Step(msgspec.Struct, forbid_unknown_fields=True):
    """The best ratio reached, and the share of it that may be missing."""

    best: Annotated[float, msgspec.Meta(gt=0)]
    margin: Annotated[float, msgspec.Meta(ge=0, lt=1)]

    @property
    def least(self) -> float:
        return self.best * (1 - self.margin)


class ResultRow(msgspec.Struct):
    ratios: dict[str, float] = {}
    goals: dict[str, float] = {}
    limits: dict[str, float] = {}
    gated: bool = True


class Result(msgspec.Struct):
    """What a benchmark has written; only what is compared."""

    benchmark: str
    rows: dict[str, ResultRow]

    def ratios(self) -> dict[str, float]:
        """The ratios that have a ratchet, as `row.measure`: those of what has a goal or a limit."""
        return {
            f"{name}.{measure}": row.ratios[measure]
            for name, row in self.rows.items()
            for measure in {**row.goals, **row.limits}
            if row.gated and measure in row.ratios
        }


type Ratchet = dict[str, dict[str, Step]]  # by benchmark, then by `row.measure`


def setbacks(result: Result, ratchet: Ratchet) -> list[str]:
    """What is worse than it may be, one sentence each."""
    found: list[str] = []
    ratios = result.ratios()
    for key, step in ratchet.get(result.benchmark, {}).items():
        if key not in ratios:
            found.append(f"{result.benchmark} {key}: was not measured; the best so far is {step.best:.3g}x.")
        elif ratios[key] < step.least:
            lost = 1 - ratios[key] / step.best
            found.append(
                f"{result.benchmark} {key}: {ratios[key]:.3g}x, {lost:.0%} below the best so far, {step.best:.3g}x; "
                f"{step.margin:.0%} is allowed."
            )
    return found


def raised(result: Result, ratchet: Ratchet) -> Ratchet:
    """The ratchet with what is better now, and with rows that are new."""
    steps = dict(ratchet.get(result.benchmark, {}))
    for key, ratio in result.ratios().items():
        old = steps.get(key)
        if old is None:
            steps[key] = Step(best=ratio, margin=MARGINS[key.rpartition(".")[2]])
        elif ratio > old.best:
            steps[key] = Step(best=ratio, margin=old.margin)
    return {**ratchet, result.benchmark: steps}


def read_ratchet(path: Path) -> Ratchet:
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Step]])


def write_ratchet(path: Path, ratchet: Ratchet) -> None:
    rounded = {
        name: {key: Step(best=round(step.best, 2), margin=step.margin) for key, step in sorted(steps.items())}
        for name, steps in sorted(ratchet.items())
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounded), indent=2) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare a benchmark's ratios with the best that were reached."
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--ratchet", type=Path, default=RATCHET)
    parser.add_argument("--update", action="store_true", help="raise the ratchet where the result is better")
    chosen = parser.parse_args(arguments)
    ratchet = before = read_ratchet(chosen.ratchet)
    found: list[str] = []
    for path in chosen.results:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        found += setbacks(result, ratchet)
        ratchet = raised(result, ratchet)
    for sentence in found:
        print(sentence, file=sys.stderr)
    if chosen.update and ratchet != before:
        write_ratchet(chosen.ratchet, ratchet)
        print(f"{chosen.ratchet} was raised.")
    if not found:
        print("No step back.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
