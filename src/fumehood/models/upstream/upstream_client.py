"""Sends requests to model servers and translates HTTP failures to ModelError."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self

from fumehood.models.upstream.http1_client import (
    PooledHttpClient,
    StreamedHttpResponse,
    UpstreamAddress,
    UpstreamConnectError,
    UpstreamDisconnected,
    UpstreamReadTimeout,
    UpstreamTimeouts,
    UpstreamTransportError,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.openai.api_errors import ModelError

_MAX_ERROR_BYTES = 1 << 16
_MAX_RETRY_AFTER = 86_400.0


class UpstreamClient:
    """The connection pool that all backends share."""

    def __init__(self) -> None:
        self._client = PooledHttpClient()

    async def close(self) -> None:
        await self._client.close()

    def request(
        self,
        address: UpstreamAddress,
        path: str,
        headers: bytes,
        timeouts: UpstreamTimeouts,
        errors: UpstreamErrorFactory,
        *,
        body: Sequence[bytes] | None = None,
    ) -> "UpstreamResponse":
        """Prepare a POST with this body, or a GET. Entering the response sends it.

        Entering and reading raise ModelError, also for a status other than 200. Leaving before the end of the body
        closes the connection, which tells the server to stop.
        """
        return UpstreamResponse(
            self._client.request(address, path, headers, timeouts, body), timeouts, errors
        )


class UpstreamResponse:
    """A streamed response body. As a context manager it sends the request and translates errors."""

    def __init__(
        self, http_response: StreamedHttpResponse, timeouts: UpstreamTimeouts, errors: UpstreamErrorFactory
    ) -> None:
        self.http_response = http_response
        self._timeouts = timeouts
        self._errors = errors

    async def __aenter__(self) -> Self:
        try:
            response = await self.http_response.__aenter__()
        except UpstreamTransportError as error:
            raise _translate_error(error, self._timeouts, self._errors) from error
        try:
            self.read = response.read
            self.stream_to = response.stream_to
            if response.status != 200:
                raise await _read_error(self, self._errors)
            if response.get_header(b"content-encoding") not in ("", "identity"):
                raise self._errors.invalid_response(
                    "its response is compressed although the request forbids it"
                )
        except BaseException:
            await response.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http_response.__aexit__(kind, error, trace)
        if isinstance(error, UpstreamTransportError):
            raise _translate_error(error, self._timeouts, self._errors) from error

    async def read_trailing(self, seconds: float) -> bytes:
        """The next chunk of a body that may already be complete; empty after the timeout or on an error."""
        try:
            async with asyncio.timeout(seconds):
                return await self.read()
        except (UpstreamTransportError, TimeoutError):
            return b""

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body, or about its first `max_bytes`."""
        chunks: list[bytes] = []
        size = 0
        while size < max_bytes and (chunk := await self.read()):
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)


async def _read_error(response: UpstreamResponse, errors: UpstreamErrorFactory) -> ModelError:
    try:
        body = await response.read_all(_MAX_ERROR_BYTES)
    except UpstreamTransportError:
        body = b""
    wait = _parse_retry_after(
        response.http_response.get_header(b"retry-after"), response.http_response.get_header(b"date")
    )
    return errors.from_status(response.http_response.status, body, wait)


def _translate_error(
    error: UpstreamTransportError, timeouts: UpstreamTimeouts, errors: UpstreamErrorFactory
) -> ModelError:
    match error:
        case UpstreamConnectError():
            return errors.unreachable(str(error))
        case UpstreamReadTimeout():
            return errors.read_timeout(timeouts.read)
        case UpstreamDisconnected():
            return errors.disconnected()
        case _:
            return errors.invalid_response("its response is not valid HTTP")


def _parse_retry_after(value: str, now: str) -> float | None:
    """Seconds until the retry. A date is compared with the server's own Date header, if there is one."""
    try:
        seconds = float(value)
    except ValueError:
        date_time = _parse_http_date(value)
        if date_time is None:
            return None
        seconds = max(0.0, (date_time - (_parse_http_date(now) or datetime.now(UTC))).total_seconds())
    return seconds if 0 <= seconds <= _MAX_RETRY_AFTER else None


def _parse_http_date(date: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
