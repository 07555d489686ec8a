"""Ratios and goals of benchmark rows."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import result_table
from benchmarks.harness.result_table import ResultRow, SampleSet

HUNDRED = [float(value) for value in range(1, 101)]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_a_percentile_is_a_measured_value(share: float, value: float) -> None:
    assert result_table.percentile(HUNDRED, share) == value


def test_the_tail_of_a_few_samples_is_their_worst() -> None:
    assert SampleSet("", [3.0, 1.0, 2.0]).statistic("p99") == 3.0


def _row(ours: float, theirs: float) -> ResultRow:
    return ResultRow(
        "start", "a start", "ms", SampleSet("ours", [ours]), SampleSet("theirs", [theirs]), {"p50": 10}
    )


def test_a_limit_is_the_most_that_ours_may_take() -> None:
    row = ResultRow(
        "stop", "a stop", "s", SampleSet("ours", [0.2, 1.2]), limits={"max": 1}, measures=("p50", "max")
    )
    assert row.meets_goals() == {"max": False}
    assert row.ratio("p50") is None


def test_json_and_table_say_the_same(tmp_path: Path) -> None:
    row = _row(2.0, 50.0)
    path = tmp_path / "new" / "result.json"
    result_table.write_json(path, "sandbox", {"cores": 2}, [row])
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["machine"] == {"cores": 2}
    assert written["rows"]["start"]["ratios"] == {"p50": 25.0, "p99": 25.0}
    assert written["rows"]["start"]["reached"] == {"p50": True}
    console = Console(width=150, file=io.StringIO())
    with console.capture() as shown:
        console.print(result_table.build_table("sandbox", [row]))
    assert "25x / 25x" in shown.get()


def test_a_goal_is_the_least_ratio_and_a_limit_counts_beside_it() -> None:
    assert _row(1.0, 10.0).meets_goals() == {"p50": True}
    assert _row(1.01, 10.0).meets_goals() == {"p50": False}
    row = replace(_row(1.0, 10.0), limits={"p50": 0.5})
    assert row.meets_goals() == {"p50": False}
    assert replace(row, limits={"p50": 2.0}).meets_goals() == {"p50": True}
    assert replace(row, limits={"p50": 2.0}, goals={"p50": 11}).meets_goals() == {"p50": False}
