"""Slow clients, many clients and leaks; where memory counts, the gateway is another process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED
from fumehood.http_server import slow_clients
from tests.support import gateway_process
from tests.support.gateway_process import text_answer
from tests.support.raw_model_server import RawModelServer, chunk, open_raw_model_server, stream
from tests.support.scripted_gateway import ScriptedGateway, run_gateway, text_events
from tests.support.waiting import wait_until
from tests.support.websocket_client import connect_websocket

MB = 1_000_000
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


# --- slow readers -------------------------------------------------------------------------------------


async def ask_streamed(sock: socket.socket) -> None:
    body = b'{"model":"m","input":"hi","stream":true}'
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, head + b"content-length: %d\r\n\r\n%s" % (len(body), body))


async def ask_over_websocket(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, HANDSHAKE)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await loop.sock_recv(sock, 1)
    body = b'{"type":"response.create","model":"m","input":"hi"}'
    await loop.sock_sendall(sock, bytes((0x81, 0x80 | len(body))) + b"\0\0\0\0" + body)


@pytest.mark.parametrize("reads", [True, False], ids=["byte by byte", "nothing"])
@pytest.mark.parametrize("ask", [ask_streamed, ask_over_websocket])
async def test_a_client_that_reads_next_to_nothing_is_disconnected(
    ask: Callable[[socket.socket], Any], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its concurrency slot for ever. Nobody else notices."""
    monkeypatch.setattr(slow_clients, "_STALL_SECONDS", 0.5)
    piece = "x" * 500_000
    async with run_gateway() as gateway:
        gateway.runs.script = lambda response: [
            [event] for event in text_events(response, [piece] * 100)[:-1]
        ]
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, ("127.0.0.1", gateway.port))
            await ask(slow)
            await gateway.runs.started.wait()
            run = gateway.runs.runs[0]
            gateway.runs.script = lambda response: [text_events(response)]
            others = 0
            async with asyncio.timeout(60):
                while not run.ended.is_set():
                    if reads:
                        with contextlib.suppress(ConnectionError):
                            await loop.sock_recv(slow, 1)
                    if others < 20:
                        assert (await gateway.create_response(stream=True)).status == 200
                        others += 1
                    assert _waiting(gateway) < 2 * len(piece)
                    await asyncio.sleep(0.01)
        assert run.cancelled == CLIENT_DISCONNECTED
        assert gateway.app.metrics.stats.dropped_readers["stalled"] == 1
        assert others > 0


def _waiting(gateway: ScriptedGateway) -> int:
    """The bytes that the gateway holds for all its readers."""
    connections: Any = vars(gateway.server)["_uvicorn"].server_state.connections
    return sum(connection.transport.get_write_buffer_size() for connection in connections)


# --- a process that is watched ------------------------------------------------------------------------


@dataclass
class Watched:
    port: int
    pid: int
    chat: RawModelServer
    session: aiohttp.ClientSession

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        line = next(
            line
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )
        return int(line.split()[1]) * 1024

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/v1{path}"

    async def until(self, condition: Callable[[], bool]) -> None:
        await wait_until(condition, 60)


@asynccontextmanager
async def watched(directory: Path, *answers: Any) -> AsyncGenerator[Watched]:
    async with open_raw_model_server(*answers) as chat:
        chat.model_list = b'{"object":"list","data":[]}'  # the gateway asks for it at its start
        settings = {
            "models": [{"match": "*", "base_url": chat.url}],
            "providers": {"code_interpreter": {"enabled": False}},
            "limits": {"concurrent_total": 2000},
        }
        gateway = await asyncio.to_thread(gateway_process.start_gateway, directory, settings)
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
            ) as session:
                yield Watched(
                    int(gateway.url.split(":")[2].split("/")[0]), gateway.process.pid, chat, session
                )
        finally:
            await asyncio.to_thread(gateway.stop)


# --- many idle streams --------------------------------------------------------------------------------

IDLE = 1000


@asynccontextmanager
async def idle_stream(gateway: Watched) -> AsyncGenerator[None]:
    body = {"model": "silent", "input": "hi", "stream": True}
    async with gateway.session.post(gateway.url("/responses"), json=body) as response:
        assert response.status == 200
        await response.content.readuntil(b"response.output_text.delta")
        yield


@asynccontextmanager
async def idle_socket(gateway: Watched) -> AsyncGenerator[None]:
    async with connect_websocket(gateway.port) as connection:
        await connection.ask(model="silent")
        while (await connection.read_event())["type"] != "response.output_text.delta":
            pass
        yield


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_thousand_idle_streams_cost_little_and_hold_up_nobody(tmp_path: Path) -> None:
    silent = stream(chunk({"content": "Hi"}), asyncio.Event())
    async with watched(tmp_path, text_answer("warm"), *[silent] * IDLE) as gateway:
        body = {"model": "quick", "input": "hi"}
        async with gateway.session.post(gateway.url("/responses"), json=body) as response:
            assert response.status == 200
        memory, descriptors = gateway.resident, gateway.descriptors
        async with AsyncExitStack() as stack:
            for number in range(IDLE):
                opening = idle_socket if number % 2 else idle_stream
                await stack.enter_async_context(opening(gateway))
            grown, more = gateway.resident - memory, gateway.descriptors - descriptors
            print(f"{IDLE} idle streams: {grown / IDLE / 1000:.0f} kB and {more / IDLE:.2f} descriptors each")
            assert grown < IDLE * 150_000
            assert more <= 2 * IDLE + 20  # one to the client, one to the model server
            gateway.chat.responders.extend([text_answer("Here I am.")] * 20)
            for _ in range(20):
                async with gateway.session.post(gateway.url("/responses"), json=body) as response:
                    assert "Here I am." in await response.text()
        await gateway.until(lambda: gateway.descriptors <= descriptors + 20)
        gateway.chat.responders.append(text_answer("Still here."))
        async with gateway.session.post(gateway.url("/responses"), json=body) as response:
            assert "Still here." in await response.text()


# --- long days ----------------------------------------------------------------------------------------


class Endless:
    """Answers without end, for a chat server."""

    def __init__(self) -> None:
        self._answer = text_answer(*["word "] * 20)

    def popleft(self) -> Any:
        return self._answer


async def a_stored_response(gateway: Watched) -> None:
    body = {"model": "m", "input": "hi"}
    async with gateway.session.post(gateway.url("/responses"), json=body) as response:
        made = await response.json()
    assert made["status"] == "completed"
    async with gateway.session.delete(gateway.url(f"/responses/{made['id']}")) as response:
        assert response.status == 200


async def a_stream(gateway: Watched) -> None:
    body = {"model": "m", "input": "hi", "stream": True, "store": False}
    async with gateway.session.post(gateway.url("/responses"), json=body) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def a_refusal(gateway: Watched) -> None:
    async with gateway.session.post(gateway.url("/responses"), json={"input": 5}) as response:
        assert response.status == 400


async def two_turns_on_a_socket(gateway: Watched) -> None:
    async with connect_websocket(gateway.port) as connection:
        first = await connection.create_and_read(model="m")
        await connection.create_and_read(model="m", previous_response_id=first["id"])


async def a_client_that_leaves(gateway: Watched) -> None:
    async with connect_websocket(gateway.port) as connection:
        await connection.ask(model="m")


KINDS = (a_stored_response, a_stream, a_refusal, two_turns_on_a_socket, a_client_that_leaves)
REQUESTS_OF_ALL = 7  # a deletion and a second turn are requests, too


async def work(gateway: Watched, requests: int) -> None:
    """So many, eight at a time."""
    waiting = iter(KINDS * (requests // REQUESTS_OF_ALL))

    async def worker() -> None:
        for kind in waiting:
            await kind(gateway)

    await asyncio.gather(*(worker() for _ in range(8)))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_memory_is_flat_over_ten_thousand_requests(tmp_path: Path) -> None:
    async with watched(tmp_path) as gateway:
        gateway.chat.responders = cast(Any, Endless())
        await work(gateway, 2_000)
        early, descriptors = gateway.resident, gateway.descriptors
        await work(gateway, 8_000)
        late = gateway.resident
        print(f"{early / MB:.1f} MB after 2,000 requests, {late / MB:.1f} MB after 10,000")
        assert late < early * 1.1 + 2 * MB
        await gateway.until(lambda: gateway.descriptors <= descriptors + 20)
