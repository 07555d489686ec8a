"""Text of both streams in few messages, in the order in which it was written; imports only siblings.

    OUTPUT body = (stream (1 byte: 1 or 2) | length (4 bytes) | UTF-8 text) …, at least two, in one packet

Text of one stream alone is a STDOUT or STDERR message. Not JSON: escapes would make text up to six times as long.
"""

import builtins
import struct
from collections.abc import Iterable, Iterator

from fumehood.sandboxd.inside import wire
from fumehood.sandboxd.inside.wire import Kind

globals()["__builtins__"] = dict(vars(builtins))  # see streams.py

_HEADER = struct.Struct("!BI")
_NUMBERS = {Kind.STDOUT: 1, Kind.STDERR: 2}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}
_LONGEST_CHARACTER = 4


def messages(call: bytes, pieces: Iterable[tuple[Kind, bytes]]) -> Iterator[wire.Message]:
    """What carries these texts (whole characters), each message in one packet."""
    batch: list[tuple[Kind, bytes]] = []
    room = wire.MAX_BODY
    for kind, data in _joined(pieces):
        start = 0
        while start < len(data):
            if room < _HEADER.size + _LONGEST_CHARACTER:
                yield _message(call, batch)
                batch, room = [], wire.MAX_BODY
            end = boundary(data, start + room - _HEADER.size)
            batch.append((kind, data[start:end]))
            room -= _HEADER.size + end - start
            start = end
            if start < len(data):
                room = 0
    if batch:
        yield _message(call, batch)


def split(body: bytes) -> list[tuple[Kind, str]]:
    """The texts of an OUTPUT message; FrameError or UnicodeDecodeError for whatever `messages` would not make."""
    if len(body) > wire.MAX_BODY:
        raise wire.FrameError("a batch longer than a packet")
    found: list[tuple[Kind, str]] = []
    start = 0
    while start < len(body):
        text = start + _HEADER.size
        if text > len(body):
            raise wire.FrameError("a batch that is cut off")
        number, length = _HEADER.unpack_from(body, start)
        start = text + length
        if number not in _KINDS or not length or start > len(body):
            raise wire.FrameError(f"a piece of {length} bytes for stream {number} in a batch")
        found.append((_KINDS[number], body[text:start].decode()))
    if len(found) < 2:
        raise wire.FrameError("a batch of less than two pieces")
    return found


def boundary(data: bytes, cut: int) -> int:
    """The largest index not above `cut` at which a character of this UTF-8 text begins or the text ends."""
    if cut >= len(data):
        return len(data)
    while cut > 0 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _joined(pieces: Iterable[tuple[Kind, bytes]]) -> list[tuple[Kind, bytes]]:
    runs: list[tuple[Kind, list[bytes]]] = []
    for kind, data in pieces:
        if runs and runs[-1][0] is kind:
            runs[-1][1].append(data)
        else:
            runs.append((kind, [data]))
    return [(kind, parts[0] if len(parts) == 1 else b"".join(parts)) for kind, parts in runs]


def _message(call: bytes, batch: list[tuple[Kind, bytes]]) -> wire.Message:
    if len(batch) == 1:
        return wire.Message(batch[0][0], call, batch[0][1])
    parts = [part for kind, data in batch for part in (_HEADER.pack(_NUMBERS[kind], len(data)), data)]
    return wire.Message(Kind.OUTPUT, call, b"".join(parts))
