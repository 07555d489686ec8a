"""Model backends and the provider that selects them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.protocol.model_turns import AnyModelEvent, ModelCard, ModelProfile, ModelRequest

type AcceptBatch = Callable[[Sequence[AnyModelEvent]], bool]
"""Called with events as they arrive, before any task wakes; True if it has consumed them. The stream raises what it
raises."""


class ModelEventStream(Protocol):
    """The events of a turn in batches, mostly an async generator. The reader closes it, also at its end."""

    def __aiter__(self) -> AsyncIterator[Sequence[AnyModelEvent]]:
        """Return itself."""
        ...

    def __anext__(self) -> Awaitable[Sequence[AnyModelEvent]]:
        """Return the next batch. Raises ModelError, or StopAsyncIteration at the end."""
        ...

    def aclose(self) -> Awaitable[None]:
        """End the stream; before the last event, abort the request."""
        ...


class ModelBackend(Protocol):
    """A model server, or something that behaves like one."""

    def stream(self, request: ModelRequest, accept_batch: AcceptBatch | None = None) -> ModelEventStream:
        """Run one turn and yield its events in batches, `ModelTurnEnded` last.

        request: the conversation, the tools and the sampling parameters.
        accept_batch: may be offered every batch after the first; a batch that it accepts is not yielded.

        Raises InvalidRequest as `validate_request`, ModelError if the model server fails. A turn that fails before its
        first batch may be retried.
        """
        ...

    def validate_request(self, request: ModelRequest) -> None:
        """Check that the request can be rendered for this model.

        request: as for `stream`.

        Raises InvalidRequest if not.
        """
        ...

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """Return the number of input tokens, and whether it is exact.

        request: as for `stream`.

        Raises InvalidRequest as `validate_request`.
        """
        ...

    def get_profile(self, model: str) -> ModelProfile:
        """Return what a model supports.

        model: the name that clients use.
        """
        ...

    async def close(self) -> None:
        """Close all connections. Closing it twice is no error."""
        ...


@dataclass(frozen=True, slots=True)
class DegradedUpstream:
    """A model server that cannot serve now.

    models: the patterns of the model names that it serves. reason: one sentence, without the server's address.
    """

    models: Sequence[str]
    reason: str


class ModelProvider(Protocol):
    """All model backends, by the model names that clients use."""

    def get_backend(self, model: str) -> ModelBackend:
        """Return the backend of a model.

        model: the name that the client sent.

        Raises InvalidRequest (`model_not_found`) if there is none.
        """
        ...

    async def list_models(self) -> Sequence[ModelCard]:
        """Return all models that can be named. A model server that does not answer adds none."""
        ...

    async def close(self) -> None:
        """Close all backends."""
        ...
