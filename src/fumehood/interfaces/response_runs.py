"""Runs: responses in progress, and how their events are read."""

from collections.abc import Callable, Sequence
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

        Raises InternalServerError if this reader stayed too far behind for too long.
        """
        ...

    def close(self) -> None:
        """Stop reading; `on_available` is not called any more."""
        ...


class ReadableRun(Protocol):
    """A run as a request reads it: its events with a reader, or its result with `wait`."""

    @property
    def id(self) -> str:
        """The id of the response."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """What of the request is not served, one sentence each."""
        ...

    def open_reader(self, on_available: Callable[[], None]) -> RunEventReader:
        """Open a reader of the events, from the first one on.

        on_available: called from the run when events have come; it must be quick and must not raise.
        """
        ...

    async def wait(self) -> Response:
        """Return the response once it has ended and is stored.

        Raises ApiError if it could not be stored, or failed before any output.
        """
        ...

    def cancel(self, reason: str) -> None:
        """Abort the model's request and interrupt code; the output so far is kept. Returns at once.

        reason: for the error of the response.
        """
        ...


class Run(ReadableRun, Protocol):
    """A response in progress.

    It does not depend on the request that started it: it runs until it ends or is cancelled. Any number of readers
    follow its event log.
    """

    @property
    def holds_all_events(self) -> bool:
        """Whether a new reader can still read the first event."""
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
        retain_bytes: int = 0,
    ) -> Run:
        """Validate a request and start its run.

        request: the body of POST /v1/responses.
        caller: who sent it.
        response_id: for the new response, if the caller needs to know it before.
        past: the conversation to continue, if it is not stored; None to look up `previous_response_id`.
        reserve_memory: called before files of the input or a large conversation are read.
        retain_bytes: encoded size up to which events are kept for readers that come later.

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
