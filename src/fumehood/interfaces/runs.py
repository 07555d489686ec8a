"""Runs: responses in progress, and how their events are read."""

from collections.abc import (
    AsyncGenerator,
    Callable,
    Sequence,
)
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.responses import CompactedResponse, CreateResponse, InputTokenCount, Response
from fumehood.protocol.openai.stream_events import StreamEvent


class RunEventReader(Protocol):
    """A position in the event log of a run."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all events have been read and no more will come."""
        ...

    def read_available(self) -> Sequence[StreamEvent]:
        """Return the events since the last call, perhaps none.

        Raises InternalServerError if the run was ended because this reader stayed too far behind for too long.
        """
        ...

    def close(self) -> None:
        """Stop reading; `on_available` is not called any more."""
        ...


class Run(Protocol):
    """A response in progress.

    It does not depend on the request that started it: it runs until it ends or is cancelled. Any number of readers
    follow its event log.
    """

    @property
    def id(self) -> str:
        """The id of the response."""
        ...

    def subscribe(self, after: int = -1) -> AsyncGenerator[Sequence[StreamEvent]]:
        """Yield events in batches, the terminal one last.

        after: sequence number of the last event to skip.

        Raises InternalServerError as `RunEventReader.read_available`.
        """
        ...

    def watch(self, on_available: Callable[[], None], after: int = -1) -> RunEventReader:
        """Return a reader that is notified by a callback, for callers that cannot wait.

        on_available: called from the run when events have come; it must be quick and must not raise.
        after: sequence number of the last event to skip.
        """
        ...

    async def wait(self) -> Response:
        """Return the response once it has ended and is stored.

        Raises ApiError if it could not be stored, or failed before any output.
        """
        ...

    def add_done_callback(self, callback: Callable[[Response | BaseException], None]) -> None:
        """Call back with what `wait` would return or raise, for callers that cannot wait.

        callback: called once, before `RunService.drain` returns; it must be quick and must not raise.
        """
        ...

    def get_conversation(self) -> Sequence[ConversationSegment]:
        """Return the conversation up to the end of this response, as `ConversationStore.get_conversation` does.

        For callers that continue a response which is not stored. Call it after the run has ended.
        """
        ...

    def cancel(self, reason: str) -> None:
        """Abort the model's request and interrupt code; the output so far is kept. Returns at once.

        reason: for the error of the response.
        """
        ...


type ReserveMemory = Callable[[int], None]
"""Called with the number of bytes that a request is about to hold. Raises RateLimited or ServiceUnavailable if they are
not available now, BodyTooLarge if they never will be."""


class RunService(Protocol):
    """Starts runs: the engine as the gateway uses it."""

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[ConversationSegment] | None = None,
        reserve_memory: ReserveMemory | None = None,
    ) -> Run:
        """Validate a request and start its run.

        request: the body of POST /v1/responses.
        caller: who sent it.
        response_id: for the new response, if the caller needs to know it before.
        past: the conversation to continue, if it is not stored; None to look up `previous_response_id`.
        reserve_memory: called before files of the input or a large conversation are read.

        Raises ApiError if the request is invalid or cannot be served; then nothing was started.
        """
        ...

    async def count_tokens(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> InputTokenCount:
        """Count the input tokens of a request without starting it.

        request, caller, reserve_memory: as for `start`.

        Raises ApiError as `start`.
        """
        ...

    async def compact(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> CompactedResponse:
        """Have the model summarise the conversation of a request. Stores nothing.

        Cancelling it aborts the model's request.

        request, caller, reserve_memory: as for `start`.

        Raises ApiError as `start`, or if the model fails.
        """
        ...

    async def drain(self, grace_seconds: float) -> None:
        """Start no more runs, let the running ones end, then cancel the rest.

        Cancelling `drain` stops at once: runs in progress are not stored, and the next start marks them failed.

        grace_seconds: how long runs may take to end.
        """
        ...
