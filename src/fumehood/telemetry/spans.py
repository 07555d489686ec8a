"""Spans of runs, model turns and tool calls, as wrappers of the seams; imports OpenTelemetry's API and what is below.

A run is a task of its own, and its turns and calls happen in it: the variable that names the run's span is set before
the task is made and copied into it. No other context is looked at, so that traces are not mixed up.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from fumehood.interfaces import (
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
    ToolResult,
    ToolStep,
)
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import ApiError
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.models import AnyModelEvent, ModelRequest, TurnEnded
from fumehood.protocol.responses import CreateResponse, Response, Usage
from fumehood.protocol.tools import FunctionSpec, ToolSpec

PROVIDER = "fumehood"
_run_span: ContextVar[Span | None] = ContextVar("fumehood_run_span", default=None)


# What is recorded of a response's content, by attribute; nothing unless the operator asked for it.
type Contents = Callable[[Response], dict[str, str]]


def no_contents(_response: Response) -> dict[str, str]:
    return {}


def _within_run() -> Context:
    span = _run_span.get()
    return Context() if span is None else set_span_in_context(span, Context())


def _failed(span: Span, kind: str, description: str = "") -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, description or None))


def _used(span: Span, usage: Usage) -> None:
    span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)


# --- runs ---------------------------------------------------------------------------------------------


class TracedRuns:
    """`Runs` with a span for each, from the request until the response is durable."""

    def __init__(self, runs: Runs, tracer: Tracer, contents: Contents = no_contents) -> None:
        self._runs = runs
        self._tracer = tracer
        self._contents = contents
        self._ending: set[asyncio.Task[None]] = set()
        self.count = runs.count
        self.compact = runs.compact

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[Segment] | None = None,
    ) -> Run:
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": PROVIDER}
        if request.model is not None:
            attributes["gen_ai.request.model"] = request.model
        span = self._tracer.start_span("invoke_agent", Context(), SpanKind.INTERNAL, attributes)
        token = _run_span.set(span)
        try:
            run = await self._runs.start(request, caller, response_id, past=past)
        except BaseException as error:
            _failed(span, _kind_of(error))
            span.end()
            raise
        finally:
            _run_span.reset(token)
        task = asyncio.create_task(self._end(run, span))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return run

    async def _end(self, run: Run, span: Span) -> None:
        try:
            self._tell(span, await run.wait())
        except Exception as error:  # whoever asked for the run is told of it
            _failed(span, _kind_of(error))
        finally:
            span.end()

    def _tell(self, span: Span, response: Response) -> None:
        span.set_attribute("gen_ai.response.id", response.id)
        span.set_attribute("gen_ai.response.model", response.model)
        if response.usage is not None:
            _used(span, response.usage)
        for name, value in self._contents(response).items():
            span.set_attribute(name, value)
        if response.error is not None:
            _failed(span, response.error.code)
        elif response.status in ("failed", "cancelled"):
            _failed(span, response.status)

    async def drain(self, grace_seconds: float) -> None:
        await self._runs.drain(grace_seconds)
        if self._ending:
            await asyncio.wait(self._ending)


def _kind_of(error: BaseException) -> str:
    """Errors that clients see have codes; of others the type says enough, and their texts may hold anything."""
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return (error.code or type(error).__name__) if isinstance(error, ApiError) else type(error).__name__


# --- model turns --------------------------------------------------------------------------------------


class TracedModels:
    """`Models` with a span for each turn."""

    def __init__(self, models: Models, tracer: Tracer) -> None:
        self._models = models
        self._tracer = tracer
        self._traced: dict[ModelBackend, ModelBackend] = {}
        self.cards = models.cards
        self.close = models.close

    def backend(self, model: str) -> ModelBackend:
        backend = self._models.backend(model)
        traced = self._traced.get(backend)
        if traced is None:
            traced = self._traced[backend] = _TracedBackend(backend, self._tracer)
        return traced


class _TracedBackend:
    def __init__(self, backend: ModelBackend, tracer: Tracer) -> None:
        self._backend = backend
        self._tracer = tracer
        self.check = backend.check
        self.count = backend.count
        self.profile = backend.profile
        self.close = backend.close

    async def stream(
        self, request: ModelRequest, take: Take | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        attributes: dict[str, str | float] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request.model,
        }
        if request.sampling.temperature is not None:
            attributes["gen_ai.request.temperature"] = request.sampling.temperature
        span = self._tracer.start_span(f"chat {request.model}", _within_run(), SpanKind.CLIENT, attributes)
        turn = _Turn(span)
        batches = self._backend.stream(request, None if take is None else turn.noting(take))
        try:
            async with aclosing(batches):
                async for batch in batches:
                    turn.note(batch)
                    yield batch
        except BaseException as error:
            turn.broke_off(error)
            raise
        finally:
            span.end()


class _Turn:
    """The last event of a turn is the only one that its span tells of."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._ended = False

    def noting(self, take: Take) -> Take:
        def taking(events: Sequence[AnyModelEvent]) -> bool:
            taken = take(events)
            if taken:
                self.note(events)
            return taken

        return taking

    def note(self, events: Sequence[AnyModelEvent]) -> None:
        if events and isinstance(events[-1], TurnEnded):
            self._ended = True
            self._span.set_attribute("gen_ai.response.finish_reasons", [events[-1].reason])
            if events[-1].usage is not None:
                _used(self._span, events[-1].usage)

    def broke_off(self, error: BaseException) -> None:
        if not self._ended:
            _failed(self._span, _kind_of(error))


# --- tool calls ---------------------------------------------------------------------------------------


class TracedTool:
    """A `HostedTool` with a span for each call that it runs."""

    def __init__(self, tool: HostedTool, tracer: Tracer) -> None:
        self._tool = tool
        self._tracer = tracer
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
        bare = [other.bare if isinstance(other, _TracedOffer) else other for other in beside]
        offered = await self._tool.offer(spec, caller, past, bare)
        return None if offered is None else _TracedOffer(offered, self._tracer)


class _TracedOffer:
    def __init__(self, offered: OfferedTool, tracer: Tracer) -> None:
        self.bare = offered
        self._tracer = tracer

    @property
    def function(self) -> FunctionSpec:
        return self.bare.function

    def begin(self, context: CallContext) -> CallSession:
        return _TracedSession(self.bare.begin(context), self._tracer, self.function.name, context.call_id)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        return await self.bare.find_files(paths)

    def close(self) -> None:
        self.bare.close()


class _TracedSession:
    def __init__(self, session: CallSession, tracer: Tracer, name: str, call_id: str) -> None:
        self._session = session
        self._tracer = tracer
        self._name = name
        self._call_id = call_id
        self.open = session.open
        self.feed = session.feed
        self.abort = session.abort

    async def run(self) -> AsyncGenerator[ToolStep]:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self._name,
            "gen_ai.tool.call.id": self._call_id,
            "gen_ai.tool.type": "extension",
        }
        span = self._tracer.start_span(
            f"execute_tool {self._name}", _within_run(), SpanKind.INTERNAL, attributes
        )
        steps = self._session.run()
        ended = False
        try:
            async with aclosing(steps):
                async for step in steps:
                    if isinstance(step, ToolResult):
                        ended = True
                        if getattr(step.item, "status", "") == "failed":
                            _failed(span, "failed")
                    yield step
        except BaseException as error:
            if not ended:
                _failed(span, _kind_of(error))
            raise
        finally:
            span.end()
