"""Requests to model servers, and what goes wrong with them as ModelError; imports siblings and `protocol`."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self

from fumehood.models.http_client import (
    Address,
    Broken,
    HttpAnswer,
    HttpClient,
    HttpTrouble,
    NotConnected,
    Patience,
    Silent,
)
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.errors import ModelError

_LONGEST_ERROR = 1 << 16
_LONGEST_WAIT = 86_400.0


class Upstream:
    """The connections of all models."""

    def __init__(self) -> None:
        self._client = HttpClient()

    async def close(self) -> None:
        await self._client.close()

    def request(
        self,
        address: Address,
        path: str,
        headers: bytes,
        patience: Patience,
        errors: UpstreamErrors,
        *,
        body: Sequence[bytes] | None = None,
    ) -> "Answer":
        """A POST with that body, or a GET; the answer, if it is a success. Its block raises ModelError; left
        before its end, it tells the server to stop.
        """
        return Answer(self._client.request(address, path, headers, patience, body), patience, errors)


class Answer:
    """The body of an answer, as it comes; a context manager, which asks for it and translates its troubles."""

    def __init__(self, response: HttpAnswer, patience: Patience, errors: UpstreamErrors) -> None:
        self.response = response
        self._patience = patience
        self._errors = errors

    async def __aenter__(self) -> Self:
        try:
            response = await self.response.__aenter__()
        except HttpTrouble as trouble:
            raise _translated(trouble, self._patience, self._errors) from trouble
        try:
            self.read = response.read
            self.tell = response.tell
            if response.status != 200:
                raise await _refusal(self, self._errors)
            if response.header(b"content-encoding") not in ("", "identity"):
                raise self._errors.unreadable("its answer is compressed, which was not asked for")
        except BaseException:
            await response.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.response.__aexit__(kind, error, trace)
        if isinstance(error, HttpTrouble):
            raise _translated(error, self._patience, self._errors) from error

    async def read_rest(self, seconds: float) -> bytes:
        """The next piece where the body may as well be over: nothing if nothing comes in time, or ever."""
        try:
            async with asyncio.timeout(seconds):
                return await self.read()
        except (HttpTrouble, TimeoutError):
            return b""

    async def read_all(self, longest: int) -> bytes:
        """The whole body, or its beginning if it is longer than that."""
        pieces: list[bytes] = []
        size = 0
        while size < longest and (piece := await self.read()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)


async def _refusal(answer: Answer, errors: UpstreamErrors) -> ModelError:
    try:
        body = await answer.read_all(_LONGEST_ERROR)
    except HttpTrouble:
        body = b""
    wait = _retry_after(answer.response.header(b"retry-after"), answer.response.header(b"date"))
    return errors.from_status(answer.response.status, body, wait)


def _translated(trouble: HttpTrouble, patience: Patience, errors: UpstreamErrors) -> ModelError:
    match trouble:
        case NotConnected():
            return errors.unreachable(str(trouble))
        case Silent():
            return errors.silent(patience.silence)
        case Broken():
            return errors.broke()
        case _:
            return errors.unreadable("its answer is not HTTP")


def _retry_after(value: str, now: str) -> float | None:
    """Seconds; a date is compared with the server's own clock, if it tells the time."""
    try:
        seconds = float(value)
    except ValueError:
        moment = _moment(value)
        if moment is None:
            return None
        seconds = max(0.0, (moment - (_moment(now) or datetime.now(UTC))).total_seconds())
    return seconds if 0 <= seconds <= _LONGEST_WAIT else None


def _moment(date: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
