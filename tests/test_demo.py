"""The demonstration that `make demo` runs; imports only the standard library."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_demo_goes_as_it_should() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/demo.py"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KeyError: 'hexane'" in done.stdout
    assert "timeout after 2" in done.stdout
    assert "300 measurements, stopped in round" in done.stdout
    charts = [
        line.rpartition(" lies in ")[2] for line in done.stdout.splitlines() if "The chart lies in" in line
    ]
    assert len(charts) == 2
    assert all(Path(chart).read_bytes().startswith(b"\x89PNG") for chart in charts)
