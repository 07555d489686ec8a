"""WebSocket connections: authentication, limits, keepalive, disconnects, shutdown."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from inline_snapshot import snapshot
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from fumehood.gateway.cors import CorsPolicy
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED
from fumehood.http_server import uvicorn_websocket
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import NotAuthenticated
from tests.support import raw_http_connection
from tests.support.scripted_gateway import ScriptedGateway, run_gateway, send_slowly, text_events
from tests.support.waiting import wait_until
from tests.support.websocket_client import error_of, first_events, open_socket, wait_until_running

pytestmark = pytest.mark.asyncio(loop_scope="module")


def close_code(closed: pytest.ExceptionInfo[ConnectionClosed]) -> int | None:
    return None if closed.value.rcvd is None else closed.value.rcvd.code


# --- who may connect ----------------------------------------------------------------------------------


class RejectingAuthenticator:
    """Callers of whom none is known any more once `revoked`."""

    def __init__(self, *, revoked: bool = True) -> None:
        self.revoked = revoked

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        if self.revoked:
            raise NotAuthenticated("Incorrect API key provided.")
        return Caller()

    async def refresh_if_stale(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Origin": "https://evil.example"}, 403, "forbidden"),
        ({"Origin": "http://localhost:3000"}, 403, "forbidden"),
        ({"Origin": "null"}, 403, "forbidden"),
        ({"Origin": ""}, 403, "forbidden"),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    ],
)
async def test_who_may_not_connect_is_told_before_the_upgrade(
    headers: Mapping[str, str], status: int, code: str
) -> None:
    callers: dict[str, Any] = {"authenticator": RejectingAuthenticator()} if status == 401 else {}
    async with run_gateway(**callers) as gateway:
        with pytest.raises(InvalidStatus) as rejection:
            async with open_socket(gateway, additional_headers=headers):
                pass
        answer = rejection.value.response
        assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (status, code)
        assert answer.headers["fumehood-version"]


@pytest.mark.parametrize(
    "headers",
    ["Origin: http://evil.example\r\nHost: evil.example\r\n", "Host: [::1]evil.example\r\n"],
)
async def test_a_foreign_host_is_told_before_the_upgrade(headers: str) -> None:
    handshake = (
        f"GET /v1/responses HTTP/1.1\r\n{headers}Connection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with run_gateway() as gateway, raw_http_connection.open_connection(gateway.port) as connection:
        await connection.send(handshake.encode())
        answer = await connection.read_response()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "forbidden")
        assert answer.headers["fumehood-version"]


async def test_a_key_that_is_revoked_makes_no_more_responses() -> None:
    callers = RejectingAuthenticator(revoked=False)
    async with run_gateway(authenticator=callers) as gateway, open_socket(gateway) as socket:
        assert (await socket.create_and_read())["status"] == "completed"
        callers.revoked = True
        assert await socket.read_error() == (401, "invalid_api_key", None)


async def test_requests_are_counted_as_everywhere() -> None:
    limits = RequestLimiter(ApiKeyLimits(requests_per_minute=2))
    async with run_gateway(limits=limits) as gateway, open_socket(gateway) as socket:
        await socket.create_and_read()
        await socket.create_and_read()
        await socket.ask(stream_id="lane")
        event = await socket.read_event()
    assert error_of(event) == (429, "rate_limit_exceeded", None)
    assert event["headers"] == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "retry-after": "30",
    }


async def test_an_error_that_has_no_headers_shows_none(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        await socket.ask(include=["x"])
        assert set(await socket.read_event()) == {"type", "status", "error"}


async def test_a_page_of_this_server_may_connect(gateway: ScriptedGateway) -> None:
    origin = {"Origin": f"http://127.0.0.1:{gateway.port}"}
    async with open_socket(gateway, additional_headers=origin) as socket:
        assert (await socket.create_and_read())["status"] == "completed"


async def test_a_page_that_was_named_may_connect() -> None:
    page = "https://app.example"
    async with run_gateway(cors=CorsPolicy((page,))) as gateway:
        async with open_socket(gateway, additional_headers={"Origin": page}) as socket:
            assert (await socket.create_and_read())["status"] == "completed"
        with pytest.raises(InvalidStatus):
            async with open_socket(gateway, additional_headers={"Origin": "https://other.example"}):
                pass


HEAD = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


@asynccontextmanager
async def open_raw_socket(
    gateway: ScriptedGateway,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection after the handshake, for frames as they are."""
    async with gateway.open_connection() as (reader, writer):
        writer.write(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n" + HEAD + KEY + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        yield reader, writer


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (b"GET /v1/responses", HEAD + KEY, 101),
        (b"GET /v1/responses", b"", 426),
        (b"GET /v1/responses", HEAD, 400),
        (b"GET /v1/responses", HEAD.replace(b"13", b"12") + KEY, 400),
        (b"POST /v1/responses", HEAD + KEY, 400),
        (b"GET /v1/responses", HEAD + KEY + b"Content-Length: 5\r\n", 400),
        (b"GET /v1/responses", HEAD + KEY + b"Transfer-Encoding: chunked\r\n", 400),
        (b"GET /v1/responses", HEAD + KEY + b"Cookie: " + b"x" * 10_000 + b"\r\n", 400),
        (b"GET /v1/responses", HEAD + KEY + b"".join(b"X-%d: y\r\n" % n for n in range(200)), 400),
        (b"GET /v1/responses", HEAD + KEY + b"X-Name: \xc3\xa9\xff\r\n", 101),
        (b"GET /v1/models", HEAD + KEY, 404),
        (b"GET /\xc3\xa9?\xff", HEAD + KEY, 400),
        (b"GET /v1/responses/resp_%00%ff", HEAD + KEY, 404),
    ],
)
async def test_handshakes(gateway: ScriptedGateway, line: bytes, headers: bytes, status: int) -> None:
    async with gateway.open_connection() as (reader, writer):
        writer.write(line + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert (await gateway.request("GET", "/healthz")).status == 200


# --- bounds -------------------------------------------------------------------------------------------


async def test_a_message_that_is_too_large_ends_the_connection(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        assert (await socket.create_and_read(input="x" * 90_000))["status"] == "completed"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.create_and_read(input="x" * 100_000)
    assert close_code(closed) == CloseCode.MESSAGE_TOO_BIG


async def test_pieces_of_a_message_count_together(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:

        async def pieces() -> AsyncGenerator[str]:
            for _ in range(20):
                yield "x" * 10_000

        sending = asyncio.ensure_future(socket.raw.send(pieces()))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.read_event()
        await asyncio.gather(sending, return_exceptions=True)
    assert close_code(closed) == CloseCode.MESSAGE_TOO_BIG


async def test_a_message_in_pieces_is_one(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        await socket.raw.send(['{"type":"response.create",', '"model":"m","input":"h', 'i"}'])
        assert (await socket.read_response())[-1]["type"] == "response.completed"
    assert gateway.runs.requests[0].input == "hi"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x81\x02\xff\xfe", 1002),  # not masked
        (b"\x81\x82\0\0\0\0\xff\xfe", 1007),  # not UTF-8
        (b"\x83\x80\0\0\0\0", 1002),  # no such opcode
        (b"\xc1\x80\0\0\0\0", 1002),  # compressed, which was not agreed upon
        (b"\x80\x80\0\0\0\0", 1002),  # continues nothing
    ],
)
async def test_what_is_no_websocket_ends_the_connection(
    gateway: ScriptedGateway, sent: bytes, code: int
) -> None:
    async with open_raw_socket(gateway) as (reader, writer):
        writer.write(sent)
        closing = await reader.read()
    assert closing[0] == 0x88
    assert int.from_bytes(closing[2:4]) == code
    assert (await gateway.request("GET", "/healthz")).status == 200


@pytest.mark.parametrize(
    ("sent", "drips"), [(b"\x81\xfe\x03\xe8\0\0\0\0{", b""), (b"\x81\xfe\xff\xff\0\0\0\0", b" " * 10_000)]
)
async def test_a_message_that_does_not_end_or_drips_ends_the_connection(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, sent: bytes, drips: bytes
) -> None:
    monkeypatch.setattr(uvicorn_websocket, "_MESSAGE_TIMEOUT", 0.2)
    async with open_raw_socket(gateway) as (reader, writer):
        writer.write(sent)
        dripping = asyncio.ensure_future(send_slowly(writer, drips))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        dripping.cancel()


# --- silence, and those who leave ---------------------------------------------------------------------


async def test_a_silent_connection_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_websocket, "_PING_SECONDS", 0.05)
    async with run_gateway() as gateway, open_raw_socket(gateway) as (reader, _):
        # No pong is sent: a client that computes between two turns is not gone.
        pings = [await reader.readexactly(6) for _ in range(3)]
    assert {ping[:2] for ping in pings} == {b"\x89\x04"}


async def test_a_client_that_answers_no_ping_for_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_websocket, "_PING_SECONDS", 0.05)
    monkeypatch.setattr(uvicorn_websocket, "_PONG_TIMEOUT", 0.2)
    async with run_gateway() as gateway, open_raw_socket(gateway) as (reader, _):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 20)  # pings, and then the end


async def test_a_client_that_leaves_takes_its_runs_with_it(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        for name in ("a", "b"):
            await socket.ask(stream_id=name)
            await socket.ask(stream_id=name)  # will never begin
        await wait_until_running(gateway, 2)
    for run in gateway.runs.runs:
        async with asyncio.timeout(30):
            await run.ended.wait()
        assert run.cancelled == CLIENT_DISCONNECTED
    assert len(gateway.runs.runs) == 2


async def test_a_connection_that_breaks_takes_its_run_with_it(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        await socket.ask()
        await wait_until_running(gateway)
        socket.raw.transport.abort()
        async with asyncio.timeout(30):
            await gateway.runs.runs[0].ended.wait()
    assert gateway.runs.runs[0].cancelled == CLIENT_DISCONNECTED


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(gateway: ScriptedGateway) -> None:
    pieces = ["x" * 10_000] * 2_000
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)]
    async with open_socket(gateway) as slow:
        slow.raw.transport.pause_reading()
        await slow.ask()
        await wait_until_running(gateway)
        gateway.runs.script = lambda response: [text_events(response)]
        async with open_socket(gateway) as other:
            assert (await other.create_and_read())["status"] == "completed"
        assert gateway.app.metrics.open_streams == 1
        slow.raw.transport.resume_reading()
        assert len(await slow.read_response()) == 2_008


# --- stopping -----------------------------------------------------------------------------------------


async def test_a_server_that_stops_lets_a_response_end_and_says_goodbye() -> None:
    async with run_gateway() as gateway, open_socket(gateway) as idle, open_socket(gateway) as socket:
        gateway.runs.script = first_events
        gateway.runs.stubborn = True
        await socket.ask()
        await wait_until_running(gateway)
        gateway.server.stop()
        async with asyncio.timeout(30):
            await gateway.runs.draining.wait()
        with pytest.raises(ConnectionClosed) as closed:
            await idle.read_event()
        assert close_code(closed) == CloseCode.GOING_AWAY
        run = gateway.runs.runs[0]
        run.finish()
        assert (await socket.read_response())[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.read_event()
        assert close_code(closed) == CloseCode.GOING_AWAY
        gateway.server.stop()  # nothing is left to wait for
        async with asyncio.timeout(30):
            await gateway.task
    assert run.cancelled is None


# --- what is written down -----------------------------------------------------------------------------


async def test_every_response_is_logged_and_counted() -> None:
    lines: list[Mapping[str, Any]] = []

    def log(_: int, fields: Mapping[str, Any]) -> None:
        lines.append(fields)

    async with run_gateway(request_log=log) as gateway:
        async with open_socket(gateway) as socket:
            await socket.create_and_read(model="small")
            await socket.read_error(include=["x"])
        await wait_until(lambda: len(lines) >= 3)
        figures = (await gateway.request("GET", "/metrics")).body.decode()
    response, rejection, connection = ({**line} for line in lines[:3])
    assert len({line["request_id"] for line in lines[:3]}) == 3
    assert response["response_id"].startswith("resp_")
    for line in (response, rejection, connection):
        for name in ("request_id", "ms", "response_id"):
            line.pop(name, None)
    assert [response, rejection, connection] == snapshot(
        [
            {
                "method": "WEBSOCKET",
                "route": "/v1/responses",
                "status": 200,
                "model": "small",
                "events": 11,
                "outcome": "completed",
                "input_tokens": 0,
                "output_tokens": 3,
            },
            {
                "method": "WEBSOCKET",
                "route": "/v1/responses",
                "status": 400,
                "error": "invalid_value",
                "param": "include[0]",
            },
            {
                "method": "GET",
                "route": "/v1/responses (websocket)",
                "status": 101,
                "responses": 2,
                "close_code": 1000,
            },
        ]
    )
    assert re.search(
        r'^fumehood_requests_total\{route="/v1/responses",status="200"\} 1\.0$', figures, re.MULTILINE
    )
    assert re.search(r'^fumehood_responses_total\{status="completed"\} 1\.0$', figures, re.MULTILINE)
    assert re.search(r"^fumehood_stream_events_total 11\.0$", figures, re.MULTILINE)
    assert re.search(r"^fumehood_open_streams 0\.0$", figures, re.MULTILINE)
