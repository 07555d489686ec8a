"""Byte streams with back-pressure, plain or with TLS, and the relay between two of them."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # states in the kernel's tcp_info


class SocketStream:
    """A connected socket, with TLS or without.

    `read` returns what has arrived, or b"" at the end; `send` waits until the buffer has room. Both raise OSError.
    `close` does not wait.
    """

    def __init__(
        self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._sock = sock
        self._reader = reader
        self._writer = writer
        self._buffer = b""

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        *,
        context: ssl.SSLContext | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> "SocketStream":
        """Return a stream that owns the socket; with a context, over verified TLS to the server `name`.

        If that fails, the socket is closed.
        """
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=context, server_hostname=name, ssl_handshake_timeout=timeout, limit=CHUNK_BYTES
            )
        except BaseException:
            sock.close()
            raise
        return cls(sock, reader, writer)

    def push_back(self, data: bytes) -> None:
        """Put bytes back, to be read next."""
        self._buffer = data + self._buffer

    async def read(self) -> bytes:
        if self._buffer:
            data, self._buffer = self._buffer, b""
            return data
        return await self._reader.read(CHUNK_BYTES)

    async def read_exactly(self, count: int) -> bytes:
        """Read exactly `count` bytes. Raises EOFError, OSError."""
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        if len(data) == count:
            return data
        return data + await self._reader.readexactly(count - len(data))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except RuntimeError as error:  # what uvloop raises for a closed connection
            raise ConnectionResetError from error

    async def send_eof(self) -> None:
        """Send what is buffered, then close this direction; the other stays open."""
        try:
            self._writer.transport.set_write_buffer_limits(0)
            await self._writer.drain()
            if self._writer.can_write_eof():
                self._writer.write_eof()
        except RuntimeError as error:
            raise ConnectionResetError from error

    async def linger(self, seconds: float) -> None:
        """Drain the peer's bytes, so that it can read what was sent last: unread bytes would reset the connection."""
        await self.send_eof()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while await self._reader.read(CHUNK_BYTES):
                    pass

    @property
    def is_at_eof(self) -> bool:
        """Whether the peer has sent its last byte."""
        return self._reader.at_eof() or self._writer.is_closing()

    @property
    def is_peer_closed(self) -> bool:
        """Whether the peer has closed its side, even if unread bytes are left."""
        state = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)

    def close(self) -> None:
        self._writer.transport.abort()

    def reset(self) -> None:
        """Close with a TCP reset, so that the peer knows that the data is incomplete."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()


class TlsServerStream:
    """The server side of TLS over another stream, whose first bytes may have been pushed back."""

    def __init__(self, below: SocketStream, context: ssl.SSLContext) -> None:
        self._transport = below
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> None:
        """Perform the handshake. Raises ssl.SSLError, after the alert is sent."""
        await self._run(self._tls.do_handshake)

    async def read(self) -> bytes:
        try:
            return await self._run(lambda: self._tls.read(CHUNK_BYTES))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def _run[Result](self, operation: Callable[[], Result]) -> Result:
        """Run a TLS operation, which may need more bytes of the peer; send what it has written."""
        while True:
            try:
                return operation()
            except ssl.SSLWantReadError:
                pass
            finally:
                await self._flush()
            await self._fill()

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        await self._flush()

    async def _fill(self) -> None:
        data = await self._transport.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._transport.send(self._outgoing.read())

    async def linger(self, seconds: float) -> None:
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()  # sends close_notify
        await self._flush()
        await self._transport.linger(seconds)

    def close(self) -> None:
        self._transport.close()


# The client's side of a session.
type ByteStream = SocketStream | TlsServerStream


async def relay(client: SocketStream, server: SocketStream, on_bytes: Callable[[int, int], None]) -> None:
    """Copy bytes both ways; each direction ends by itself, an error in one ends both."""
    directions = [
        asyncio.ensure_future(_relay_one_way(client, server, lambda count: on_bytes(count, 0))),
        asyncio.ensure_future(_relay_one_way(server, client, lambda count: on_bytes(0, count))),
    ]
    try:
        await asyncio.gather(*directions)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


async def _relay_one_way(source: SocketStream, target: SocketStream, on_bytes: Callable[[int], None]) -> None:
    while data := await source.read():
        on_bytes(len(data))
        await target.send(data)
    await target.send_eof()
