"""Properties of the framing: messages survive a round trip, and everything else is rejected."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.inside import output_packets
from fumehood.sandbox_server.inside.framing import (
    CALL_ID_BYTES,
    MAX_BODY,
    MAX_PACKET,
    MORE,
    ChannelMessage,
    FrameError,
    MessageAssembler,
    MessageKind,
    encode_packets,
)
from fumehood.sandbox_server.inside.runner import output_limits

LIMIT = 4 * MAX_BODY
CALL = bytes(range(CALL_ID_BYTES))
_HEADER = 2 + CALL_ID_BYTES
_KINDS = st.sampled_from(MessageKind)
_CALLS = st.binary(min_size=CALL_ID_BYTES, max_size=CALL_ID_BYTES)
# Sizes around the edges matter, contents do not.
_EDGES = [0, 1, MAX_BODY - 1, MAX_BODY, MAX_BODY + 1, 2 * MAX_BODY, 3 * MAX_BODY + 7, LIMIT]
_BODIES = st.one_of(st.binary(max_size=100), st.sampled_from(_EDGES).map(lambda size: b"\xe2" * size))
_MESSAGES = st.builds(ChannelMessage, _KINDS, _CALLS, _BODIES)
_LONG = st.builds(ChannelMessage, _KINDS, _CALLS, st.sampled_from(_EDGES[4:]).map(bytes))


@given(st.lists(_MESSAGES, max_size=5))
def test_messages_come_out_as_they_went_in(messages: list[ChannelMessage]) -> None:
    assembler = MessageAssembler(limit=LIMIT)
    found: list[ChannelMessage] = []
    for message in messages:
        for packet in encode_packets(message):
            assert len(packet) <= MAX_PACKET
            complete = assembler.feed(packet)
            if complete is not None:
                found.append(complete)
    assert found == messages


@given(_MESSAGES)
def test_only_the_last_packet_completes_a_message(message: ChannelMessage) -> None:
    assembler = MessageAssembler(limit=LIMIT)
    *first, last = encode_packets(message)
    assert [assembler.feed(packet) for packet in first] == [None] * len(first)
    assert assembler.feed(last) == message
    assert len(first) == max(0, len(message.body) - 1) // MAX_BODY


@given(_LONG, _MESSAGES, st.integers(1, 10))
def test_a_message_inside_another_is_refused(
    message: ChannelMessage, other: ChannelMessage, after: int
) -> None:
    if (message.kind, message.call) == (other.kind, other.call):
        return
    *first, _ = encode_packets(message)
    assembler = MessageAssembler(limit=LIMIT)
    for packet in first[:after]:
        assert assembler.feed(packet) is None
    with pytest.raises(FrameError):
        assembler.feed(next(iter(encode_packets(other))))


@given(_LONG, st.integers(0, LIMIT))
def test_a_message_beyond_the_limit_is_refused_as_soon_as_it_is(message: ChannelMessage, limit: int) -> None:
    assembler = MessageAssembler(limit=limit)
    fed = 0
    for packet in encode_packets(message):
        fed += len(packet) - _HEADER
        if fed > limit:
            with pytest.raises(FrameError):
                assembler.feed(packet)
            return
        assembler.feed(packet)
    assert len(message.body) <= limit


@given(_KINDS, _CALLS, st.integers(0, MAX_BODY - 1))
def test_an_unfinished_frame_must_be_full(kind: MessageKind, call: bytes, size: int) -> None:
    with pytest.raises(FrameError):
        MessageAssembler(limit=LIMIT).feed(bytes([kind, MORE]) + call + bytes(size))


@given(_KINDS, st.integers(2, 255), _CALLS)
def test_unknown_flags_and_kinds_are_refused(kind: MessageKind, odd: int, call: bytes) -> None:
    with pytest.raises(FrameError):
        MessageAssembler(limit=LIMIT).feed(bytes([kind, odd]) + call)
    if odd not in {int(known) for known in MessageKind}:
        with pytest.raises(FrameError):
            MessageAssembler(limit=LIMIT).feed(bytes([odd, 0]) + call)


def test_packets_of_impossible_size_are_refused() -> None:
    with pytest.raises(FrameError):
        MessageAssembler(limit=LIMIT).feed(
            bytes([MessageKind.STDOUT, 0]) + bytes(CALL_ID_BYTES + MAX_BODY + 1)
        )
    with pytest.raises(FrameError):
        MessageAssembler(limit=LIMIT).feed(bytes(_HEADER - 1))


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
    assembler = MessageAssembler(limit=limit)
    try:
        for packet in hostile:
            message = assembler.feed(packet)
            assert message is None or len(message.body) <= limit
    except FrameError:
        pass


# --- batches ------------------------------------------------------------------------------------------

_STREAMS = st.sampled_from([MessageKind.STDOUT, MessageKind.STDERR])
_LENGTHS = [1, MAX_BODY // 4 - 2, MAX_BODY // 4, MAX_BODY // 2 + 1, MAX_BODY - 5, MAX_BODY]
_LONG_TEXTS = [char * length for char in ("x", "é", "€", "😀", "a😀") for length in _LENGTHS]
_TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(_LONG_TEXTS))
_PIECES = st.lists(st.tuples(_STREAMS, _TEXTS), max_size=12)


def _runs(pieces: list[tuple[MessageKind, str]]) -> list[tuple[MessageKind, str]]:
    """Text of one stream joined as far as nothing came between."""
    written = [(kind, text) for kind, text in pieces if text]
    grouped = itertools.groupby(written, key=lambda piece: piece[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in grouped]


@given(_PIECES)
def test_batches_keep_text_and_order_in_few_packets(pieces: list[tuple[MessageKind, str]]) -> None:
    found: list[tuple[MessageKind, str]] = []
    made = list(output_packets.pack_output(CALL, [(kind, text.encode()) for kind, text in pieces]))
    for message in made:
        assert message.call == CALL
        assert 0 < len(message.body) <= MAX_BODY
        if message.kind is MessageKind.OUTPUT:
            found.extend(output_packets.unpack_output(message.body))
        else:
            found.append((message.kind, message.body.decode()))
    assert _runs(found) == _runs(pieces)
    size = sum(len(text.encode()) + 5 for _, text in pieces)
    assert len(made) <= size // (MAX_BODY - 16) + 1


@given(_PIECES)
def test_a_batch_is_no_longer_than_what_it_counts_for(pieces: list[tuple[MessageKind, str]]) -> None:
    switches = sum(one[0] is not other[0] for one, other in itertools.pairwise(pieces))
    text = sum(len(text.encode()) for _, text in pieces)
    made = output_packets.pack_output(CALL, [(kind, text.encode()) for kind, text in pieces])
    assert sum(len(message.body) for message in made) <= text + output_limits.SWITCH_COST * switches


def test_text_of_one_stream_is_no_batch() -> None:
    pieces = [(MessageKind.STDERR, b"a"), (MessageKind.STDERR, b"b")]
    assert list(output_packets.pack_output(CALL, pieces)) == [ChannelMessage(MessageKind.STDERR, CALL, b"ab")]


@given(st.binary(max_size=60))
def test_whatever_comes_is_a_batch_or_refused(body: bytes) -> None:
    try:
        pieces = output_packets.unpack_output(body)
    except (FrameError, UnicodeDecodeError):
        return
    assert len(pieces) >= 2
    assert sum(len(text.encode()) + 5 for _, text in pieces) == len(body)
