"""The framing's properties: what goes in comes out, and nothing else does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandboxd.inside import batches, bounds
from fumehood.sandboxd.inside.wire import (
    CALL_ID_BYTES,
    MAX_BODY,
    MAX_PACKET,
    MORE,
    Assembler,
    FrameError,
    Kind,
    Message,
    packets,
)

LIMIT = 4 * MAX_BODY
CALL = bytes(range(CALL_ID_BYTES))
_HEADER = 2 + CALL_ID_BYTES
_KINDS = st.sampled_from(Kind)
_CALLS = st.binary(min_size=CALL_ID_BYTES, max_size=CALL_ID_BYTES)
# Sizes around the edges matter, contents do not.
_EDGES = [0, 1, MAX_BODY - 1, MAX_BODY, MAX_BODY + 1, 2 * MAX_BODY, 3 * MAX_BODY + 7, LIMIT]
_BODIES = st.one_of(st.binary(max_size=100), st.sampled_from(_EDGES).map(lambda size: b"\xe2" * size))
_MESSAGES = st.builds(Message, _KINDS, _CALLS, _BODIES)
_LONG = st.builds(Message, _KINDS, _CALLS, st.sampled_from(_EDGES[4:]).map(bytes))


@given(st.lists(_MESSAGES, max_size=5))
def test_messages_come_out_as_they_went_in(messages: list[Message]) -> None:
    assembler = Assembler(limit=LIMIT)
    found: list[Message] = []
    for message in messages:
        for packet in packets(message):
            assert len(packet) <= MAX_PACKET
            complete = assembler.feed(packet)
            if complete is not None:
                found.append(complete)
    assert found == messages


@given(_MESSAGES)
def test_only_the_last_packet_completes_a_message(message: Message) -> None:
    assembler = Assembler(limit=LIMIT)
    *first, last = packets(message)
    assert [assembler.feed(packet) for packet in first] == [None] * len(first)
    assert assembler.feed(last) == message
    assert len(first) == max(0, len(message.body) - 1) // MAX_BODY


@given(_LONG, _MESSAGES, st.integers(1, 10))
def test_a_message_inside_another_is_refused(message: Message, other: Message, after: int) -> None:
    if (message.kind, message.call) == (other.kind, other.call):
        return
    *first, _ = packets(message)
    assembler = Assembler(limit=LIMIT)
    for packet in first[:after]:
        assert assembler.feed(packet) is None
    with pytest.raises(FrameError):
        assembler.feed(next(iter(packets(other))))


@given(_LONG, st.integers(0, LIMIT))
def test_a_message_beyond_the_limit_is_refused_as_soon_as_it_is(message: Message, limit: int) -> None:
    assembler = Assembler(limit=limit)
    fed = 0
    for packet in packets(message):
        fed += len(packet) - _HEADER
        if fed > limit:
            with pytest.raises(FrameError):
                assembler.feed(packet)
            return
        assembler.feed(packet)
    assert len(message.body) <= limit


@given(_KINDS, _CALLS, st.integers(0, MAX_BODY - 1))
def test_an_unfinished_frame_must_be_full(kind: Kind, call: bytes, size: int) -> None:
    with pytest.raises(FrameError):
        Assembler(limit=LIMIT).feed(bytes([kind, MORE]) + call + bytes(size))


@given(_KINDS, st.integers(2, 255), _CALLS)
def test_unknown_flags_and_kinds_are_refused(kind: Kind, odd: int, call: bytes) -> None:
    with pytest.raises(FrameError):
        Assembler(limit=LIMIT).feed(bytes([kind, odd]) + call)
    if odd not in {int(known) for known in Kind}:
        with pytest.raises(FrameError):
            Assembler(limit=LIMIT).feed(bytes([odd, 0]) + call)


def test_packets_of_impossible_size_are_refused() -> None:
    with pytest.raises(FrameError):
        Assembler(limit=LIMIT).feed(bytes([Kind.STDOUT, 0]) + bytes(CALL_ID_BYTES + MAX_BODY + 1))
    with pytest.raises(FrameError):
        Assembler(limit=LIMIT).feed(bytes(_HEADER - 1))


def _frame(kind: int, flags: int, call: bytes, body: bytes) -> bytes:
    return bytes([kind, flags]) + call + body


_FRAMELIKE = st.builds(
    _frame,
    st.integers(0, 40),
    st.integers(0, 3),
    st.sampled_from([bytes(CALL_ID_BYTES), b"\x01" * CALL_ID_BYTES]),
    st.sampled_from([b"", b"x", bytes(MAX_BODY)]),
)


@given(st.lists(st.one_of(st.binary(max_size=60), _FRAMELIKE), max_size=12), st.integers(0, 2 * MAX_BODY))
def test_arbitrary_bytes_are_messages_within_the_limit_or_a_frame_error(
    hostile: list[bytes], limit: int
) -> None:
    assembler = Assembler(limit=limit)
    try:
        for packet in hostile:
            message = assembler.feed(packet)
            assert message is None or len(message.body) <= limit
    except FrameError:
        pass


# --- batches ------------------------------------------------------------------------------------------

_STREAMS = st.sampled_from([Kind.STDOUT, Kind.STDERR])
_LENGTHS = [1, MAX_BODY // 4 - 2, MAX_BODY // 4, MAX_BODY // 2 + 1, MAX_BODY - 5, MAX_BODY]
_LONG_TEXTS = [char * length for char in ("x", "é", "€", "😀", "a😀") for length in _LENGTHS]
_TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(_LONG_TEXTS))
_PIECES = st.lists(st.tuples(_STREAMS, _TEXTS), max_size=12)


def _runs(pieces: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    """Text of one stream joined as far as nothing came between."""
    written = [(kind, text) for kind, text in pieces if text]
    grouped = itertools.groupby(written, key=lambda piece: piece[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in grouped]


@given(_PIECES)
def test_batches_keep_text_and_order_in_few_packets(pieces: list[tuple[Kind, str]]) -> None:
    found: list[tuple[Kind, str]] = []
    made = list(batches.messages(CALL, [(kind, text.encode()) for kind, text in pieces]))
    for message in made:
        assert message.call == CALL
        assert 0 < len(message.body) <= MAX_BODY
        if message.kind is Kind.OUTPUT:
            found.extend(batches.split(message.body))
        else:
            found.append((message.kind, message.body.decode()))
    assert _runs(found) == _runs(pieces)
    size = sum(len(text.encode()) + 5 for _, text in pieces)
    assert len(made) <= size // (MAX_BODY - 16) + 1


@given(_PIECES)
def test_a_batch_is_no_longer_than_what_it_counts_for(pieces: list[tuple[Kind, str]]) -> None:
    switches = sum(one[0] is not other[0] for one, other in itertools.pairwise(pieces))
    text = sum(len(text.encode()) for _, text in pieces)
    made = batches.messages(CALL, [(kind, text.encode()) for kind, text in pieces])
    assert sum(len(message.body) for message in made) <= text + bounds.SWITCH_COST * switches


def test_text_of_one_stream_is_no_batch() -> None:
    pieces = [(Kind.STDERR, b"a"), (Kind.STDERR, b"b")]
    assert list(batches.messages(CALL, pieces)) == [Message(Kind.STDERR, CALL, b"ab")]


@given(st.binary(max_size=60))
def test_whatever_comes_is_a_batch_or_refused(body: bytes) -> None:
    try:
        pieces = batches.split(body)
    except (FrameError, UnicodeDecodeError):
        return
    assert len(pieces) >= 2
    assert sum(len(text.encode()) + 5 for _, text in pieces) == len(body)
