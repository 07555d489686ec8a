"""Wrappers of the seams that record runs, model turns and tool calls.

A run is a task of its own, in which its turns and calls happen. The context variable that names the run is set before
the task is created, which copies it.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Self

import msgspec
from msgspec import Raw
from opentelemetry.trace import SpanContext

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
from fumehood.protocol.openai.items import ExecutionDetails, OutputItem, ShellCall
from fumehood.protocol.openai.responses import CreateResponse, JsonObject, Response
from fumehood.protocol.openai.stream_events import OutputItemAdded, StreamEvent
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from fumehood.telemetry.operation_records import (
    RecordDispatcher,
    RunRecord,
    SandboxPhaseRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.semantic_conventions import OWN_PROVIDER, map_provider
from fumehood.timed_steps import TimedStep, listen_to_timings

_CANCELLED_ERRORS = frozenset({"GeneratorExit", "CancelledError"})
_MAX_KNOWN_RESPONSES = 4096

# The run of this task, in a list that is emptied at its end. A connection that is opened meanwhile keeps a copy of the
# variable for its whole life, and must not keep the run's content with it.
_current_run: ContextVar[Sequence[RunRecord]] = ContextVar("fumehood_current_run", default=())


def error_type(error: BaseException) -> str:
    """Return the code of an API error, else the type's name. Messages are never used: they may hold content."""
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return (error.code or type(error).__name__) if isinstance(error, ApiError) else type(error).__name__


# --- runs ---------------------------------------------------------------------------------------------


class InstrumentedRunService:
    """Wraps a `RunService`: records each run from the request until the response is durable."""

    def __init__(self, runs: RunService, dispatcher: RecordDispatcher, provider: str = OWN_PROVIDER) -> None:
        self._runs = runs
        self._dispatcher = dispatcher
        self._provider = provider
        self._conversations = ConversationIndex()
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
        retain_bytes: int = 0,
    ) -> Run:
        record = RunRecord(
            request=request,
            model=request.model,
            streamed=request.stream is True,
            provider=self._provider,
            call_timings={},
        )
        self._conversations.find_previous(record, caller)
        self._dispatcher.running_count += 1
        self._dispatcher.start(record)
        link = [record]
        token = _current_run.set(link)
        try:
            run = await self._runs.start(
                request,
                caller,
                response_id,
                past=past,
                reserve_memory=reserve_memory,
                retain_bytes=retain_bytes,
            )
        except BaseException as error:
            self._end_run(record, link, error)
            raise
        finally:
            _current_run.reset(token)
        self._conversations.add(record, run.id, caller)
        run.add_done_callback(partial(self._end_run, record, link))
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


class ConversationIndex:
    """Remembers the latest responses: their spans, and what their conversations are called.

    A conversation is called after its first response, as far as this process knows it.
    """

    def __init__(self, max_responses: int = _MAX_KNOWN_RESPONSES) -> None:
        self._max_responses = max_responses
        self._known: OrderedDict[tuple[str, str], tuple[SpanContext, str]] = OrderedDict()

    def find_previous(self, record: RunRecord, caller: Caller) -> None:
        """Set what the record continues."""
        request = record.request
        previous = None if request is None else request.previous_response_id
        if request is not None and request.conversation is not None:
            record.conversation_id = _read_conversation_id(request.conversation)
        if previous is None:
            return
        span, conversation_id = self._known.get((caller.tenant, previous), (None, previous))
        record.previous_response_id = previous
        record.conversation_id = record.conversation_id or conversation_id
        record.previous_span = span if span is not None and span.is_valid else None

    def add(self, record: RunRecord, response_id: str, caller: Caller) -> None:
        """Remember a response that has started."""
        record.conversation_id = record.conversation_id or response_id
        known = self._known
        known[caller.tenant, response_id] = record.span.get_span_context(), record.conversation_id
        if len(known) > self._max_responses:
            known.popitem(last=False)


def _read_conversation_id(conversation: str | JsonObject) -> str:
    if isinstance(conversation, str):
        return conversation
    try:
        return msgspec.json.decode(conversation["id"], type=str)
    except (KeyError, ValueError):
        return ""


# --- model turns --------------------------------------------------------------------------------------


class InstrumentedModelProvider:
    """Wraps a `ModelProvider`: records each turn."""

    def __init__(
        self, models: ModelProvider, dispatcher: RecordDispatcher, own_provider: str = OWN_PROVIDER
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._own_provider = own_provider
        self.list_models = models.list_models
        self.close = models.close

    def get_backend(self, model: str) -> ModelBackend:
        return _InstrumentedModelBackend(
            self._models.get_backend(model), self._dispatcher, self._own_provider
        )


class _InstrumentedModelBackend:
    def __init__(self, backend: ModelBackend, dispatcher: RecordDispatcher, own_provider: str) -> None:
        self._backend = backend
        self._dispatcher = dispatcher
        self._own_provider = own_provider
        self.validate_request = backend.validate_request
        self.count_tokens = backend.count_tokens
        self.get_profile = backend.get_profile
        self.close = backend.close

    def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> "_InstrumentedEventStream":
        dispatcher = self._dispatcher
        runs = _current_run.get()
        profile = self.get_profile(request.model)
        provider = profile.provider or map_provider(profile.server, self._own_provider)
        record = TurnRecord.start(request, profile.server, runs[0] if runs else None, provider)
        record.replays_reasoning = profile.replays_reasoning
        if record.streamed and dispatcher.needs_chunk_times:
            record.chunk_times = array("q")
        if dispatcher.captures_content:
            record.events = []
        dispatcher.start(record)
        if accept_batch is not None:
            accept_batch = record.timestamp_events(accept_batch)
        batches = self._backend.stream(record.request or request, accept_batch)
        return _InstrumentedEventStream(batches, record, dispatcher)


class _InstrumentedEventStream:
    """The batches of a turn. Not an async generator, because the event loop keeps track of each of those."""

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
        record = self._record
        if record.end is None:
            record.error = error
        self._dispatcher.end(record)
        run = record.run
        if run is not None:
            run.turns += 1
            if record.time_to_first_chunk:
                run.generation_time += record.duration_ns - record.time_to_first_chunk


# --- tool calls ---------------------------------------------------------------------------------------


class InstrumentedHostedTool:
    """Wraps a `HostedTool`: records each call."""

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
        # Tools check each other's types, so they must not see the wrappers.
        bare = [
            other.wrapped if isinstance(other, _InstrumentedConfiguredTool) else other
            for other in other_tools
        ]
        tool = await self._tool.configure(spec, caller, past, bare)
        return None if tool is None else _InstrumentedConfiguredTool(tool, self._dispatcher)


class _InstrumentedConfiguredTool:
    def __init__(self, tool: ConfiguredTool, dispatcher: RecordDispatcher) -> None:
        self.wrapped = tool
        self._dispatcher = dispatcher
        self.find_files = tool.find_files
        self.close = tool.close

    @property
    def function(self) -> ModelToolDefinition:
        return self.wrapped.function

    def start_call(self, context: ToolCallContext) -> ToolCallSession:
        return _InstrumentedToolCallSession(
            self.wrapped.start_call(context), self._dispatcher, self.function.name, context.call_id
        )


class _InstrumentedToolCallSession:
    def __init__(
        self, session: ToolCallSession, dispatcher: RecordDispatcher, name: str, call_id: str
    ) -> None:
        self._session = session
        self._dispatcher = dispatcher
        self._name = name
        self._call_id = call_id
        self._container_id = ""
        self.feed = session.feed
        self.abort = session.abort

    def open(self) -> Sequence[StreamEvent]:
        events = self._session.open()
        if events and isinstance(events[0], OutputItemAdded):
            self._container_id = _find_container_id(events[0].item)
        return events

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        runs = _current_run.get()
        record = ToolCallRecord(
            name=self._name,
            call_id=self._call_id,
            run=runs[0] if runs else None,
            container_id=self._container_id,
        )
        self._dispatcher.start(record)
        link = [record]
        listener = partial(_record_timing, self._dispatcher, link)
        steps = self._session.run()
        has_result = False
        try:
            async with aclosing(steps):
                while (step := await _next_step(steps, listener)) is not None:
                    if isinstance(step, ToolCallResult):
                        has_result = True
                        _record_result(record, step)
                    yield step
        except BaseException as error:
            if not has_result:
                record.error = error_type(error)
            raise
        finally:
            link.clear()
            self._dispatcher.end(record)
            if record.run is not None:
                record.run.calls += 1
                record.run.call_timings[record.item_id] = record.started_at_ns, record.duration_ns


def _record_timing(dispatcher: RecordDispatcher, link: Sequence[ToolCallRecord], timing: TimedStep) -> None:
    for call in link:  # empty once the call has ended
        error = "cancelled" if timing.error in _CANCELLED_ERRORS else timing.error
        dispatcher.end(
            SandboxPhaseRecord(
                timing=timing,
                call=call,
                started_at_ns=timing.started_at_ns,
                duration_ns=timing.duration_ns,
                error=error,
            )
        )


def _record_result(record: ToolCallRecord, result: ToolCallResult) -> None:
    item = _read_plain_item(result.item) if isinstance(result.item, Raw) else result.item
    record.error = result.error_type or ("failed" if getattr(item, "status", "") == "failed" else "")
    record.item_id = getattr(item, "id", "")
    for each in (item, *(more.item for more in result.additional_items)):
        execution = getattr(each, "execution", None)
        if isinstance(execution, ExecutionDetails):
            record.exit_code = execution.exit_code
    record.arguments = result.exchange.arguments
    record.output = "".join(
        [result.exchange.output, *(each.exchange.output for each in result.additional_items)]
    )


class _PlainItem(msgspec.Struct):
    """What telemetry reads of an item that a tool makes as plain JSON."""

    id: str = ""
    status: str = ""
    container_id: str = ""


def _read_plain_item(item: Raw) -> _PlainItem:
    try:
        return msgspec.json.decode(item, type=_PlainItem)
    except (ValueError, RecursionError):
        return _PlainItem()


def _find_container_id(item: OutputItem) -> str:
    if isinstance(item, ShellCall):
        return getattr(item.environment, "container_id", "")
    plain = _read_plain_item(item) if isinstance(item, Raw) else item
    return getattr(plain, "container_id", "")


async def _next_step(
    steps: AsyncGenerator[ToolCallStep], listener: Callable[[TimedStep], None]
) -> ToolCallStep | None:
    """Return the next step. Listen only meanwhile: a variable that a generator sets leaks to its caller."""
    with listen_to_timings(listener):
        return await anext(steps, None)
