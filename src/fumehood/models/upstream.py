"""Connections to model servers, and what goes wrong on them; imports siblings and the standard library."""

import asyncio
from dataclasses import dataclass

from fumehood.models import http1
from fumehood.models.http1 import Client, ClientError, Target
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.errors import ModelError

__all__ = ["Answer", "Patience", "Target", "Upstream"]

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
        self._client: Client | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()

    async def request(
        self, target: Target, patience: Patience, errors: UpstreamErrors, body: bytes | None = None
    ) -> "Answer":
        """The answer, if it is a success; whoever has it leaves it. Raises ModelError."""
        if self._closed:
            raise errors.unreachable("the gateway is closing its connections")
        if self._client is None:
            self._client = Client()
        try:
            response = await self._client.request(
                target, body, connect=patience.connect, silence=patience.silence
            )
        except ClientError as error:
            raise _translated(error, patience, errors) from error
        answer = Answer(response, patience, errors)
        if response.status == 200:
            return answer
        try:
            raise await answer.refusal()
        finally:
            await answer.leave()


class Answer:
    """The body of an answer, as it comes.

    complete: set by whoever knows that the body is over but for its end, so that `leave` waits for that.
    """

    def __init__(self, response: http1.Answer, patience: Patience, errors: UpstreamErrors) -> None:
        self._response = response
        self._patience = patience
        self._errors = errors
        self.complete = False

    async def read(self) -> bytes:
        """Everything that has come since the last time, at least something; nothing at the end. Raises ModelError."""
        try:
            return await self._response.read()
        except ClientError as error:
            raise _translated(error, self._patience, self._errors) from error

    async def read_rest(self, seconds: float) -> bytes:
        """The same where the body may as well be over: nothing if nothing comes in time, or ever."""
        try:
            async with asyncio.timeout(seconds):
                return await self._response.read()
        except (ClientError, TimeoutError):
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
        return self._errors.from_status(self._response.status, body, _retry_after(self._response.retry_after))

    async def leave(self) -> None:
        """Give the connection back if nothing more is to come on it, else close it: so a server learns that nobody
        wants the rest.
        """
        try:
            if self.complete and not self._response.complete:
                await self.read_rest(_DRAIN_SECONDS)
        finally:
            self._response.leave()


def _translated(error: ClientError, patience: Patience, errors: UpstreamErrors) -> ModelError:
    match error:
        case http1.NotConnected():
            return errors.unreachable(str(error))
        case http1.Silent():
            return errors.silent(patience.silence)
        case http1.NotHttp():
            return errors.unreadable(str(error))
        case _:
            return errors.broke()


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date is not worth the trouble."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_WAIT else None
