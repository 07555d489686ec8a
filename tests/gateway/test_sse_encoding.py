"""Events as bytes, for both wires; imports `fumehood.gateway`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.gateway.following import Wire
from fumehood.gateway.messages import Messages
from fumehood.gateway.sse import DONE, EventStream, encode_events
from fumehood.protocol.events import Created, InterpreterFailed, ItemDone, TextDelta
from fumehood.protocol.folding import LOGPROBS, OPENAIS_EVENTS
from fumehood.protocol.responses import Response
from tests.support.sse import parse

DELTA: Any = {"item_id": "msg_1", "output_index": 0, "content_index": 0}


def test_one_event_byte_by_byte() -> None:
    event = TextDelta(sequence_number=4, delta="42", **DELTA)
    assert bytes(encode_events([event], ())).split(b",") == snapshot(
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
    failed = InterpreterFailed(sequence_number=7, item_id="ci_1", output_index=2)
    ((name, event),) = parse(bytes(encode_events([failed], ())) + DONE)
    assert name == event["type"] == "response.code_interpreter_call.failed"
    ((name, told),) = parse(bytes(encode_events([failed], {OPENAIS_EVENTS})) + DONE)
    assert name == told["type"] == "response.code_interpreter_call.completed"
    assert {**told, "type": event["type"]} == event
    message, _ = Messages().some([failed], {OPENAIS_EVENTS}, 1)
    assert b"call.completed" in message


@pytest.mark.parametrize("wire", [EventStream(), Messages(), Messages("lane")], ids=["sse", "socket", "lane"])
def test_what_is_too_much_for_one_write_goes_in_several(wire: Wire) -> None:
    events = [TextDelta(sequence_number=n, delta="é" * 1000, **DELTA) for n in range(10)]
    whole, number = wire.some(events, (), 1 << 20)
    assert number == 10
    pieces = bytearray()
    sizes: list[int] = []
    while events:
        piece, number = wire.some(events, (), 3000)
        pieces += piece
        sizes.append(number)
        events = events[number:]
    assert sizes == [2] * 5
    assert pieces == whole
    assert wire.some([Created(response=Response(id="resp_1", created_at=1, model="m"))] * 2, (), 1)[1] == 1


@given(st.lists(st.text(), min_size=1))
def test_any_text_stays_on_its_line(deltas: list[str]) -> None:
    events = [TextDelta(sequence_number=n, delta=delta, **DELTA) for n, delta in enumerate(deltas)]
    encoded = bytes(encode_events(events, ()))
    assert [value["delta"] for _, value in parse(encoded + b"data: [DONE]\n\n")] == deltas
    # Also for readers who take other characters for the end of a line.
    assert len(encoded.decode().splitlines()) == 3 * len(deltas)


def test_bytes_of_others_cannot_break_a_line() -> None:
    response = Response(id="resp_1", created_at=1, model="m")
    response.tools = [Raw(b'{"type":"x",\r\n"a" :\n[1,\r2]}')]
    for event in (
        Created(sequence_number=0, response=response),
        ItemDone(sequence_number=1, output_index=0, item=Raw(b'{"type":\n"program"\r}')),
        TextDelta(sequence_number=2, delta="x", logprobs=[Raw(b'{"a":\n1}')], **DELTA),
    ):
        encoded = bytes(encode_events([event], (LOGPROBS,)))
        assert encoded.count(b"\n") == 3
        assert b"\r" not in encoded
        assert len(parse(encoded + b"data: [DONE]\n\n")) == 1
