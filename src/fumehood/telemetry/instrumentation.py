"""Wrappers of the seams that tell an observer of runs, model turns and tool calls.

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
    AcceptBatch,
    Caller,
    ConfiguredTool,
    HostedTool,
    ModelBackend,
    ModelEventStream,
    ModelProvider,
    ReserveMemory,
    Run,
    RunService,
    ToolCallContext,
    ToolCallResult,
    ToolCallSession,
    ToolCallStep,
)
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.model_turns import AnyModelEvent, ModelRequest
from fumehood.protocol.openai.api_errors import ApiError
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.protocol.openai.tool_specs import FunctionSpec, ToolSpec
from fumehood.telemetry.span_records import (
    RecordDispatcher,
    RunRecord,
    SandboxTimingRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.timings import Timing, listen_to_timings

_MAX_CACHED_SERVERS = 1000  # whose servers are remembered
_CANCELLED_ERRORS = frozenset({"GeneratorExit", "CancelledError"})

# The run whose task this is, alone in a list, which is emptied when it has ended. Whatever is begun meanwhile copies
# the variable, and a connection keeps its copy for as long as it is open: what was said must not stay there.
_current_run: ContextVar[Sequence[RunRecord]] = ContextVar("fumehood_current_run", default=())


def error_type(error: BaseException) -> str:
    """Errors that clients see have codes; of others the type says enough, and their texts may hold anything."""
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return (error.code or type(error).__name__) if isinstance(error, ApiError) else type(error).__name__


# --- runs ---------------------------------------------------------------------------------------------


class InstrumentedRunService:
    """`Runs`, each seen from the request until the response is durable."""

    def __init__(self, runs: RunService, dispatcher: RecordDispatcher) -> None:
        self._runs = runs
        self._dispatcher = dispatcher
        self.count_tokens = runs.count_tokens
        self.compact = runs.compact
        self.drain = runs.drain

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[ConversationSegment] | None = None,
        reserve_memory: ReserveMemory | None = None,
    ) -> Run:
        seen = RunRecord(request=request, model=request.model, streamed=request.stream is True)
        self._dispatcher.running_count += 1
        self._dispatcher.start(seen)
        link = [seen]
        token = _current_run.set(link)
        try:
            run = await self._runs.start(
                request, caller, response_id, past=past, reserve_memory=reserve_memory
            )
        except BaseException as error:
            self._end_run(seen, link, error)
            raise
        finally:
            _current_run.reset(token)
        run.add_done_callback(partial(self._end_run, seen, link))
        return run

    def _end_run(self, record: RunRecord, link: list[RunRecord], outcome: Response | BaseException) -> None:
        if isinstance(outcome, Response):
            record.response = outcome
            if outcome.status != "completed":
                record.error = _error_type_of_response(outcome)
        else:
            record.error = error_type(outcome)
        link.clear()
        self._dispatcher.running_count -= 1
        self._dispatcher.end(record)


def _error_type_of_response(response: Response) -> str:
    if response.error is not None:
        return response.error.code
    return response.status if response.status in ("failed", "cancelled") else ""


# --- model turns --------------------------------------------------------------------------------------


class InstrumentedModelProvider:
    """`Models`, of which every turn is seen."""

    def __init__(self, models: ModelProvider, dispatcher: RecordDispatcher) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._instrumented: dict[ModelBackend, ModelBackend] = {}
        self.list_models = models.list_models
        self.close = models.close

    def get_backend(self, model: str) -> ModelBackend:
        backend = self._models.get_backend(model)
        observed = self._instrumented.get(backend)
        if observed is None:
            observed = self._instrumented[backend] = _InstrumentedModelBackend(backend, self._dispatcher)
        return observed


class _InstrumentedModelBackend:
    def __init__(self, backend: ModelBackend, dispatcher: RecordDispatcher) -> None:
        self._backend = backend
        self._dispatcher = dispatcher
        self._servers: dict[str, tuple[str, int] | None] = {}
        self.validate_request = backend.validate_request
        self.count_tokens = backend.count_tokens
        self.get_profile = backend.get_profile
        self.close = backend.close

    def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> "_InstrumentedEventStream":
        observer, model = self._dispatcher, request.model
        if model not in self._servers:
            if len(self._servers) >= _MAX_CACHED_SERVERS:  # callers may invent as many as they like
                self._servers.clear()
            self._servers[model] = self.get_profile(model).server
        runs = _current_run.get()
        seen = TurnRecord.start(request, self._servers[model], runs[0] if runs else None)
        if seen.streamed and observer.needs_chunk_times:
            seen.chunk_times = array("q")
        if observer.captures_content:
            seen.events = []
        observer.start(seen)
        if accept_batch is not None:
            accept_batch = seen.timestamp_events(accept_batch)
        return _InstrumentedEventStream(
            self._backend.stream(seen.request or request, accept_batch), seen, observer
        )


class _InstrumentedEventStream:
    """A turn's batches. Not a generator around a generator: of each of those, the event loop keeps a record."""

    __slots__ = ("_batches", "_dispatcher", "_has_ended", "_record")

    def __init__(self, batches: ModelEventStream, record: TurnRecord, dispatcher: RecordDispatcher) -> None:
        self._batches = batches
        self._record = record
        self._dispatcher = dispatcher
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[AnyModelEvent]:
        try:
            batch = await anext(self._batches)
        except BaseException as error:
            if not self._has_ended:
                self._end_turn("" if isinstance(error, StopAsyncIteration) else error_type(error))
            raise
        self._record.add_events(batch)
        return batch

    async def aclose(self) -> None:
        try:
            await self._batches.aclose()
        finally:
            if not self._has_ended:
                self._end_turn("cancelled")

    def _end_turn(self, error: str) -> None:
        self._has_ended = True
        seen = self._record
        if seen.end is None:
            seen.error = error
        self._dispatcher.end(seen)
        run = seen.run
        if run is not None:
            run.turns += 1
            run.generation_time += (
                seen.duration_ns - seen.time_to_first_chunk if seen.time_to_first_chunk else 0
            )


# --- tool calls ---------------------------------------------------------------------------------------


class InstrumentedHostedTool:
    """A `HostedTool`, of which every call that it runs is seen."""

    def __init__(self, tool: HostedTool, dispatcher: RecordDispatcher) -> None:
        self._tool = tool
        self._dispatcher = dispatcher
        self.types = tool.types
        self.item_types = tool.item_types
        self.finds_files = tool.finds_files
        self.echo_spec = tool.echo_spec
        self.rebuild_exchange = tool.rebuild_exchange
        self.snapshot_state = tool.snapshot_state

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> ConfiguredTool | None:
        # Tools know each other by what they are, not by what is put around them.
        bare = [
            other.wrapped if isinstance(other, _InstrumentedConfiguredTool) else other
            for other in other_tools
        ]
        offered = await self._tool.configure(spec, caller, past, bare)
        return None if offered is None else _InstrumentedConfiguredTool(offered, self._dispatcher)


class _InstrumentedConfiguredTool:
    def __init__(self, offered: ConfiguredTool, dispatcher: RecordDispatcher) -> None:
        self.wrapped = offered
        self._dispatcher = dispatcher

    @property
    def function(self) -> FunctionSpec:
        return self.wrapped.function

    def start_call(self, context: ToolCallContext) -> ToolCallSession:
        return _InstrumentedToolCallSession(
            self.wrapped.start_call(context), self._dispatcher, self.function.name, context.call_id
        )

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        return await self.wrapped.find_files(paths)

    def close(self) -> None:
        self.wrapped.close()


class _InstrumentedToolCallSession:
    def __init__(
        self, session: ToolCallSession, dispatcher: RecordDispatcher, name: str, call_id: str
    ) -> None:
        self._session = session
        self._dispatcher = dispatcher
        self._name = name
        self._call_id = call_id
        self.open = session.open
        self.feed = session.feed
        self.abort = session.abort

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        runs = _current_run.get()
        seen = ToolCallRecord(name=self._name, call_id=self._call_id, run=runs[0] if runs else None)
        self._dispatcher.start(seen)
        link = [seen]
        listener = partial(_record_timing, self._dispatcher, link)
        steps = self._session.run()
        ended = False
        try:
            async with aclosing(steps):
                while (step := await _next_step(steps, listener)) is not None:
                    if isinstance(step, ToolCallResult):
                        ended = True
                        _record_result(seen, step)
                    yield step
        except BaseException as error:
            if not ended:
                seen.error = error_type(error)
            raise
        finally:
            link.clear()
            self._dispatcher.end(seen)
            if seen.run is not None:
                seen.run.calls += 1


def _record_timing(dispatcher: RecordDispatcher, link: Sequence[ToolCallRecord], timing: Timing) -> None:
    for call in link:  # or it has ended
        error = "cancelled" if timing.error in _CANCELLED_ERRORS else timing.error
        dispatcher.end(
            SandboxTimingRecord(
                timing=timing,
                call=call,
                started_at_ns=timing.started_at_ns,
                duration_ns=timing.duration_ns,
                error=error,
            )
        )


def _record_result(record: ToolCallRecord, result: ToolCallResult) -> None:
    record.error = "failed" if getattr(result.item, "status", "") == "failed" else ""
    record.item_id = getattr(result.item, "id", "")
    record.arguments = result.exchange.arguments
    record.output = "".join(
        [result.exchange.output, *(each.exchange.output for each in result.additional_items)]
    )


async def _next_step(
    steps: AsyncGenerator[ToolCallStep], listener: Callable[[Timing], None]
) -> ToolCallStep | None:
    """The next step, with somebody listening while it is made, and only then: what a generator sets stays set for
    whoever takes from it.
    """
    with listen_to_timings(listener):
        return await anext(steps, None)
