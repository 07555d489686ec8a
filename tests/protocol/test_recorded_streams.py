"""Streams that were recorded from real servers, through our types; skipped where the recordings are missing."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.stream_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    StreamEvent,
)
from tests.support.decoding import read_event

RECORDED = Path(__file__).parents[3] / "shared" / "reference" / "recorded"
STREAMS = sorted(RECORDED.glob("*.chunks.txt"))
# What servers send and we leave alone: padding, and what one vendor alone counts.
EXTRA = {"obfuscation", "copilot_usage"}

pytestmark = pytest.mark.skipif(not STREAMS, reason="the recorded streams are not here")


def lines(path: Path) -> Iterator[bytes]:
    for line in path.read_bytes().splitlines():
        if line.strip():
            try:
                json.loads(line)
            except ValueError:
                continue  # cut off in the recording
            yield line


def events_of(path: Path) -> list[tuple[dict[str, Any], StreamEvent]]:
    read = [(json.loads(line), read_event(line)) for line in lines(path)]
    return [(plain, event) for plain, event in read if event is not None]


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_no_field_of_an_event_is_unknown(path: Path) -> None:
    known = events_of(path)
    assert known
    for plain, event in known:
        ours = json.loads(msgspec.json.encode(event))
        assert ours["type"] == plain["type"]
        assert ours["sequence_number"] == plain.get("sequence_number", -1)
        missing = plain.keys() - ours.keys() - EXTRA
        assert not missing, plain["type"]


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_a_recorded_stream_adds_up(path: Path) -> None:
    streams: list[list[StreamEvent]] = []
    for _, event in events_of(path):
        if isinstance(event, ResponseCreated) or not streams:
            streams.append([])
        streams[-1].append(event)
    ended = [stream for stream in streams if isinstance(stream[-1], ResponseCompleted | ResponseFailed)]
    if not ended:
        pytest.skip("the recording ends before the response does")
    for stream in ended:
        folded, last = aggregate_events(stream), stream[-1]
        assert isinstance(last, ResponseCompleted | ResponseFailed)
        assert folded.id == last.response.id
        kinds = Counter(type(item).__name__ for item in last.response.output)
        assert Counter(type(item).__name__ for item in folded.output) == kinds
