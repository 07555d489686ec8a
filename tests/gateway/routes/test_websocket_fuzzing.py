"""Fuzzed WebSocket messages with the real engine: every one is answered."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

from tests.gateway.conftest import Target
from tests.gateway.test_request_fuzzing import FIELDS, bounded, json_values, requests
from tests.support.websocket_client import TERMINAL_TYPES

# Continue the last response that was seen, in whatever lane it was.
LAST = "resp_the_last_one"


def _create(request: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**request, **more, "type": "response.create"}


creates = st.builds(
    _create,
    requests | st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "stream_id": st.sampled_from(["a", "b", ""]) | json_values,
            "previous_response_id": st.just(LAST),
            "generate": st.booleans() | json_values,
            "store": st.booleans(),
        },
    ),
)
good = st.sampled_from(
    [
        {"type": "response.create", "model": "scripted", "input": "hi", "store": False},
        {"type": "response.create", "model": "scripted", "input": "hi", "previous_response_id": LAST},
        {"type": "response.create", "model": "scripted", "stream_id": "a", "generate": False},
        {"type": "response.steer", "previous_response_id": LAST, "input": "x"},
        {"type": "response.processed", "response_id": LAST},
    ]
)
messages: st.SearchStrategy[Any] = (
    good
    | creates
    | st.text(max_size=30)
    | st.binary(max_size=30)
    | json_values.map(json.dumps)
    | st.dictionaries(st.sampled_from(["type", "stream_id", "input"]), json_values).map(json.dumps)
    | st.lists(st.text(max_size=5), min_size=1, max_size=3)  # in pieces
)


@settings(bounded, max_examples=60)
@given(st.lists(messages, max_size=8))
@example([{"type": "response.create", "model": "scripted", "input": "\ud800"}] * 3)
@example([{"type": "response.create", "model": "scripted", "stream_id": f"{n}"} for n in range(40)])
@example(["[" * 50_000, '{"a":' * 30_000, '{"type":"response.create","input":' + "[" * 90_000])
@example([{"type": "response.steer", "input": [[[[]]]]}, {"type": "response.steer"}, b"\0", ""])
def test_everything_is_answered_and_nothing_breaks(target: Target, messages: Sequence[Any]) -> None:
    with connect(f"ws://127.0.0.1:{target.port}/v1/responses", max_size=None) as socket:
        last = "resp_none"
        for group in (messages, ['{"type":"response.create","model":"scripted","input":"still there?"}']):
            for message in group:
                socket.send(_written(message, last))
            expected = sum(
                message != {"type": "response.processed", "response_id": LAST} for message in group
            )
            while expected:
                event = json.loads(socket.recv(timeout=30))
                if event["type"] == "response.created":
                    last = event["response"]["id"]
                expected -= event["type"] in (*TERMINAL_TYPES, "response.steer.failed") or "status" in event
                assert event["type"] != "response.failed"
                if event["type"] == "error":
                    assert 400 <= event["status"] < 500, event
                    assert event["error"]["code"]
        assert event["type"] == "response.completed"  # pyright: ignore[reportPossiblyUnboundVariable]


def _written(message: Any, last: str) -> Any:
    """A dict is sent as JSON, a list of texts in pieces."""
    return json.dumps(message).replace(LAST, last) if isinstance(message, dict) else message
