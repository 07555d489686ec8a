"""WebSocket messages: framing, parallel streams, errors."""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from inline_snapshot import snapshot
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.streaming.event_sender import EventEncoder
from fumehood.gateway.streaming.server_sent_events import SseEncoder
from fumehood.gateway.streaming.websocket_frame_encoder import WebSocketEncoder
from fumehood.http_server import uvicorn_websocket
from fumehood.protocol.openai.api_errors import InternalServerError
from fumehood.protocol.openai.response_projection import INCLUDE_CODE_OUTPUTS
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import StreamEvent
from tests.support.scripted_gateway import ScriptedGateway, code_events, run_gateway, text_events
from tests.support.sse_parsing import parse_events
from tests.support.websocket_client import error_of, first_events, open_socket, wait_until_running

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- framing ------------------------------------------------------------------------------------------


def written(wire: EventEncoder, events: Sequence[StreamEvent]) -> bytearray:
    messages, number = wire.encode_batch(events, (), sys.maxsize)
    assert number == len(events)
    return messages


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
    streamed = [
        value for _, value in parse_events(bytes(written(SseEncoder(), events)) + b"data: [DONE]\n\n")
    ]
    assert frames(written(WebSocketEncoder(), events)) == streamed
    named = frames(written(WebSocketEncoder("main"), events))
    assert named == [{**value, "stream_id": "main"} for value in streamed]


async def test_short_messages_have_short_heads() -> None:
    """None of ours is so short, but the next one may be."""
    assert frames(WebSocketEncoder().encode_error(InternalServerError("")))[0]["error"]["message"] == ""
    events: Any = [Short()]
    assert frames(written(WebSocketEncoder(), events)) == [{"type": "short", "sequence_number": -1}]


class Short(StreamEvent, tag="short"):
    pass


async def test_a_response_is_its_events(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        assert socket.raw.response is not None
        headers = socket.raw.response.headers
        assert headers["fumehood-version"]
        assert headers["x-request-id"].startswith("req_")
        assert "sec-websocket-extensions" not in headers  # a small message cannot become a large one
        await socket.ask()
        events = await socket.read_response()
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


async def test_several_one_after_another(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        ids = [(await socket.create_and_read(input=str(number)))["id"] for number in range(20)]
    assert len(set(ids)) == 20
    assert [request.input for request in gateway.runs.requests] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    ("include", "outputs"), [([], None), ([INCLUDE_CODE_OUTPUTS], [{"type": "logs", "logs": "42\n"}])]
)
async def test_what_was_not_asked_for_is_not_sent(
    gateway: ScriptedGateway, include: list[str], outputs: Any
) -> None:
    gateway.runs.script = lambda response: [code_events(response)]
    async with open_socket(gateway) as socket:
        response = await socket.create_and_read(include=include)
    assert response["output"][0]["outputs"] == outputs


async def test_events_that_are_there_share_a_write(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    protocol: Any = uvicorn_websocket
    send, write_chunk = protocol.WebSocketProtocol.send, protocol._FrameWriter.write_chunk

    def count_events(frames: bytes) -> None:
        writes.append(bytes(frames).count(b'"type":"response.'))

    async def counted_send(self: Any, message: Any) -> None:
        count_events(message.get("frames", b""))
        await send(self, message)

    def counted_write(self: Any, body: bytes) -> bool:
        count_events(body)
        return write_chunk(self, body)

    monkeypatch.setattr(protocol.WebSocketProtocol, "send", counted_send)
    monkeypatch.setattr(protocol._FrameWriter, "write_chunk", counted_write)

    def script(response: Response) -> list[list[StreamEvent]]:
        events = text_events(response, [f"word {number} " for number in range(200)])
        return [events[:2], events[2:150], events[150:]]

    gateway.runs.script = script
    async with open_socket(gateway) as socket:
        await socket.create_and_read()
    assert [number for number in writes if number] == [2, 148, 58]


# --- lanes --------------------------------------------------------------------------------------------


async def test_requests_of_one_lane_wait_for_each_other(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        await socket.ask(input="first")
        await socket.ask(input="second", stream_id=None)
        assert [(await socket.read_event())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert len(gateway.runs.runs) == 1
        for number in range(2):
            await wait_until_running(gateway, number + 1)
            run = gateway.runs.runs[number]
            run.finish()
            assert (await socket.read_response())[-1]["response"]["id"] == run.id
    assert [request.input for request in gateway.runs.requests] == ["first", "second"]


async def test_lanes_run_side_by_side(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        for name in ("a", "b", None):
            await socket.ask(input=f"{name}", **({"stream_id": name} if name else {}))
        await wait_until_running(gateway, 3)
        for run in reversed(gateway.runs.runs):
            run.finish()
        events = [await socket.read_event() for _ in range(33)]
    by_lane = {
        name: [event["type"] for event in events if event.get("stream_id") == name]
        for name in ("a", "b", None)
    }
    assert {name: len(kinds) for name, kinds in by_lane.items()} == {"a": 11, "b": 11, None: 11}
    assert {kinds[-1] for kinds in by_lane.values()} == {"response.completed"}


async def test_no_more_than_sixteen_at_once(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        for number in range(20):
            await socket.ask(stream_id=f"lane-{number}")
        assert refused_or_none(await socket.read_event()) is None
        await wait_until_running(gateway, 16)
        await socket.send(type="response.steer", previous_response_id="resp_x", input="faster")
        while (await socket.read_event())["type"] != "response.steer.failed":
            pass  # all 20 requests were seen by now
        assert len(gateway.runs.runs) == 16
        for number in range(20):
            await wait_until_running(gateway, number + 1)
            gateway.runs.runs[number].finish()
        completed = 0
        while completed < 20:
            completed += (await socket.read_event())["type"] == "response.completed"


def refused_or_none(event: Any) -> Any:
    return error_of(event) if event["type"] == "error" else None


async def test_names_of_lanes(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        for name in ("", "x" * 257, "a b", "é", "a\n", "a/b"):
            assert await socket.read_error(stream_id=name) == (400, "invalid_stream_id", "stream_id")
        assert await socket.read_error(stream_id=5) == (400, "invalid_type", "stream_id")
        for number in range(32):
            assert (await socket.create_and_read(stream_id=f"Lane_{number}.-"))["status"] == "completed"
        assert await socket.read_error(stream_id="one-more") == (
            *(400, "websocket_stream_limit_reached", "stream_id"),
        )
        assert (await socket.create_and_read(stream_id="Lane_0.-"))["status"] == "completed"
        assert (await socket.create_and_read())["status"] == "completed"


async def test_what_waits_is_bounded(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        await socket.ask()
        await wait_until_running(gateway)
        for _ in range(64):
            await socket.ask()
        assert [(await socket.read_event())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert await socket.read_error() == (429, "rate_limit_exceeded", None)
    async with open_socket(gateway) as socket:
        await socket.ask(input="x" * 60_000)
        await wait_until_running(gateway, 2)
        await socket.ask(input="x" * 60_000)
        await socket.ask(input="x" * 60_000)  # more than a body may be, in all
        assert [(await socket.read_event())["type"] for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        assert error_of(await socket.read_event()) == (429, "rate_limit_exceeded", None)


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
    gateway: ScriptedGateway, message: Any, expected: Any
) -> None:
    async with open_socket(gateway) as socket:
        await socket.raw.send(message)
        assert error_of(await socket.read_event()) == expected
        assert (await socket.create_and_read())["status"] == "completed"


async def test_steering_is_answered_without_disturbing_the_response(gateway: ScriptedGateway) -> None:
    async with open_socket(gateway) as socket:
        await socket.send(type="response.steer", previous_response_id="resp_1", input=[{"role": "user"}])
        assert await socket.read_event() == snapshot(
            {
                "type": "response.steer.failed",
                "steer": {"previous_response_id": "resp_1", "input": [{"role": "user"}]},
                "error": {
                    "code": "steering_not_supported",
                    "message": "Steering is not supported; send the input with the next response.create.",
                    "type": "invalid_request_error",
                },
                "sequence_number": 0,
            }
        )
        await socket.send(
            type="response.processed", response_id="resp_1"
        )  # Codex says so, and wants no answer
        assert (await socket.create_and_read())["status"] == "completed"


async def test_a_fault_of_ours_is_one_message_and_one_line(
    gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.runs.rejection = RuntimeError("a secret")
    async with open_socket(gateway) as socket:
        await socket.ask(stream_id="x")
        error = await socket.read_event()
        assert error_of(error) == (500, "server_error", None)
        assert error["stream_id"] == "x"
        assert "secret" not in error["error"]["message"]
        gateway.runs.rejection = None
        assert (await socket.create_and_read(stream_id="x"))["status"] == "completed"
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [
        True
    ]


async def test_a_run_that_breaks_says_so_and_ends(gateway: ScriptedGateway) -> None:
    gateway.runs.script = first_events
    async with open_socket(gateway) as socket:
        await socket.ask()
        await wait_until_running(gateway)
        gateway.runs.runs[0].fail(InternalServerError("You read too slowly."))
        events = await socket.read_response()
        assert [event["type"] for event in events[2:]] == ["error", "response.failed"]
        assert (
            events[2]["error"]["message"]
            == events[3]["response"]["error"]["message"]
            == "You read too slowly."
        )
        gateway.runs.script = lambda response: [text_events(response)]
        assert (await socket.create_and_read())["status"] == "completed"


async def test_too_many_responses_at_once_are_told_so() -> None:
    async with (
        run_gateway(limits=RequestLimiter(max_concurrent=1)) as gateway,
        open_socket(gateway) as socket,
    ):
        gateway.runs.script = first_events
        await socket.ask(stream_id="a")
        await wait_until_running(gateway)
        await socket.ask(stream_id="b")
        while (event := await socket.read_event())["stream_id"] == "a":
            pass
        assert error_of(event) == (429, "rate_limit_exceeded", None)
