"""Event streams made readable and checked, for snapshots and invariants."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.response_projection import project_event, project_response
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    ContentPartAdded,
    ContentPartDone,
    ContentPartEvent,
    OutputItemAdded,
    OutputItemDone,
    ResponseEvent,
    StreamEvent,
)

_ID = re.compile(r"\b(resp|msg|rs|fc|ctc|ci|cntr|cfile|call)_[0-9a-f]{16,48}\b")
_OPENING = {"response.created", "response.in_progress", "response.queued"}
_CLOSING = {"response.completed", "response.failed", "response.incomplete"}


def make_readable(events: Iterable[StreamEvent | dict[str, Any]]) -> list[dict[str, Any]]:
    """The events as plain data: ids numbered by kind, and of whole responses only what changes."""
    text = msgspec.json.encode(list(events)).decode()
    known: dict[str, str] = {}
    counts: dict[str, int] = {}

    def name(match: re.Match[str]) -> str:
        if match[0] not in known:
            counts[match[1]] = counts.get(match[1], 0) + 1
            known[match[0]] = f"{match[1]}_{counts[match[1]]}"
        return known[match[0]]

    plain: list[dict[str, Any]] = msgspec.json.decode(_ID.sub(name, text))
    for event in plain:
        if event["type"] in _OPENING:
            event["response"] = {key: event["response"][key] for key in ("id", "status")}
        elif event["type"] in _CLOSING:
            kept = ("id", "status", "error", "incomplete_details", "usage")
            output = [item["id"] for item in event["response"]["output"]]
            event["response"] = {key: event["response"][key] for key in kept} | {"output": output}
    return plain


def event_types(events: Iterable[StreamEvent]) -> list[str]:
    return [str(event.__struct_config__.tag) for event in events]


def check_invariants(events: Sequence[StreamEvent]) -> Response:
    """What holds for every stream whatsoever; the response that it adds up to."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.output_index for event in events if isinstance(event, OutputItemAdded)]
    done = [event.output_index for event in events if isinstance(event, OutputItemDone)]
    assert added == list(range(len(added)))
    assert sorted(done) == added
    opened = [_part(event) for event in events if isinstance(event, ContentPartAdded)]
    assert sorted(opened) == sorted(_part(event) for event in events if isinstance(event, ContentPartDone))
    places = {event.output_index: _id(event.item) for event in events if isinstance(event, OutputItemAdded)}
    for event in events:
        if isinstance(event, OutputItemDone):
            assert _id(event.item) == places[event.output_index]
        elif (item_id := getattr(event, "item_id", None)) is not None:
            assert item_id == places[getattr(event, "output_index", -1)]
    assert sum(event_types([event])[0] in _CLOSING for event in events) == 1
    last = events[-1]
    assert isinstance(last, ResponseEvent)
    assert event_types([last])[0] in _CLOSING
    assert aggregate_events(events) == last.response
    for include in (
        [],
        ["code_interpreter_call.outputs"],
        ["fumehood:execution", "message.output_text.logprobs"],
        ["reasoning.encrypted_content"],
    ):
        seen = aggregate_events(project_event(event, include) for event in events)
        assert seen == project_response(last.response, include)
    return last.response


def _id(item: Any) -> str:
    return msgspec.json.decode(item)["id"] if isinstance(item, msgspec.Raw) else item.id


def _part(event: ContentPartEvent) -> tuple[int, int]:
    return event.output_index, event.content_index
