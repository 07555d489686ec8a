"""One sandbox server over HTTP: connections, tokens, and what its answers mean; imports aiohttp and `protocol`.

Unreachable
├── NotConnected     no connection came about
├── Interrupted      a connection broke: asking again may help
└── Silent           nothing came for longer than one waits
The last three are for whoever asks again; others see Unreachable.
"""

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import msgspec
from yarl import URL

from fumehood.protocol.sandbox import PROTOCOL_VERSION
from fumehood.protocol.sandbox_errors import ErrorBody, SandboxError, Unreachable, from_body

VERSION_HEADER = "fumehood-sandbox-protocol"
JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"

_CONNECT_SECONDS = 10.0
# Less than servers keep an idle connection: else one is used while it is being closed.
_KEEP_ALIVE_SECONDS = 4.0
_PIECE = 1 << 18
_LONGEST_ERROR = 1 << 20
_GATEWAY_TROUBLE = (502, 503, 504)

type Content = bytes | AsyncIterable[bytes]


class NotConnected(Unreachable):
    """The server cannot be connected to."""


class Interrupted(Unreachable):
    """The connection broke, or somebody between here and the server could not pass the request on."""


class Silent(Unreachable):
    """The server said nothing for too long."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server, in seconds.

    answer: for the answer to a request; installing packages and unpacking archives take their time.
    silence: between two signs of life of a running call; servers send one every ten seconds.
    retries: how often in a row a broken connection is made again without anything having come of it.
    backoff: the wait before the first of them; it doubles each time, up to two seconds.
    resume: how long after its connection broke a running call is tried to be resumed.
    """

    answer: float = 600.0
    silence: float = 45.0
    retries: int = 6
    backoff: float = 0.1
    resume: float = 2.0

    def pause(self, attempt: int) -> float:
        return min(self.backoff * 2 ** (attempt - 1), 2.0)


class Connection:
    """What all sandboxes of one server share. `url` is `http://host:port`, `https://…` or `unix:/path`.

    explain: may turn an Unreachable into what is known better, e.g. that the server has ended.
    failures: how often no connection came about, one broke, or the server was silent.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        patience: Patience,
        explain: Callable[[Unreachable], SandboxError] | None = None,
    ) -> None:
        self.url = url
        self.patience = patience
        self._socket, self._base = _parse(url)
        self._token = None if token is None else _checked_token(token)
        self._explain = explain
        self.failures = 0
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connection {self.url}>"

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            closed = Unreachable(f"The connection to the sandbox server at {self.url} has been closed.")
            raise self.explained(closed)
        if self._session is None:
            # Every running call holds a connection, so their number is the server's business.
            connector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
                if self._socket is None
                else aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            )
            headers = {VERSION_HEADER: str(PROTOCOL_VERSION), "Accept-Encoding": "identity"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    # ---- requests ---------------------------------------------------------------------------------------------

    async def ask[T](
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: Mapping[str, str] | None = None,
        body: Content | None = None,
        kind: str = JSON_TYPE,
    ) -> T:
        """One request and its answer; asked again if the connection broke and the body can be sent again."""

        async def once() -> T:
            async with self.open(method, path, query=query, body=body, kind=kind) as response:
                with self.translating():
                    content = await response.read()
            try:
                return msgspec.json.decode(content, type=answer)
            except msgspec.MsgspecError as error:
                raise self.broken(f"its answer cannot be read: {error}") from error

        if body is None or isinstance(body, bytes):
            return await self.repeated(once)
        return await once()

    async def tell(self, method: str, path: str) -> None:
        """A request whose answer has no body."""
        async with self.open(method, path):
            pass

    async def repeated[T](self, once: Callable[[], Awaitable[T]]) -> T:
        """Do it again while connections break; only for what may be done twice."""
        attempt = 0
        while True:
            try:
                return await once()
            except Interrupted:
                attempt += 1
                if attempt > self.patience.retries:
                    raise
            await asyncio.sleep(self.patience.pause(attempt))

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Content | None = None,
        kind: str = JSON_TYPE,
        silence: float | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer to a request, if it is a success; what its body still holds is read with `translating`."""
        session = self._open_session()
        sent = None if body is None else _Body(body, kind)
        url = URL(f"{self._base}{path}" + (f"?{urlencode(query)}" if query else ""), encoded=True)
        try:
            with self.translating():
                response = await session.request(
                    method,
                    url,
                    data=sent,
                    headers={} if sent is None else sent.headers,
                    timeout=aiohttp.ClientTimeout(
                        total=None,
                        sock_connect=_CONNECT_SECONDS,
                        sock_read=silence or self.patience.answer,
                    ),
                    allow_redirects=False,  # the token is for this server only
                )
        except Unreachable:
            if sent is not None and sent.failure is not None:
                raise sent.failure from None  # the caller's own: it could not be read
            raise
        try:
            self._check_version(response)
            if not 200 <= response.status < 300:
                error = await self._error(response)
                error.refused = True
                raise error
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    # ---- what went wrong --------------------------------------------------------------------------------------

    @contextmanager
    def translating(self) -> Generator[None]:
        """Failures of the connection as Unreachable, in a sentence."""
        try:
            yield
        except (aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
            unreachable = self._translated(error)
            # This one shows the request's headers, and so the token.
            cause = None if isinstance(error, aiohttp.ClientResponseError) else error
            raise self.explained(unreachable) from cause

    def explained(self, error: Unreachable) -> SandboxError:
        self.failures += 1
        told = error if self._explain is None else self._explain(error)
        told.refused = isinstance(error, NotConnected)
        return told

    def _translated(self, error: Exception) -> Unreachable:
        where = f"The sandbox server at {self.url}"
        match error:
            case aiohttp.ConnectionTimeoutError():
                return NotConnected(
                    f"{where} cannot be reached: no connection within {_CONNECT_SECONDS:g} s."
                )
            case aiohttp.ClientConnectorError():
                return NotConnected(f"{where} cannot be reached: {_reason(error.os_error)}.")
            case TimeoutError():
                return Silent(f"{where} has stopped answering.")
            case aiohttp.ClientResponseError():
                return Unreachable(f"{where} does not speak HTTP: {_short(error.message)}.")
            # aiohttp raises RuntimeError when it is asked to read from what has been closed.
            case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError() | RuntimeError():
                return Interrupted(f"The connection to the sandbox server at {self.url} broke.")
            case _:
                return Unreachable(f"{where} cannot be asked: {_short(str(error))}.")

    def broken(self, what: str) -> Unreachable:
        return Unreachable(f"The sandbox server at {self.url} does not keep to the protocol: {_short(what)}.")

    def _check_version(self, response: aiohttp.ClientResponse) -> None:
        version = response.headers.get(VERSION_HEADER)
        if version == str(PROTOCOL_VERSION):
            return
        if version is not None:
            raise Unreachable(
                f"The sandbox server at {self.url} speaks version {_short(version)} of the sandbox protocol, and this "
                f"program version {PROTOCOL_VERSION}: bring the older one up to date."
            )
        if response.status in _GATEWAY_TROUBLE:
            self.failures += 1
            raise Interrupted(
                f"The sandbox server at {self.url} cannot be reached: something before it answers {response.status}."
            )
        raise Unreachable(
            f"What answers at {self.url} is not a sandbox server (HTTP {response.status}, no {VERSION_HEADER})."
        )

    async def _error(self, response: aiohttp.ClientResponse) -> SandboxError:
        with self.translating():
            try:
                content = await response.content.readexactly(_LONGEST_ERROR)
            except asyncio.IncompleteReadError as end:
                content = end.partial
        try:
            return from_body(response.status, msgspec.json.decode(content, type=ErrorBody))
        except msgspec.MsgspecError:
            return self.broken(f"it answered {response.status} without saying why")


class _Body:
    """A request's body in pieces, read once and no faster than it is sent."""

    def __init__(self, content: Content, kind: str) -> None:
        self.failure: BaseException | None = None
        self.headers = {"Content-Type": kind}
        self._content = content
        self._read = False
        if isinstance(content, bytes):
            self.headers["Content-Length"] = str(len(content))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncGenerator[bytes]:
        if isinstance(self._content, bytes):
            for start in range(0, len(self._content), _PIECE):
                yield self._content[start : start + _PIECE]
            return
        if self._read:
            raise ConnectionResetError("a stream cannot be sent twice")
        self._read = True
        try:
            async for piece in self._content:
                yield piece
        except Exception as error:
            self.failure = error
            raise


def _parse(url: str) -> tuple[str | None, str]:
    """The socket's path, if it is one, and what URLs begin with."""
    scheme, _, rest = url.partition(":")
    if scheme == "unix":
        path = rest.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"{url!r} is not the URL of a sandbox server: a socket's path is absolute")
        return path, "http://sandbox"
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("The URL of a sandbox server holds no user or password: give the token instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} is not the URL of a sandbox server: http://HOST:PORT, https://HOST or unix:/PATH"
        )
    _ = parts.port  # raises ValueError if it is none
    return None, url.rstrip("/")


def _checked_token(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("The token of a sandbox server is printable ASCII without spaces")
    return token


def segment(text: str) -> str:
    """One part of a path, such that nobody on the way takes it for anything else."""
    return quote(text, safe="").replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else _short(str(error))


def _short(text: str) -> str:
    """What a stranger said, fit for a sentence."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in line[:200]).rstrip(".")
