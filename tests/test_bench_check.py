"""When a benchmark counts as a step back, and how the ratchet rises."""

from pathlib import Path

import msgspec
import pytest

from tools import bench_check
from tools.bench_check import Ratchet, Result, ResultRow, Step

ROOT = Path(__file__).resolve().parent.parent


def _result(**ratios: float) -> Result:
    rows = {name: ResultRow(ratios={"p50": ratio}, goals={"p50": 1.0}) for name, ratio in ratios.items()}
    return Result(benchmark="sandbox", rows=rows)


def _ratchet(**best: float) -> Ratchet:
    return {"sandbox": {f"{name}.p50": Step(best=ratio, margin=0.25) for name, ratio in best.items()}}


def test_within_the_margin_is_no_step_back() -> None:
    assert bench_check.setbacks(_result(start=75.0), _ratchet(start=100.0)) == []
    others: Ratchet = {"gateway": {"start.p50": Step(best=9.0, margin=0.1)}}
    assert bench_check.setbacks(_result(start=1.0), others) == []


def test_a_step_back_names_the_row_and_how_much_is_lost() -> None:
    (sentence,) = bench_check.setbacks(_result(start=74.0, call=9.0), _ratchet(start=100.0, call=9.0))
    assert sentence == "sandbox start.p50: 74x, 26% below the best so far, 100x; 25% is allowed."


def test_a_row_that_is_no_longer_measured_is_a_step_back() -> None:
    (sentence,) = bench_check.setbacks(_result(call=9.0), _ratchet(start=100.0, call=9.0))
    assert "start.p50: was not measured" in sentence


@pytest.mark.parametrize(
    ("row", "compared"),
    [
        (ResultRow(ratios={"p50": 5.0, "p99": 0.1}, goals={"p50": 1.0}), {"row.p50": 5.0}),
        (ResultRow(ratios={"mean": 0.8}, limits={"mean": 80.0}), {"row.mean": 0.8}),
        (ResultRow(ratios={"p50": 5.0}, goals={"p50": 1.0}, gated=False), {}),
    ],
    ids=["goal", "limit", "without a ratchet"],
)
def test_gated_ratios_with_a_goal_or_a_limit_are_compared(row: ResultRow, compared: dict[str, float]) -> None:
    result = Result("sandbox", {"row": row})
    assert result.ratios() == compared
    assert bench_check.raised(result, {})["sandbox"].keys() == compared.keys()


def test_the_ratchet_rises_and_never_falls() -> None:
    raised = bench_check.raised(_result(start=120.0, call=5.0), _ratchet(start=100.0, call=9.0))
    assert raised["sandbox"] == {
        "start.p50": Step(best=120.0, margin=0.25),
        "call.p50": Step(best=9.0, margin=0.25),
    }


def test_a_new_row_gets_the_margin_of_its_measure() -> None:
    raised = bench_check.raised(_result(start=3.0), {"gateway": {}})
    assert raised == {
        "gateway": {},
        "sandbox": {"start.p50": Step(best=3.0, margin=bench_check.MARGINS["p50"])},
    }


def _run(tmp_path: Path, ratio: float, *options: str) -> int:
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(_result(start=ratio)))
    return bench_check.main([str(path), "--ratchet", str(tmp_path / "ratchet.json"), *options])


def test_the_command_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, 10.0, "--update") == 0
    assert _run(tmp_path, 8.0, "--update") == 0
    assert bench_check.read_ratchet(tmp_path / "ratchet.json")["sandbox"]["start.p50"].best == 10.0
    capsys.readouterr()
    assert _run(tmp_path, 5.0, "--update") == 1
    assert "50% below the best so far" in capsys.readouterr().err
    assert bench_check.read_ratchet(tmp_path / "ratchet.json")["sandbox"]["start.p50"].best == 10.0


def test_without_update_nothing_is_written(tmp_path: Path) -> None:
    assert _run(tmp_path, 10.0) == 0
    assert not (tmp_path / "ratchet.json").exists()


def test_the_kept_ratchet_can_be_read() -> None:
    ratchet = bench_check.read_ratchet(ROOT / bench_check.RATCHET)
    assert ratchet["sandbox"]
    assert all(step.least < step.best for step in ratchet["sandbox"].values())
