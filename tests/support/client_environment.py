"""The environment of clients that cannot share one with the tests; `make setup-clients` makes it."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "e2e" / "clients" / "python"
PROGRAMS = ROOT / ".clients" / "bin"

needed = pytest.mark.skipif(
    not (PROGRAMS / "python").is_file(), reason="make setup-clients fetches these clients"
)


def run(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a program of that environment prints."""
    done = subprocess.run(
        [PROGRAMS / program, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch the prices of models
            **(environment or {}),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
