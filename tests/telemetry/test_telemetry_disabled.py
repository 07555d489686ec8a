"""A gateway without telemetry loads no module of it."""

import subprocess
import sys
from pathlib import Path

_LOOKS = """
import asyncio, sys
from fumehood.gateway_config import load_config
from fumehood.wiring import assemble_gateway

overrides = {"providers.code_interpreter.enabled": False, "storage.url": "sqlite:///gateway.db"}

async def look():
    async with assemble_gateway(load_config(None, {}, overrides), {}):
        print([name for name in sys.modules if name.startswith(("opentelemetry", "fumehood.telemetry"))])

asyncio.run(look())
"""


def test_no_telemetry_module_is_loaded(tmp_path: Path) -> None:
    """So it cannot be on the way of an event, a turn or a call."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOKS], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
