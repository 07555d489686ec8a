"""The demonstration that `make demo` runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandbox_runs import has_cgroups

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


def check(printed: str, *, bounded: bool) -> None:
    assert ("runs without the limit" not in " ".join(printed.split())) == bounded
    for event in ("code_interpreter_call_code.delta", "code_interpreter_call.interpreting", "completed"):
        assert printed.count(f"  response.{event}\n") == 2, event
    assert "acetone" in printed
    assert "300 measurements, the highest of hexane" in printed
    lines = [line for line in printed.splitlines() if line.startswith("Saved ")]
    chart, table = (Path(line.removeprefix("Saved ")) for line in lines)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert table.read_text().startswith("reagent,count,mean,max\n")
    if chart.parent.name != "demo-output":
        shutil.rmtree(chart.parent)


def test_demo_goes_as_it_should() -> None:
    check(run(sys.executable, ROOT / "examples/demo.py"), bounded=has_cgroups())


@pytest.mark.root
@pytest.mark.slow
def test_demo_of_a_user_who_may_neither_bound_memory_nor_write_here() -> None:
    helper = ROOT / "tests/support/unprivileged_user.py"
    printed = run(sys.executable, helper, "--", sys.executable, ROOT / "examples/demo.py")
    check(printed, bounded=False)
    assert f"Saved {ROOT}" not in printed
