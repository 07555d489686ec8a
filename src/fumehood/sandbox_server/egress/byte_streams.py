"""Byte streams with back-pressure, plain and with TLS on top."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Protocol

CHUNK_BYTES = 64 * 1024


_RESET = struct.pack("ii", 1, 0)


_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # states in the kernel's tcp_info


class ByteStream(Protocol):
    """A connection that is read and written, plain or encrypted."""

    async def read(self) -> bytes:
        """What has arrived, or b"" at the end; OSError when the connection broke."""
        ...

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more."""
        ...

    def close(self) -> None:
        """At once, without waiting for anything."""
        ...


class SocketStream:
    """A connected socket, with TLS or without."""

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
        """Takes the socket over; with a context, TLS to the server of that name, verified."""
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=context, server_hostname=name, ssl_handshake_timeout=timeout, limit=CHUNK_BYTES
        )
        return cls(sock, reader, writer)

    def push_back(self, data: bytes) -> None:
        """Put bytes back in front of what is still to be read."""
        self._buffer = data + self._buffer

    async def read(self) -> bytes:
        if self._buffer:
            held, self._buffer = self._buffer, b""
            return held
        return await self._reader.read(CHUNK_BYTES)

    async def read_exactly(self, count: int) -> bytes:
        """That many bytes; EOFError if there are fewer."""
        held, self._buffer = self._buffer[:count], self._buffer[count:]
        if len(held) == count:
            return held
        return held + await self._reader.readexactly(count - len(held))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except RuntimeError as error:  # uvloop's word for a closed connection
            raise ConnectionResetError from error

    async def send_eof(self) -> None:
        """Send what is still here, and nothing more; the other direction stays open."""
        try:
            self._writer.transport.set_write_buffer_limits(0)
            await self._writer.drain()
            if self._writer.can_write_eof():
                self._writer.write_eof()
        except RuntimeError as error:
            raise ConnectionResetError from error

    async def linger(self, seconds: float) -> None:
        """Let the peer read what was sent last: bytes of its own that nobody read would reset the connection."""
        await self.send_eof()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while await self._reader.read(CHUNK_BYTES):
                    pass

    @property
    def is_at_eof(self) -> bool:
        """Whether the peer is known to send nothing more."""
        return self._reader.at_eof() or self._writer.is_closing()

    @property
    def is_peer_closed(self) -> bool:
        """Whether the peer has ended its side, also with bytes that nobody has read yet."""
        state = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)

    def close(self) -> None:
        self._writer.transport.abort()

    def reset(self) -> None:
        """So that the peer cannot take what it got for the whole."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()


class TlsServerStream:
    """The server's end of TLS over another stream whose first bytes were read already."""

    def __init__(self, below: SocketStream, context: ssl.SSLContext) -> None:
        self._transport = below
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> None:
        """ssl.SSLError if the client does not want it; it has been told by then."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()
                raise
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        while True:
            try:
                data = self._tls.read(CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            else:
                await self._flush()
                return data

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
            self._tls.unwrap()  # says that this was all
        await self._flush()
        await self._transport.linger(seconds)

    def close(self) -> None:
        self._transport.close()


async def relay(client: SocketStream, server: SocketStream, on_bytes: Callable[[int, int], None]) -> None:
    """Each direction ends by itself, as with one connection; an error in one ends both."""
    ways = [
        asyncio.ensure_future(_relay_one_way(client, server, lambda count: on_bytes(count, 0))),
        asyncio.ensure_future(_relay_one_way(server, client, lambda count: on_bytes(0, count))),
    ]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _relay_one_way(source: SocketStream, target: SocketStream, on_bytes: Callable[[int], None]) -> None:
    while data := await source.read():
        on_bytes(len(data))
        await target.send(data)
    await target.send_eof()
