"""Running responses and how they are read."""

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

# --- runs ---------------------------------------------------------------------------------------------


class RunEventReader(Protocol):
    """Somebody's place in the log of a run."""

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was taken, and nothing more will come."""
        ...

    def read_available(self) -> Sequence[StreamEvent]:
        """What has come since the last time, perhaps nothing. Raises ServerFault once a reader that stayed too far
        behind for too long has cost the run its life.
        """
        ...

    def close(self) -> None: ...


class Run(Protocol):
    """A response in the making. It belongs to nobody's request: it goes on until it ends or is cancelled, and
    whoever wants to see it reads its log.
    """

    @property
    def id(self) -> str: ...

    def subscribe(self, after: int = -1) -> AsyncGenerator[Sequence[StreamEvent]]:
        """The events after that number, as many at a time as are there, the terminal one last. Raises ServerFault as
        `Reading.take` does.
        """
        ...

    def watch(self, on_available: Callable[[], None], after: int = -1) -> RunEventReader:
        """As `subscribe`, for whoever cannot wait: `wake` is called when something has come, by the run itself and
        before it goes on, so it must be quick and must not raise.
        """
        ...

    async def wait(self) -> Response:
        """The response once it is terminal and durable: what its events fold to."""
        ...

    def add_done_callback(self, callback: Callable[[Response | BaseException], None]) -> None:
        """As `wait`, for whoever cannot wait: `tell` is called with what it would return or raise, once and before
        `Runs.drain` is over; it must be quick and must not raise.
        """
        ...

    def get_conversation(self) -> Sequence[ConversationSegment]:
        """Everything that a continuation of this response stands on, once it has ended: as `Store.conversation` gives
        it, for whoever continues one that the store does not keep.
        """
        ...

    def cancel(self, reason: str) -> None:
        """End it soon: the model's request is aborted, code is interrupted, what is there is kept."""
        ...


# Is told how many more bytes a request is about to hold; raises RateLimited or Unavailable where that is too much now,
# BodyTooLarge where it always will be.
type ReserveMemory = Callable[[int], None]


class RunService(Protocol):
    """What the gateway asks for responses: the engine, as it sees it."""

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[ConversationSegment] | None = None,
        reserve_memory: ReserveMemory | None = None,
    ) -> Run:
        """Check everything that can be checked, then begin. Raises ApiError; then nothing was begun.

        response_id: the id of the response, where somebody had to know it before.
        past: the conversation that is continued, from whoever holds one that the store does not keep; without it
            the store is asked for `previous_response_id`.
        take: told of the files that the input refers to, and of a large conversation that it continues.
        """
        ...

    async def count_tokens(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> InputTokenCount:
        """How many tokens the model would be shown; begins nothing. Raises ApiError."""
        ...

    async def compact(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> CompactedResponse:
        """The conversation that the request would stand on, made short by its model. Keeps nothing. Raises ApiError;
        cancelling it aborts the model's request.
        """
        ...

    async def drain(self, grace_seconds: float) -> None:
        """Begin nothing more, let what runs end within the time, cancel the rest.

        Whoever cancels this is in a hurry: nothing more is stored of what still runs, and the next start marks it
        failed.
        """
        ...
