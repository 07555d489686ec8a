"""Evaluations of the client as spans and metrics; imports OpenTelemetry's API, the client's runtime and `parts`.

Only what happens here has a duration: evaluations, requests, functions of the prompt. Of tools that the provider ran it
is known that they ran, not when; they are events of the evaluation's span, and parts of its messages.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, use_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("Telemetry of the client needs an extra: pip install 'fumehood[otel]'") from error

from fumehood import __version__
from fumehood.client import serde
from fumehood.client.budget import TokenUsage
from fumehood.client.runtime.events import PromptExecuted, PromptRendered, ToolInvoked
from fumehood.client.runtime.observer import EvaluationBegun, ModelAnswered, ModelAsked, ToolCalled
from fumehood.parts.canonical import Json, JsonObject, Part, Text, ToolCall, ToolResult
from fumehood.parts.content import bounded, redacted, without_data
from fumehood.parts.convert import from_vendor
from fumehood.parts.forms import VIEWS
from fumehood.parts.messages import finish_reason, to_messages
from fumehood.parts.views import to_view
from fumehood.telemetry.conventions import CAPTURE, LONGEST, PROPAGATORS, SECONDS, TOKENS, finish_reason_of

_CAPTURING = frozenset({"true", "span_only", "span_and_event"})

CONTAINERS = "fumehood.container.ids"
MEMORY_LIMIT = "fumehood.container.memory_limit"
REQUEST_ID = "fumehood.request.id"

_W3C = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)

type Attributes = dict[str, str | int | float | bool | Sequence[str]]


class ClientTelemetry:
    """An observer for an adapter: `OpenAIAdapter(model=…, observer=ClientTelemetry())`.

    Spans are below whatever span is current where a prompt is evaluated, and current themselves while they last: those
    that a tool's handler makes are below the tool's. One object serves any number of adapters and threads.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
        view: str = "option2",
        redact: Callable[[str], str] | None = None,
        longest: int = LONGEST,
        propagate: bool | None = None,
    ) -> None:
        """The providers are OpenTelemetry's global ones unless given.

        capture_content: whether what was said is recorded; unless given, as the environment says. view: what its parts
        look like; redact: what becomes of each text in it; longest: bytes of an attribute.
        propagate: whether requests carry the W3C trace context; unless given, as the environment says.
        """
        if view not in VIEWS:
            raise ValueError(f"There is no view {view!r}; there are {', '.join(VIEWS)}.")
        tracers = tracer_provider or trace.get_tracer_provider()
        meter = (meter_provider or metrics.get_meter_provider()).get_meter("fumehood.client", __version__)
        self._tracer = tracers.get_tracer("fumehood.client", __version__)
        self._durations = {
            "chat": _seconds(meter, "gen_ai.client.operation.duration", "How long requests took."),
            "invoke_agent": _seconds(meter, "gen_ai.invoke_agent.duration", "How long evaluations took."),
            "execute_tool": _seconds(meter, "gen_ai.execute_tool.duration", "How long functions took."),
        }
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens that requests used.",
            explicit_bucket_boundaries_advisory=TOKENS,
        )
        if capture_content is None:
            capture_content = os.environ.get(CAPTURE, "").lower() in _CAPTURING
        self._contents = _Contents(view, redact, longest) if capture_content else None
        self._propagates = "tracecontext" in _propagators() if propagate is None else propagate

    # ---- what an observer is told ---------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, evaluation: EvaluationBegun) -> Generator[None]:
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": evaluation.adapter,
            "gen_ai.request.model": evaluation.model,
            "gen_ai.agent.name": evaluation.prompt_name,
        }
        session: Attributes = {}
        if evaluation.session_id:
            session["gen_ai.conversation.id"] = evaluation.session_id
        name = f"invoke_agent {evaluation.prompt_name}"
        with self._step(name, SpanKind.INTERNAL, attributes, session) as step:
            evaluated = _Evaluation(step.span, session)
            token = _evaluation.set(evaluated)
            try:
                yield
            finally:
                _evaluation.reset(token)
                evaluated.tell()

    @contextmanager
    def asking(self, question: ModelAsked) -> Generator["_Asking"]:
        model = str(question.request.get("model", ""))
        server = urlsplit(question.base_url)
        attributes: Attributes = {
            "gen_ai.operation.name": question.operation,
            "gen_ai.provider.name": question.adapter,
            "gen_ai.request.model": model,
            "server.address": server.hostname or "",
            "server.port": server.port or (80 if server.scheme == "http" else 443),
        }
        name = f"{question.operation} {model}"
        within = _evaluation.get()
        about = _about(question) | (within.session if within else {})
        with self._step(name, SpanKind.CLIENT, attributes, about) as step:
            headers: dict[str, str] = {}
            if self._propagates:
                _W3C.inject(headers)
            asking = _Asking(step, self._tokens, self._contents, within, headers)
            if self._contents is not None:
                self._contents.record_input(step.span, question.request)
            yield asking

    @contextmanager
    def running(self, call: ToolCalled) -> Generator[None]:
        attributes: Attributes = {"gen_ai.operation.name": "execute_tool"}
        about: Attributes = {"gen_ai.tool.name": call.name, "gen_ai.tool.type": "function"}
        # A name that a model made up must not become a name of spans and series.
        if call.exists:
            attributes["gen_ai.tool.name"] = call.name
        if call.call_id:
            about["gen_ai.tool.call.id"] = call.call_id
        name = f"execute_tool {call.name}" if call.exists else "execute_tool"
        with self._step(name, SpanKind.INTERNAL, attributes, about) as step:
            within = _evaluation.get()
            if within is not None:
                within.function = _Function(step, call)
            try:
                yield
            finally:
                if within is not None:
                    within.function = None

    def publish(self, event: object) -> None:
        """The events that the client publishes anyway, each where it belongs.

        Handlers may publish some, too, and put anything into them; that is left out.
        """
        try:
            self._tell(event)
        except Exception as error:
            _log.warning("A %s is left out of a span: %s", type(event).__name__, type(error).__name__)

    def _tell(self, event: object) -> None:
        match event:
            case ToolInvoked():
                self._invoked(event)
            case PromptRendered():
                _current_span().add_event("fumehood.prompt_rendered")
            case PromptExecuted() if self._contents is not None:
                self._contents.record_answer(_current_span(), event.result.text)
            case _:
                pass

    def _invoked(self, event: ToolInvoked) -> None:
        within = _evaluation.get()
        running = within.function if within else None
        if running is not None and (running.call.name, running.call.call_id) == (event.name, event.call_id):
            if not event.result.success:
                running.step.failed("failed")
            if self._contents is not None:
                self._contents.record_call(running.step.span, event)
            return
        about: Attributes = {
            "gen_ai.tool.name": event.name,
            "gen_ai.tool.type": "extension",
            "fumehood.tool.success": event.result.success,
        }
        if event.call_id:
            about["gen_ai.tool.call.id"] = event.call_id
        if isinstance(container := getattr(event.params, "container_id", None), str):
            about[CONTAINERS] = [container]
        _current_span().add_event("fumehood.tool_invoked", about)

    # ---- what has a duration --------------------------------------------------------------------------------

    @contextmanager
    def _step(
        self, name: str, kind: SpanKind, attributes: Attributes, about: Attributes
    ) -> Generator["_Step"]:
        """attributes: also of the measurements; about: of the span alone."""
        began = time.perf_counter()
        span = self._tracer.start_span(name, kind=kind, attributes={**attributes, **about})
        step = _Step(span, attributes)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                yield step
        except BaseException as error:
            step.broke_off(error)
            raise
        finally:
            duration = self._durations.get(str(attributes["gen_ai.operation.name"]), self._durations["chat"])
            duration.record(time.perf_counter() - began, step.measured)
            span.end()


def _propagators() -> list[str]:
    wanted = os.environ.get(PROPAGATORS) or "tracecontext"
    return [name.strip() for name in wanted.split(",")]


def _seconds(meter: metrics.Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=SECONDS)


def _current_span() -> Span:
    """The evaluation's; events of handlers that nobody here began are lost, not misplaced."""
    evaluation = _evaluation.get()
    return evaluation.span if evaluation else trace.INVALID_SPAN


def _about(question: ModelAsked) -> Attributes:
    """Of a request: its limits, and where its code runs."""
    request = question.request
    found: Attributes = {}
    for name, member in (
        ("gen_ai.request.max_tokens", "max_output_tokens"),
        ("gen_ai.request.temperature", "temperature"),
        ("gen_ai.request.top_p", "top_p"),
    ):
        if isinstance(value := request.get(member), int | float):
            found[name] = value
    if question.memory_limit:
        found[MEMORY_LIMIT] = question.memory_limit
    containers = [tool.get("container") for tool in request.get("tools") or ()]
    if named := [container for container in containers if isinstance(container, str)]:
        found[CONTAINERS] = named
    return found


# --- what is going on ---------------------------------------------------------------------------------


@dataclass
class _Step:
    span: Span
    measured: Attributes

    def failed(self, kind: str) -> None:
        self.measured["error.type"] = kind
        self.span.set_attribute("error.type", kind)
        self.span.set_status(Status(StatusCode.ERROR))

    def broke_off(self, error: BaseException) -> None:
        """Errors are told by their types: their words may hold anything."""
        self.failed(type(error).__name__)
        status = getattr(error.__cause__, "status_code", None)
        if isinstance(status, int):
            self.span.set_attribute("http.response.status_code", status)


@dataclass
class _Evaluation:
    """What its requests used together, also where it failed in the end."""

    span: Span
    session: Attributes
    usage: TokenUsage = field(default_factory=TokenUsage)
    containers: set[str] = field(default_factory=set[str])
    function: "_Function | None" = None  # that runs now

    def tell(self) -> None:
        _used(self.span, self.usage)
        if self.containers:
            self.span.set_attribute(CONTAINERS, sorted(self.containers))


@dataclass(frozen=True)
class _Function:
    step: _Step
    call: ToolCalled


_evaluation: ContextVar[_Evaluation | None] = ContextVar("fumehood_evaluation", default=None)


def _used(span: Span, usage: TokenUsage) -> None:
    span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
    if usage.cached_tokens:
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)


@dataclass(frozen=True)
class _Asking:
    step: _Step
    tokens: Histogram
    contents: "_Contents | None"
    within: _Evaluation | None
    headers: Mapping[str, str]

    def answered(self, answer: ModelAnswered) -> None:
        span = self.step.span
        span.set_attribute("gen_ai.response.id", answer.id)
        if answer.model:
            span.set_attribute("gen_ai.response.model", answer.model)
            self.step.measured["gen_ai.response.model"] = answer.model
        if answer.request_id:
            span.set_attribute(REQUEST_ID, answer.request_id)
        if answer.container_ids:
            span.set_attribute(CONTAINERS, answer.container_ids)
        span.set_attribute("gen_ai.response.finish_reasons", [_finish_reason(answer)])
        if answer.end in ("failed", "cancelled"):
            self.step.failed(answer.end)
        self._count(answer)
        if self.contents is not None:
            self.contents.record_output(span, answer)

    def _count(self, answer: ModelAnswered) -> None:
        if self.within is not None:
            self.within.containers.update(answer.container_ids)
        if answer.usage is None:
            return
        _used(self.step.span, answer.usage)
        if self.within is not None:
            self.within.usage += answer.usage
        for kind, count in (("input", answer.usage.input_tokens), ("output", answer.usage.output_tokens)):
            self.tokens.record(count, {**self.step.measured, "gen_ai.token.type": kind})


def _finish_reason(answer: ModelAnswered) -> str:
    asks = any(item.get("type") == "function_call" for item in answer.output)
    return "tool_call" if asks and answer.end == "stop" else finish_reason_of(answer.end)


# --- content ------------------------------------------------------------------------------------------


class _Contents:
    """What was said, in attributes; a span without it is better than an evaluation that failed over it."""

    def __init__(self, view: str, redact: Callable[[str], str] | None, longest: int) -> None:
        self._view = view
        self._redact = redact
        self._longest = longest

    def record_input(self, span: Span, request: Mapping[str, Any]) -> None:
        def made() -> list[JsonObject]:
            return to_messages(self._view, self._shown(from_vendor("openai", _items(request.get("input")))))

        self._record(span, "gen_ai.input.messages", lambda: self._messages(made()))

    def record_output(self, span: Span, answer: ModelAnswered) -> None:
        def made() -> list[JsonObject]:
            parts = self._shown(from_vendor("openai", _items(answer.output)))
            stopped = answer.end == "stop"
            return to_messages(
                self._view, parts, finish_reason(parts) if stopped else finish_reason_of(answer.end)
            )

        self._record(span, "gen_ai.output.messages", lambda: self._messages(made()))

    def record_answer(self, span: Span, text: str | None) -> None:
        def made() -> list[JsonObject]:
            return to_messages(self._view, self._shown([Text(content=text or "")]), "stop")

        self._record(span, "gen_ai.output.messages", lambda: self._messages(made()))

    def record_call(self, span: Span, event: ToolInvoked) -> None:
        """What a function was called with, and what the model reads of it."""

        def arguments() -> str:
            value = event.params if isinstance(event.params, str) else serde.builtins(event.params)
            call = ToolCall(kind="function", name=event.name, payload={"arguments": cast(Json, value)})
            return json.dumps(self._payload(call, "tool_call")["arguments"])

        def result() -> str:
            value = cast(Json, json.loads(event.rendered_output))
            return json.dumps(
                self._payload(ToolResult(kind="function", payload={"result": value}), "response")["result"]
            )

        self._record(span, "gen_ai.tool.call.arguments", arguments)
        self._record(span, "gen_ai.tool.call.result", result)

    def _payload(self, part: Part, member: str) -> JsonObject:
        (written,) = bounded(to_view("option1", self._shown([part])), self._longest)
        return cast(JsonObject, written[member])

    def _shown(self, parts: list[Part]) -> list[Part]:
        bare = without_data(parts)
        return bare if self._redact is None else redacted(bare, self._redact)

    def _messages(self, messages: list[JsonObject]) -> str:
        share = self._longest // max(1, len(messages))
        return json.dumps(
            [
                {**message, "parts": bounded(cast(list[JsonObject], message["parts"]), share)}
                for message in messages
            ]
        )

    def _record(self, span: Span, attribute: str, made: Callable[[], str]) -> None:
        if not span.is_recording():
            return
        try:
            span.set_attribute(attribute, made())
        except Exception as error:
            _log.warning("%s is left out of a span: %s", attribute, type(error).__name__)


def _items(given: object) -> list[Json]:
    return cast(list[Json], given) if isinstance(given, list) else []
