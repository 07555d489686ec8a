"""A model that says what a test tells it to."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

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
from fumehood.protocol.openai.responses import Usage


@dataclass(frozen=True, slots=True)
class ScriptedFunctionCall:
    """A whole call. Its key is its place in the turn; its id is `call_1`, `call_2`, … through the script, unless
    one is given.
    """

    name: str
    fragments: tuple[str, ...]
    call_id: str | None = None


# An event or a call is told by itself; a sequence of them is one batch; an asyncio.Event is waited for; an exception
# is raised, and ends the turn.
type TurnStep = (
    AnyModelEvent
    | ScriptedFunctionCall
    | Sequence[AnyModelEvent | ScriptedFunctionCall]
    | asyncio.Event
    | Exception
)
type ScriptedTurn = Sequence[TurnStep] | Exception | Callable[[ModelRequest], Sequence[TurnStep] | Exception]


def says(text: str, *, deltas: int = 3) -> list[ModelTextDelta]:
    """The model writes this, in so many deltas."""
    return [ModelTextDelta(delta) for delta in _split_text(text, deltas)]


def refuses(text: str, *, deltas: int = 3) -> list[ModelRefusalDelta]:
    """The model declines, in these words."""
    return [ModelRefusalDelta(delta) for delta in _split_text(text, deltas)]


def thinks(text: str, *, deltas: int = 3) -> list[ModelReasoningDelta]:
    """The model shows its reasoning."""
    return [ModelReasoningDelta(delta) for delta in _split_text(text, deltas)]


def calls(
    name: str, arguments: Mapping[str, object] | str, *, call_id: str | None = None, deltas: int = 3
) -> list[ScriptedFunctionCall]:
    """The model calls a function; a string is taken as its arguments as they are, valid or not."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return [ScriptedFunctionCall(name, tuple(_split_text(text, deltas)), call_id)]


def _split_text(text: str, parts: int) -> list[str]:
    count = max(1, min(parts, len(text)))
    bounds = [len(text) * number // count for number in range(count + 1)]
    return [text[start:end] for start, end in itertools.pairwise(bounds) if end > start]


class ScriptedModel:
    """A `ModelBackend` whose turns are the given ones, in order.

    A turn is a sequence of beats, or an exception, or a function of the request that gives one of these. Without a
    `TurnEnded` one is added, with `usage`: `calls` if the turn has any call, else `stop`.

    requests: what was asked so far; aborted: those of them whose turn nobody read to its end.

    A request beyond the script raises AssertionError, there and in `assert_consumed`, which also fails when turns are
    left over. As `async with` it asserts at the end, if nothing else went wrong.
    """

    def __init__(
        self, *turns: ScriptedTurn, usage: Usage | None = None, profile: ModelProfile | None = None
    ) -> None:
        self.requests: list[ModelRequest] = []
        self.aborted_requests: list[ModelRequest] = []
        self._turns = deque(turns)
        self._usage = usage
        self._profile = profile or ModelProfile()
        self._failures: list[str] = []
        self._calls = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.assert_consumed()

    def expect(self, *turns: ScriptedTurn) -> None:
        """Add turns to the script."""
        self._turns.extend(turns)

    def assert_consumed(self) -> None:
        """Fail unless every turn was asked for and nothing more."""
        left = [f"Nobody asked for the turn {turn!r}." for turn in self._turns]
        if self._failures or left:
            raise AssertionError("\n".join([*self._failures, *left]))

    # ---- ModelBackend -----------------------------------------------------------------------------------------

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        self.requests.append(request)
        beats = self._next_turn(request)
        begun = finished = False
        try:
            async for batch in self._play_turn(beats):
                finished = finished or isinstance(batch[-1], ModelTurnEnded)
                if not (begun and accept_batch is not None and self._offer_batch(batch, accept_batch)):
                    begun = True
                    yield batch
        except GeneratorExit:
            if not finished:
                self.aborted_requests.append(request)
            raise
        except asyncio.CancelledError:
            self.aborted_requests.append(request)
            raise

    def validate_request(self, request: ModelRequest) -> None:
        """Anything can be shown to it."""

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """A token for every four bytes of the items."""
        size = sum(len(entry.raw) for segment in request.segments for entry in segment.entries)
        return (size + len(request.instructions or "")) // 4, False

    def get_profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - it is the same for all names
        return self._profile

    async def close(self) -> None:
        pass

    def _offer_batch(self, batch: Sequence[AnyModelEvent], accept_batch: AcceptBatch) -> bool:
        try:
            return accept_batch(batch)
        except BaseException:
            self.aborted_requests.append(self.requests[-1])
            raise

    # ---- the script -------------------------------------------------------------------------------------------

    def _next_turn(self, request: ModelRequest) -> Sequence[TurnStep]:
        if not self._turns:
            failure = f"Request {len(self.requests)} to the model is beyond its script."
            self._failures.append(failure)
            raise AssertionError(failure)
        turn = self._turns.popleft()
        if callable(turn):
            try:
                turn = turn(request)
            except Exception as error:
                self._failures.append(f"The turn's own function failed: {error!r}")
                raise
        return [turn] if isinstance(turn, Exception) else turn

    async def _play_turn(self, beats: Sequence[TurnStep]) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        keys = itertools.count()
        called = False
        for beat in beats:
            match beat:
                case asyncio.Event():
                    await beat.wait()
                    continue
                case Exception():
                    raise beat
                case ModelEvent():
                    batches = [[beat]]
                case ScriptedFunctionCall():
                    batches = [[event] for event in self._make_call_events(beat, next(keys))]
                case _:
                    batches = [self._flatten_batch(beat, keys)]
            for batch in batches:
                called = called or any(isinstance(event, ModelCallStarted) for event in batch)
                if batch:
                    yield batch
                    if isinstance(batch[-1], ModelTurnEnded):
                        return
        yield [ModelTurnEnded("calls" if called else "stop", self._usage)]

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


class ScriptedModelProvider:
    """`Models` over one backend, under these names; without names it answers to every one."""

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
