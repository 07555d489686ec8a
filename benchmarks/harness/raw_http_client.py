"""The least HTTP/1.1 client that will do, so that a benchmark measures the server.

Keep-alive, one request at a time on a connection, bodies by length or in chunks. It is for a server of ours on the
same host and checks nothing that such a server gets right.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class RawResponse:
    status: int
    body: bytearray


class RawConnection(asyncio.Protocol):
    """One connection; `on_bytes` hears each piece of a body as it arrives."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._response: RawResponse | None = None
        self._left = 0  # of the body, where its length is known
        self._chunked = False
        self._done: asyncio.Future[RawResponse] | None = None
        self._on_bytes: Callable[[bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    @property
    def open(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def request(
        self, head: bytes, body: bytes, on_bytes: Callable[[bytes], None] | None = None
    ) -> RawResponse:
        """`head` is the request line and the headers but for the length, each with its line end."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._done = asyncio.get_running_loop().create_future()
        self._on_bytes = on_bytes
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._response is None and not self._read_head():
            return
        if self._chunked:
            self._read_chunks()
        else:
            self._read_plain()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        self._response = RawResponse(int(first.split(b" ", 2)[1]), bytearray())
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._left = int(headers.get(b"content-length", b"0"))
        return True

    def _read_plain(self) -> None:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        self._left -= len(piece)
        self._receive_body(piece)
        if not self._left:
            self._finish()

    def _read_chunks(self) -> None:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:end], 16)
            if len(self._buffer) < end + size + 4:
                return
            piece = bytes(self._buffer[end + 2 : end + 2 + size])
            del self._buffer[: end + size + 4]
            if not size:
                self._finish()
                return
            self._receive_body(piece)

    def _receive_body(self, piece: bytes) -> None:
        if piece and self._response is not None:
            self._response.body += piece
            if self._on_bytes is not None:
                self._on_bytes(piece)

    def _finish(self) -> None:
        response, self._response = self._response, None
        if self._done is not None and response is not None:
            self._done.set_result(response)


class RawHttpClient:
    """As many connections as there are requests at once, kept open; to a unix socket or to a port on this host."""

    def __init__(self, *, socket: str | None = None, port: int = 0, token: str | None = None) -> None:
        self._socket = socket
        self.port = port
        self._headers = b"host: localhost\r\ncontent-type: application/json\r\n"
        if token is not None:
            self._headers += f"authorization: Bearer {token}\r\n".encode()
        self._idle: list[RawConnection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", on_bytes: Callable[[bytes], None] | None = None
    ) -> RawResponse:
        connection = await self._connection()
        head = f"{method} {path} HTTP/1.1\r\n".encode() + self._headers
        response = await connection.request(head, body, on_bytes)
        self._idle.append(connection)
        return response

    async def _connection(self) -> RawConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            _, connection = await loop.create_unix_connection(RawConnection, self._socket)
        else:
            _, connection = await loop.create_connection(RawConnection, "127.0.0.1", self.port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
