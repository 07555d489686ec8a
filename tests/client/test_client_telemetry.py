"""Spans and metrics of evaluations, and the content that they must not hold."""

import contextlib
import gc
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from inline_snapshot import snapshot
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

from fumehood.client import (
    Deadline,
    Prompt,
    PromptEvaluationError,
    PromptExecuted,
    PromptResponse,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    CompactionConfig,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
)
from fumehood.client.errors import ContainerNotFoundError, DeadlineExceededError, ThrottleError
from fumehood.message_parts.otel_parts import REPRESENTATIONS
from fumehood.message_parts.validation import validate
from fumehood.telemetry.client_telemetry import ClientTelemetry
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import HOSTED, PATIENT, Query, code_call, function_call, prompt, query_tool
from tests.support.openai_server import Reply, error, message, response

ALL_MODES = True

SECRET = "the-word-that-nobody-may-see"
QUERY = response(function_call("c1", '{"sql": "x"}'))
DONE = response(message("done"))


@dataclass
class TelemetryRecorder:
    """Telemetry of evaluations with a stand-in for OpenAI, and what it exports."""

    stand_in: OpenAIStandIn
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def __post_init__(self) -> None:
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def telemetry(self, **settings: Any) -> ClientTelemetry:
        return ClientTelemetry(tracer_provider=self.tracers, meter_provider=self.meters, **settings)

    def evaluate(self, prompt: Prompt[None], *replies: Reply, **settings: Any) -> PromptResponse[None]:
        """Evaluate a prompt with telemetry. settings: of the adapter."""
        settings.setdefault("observer", self.telemetry())
        return self.stand_in.evaluate(prompt, *replies, **settings)

    def spans(self) -> list[ReadableSpan]:
        """Return the spans in the order of their starts."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def error_types(self) -> list[Any]:
        return [attributes_of(span).get("error.type") for span in self.spans()]

    def points(self) -> dict[str, list[HistogramDataPoint]]:
        data = self.reader.get_metrics_data()
        found: dict[str, list[HistogramDataPoint]] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = metric.data.data_points
                    found[metric.name] = [one for one in points if isinstance(one, HistogramDataPoint)]
        return found


@pytest.fixture
def recorded(openai_stand_in: OpenAIStandIn) -> TelemetryRecorder:
    return TelemetryRecorder(openai_stand_in)


def attributes_of(span: ReadableSpan | HistogramDataPoint) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(span: ReadableSpan) -> str:
    """As a traceparent has them, without its flags."""
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}"


def find_span(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def is_child_of(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and ids(parent).endswith(f"{span.parent.span_id:016x}")


def span_endings(spans: list[ReadableSpan]) -> list[tuple[str, Any, StatusCode]]:
    return [(span.name, attributes_of(span).get("error.type"), span.status.status_code) for span in spans]


# --- spans --------------------------------------------------------------------------------------------


def test_an_evaluation_is_a_trace_of_its_requests_and_functions(
    openai_stand_in: OpenAIStandIn, recorded: TelemetryRecorder
) -> None:
    session = Session()
    with recorded.tracers.get_tracer("mine").start_as_current_span("mine"):
        recorded.evaluate(prompt(query_tool), QUERY, DONE, session=session)
    mine, evaluation, first, function, second = recorded.spans()
    assert [span.name for span in (evaluation, first, function, second)] == [
        "invoke_agent task",
        "chat gpt-4.1",
        "execute_tool run_query",
        "chat gpt-4.1",
    ]
    assert is_child_of(evaluation, mine)
    assert all(is_child_of(span, evaluation) for span in (first, function, second))
    assert (first.kind, evaluation.kind, function.kind) == (
        SpanKind.CLIENT,
        SpanKind.INTERNAL,
        SpanKind.INTERNAL,
    )
    port = int(openai_stand_in.server.url.rpartition(":")[2].removesuffix("/v1"))
    assert attributes_of(first) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4.1",
        "server.address": "127.0.0.1",
        "server.port": port,
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.response.id": "resp_1",
        "gen_ai.response.model": "gpt-4.1",
        "fumehood.request.id": "req_1",
        "gen_ai.response.finish_reasons": ("tool_call",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
    }
    assert attributes_of(second)["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes_of(function) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "run_query",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "c1",
    }
    assert attributes_of(evaluation) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4.1",
        "gen_ai.agent.name": "task",
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 10,
    }
    assert [event.name for event in evaluation.events] == ["fumehood.prompt_rendered"]


def test_each_request_carries_the_context_of_its_span(
    openai_stand_in: OpenAIStandIn, recorded: TelemetryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = error(503, "Busy.")
    recorded.evaluate(prompt(query_tool), busy, QUERY, DONE, throttle=PATIENT)
    expected = [ids(span) for span in recorded.spans() if span.kind is SpanKind.CLIENT]
    sent = [headers["traceparent"].rpartition("-")[0] for headers in openai_stand_in.server.headers]
    assert sent == [expected[0], *expected]
    recorded.evaluate(prompt(), DONE, observer=recorded.telemetry(propagate=False))
    assert "traceparent" not in openai_stand_in.server.headers[0]
    monkeypatch.setenv("OTEL_PROPAGATORS", "none")
    recorded.evaluate(prompt(), DONE)
    assert "traceparent" not in openai_stand_in.server.headers[0]


def test_a_tool_that_the_provider_ran_is_an_event_and_has_no_duration(recorded: TelemetryRecorder) -> None:
    tool = OpenAICodeInterpreterTool(container=AutoContainerConfig(memory_limit="4g"))
    recorded.evaluate(prompt(tool), response(code_call(), message("42")))
    evaluation, chat = recorded.spans()
    container = code_call()["container_id"]
    assert attributes_of(chat)["fumehood.container.memory_limit"] == "4g"
    assert (
        attributes_of(chat)["fumehood.container.ids"]
        == attributes_of(evaluation)["fumehood.container.ids"]
        == (container,)
    )
    assert [(event.name, dict(event.attributes or {})) for event in evaluation.events[1:]] == [
        (
            "fumehood.tool_invoked",
            {
                "gen_ai.tool.name": tool.name,
                "gen_ai.tool.type": "extension",
                "gen_ai.tool.call.id": code_call()["id"],
                "fumehood.tool.success": True,
                "fumehood.container.ids": (container,),
            },
        )
    ]


def test_a_provider_call_is_not_mistaken_for_a_finished_function(
    recorded: TelemetryRecorder,
) -> None:
    own = Tool[Query, Query](name="code_interpreter", description="Mine.", handler=query_tool.handler)
    recorded.evaluate(
        prompt(own),
        response(function_call("ci_1", '{"sql": "x"}', "code_interpreter")),
        response(code_call(status="failed", outputs=None), message("done")),
        hosted_tools=HOSTED,
    )
    assert span_endings(recorded.spans())[2] == ("execute_tool code_interpreter", None, StatusCode.UNSET)
    assert [event.name for event in recorded.spans()[0].events] == [
        "fumehood.prompt_rendered",
        "fumehood.tool_invoked",
    ]


def test_spans_of_handlers_and_of_inner_prompts_are_below_the_tools(recorded: TelemetryRecorder) -> None:

    def ask(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        with recorded.tracers.get_tracer("mine").start_as_current_span("mine"):
            context.adapter.evaluate(prompt())
        return ToolResult.ok(params)

    outer = prompt(Tool[Query, Query](name="ask", description="Ask.", handler=ask))
    replies = (
        response(function_call("c1", '{"sql": "x"}', "ask")),
        response(code_call(), message("inner")),
        response(message("outer")),
    )
    recorded.evaluate(outer, *replies, hosted_tools=HOSTED)
    first, _, tool, mine, inner, chat, _ = recorded.spans()
    assert (first.name, tool.name, inner.name) == ("invoke_agent task", "execute_tool ask", first.name)
    assert is_child_of(tool, first)
    assert is_child_of(mine, tool)
    assert is_child_of(inner, mine)
    assert is_child_of(chat, inner)
    assert [event.name for event in inner.events] == ["fumehood.prompt_rendered", "fumehood.tool_invoked"]
    assert [event.name for event in first.events] == ["fumehood.prompt_rendered"]
    assert attributes_of(first)["gen_ai.usage.input_tokens"] == 20


def test_a_compaction_is_a_request_too(openai_stand_in: OpenAIStandIn, recorded: TelemetryRecorder) -> None:
    window = {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}
    compaction = CompactionConfig(threshold_tokens=1)
    recorded.evaluate(prompt(), DONE, response(window, id="cmp_2"), compaction=compaction)
    evaluation, _, compact = recorded.spans()
    assert (compact.name, compact.kind) == ("compact gpt-4.1", SpanKind.CLIENT)
    assert is_child_of(compact, evaluation)
    assert attributes_of(evaluation)["gen_ai.usage.output_tokens"] == 10
    assert openai_stand_in.server.headers[1]["traceparent"].startswith(ids(compact))


# --- ends ---------------------------------------------------------------------------------------------


def test_a_failing_function_is_recorded_and_the_evaluation_continues(recorded: TelemetryRecorder) -> None:
    recorded.evaluate(
        prompt(query_tool),
        response(
            function_call("c1", '{"sql": "raise"}'),
            function_call("c2", "no json"),
            function_call("c3", "{}", name="made_up"),
        ),
        DONE,
    )
    assert span_endings(recorded.spans()) == snapshot(
        [
            ("invoke_agent task", None, StatusCode.UNSET),
            ("chat gpt-4.1", None, StatusCode.UNSET),
            ("execute_tool run_query", "failed", StatusCode.ERROR),
            ("execute_tool run_query", "failed", StatusCode.ERROR),
            ("execute_tool", "failed", StatusCode.ERROR),
            ("chat gpt-4.1", None, StatusCode.UNSET),
        ]
    )
    assert attributes_of(recorded.spans()[4])["gen_ai.tool.name"] == "made_up"
    names = {
        attributes_of(point).get("gen_ai.tool.name")
        for point in recorded.points()["gen_ai.execute_tool.duration"]
    }
    assert names == {"run_query", None}


def test_a_rejected_request_ends_its_spans_without_the_message(recorded: TelemetryRecorder) -> None:
    with pytest.raises(PromptEvaluationError, match=SECRET):
        recorded.evaluate(prompt(), error(400, f"What is {SECRET}?"))
    evaluation, chat = recorded.spans()
    assert span_endings([evaluation, chat]) == snapshot(
        [
            ("invoke_agent task", "PromptEvaluationError", StatusCode.ERROR),
            ("chat gpt-4.1", "PromptEvaluationError", StatusCode.ERROR),
        ]
    )
    assert attributes_of(chat)["http.response.status_code"] == 400
    assert not any(SECRET in span.to_json() for span in (evaluation, chat))


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would also end the event loop."""


def test_whatever_ends_an_evaluation_ends_its_spans(recorded: TelemetryRecorder) -> None:
    start = Deadline.after(0).expires_at
    now = [start]

    def late(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        now[0] = start.replace(year=start.year + 1)
        if params.sql == "interrupt":
            raise Interrupted
        assert context.deadline is not None
        context.deadline.check("the rest of it")
        return ToolResult.ok(params)

    slow = prompt(Tool[Query, Query](name="slow", description="Slow.", handler=late))
    for sql, raised in (("wait", DeadlineExceededError), ("interrupt", Interrupted)):
        now[0] = start
        deadline = Deadline(start.replace(month=12, day=31, hour=23), clock=lambda: now[0])
        call = function_call("c1", json.dumps({"sql": sql}), "slow")
        with pytest.raises(raised):
            recorded.evaluate(slow, response(call), deadline=deadline)
        assert recorded.error_types() == [raised.__name__, None, raised.__name__]
        assert attributes_of(recorded.spans()[0])["gen_ai.usage.input_tokens"] == 10
        recorded.exporter.clear()
    with pytest.raises(ThrottleError):
        recorded.evaluate(prompt(), *[Reply(closes=True)] * 9, throttle=PATIENT)
    assert recorded.error_types() == ["ThrottleError", "ThrottleError"]
    recorded.exporter.clear()
    failed = response(status="failed", error={"code": "server_error", "message": SECRET})
    with pytest.raises(PromptEvaluationError):
        recorded.evaluate(prompt(), failed)
    assert recorded.error_types() == ["PromptEvaluationError", "failed"]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_stream_that_is_left_early_is_cancelled(recorded: TelemetryRecorder, is_dropped: bool) -> None:
    def read_one(events: Any) -> None:
        with contextlib.nullcontext() if is_dropped else events:
            events.__enter__()
            next(events)

    async def read_one_of(events: Any) -> None:
        await events.__aenter__()
        await anext(events)
        if not is_dropped:
            await events.aclose()

    recorded.stand_in.script(*[response(message("done"))] * 2)
    adapter = recorded.stand_in.adapter(observer=recorded.telemetry())
    read_one(adapter.stream(prompt()))
    recorded.stand_in.loop.run(read_one_of(adapter.astream(prompt())))
    gc.collect()
    assert recorded.error_types() == ["cancelled"] * 4
    assert {span.status.status_code for span in recorded.spans()} == {StatusCode.ERROR}


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "failed"}, "error"),
    ],
)
def test_finish_reasons_follow_the_conventions(
    recorded: TelemetryRecorder, ended: dict[str, Any], reason: str
) -> None:
    with contextlib.suppress(PromptEvaluationError):
        recorded.evaluate(
            prompt(), response(message("so far"), **ended), observer=recorded.telemetry(capture_content=True)
        )
    asked = attributes_of(recorded.spans()[1])
    assert asked["gen_ai.response.finish_reasons"] == (reason,)
    assert {each["finish_reason"] for each in json.loads(str(asked["gen_ai.output.messages"]))} == {reason}


def test_an_error_before_a_request_fails_the_evaluations_span(recorded: TelemetryRecorder) -> None:
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef("cntr_gone"))
    with pytest.raises(ContainerNotFoundError):
        recorded.evaluate(prompt(tool))
    assert span_endings(recorded.spans()) == [
        ("invoke_agent task", "ContainerNotFoundError", StatusCode.ERROR),
    ]


# --- metrics ------------------------------------------------------------------------------------------


def test_tokens_and_durations_are_measured(recorded: TelemetryRecorder) -> None:
    telemetry = recorded.telemetry()
    recorded.evaluate(prompt(query_tool), QUERY, DONE, observer=telemetry)
    with pytest.raises(PromptEvaluationError):
        recorded.evaluate(prompt(), error(400, "No."), observer=telemetry)
    points = recorded.points()
    assert sorted(points) == [
        "gen_ai.client.operation.duration",
        "gen_ai.client.token.usage",
        "gen_ai.execute_tool.duration",
        "gen_ai.invoke_agent.duration",
    ]
    tokens = {
        attributes_of(point)["gen_ai.token.type"]: (point.count, point.sum)
        for point in points["gen_ai.client.token.usage"]
    }
    assert tokens == {"input": (2, 20), "output": (2, 10)}
    requests = {
        attributes_of(point).get("error.type"): point.count
        for point in points["gen_ai.client.operation.duration"]
    }
    assert requests == {None: 2, "PromptEvaluationError": 1}
    (function,) = points["gen_ai.execute_tool.duration"]
    assert attributes_of(function) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "run_query",
    }
    assert all(point.sum > 0 for name in points for point in points[name])


# --- content ------------------------------------------------------------------------------------------


def test_no_content_is_recorded_by_default(recorded: TelemetryRecorder) -> None:
    called = response(function_call("c1", json.dumps({"sql": SECRET})), code_call(code=SECRET))
    recorded.evaluate(prompt(query_tool), called, response(message(SECRET)), hosted_tools=HOSTED)
    spans = recorded.spans()
    assert len(spans) == 4
    assert not any(SECRET in span.to_json() or "Do it." in span.to_json() for span in spans)


@pytest.mark.parametrize(
    "representation",
    [representation for representation in REPRESENTATIONS if representation != "option1-compat"],
)
def test_content_has_the_chosen_representation(recorded: TelemetryRecorder, representation: str) -> None:
    called = response(function_call("c1", '{"sql": "x"}'), code_call())
    telemetry = recorded.telemetry(capture_content=True, representation=representation)
    recorded.evaluate(prompt(query_tool), called, DONE, observer=telemetry, hosted_tools=HOSTED)
    evaluation, first, function, second = recorded.spans()
    for span, attribute in (
        (first, "gen_ai.input.messages"),
        (first, "gen_ai.output.messages"),
        (second, "gen_ai.input.messages"),
        (second, "gen_ai.output.messages"),
        (evaluation, "gen_ai.output.messages"),
    ):
        assert validate(json.loads(attributes_of(span)[attribute])) == []
    roles = [message["role"] for message in json.loads(attributes_of(second)["gen_ai.input.messages"])]
    assert (roles[0], roles[-1]) == ("system", "tool")
    answered = json.loads(attributes_of(evaluation)["gen_ai.output.messages"])
    assert [part["content"] for message in answered for part in message["parts"]] == ["done"]
    assert json.loads(attributes_of(function)["gen_ai.tool.call.arguments"]) == {"sql": "x"}
    assert json.loads(attributes_of(function)["gen_ai.tool.call.result"])["success"] is True


def test_content_is_redacted_and_bounded(recorded: TelemetryRecorder) -> None:
    long = f"{SECRET} {'x' * 50_000}"
    called = response(function_call("c1", json.dumps({"sql": long})), code_call(code=long))

    def redact(text: str) -> str:
        return text.replace(SECRET, "[gone]")

    telemetry = recorded.telemetry(capture_content=True, redact=redact, max_content_bytes=4000)
    recorded.evaluate(
        prompt(query_tool), called, response(message(long)), observer=telemetry, hosted_tools=HOSTED
    )
    values = [
        value for span in recorded.spans() for value in attributes_of(span).values() if isinstance(value, str)
    ]
    assert not any(SECRET in value for value in values)
    assert sum("[gone]" in value for value in values) >= 5
    assert max(len(value) for value in values) <= 4200
    for span in recorded.spans():
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            if name in attributes_of(span):
                assert validate(json.loads(attributes_of(span)[name])) == []


def test_images_are_recorded_as_digests(recorded: TelemetryRecorder) -> None:
    picture = {"type": "image", "url": "data:image/png;base64,aGVsbG8="}
    telemetry = recorded.telemetry(capture_content=True)
    recorded.evaluate(
        prompt(),
        response(code_call(outputs=[picture]), message("done")),
        observer=telemetry,
        hosted_tools=HOSTED,
    )
    told_of = attributes_of(find_span(recorded.spans(), "chat gpt-4.1"))["gen_ai.output.messages"]
    assert "aGVsbG8=" not in told_of
    assert "urn:sha256:2cf24dba" in told_of


def test_the_environment_asks_for_content(
    recorded: TelemetryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "span_only")
    recorded.evaluate(prompt(), DONE)
    assert "Do it." in attributes_of(find_span(recorded.spans(), "chat gpt-4.1"))["gen_ai.input.messages"]
    recorded.exporter.clear()
    recorded.evaluate(prompt(), DONE, observer=recorded.telemetry(capture_content=False))
    assert "gen_ai.input.messages" not in attributes_of(find_span(recorded.spans(), "chat gpt-4.1"))


def test_content_that_cannot_be_written_does_not_fail_the_evaluation(
    recorded: TelemetryRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    def redact(text: str) -> str:
        raise ValueError(text)

    telemetry = recorded.telemetry(capture_content=True, redact=redact)
    with caplog.at_level(logging.WARNING):
        assert recorded.evaluate(prompt(query_tool), QUERY, DONE, observer=telemetry).text == "done"
    assert "gen_ai.output.messages was not recorded in a span: ValueError" in caplog.text
    assert "Do it." not in caplog.text


def test_events_published_by_a_handler_do_not_fail_the_evaluation(recorded: TelemetryRecorder) -> None:
    def publish(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        about: Any = {"prompt_name": "p", "adapter": "a", "session_id": None, "result": None}
        context.event_bus.publish(PromptExecuted(**about))
        context.event_bus.publish(ToolInvoked(**about, name="mine", params=None))
        context.event_bus.publish("anything")
        return ToolResult.ok(params)

    tool = Tool[Query, Query](name="publish", description="Publish.", handler=publish)
    telemetry = recorded.telemetry(capture_content=True)
    called = response(function_call("c1", '{"sql": "x"}', "publish"))
    assert recorded.evaluate(prompt(tool), called, DONE, observer=telemetry).text == "done"
    assert span_endings(recorded.spans())[2] == ("execute_tool publish", None, StatusCode.UNSET)


def test_a_trace_that_is_not_sampled_costs_no_content(
    openai_stand_in: OpenAIStandIn, recorded: TelemetryRecorder
) -> None:
    seen: list[str] = []

    def redact(text: str) -> str:
        seen.append(text)
        return text

    tracers = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    telemetry = ClientTelemetry(tracer_provider=tracers, capture_content=True, redact=redact)
    assert recorded.evaluate(prompt(query_tool), QUERY, DONE, observer=telemetry).text == "done"
    assert seen == []
    flags = openai_stand_in.server.headers[0]["traceparent"].rpartition("-")[2]
    assert int(flags, 16) & TraceFlags.SAMPLED == 0


def test_without_the_extra_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['opentelemetry'] = None; import fumehood.telemetry.client_telemetry"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "needs an extra: pip install 'fumehood[otel]'" in done.stderr.splitlines()[-1]


def test_an_unknown_representation_is_rejected() -> None:
    with pytest.raises(ValueError, match="no representation 'option9'; there are option1"):
        ClientTelemetry(representation="option9")


# --- events stay as they are --------------------------------------------------------------------------


def test_telemetry_does_not_change_events(
    openai_stand_in: OpenAIStandIn, recorded: TelemetryRecorder
) -> None:
    def collect_events(**settings: Any) -> list[tuple[Any, ...]]:
        session, events = Session(), list[ToolInvoked]()
        session.bus.subscribe(ToolInvoked, events.append)
        openai_stand_in.evaluate(
            prompt(query_tool),
            response(function_call("c1", '{"sql": "x"}'), code_call()),
            DONE,
            session=session,
            hosted_tools=HOSTED,
            **settings,
        )
        return [(event.name, event.params, event.result, event.call_id) for event in events]

    plain = collect_events()
    assert len(plain) == 2
    assert collect_events(observer=recorded.telemetry(capture_content=True)) == plain
