"""The client of the sandbox protocol when servers and networks misbehave."""

import asyncio
import gc
import logging
import random
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.bundle_encoding import BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    InvalidServerToken,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    SandboxSpec,
    Stdout,
)
from fumehood.sandbox_client.remote_provider import RemoteSandbox, RemoteSandboxProvider
from fumehood.sandbox_client.server_connection import (
    SandboxConnectError,
    SandboxConnectionLost,
    SandboxConnectionTimeouts,
    SandboxReadTimeout,
)
from fumehood.testing import SandboxAction, ScriptedExecution, ScriptedSandboxProvider
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from tests.support.relay import relay
from tests.support.sandbox_http import ProviderServer, ServerBehaviour, serve_provider

TOKEN = "s3cret-t0ken"
HASTY = SandboxConnectionTimeouts(response=5, read=5, retries=3, backoff=0)
OK = ExecutionEnd(status="ok", exit_code=0, duration_ms=1, state_kept=True)


async def create_sandbox(remote: RemoteSandboxProvider) -> RemoteSandbox:
    return await remote.attach(await remote.create(SandboxSpec(), "one"))


@asynccontextmanager
async def scripted_server(
    *actions: SandboxAction, behaviour: ServerBehaviour | None = None
) -> AsyncGenerator[tuple[ScriptedSandboxProvider, ProviderServer]]:
    async with ScriptedSandboxProvider(repeatable=[ScriptedExecution(None, actions)]) as provider:
        await provider.create(SandboxSpec(), "one")
        async with serve_provider(provider, behaviour) as server:
            yield provider, server


async def _nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


type Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(serve: Serve, port: int = 0) -> AsyncGenerator[str]:
    """Whatever it likes to send, after the request's head has come."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(content: bytes) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()

    return serve


# ---- streams that break ---------------------------------------------------------------------------------------

_texts = st.lists(st.text(max_size=30), max_size=8)


@settings(max_examples=60)
@given(
    texts=_texts,
    cuts=st.lists(st.integers(0, 900), max_size=6),
    reset=st.booleans(),
    chunk_size=st.integers(1, 200),
    blank_lines=st.integers(0, 2),
)
def test_events_come_once_each_however_connections_break(
    texts: list[str], cuts: list[int], reset: bool, chunk_size: int, blank_lines: int
) -> None:
    async def run() -> None:
        events: list[ExecutionEvent] = [*(Stdout(text) for text in texts), OK]
        behaviour = ServerBehaviour(chunk_size=chunk_size, blank_lines=blank_lines)
        timeouts = SandboxConnectionTimeouts(retries=len(cuts) + 2, backoff=0)
        async with (
            scripted_server(*events, behaviour=behaviour) as (provider, server),
            relay(server.port, reset=reset) as proxy,
            RemoteSandboxProvider(f"http://127.0.0.1:{proxy.port}", timeouts=timeouts) as remote,
        ):
            sandbox = await create_sandbox(remote)
            proxy.cuts.extend(cuts)
            proxy.drop()
            assert [event async for event in sandbox.execute(ExecuteRequest(code="x"))] == events
            assert len(provider.requests) == 1, "the code ran more than once"

    asyncio.run(run())


@pytest.mark.parametrize("reset", [False, True])
async def test_long_output_through_a_network_that_cuts_everywhere(reset: bool) -> None:
    chance = random.Random(7)
    events: list[ExecutionEvent] = [Stdout("x" * chance.randrange(3000)) for _ in range(150)]
    events += [DisplayData({"image/png": "A" * (1 << 20)}), OK]
    cuts = [chance.randrange(200, 20_000) for _ in range(40)]
    async with (
        scripted_server(*events) as (provider, server),
        relay(server.port, reset=reset) as proxy,
        RemoteSandboxProvider(
            f"http://127.0.0.1:{proxy.port}", timeouts=SandboxConnectionTimeouts(retries=30, backoff=0)
        ) as remote,
    ):
        sandbox = await create_sandbox(remote)
        proxy.cuts.extend(cuts)
        proxy.drop()
        assert [event async for event in sandbox.execute(ExecuteRequest(code="x"))] == events
        assert proxy.connections > 10
        assert len(provider.requests) == 1


async def test_one_line_of_many_megabytes() -> None:
    shown = DisplayData({"image/png": "A" * (12 << 20)})
    async with (
        scripted_server(shown, behaviour=ServerBehaviour(chunk_size=100_000)) as (_, server),
        RemoteSandboxProvider(server.url) as remote,
    ):
        sandbox = await create_sandbox(remote)
        first, last = [event async for event in sandbox.execute(ExecuteRequest(code="x"))]
        assert first == shown
        assert isinstance(last, ExecutionEnd)


async def test_a_network_that_never_mends_is_given_up() -> None:
    async with (
        scripted_server(Stdout("x")) as (_, server),
        relay(server.port) as proxy,
        RemoteSandboxProvider(f"http://127.0.0.1:{proxy.port}", timeouts=HASTY) as remote,
    ):
        sandbox = await create_sandbox(remote)
        proxy.cuts.extend([100] * 100)
        proxy.drop()
        with pytest.raises(SandboxConnectionLost, match="broke") as caught:
            [event async for event in sandbox.execute(ExecuteRequest(code="x"))]
        assert not caught.value.nothing_started
        assert caught.value.disconnected_at is not None
        assert HASTY.retries < proxy.connections < 3 * HASTY.retries
        with pytest.raises(SandboxServerUnreachable):
            await remote.list_sandboxes()


async def test_a_call_survives_a_server_that_answers_for_another() -> None:
    """A proxy in front of the server has nothing behind it for a moment."""
    trouble = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with raw_server(answering(trouble)) as url, RemoteSandboxProvider(url, timeouts=HASTY) as remote:
        with pytest.raises(SandboxConnectionLost, match="answers 502"):
            await remote.create(SandboxSpec())


async def test_a_server_that_starts_late_is_waited_for() -> None:
    async with raw_server(_nothing) as url:
        pass
    line = b'{"type":"end","status":"ok","exit_code":0,"duration_ms":1,"state_kept":true}\n'
    head = _OURS + b"Content-Length: %d\r\n\r\n" % len(line)
    async with RemoteSandboxProvider(url) as remote:
        events = RemoteSandbox(remote.connection, "one").execute(ExecuteRequest(code="x"))
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.2)
        assert remote.failures
        async with raw_server(answering(head + line), int(url.rpartition(":")[2])):
            assert await first == OK


async def test_the_server_ends_in_mid_stream() -> None:
    go = asyncio.Event()
    provider = ScriptedSandboxProvider(repeatable=[ScriptedExecution(None, [Stdout("first"), go])])
    await provider.create(SandboxSpec(), "one")
    async with serve_provider(provider) as server:
        remote = RemoteSandboxProvider(server.url, timeouts=HASTY)
        sandbox = await create_sandbox(remote)
        events = sandbox.execute(ExecuteRequest(code="x"))
        assert await anext(events) == Stdout("first")
    with pytest.raises(SandboxServerUnreachable):
        await anext(events)
    with pytest.raises(SandboxConnectError, match="cannot be reached"):
        await sandbox.list_files()
    await remote.close()
    await provider.close()


async def test_the_sandbox_ends_in_mid_stream() -> None:
    async with (
        scripted_server(Stdout("first"), asyncio.Event()) as (provider, server),
        RemoteSandboxProvider(server.url) as remote,
    ):
        sandbox = await create_sandbox(remote)
        events = sandbox.execute(ExecuteRequest(code="x"))
        assert await anext(events) == Stdout("first")
        await provider.end_sandbox("one", "somebody pulled the plug")
        end = await anext(events)
        assert isinstance(end, ExecutionEnd)
        assert end.status == "lost"
        with pytest.raises(SandboxGone, match="somebody pulled the plug"):
            await remote.attach(SandboxRef("one"))


async def test_a_silent_stream_is_taken_up_again_and_then_given_up() -> None:
    head = b"HTTP/1.1 200 OK\r\nfumehood-sandbox-protocol: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(b"")
        writer.write(head)
        await reader.read()

    async with raw_server(serve) as url:
        timeouts = SandboxConnectionTimeouts(response=5, read=0.1, retries=2, backoff=0)
        async with RemoteSandboxProvider(url, timeouts=timeouts) as remote:
            sandbox = RemoteSandbox(remote.connection, "one")
            with pytest.raises(SandboxReadTimeout, match="stopped answering"):
                [event async for event in sandbox.execute(ExecuteRequest(code="x"))]
    assert len(asked) == 3


# ---- servers that are none ------------------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    async with raw_server(_nothing) as url:
        pass
    async with RemoteSandboxProvider(url) as remote:
        with pytest.raises(SandboxConnectError) as caught:
            await remote.create(SandboxSpec())
        assert str(caught.value) == f"The sandbox server at {url} cannot be reached: Connection refused."
    async with RemoteSandboxProvider(url, timeouts=HASTY) as remote:
        sandbox = RemoteSandbox(remote.connection, "one")
        with pytest.raises(SandboxConnectError) as caught:
            [event async for event in sandbox.execute(ExecuteRequest(code="x"))]
        assert caught.value.nothing_started
        assert remote.failures == HASTY.retries + 1
    async with RemoteSandboxProvider("unix:/nowhere/socket") as remote:
        with pytest.raises(SandboxConnectError, match="No such file"):
            await remote.list_sandboxes()


_OURS = b"HTTP/1.1 200 OK\r\nfumehood-sandbox-protocol: 1\r\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not speak HTTP"),
        (b"\x16\x03\x01\x00\xff" * 50, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "is not a sandbox server"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "is not a sandbox server"),
        (
            b"HTTP/1.1 200 OK\r\nfumehood-sandbox-protocol: 2\r\nContent-Length: 2\r\n\r\n{}",
            "speaks version 2 of the sandbox protocol, this client version 1",
        ),
        (_OURS + b"Content-Length: 9\r\n\r\nnot\x1b json", "violates the sandbox protocol"),
        (_OURS + b"Content-Length: 2\r\n\r\n{}", "violates the sandbox protocol"),
        (
            _OURS.replace(b"200 OK", b"500 No") + b"Content-Length: 4\r\n\r\noops",
            "status 500 without an error body",
        ),
        (b"", "broke"),
    ],
    ids=["ssh", "tls", "http", "redirect", "version", "garbage", "empty", "error", "nothing"],
)
async def test_what_is_no_sandbox_server(answer: bytes, says: str) -> None:
    async with (
        raw_server(answering(answer)) as url,
        RemoteSandboxProvider(url, TOKEN, timeouts=HASTY) as remote,
    ):
        with pytest.raises(SandboxServerUnreachable) as caught:
            await remote.list_sandboxes()
        assert says in str(caught.value)
        assert str(caught.value).isprintable()
        assert TOKEN not in "".join(traceback.format_exception(caught.value))
        sandbox = RemoteSandbox(remote.connection, "one")
        with pytest.raises(SandboxServerUnreachable):
            [event async for event in sandbox.execute(ExecuteRequest(code="x"))]


async def test_garbage_in_the_middle_of_events() -> None:
    line = b'{"type":"stdout","text":"x"}\n{"type":"surprise"}\n'
    head = _OURS + b"Content-Length: %d\r\n\r\n" % len(line)
    async with raw_server(answering(head + line)) as url, RemoteSandboxProvider(url) as remote:
        sandbox = RemoteSandbox(remote.connection, "one")
        events = sandbox.execute(ExecuteRequest(code="x"))
        assert await anext(events) == Stdout("x")
        with pytest.raises(SandboxServerUnreachable, match="cannot decode an event"):
            await anext(events)


async def test_a_slow_server_is_waited_for() -> None:
    line = b'{"type":"end","status":"ok","exit_code":0,"duration_ms":1,"state_kept":true}\n'

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = _OURS + b"Content-Length: %d\r\n\r\n" % (len(line) + 60)
        for byte in head + b"\n" * 60 + line:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.002)  # all in all much longer than one may be silent

    async with (
        raw_server(serve) as url,
        RemoteSandboxProvider(url, timeouts=SandboxConnectionTimeouts(read=0.2, retries=0)) as remote,
    ):
        sandbox = RemoteSandbox(remote.connection, "one")
        (end,) = [event async for event in sandbox.execute(ExecuteRequest(code="x"))]
        assert end == OK


# ---- tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_a_wrong_token_is_told(token: str | None) -> None:
    async with (
        scripted_server(behaviour=ServerBehaviour(token=TOKEN)) as (_, server),
        RemoteSandboxProvider(server.url, token) as remote,
    ):
        await assert_each_raises(
            InvalidServerToken,
            remote.create(SandboxSpec()),
            remote.list_sandboxes(),
        )


async def test_the_token_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with RemoteSandboxProvider("http://127.0.0.1:1", TOKEN, timeouts=HASTY) as remote:
        with pytest.raises(SandboxServerUnreachable) as caught:
            await remote.list_sandboxes()
        shown = [repr(remote), repr(remote.connection), repr(caught.value), caplog.text]
        shown += traceback.format_exception(caught.value)
        assert TOKEN not in "".join(shown)
    for bad in ("", "with space", "line\nbreak", "\u00e4"):
        with pytest.raises(ValueError, match="token") as refused:
            RemoteSandboxProvider("http://127.0.0.1:1", bad)
        assert not bad or bad not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "ftp://host", "unix:relative", "http://", "http://user:pass@host", "http://h:x"],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        RemoteSandboxProvider(url)
    assert "pass@" not in str(caught.value)


# ---- behaviour --------------------------------------------------------------------------------------------------


async def test_connections_are_used_again() -> None:
    async with (
        scripted_server(Stdout("x")) as (_, server),
        relay(server.port) as proxy,
        RemoteSandboxProvider(f"http://127.0.0.1:{proxy.port}") as remote,
    ):
        sandbox = await create_sandbox(remote)
        for _ in range(5):
            assert len([event async for event in sandbox.execute(ExecuteRequest(code="x"))]) == 2
            await sandbox.write_file("a.txt", b"x" * 300_000)
            assert [piece async for piece in sandbox.read_file("a.txt")]
        assert proxy.connections == 1


async def test_uploads_go_no_faster_than_they_are_taken() -> None:
    taken = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 100_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with raw_server(serve) as url, RemoteSandboxProvider(url) as remote:
        writing = asyncio.ensure_future(RemoteSandbox(remote.connection, "one").write_file("f", endless()))
        before = -1
        while taken != before:
            before = taken
            await asyncio.sleep(0.1)
        assert taken < 200
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing


async def test_an_upload_that_is_refused_half_way() -> None:
    refusal = (
        b'{"error":{"message":"The file is too large.","type":"invalid_request_error","code":"too_large"}}'
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(200_000)
        writer.write(
            _OURS.replace(b"200 OK", b"413 No") + b"Content-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
        )
        await writer.drain()
        while await reader.read(100_000):
            pass

    async def endless() -> AsyncGenerator[bytes]:
        while True:
            yield b"x" * 100_000

    async with raw_server(serve) as url, RemoteSandboxProvider(url) as remote:
        with pytest.raises(Exception, match="too large"):
            await RemoteSandbox(remote.connection, "one").write_file("f", endless())


async def test_leaving_closes_everything() -> None:
    before = _tasks()
    async with scripted_server(Stdout("x"), asyncio.Event()) as (_, server):
        remote = RemoteSandboxProvider(server.url)
        sandbox = await create_sandbox(remote)
        abandoned = sandbox.execute(ExecuteRequest(code="x", execution_id="a"))
        assert await anext(abandoned) == Stdout("x")
        reading = asyncio.ensure_future(_all(sandbox.follow("a")))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        del abandoned
        gc.collect()
        await remote.close()
        with pytest.raises(SandboxServerUnreachable, match="closed"):
            await remote.list_sandboxes()
    gc.collect()
    await asyncio.sleep(0)
    assert _tasks() == before


def _tasks() -> set[asyncio.Task[object]]:
    """All but those of the test's own server, which ends in its own time."""
    return {task for task in asyncio.all_tasks() if "RequestHandler" not in repr(task)}


async def _all(events: AsyncGenerator[ExecutionEvent]) -> list[ExecutionEvent]:
    return [event async for event in events]


async def test_closing_ends_readers() -> None:
    async with scripted_server(Stdout("x"), asyncio.Event()) as (_, server):
        remote = RemoteSandboxProvider(server.url, timeouts=HASTY)
        sandbox = await create_sandbox(remote)
        events = sandbox.execute(ExecuteRequest(code="x"))
        assert await anext(events) == Stdout("x")
        await remote.close()
        with pytest.raises(SandboxServerUnreachable):
            await anext(events)


async def test_closing_wakes_whoever_reads() -> None:
    async with scripted_server(Stdout("x"), asyncio.Event()) as (_, server):
        remote = RemoteSandboxProvider(server.url)
        sandbox = await create_sandbox(remote)
        events = sandbox.execute(ExecuteRequest(code="x"))
        assert await anext(events) == Stdout("x")
        reading = asyncio.ensure_future(anext(events, None))
        done, _ = await asyncio.wait({reading}, timeout=0.05)
        assert not done
        await remote.close()
        with pytest.raises(SandboxServerUnreachable, match="has been closed"):
            await asyncio.wait_for(reading, 5)


async def test_a_lost_answer_to_a_delete_is_no_missing_file() -> None:
    async with (
        scripted_server() as (_, server),
        relay(server.port) as proxy,
        RemoteSandboxProvider(f"http://127.0.0.1:{proxy.port}", timeouts=HASTY) as remote,
    ):
        sandbox = await create_sandbox(remote)
        await sandbox.write_file("a.txt", b"x")
        proxy.cuts.append(10)
        proxy.drop()
        await sandbox.delete_file("a.txt")
        assert (await sandbox.list_files()).files == []
        assert sum(request.startswith("DELETE") for request in server.requests) >= 2


async def test_many_files_are_sent_again_when_the_connection_breaks() -> None:
    sent = 0

    async def files() -> AsyncGenerator[Sequence[BundledFile]]:
        nonlocal sent
        sent += 1
        yield [("a.txt", b"a"), ("b.txt", b"b")]
        yield [("c.txt", b"c")]

    async with (
        scripted_server() as (_, server),
        relay(server.port) as proxy,
        RemoteSandboxProvider(f"http://127.0.0.1:{proxy.port}", timeouts=HASTY) as remote,
    ):
        sandbox = await create_sandbox(remote)
        proxy.cuts.append(10)
        proxy.drop()
        assert (await sandbox.write_files(files)).files == 3
        assert sent >= 2


async def test_requests_that_are_no_text() -> None:
    async with scripted_server() as (_, server), RemoteSandboxProvider(server.url) as remote:
        sandbox = await create_sandbox(remote)
        with pytest.raises(InvalidSandboxRequest):
            [event async for event in sandbox.execute(ExecuteRequest(code="\udcff"))]
        with pytest.raises(SandboxNotFound):
            await remote.attach(SandboxRef("two"))
