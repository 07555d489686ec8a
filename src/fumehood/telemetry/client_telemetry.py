"""Spans and metrics of the client's evaluations.

Evaluations, requests and functions of the prompt are spans. Tools that the provider ran are events of the evaluation's
span, because the client does not know when they started.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, use_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("Client telemetry needs an extra: pip install 'fumehood[otel]'") from error

from fumehood import __version__
from fumehood.client import serde
from fumehood.client.budget import TokenUsage
from fumehood.client.runtime.evaluation_observer import (
    EvaluationStarted,
    ModelRequestStarted,
    ModelResponseReceived,
    ToolCallStarted,
)
from fumehood.client.runtime.events import PromptExecuted, PromptRendered, ToolInvoked
from fumehood.message_parts import (
    REPRESENTATIONS,
    Json,
    JsonObject,
    Part,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    from_vendor,
)
from fumehood.telemetry.message_writer import MessageWriter
from fumehood.telemetry.semantic_conventions import (
    DURATION_BUCKETS,
    INPUT_MESSAGES,
    MAX_CONTENT_BYTES,
    OUTPUT_MESSAGES,
    SCHEMA_URL,
    TOKEN_BUCKETS,
    TOOL_CALL_ARGUMENTS,
    TOOL_CALL_RESULT,
    map_finish_reason,
    propagates_trace_context,
    read_capture_targets,
)

CONTAINER_IDS = "fumehood.container.ids"
MEMORY_LIMIT = "fumehood.container.memory_limit"
REQUEST_ID = "fumehood.request.id"

_W3C = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)

# Of a task; and of a stream that is closed before its end.
_CANCELLATIONS = (asyncio.CancelledError, GeneratorExit)

type Attributes = dict[str, str | int | float | bool | Sequence[str]]


class ClientTelemetry:
    """An observer for an adapter: `OpenAIAdapter(model=…, observer=ClientTelemetry())`.

    Spans are children of the current span and become current themselves, so that spans of a tool's handler are children
    of the tool's. One object serves any number of adapters and threads.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
        representation: str = "option2",
        redact: Callable[[str], str] | None = None,
        max_content_bytes: int = MAX_CONTENT_BYTES,
        propagate: bool | None = None,
    ) -> None:
        """Create an observer that reports to the given providers, by default OpenTelemetry's global ones.

        capture_content: whether to record content; by default as the environment says.
        representation: how tool calls are written. redact: called with each text, returns what may be recorded.
        max_content_bytes: limit for one attribute.
        propagate: whether requests carry the W3C trace context; by default as the environment says.

        Raises ValueError for an unknown representation.
        """
        if representation not in REPRESENTATIONS:
            raise ValueError(
                f"There is no representation {representation!r}; there are {', '.join(REPRESENTATIONS)}."
            )
        tracers = tracer_provider or trace.get_tracer_provider()
        meter = (meter_provider or metrics.get_meter_provider()).get_meter(
            "fumehood.client", __version__, SCHEMA_URL
        )
        self._tracer = tracers.get_tracer("fumehood.client", __version__, schema_url=SCHEMA_URL)
        self._durations = {
            "chat": _create_duration_histogram(
                meter, "gen_ai.client.operation.duration", "Duration of requests."
            ),
            "invoke_agent": _create_duration_histogram(
                meter, "gen_ai.invoke_agent.duration", "Duration of evaluations."
            ),
            "execute_tool": _create_duration_histogram(
                meter, "gen_ai.execute_tool.duration", "Duration of functions."
            ),
        }
        self._token_usage = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens used by requests.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        if capture_content is None:
            capture_content, _ = read_capture_targets(os.environ)
        self._content_recorder = (
            _ContentRecorder(representation, redact, max_content_bytes) if capture_content else None
        )
        self._propagates = propagates_trace_context(os.environ) if propagate is None else propagate

    # ---- the observer ---------------------------------------------------------------------------

    @contextmanager
    def observe_evaluation(self, evaluation: EvaluationStarted) -> Generator[None]:
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
        with self._start_step(name, SpanKind.INTERNAL, attributes, session) as step:
            evaluation_span = _EvaluationSpan(step.span, session)
            token = _evaluation.set(evaluation_span)
            try:
                yield
            finally:
                _evaluation.reset(token)
                evaluation_span.record_totals()

    @contextmanager
    def observe_request(self, event: ModelRequestStarted) -> Generator["_RequestObservation"]:
        model = str(event.request.get("model", ""))
        server = urlsplit(event.base_url)
        attributes: Attributes = {
            "gen_ai.operation.name": event.operation,
            "gen_ai.provider.name": event.adapter,
            "gen_ai.request.model": model,
            "server.address": server.hostname or "",
            "server.port": server.port or (80 if server.scheme == "http" else 443),
        }
        name = f"{event.operation} {model}"
        parent = _evaluation.get()
        span_attributes = _request_attributes(event) | (parent.session if parent else {})
        with self._start_step(name, SpanKind.CLIENT, attributes, span_attributes) as step:
            headers: dict[str, str] = {}
            if self._propagates:
                _W3C.inject(headers)
            if recorder := self._recorder_for(step.span):
                recorder.record_items(step.span, INPUT_MESSAGES, event.request.get("input"))
            yield _RequestObservation(step, self._token_usage, recorder, parent, headers)

    @contextmanager
    def observe_tool_call(self, call: ToolCallStarted) -> Generator[None]:
        attributes: Attributes = {"gen_ai.operation.name": "execute_tool"}
        span_attributes: Attributes = {"gen_ai.tool.name": call.name, "gen_ai.tool.type": "function"}
        # A name that the model invented must not become a span name or a label.
        if call.exists:
            attributes["gen_ai.tool.name"] = call.name
        if call.call_id:
            span_attributes["gen_ai.tool.call.id"] = call.call_id
        name = f"execute_tool {call.name}" if call.exists else "execute_tool"
        with self._start_step(name, SpanKind.INTERNAL, attributes, span_attributes) as step:
            evaluation = _evaluation.get()
            if evaluation is not None:
                evaluation.running_function = step, call
            try:
                yield
            finally:
                if evaluation is not None:
                    evaluation.running_function = None

    def publish(self, event: object) -> None:
        """Add an event of the client to its span.

        Handlers may publish events with arbitrary content; one that cannot be recorded is logged and left out.
        """
        try:
            self._record_event(event)
        except Exception as error:
            _log.warning(
                "A %s event was not recorded in a span: %s", type(event).__name__, type(error).__name__
            )

    def _record_event(self, event: object) -> None:
        match event:
            case ToolInvoked():
                self._record_tool_invoked(event)
            case PromptRendered():
                _current_span().add_event("fumehood.prompt_rendered")
            case PromptExecuted():
                span = _current_span()
                if recorder := self._recorder_for(span):
                    recorder.record_answer(span, event.result.text)
            case _:
                pass

    def _record_tool_invoked(self, event: ToolInvoked) -> None:
        evaluation = _evaluation.get()
        if evaluation is not None and evaluation.running_function is not None:
            step, call = evaluation.running_function
            if (call.name, call.call_id) == (event.name, event.call_id):
                self._record_function_result(step, event)
                return
        attributes: Attributes = {
            "gen_ai.tool.name": event.name,
            "gen_ai.tool.type": "extension",
            "fumehood.tool.success": event.result.success,
        }
        if event.call_id:
            attributes["gen_ai.tool.call.id"] = event.call_id
        if isinstance(container := getattr(event.params, "container_id", None), str):
            attributes[CONTAINER_IDS] = [container]
        _current_span().add_event("fumehood.tool_invoked", attributes)

    def _record_function_result(self, step: "_SpanStep", event: ToolInvoked) -> None:
        if not event.result.success:
            step.set_error("failed")
        if recorder := self._recorder_for(step.span):
            recorder.record_call(step.span, event)

    def _recorder_for(self, span: Span) -> "_ContentRecorder | None":
        return self._content_recorder if span.is_recording() else None

    # ---- spans --------------------------------------------------------------------------------

    @contextmanager
    def _start_step(
        self, name: str, kind: SpanKind, attributes: Attributes, span_attributes: Attributes
    ) -> Generator["_SpanStep"]:
        """Start a span. attributes: of the span and of the metrics; span_attributes: of the span alone."""
        started = time.perf_counter()
        span = self._tracer.start_span(name, kind=kind, attributes={**attributes, **span_attributes})
        step = _SpanStep(span, attributes)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                yield step
        except BaseException as error:
            step.record_exception(error)
            raise
        finally:
            duration = self._durations.get(str(attributes["gen_ai.operation.name"]), self._durations["chat"])
            duration.record(time.perf_counter() - started, step.metric_attributes)
            span.end()


def _create_duration_histogram(meter: metrics.Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=DURATION_BUCKETS
    )


def _current_span() -> Span:
    """Return the evaluation's span; an invalid one outside of evaluations."""
    evaluation = _evaluation.get()
    return evaluation.span if evaluation else trace.INVALID_SPAN


def _request_attributes(event: ModelRequestStarted) -> Attributes:
    """Return sampling limits and containers of a request."""
    request = event.request
    attributes: Attributes = {}
    for name, member in (
        ("gen_ai.request.max_tokens", "max_output_tokens"),
        ("gen_ai.request.temperature", "temperature"),
        ("gen_ai.request.top_p", "top_p"),
    ):
        if isinstance(value := request.get(member), int | float):
            attributes[name] = value
    if event.memory_limit:
        attributes[MEMORY_LIMIT] = event.memory_limit
    containers = [tool.get("container") for tool in request.get("tools") or ()]
    if container_ids := [container for container in containers if isinstance(container, str)]:
        attributes[CONTAINER_IDS] = container_ids
    return attributes


# --- spans in progress ---------------------------------------------------------------------------------


@dataclass
class _SpanStep:
    span: Span
    metric_attributes: Attributes

    def set_error(self, kind: str) -> None:
        self.metric_attributes["error.type"] = kind
        self.span.set_attribute("error.type", kind)
        self.span.set_status(Status(StatusCode.ERROR))

    def record_exception(self, error: BaseException) -> None:
        """Record the type of the error, and not its message, which may hold content."""
        self.set_error("cancelled" if isinstance(error, _CANCELLATIONS) else type(error).__name__)
        status = getattr(error.__cause__, "status_code", None)
        if isinstance(status, int):
            self.span.set_attribute("http.response.status_code", status)


@dataclass
class _EvaluationSpan:
    """The span of an evaluation, with the totals of its requests."""

    span: Span
    session: Attributes
    usage: TokenUsage = field(default_factory=TokenUsage)
    containers: set[str] = field(default_factory=set[str])
    running_function: tuple[_SpanStep, ToolCallStarted] | None = None

    def record_totals(self) -> None:
        _set_usage_attributes(self.span, self.usage)
        if self.containers:
            self.span.set_attribute(CONTAINER_IDS, sorted(self.containers))


_evaluation: ContextVar[_EvaluationSpan | None] = ContextVar("fumehood_evaluation", default=None)


def _set_usage_attributes(span: Span, usage: TokenUsage) -> None:
    span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
    if usage.cached_tokens:
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)


@dataclass(frozen=True)
class _RequestObservation:
    step: _SpanStep
    token_usage: Histogram
    content_recorder: "_ContentRecorder | None"
    evaluation: _EvaluationSpan | None
    headers: Mapping[str, str]

    def on_response(self, response: ModelResponseReceived) -> None:
        span = self.step.span
        span.set_attribute("gen_ai.response.id", response.id)
        if response.model:
            span.set_attribute("gen_ai.response.model", response.model)
            self.step.metric_attributes["gen_ai.response.model"] = response.model
        if response.request_id:
            span.set_attribute(REQUEST_ID, response.request_id)
        if response.container_ids:
            span.set_attribute(CONTAINER_IDS, response.container_ids)
        finish_reason = _finish_reason(response)
        span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])
        if response.finish_reason in ("failed", "cancelled"):
            self.step.set_error(response.finish_reason)
        self._record_usage(response)
        if self.content_recorder is not None:
            self.content_recorder.record_items(span, OUTPUT_MESSAGES, response.output, finish_reason)

    def _record_usage(self, response: ModelResponseReceived) -> None:
        if self.evaluation is not None:
            self.evaluation.containers.update(response.container_ids)
        usage = response.usage
        if usage is None:
            return
        _set_usage_attributes(self.step.span, usage)
        if self.evaluation is not None:
            self.evaluation.usage += usage
        for kind, count in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            self.token_usage.record(count, {**self.step.metric_attributes, "gen_ai.token.type": kind})


def _finish_reason(response: ModelResponseReceived) -> str:
    has_calls = any(item.get("type") == "function_call" for item in response.output)
    if has_calls and response.finish_reason == "stop":
        return "tool_call"
    return map_finish_reason(response.finish_reason)


# --- content ------------------------------------------------------------------------------------------


class _ContentRecorder:
    """Writes content to attributes of spans that are recorded. A failure costs the attribute, never the evaluation."""

    def __init__(self, representation: str, redact: Callable[[str], str] | None, max_bytes: int) -> None:
        self._message_writer = MessageWriter(representation, redact)
        self._call_writer = MessageWriter("option1", redact)
        self._max_bytes = max_bytes

    def record_items(
        self, span: Span, attribute: str, items: object, finish_reason: str | None = None
    ) -> None:
        with _log_failure(attribute):
            parts = from_vendor("openai", cast(list[Json], items)) if isinstance(items, list) else []
            self._set_messages(span, attribute, parts, finish_reason)

    def record_answer(self, span: Span, text: str | None) -> None:
        with _log_failure(OUTPUT_MESSAGES):
            self._set_messages(span, OUTPUT_MESSAGES, [TextPart(content=text or "")], "stop")

    def record_call(self, span: Span, event: ToolInvoked) -> None:
        """Record the arguments of a function, and its result as the model reads it."""
        with _log_failure(TOOL_CALL_ARGUMENTS):
            value = event.params if isinstance(event.params, str) else serde.to_builtins(event.params)
            call = ToolCallPart(kind="function", name=event.name, payload={"arguments": value})
            self._set_payload(span, TOOL_CALL_ARGUMENTS, call, ("tool_call", "arguments"))
        with _log_failure(TOOL_CALL_RESULT):
            result = ToolCallResponsePart(
                kind="function", payload={"result": json.loads(event.rendered_output)}
            )
            self._set_payload(span, TOOL_CALL_RESULT, result, ("response", "result"))

    def _set_messages(
        self, span: Span, attribute: str, parts: list[Part], finish_reason: str | None = None
    ) -> None:
        messages = self._message_writer.write_messages(
            parts, self._max_bytes, finish_reason, keep_vendor_items=True
        )
        span.set_attribute(attribute, json.dumps(messages))

    def _set_payload(self, span: Span, attribute: str, part: Part, path: tuple[str, str]) -> None:
        (written,) = self._call_writer.write_parts([part], self._max_bytes)
        span.set_attribute(attribute, json.dumps(cast(JsonObject, written[path[0]])[path[1]]))


@contextmanager
def _log_failure(attribute: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        _log.warning("%s was not recorded in a span: %s", attribute, type(error).__name__)
