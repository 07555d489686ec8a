"""What it costs to import the client, and what it must not bring along; imports the standard library."""

import statistics
import subprocess
import sys

import pytest

_TIMED = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
_BASELINE = "import dataclasses, json"
_CLIENT = "import fumehood.client"
RATIO = 3


def seconds(statement: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(statement)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_importing_the_client_is_cheap() -> None:
    pairs = [(seconds(_BASELINE), seconds(_CLIENT)) for _ in range(7)]
    ratio = statistics.median(client / baseline for baseline, client in pairs)
    assert ratio <= RATIO, f"importing the client takes {ratio:.2f} times as long as {_BASELINE!r}"


@pytest.mark.parametrize("module", ["fumehood.client", "fumehood.client.adapters.openai"])
def test_no_sdk_and_no_server_comes_along(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    ours = {name for name in loaded if name.startswith("fumehood.")}
    assert all(name.startswith("fumehood.client") for name in ours)
    strangers = {
        "openai",
        "pydantic",
        "httpx",
        "aiohttp",
        "starlette",
        "uvicorn",
        "cryptography",
        "yaml",
        "asyncio",
    }
    assert not loaded & strangers
