"""The least WebSocket client that will do, with the face of the HTTP one.

Connections are kept open, one response at a time on each. Messages become events of a stream again, so that whoever
reads the one can read the other; that is work of the benchmark's process, not of the server's.
"""

import asyncio
from collections.abc import Callable

from benchmarks.harness.raw_http_client import RawResponse

_HANDSHAKE = (
    b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_PONG = b"\x8a\x80\0\0\0\0"
_LAST = (b'{"type":"response.completed"', b'{"type":"response.failed"', b'{"type":"error"')


class _RawWebSocket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self, body: bytes, on_bytes: Callable[[bytes], None] | None) -> RawResponse:
        # A mask of zeros is a mask, and leaves what it covers as it is.
        message = b'{"type":"response.create",' + body[1:]
        self._writer.write(_head(len(message)) + b"\0\0\0\0" + message)
        events = bytearray()
        while True:
            payload = await self._message()
            event = b"event: %b\ndata: %b\n\n" % (payload.split(b'"', 4)[3], payload)
            events += event
            if on_bytes is not None:
                on_bytes(event)
            if payload.startswith(_LAST):
                return RawResponse(200, events + b"data: [DONE]\n\n")

    async def _message(self) -> bytes:
        while True:
            first, size = await self._reader.readexactly(2)
            if size > 125:
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8))
            payload = await self._reader.readexactly(size)
            if first == 0x81:
                return payload
            if first != 0x89:
                raise ConnectionResetError("the server closed the connection")
            self._writer.write(_PONG)

    def close(self) -> None:
        self._writer.close()


def _head(size: int) -> bytes:
    if size < 126:
        return bytes((0x81, 0x80 | size))
    if size < 65536:
        return b"\x81\xfe" + size.to_bytes(2)
    return b"\x81\xff" + size.to_bytes(8)


class RawWebSocketClient:
    """As many connections as there are requests at once, to a port on this host."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[_RawWebSocket] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", on_bytes: Callable[[bytes], None] | None = None
    ) -> RawResponse:
        if method != "POST":
            raise ValueError("only responses are made over a WebSocket")
        connection = self._idle.pop() if self._idle else await self._connect(path)
        response = await connection.request(body, on_bytes)
        self._idle.append(connection)
        return response

    async def _connect(self, path: str) -> _RawWebSocket:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        writer.write(_HANDSHAKE % path.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101 "):
            raise ConnectionResetError(f"the server did not upgrade: {head[:100]!r}")
        return _RawWebSocket(reader, writer)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
