"""Events of turns, and of what went wrong; imports `telemetry` and the SDK."""

from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fumehood.phases import Phase
from fumehood.protocol.models import ModelRequest, Sampling, Text, TurnEnded
from fumehood.protocol.responses import Usage
from fumehood.telemetry.contents import INPUT, OUTPUT, Contents
from fumehood.telemetry.events import Events
from fumehood.telemetry.quick_spans import QuickTracer
from fumehood.telemetry.seen import CallSeen, Observer, PhaseSeen, Seen, TurnSeen
from fumehood.telemetry.spans import Spans
from fumehood.telemetry.trace_context import Propagation
from tests.support.turns import turn_of


async def emitted(
    seen: Seen, *, contents: Contents | None = None, **settings: bool
) -> list[ReadableLogRecord]:
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    tracer = QuickTracer(TracerProvider(shutdown_on_exit=False), SimpleSpanProcessor(InMemorySpanExporter()))
    events = Events(provider.get_logger("test"), **settings)
    spans = Spans(tracer, Propagation({}))
    observer = Observer([events, spans], contents, spans.began)
    observer.began(seen)
    observer.ended(seen)
    observer.tell()
    return list(exporter.get_finished_logs())


def turn(error: str = "") -> TurnSeen:
    request = ModelRequest(model="m", sampling=Sampling(temperature=0.5))
    seen = turn_of(request, ("127.0.0.1", 8000))
    seen.pieces, seen.error = [], error
    seen.note([Text("Hello.")])
    if not error:
        seen.note([TurnEnded("stop", Usage(input_tokens=7, output_tokens=2))])
    return seen


def facts(record: ReadableLogRecord) -> dict[str, Any]:
    return dict(record.log_record.attributes or {})


async def test_a_turn_has_an_event_where_it_is_asked_for() -> None:
    assert await emitted(turn()) == []
    seen = turn()
    (record,) = await emitted(seen, with_details=True)
    assert record.log_record.event_name == "gen_ai.client.inference.operation.details"
    assert record.log_record.severity_number == SeverityNumber.INFO
    assert record.log_record.span_id == seen.span_id
    told = facts(record)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
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
async def test_what_was_said_is_in_the_event_only_where_it_is_recorded_there(with_content: bool) -> None:
    contents = Contents(in_spans=not with_content, in_events=with_content)
    (record,) = await emitted(turn(), contents=contents, with_details=True, with_content=with_content)
    told = facts(record)
    assert (OUTPUT in told, INPUT in told) == (with_content, with_content)
    if with_content:
        # Structured, as events can have it.
        (message,) = told[OUTPUT]
        assert dict(message["parts"][0]) == {"type": "text", "content": "Hello."}
    else:
        assert "Hello." not in str(told)


async def test_a_turn_that_failed_is_an_exception_without_its_words() -> None:
    (record,) = await emitted(turn("server_error"))
    assert record.log_record.event_name == "gen_ai.client.operation.exception"
    assert record.log_record.severity_number == SeverityNumber.WARN
    assert facts(record) == {"exception.type": "server_error"}
    assert await emitted(turn("cancelled")) == []
    details, _ = await emitted(turn("server_error"), with_details=True)
    assert facts(details)["error.type"] == "server_error"


async def test_a_tool_that_failed_and_a_sandbox_that_was_lost_are_told() -> None:
    call = CallSeen(name="code_interpreter", call_id="call_1", error="failed")
    (record,) = await emitted(call)
    assert (record.log_record.event_name, facts(record)) == (
        "fumehood.tool.failed",
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "code_interpreter",
            "gen_ai.tool.call.id": "call_1",
            "error.type": "failed",
        },
    )
    assert await emitted(CallSeen(name="code_interpreter", call_id="call_1")) == []
    for status, name in (("out_of_memory", "fumehood.sandbox.lost"), ("ok", None), ("error", None)):
        phase = Phase("run", None)
        phase.note("status", status)
        found = await emitted(PhaseSeen(phase=phase, call=call, took=1))
        assert [each.log_record.event_name for each in found] == ([name] if name else [])
