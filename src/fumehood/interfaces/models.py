"""Model backends and where they come from."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from fumehood.protocol.model_turns import AnyModelEvent, ModelCard, ModelProfile, ModelRequest

# --- models -------------------------------------------------------------------------------------------


# Is offered events at the moment when they come, before any task is woken for them; whether it has taken them. What it
# raises, the generator raises.
type AcceptBatch = Callable[[Sequence[AnyModelEvent]], bool]


class ModelEventStream(Protocol):
    """What comes of a turn, as many events at a time as are there; a generator, mostly. Whoever has taken it closes it,
    at its end as well as before.
    """

    def __aiter__(self) -> AsyncIterator[Sequence[AnyModelEvent]]: ...

    def __anext__(self) -> Awaitable[Sequence[AnyModelEvent]]: ...

    def aclose(self) -> Awaitable[None]: ...


class ModelBackend(Protocol):
    """A model server, or something that behaves like one."""

    def stream(self, request: ModelRequest, accept_batch: AcceptBatch | None = None) -> ModelEventStream:
        """One turn, as many events at a time as are there, `TurnEnded` last. Closing it before its end aborts the
        request. Raises ModelError; before the first batch, nothing has happened and the turn may be tried again.

        take: may be offered what comes after the first batch; what it takes is not given again.
        """
        ...

    def validate_request(self, request: ModelRequest) -> None:
        """Raises InvalidRequest for what this model cannot be shown."""
        ...

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """How many tokens the request has, and whether that is exact."""
        ...

    def get_profile(self, model: str) -> ModelProfile: ...

    async def close(self) -> None: ...


class ModelProvider(Protocol):
    """All backends, by the names that clients use."""

    def get_backend(self, model: str) -> ModelBackend:
        """Raises InvalidRequest (`model_not_found`)."""
        ...

    async def list_models(self) -> Sequence[ModelCard]: ...

    async def close(self) -> None: ...
