"""The demonstration that `make demo` runs; imports only the standard library and the tests' support."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandboxes import has_cgroups

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def check(printed: str, *, bounded: bool) -> None:
    assert ("runs without that bound" not in printed) == bounded
    assert "KeyError: 'hexane'" in printed
    assert "timeout after 2" in printed
    assert "300 measurements, stopped in round" in printed
    lines = [line for line in printed.splitlines() if "The chart lies in" in line]
    charts = [Path(line.rpartition(" lies in ")[2]) for line in lines]
    assert len(charts) == 2
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in charts)
    if charts[0].parent.name != "demo-output":
        shutil.rmtree(charts[0].parent)


def test_demo_goes_as_it_should() -> None:
    check(run(sys.executable, ROOT / "examples/demo.py"), bounded=has_cgroups())


@pytest.mark.root
def test_demo_of_a_user_who_may_neither_bound_memory_nor_write_here() -> None:
    helper = ROOT / "tests/support/ordinary_user.py"
    printed = run(sys.executable, helper, "--", sys.executable, ROOT / "examples/demo.py")
    check(printed, bounded=False)
    assert f"lies in {ROOT}" not in printed
