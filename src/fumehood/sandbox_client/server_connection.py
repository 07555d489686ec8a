"""HTTP connection to one sandbox server: authentication, retries, error translation.

SandboxServerUnreachable
├── SandboxConnectError      no connection could be made
├── SandboxConnectionLost    the connection broke; a retry may help
└── SandboxReadTimeout       the server sent nothing for too long
"""

import asyncio
import math
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
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

from fumehood.protocol.sandbox.sandbox_errors import (
    SandboxError,
    SandboxErrorBody,
    SandboxServerUnreachable,
    from_sandbox_error_body,
)
from fumehood.protocol.sandbox.sandbox_messages import PROTOCOL_VERSION

VERSION_HEADER = "fumehood-sandbox-protocol"
JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"

_CONNECT_TIMEOUT = 10.0
_MAX_BACKOFF = 2.0
# Shorter than the server's, so that no connection is used while the server closes it.
_KEEP_ALIVE_SECONDS = 4.0
_CHUNK_BYTES = 1 << 18
_MAX_ERROR_BYTES = 1 << 20
_GATEWAY_ERROR_STATUSES = (502, 503, 504)

# A callable makes the stream, and makes it again if the request is sent again.
type RequestContent = bytes | AsyncIterable[bytes] | Callable[[], AsyncIterable[bytes]]


class SandboxConnectError(SandboxServerUnreachable):
    """No connection to the server could be made."""


class SandboxConnectionLost(SandboxServerUnreachable):
    """The connection broke, or a proxy could not reach the server."""


class SandboxReadTimeout(SandboxServerUnreachable):
    """The server sent nothing for too long."""


@dataclass(frozen=True, slots=True)
class SandboxConnectionTimeouts:
    """Timeouts and retries, in seconds.

    response: for a response; installing packages and unpacking archives take time.
    read: between two keepalives of a running execution; servers send one every ten seconds.
    retries: attempts in a row after a broken connection.
    backoff: pause before the first retry; it doubles each time, up to two seconds.
    resume: how long the event stream of an execution is resumed after its connection broke.
    """

    response: float = 600.0
    read: float = 45.0
    retries: int = 6
    backoff: float = 0.1
    resume: float = 2.0


class RequestRetryState:
    """The attempts to repeat one request whose connection breaks.

    retryable: errors after which it is repeated. within: seconds from the first of them until the last attempt.
    failures: attempts in a row that brought nothing. disconnected_at: time of the first, by the event loop's clock.
    """

    def __init__(
        self,
        settings: SandboxConnectionTimeouts,
        retryable: tuple[type[SandboxServerUnreachable], ...],
        within: float = math.inf,
    ) -> None:
        self.failures = 0
        self.disconnected_at: float | None = None
        self._settings = settings
        self._retryable = retryable
        self._within = within

    def progress(self) -> None:
        """Note that the server has sent something: later failures are counted from the beginning."""
        self.failures = 0
        self.disconnected_at = None

    async def wait(self, error: SandboxError) -> None:
        """Wait before the next attempt. Raises `error` if there is to be none."""
        is_retryable = isinstance(error, self._retryable)
        now = asyncio.get_running_loop().time()
        if self.disconnected_at is None and is_retryable:
            self.disconnected_at = now
        error.disconnected_at = self.disconnected_at
        left = self._within if self.disconnected_at is None else self.disconnected_at + self._within - now
        if not is_retryable or self.failures >= self._settings.retries or left <= 0:
            raise error
        await asyncio.sleep(min(self._settings.backoff * 2**self.failures, _MAX_BACKOFF, left))
        self.failures += 1


class SandboxServerConnection:
    """The connection that all sandboxes of one server share.

    url: `http://host:port`, `https://…` or `unix:/path`.
    explain: may replace an error by a more precise one, for example that the server has ended.
    failures: count of failed and broken connections and of read timeouts.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeouts: SandboxConnectionTimeouts,
        explain: Callable[[SandboxServerUnreachable], SandboxError] | None = None,
    ) -> None:
        self.url = url
        self.timeouts = timeouts
        self._socket, self._base = _parse_url(url)
        self._token = None if token is None else _check_token(token)
        self.explain = explain
        self.failures = 0
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._waiting = set[asyncio.Timeout]()

    def __repr__(self) -> str:
        return f"<SandboxServerConnection {self.url}>"

    async def close(self) -> None:
        """Close the connection. What waits for the server gets SandboxServerUnreachable."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for scope in self._waiting:
            scope.reschedule(now)
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise self._closed_error()
        if self._session is None:
            # Every running call holds a connection; the server limits their number.
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

    # ---- requests -----------------------------------------------------------------------------------------------

    async def request_json[T](
        self,
        method: str,
        path: str,
        response_type: type[T],
        *,
        query: Mapping[str, str] | None = None,
        body: RequestContent | None = None,
        content_type: str = JSON_TYPE,
    ) -> T:
        """Send a request as `request` does, and decode its response."""
        content = await self.request(method, path, query=query, body=body, content_type=content_type)
        try:
            return msgspec.json.decode(content, type=response_type)
        except msgspec.MsgspecError as error:
            raise self.protocol_violation(f"cannot decode its response: {error}") from error

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: RequestContent | None = None,
        content_type: str = JSON_TYPE,
    ) -> bytes:
        """Send an idempotent request and return its response; repeat it if the connection breaks.

        A body that can be read only once is not sent again. An error after a repeated request has `disconnected_at`.
        """
        can_repeat = body is None or isinstance(body, bytes) or callable(body)
        reconnect = RequestRetryState(self.timeouts, (SandboxConnectionLost,) if can_repeat else ())
        while True:
            try:
                async with (
                    self.open_response(
                        method, path, query=query, body=body, content_type=content_type
                    ) as response,
                    self.wait_for_server(),
                ):
                    return await response.read()
            except SandboxError as error:
                await reconnect.wait(error)

    @asynccontextmanager
    async def open_response(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: RequestContent | None = None,
        content_type: str = JSON_TYPE,
        read_timeout: float | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and yield its successful response; read the body within `wait_for_server`."""
        session = self._open_session()
        sent = None if body is None else _RequestBody(body, content_type)
        url = URL(f"{self._base}{path}" + (f"?{urlencode(query)}" if query else ""), encoded=True)
        try:
            async with self.wait_for_server():
                response = await session.request(
                    method,
                    url,
                    data=sent,
                    headers={} if sent is None else sent.headers,
                    timeout=aiohttp.ClientTimeout(
                        total=None,
                        sock_connect=_CONNECT_TIMEOUT,
                        sock_read=read_timeout or self.timeouts.response,
                    ),
                    allow_redirects=False,  # the token is for this server only
                )
        except SandboxServerUnreachable:
            if sent is not None and sent.failure is not None:
                raise sent.failure from None  # raised by the caller's own stream
            raise
        try:
            self._check_version(response)
            if not 200 <= response.status < 300:
                error = await self._read_error(response)
                error.nothing_started = True
                raise error
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    # ---- errors ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def wait_for_server(self) -> AsyncGenerator[None]:
        """Translate errors of the block, and end it when the connection is closed.

        aiohttp wakes nobody who reads from a connection that is closed on this side.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._waiting.add(scope)
                try:
                    with self._translate_errors():
                        yield
                finally:
                    self._waiting.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._closed_error() from None

    def _closed_error(self) -> SandboxError:
        return self.record_failure(
            SandboxServerUnreachable(f"The connection to the sandbox server at {self.url} has been closed.")
        )

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        """Turn errors of the connection into SandboxServerUnreachable."""
        try:
            yield
        except (aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
            unreachable = self._to_unreachable(error)
            # ClientResponseError shows the request's headers, and so the token.
            cause = None if isinstance(error, aiohttp.ClientResponseError) else error
            raise self.record_failure(unreachable) from cause

    def record_failure(self, error: SandboxServerUnreachable) -> SandboxError:
        self.failures += 1
        explained = error if self.explain is None else self.explain(error)
        explained.nothing_started = isinstance(error, SandboxConnectError)
        return explained

    def _to_unreachable(self, error: Exception) -> SandboxServerUnreachable:
        where = f"The sandbox server at {self.url}"
        match error:
            case aiohttp.ConnectionTimeoutError():
                return SandboxConnectError(
                    f"{where} cannot be reached: no connection within {_CONNECT_TIMEOUT:g} s."
                )
            case aiohttp.ClientConnectorError():
                return SandboxConnectError(
                    f"{where} cannot be reached: {_describe_os_error(error.os_error)}."
                )
            case TimeoutError():
                return SandboxReadTimeout(f"{where} has stopped answering.")
            case aiohttp.ClientResponseError():
                return SandboxServerUnreachable(f"{where} does not speak HTTP: {_shorten(error.message)}.")
            # aiohttp raises RuntimeError for reads from a closed response.
            case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError() | RuntimeError():
                return SandboxConnectionLost(f"The connection to the sandbox server at {self.url} broke.")
            case _:
                return SandboxServerUnreachable(f"{where} cannot be used: {_shorten(str(error))}.")

    def protocol_violation(self, detail: str) -> SandboxServerUnreachable:
        return SandboxServerUnreachable(
            f"The sandbox server at {self.url} violates the sandbox protocol: {_shorten(detail)}."
        )

    def _check_version(self, response: aiohttp.ClientResponse) -> None:
        version = response.headers.get(VERSION_HEADER)
        if version == str(PROTOCOL_VERSION):
            return
        if version is not None:
            raise SandboxServerUnreachable(
                f"The sandbox server at {self.url} speaks version {_shorten(version)} of the sandbox protocol, this "
                f"client version {PROTOCOL_VERSION}: update the older one."
            )
        if response.status in _GATEWAY_ERROR_STATUSES:
            self.failures += 1
            raise SandboxConnectionLost(
                f"The sandbox server at {self.url} cannot be reached: a proxy answers {response.status}."
            )
        raise SandboxServerUnreachable(
            f"{self.url} is not a sandbox server (HTTP {response.status}, no {VERSION_HEADER})."
        )

    async def _read_error(self, response: aiohttp.ClientResponse) -> SandboxError:
        async with self.wait_for_server():
            try:
                content = await response.content.readexactly(_MAX_ERROR_BYTES)
            except asyncio.IncompleteReadError as end:
                content = end.partial
        try:
            return from_sandbox_error_body(
                response.status, msgspec.json.decode(content, type=SandboxErrorBody)
            )
        except msgspec.MsgspecError:
            return self.protocol_violation(f"status {response.status} without an error body")


class _RequestBody:
    """A request body, read in chunks as it is sent; a stream can be read once."""

    def __init__(self, content: RequestContent, content_type: str) -> None:
        self.failure: BaseException | None = None
        self.headers = {"Content-Type": content_type}
        self._content = content
        self._was_read = False
        if isinstance(content, bytes):
            self.headers["Content-Length"] = str(len(content))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[bytes]:
        if isinstance(self._content, bytes):
            for start in range(0, len(self._content), _CHUNK_BYTES):
                yield self._content[start : start + _CHUNK_BYTES]
            return
        if self._was_read and not callable(self._content):
            raise ConnectionResetError("a stream cannot be sent twice")
        self._was_read = True
        try:
            async for chunk in self._content() if callable(self._content) else self._content:
                yield chunk
        except Exception as error:
            self.failure = error
            raise


def _parse_url(url: str) -> tuple[str | None, str]:
    """Return the path of a unix socket, or None, and the base URL."""
    scheme, _, rest = url.partition(":")
    if scheme == "unix":
        path = rest.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(
                f"{url!r} is not the URL of a sandbox server: the path of a socket must be absolute"
            )
        return path, "http://sandbox"
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "The URL of a sandbox server must not contain a user or password: use the token instead"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} is not the URL of a sandbox server: use http://HOST:PORT, https://HOST or unix:/PATH"
        )
    _ = parts.port  # raises ValueError if it is invalid
    return None, url.rstrip("/")


def _check_token(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("The token of a sandbox server must be printable ASCII without spaces")
    return token


def quote_path_segment(text: str) -> str:
    """Quote one segment of a path; `.` and `..` too, which proxies would resolve."""
    return quote(text, safe="").replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def _describe_os_error(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else _shorten(str(error))


def _shorten(text: str) -> str:
    """Make foreign text fit for one line of an error message."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in line[:200]).rstrip(".")
