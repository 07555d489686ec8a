"""A small HTTP/1.1 client: one request at a time on a connection, kept for the next; imports httptools and asyncio.

ClientError
├── NotConnected     no connection came about
├── Broken           the connection broke before the answer was complete
├── Silent           nothing came for longer than one waits
└── NotHttp          what came is not an answer

It does what asking a model server takes and nothing else: no redirects, cookies, proxies or compression. Of a body that
comes in a thousand chunks no single one costs a line of Python; docs/decisions/0014 has the figures.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Literal, override
from urllib.parse import quote, urlsplit

import httptools

_LONGEST_HEAD = 1 << 16
_MOST_HELD = 1 << 18  # bytes that wait to be read before the server has to
_PIECE = 1 << 18
# Less than servers keep an idle connection, which is five seconds for many: else one is used while it is being closed.
_KEEP_ALIVE_SECONDS = 4.0

type Origin = tuple[str, int, bool]


class ClientError(Exception):
    """An answer that could not be had; says why, in half a sentence."""


class NotConnected(ClientError):
    pass


class Broken(ClientError):
    pass


class Silent(ClientError):
    pass


class NotHttp(ClientError):
    pass


class Target:
    """An address, and the head of every request to it, made once."""

    def __init__(self, method: Literal["GET", "POST"], url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        name = (parts.hostname or "").encode("idna").decode()
        tls = parts.scheme == "https"
        self.origin: Origin = (name, parts.port or (443 if tls else 80), tls)
        host = f"[{name}]" if ":" in name else name
        lines = {
            "host": host if parts.port is None else f"{host}:{parts.port}",
            "user-agent": "fumehood",
            "accept": "*/*",
            "accept-encoding": "identity",
            **{name.lower(): value for name, value in headers.items()},
        }
        first = f"{method} {quote(parts.path, safe="/%:@!$&'()*+,;=~")} HTTP/1.1\r\n"
        self._head = (first + "".join(f"{name}: {value}\r\n" for name, value in lines.items())).encode(
            "latin-1"
        )

    def head(self, body: bytes | None) -> bytes:
        return (
            b"%bcontent-length: %d\r\n\r\n" % (self._head, len(body))
            if body is not None
            else self._head + b"\r\n"
        )


class Client:
    """Connections to any number of servers; those that are idle are used again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, list[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """End every connection, also those in use."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._open):
            connection.abort()

    async def request(
        self, target: Target, body: bytes | None, *, connect: float, silence: float
    ) -> "Answer":
        """Send a request; the answer, once its head is there. Raises ClientError.

        connect, silence: seconds until there is a connection, and seconds without a byte.
        """
        connection = self._idle_one(target.origin) or await self._connect(target.origin, connect)
        answer = connection.ask(silence)
        try:
            await connection.send(target.head(body), body or b"")
            await answer.begun()
        except BaseException:
            connection.abort()
            raise
        return answer

    # ---- connections ------------------------------------------------------------------------------------------

    def _idle_one(self, origin: Origin) -> "_Connection | None":
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self, origin: Origin, seconds: float) -> "_Connection":
        host, port, tls = origin
        until = self._loop.time() + seconds
        try:
            async with asyncio.timeout(seconds):
                found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise NotConnected(f"its name was not found within {seconds:g} s") from None
        except OSError:
            raise NotConnected("its name is not known") from None
        failure: Exception = NotConnected("its name is not known")
        for number, (family, *_, address) in enumerate(found):
            # An address that swallows everything must not use up the time of the others.
            share = (until - self._loop.time()) / (len(found) - number)
            try:
                async with asyncio.timeout(share):
                    _, connection = await self._loop.create_connection(
                        lambda: _Connection(self, origin),
                        str(address[0]),
                        port,
                        family=family,
                        ssl=self._tls_context() if tls else None,
                        server_hostname=host if tls else None,
                    )
            except OSError as error:
                failure = _not_connected(error, seconds)
            else:
                return connection
        raise failure

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def lost(self, connection: "_Connection") -> None:
        self._open.discard(connection)

    def release(self, connection: "_Connection") -> None:
        """It may be used again."""
        connection.idle_since = self._loop.time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEP_ALIVE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        limit = self._loop.time() - _KEEP_ALIVE_SECONDS
        self._sweep = None
        for origin, connections in tuple(self._idle.items()):
            for connection in connections:
                if connection.idle_since <= limit:
                    connection.abort()
            kept = [connection for connection in connections if connection.usable]
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        if self._idle:
            self._sweep = self._loop.call_later(_KEEP_ALIVE_SECONDS / 4, self._close_idle)


def _not_connected(error: OSError, seconds: float) -> NotConnected:
    match error:
        case TimeoutError():
            return NotConnected(f"no connection within {seconds:g} s")
        case ssl.SSLCertVerificationError():
            return NotConnected(f"its certificate is not accepted: {error.verify_message}")
        case ssl.SSLError():
            return NotConnected(f"no TLS with it ({error.reason})")
        case _:
            number = error.errno or 0
            return NotConnected(os.strerror(number) if number > 0 else "the connection failed")


class _Connection(asyncio.Protocol):
    """One connection; `idle_since` is when it was last used."""

    def __init__(self, client: Client, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._answer: Answer | None = None
        self._full = False
        self.usable = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all methods of asyncio's and are none of its classes.
        self._transport: asyncio.Transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self.usable = True
        self._client.opened(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._client.lost(self)
        if self._answer is not None:
            self._answer.cut(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(data)
        else:
            self.abort()  # nobody has asked

    @override
    def pause_writing(self) -> None:
        self._full = True

    @override
    def resume_writing(self) -> None:
        self._full = False
        if self._answer is not None:
            self._answer.wake()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    def ask(self, silence: float) -> "Answer":
        self._answer = Answer(self, self._loop, silence)
        return self._answer

    async def send(self, head: bytes, body: bytes) -> None:
        """A long body in pieces, and no more of it once the server has answered."""
        answer = self._answer
        if len(body) <= _PIECE:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        for start in range(0, len(body), _PIECE):
            self._transport.write(body[start : start + _PIECE])
            while self._full and answer is not None:
                if answer.status or answer.failure is not None:
                    answer.reusable = False
                    return
                await answer.news()

    def release(self) -> None:
        self._answer = None
        if self.usable:
            self._client.release(self)

    def abort(self) -> None:
        self.usable = False
        self._answer = None
        self._transport.abort()


class Answer:
    """An answer as it comes. `leave` it when it is no longer wanted.

    complete: whether nothing more will come. reusable: whether the connection may have another request after that.
    """

    def __init__(self, connection: _Connection, loop: asyncio.AbstractEventLoop, silence: float) -> None:
        self.status = 0
        self.complete = False
        self.reusable = True
        self.retry_after: str | None = None
        self.failure: ClientError | None = None
        self._connection = connection
        self._loop = loop
        self._silence = silence
        self._heard = loop.time()
        self._timer = loop.call_later(silence, self._look)
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held = 0
        self._paused = False
        self._head_bytes = 0
        self._framed = False
        # The parser calls this itself, for every chunk.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)

    # ---- for the reader ---------------------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait for the head; raises ClientError."""
        while not self.status:
            if self.failure is not None:
                raise self.failure
            await self.news()

    async def read(self) -> bytes:
        """Everything that has come since the last time, at least something; nothing at the end. Raises ClientError."""
        pieces = self._pieces
        while not pieces:
            if self.failure is not None:
                raise self.failure
            if self.complete:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self._connection.resume_reading()
        return content

    def leave(self) -> None:
        """Give the connection back if all was read, else close it: so a server learns that nobody wants the rest."""
        self._timer.cancel()
        if self.complete and self.reusable and not self._paused:
            self._connection.release()
        else:
            self._connection.abort()

    async def news(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    # ---- for the connection -----------------------------------------------------------------------------------

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(NotHttp("its answer is not HTTP"))
            return
        self._held += len(data)
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self._fail(NotHttp("the head of its answer has no end"))
        elif self._held > _MOST_HELD and not self._paused and not self.complete:
            self._paused = True
            self._connection.pause_reading()
        self.wake()

    def cut(self, error: Exception | None) -> None:
        """The connection has ended, which is how some answers do."""
        self.reusable = False
        if self.status and not self._framed and error is None:
            self.complete = True
        elif not self.complete:
            self._fail(Broken("the connection broke"))
        self._timer.cancel()
        self.wake()

    def _fail(self, failure: ClientError) -> None:
        self.reusable = False
        if not self.complete and self.failure is None:
            self.failure = failure
        self.wake()

    def _look(self) -> None:
        quiet = 0.0 if self._paused else self._loop.time() - self._heard
        if quiet >= self._silence:
            self._fail(Silent("nothing came"))
        else:
            self._timer = self._loop.call_later(self._silence - quiet, self._look)

    # ---- for the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("one answer was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-length" | b"transfer-encoding":
                self._framed = True
            case b"retry-after":
                self.retry_after = value.decode("latin-1")
            case b"content-encoding":
                if value.strip().lower() not in (b"", b"identity"):
                    raise ValueError("it is compressed, though that was not asked for")
            case _:
                pass

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self._framed = False  # another head follows

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
            self.reusable = self.reusable and self._parser.should_keep_alive()
