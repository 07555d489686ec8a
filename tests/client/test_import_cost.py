"""The cost of importing the client, and modules that it must not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TIMED = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
_BASELINE = "import dataclasses, json"
_CLIENT = "import fumehood.client"
RATIO = 3


def test_importing_the_client_is_cheap(tmp_path: Path) -> None:
    # As users have it: with bytecode, whatever the environment of the tests says.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def seconds(statement: str) -> float:
        command = [sys.executable, "-c", _TIMED.format(statement)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return float(done.stdout)

    seconds(_CLIENT)
    pairs = [(seconds(_BASELINE), seconds(_CLIENT)) for _ in range(5)]
    baseline, client = (min(times) for times in zip(*pairs, strict=True))
    assert client <= RATIO * baseline, f"{client / baseline:.2f} times as long as {_BASELINE!r}"


@pytest.mark.parametrize("module", ["fumehood.client", "fumehood.client.adapters.openai"])
def test_no_sdk_and_no_server_module_is_imported(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    ours = {name for name in loaded if name.startswith("fumehood.")}
    assert all(name.startswith("fumehood.client") for name in ours)
    strangers = {
        "openai",
        "opentelemetry",
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
