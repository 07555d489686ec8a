"""Wrappers of the seams that tell an observer of runs, model turns and tool calls; imports `interfaces`,
`phases`, `protocol` and siblings.

A run is a task of its own, and its turns and calls happen in it: the variable that names the run is set before the task
is made and copied into it.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Self

from fumehood.interfaces import (
    Batches,
    CallContext,
    Caller,
    CallSession,
    HostedTool,
    ModelBackend,
    Models,
    OfferedTool,
    Run,
    Runs,
    Take,
    TakeRoom,
    ToolResult,
    ToolStep,
)
from fumehood.phases import Phase, heard_by
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import ApiError
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.models import AnyModelEvent, ModelRequest
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.telemetry.seen import CallSeen, Observer, PhaseSeen, RunSeen, TurnSeen

_MOST_MODELS = 1000  # whose servers are remembered
_CANCELLED = frozenset({"GeneratorExit", "CancelledError"})

# The run whose task this is, alone in a list, which is emptied when it has ended. Whatever is begun meanwhile copies
# the variable, and a connection keeps its copy for as long as it is open: what was said must not stay there.
_run: ContextVar[Sequence[RunSeen]] = ContextVar("fumehood_observed_run", default=())


def kind_of(error: BaseException) -> str:
    """Errors that clients see have codes; of others the type says enough, and their texts may hold anything."""
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return (error.code or type(error).__name__) if isinstance(error, ApiError) else type(error).__name__


# --- runs ---------------------------------------------------------------------------------------------


class ObservedRuns:
    """`Runs`, each seen from the request until the response is durable."""

    def __init__(self, runs: Runs, observer: Observer) -> None:
        self._runs = runs
        self._observer = observer
        self.count = runs.count
        self.compact = runs.compact
        self.drain = runs.drain

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[Segment] | None = None,
        take: TakeRoom | None = None,
    ) -> Run:
        seen = RunSeen(request=request, model=request.model, streamed=request.stream is True)
        self._observer.running += 1
        self._observer.began(seen)
        link = [seen]
        token = _run.set(link)
        try:
            run = await self._runs.start(request, caller, response_id, past=past, take=take)
        except BaseException as error:
            self._end(seen, link, error)
            raise
        finally:
            _run.reset(token)
        run.when_over(partial(self._end, seen, link))
        return run

    def _end(self, seen: RunSeen, link: list[RunSeen], outcome: Response | BaseException) -> None:
        if isinstance(outcome, Response):
            seen.response = outcome
            if outcome.status != "completed":
                seen.error = _trouble_of(outcome)
        else:
            seen.error = kind_of(outcome)
        link.clear()
        self._observer.running -= 1
        self._observer.ended(seen)


def _trouble_of(response: Response) -> str:
    if response.error is not None:
        return response.error.code
    return response.status if response.status in ("failed", "cancelled") else ""


# --- model turns --------------------------------------------------------------------------------------


class ObservedModels:
    """`Models`, of which every turn is seen."""

    def __init__(self, models: Models, observer: Observer) -> None:
        self._models = models
        self._observer = observer
        self._observed: dict[ModelBackend, ModelBackend] = {}
        self.cards = models.cards
        self.close = models.close

    def backend(self, model: str) -> ModelBackend:
        backend = self._models.backend(model)
        observed = self._observed.get(backend)
        if observed is None:
            observed = self._observed[backend] = _ObservedBackend(backend, self._observer)
        return observed


class _ObservedBackend:
    def __init__(self, backend: ModelBackend, observer: Observer) -> None:
        self._backend = backend
        self._observer = observer
        self._servers: dict[str, tuple[str, int] | None] = {}
        self.check = backend.check
        self.count = backend.count
        self.profile = backend.profile
        self.close = backend.close

    def stream(self, request: ModelRequest, take: Take | None = None) -> "_ObservedTurn":
        observer, model = self._observer, request.model
        if model not in self._servers:
            if len(self._servers) >= _MOST_MODELS:  # callers may invent as many as they like
                self._servers.clear()
            self._servers[model] = self.profile(model).server
        runs = _run.get()
        seen = TurnSeen.of(request, self._servers[model], runs[0] if runs else None)
        if seen.streamed and observer.wants_moments:
            seen.moments = array("q")
        if observer.records_content:
            seen.pieces = []
        observer.began(seen)
        if take is not None:
            take = seen.noting(take)
        return _ObservedTurn(self._backend.stream(seen.request or request, take), seen, observer)


class _ObservedTurn:
    """A turn's batches. Not a generator around a generator: of each of those, the event loop keeps a record."""

    __slots__ = ("_batches", "_observer", "_over", "_seen")

    def __init__(self, batches: Batches, seen: TurnSeen, observer: Observer) -> None:
        self._batches = batches
        self._seen = seen
        self._observer = observer
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[AnyModelEvent]:
        try:
            batch = await anext(self._batches)
        except BaseException as error:
            if not self._over:
                self._end("" if isinstance(error, StopAsyncIteration) else kind_of(error))
            raise
        self._seen.note(batch)
        return batch

    async def aclose(self) -> None:
        try:
            await self._batches.aclose()
        finally:
            if not self._over:
                self._end("cancelled")

    def _end(self, error: str) -> None:
        self._over = True
        seen = self._seen
        if seen.end is None:
            seen.error = error
        self._observer.ended(seen)
        run = seen.run
        if run is not None:
            run.turns += 1
            run.writing += seen.took - seen.first if seen.first else 0


# --- tool calls ---------------------------------------------------------------------------------------


class ObservedTool:
    """A `HostedTool`, of which every call that it runs is seen."""

    def __init__(self, tool: HostedTool, observer: Observer) -> None:
        self._tool = tool
        self._observer = observer
        self.types = tool.types
        self.item_types = tool.item_types
        self.finds_files = tool.finds_files
        self.echo = tool.echo
        self.recall = tool.recall
        self.remember = tool.remember

    async def offer(
        self, spec: ToolSpec, caller: Caller, past: Sequence[Segment], beside: Sequence[OfferedTool] = ()
    ) -> OfferedTool | None:
        # Tools know each other by what they are, not by what is put around them.
        bare = [other.bare if isinstance(other, _ObservedOffer) else other for other in beside]
        offered = await self._tool.offer(spec, caller, past, bare)
        return None if offered is None else _ObservedOffer(offered, self._observer)


class _ObservedOffer:
    def __init__(self, offered: OfferedTool, observer: Observer) -> None:
        self.bare = offered
        self._observer = observer

    @property
    def function(self) -> FunctionSpec:
        return self.bare.function

    def begin(self, context: CallContext) -> CallSession:
        return _ObservedSession(self.bare.begin(context), self._observer, self.function.name, context.call_id)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        return await self.bare.find_files(paths)

    def close(self) -> None:
        self.bare.close()


class _ObservedSession:
    def __init__(self, session: CallSession, observer: Observer, name: str, call_id: str) -> None:
        self._session = session
        self._observer = observer
        self._name = name
        self._call_id = call_id
        self.open = session.open
        self.feed = session.feed
        self.abort = session.abort

    async def run(self) -> AsyncGenerator[ToolStep]:
        runs = _run.get()
        seen = CallSeen(name=self._name, call_id=self._call_id, run=runs[0] if runs else None)
        self._observer.began(seen)
        link = [seen]
        listener = partial(_tell_phase, self._observer, link)
        steps = self._session.run()
        ended = False
        try:
            async with aclosing(steps):
                while (step := await _next(steps, listener)) is not None:
                    if isinstance(step, ToolResult):
                        ended = True
                        _tell(seen, step)
                    yield step
        except BaseException as error:
            if not ended:
                seen.error = kind_of(error)
            raise
        finally:
            link.clear()
            self._observer.ended(seen)
            if seen.run is not None:
                seen.run.calls += 1


def _tell_phase(observer: Observer, link: Sequence[CallSeen], phase: Phase) -> None:
    for call in link:  # or it has ended
        error = "cancelled" if phase.error in _CANCELLED else phase.error
        observer.ended(
            PhaseSeen(phase=phase, call=call, began_at=phase.began_at, took=phase.took, error=error)
        )


def _tell(seen: CallSeen, result: ToolResult) -> None:
    seen.error = "failed" if getattr(result.item, "status", "") == "failed" else ""
    seen.item_id = getattr(result.item, "id", "")
    seen.arguments = result.exchange.arguments
    seen.output = "".join([result.exchange.output, *(each.exchange.output for each in result.further)])


async def _next(steps: AsyncGenerator[ToolStep], listener: Callable[[Phase], None]) -> ToolStep | None:
    """The next step, with somebody listening while it is made, and only then: what a generator sets stays set for
    whoever takes from it.
    """
    with heard_by(listener):
        return await anext(steps, None)
