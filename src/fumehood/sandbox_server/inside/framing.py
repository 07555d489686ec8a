"""Framing between supervisor and runner over a SOCK_SEQPACKET pair.

One packet is one frame: the kernel keeps packets whole, so a frame can neither be torn by an interrupt
nor trickled byte by byte, and two processes writing at once cannot mix theirs. A message longer than one
packet is a run of frames of the same kind and call, all but the last flagged `MORE`.

    packet  = kind (1 byte) | flags (1 byte) | call id (16 bytes) | body (0 .. MAX_BODY bytes)

Both ends use this module, but the supervisor trusts nothing it decodes: see `Assembler`.
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
    """What a message is; who sends it is said below."""

    # supervisor -> runner
    CONFIGURE = 1  # JSON, once, before any user code
    EXECUTE = 2  # JSON {"code": str, …}
    COMMAND = 3  # the same, for the shell
    # init -> supervisor, before any user code; fds are taken from no other frame
    FAILED = 14  # UTF-8 text: the jail could not be built, nothing ran
    JAILED = 15  # carries fds: the data directory, the mount namespace, the listeners of `namespaces`
    # runner -> supervisor
    CONFIGURED = 17  # each time; the first one says that the sandbox has started
    STDOUT = 18  # UTF-8 text
    STDERR = 19  # UTF-8 text
    DISPLAY = 20  # JSON {mime type: text or base64}
    RESULT = 21  # JSON {mime type: text or base64}: the value of the last expression
    ERROR = 22  # JSON {"name", "value", "traceback"}: the code raised
    END = 23  # JSON {"exit_code": int, "interrupted": bool}
    OUTPUT = 24  # text of both streams, in order: see batches.py


_KINDS: dict[int, MessageKind] = {kind.value: kind for kind in MessageKind}  # faster than the enum's own way


class FrameError(Exception):
    """The peer broke the framing; the sandbox behind it is no longer to be talked to."""


@dataclass(frozen=True, slots=True)
class RunnerMessage:
    kind: MessageKind
    call: bytes
    body: bytes


def encode_packets(message: RunnerMessage) -> Iterator[bytes]:
    """The packets that carry one message, in order."""
    body = memoryview(message.body)
    start = 0
    while True:
        piece = body[start : start + MAX_BODY]
        start += MAX_BODY
        last = start >= len(body)
        yield _HEADER.pack(message.kind, 0 if last else MORE, message.call) + piece
        if last:
            return


class MessageAssembler:
    """Turns packets back into messages, refusing whatever `packets` would not have sent.

    `limit` bounds the body of one message; memory held is never more than that.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._unfinished: tuple[MessageKind, bytes] | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, packet: bytes) -> RunnerMessage | None:
        """The message that this packet completes, or None while more is to come."""
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
        return RunnerMessage(kind, call, whole)
