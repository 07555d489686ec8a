"""A `ModelBackend` that follows a script."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fumehood.interfaces import AcceptBatch, ModelBackend
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCard,
    ModelEvent,
    ModelProfile,
    ModelReasoningDelta,
    ModelRefusalDelta,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.responses import Usage
from fumehood.testing.fakes.scripted_fake import ScriptedFake


@dataclass(frozen=True, slots=True)
class ScriptedFunctionCall:
    """A function call. Without a `call_id`, ids are `call_1`, `call_2`, … in the order of the script."""

    name: str
    fragments: tuple[str, ...]
    call_id: str | None = None


type TurnStep = (
    AnyModelEvent
    | ScriptedFunctionCall
    | Sequence[AnyModelEvent | ScriptedFunctionCall]
    | asyncio.Event
    | Exception
)
"""An event or a call is a batch of its own; a sequence of them is one batch. An asyncio.Event is waited for; an
exception is raised and ends the turn."""

type ScriptedTurn = Sequence[TurnStep] | Exception | Callable[[ModelRequest], Sequence[TurnStep] | Exception]


def says(text: str, *, deltas: int = 3) -> list[ModelTextDelta]:
    """The model writes a text."""
    return [ModelTextDelta(delta) for delta in _split_text(text, deltas)]


def refuses(text: str, *, deltas: int = 3) -> list[ModelRefusalDelta]:
    """The model refuses with a text."""
    return [ModelRefusalDelta(delta) for delta in _split_text(text, deltas)]


def thinks(text: str, *, deltas: int = 3) -> list[ModelReasoningDelta]:
    """The model emits reasoning."""
    return [ModelReasoningDelta(delta) for delta in _split_text(text, deltas)]


def calls(
    name: str, arguments: Mapping[str, object] | str, *, call_id: str | None = None, deltas: int = 3
) -> list[ScriptedFunctionCall]:
    """The model calls a function. A string is sent as it is, valid JSON or not."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return [ScriptedFunctionCall(name, tuple(_split_text(text, deltas)), call_id)]


def _split_text(text: str, parts: int) -> list[str]:
    count = max(1, min(parts, len(text)))
    bounds = [len(text) * number // count for number in range(count + 1)]
    return [text[start:end] for start, end in itertools.pairwise(bounds) if end > start]


class ScriptedModel(ScriptedFake[ScriptedTurn]):
    """A `ModelBackend` with scripted turns.

    A turn is a sequence of steps, an exception, or a function of the request that returns one of these. A
    `ModelTurnEnded` with `usage` is added if it has none: `calls` if the turn has a call, else `stop`. A call whose id
    the conversation has already gets a new one, as from every backend.

    requests: all requests; aborted_requests: those whose turn was closed before its end.
    """

    def __init__(
        self, *turns: ScriptedTurn, usage: Usage | None = None, profile: ModelProfile | None = None
    ) -> None:
        super().__init__(turns)
        self.requests: list[ModelRequest] = []
        self.aborted_requests: list[ModelRequest] = []
        self._usage = usage
        self._profile = profile or ModelProfile()
        self._calls = itertools.count(1)

    # ---- ModelBackend -----------------------------------------------------------------------------------------

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        self.requests.append(request)
        steps = self._next_turn(request)
        has_begun = finished = False
        try:
            async for scripted in self._play_turn(steps):
                batch = [_ensure_new_call_id(event, request) for event in scripted]
                finished = finished or isinstance(batch[-1], ModelTurnEnded)
                if not (has_begun and accept_batch is not None and self._offer_batch(batch, accept_batch)):
                    has_begun = True
                    yield batch
        except GeneratorExit:
            if not finished:
                self.aborted_requests.append(request)
            raise
        except asyncio.CancelledError:
            self.aborted_requests.append(request)
            raise

    def validate_request(self, request: ModelRequest) -> None:
        """Accept every request."""

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """Count one token for four bytes of the items."""
        size = sum(len(entry.raw) for segment in request.segments for entry in segment.entries)
        return (size + len(request.instructions or "")) // 4, False

    def get_profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - the same for all names
        return self._profile

    def _offer_batch(self, batch: Sequence[AnyModelEvent], accept_batch: AcceptBatch) -> bool:
        try:
            return accept_batch(batch)
        except BaseException:
            self.aborted_requests.append(self.requests[-1])
            raise

    # ---- the script -------------------------------------------------------------------------------------------

    def _next_turn(self, request: ModelRequest) -> Sequence[TurnStep]:
        turn = self.take_step(f"The model was sent request {len(self.requests)}", lambda _: True)
        if callable(turn):
            try:
                turn = turn(request)
            except Exception as error:
                self.record_failure(f"The function of a turn failed: {error!r}")
                raise
        return [turn] if isinstance(turn, Exception) else turn

    async def _play_turn(self, steps: Sequence[TurnStep]) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        keys = itertools.count()
        has_call = False
        for step in steps:
            match step:
                case asyncio.Event():
                    await step.wait()
                    continue
                case Exception():
                    raise step
                case ModelEvent():
                    batches = [[step]]
                case ScriptedFunctionCall():
                    batches = [[event] for event in self._make_call_events(step, next(keys))]
                case _:
                    batches = [self._flatten_batch(step, keys)]
            for batch in batches:
                has_call = has_call or any(isinstance(event, ModelCallStarted) for event in batch)
                if batch:
                    yield batch
                    if isinstance(batch[-1], ModelTurnEnded):
                        return
        yield [ModelTurnEnded("calls" if has_call else "stop", self._usage)]

    def _flatten_batch(
        self, parts: Sequence[AnyModelEvent | ScriptedFunctionCall], keys: Iterator[int]
    ) -> list[AnyModelEvent]:
        events: list[AnyModelEvent] = []
        for part in parts:
            events += (
                self._make_call_events(part, next(keys)) if isinstance(part, ScriptedFunctionCall) else [part]
            )
        return events

    def _make_call_events(self, call: ScriptedFunctionCall, key: int) -> list[AnyModelEvent]:
        call_id = call.call_id or f"call_{next(self._calls)}"
        fragments = [ModelCallArgumentsDelta(key, fragment) for fragment in call.fragments]
        return [ModelCallStarted(key, call_id, call.name), *fragments]


def _ensure_new_call_id(event: AnyModelEvent, request: ModelRequest) -> AnyModelEvent:
    if isinstance(event, ModelCallStarted) and event.call_id in request.used_call_ids:
        return msgspec.structs.replace(event, call_id=new_id("call"))
    return event


class SingleBackendProvider:
    """A `ModelProvider` of one backend, under these names or, without names, under every name."""

    def __init__(self, backend: ModelBackend, *names: str) -> None:
        self._backend = backend
        self._names = names

    def get_backend(self, model: str) -> ModelBackend:
        if self._names and model not in self._names:
            raise InvalidRequest(
                f"The model {model!r} does not exist.", param="model", code="model_not_found"
            )
        return self._backend

    async def list_models(self) -> Sequence[ModelCard]:
        return [ModelCard(id=name, created=0, owned_by="fumehood") for name in self._names or ("scripted",)]

    async def close(self) -> None:
        await self._backend.close()
