"""The client and the real server with a bad network between them."""

import random
from collections.abc import AsyncGenerator

import pytest

from fumehood.protocol.sandbox.sandbox_errors import FileRefused, SandboxGone, SandboxPayloadTooLarge
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    SandboxSpec,
    Stdout,
)
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_client.server_connection import SandboxConnectionTimeouts
from tests.support.relay import relay
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import run_server

_TALKS = """
import time
for number in range(40):
    print(number, "x" * 500, flush=True)
    time.sleep(0.005)
class Picture:
    def _repr_png_(self): return b"\\x89PNG" * 200_000
display(Picture())
open("runs.txt", "a").write("x")
"""


async def test_events_come_once_each_through_a_network_that_cuts() -> None:
    chance = random.Random(3)
    async with (
        run_server(settings(preload=())) as server,
        relay(int(server.where.rpartition(":")[2])) as wire,
        RemoteSandboxProvider(
            f"http://127.0.0.1:{wire.port}", timeouts=SandboxConnectionTimeouts(retries=30, backoff=0)
        ) as remote,
    ):
        sandbox = await remote.attach(await remote.create(SandboxSpec()))
        wire.cuts.extend(chance.randrange(150, 3000) for _ in range(25))
        wire.drop()
        request = ExecuteRequest(code=_TALKS, execution_id="talk")
        seen: list[ExecutionEvent] = [event async for event in sandbox.execute(request)]
        assert wire.connections > 10
        text = "".join(event.text for event in seen if isinstance(event, Stdout))
        assert [line.split()[0] for line in text.splitlines()[:40]] == [str(number) for number in range(40)]
        (shown,) = [event for event in seen if isinstance(event, DisplayData)]
        assert len(shown.data["image/png"]) > 1 << 20
        assert isinstance(seen[-1], ExecutionEnd)
        assert [event async for event in sandbox.follow("talk")] == seen
        assert b"".join([piece async for piece in sandbox.read_file("runs.txt")]) == b"x"


async def _endless() -> AsyncGenerator[bytes]:
    while True:
        yield b"x" * 100_000


async def test_uploads_that_are_refused_half_way_are_told_why() -> None:
    async with (
        run_server(settings(preload=(), file_bytes=5 << 20)) as server,
        RemoteSandboxProvider(server.where, timeouts=SandboxConnectionTimeouts(retries=0)) as remote,
    ):
        ref = await remote.create(SandboxSpec())
        sandbox = await remote.attach(ref)
        for _ in range(3):
            with pytest.raises(SandboxPayloadTooLarge):
                await sandbox.write_file("large", _endless())
            with pytest.raises(FileRefused, match="damaged"):
                await sandbox.unpack_archive(_endless(), kind="tar.gz")
            with pytest.raises(FileRefused):
                await sandbox.write_file("../up", _endless())
        assert (await sandbox.list_files()).files == []
        await remote.destroy(ref)
        with pytest.raises(SandboxGone):
            await sandbox.write_file("large", _endless())


async def test_signs_of_life_keep_a_silent_call_alive() -> None:
    async with (
        run_server(settings(preload=()), keepalive_seconds=0.05) as server,
        RemoteSandboxProvider(
            server.where, timeouts=SandboxConnectionTimeouts(read=0.4, retries=0)
        ) as remote,
    ):
        sandbox = await remote.attach(await remote.create(SandboxSpec()))
        request = ExecuteRequest(code="import time; time.sleep(1.5); print('done')")
        events = [event async for event in sandbox.execute(request)]
        assert events[0] == Stdout("done\n")
