"""A small HTTP/1.1 client made for streams of many small events; imports httptools and `serving`.

HttpTrouble
├── NotConnected     no connection came about
├── Broken           the connection ended before the answer did
├── Silent           nothing came for longer than one waits
└── NotHttp          what came is no HTTP

One task reads an answer, and gets all that has come since it last asked. There are no redirects, no proxies, no
cookies and no compression: a model server has no use for them, and each is a way for a key to get lost.
"""

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property, partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools

from fumehood.serving.read_share import SLICE, ReadShare, cut

# Less than servers keep an idle connection, which is five seconds for many: else one is used while it is being closed.
_KEEP_ALIVE_SECONDS = 4.0
_MOST_CONNECTIONS = 1024
_MOST_IDLE = 256  # of one server
_LONGEST_HEAD = 1 << 16
_HIGH_WATER = 1 << 17  # of a body that nobody has read yet
_ONE_WRITE = 1 << 14  # up to here a copy is cheaper than many pieces
_DRAIN_SECONDS = 1.0


class HttpTrouble(Exception):
    """The answer cannot be had, or cannot go on."""


class NotConnected(HttpTrouble):
    """Its text says why, without naming an address."""


class Broken(HttpTrouble):
    pass


class Silent(HttpTrouble):
    pass


class NotHttp(HttpTrouble):
    pass


class Patience(NamedTuple):
    """In seconds: until there is a connection, and how long the server may be silent."""

    connect: float
    silence: float


# Takes a piece of a body; whether it wants to hear more.
type Listener = Callable[[bytes], bool]


class Address(NamedTuple):
    """Where a server is, and what requests to it begin with."""

    secure: bool
    host: str
    port: int
    name: str
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Of an http(s) URL without query; raises ValueError."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        host = parts.hostname or ""
        name = parts.netloc.rpartition("@")[2]
        return cls(secure, host, parts.port or (443 if secure else 80), name, parts.path.rstrip("/"))


class _Connection(asyncio.Protocol):
    """One connection: an asyncio protocol, and the callbacks of the parser."""

    def __init__(self, share: ReadShare) -> None:
        self._loop = asyncio.get_running_loop()
        self._share = share
        self._unparsed: deque[bytes] = deque()  # bytes that wait for their share of time, in slices
        self._lost: tuple[Exception | None] | None = (
            None  # how the connection ended, while some of them waited
        )
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence = 0.0
        self._heard = 0.0
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._listener: Listener | None = None
        self._trouble: Exception | None = None
        self._keeps_alive = False
        self.used = False
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._barren = 0  # bytes that have come since the last of the body
        self._in_body = False
        self._by_end = False  # the body ends with the connection
        self.complete = False

    # ---- for whoever asks -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def answered(self) -> bool:
        """Whether anything has come."""
        return self._head_bytes > 0

    def send(self, message: Sequence[bytes], silence: float) -> None:
        """Begin an exchange."""
        if self._transport is None:
            raise Broken
        self._parser = httptools.HttpResponseParser(self)
        self._parts, self._size = [], 0
        self._head_bytes, self._barren, self._in_body, self._by_end = 0, 0, False, False
        self.headers = {}
        self.complete = self._keeps_alive = False
        self._silence = silence
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(silence, self._check_silence)
        if len(message) == 1:
            self._transport.write(message[0])
        else:
            self._transport.writelines(message)

    async def read_head(self) -> None:
        """Until status and headers are there; raises HttpTrouble."""
        while not self._in_body:
            await self._wait()

    async def read(self) -> bytes:
        """The body that has come since the last time, at least something and about a slice at most; nothing at the end.
        Raises HttpTrouble.
        """
        while not self._parts:
            if self.complete:
                return b""
            await self._wait()
        return self._taken()

    async def tell(self, listener: Listener) -> bool:
        """Give what comes of the body to the listener, at once and without waking anybody, until it has heard enough or
        there is no more; whether there is no more. Raises HttpTrouble, and what the listener does.
        """
        while True:
            while self._parts:
                if not listener(self._taken()):
                    return False
                if self._parts:
                    await asyncio.sleep(0)  # others have their turns
            if self.complete and self._trouble is None:
                return True
            self._listener = listener
            try:
                await self._wait()
            finally:
                enough, self._listener = self._listener is None, None
            if enough:
                return False

    def _taken(self) -> bytes:
        """What has come of the body, but for what is more than a slice."""
        if self._size <= 2 * SLICE:
            parts, self._parts = self._parts, []
            self._size = 0
        else:
            size = number = 0
            while size < SLICE:
                size += len(self._parts[number])
                number += 1
            parts, self._parts = self._parts[:number], self._parts[number:]
            self._size -= size
        if self._paused:
            self._pause_or_resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pause_or_resume(self) -> None:
        """Read from the socket unless something of what it brought is still to be parsed, or much of it to be read."""
        paused = bool(self._unparsed) or self._size > _HIGH_WATER
        if self._transport is None or paused == self._paused or self._transport.is_closing():
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def end(self) -> bool:
        """The exchange is over; whether the connection may be used again."""
        if self._timer is not None:
            self._timer.cancel()
        unread = self._parts or self._unparsed
        reusable = self.complete and self._keeps_alive and not unread and self.is_open
        self._parser = None
        self.used = True
        self.idle_since = self._loop.time()
        return reusable

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        """Until something has happened; raises HttpTrouble if nothing can any more."""
        if self._trouble is not None:
            raise self._trouble
        self._heard = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, trouble: HttpTrouble) -> None:
        if self._trouble is None and not self.complete:
            self._trouble = trouble
        self._wake()
        self.abort()

    def _check_silence(self) -> None:
        """One timer for a whole answer: it looks when something was last heard, and goes on waiting for the rest."""
        left = self._heard + self._silence - self._loop.time()
        if self._waiter is not None and left <= 0.001:
            self._fail(Silent())
        else:
            wait = left if self._waiter is not None else self._silence
            self._timer = self._loop.call_later(wait, self._check_silence)

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.abort()  # nobody asked
            return
        self._heard = self._loop.time()
        share = self._share
        if len(data) > SLICE or share.is_used_up or self._unparsed:
            if not self._unparsed:
                share.wait(self)
            self._unparsed.extend(cut(data))
            self._pause_or_resume()
            return
        began = perf_counter()
        self._parse(data)
        share.spent += perf_counter() - began

    def parse_slice(self) -> bool:
        """Parse some of the bytes that wait for it; whether others still do."""
        if self._parser is None or self._trouble is not None:
            self._unparsed.clear()
        if self._unparsed:
            began = perf_counter()
            try:
                self._parse(self._unparsed.popleft())
            except BaseException:  # as the event loop does where it calls
                self._unparsed.clear()
                self._fail(Broken())
                raise
            finally:
                self._share.spent += perf_counter() - began
        if self._unparsed:
            return True
        if self._lost is not None:
            self._end_connection(*self._lost)
        elif self._parser is not None:
            self._pause_or_resume()
        return False

    def _parse(self, data: bytes) -> None:
        if self._parser is None:
            return
        if not self._in_body:
            self._head_bytes += len(data)
        size = self._size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(NotHttp())
            return
        # Between two pieces of a body, or after the last, can be as much of what is none as somebody likes to say.
        self._barren = self._barren + len(data) if self._in_body and self._size == size else 0
        if (self._head_bytes if not self._in_body else self._barren) > _LONGEST_HEAD:
            self._fail(NotHttp())
            return
        if self._parts and self._trouble is None and self._goes_on_listening():
            return
        self._wake()
        if self._size > _HIGH_WATER:
            self._pause_or_resume()

    def _goes_on_listening(self) -> bool:
        """Give what has come to whoever listens; False if somebody has to be woken."""
        if self._listener is None:
            return False
        try:
            if not self._listener(self._taken()):
                self._listener = None
        except Exception as error:  # a mistake of the listener's, for whoever waits
            self._trouble = error
            return False
        return self._listener is not None and not self.complete

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unparsed:
            self._lost = (exc,)  # what came before that is parsed first
        else:
            self._end_connection(exc)

    def _end_connection(self, exc: Exception | None) -> None:
        if self._in_body and self._by_end and exc is None:
            self.complete = True
        self._transport = None
        self._fail(Broken())

    # ---- callbacks of the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._keeps_alive = False  # an answer that nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # nobody looks at what comes after a body
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None or self.complete:
            return
        self.status = parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._in_body = True
        self._keeps_alive = parser.should_keep_alive()
        self._by_end = b"content-length" not in self.headers and b"transfer-encoding" not in self.headers

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._parts.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self._in_body:
            self.complete = True


class HttpAnswer:
    """An answer whose body is still coming; a context manager, which asks for it.

    complete: set it where nothing of interest is to come: then the end of the body is waited for, for a moment, and
        the connection lives on.
    """

    def __init__(
        self, asking: Coroutine[Any, Any, _Connection], give_back: Callable[[_Connection], None]
    ) -> None:
        self._asking = asking
        self._give_back = give_back
        self._connection: _Connection | None = None
        self.status = 0
        self.complete = False

    async def __aenter__(self) -> Self:
        connection = self._connection = await self._asking
        self.status = connection.status
        self.read = connection.read
        self.tell = connection.tell
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            if self.complete and not connection.complete:
                await _drained(connection)
        finally:
            self._give_back(connection)

    def header(self, name: bytes) -> str:
        """By its name in lower case; empty if there is none."""
        headers = self._connection.headers if self._connection is not None else {}
        return headers.get(name, b"").decode("latin-1")


class HttpClient:
    """Connections to any number of servers, kept alive between requests."""

    def __init__(self, most_connections: int = _MOST_CONNECTIONS) -> None:
        self._idle: dict[tuple[bool, str, int], list[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._free = asyncio.Semaphore(most_connections)
        self._share = ReadShare()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for connection in self._all:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports go

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def request(
        self,
        address: Address,
        path: str,
        headers: bytes,
        patience: Patience,
        body: Sequence[bytes] | None = None,
    ) -> HttpAnswer:
        """A POST with that body, which is given in pieces, or a GET; its answer, whatever its status. Entering it
        raises HttpTrouble. Leaving it before its end closes the connection, which is how a server learns that nobody
        wants the rest.
        """
        asking = self._answering(address, _message(address, path, headers, body), patience)
        return HttpAnswer(asking, partial(self._give_back, address))

    async def _answering(self, address: Address, message: Sequence[bytes], patience: Patience) -> _Connection:
        """A connection on which the head of the answer has come."""
        while True:
            connection = self._take(address) or await self._connect(address, patience.connect)
            try:
                connection.send(message, patience.silence)
                await connection.read_head()
                return connection
            except Broken:
                again = connection.used and not connection.answered
                self._give_back(address, connection)
                if not again:  # else the server had closed it while it was idle
                    raise
            except BaseException:
                self._give_back(address, connection)
                raise

    def _take(self, address: Address) -> _Connection | None:
        if self._closed:
            raise NotConnected("the gateway is closing its connections")
        idle = self._idle.get(address[:3])
        while idle:
            connection = idle.pop()
            fresh = asyncio.get_running_loop().time() - connection.idle_since < _KEEP_ALIVE_SECONDS
            if fresh and connection.is_open:
                return connection
            self._drop(connection)
        return None

    async def _connect(self, address: Address, seconds: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                self._make_room()
                await self._free.acquire()
                try:
                    _, connection = await loop.create_connection(
                        partial(_Connection, self._share),
                        address.host,
                        address.port,
                        ssl=self._tls if address.secure else None,
                    )
                except BaseException:
                    self._free.release()
                    raise
        except TimeoutError:
            raise NotConnected(f"no connection within {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise NotConnected(_reason(error)) from error
        self._all.add(connection)
        return connection

    def _make_room(self) -> None:
        """What is idle gives way to what is needed."""
        if self._free.locked():
            for idle in self._idle.values():
                while idle:
                    self._drop(idle.pop())

    def _give_back(self, address: Address, connection: _Connection) -> None:
        idle = self._idle.setdefault(address[:3], [])
        if connection.end() and not self._closed and len(idle) < _MOST_IDLE:
            idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        connection.abort()
        self._all.discard(connection)
        self._free.release()


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as requests take them, made once for many."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def _message(address: Address, path: str, headers: bytes, body: Sequence[bytes] | None) -> Sequence[bytes]:
    """The whole request; in one piece, if it is short."""
    start = f"{'GET' if body is None else 'POST'} {address.path}{path} HTTP/1.1\r\nHost: {address.name}\r\n".encode()
    if body is None:
        return [b"%b%b\r\n" % (start, headers)]
    size = sum(map(len, body))
    head = b"%b%bContent-Length: %d\r\n\r\n" % (start, headers, size)
    return [b"".join([head, *body])] if size < _ONE_WRITE else [head, *body]


async def _drained(connection: _Connection) -> None:
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            await connection.read()
    except (HttpTrouble, TimeoutError):
        pass


def _reason(error: Exception) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return "its certificate is not to be trusted"
        case ssl.SSLError():
            return "it does not speak TLS as it should"
        case socket.gaierror():
            return "its name is not known"
        case OSError() if error.errno and error.errno > 0:
            return os.strerror(error.errno)
        case _:
            return "no connection could be made"
