"""Framing between supervisor and runner over a SOCK_SEQPACKET pair.

One packet is one frame. The kernel keeps packets whole: an interrupt cannot split a frame, and two processes that write
at once cannot mix theirs. A message longer than one packet is a sequence of frames of the same kind and call; all but
the last have the flag `MORE`.

    packet  = kind (1 byte) | flags (1 byte) | call id (16 bytes) | body (0 .. MAX_BODY bytes)

Both ends use this module. The supervisor does not trust what it decodes: see `MessageAssembler`.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

CALL_ID_BYTES = 16
NO_CALL = bytes(CALL_ID_BYTES)
MAX_BODY = 64 * 1024
_HEADER = struct.Struct(f"!BB{CALL_ID_BYTES}s")
MAX_PACKET = _HEADER.size + MAX_BODY
MORE = 0x01


class MessageKind(enum.IntEnum):
    """The type of a message."""

    # supervisor -> runner
    CONFIGURE = 1  # JSON, once, before any user code
    EXECUTE = 2  # JSON {"code": str, …}
    COMMAND = 3  # the same, for a shell command
    # init -> supervisor, before any user code; only JAILED may carry fds
    FAILED = 14  # UTF-8 text: why the jail could not be built; nothing ran
    JAILED = 15  # with fds: data directory, mount namespace and, in mode `namespaces`, the listeners
    # runner -> supervisor
    CONFIGURED = 17  # after each CONFIGURE; the first means that the sandbox has started
    STDOUT = 18  # UTF-8 text
    STDERR = 19  # UTF-8 text
    DISPLAY = 20  # JSON {mime type: text or base64}
    RESULT = 21  # JSON {mime type: text or base64}: the value of the last expression
    ERROR = 22  # JSON {"name", "value", "traceback"}: the code raised
    END = 23  # JSON {"exit_code": int, "interrupted": bool}
    OUTPUT = 24  # text of both streams, in order: see output_packets.py


_KINDS: dict[int, MessageKind] = {
    kind.value: kind for kind in MessageKind
}  # faster than the enum's own lookup


class FrameError(Exception):
    """The peer violated the framing; the supervisor ends the sandbox."""


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message; `call` is the id of its call, or `NO_CALL`."""

    kind: MessageKind
    call: bytes
    body: bytes


def encode_packets(message: ChannelMessage) -> Iterator[bytes]:
    """Yield the packets of one message, in order."""
    body = memoryview(message.body)
    start = 0
    while True:
        chunk = body[start : start + MAX_BODY]
        start += MAX_BODY
        last = start >= len(body)
        yield _HEADER.pack(message.kind, 0 if last else MORE, message.call) + chunk
        if last:
            return


class MessageAssembler:
    """Joins packets into messages and rejects everything that `encode_packets` would not send.

    limit: the largest body of a message in bytes, and so the most memory that this holds.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._unfinished: tuple[MessageKind, bytes] | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, packet: bytes) -> ChannelMessage | None:
        """Return the message that this packet completes, or None. Raises FrameError."""
        if len(packet) < _HEADER.size or len(packet) > MAX_PACKET:
            raise FrameError(f"a packet of {len(packet)} bytes")
        number, flags, call = _HEADER.unpack_from(packet)
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError(f"unknown frame kind {number}")
        if flags & ~MORE:
            raise FrameError(f"unknown frame flags {flags:#x}")
        if self._unfinished is not None and self._unfinished != (kind, call):
            raise FrameError(f"{kind.name} frame inside an unfinished {self._unfinished[0].name} message")
        body = packet[_HEADER.size :]
        self._size += len(body)
        if self._size > self._limit:
            raise FrameError(f"a {kind.name} message of more than {self._limit} bytes")
        if flags & MORE:
            if len(body) != MAX_BODY:
                raise FrameError(f"an unfinished {kind.name} frame of {len(body)} bytes")
            self._unfinished = (kind, call)
            self._parts.append(body)
            return None
        whole = b"".join([*self._parts, body]) if self._parts else body
        self._unfinished, self._parts, self._size = None, [], 0
        return ChannelMessage(kind, call, whole)
