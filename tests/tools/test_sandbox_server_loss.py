"""A sandbox server that goes away in the middle of a call."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fumehood.interfaces import SandboxProvider, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.sandbox_client.local_server_provider import LocalServerProvider
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from tests.support.interpreter_harness import CallRecord, InterpreterHarness, local_server_settings
from tests.support.relay import Relay
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import run_server

SOON = 6.0  # seconds: two and a half, on a machine that has other things to do
CODE = """
import time
time.sleep(0.3)
print("so far", flush=True)
open("begun", "w").close()
time.sleep(600)
"""
MAY_HAVE_RUN = "The code may have run, in part or to its end: check what it did before you run it again."


@pytest.fixture
def short_path() -> Generator[Path]:
    """A socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@asynccontextmanager
async def server_process(socket: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A sandbox server of somebody else's."""
    chosen = local_server_settings()
    process = await asyncio.create_subprocess_exec(
        *chosen.command(socket),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=chosen.environ(),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_until_begun(interpreter: InterpreterHarness, provider: SandboxProvider) -> None:
    """Until the code has come so far; nothing else tells."""
    async with asyncio.timeout(60):
        while True:
            for record in await interpreter.store.find_containers():
                if record.sandbox:
                    sandbox = await provider.attach(SandboxRef(record.sandbox, record.address))
                    if "begun" in [file.path for file in (await sandbox.list_files()).files]:
                        return
            await asyncio.sleep(0.02)


def assert_told(called: CallRecord, seconds: float) -> None:
    assert seconds < SOON
    assert called.item.status == "failed"
    assert called.execution.exit_code == -1
    assert called.execution.stdout == "so far\n"
    assert called.execution.duration_ms >= 300
    assert called.execution.duration_ms < 60_000
    assert MAY_HAVE_RUN in called.model_text
    assert MAY_HAVE_RUN in called.execution.stderr


@pytest.mark.parametrize("kind", ["remote", "local"])
async def test_a_server_that_is_killed_in_the_middle_of_a_call(short_path: Path, kind: str) -> None:
    async with server_process(short_path / "s") as process:
        provider: RemoteSandboxProvider | LocalServerProvider = RemoteSandboxProvider(
            f"unix:{short_path / 's'}"
        )
        victim = process.pid
        if kind == "local":
            provider = LocalServerProvider(local_server_settings())
            await provider.start()
            assert provider.server_pid is not None
            victim = provider.server_pid
        try:
            interpreter = InterpreterHarness(provider)
            running = asyncio.ensure_future(interpreter.run(CODE))
            await wait_until_begun(interpreter, provider)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            assert_told(await running, time.monotonic() - began)
        finally:
            await provider.close()


async def test_a_call_that_was_never_sent_did_not_run(short_path: Path) -> None:
    async with RemoteSandboxProvider(f"unix:{short_path / 'nobody'}") as provider:
        called = await InterpreterHarness(provider).run("print(1)")
    assert called.item.status == "failed"
    assert called.execution.duration_ms == 0
    assert called.model_text == (
        "The sandboxes cannot be reached at the moment; try again later. The code did not run.\nExit code: -1"
    )


async def test_a_server_that_is_away_for_a_moment_is_followed_where_it_was() -> None:
    """Connections are cut, and refused for a second; the call goes on and is told once, from its first to last word."""
    code = "import time\nopen('begun', 'w').close()\nfor n in range(30):\n    print(n, flush=True); time.sleep(0.1)"
    async with run_server(settings(preload=())) as server:
        wire = Relay(int(server.where.rpartition(":")[2]), [])
        listener = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with RemoteSandboxProvider(f"http://127.0.0.1:{port}") as provider:
            interpreter = InterpreterHarness(provider)
            running = asyncio.ensure_future(interpreter.run(code))
            async with RemoteSandboxProvider(server.where) as direct:
                await wait_until_begun(interpreter, direct)
            listener.close()
            wire.drop()
            with pytest.raises(SandboxError):
                await provider.health()
            await asyncio.sleep(1)
            listener = await asyncio.start_server(wire.serve, "127.0.0.1", port)
            called = await running
        listener.close()
        await wire.stop()
    assert called.item.status == "completed"
    assert called.execution.stdout == "".join(f"{number}\n" for number in range(30))
