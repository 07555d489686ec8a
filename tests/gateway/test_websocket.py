"""WebSocket message by message: framing, lanes, refusals, silence, leaving, stopping; imports `fumehood.gateway`."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from inline_snapshot import snapshot
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.streams import StreamReader

from fumehood.gateway.limits import Limits
from fumehood.gateway.origins import Origins
from fumehood.gateway.sse import GONE, encode_events
from fumehood.gateway.websocket import Messages
from fumehood.interfaces import Caller
from fumehood.protocol.errors import NotAuthenticated, ServerFault
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.folding import OUTPUTS
from fumehood.protocol.keys import KeyLimits
from fumehood.protocol.responses import Response
from fumehood.serving import web, websocket
from tests.support.gateway import Served, code_events, serving_gateway, text_events
from tests.support.sse import parse
from tests.support.websocket import Socket, connected, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def opened(gateway: Served, **options: Any) -> AsyncGenerator[Socket]:
    async with connected(gateway.port, **options) as socket:
        yield socket


def beginning(response: Response) -> list[list[StreamEvent]]:
    """A run that says nothing more by itself."""
    return [text_events(response)[:2]]


async def until_running(gateway: Served, number: int = 1) -> None:
    async with asyncio.timeout(30):
        while len(gateway.runs.runs) < number:
            await asyncio.sleep(0.001)


# --- framing ------------------------------------------------------------------------------------------


def frames(written: bytearray) -> list[Any]:
    """What a strict reader makes of it: whole text messages, unmasked, of the shortest possible form."""
    reader = StreamReader()
    reader.feed_data(bytes(written))
    found: list[Any] = []
    while reader.buffer:
        parsing = Frame.parse(reader.read_exact, mask=False)
        try:
            next(parsing)
        except StopIteration as end:
            frame: Frame = end.value
        else:
            raise AssertionError("a frame is cut off")
        assert frame.opcode is Opcode.TEXT
        assert frame.fin
        found.append((frame.serialize(mask=False), json.loads(bytes(frame.data))))
    assert b"".join(raw for raw, _ in found) == bytes(written)
    return [value for _, value in found]


@pytest.mark.parametrize("size", [0, 1, 50, 125, 126, 300, 65_000, 65_400, 65_536, 200_000])
async def test_messages_of_every_size_say_what_a_stream_says(size: int) -> None:
    events = text_events(Response(id="resp_1", created_at=1, model="m"), ["x" * size, "é\u2028"])
    streamed = [value for _, value in parse(bytes(encode_events(events, ())) + b"data: [DONE]\n\n")]
    assert frames(Messages().events(events, ())) == streamed
    named = frames(Messages("main").events(events, ()))
    assert named == [{**value, "stream_id": "main"} for value in streamed]


async def test_short_messages_have_short_heads() -> None:
    """None of ours is so short, but the next one may be."""
    assert frames(Messages().refusal(ServerFault("")))[0]["error"]["message"] == ""
    events: Any = [Short()]
    assert frames(Messages().events(events, ())) == [{"type": "short", "sequence_number": -1}]


class Short(StreamEvent, tag="short"):
    pass


async def test_a_response_is_its_events(gateway: Served) -> None:
    async with opened(gateway) as socket:
        assert socket.raw.response is not None
        headers = socket.raw.response.headers
        assert headers["fumehood-version"]
        assert headers["x-request-id"].startswith("req_")
        assert "sec-websocket-extensions" not in headers  # a small message cannot become a large one
        await socket.ask()
        events = await socket.answer()
    assert [event["type"] for event in events] == snapshot(
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    )
    assert [event["sequence_number"] for event in events] == list(range(11))
    assert gateway.runs.requests[0].stream is True


async def test_several_one_after_another(gateway: Served) -> None:
    async with opened(gateway) as socket:
        ids = [(await socket.turn(input=str(number)))["id"] for number in range(20)]
    assert len(set(ids)) == 20
    assert [request.input for request in gateway.runs.requests] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    ("include", "outputs"), [([], None), ([OUTPUTS], [{"type": "logs", "logs": "42\n"}])]
)
async def test_what_was_not_asked_for_is_not_sent(gateway: Served, include: list[str], outputs: Any) -> None:
    gateway.runs.script = lambda response: [code_events(response)]
    async with opened(gateway) as socket:
        response = await socket.turn(include=include)
    assert response["output"][0]["outputs"] == outputs


async def test_events_that_are_there_share_a_write(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    written = websocket.SocketProtocol.send

    async def send(self: Any, message: Any) -> None:
        writes.append(bytes(message.get("frames", b"")).count(b'"type":"response.'))
        await written(self, message)

    monkeypatch.setattr(websocket.SocketProtocol, "send", send)

    def script(response: Response) -> list[list[StreamEvent]]:
        events = text_events(response, [f"word {number} " for number in range(200)])
        return [events[:2], events[2:150], events[150:]]

    gateway.runs.script = script
    async with opened(gateway) as socket:
        await socket.turn()
    assert [number for number in writes if number] == [2, 148, 58]


# --- lanes --------------------------------------------------------------------------------------------


async def test_requests_of_one_lane_wait_for_each_other(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        await socket.ask(input="first")
        await socket.ask(input="second", stream_id=None)
        assert [(await socket.next())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert len(gateway.runs.runs) == 1
        for number in range(2):
            await until_running(gateway, number + 1)
            run = gateway.runs.runs[number]
            run.say(*text_events(run.response)[2:])
            assert (await socket.answer())[-1]["response"]["id"] == run.id
    assert [request.input for request in gateway.runs.requests] == ["first", "second"]


async def test_lanes_run_side_by_side(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        for name in ("a", "b", None):
            await socket.ask(input=f"{name}", **({"stream_id": name} if name else {}))
        await until_running(gateway, 3)
        for run in reversed(gateway.runs.runs):
            run.say(*text_events(run.response)[2:])
        events = [await socket.next() for _ in range(33)]
    by_lane = {
        name: [event["type"] for event in events if event.get("stream_id") == name]
        for name in ("a", "b", None)
    }
    assert {name: len(kinds) for name, kinds in by_lane.items()} == {"a": 11, "b": 11, None: 11}
    assert {kinds[-1] for kinds in by_lane.values()} == {"response.completed"}


async def test_no_more_than_sixteen_at_once(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        for number in range(20):
            await socket.ask(stream_id=f"lane-{number}")
        assert refused_or_none(await socket.next()) is None
        await until_running(gateway, 16)
        await socket.send(type="response.steer", previous_response_id="resp_x", input="faster")
        while (await socket.next())["type"] != "response.steer.failed":
            pass  # all 20 requests were seen by now
        assert len(gateway.runs.runs) == 16
        for number in range(20):
            await until_running(gateway, number + 1)
            run = gateway.runs.runs[number]
            run.say(*text_events(run.response)[2:])
        completed = 0
        while completed < 20:
            completed += (await socket.next())["type"] == "response.completed"


def refused_or_none(event: Any) -> Any:
    return refused(event) if event["type"] == "error" else None


async def test_names_of_lanes(gateway: Served) -> None:
    async with opened(gateway) as socket:
        for name in ("", "x" * 257, "a b", "é", "a\n", "a/b"):
            assert await socket.refusal(stream_id=name) == (400, "invalid_stream_id", "stream_id")
        assert await socket.refusal(stream_id=5) == (400, "invalid_type", "stream_id")
        for number in range(32):
            assert (await socket.turn(stream_id=f"Lane_{number}.-"))["status"] == "completed"
        assert await socket.refusal(stream_id="one-more") == (
            *(400, "websocket_stream_limit_reached", "stream_id"),
        )
        assert (await socket.turn(stream_id="Lane_0.-"))["status"] == "completed"
        assert (await socket.turn())["status"] == "completed"


async def test_what_waits_is_bounded(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        await socket.ask()
        await until_running(gateway)
        for _ in range(64):
            await socket.ask()
        assert [(await socket.next())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert await socket.refusal() == (429, "rate_limit_exceeded", None)
    async with opened(gateway) as socket:
        await socket.ask(input="x" * 60_000)
        await until_running(gateway, 2)
        await socket.ask(input="x" * 60_000)
        await socket.ask(input="x" * 60_000)  # more than a body may be, in all
        assert [(await socket.next())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert refused(await socket.next()) == (429, "rate_limit_exceeded", None)


# --- refusals -----------------------------------------------------------------------------------------

DEEP = '{"type":"response.create","input":' + "[" * 20_000 + "]" * 20_000 + "}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b'{"type":"response.create"}', (400, "invalid_message", None)),
        ("", (400, "invalid_json", None)),
        ("{", (400, "invalid_json", None)),
        ("null", (400, "invalid_type", None)),
        ("[]", (400, "invalid_type", None)),
        ("{}", (400, "unknown_event_type", "type")),
        ('{"type":"response.cancel"}', (400, "unknown_event_type", "type")),
        ('{"type":5}', (400, "invalid_type", "type")),
        ('{"type":"response.create","input":5}', (400, "invalid_type", "input")),
        ('{"type":"response.create","previous_response_id":5}', (400, "invalid_type", "previous_response_id")),
        ('{"type":"response.create","previous_response_id":"\\u0000"}', (400, "invalid_value", "previous_response_id")),
        ('{"type":"response.create","model":"\\ud800"}', (400, "invalid_json", None)),
        ('{"type":"response.create","include":["x"]}', (400, "invalid_value", "include[0]")),
        (DEEP, (400, "invalid_json", None)),
    ],
)  # fmt: skip
async def test_what_is_no_request_is_an_error_and_no_end(
    gateway: Served, message: Any, expected: Any
) -> None:
    async with opened(gateway) as socket:
        await socket.raw.send(message)
        assert refused(await socket.next()) == expected
        assert (await socket.turn())["status"] == "completed"


async def test_steering_is_answered_without_disturbing_the_response(gateway: Served) -> None:
    async with opened(gateway) as socket:
        await socket.send(type="response.steer", previous_response_id="resp_1", input=[{"role": "user"}])
        assert await socket.next() == snapshot(
            {
                "type": "response.steer.failed",
                "steer": {"previous_response_id": "resp_1", "input": [{"role": "user"}]},
                "error": {
                    "code": "steering_not_supported",
                    "message": "This server does not steer responses; send the input with the next response.create.",
                    "type": "invalid_request_error",
                },
                "sequence_number": 0,
            }
        )
        await socket.send(
            type="response.processed", response_id="resp_1"
        )  # Codex says so, and wants no answer
        assert (await socket.turn())["status"] == "completed"


async def test_a_fault_of_ours_is_one_message_and_one_line(
    gateway: Served, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.runs.refusal = RuntimeError("a secret")
    async with opened(gateway) as socket:
        await socket.ask(stream_id="x")
        error = await socket.next()
        assert refused(error) == (500, "server_error", None)
        assert error["stream_id"] == "x"
        assert "secret" not in error["error"]["message"]
        gateway.runs.refusal = None
        assert (await socket.turn(stream_id="x"))["status"] == "completed"
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [
        True
    ]


async def test_a_run_that_breaks_says_so_and_ends(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        await socket.ask()
        await until_running(gateway)
        gateway.runs.runs[0].break_off(ServerFault("You read too slowly."))
        events = await socket.answer()
        assert [event["type"] for event in events[2:]] == ["error", "response.failed"]
        assert (
            events[2]["error"]["message"]
            == events[3]["response"]["error"]["message"]
            == "You read too slowly."
        )
        gateway.runs.script = lambda response: [text_events(response)]
        assert (await socket.turn())["status"] == "completed"


async def test_too_many_responses_at_once_are_told_so() -> None:
    async with serving_gateway(limits=Limits(total=1)) as served, opened(served) as socket:
        served.runs.script = beginning
        await socket.ask(stream_id="a")
        await until_running(served)
        await socket.ask(stream_id="b")
        while (event := await socket.next())["stream_id"] == "a":
            pass
        assert refused(event) == (429, "rate_limit_exceeded", None)


# --- who may connect ----------------------------------------------------------------------------------


class Nobody:
    """Callers of whom none is known any more once `revoked`."""

    def __init__(self, *, revoked: bool = True) -> None:
        self.revoked = revoked

    def identify(self, authorization: bytes | None, host: bytes) -> Caller:
        if self.revoked:
            raise NotAuthenticated("Incorrect API key provided.")
        return Caller()

    async def look_again(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Origin": "https://evil.example"}, 403, "forbidden"),
        ({"Origin": "http://localhost:3000"}, 403, "forbidden"),
        ({"Origin": "null"}, 403, "forbidden"),
        ({"Origin": ""}, 403, "forbidden"),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 403, "forbidden"),
        ({"Host": "[::1]evil.example"}, 403, "forbidden"),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    ],
)
async def test_who_may_not_connect_is_told_before_the_upgrade(
    headers: Mapping[str, str], status: int, code: str
) -> None:
    callers: dict[str, Any] = {"callers": Nobody()} if status == 401 else {}
    async with serving_gateway(**callers) as served:
        with pytest.raises(InvalidStatus) as refusal:
            async with opened(served, additional_headers=headers):
                pass
        answer = refusal.value.response
        assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (status, code)
        assert answer.headers["fumehood-version"]


async def test_a_key_that_is_revoked_makes_no_more_responses() -> None:
    callers = Nobody(revoked=False)
    async with serving_gateway(callers=callers) as served, opened(served) as socket:
        assert (await socket.turn())["status"] == "completed"
        callers.revoked = True
        assert await socket.refusal() == (401, "invalid_api_key", None)


async def test_requests_are_counted_as_everywhere() -> None:
    limits = Limits(KeyLimits(requests_per_minute=2))
    async with serving_gateway(limits=limits) as served, opened(served) as socket:
        await socket.turn()
        await socket.turn()
        assert await socket.refusal() == (429, "rate_limit_exceeded", None)


async def test_a_page_of_this_server_may_connect(gateway: Served) -> None:
    origin = {"Origin": f"http://127.0.0.1:{gateway.port}"}
    async with opened(gateway, additional_headers=origin) as socket:
        assert (await socket.turn())["status"] == "completed"


async def test_a_page_that_was_named_may_connect() -> None:
    page = "https://app.example"
    async with serving_gateway(origins=Origins((page,))) as served:
        async with opened(served, additional_headers={"Origin": page}) as socket:
            assert (await socket.turn())["status"] == "completed"
        with pytest.raises(InvalidStatus):
            async with opened(served, additional_headers={"Origin": "https://other.example"}):
                pass


HEAD = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


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
async def test_handshakes(gateway: Served, line: bytes, headers: bytes, status: int) -> None:
    async with gateway.connected() as (reader, writer):
        writer.write(line + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert (await gateway.ask("GET", "/healthz")).status == 200


# --- bounds -------------------------------------------------------------------------------------------


async def test_a_message_that_is_too_large_ends_the_connection(gateway: Served) -> None:
    async with opened(gateway) as socket:
        assert (await socket.turn(input="x" * 90_000))["status"] == "completed"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.turn(input="x" * 100_000)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG


async def test_pieces_of_a_message_count_together(gateway: Served) -> None:
    async with opened(gateway) as socket:

        async def pieces() -> AsyncGenerator[str]:
            for _ in range(20):
                yield "x" * 10_000

        sending = asyncio.ensure_future(socket.raw.send(pieces()))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.next()
        await asyncio.gather(sending, return_exceptions=True)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG


async def test_a_message_in_pieces_is_one(gateway: Served) -> None:
    async with opened(gateway) as socket:
        await socket.raw.send(['{"type":"response.create",', '"model":"m","input":"h', 'i"}'])
        assert (await socket.answer())[-1]["type"] == "response.completed"
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
async def test_what_is_no_websocket_ends_the_connection(gateway: Served, sent: bytes, code: int) -> None:
    async with gateway.connected() as (reader, writer):
        writer.write(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n" + HEAD + KEY + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        closing = await reader.read()
    assert closing[0] == 0x88
    assert int.from_bytes(closing[2:4]) == code
    assert (await gateway.ask("GET", "/healthz")).status == 200


async def test_a_message_that_does_not_end_ends_the_connection(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_MESSAGE_SECONDS", 0.05)
    async with gateway.connected() as (reader, writer):
        writer.write(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n" + HEAD + KEY + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\xfe\x03\xe8\0\0\0\0{")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


# --- silence, and those who leave ---------------------------------------------------------------------


async def test_a_silent_connection_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_PING_SECONDS", 0.05)
    async with serving_gateway() as served, served.connected() as (reader, writer):
        writer.write(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n" + HEAD + KEY + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        # No pong is ever sent: a client that computes between two turns is not gone.
        pings = [await reader.readexactly(6) for _ in range(3)]
    assert {ping[:2] for ping in pings} == {b"\x89\x04"}


async def test_a_client_that_leaves_takes_its_runs_with_it(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        for name in ("a", "b"):
            await socket.ask(stream_id=name)
            await socket.ask(stream_id=name)  # will never begin
        await until_running(gateway, 2)
    for run in gateway.runs.runs:
        async with asyncio.timeout(30):
            await run.ended.wait()
        assert run.cancelled == GONE
    assert len(gateway.runs.runs) == 2


async def test_a_connection_that_breaks_takes_its_run_with_it(gateway: Served) -> None:
    gateway.runs.script = beginning
    async with opened(gateway) as socket:
        await socket.ask()
        await until_running(gateway)
        socket.raw.transport.abort()
        async with asyncio.timeout(30):
            await gateway.runs.runs[0].ended.wait()
    assert gateway.runs.runs[0].cancelled == GONE


async def test_a_reader_that_takes_nothing_is_left(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_STALL_SECONDS", 0.1)
    pieces = ["x" * 1_000_000] * 64  # more than any kernel keeps for the two ends of a connection
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)[:-1]]
    async with opened(gateway) as socket:
        socket.raw.transport.pause_reading()
        await socket.ask()
        await until_running(gateway)
        async with asyncio.timeout(60):
            await gateway.runs.runs[0].ended.wait()
        socket.raw.transport.abort()
    assert gateway.runs.runs[0].cancelled == GONE


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(gateway: Served) -> None:
    pieces = ["x" * 10_000] * 2_000
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)]
    async with opened(gateway) as slow:
        slow.raw.transport.pause_reading()
        await slow.ask()
        await until_running(gateway)
        gateway.runs.script = lambda response: [text_events(response)]
        async with opened(gateway) as other:
            assert (await other.turn())["status"] == "completed"
        assert not gateway.runs.runs[0].ended.is_set()
        slow.raw.transport.resume_reading()
        assert len(await slow.answer()) == 2_008


# --- stopping -----------------------------------------------------------------------------------------


async def test_a_server_that_stops_lets_a_response_end_and_says_goodbye() -> None:
    async with serving_gateway() as served, opened(served) as idle, opened(served) as socket:
        served.runs.script = beginning
        served.runs.stubborn = True
        await socket.ask()
        await until_running(served)
        served.server.stop()
        async with asyncio.timeout(30):
            await served.runs.draining.wait()
        with pytest.raises(ConnectionClosed) as closed:
            await idle.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.GOING_AWAY
        run = served.runs.runs[0]
        run.say(*text_events(run.response)[2:])
        assert (await socket.answer())[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.GOING_AWAY
        served.server.stop()  # nothing is left to wait for
        async with asyncio.timeout(30):
            await served.task
    assert run.cancelled is None


# --- what is written down -----------------------------------------------------------------------------


async def test_every_response_is_logged_and_counted() -> None:
    lines: list[Mapping[str, Any]] = []

    def log(_: int, fields: Mapping[str, Any]) -> None:
        lines.append(fields)

    async with serving_gateway(log=log) as served:
        async with opened(served) as socket:
            await socket.turn(model="small")
            await socket.refusal(include=["x"])
        async with asyncio.timeout(30):
            while len(lines) < 3:
                await asyncio.sleep(0.001)
        figures = (await served.ask("GET", "/metrics")).body.decode()
    response, refusal, connection = ({**line} for line in lines[:3])
    assert len({line["request_id"] for line in lines[:3]}) == 3
    assert response["response_id"].startswith("resp_")
    for line in (response, refusal, connection):
        for name in ("request_id", "ms", "response_id"):
            line.pop(name, None)
    assert [response, refusal, connection] == snapshot(
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
            },
        ]
    )
    assert re.search(
        r'^fumehood_requests_total\{route="/v1/responses",status="200"\} 1\.0$', figures, re.MULTILINE
    )
    assert re.search(r'^fumehood_responses_total\{status="completed"\} 1\.0$', figures, re.MULTILINE)
    assert re.search(r"^fumehood_events_total 11\.0$", figures, re.MULTILINE)
    assert re.search(r"^fumehood_streams 0\.0$", figures, re.MULTILINE)
