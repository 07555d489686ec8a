"""Connections to model servers, and what goes wrong on them; imports aiohttp and siblings."""

import asyncio
import io
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.errors import ModelError

_MOST_CONNECTIONS = 1024
# Less than servers keep an idle connection, which is five seconds for many: else one is used while it is being closed.
_KEEP_ALIVE_SECONDS = 4.0
_READ_BYTES = 1 << 18
_LARGE_BODY = 1 << 19
_LONGEST_ERROR = 1 << 16
_DRAIN_SECONDS = 1.0
_LONGEST_WAIT = 86_400.0


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds: until there is a connection, and how long the server may be silent."""

    connect: float
    silence: float


class Upstream:
    """The connections of all models, kept alive between requests."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _open_session(self, errors: UpstreamErrors) -> aiohttp.ClientSession:
        if self._closed:
            raise errors.unreachable("the gateway is closing its connections")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=_MOST_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_SECONDS
                ),
                headers={"Accept-Encoding": "identity", "User-Agent": "fumehood"},
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BYTES,
            )
        return self._session

    @asynccontextmanager
    async def request(
        self,
        url: str,
        headers: Mapping[str, str],
        patience: Patience,
        errors: UpstreamErrors,
        *,
        body: bytes | None = None,
    ) -> AsyncGenerator["Answer"]:
        """A POST with that body, or a GET; the answer, if it is a success. Raises ModelError. Leaving it before its
        end closes the connection, which is how a server learns that nobody wants the rest.
        """
        session = self._open_session(errors)
        try:
            response = await session.request(
                "GET" if body is None else "POST",
                URL(url, encoded=True),
                # A long body in one write would hold up everybody else.
                data=io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=patience.connect, sock_read=patience.silence
                ),
                allow_redirects=False,  # the key is for this server only
            )
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise _translated(error, patience, errors) from _shown(error)
        answer = Answer(response, patience, errors)
        try:
            if response.status != 200:
                raise await answer.refusal()
            yield answer
        finally:
            await answer.leave()


class Answer:
    """The body of an answer, as it comes."""

    def __init__(self, response: aiohttp.ClientResponse, patience: Patience, errors: UpstreamErrors) -> None:
        self._response = response
        self._content = response.content
        self._patience = patience
        self._errors = errors
        self.complete = False

    async def read(self) -> bytes:
        """Everything that has come since the last time, at least something; nothing at the end. Raises ModelError."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise _translated(error, self._patience, self._errors) from _shown(error)

    async def read_rest(self, seconds: float) -> bytes:
        """The same where the body may as well be over: nothing if nothing comes in time, or ever."""
        try:
            async with asyncio.timeout(seconds):
                return await self._content.readany()
        except (aiohttp.ClientError, OSError, RuntimeError):
            return b""

    async def read_all(self, longest: int) -> bytes:
        """The whole body, or its beginning if it is longer than that. Raises ModelError."""
        pieces: list[bytes] = []
        size = 0
        while size < longest and (piece := await self.read()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    async def refusal(self) -> ModelError:
        try:
            body = await self.read_all(_LONGEST_ERROR)
        except ModelError:
            body = b""
        wait = _retry_after(self._response.headers.get("Retry-After"))
        return self._errors.from_status(self._response.status, body, wait)

    async def leave(self) -> None:
        """Give the connection back if nothing more is to come on it, else close it."""
        if self.complete and not self._content.at_eof():
            await self.read_rest(_DRAIN_SECONDS)
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


def _translated(error: Exception, patience: Patience, errors: UpstreamErrors) -> ModelError:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return errors.unreachable(f"no connection within {patience.connect:g} s")
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            return errors.unreachable(
                os.strerror(number) if number and number > 0 else "its name is not known"
            )
        case TimeoutError():
            return errors.silent(patience.silence)
        case aiohttp.ClientResponseError():
            return errors.unreadable("its answer is not HTTP")
        case aiohttp.ClientError() | OSError() | RuntimeError():
            return errors.broke()
        case _:
            return errors.unreachable(str(error))


def _shown(error: Exception) -> Exception | None:
    """The cause, unless it shows the request's headers, and so the key."""
    return None if isinstance(error, aiohttp.ClientResponseError) else error


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date is not worth the trouble."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_WAIT else None
