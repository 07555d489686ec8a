"""Events of turns and failures."""

from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider

from fumehood.protocol.model_turns import GenerationParameters, ModelRequest, ModelTextDelta, ModelTurnEnded
from fumehood.protocol.openai.responses import Usage
from fumehood.telemetry.content_capture import ContentRecorder
from fumehood.telemetry.log_event_emitter import LogEventEmitter
from fumehood.telemetry.operation_records import (
    RecordDispatcher,
    SandboxPhaseRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.semantic_conventions import INPUT_MESSAGES, OUTPUT_MESSAGES
from fumehood.telemetry.span_emitter import SpanEmitter
from fumehood.telemetry.trace_context import TraceContextPropagator
from fumehood.timed_steps import TimedStep
from tests.support.turn_records import start_turn


async def emit_events(
    record: SpanRecord, *, capture: ContentRecorder | None = None, **settings: bool
) -> list[ReadableLogRecord]:
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    events = LogEventEmitter(provider.get_logger("test"), **settings)
    spans = SpanEmitter(tracer, TraceContextPropagator({}))
    dispatcher = RecordDispatcher([events, spans], capture, spans.on_start)
    dispatcher.start(record)
    dispatcher.end(record)
    dispatcher.flush()
    return list(exporter.get_finished_logs())


def create_turn(error: str = "") -> TurnRecord:
    request = ModelRequest(model="m", sampling=GenerationParameters(temperature=0.5))
    record = start_turn(request, ("127.0.0.1", 8000))
    record.events, record.error = [], error
    record.add_events([ModelTextDelta("Hello.")])
    if not error:
        record.add_events([ModelTurnEnded("stop", Usage(input_tokens=7, output_tokens=2))])
    return record


def event_attributes(record: ReadableLogRecord) -> dict[str, Any]:
    return dict(record.log_record.attributes or {})


async def test_a_turn_has_an_event_if_enabled() -> None:
    assert await emit_events(create_turn()) == []
    turn = create_turn()
    (record,) = await emit_events(turn, with_details=True)
    assert record.log_record.event_name == "gen_ai.client.inference.operation.details"
    assert record.log_record.severity_number == SeverityNumber.INFO
    assert record.log_record.span_id == turn.span.get_span_context().span_id
    attributes = event_attributes(record)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fumehood",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
    }


@pytest.mark.parametrize("with_content", [True, False])
async def test_content_is_in_the_event_only_if_enabled(with_content: bool) -> None:
    capture = ContentRecorder(in_spans=not with_content, in_events=with_content)
    (record,) = await emit_events(
        create_turn(), capture=capture, with_details=True, with_content=with_content
    )
    attributes = event_attributes(record)
    assert (OUTPUT_MESSAGES in attributes, INPUT_MESSAGES in attributes) == (with_content, with_content)
    if with_content:
        # Structured, as events can have it.
        (message,) = attributes[OUTPUT_MESSAGES]
        assert dict(message["parts"][0]) == {"type": "text", "content": "Hello."}
    else:
        assert "Hello." not in str(attributes)


async def test_a_failed_turn_is_an_exception_event_without_the_message() -> None:
    (record,) = await emit_events(create_turn("server_error"))
    assert record.log_record.event_name == "gen_ai.client.operation.exception"
    assert record.log_record.severity_number == SeverityNumber.WARN
    assert event_attributes(record) == {"exception.type": "server_error"}
    assert await emit_events(create_turn("cancelled")) == []
    details, _ = await emit_events(create_turn("server_error"), with_details=True)
    assert event_attributes(details)["error.type"] == "server_error"


async def test_failed_tools_and_lost_sandboxes_are_events() -> None:
    call = ToolCallRecord(name="code_interpreter", call_id="call_1", error="failed")
    (record,) = await emit_events(call)
    assert (record.log_record.event_name, event_attributes(record)) == (
        "fumehood.tool.failed",
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "code_interpreter",
            "gen_ai.tool.call.id": "call_1",
            "error.type": "failed",
        },
    )
    assert await emit_events(ToolCallRecord(name="code_interpreter", call_id="call_1")) == []
    for status, name in (("out_of_memory", "fumehood.sandbox.lost"), ("ok", None), ("error", None)):
        phase = TimedStep("run", None)
        phase.set_attribute("status", status)
        found = await emit_events(SandboxPhaseRecord(timing=phase, call=call, duration_ns=1))
        assert [each.log_record.event_name for each in found] == ([name] if name else [])
