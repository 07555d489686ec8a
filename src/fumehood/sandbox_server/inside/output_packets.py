"""Packs text of stdout and stderr into few messages, in the order in which it was written.

    OUTPUT body = (stream (1 byte: 1 or 2) | length (4 bytes) | UTF-8 text) …, at least two chunks, in one packet

Text of one stream alone is a STDOUT or STDERR message. This is not JSON, whose escapes make text up to six times as
long.
"""

import builtins
import struct
from collections.abc import Iterable, Iterator

from fumehood.sandbox_server.inside import framing
from fumehood.sandbox_server.inside.framing import MessageKind

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_HEADER = struct.Struct("!BI")
_STREAM_NUMBERS = {MessageKind.STDOUT: 1, MessageKind.STDERR: 2}
_STREAM_KINDS = {number: kind for kind, number in _STREAM_NUMBERS.items()}
_LONGEST_CHARACTER = 4


def pack_output(
    call_id: bytes, chunks: Iterable[tuple[MessageKind, bytes]]
) -> Iterator[framing.ChannelMessage]:
    """Yield the messages for these texts (whole UTF-8 characters), each of at most one packet."""
    batch: list[tuple[MessageKind, bytes]] = []
    room = framing.MAX_BODY
    for kind, data in _join_adjacent(chunks):
        start = 0
        while start < len(data):
            if room < _HEADER.size + _LONGEST_CHARACTER:
                yield _make_message(call_id, batch)
                batch, room = [], framing.MAX_BODY
            end = utf8_boundary(data, start + room - _HEADER.size)
            batch.append((kind, data[start:end]))
            room -= _HEADER.size + end - start
            start = end
            if start < len(data):
                room = 0
    if batch:
        yield _make_message(call_id, batch)


def unpack_output(body: bytes) -> list[tuple[MessageKind, str]]:
    """Return the texts of an OUTPUT message.

    Raises FrameError or UnicodeDecodeError for a body that `pack_output` would not make.
    """
    if len(body) > framing.MAX_BODY:
        raise framing.FrameError("a batch longer than a packet")
    found: list[tuple[MessageKind, str]] = []
    start = 0
    while start < len(body):
        text = start + _HEADER.size
        if text > len(body):
            raise framing.FrameError("a truncated batch")
        number, length = _HEADER.unpack_from(body, start)
        start = text + length
        if number not in _STREAM_KINDS or not length or start > len(body):
            raise framing.FrameError(f"a chunk of {length} bytes for stream {number} in a batch")
        found.append((_STREAM_KINDS[number], body[text:start].decode()))
    if len(found) < 2:
        raise framing.FrameError("a batch of fewer than two chunks")
    return found


def utf8_boundary(data: bytes, cut: int) -> int:
    """Return the largest index up to `cut` at which a UTF-8 character begins or the text ends."""
    if cut >= len(data):
        return len(data)
    while cut > 0 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _join_adjacent(chunks: Iterable[tuple[MessageKind, bytes]]) -> list[tuple[MessageKind, bytes]]:
    runs: list[tuple[MessageKind, list[bytes]]] = []
    for kind, data in chunks:
        if runs and runs[-1][0] is kind:
            runs[-1][1].append(data)
        else:
            runs.append((kind, [data]))
    return [(kind, parts[0] if len(parts) == 1 else b"".join(parts)) for kind, parts in runs]


def _make_message(call: bytes, batch: list[tuple[MessageKind, bytes]]) -> framing.ChannelMessage:
    if len(batch) == 1:
        return framing.ChannelMessage(batch[0][0], call, batch[0][1])
    parts = [part for kind, data in batch for part in (_HEADER.pack(_STREAM_NUMBERS[kind], len(data)), data)]
    return framing.ChannelMessage(MessageKind.OUTPUT, call, b"".join(parts))
