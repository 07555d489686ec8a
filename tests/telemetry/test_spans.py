"""Spans of runs, turns and calls, over an engine of doubles; imports the SDK, `telemetry` and the support."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from fumehood.engine.runs import EngineRuns
from fumehood.interfaces import Caller, HostedTool, Run
from fumehood.parts.validate import validate
from fumehood.protocol.errors import ApiError, ModelUnreachable
from fumehood.protocol.responses import CreateResponse
from fumehood.telemetry.contents import Contents
from fumehood.telemetry.observing import ObservedModels, ObservedRuns, ObservedTool
from fumehood.telemetry.quick_spans import QuickSpan, QuickTracer, readable
from fumehood.telemetry.seen import CallSeen, Observer, RunSeen, Seen, TurnSeen
from fumehood.telemetry.spans import Spans
from fumehood.telemetry.trace_context import Propagation
from fumehood.testing import FakeClock, MemoryStore, PlainSealer, ScriptedModel, ScriptedModels, calls, says
from tests.support.engines import ECHO, tokens, until
from tests.support.tools import Echo

PATIENCE = 30.0


@dataclass
class Traced:
    model: ScriptedModel
    tools: Sequence[HostedTool] = ()
    contents: Contents | None = None
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        tracer = QuickTracer(TracerProvider(shutdown_on_exit=False), SimpleSpanProcessor(self.exporter))
        spans = Spans(tracer, Propagation({}), with_content=self.contents is not None)
        self.observer = observer = Observer([spans], self.contents, spans.began)
        clock = FakeClock()
        runs = EngineRuns(
            ObservedModels(ScriptedModels(self.model), observer),
            [ObservedTool(tool, observer) for tool in self.tools],
            MemoryStore(clock),
            clock,
            sealer=PlainSealer(),
        )
        self.runs = ObservedRuns(runs, observer)

    async def start(self, **body: Any) -> Run:
        written = msgspec.json.encode({"model": "scripted", "input": "Hi", "stream": True} | body)
        return await self.runs.start(msgspec.json.decode(written, type=CreateResponse), Caller())

    def finished(self) -> list[ReadableSpan]:
        self.observer.tell()
        as_the_sdk_has_them = partial(readable, Resource({}), InstrumentationScope("test"))
        return [*map(as_the_sdk_has_them, cast("Sequence[QuickSpan]", self.exporter.get_finished_spans()))]

    async def spans(self, **body: Any) -> dict[str, list[ReadableSpan]]:
        """Of one run that has ended, by their names."""
        run = await self.start(**body)
        async for _ in run.subscribe():
            pass
        await self.runs.drain(0)
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.finished():
            found.setdefault(span.name, []).append(span)
        return found


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_run_is_a_trace_of_its_turns_and_calls() -> None:
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"), usage=tokens(3))
    spans = await Traced(model, [Echo()]).spans(tools=[ECHO])
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
    assert told(run)["gen_ai.usage.output_tokens"] == 6
    assert [told(turn)["gen_ai.response.finish_reasons"] for turn in turns] == [("tool_call",), ("stop",)]
    assert [told(turn)["gen_ai.usage.input_tokens"] for turn in turns] == [10, 10]
    assert (told(call)["gen_ai.tool.name"], told(call)["gen_ai.tool.call.id"]) == ("echo", "call_1")
    assert not any(span.status.is_ok is False for found in spans.values() for span in found)
    assert "Hi" not in str([told(span) for found in spans.values() for span in found])
    assert "gen_ai.output.messages" not in told(run)


async def test_a_turn_tells_of_streams_and_formats_only_where_they_were_asked_for() -> None:
    asked = {"text": {"format": {"type": "json_object"}}}
    (streamed,) = (await Traced(ScriptedModel(says("{}"))).spans(**asked))["chat scripted"]
    (plain,) = (await Traced(ScriptedModel(says("Hi"))).spans(stream=False))["chat scripted"]
    names = ("gen_ai.request.stream", "gen_ai.output.type")
    assert [told(streamed).get(name) for name in names] == [True, "json"]
    assert [told(plain).get(name) for name in names] == [None, None]


async def test_runs_side_by_side_are_traces_of_their_own() -> None:
    gate = asyncio.Event()
    traced = Traced(ScriptedModel([gate, *says("a")], [gate, *says("b")]))
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


async def test_what_waits_to_be_sent_holds_nothing_large() -> None:
    traced = Traced(ScriptedModel([*calls("echo", {"text": "x"})], says("Done")), [Echo()], Contents())
    await traced.spans(tools=[ECHO])
    waiting = cast("Sequence[object]", traced.exporter.get_finished_spans())
    assert len(waiting) == 4
    for seen in waiting:
        assert isinstance(seen, Seen)
        assert seen.besides
        assert not seen.content  # which is in there as text
        match seen:
            case RunSeen():
                assert (seen.request, seen.response) == (None, None)
            case TurnSeen():
                assert (seen.request, seen.pieces, seen.moments) == (None, None, None)
            case _:
                assert isinstance(seen, CallSeen)
                assert (seen.arguments, seen.output) == ("", "")


@pytest.mark.parametrize("stream", [True, False])
async def test_content_is_recorded_where_it_is_asked_for(stream: bool) -> None:
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"))
    spans = await Traced(model, [Echo()], Contents()).spans(tools=[ECHO], stream=stream)
    messages = json.loads(told(spans["invoke_agent"][0])["gen_ai.output.messages"])
    assert validate(messages) == []
    assert [(message["role"], message["finish_reason"]) for message in messages] == [("assistant", "stop")]
    assert [part["type"] for part in messages[0]["parts"]] == [
        *("server_tool_call", "server_tool_call_response", "text")
    ]


async def test_content_is_redacted_and_bounded() -> None:
    contents = Contents(longest=4000, redact=lambda text: text.replace("secret", "…"))
    traced = Traced(ScriptedModel(says("secret" * 2000)), contents=contents)
    text = told((await traced.spans())["invoke_agent"][0])["gen_ai.output.messages"]
    assert "secret" not in text
    assert len(text) < 2200
    assert validate(json.loads(text)) == []


async def test_where_redaction_fails_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    def redact(text: str) -> str:
        raise ValueError(text)

    spans = await Traced(ScriptedModel(says("a secret")), contents=Contents(redact=redact)).spans()
    for name in ("invoke_agent", "chat scripted"):
        assert not {key for key in told(spans[name][0]) if key.endswith("messages")}
        assert told(spans[name][0])["gen_ai.operation.name"]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


async def test_what_goes_wrong_is_told_without_its_words() -> None:
    spans = await Traced(ScriptedModel([*says("a"), ModelUnreachable("with a secret")])).spans()
    (run,), (turn,) = spans["invoke_agent"], spans["chat scripted"]
    assert told(turn)["error.type"] == "server_error"
    assert told(run)["error.type"] == "server_error"
    assert "secret" not in str([span.to_json() for span in (run, turn)])


async def test_a_request_that_is_refused_is_a_span_too() -> None:
    traced = Traced(ScriptedModel())
    with pytest.raises(ApiError):
        await traced.start(previous_response_id="resp_nobody_knows")
    (span,) = traced.finished()
    assert span.name == "invoke_agent"
    assert told(span)["error.type"]


async def test_a_run_that_is_cancelled_says_so() -> None:
    never = asyncio.Event()
    echo = Echo(gate=lambda _: never)
    traced = Traced(ScriptedModel([*calls("echo", {"text": "x"})]), [echo])
    run = await traced.start(tools=[ECHO])
    await asyncio.wait_for(until(lambda: len(echo.log) > 1), PATIENCE)
    run.cancel("a test")
    await run.wait()
    await traced.runs.drain(0)
    errors = {span.name: told(span).get("error.type") for span in traced.finished()}
    assert errors == {"chat scripted": None, "execute_tool echo": "cancelled", "invoke_agent": "cancelled"}
