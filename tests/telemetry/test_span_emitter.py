"""Spans of runs, turns and calls, over an engine of doubles."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, override

import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult

from fumehood.interfaces import Caller, HostedTool, Run
from fumehood.message_parts.validation import validate
from fumehood.protocol.model_turns import ModelProfile, ModelRequest
from fumehood.protocol.openai.api_errors import ApiError, ModelUnreachable
from fumehood.telemetry.content_capture import ContentRecorder
from fumehood.telemetry.instrumentation import ConversationIndex, InstrumentedModelProvider
from fumehood.telemetry.operation_records import Attributes, RecordDispatcher, RunRecord, ToolCallRecord
from fumehood.telemetry.span_emitter import SpanEmitter
from fumehood.telemetry.trace_context import TraceContextPropagator
from fumehood.testing import (
    ScriptedModel,
    SingleBackendProvider,
    calls,
    says,
)
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, make_usage, read_batches, wait_until
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.turn_records import live_records
from tests.telemetry.test_instrumentation import create_runs, decode_request

TIMEOUT_SECONDS = 30.0


@dataclass
class TracedEngine:
    model: ScriptedModel
    tools: Sequence[HostedTool] = ()
    capture: ContentRecorder | None = None
    sampler: Sampler | None = None
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(self.sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = SpanEmitter(
            provider.get_tracer("test"), TraceContextPropagator({}), with_content=self.capture is not None
        )
        self.dispatcher = RecordDispatcher([spans], self.capture, spans.on_start)
        self.runs = create_runs(self.dispatcher, self.model, *self.tools)

    async def start(self, **body: Any) -> Run:
        return await self.runs.start(decode_request(**body), Caller())

    def finished(self) -> list[ReadableSpan]:
        self.dispatcher.flush()
        return [*self.exporter.get_finished_spans()]

    async def spans(self, **body: Any) -> dict[str, list[ReadableSpan]]:
        """Run to the end and return the spans by name."""
        run = await self.start(**body)
        async for _ in read_batches(run):
            pass
        await self.runs.drain(0)
        spans: dict[str, list[ReadableSpan]] = {}
        for span in self.finished():
            spans.setdefault(span.name, []).append(span)
        return spans


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_run_is_a_trace_of_its_turns_and_calls() -> None:
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"), usage=make_usage(3))
    spans = await TracedEngine(model, [EchoTool()]).spans(tools=[ECHO])
    assert {name: len(found) for name, found in spans.items()} == {
        "invoke_agent": 1,
        "chat scripted": 2,
        "execute_tool echo": 1,
    }
    (run,), turns, (call,) = spans["invoke_agent"], spans["chat scripted"], spans["execute_tool echo"]
    assert run.parent is None
    for child in (*turns, call):
        assert child.parent is not None
        assert run.context is not None
        assert (child.parent.trace_id, child.parent.span_id) == (run.context.trace_id, run.context.span_id)
    assert attributes_of(run)["gen_ai.usage.output_tokens"] == 6
    assert [attributes_of(turn)["gen_ai.response.finish_reasons"] for turn in turns] == [
        ("tool_call",),
        ("stop",),
    ]
    assert [attributes_of(turn)["gen_ai.usage.input_tokens"] for turn in turns] == [10, 10]
    assert (attributes_of(call)["gen_ai.tool.name"], attributes_of(call)["gen_ai.tool.call.id"]) == (
        "echo",
        "call_1",
    )
    assert not any(span.status.is_ok is False for found in spans.values() for span in found)
    assert "Hi" not in str([attributes_of(span) for found in spans.values() for span in found])
    assert "gen_ai.output.messages" not in attributes_of(run)


async def test_stream_and_format_are_attributes_only_if_requested() -> None:
    asked = {"text": {"format": {"type": "json_object"}}}
    (streamed,) = (await TracedEngine(ScriptedModel(says("{}"))).spans(**asked))["chat scripted"]
    (plain,) = (await TracedEngine(ScriptedModel(says("Hi"))).spans(stream=False))["chat scripted"]
    names = ("gen_ai.request.stream", "gen_ai.output.type")
    assert [attributes_of(streamed).get(name) for name in names] == [True, "json"]
    assert [attributes_of(plain).get(name) for name in names] == [None, None]


async def test_a_conversation_is_named_after_its_first_response_and_linked() -> None:
    traced = TracedEngine(ScriptedModel(says("a"), says("b"), says("c")))
    previous, ids = None, list[str]()
    for _ in range(3):
        run = await traced.start(previous_response_id=previous)
        previous = (await run.wait()).id
        ids.append(previous)
    await traced.runs.drain(0)
    spans = traced.finished()
    runs = [span for span in spans if span.name == "invoke_agent"]
    turns = [span for span in spans if span.name == "chat scripted"]
    assert {attributes_of(span)["gen_ai.conversation.id"] for span in (*runs, *turns)} == {ids[0]}
    assert [attributes_of(run).get("fumehood.previous_response.id") for run in runs] == [None, *ids[:2]]
    linked = [[link.context.span_id for link in run.links] for run in runs]
    assert linked == [[], *([run.context.span_id] for run in runs[:2] if run.context is not None)]


async def test_an_unknown_previous_response_names_the_conversation_without_a_link() -> None:
    traced = TracedEngine(ScriptedModel())
    with pytest.raises(ApiError):
        await traced.start(previous_response_id="resp_of_another_process")
    (run,) = traced.finished()
    assert attributes_of(run)["gen_ai.conversation.id"] == "resp_of_another_process"
    assert not run.links


def test_only_the_latest_responses_are_remembered() -> None:
    index = ConversationIndex(max_responses=2)
    for name in ("resp_1", "resp_2", "resp_3"):
        index.add(
            RunRecord(request=None, model=None, streamed=False, conversation_id=f"of {name}"), name, Caller()
        )
    found: list[str] = []
    for name in ("resp_1", "resp_3"):
        record = RunRecord(request=decode_request(previous_response_id=name), model=None, streamed=False)
        index.find_previous(record, Caller())
        found.append(record.conversation_id)
    other = RunRecord(request=decode_request(previous_response_id="resp_3"), model=None, streamed=False)
    index.find_previous(other, Caller("another tenant"))
    assert [*found, other.conversation_id] == ["resp_1", "of resp_3", "resp_3"]


async def test_the_provider_is_configurable() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = SpanEmitter(provider.get_tracer("test"), TraceContextPropagator({}))
    dispatcher = RecordDispatcher([spans], on_start=spans.on_start)
    for profile in (ModelProfile(), ModelProfile(provider="theirs", server=("127.0.0.1", 1))):
        models = InstrumentedModelProvider(
            SingleBackendProvider(ScriptedModel(says("x"), profile=profile)), dispatcher, "ours"
        )
        stream = models.get_backend("m").stream(ModelRequest(model="m"))
        async for _ in stream:
            pass
    dispatcher.flush()
    found = [attributes_of(span)["gen_ai.provider.name"] for span in exporter.get_finished_spans()]
    assert found == ["ours", "theirs"]


async def test_concurrent_runs_are_separate_traces() -> None:
    gate = asyncio.Event()
    traced = TracedEngine(ScriptedModel([gate, *says("a")], [gate, *says("b")]))
    started = [await traced.start() for _ in range(2)]
    gate.set()
    for run in started:
        await run.wait()
    await traced.runs.drain(0)
    spans = traced.finished()
    assert len(spans) == 4
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 2
    for span in spans:
        assert (span.parent is None) == (span.name == "invoke_agent")


async def test_exported_spans_keep_no_records() -> None:
    before = {id(record) for record in live_records()}
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"))
    traced = TracedEngine(model, [EchoTool()], ContentRecorder())
    assert sum(map(len, (await traced.spans(tools=[ECHO])).values())) == 4
    assert [record for record in live_records() if id(record) not in before] == []


@pytest.mark.parametrize("stream", [True, False])
async def test_content_is_recorded_if_enabled(stream: bool) -> None:
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"))
    spans = await TracedEngine(model, [EchoTool()], ContentRecorder()).spans(tools=[ECHO], stream=stream)
    messages = json.loads(attributes_of(spans["invoke_agent"][0])["gen_ai.output.messages"])
    assert validate(messages) == []
    assert [(message["role"], message["finish_reason"]) for message in messages] == [("assistant", "stop")]
    assert [part["type"] for part in messages[0]["parts"]] == [
        *("server_tool_call", "server_tool_call_response", "text")
    ]


async def test_no_content_is_recorded_if_redaction_fails(caplog: pytest.LogCaptureFixture) -> None:
    def redact(text: str) -> str:
        raise ValueError(text)

    spans = await TracedEngine(
        ScriptedModel(says("a secret")), capture=ContentRecorder(redact=redact)
    ).spans()
    for name in ("invoke_agent", "chat scripted"):
        assert not {key for key in attributes_of(spans[name][0]) if key.endswith("messages")}
        assert attributes_of(spans[name][0])["gen_ai.operation.name"]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


async def test_errors_are_recorded_without_messages() -> None:
    spans = await TracedEngine(ScriptedModel([*says("a"), ModelUnreachable("with a secret")])).spans()
    (run,), (turn,) = spans["invoke_agent"], spans["chat scripted"]
    assert attributes_of(turn)["error.type"] == "server_error"
    assert attributes_of(run)["error.type"] == "server_error"
    assert "secret" not in str([span.to_json() for span in (run, turn)])


async def test_a_rejected_request_has_a_span() -> None:
    traced = TracedEngine(ScriptedModel())
    with pytest.raises(ApiError):
        await traced.start(previous_response_id="resp_nobody_knows")
    (span,) = traced.finished()
    assert span.name == "invoke_agent"
    assert attributes_of(span)["error.type"]


async def test_a_cancelled_run_and_its_call_have_the_error_cancelled() -> None:
    never = asyncio.Event()
    echo = EchoTool(gate=lambda _: never)
    traced = TracedEngine(ScriptedModel([*calls("echo", {"text": "x"})]), [echo])
    run = await traced.start(tools=[ECHO])
    await asyncio.wait_for(wait_until(lambda: len(echo.log) > 1), TIMEOUT_SECONDS)
    run.cancel("a test")
    await run.wait()
    await traced.runs.drain(0)
    errors = {span.name: attributes_of(span).get("error.type") for span in traced.finished()}
    assert errors == {"chat scripted": None, "execute_tool echo": "cancelled", "invoke_agent": "cancelled"}


# --- samplers and broken spans ------------------------------------------------------------------------------


class NameSampler(Sampler):
    """Samples spans of one name, whatever their parents are."""

    def __init__(self, name: str) -> None:
        self._name = name

    @override
    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> SamplingResult:
        decision = Decision.RECORD_AND_SAMPLE if name == self._name else Decision.DROP
        return SamplingResult(decision, attributes)

    @override
    def get_description(self) -> str:
        return "NameSampler"


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (NameSampler("chat scripted"), {"chat scripted"}),
        (NameSampler("invoke_agent"), {"invoke_agent"}),
        (ParentBased(ALWAYS_OFF), set[str]()),
    ],
)
async def test_samplers_decide_which_spans_are_exported(sampler: Sampler, expected: set[str]) -> None:
    traced = TracedEngine(ScriptedModel(says("Done")), sampler=sampler)
    spans = await traced.spans()
    assert spans.keys() == expected
    for name in expected:
        assert attributes_of(spans[name][0])["gen_ai.request.model"] == "scripted"


class BrokenRecord(ToolCallRecord, eq=False, kw_only=True):
    @override
    def end_attributes(self) -> Attributes:
        raise ValueError("with a secret")


async def test_a_failing_span_does_not_lose_the_batch(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{receiver.address}/v1/traces"))
    )
    spans = SpanEmitter(provider.get_tracer("test"), TraceContextPropagator({}))
    dispatcher = RecordDispatcher([spans], on_start=spans.on_start)
    for record in (
        ToolCallRecord(name="plain", call_id="1"),
        BrokenRecord(name="broken", call_id="2"),
        ToolCallRecord(name="half \ud800", call_id="3"),
        ToolCallRecord(name="id", call_id="\ud800"),
    ):
        dispatcher.start(record)
        dispatcher.end(record)
    dispatcher.flush()
    await asyncio.to_thread(provider.shutdown)
    assert [span.name for _, span in receiver.spans] == [
        *("execute_tool plain", "execute_tool half ?", "execute_tool id")
    ]
    assert "ValueError at " in caplog.text
    assert "secret" not in caplog.text
