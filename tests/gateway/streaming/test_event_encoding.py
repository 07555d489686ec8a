"""Encoding of events as server-sent events and WebSocket messages."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.gateway.streaming.event_sender import EventEncoder
from fumehood.gateway.streaming.server_sent_events import DONE_EVENT, SseEncoder, encode_batch
from fumehood.gateway.streaming.websocket_frame_encoder import WebSocketEncoder
from fumehood.protocol.openai.response_projection import INCLUDE_LOGPROBS, ONLY_OPENAI_EVENTS
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    CodeInterpreterCallFailed,
    OutputItemDone,
    OutputTextDelta,
    ResponseCreated,
    StreamEvent,
)
from tests.support.sse_parsing import parse_events

DELTA: Any = {"item_id": "msg_1", "output_index": 0, "content_index": 0}


def encode(events: Sequence[StreamEvent], include: Collection[str]) -> bytes:
    return bytes(encode_batch(events, include, sys.maxsize)[0])


def test_one_event_byte_by_byte() -> None:
    event = OutputTextDelta(sequence_number=4, delta="42", **DELTA)
    assert encode([event], ()).split(b",") == snapshot(
        [
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"',
            b'"sequence_number":4',
            b'"item_id":"msg_1"',
            b'"output_index":0',
            b'"content_index":0',
            b'"delta":"42"',
            b'"logprobs":[]}\n\n',
        ]
    )


def test_a_client_that_knows_only_openais_events_is_told_of_no_other() -> None:
    failed = CodeInterpreterCallFailed(sequence_number=7, item_id="ci_1", output_index=2)
    ((name, event),) = parse_events(encode([failed], ()) + DONE_EVENT)
    assert name == event["type"] == "response.code_interpreter_call.failed"
    ((name, told),) = parse_events(encode([failed], {ONLY_OPENAI_EVENTS}) + DONE_EVENT)
    assert name == told["type"] == "response.code_interpreter_call.completed"
    assert {**told, "type": event["type"]} == event
    message, _ = WebSocketEncoder().encode_batch([failed], {ONLY_OPENAI_EVENTS}, 1)
    assert b"call.completed" in message


@pytest.mark.parametrize(
    "wire", [SseEncoder(), WebSocketEncoder(), WebSocketEncoder("lane")], ids=["sse", "socket", "lane"]
)
def test_what_is_too_much_for_one_write_goes_in_several(wire: EventEncoder) -> None:
    events = [OutputTextDelta(sequence_number=n, delta="é" * 1000, **DELTA) for n in range(10)]
    whole, number = wire.encode_batch(events, (), 1 << 20)
    assert number == 10
    pieces = bytearray()
    sizes: list[int] = []
    while events:
        piece, number = wire.encode_batch(events, (), 3000)
        pieces += piece
        sizes.append(number)
        events = events[number:]
    assert sizes == [2] * 5
    assert pieces == whole
    assert (
        wire.encode_batch(
            [ResponseCreated(response=Response(id="resp_1", created_at=1, model="m"))] * 2, (), 1
        )[1]
        == 1
    )


@given(st.lists(st.text(), min_size=1))
def test_any_text_stays_on_its_line(deltas: list[str]) -> None:
    events = [OutputTextDelta(sequence_number=n, delta=delta, **DELTA) for n, delta in enumerate(deltas)]
    encoded = encode(events, ())
    assert [value["delta"] for _, value in parse_events(encoded + b"data: [DONE]\n\n")] == deltas
    # Also for readers who take other characters for the end of a line.
    assert len(encoded.decode().splitlines()) == 3 * len(deltas)


def test_bytes_of_others_cannot_break_a_line() -> None:
    response = Response(id="resp_1", created_at=1, model="m")
    response.tools = [Raw(b'{"type":"x",\r\n"a" :\n[1,\r2]}')]
    for event in (
        ResponseCreated(sequence_number=0, response=response),
        OutputItemDone(sequence_number=1, output_index=0, item=Raw(b'{"type":\n"program"\r}')),
        OutputTextDelta(sequence_number=2, delta="x", logprobs=[Raw(b'{"a":\n1}')], **DELTA),
    ):
        encoded = encode([event], (INCLUDE_LOGPROBS,))
        assert encoded.count(b"\n") == 3
        assert b"\r" not in encoded
        assert len(parse_events(encoded + b"data: [DONE]\n\n")) == 1
