"""Requests to model servers, and what goes wrong with them as ModelError."""

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
    UpstreamHttpError,
    UpstreamReadTimeout,
    UpstreamTimeouts,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.openai.api_errors import ModelError

_MAX_ERROR_BYTES = 1 << 16
_MAX_RETRY_AFTER = 86_400.0


class UpstreamClient:
    """The connections of all models."""

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
        """A POST with that body, or a GET; the answer, if it is a success. Its block raises ModelError; left
        before its end, it tells the server to stop.
        """
        return UpstreamResponse(
            self._client.request(address, path, headers, timeouts, body), timeouts, errors
        )


class UpstreamResponse:
    """The body of an answer, as it comes; a context manager, which asks for it and translates its troubles."""

    def __init__(
        self, http_response: StreamedHttpResponse, timeouts: UpstreamTimeouts, errors: UpstreamErrorFactory
    ) -> None:
        self.http_response = http_response
        self._timeouts = timeouts
        self._errors = errors

    async def __aenter__(self) -> Self:
        try:
            response = await self.http_response.__aenter__()
        except UpstreamHttpError as trouble:
            raise _translate_error(trouble, self._timeouts, self._errors) from trouble
        try:
            self.read = response.read
            self.stream_to = response.stream_to
            if response.status != 200:
                raise await _read_error(self, self._errors)
            if response.get_header(b"content-encoding") not in ("", "identity"):
                raise self._errors.invalid_response("its answer is compressed, which was not asked for")
        except BaseException:
            await response.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http_response.__aexit__(kind, error, trace)
        if isinstance(error, UpstreamHttpError):
            raise _translate_error(error, self._timeouts, self._errors) from error

    async def read_trailing(self, seconds: float) -> bytes:
        """The next piece where the body may as well be over: nothing if nothing comes in time, or ever."""
        try:
            async with asyncio.timeout(seconds):
                return await self.read()
        except (UpstreamHttpError, TimeoutError):
            return b""

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body, or its beginning if it is longer than that."""
        pieces: list[bytes] = []
        size = 0
        while size < max_bytes and (piece := await self.read()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)


async def _read_error(response: UpstreamResponse, errors: UpstreamErrorFactory) -> ModelError:
    try:
        body = await response.read_all(_MAX_ERROR_BYTES)
    except UpstreamHttpError:
        body = b""
    wait = _parse_retry_after(
        response.http_response.get_header(b"retry-after"), response.http_response.get_header(b"date")
    )
    return errors.from_status(response.http_response.status, body, wait)


def _translate_error(
    error: UpstreamHttpError, timeouts: UpstreamTimeouts, errors: UpstreamErrorFactory
) -> ModelError:
    match error:
        case UpstreamConnectError():
            return errors.unreachable(str(error))
        case UpstreamReadTimeout():
            return errors.read_timeout(timeouts.read)
        case UpstreamDisconnected():
            return errors.disconnected()
        case _:
            return errors.invalid_response("its answer is not HTTP")


def _parse_retry_after(value: str, now: str) -> float | None:
    """Seconds; a date is compared with the server's own clock, if it tells the time."""
    try:
        seconds = float(value)
    except ValueError:
        moment = _parse_http_date(value)
        if moment is None:
            return None
        seconds = max(0.0, (moment - (_parse_http_date(now) or datetime.now(UTC))).total_seconds())
    return seconds if 0 <= seconds <= _MAX_RETRY_AFTER else None


def _parse_http_date(date: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
