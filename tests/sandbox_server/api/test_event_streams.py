"""Event streams over real sockets: live, resumed, slow readers, disconnects; large bodies."""

import asyncio
import json
import resource
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.http_server import web_server
from fumehood.http_server.asgi_exchange import Headers
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import RunningServer, SandboxApiClient, run_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_FOR_GO = """
import os, time
print('waiting', flush=True)
while not os.path.exists('go'): time.sleep(0.01)
print('going on')
"""
JSON_TYPE = {"content-type": "application/json"}
MANY_LINES = "for n in range(1000): print(n, flush=True)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningServer]:
    async with run_server(settings(preload=(), queued_executions=4), keepalive_seconds=0.2) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: RunningServer) -> AsyncIterator[SandboxApiClient]:
    await running.client.create_sandbox("box")
    yield running.client
    await running.client.delete_all()


async def read_lines(response: Any) -> AsyncGenerator[Any]:
    async for line in response.content:
        yield json.loads(line) if line.strip() else None


def execute(client: SandboxApiClient, code: str, execution_id: str) -> Any:
    body = json.dumps({"code": code, "execution_id": execution_id}).encode()
    return client.session.post(client.url("/sandboxes/box/execute"), data=body, headers=JSON_TYPE)


def follow(client: SandboxApiClient, execution_id: str, after: int = -1) -> Any:
    return client.session.get(client.url(f"/sandboxes/box/executions/{execution_id}?after={after}"))


async def read_first(events: AsyncGenerator[Any]) -> Any:
    async for event in events:
        if event is not None:
            return event
    raise AssertionError("it ended without an event")


async def read_rest(events: AsyncGenerator[Any]) -> list[Any]:
    return [event async for event in events if event is not None]


async def signal_go(client: SandboxApiClient) -> None:
    assert (await client.request("PUT", "/sandboxes/box/files/go", b"")).status == 200


async def test_output_that_comes_at_once_is_sent_with_the_headers(
    client: SandboxApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[bool, bytes]] = []
    module: Any = web_server
    start_chunks = module._CycleWriter.start_chunks

    def recorded_start(self: Any, status: int, headers: Headers, body: bytes) -> bool:
        starts.append((start_chunks(self, status, headers, body), body))
        return starts[-1][0]

    monkeypatch.setattr(module._CycleWriter, "start_chunks", recorded_start)
    events = await client.run_code("box", "print(1)", execution_id="quick")
    async with follow(client, "quick") as response:
        assert await read_rest(read_lines(response)) == events
    async with follow(client, "quick", after=len(events) - 1) as response:
        assert await read_rest(read_lines(response)) == []

    _, (was_sent, body), after_the_end = starts
    assert was_sent
    assert [json.loads(line) for line in body.splitlines()] == events
    assert after_the_end == (False, b"")


async def test_events_come_while_the_code_runs(client: SandboxApiClient) -> None:
    async with execute(client, WAIT_FOR_GO, "live") as response:
        events = read_lines(response)
        assert await read_first(events) == {"type": "stdout", "text": "waiting\n"}
        info = (await client.request("GET", "/sandboxes/box")).json
        assert (info["running"], info["waiting"]) == ("live", 0)
        assert (await client.request("GET", "/health")).json["running"] == 1
        await signal_go(client)
        assert [event.get("text", event["type"]) for event in await read_rest(events)] == [
            "going on\n",
            "end",
        ]


async def test_a_silent_execution_gives_signs_of_life(client: SandboxApiClient) -> None:
    async with execute(client, WAIT_FOR_GO, "silent") as response:
        events = read_lines(response)
        await read_first(events)
        assert [await anext(events) for _ in range(3)] == [None, None, None]
        await signal_go(client)
        assert (await read_rest(events))[-1]["status"] == "ok"


async def test_resuming_in_the_middle_after_a_broken_connection(client: SandboxApiClient) -> None:
    async with execute(client, WAIT_FOR_GO + MANY_LINES, "broken") as response:
        events = [await read_first(read_lines(response))]
        response.close()  # in the middle of it
    await signal_go(client)
    while True:  # a reader who leaves after each few events, and comes back
        async with follow(client, "broken", len(events) - 1) as response:
            assert response.headers["fumehood-execution-id"] == "broken"
            async for event in read_lines(response):
                if event is not None:
                    events.append(event)
                if len(events) % 7 == 0:
                    break
        if events[-1]["type"] == "end":
            break
    whole = (await client.request("GET", "/sandboxes/box/executions/broken")).events
    assert events == whole
    text = "".join(event.get("text", "") for event in events)
    assert text == "waiting\ngoing on\n" + "".join(f"{n}\n" for n in range(1000))


async def test_executions_run_one_after_another(client: SandboxApiClient) -> None:
    async with execute(client, "order = []" + WAIT_FOR_GO + "order.append('a')", "a") as one:
        one_lines = read_lines(one)
        await read_first(one_lines)
        others = [execute(client, f"order.append('{name}')", name) for name in "bcde"]
        responses = [await other.__aenter__() for other in others]
        info = (await client.request("GET", "/sandboxes/box")).json
        assert (info["running"], info["waiting"]) == ("a", 4)
        more = await client.request("POST", "/sandboxes/box/execute", {"code": "1"})
        assert more.error == (429, "try_later", None)
        assert more.headers["retry-after"] == "1"
        assert (await client.request("POST", "/sandboxes/box/interrupt?execution_id=d")).json == {
            "interrupted": True
        }
        await signal_go(client)
        await read_rest(one_lines)
        ends = [(await read_rest(read_lines(response)))[-1]["status"] for response in responses]
        for other in others:
            await other.__aexit__(None, None, None)
    assert ends == ["ok", "ok", "interrupted", "ok"]
    assert (await client.run_code("box", "order"))[0]["data"] == {"text/plain": "['a', 'b', 'c', 'e']"}


async def test_deleting_a_sandbox_ends_its_streams(client: SandboxApiClient) -> None:
    async with execute(client, WAIT_FOR_GO, "doomed") as response:
        events = read_lines(response)
        await read_first(events)
        assert (await client.request("DELETE", "/sandboxes/box")).status == 204
        end = (await read_rest(events))[-1]
    assert (end["type"], end["status"], end["state_kept"]) == ("end", "lost", False)


async def test_code_goes_on_when_its_reader_leaves(running: RunningServer, client: SandboxApiClient) -> None:
    async with execute(client, WAIT_FOR_GO, "alone") as response:
        await read_first(read_lines(response))
        response.close()
    await wait_until(lambda: not running.server.open_request_count)
    assert running.service.health().running == 1
    await signal_go(client)
    async with follow(client, "alone") as response:
        assert (await read_rest(read_lines(response)))[-1]["status"] == "ok"


async def test_a_slow_reader_costs_no_memory(running: RunningServer, client: SandboxApiClient) -> None:
    """Displays of 24 MiB that nobody reads are in the log once, and not in buffers of the server too."""
    code = "for n in range(24): display({'text/plain': str(n), 'text/x': 'x' * (1 << 20)}, raw=True)"
    events = await client.run_code("box", code, execution_id="large")
    assert sum(len(event["data"].get("text/x", "")) for event in events[:-1]) == 24 << 20
    del events
    before = _resident()
    writers: list[asyncio.StreamWriter] = []
    for _ in range(8):
        _, writer = await asyncio.open_connection(*_address(running), limit=1 << 10)
        writer.write(b"GET /sandboxes/box/executions/large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        writers.append(writer)
    await wait_until(lambda: running.server.open_request_count >= 8)
    await asyncio.sleep(0.5)  # for what would be written if it were written
    assert running.server.open_request_count == 8
    assert _resident() - before < 8 * 8 << 20
    for writer in writers:
        writer.transport.abort()
    await wait_until(lambda: not running.server.open_request_count)


@pytest.mark.parametrize("size", [200 << 20, pytest.param(1 << 30, marks=pytest.mark.slow)])
async def test_a_large_upload_keeps_memory_flat(client: SandboxApiClient, size: int) -> None:
    await client.create_sandbox("large", memory="4g")
    piece = b"x" * (1 << 18)

    async def content() -> AsyncGenerator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    before = _peak()
    async with client.session.put(client.url("/sandboxes/large/files/large"), data=content()) as response:
        assert (response.status, (await response.json())["size"]) == (200, size)
    taken = 0
    async with client.session.get(client.url("/sandboxes/large/files/large")) as response:
        async for chunk in response.content.iter_any():
            taken += len(chunk)
    assert taken == size
    assert _peak() - before < 48 << 20


async def test_an_upload_that_breaks_off_leaves_nothing(
    running: RunningServer, client: SandboxApiClient
) -> None:
    _, writer = await asyncio.open_connection(*_address(running))
    writer.write(
        b"PUT /sandboxes/box/files/half HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
        + b"x" * 500
    )
    await writer.drain()
    await wait_until(lambda: running.server.open_request_count)
    writer.transport.abort()
    await wait_until(lambda: not running.server.open_request_count)
    assert (await client.request("GET", "/sandboxes/box/files")).json["files"] == []
    assert (await client.run_code("box", "import os; os.listdir('.')"))[0]["data"] == {"text/plain": "[]"}


async def test_a_json_body_that_trickles_in_is_not_waited_for() -> None:
    async with run_server(settings(preload=(), request_seconds=0.3)) as hasty:
        reader, writer = await asyncio.open_connection(*_address(hasty))
        writer.write(
            b"PUT /sandboxes/slow HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        )
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.02)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in await reader.read()
        writer.close()
        assert (await hasty.client.request("GET", "/sandboxes")).json == {"sandboxes": []}


async def test_callers_beyond_the_bound_are_told_to_come_again() -> None:
    async with run_server(settings(preload=(), connections=3)) as small:
        held = [await asyncio.open_connection(*_address(small)) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*_address(small))
        refused = await reader.read()
        writer.close()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in refused
        assert b"Connection limit reached (3)" in refused
        held.pop()[1].close()
        async with asyncio.timeout(10):
            while (answer := await _health(small)).startswith(b"HTTP/1.1 429"):
                await asyncio.sleep(0.01)
        assert answer.startswith(b"HTTP/1.1 200")
        for _, other in held:
            other.close()


def _address(running: RunningServer) -> tuple[str, int]:
    host, port = running.where.removeprefix("http://").split(":")
    return host, int(port)


async def _health(running: RunningServer) -> bytes:
    reader, writer = await asyncio.open_connection(*_address(running))
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
