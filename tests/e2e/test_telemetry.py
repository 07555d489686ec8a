"""The signals of a gateway with real sandboxes, as a receiver of OTLP gets them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fumehood.message_parts.validation import validate
from fumehood.telemetry.semantic_conventions import SCHEMA_URL
from tests.e2e.conftest import INTERPRETER, make_client, make_settings
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer
from tests.support.otlp_receiver import FAST_EXPORT_ENVIRONMENT, OtlpReceiver, decode_attributes
from tests.support.sandbox_runs import has_cgroups

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
STARTS, EXECUTIONS = "fumehood.sandbox.starts", "fumehood.sandbox.executions"


def test_a_streamed_turn_with_code_is_one_trace_is_counted_and_told(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings(model)
        settings["telemetry"] = {"otlp": receiver.address, "log_format": "json", "provider_name": "acme"}
        with (
            gateway_process.run_gateway(
                tmp_path, settings, FAST_EXPORT_ENVIRONMENT | {CAPTURE: "span_and_event"}
            ) as running,
            make_client(running) as client,
        ):
            works = code_call("print(6 * 7)"), text_answer("It is 42.")
            model.script(*works, code_call("import os; os._exit(3)"), text_answer("It broke."))
            previous = None
            for _ in range(2):
                for event in client.responses.create(
                    model="scripted",
                    input="?",
                    tools=[INTERPRETER],
                    stream=True,
                    previous_response_id=previous,
                ):
                    if event.type == "response.completed":
                        previous = event.response.id
            assert running.stop() == 0
    first, second = sorted(
        (span for _, span in receiver.spans if not span.parent_span_id),
        key=lambda span: span.start_time_unix_nano,
    )
    _is_one_trace([span for _, span in receiver.spans if span.trace_id == first.trace_id])
    _is_one_conversation(receiver, first.trace_id, second.trace_id)
    _joins_call_and_result(
        [span for _, span in receiver.spans if span.trace_id == first.trace_id],
        json.loads(model.requests[1].body)["messages"],
    )
    _has_the_metrics_page(receiver)
    _is_counted(receiver)
    _is_told(receiver, first.trace_id)
    _is_complained_of(receiver, second.trace_id)


def _is_one_trace(spans: Sequence[Span]) -> None:
    (request,) = [span for span in spans if not span.parent_span_id]
    (root,) = [span for span in spans if span.name == "invoke_agent"]
    (call,) = [span for span in spans if span.name == "execute_tool code_interpreter"]
    below = {
        parent.name: sorted(span.name for span in spans if span.parent_span_id == parent.span_id)
        for parent in spans
    }
    assert {name: found for name, found in below.items() if found} == {
        "POST /v1/responses": ["invoke_agent"],
        "invoke_agent": ["chat scripted", "chat scripted", "execute_tool code_interpreter"],
        "execute_tool code_interpreter": [
            *("sandbox acquire", "sandbox files", "sandbox files", "sandbox run")
        ],
    }
    phases = [span for span in spans if span.parent_span_id == call.span_id]
    for inner, outer in [(call, root), *((phase, call) for phase in phases)]:
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano
        assert inner.start_time_unix_nano < inner.end_time_unix_nano <= outer.end_time_unix_nano
    facts = {span.name: decode_attributes(span.attributes) for span in phases}
    assert facts["sandbox acquire"]["fumehood.sandbox.start"] in ("warm", "cold")
    container = decode_attributes(call.attributes)["fumehood.container.id"]
    assert facts["sandbox run"] == {
        "fumehood.sandbox.status": "ok",
        "process.exit.code": 0,
        "fumehood.container.id": container,
    }
    assert container.startswith("cntr_")
    assert request.kind == Span.SPAN_KIND_SERVER
    asked = decode_attributes(request.attributes)
    assert asked.pop("server.port") > 0
    assert asked == {
        "http.request.method": "POST",
        "http.route": "/v1/responses",
        "http.response.status_code": 200,
        "url.path": "/v1/responses",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
    }
    messages = json.loads(decode_attributes(root.attributes)["gen_ai.output.messages"])
    assert validate(messages) == []
    parts = messages[0]["parts"]
    assert decode_attributes(call.attributes)["fumehood.item.id"] == parts[0]["id"] == parts[1]["id"]
    assert parts[0]["server_tool_call"]["code"] == "print(6 * 7)"
    assert parts[1]["server_tool_call_response"]["outputs"] == [{"type": "logs", "logs": "42\n"}]


def _is_counted(receiver: OtlpReceiver) -> None:
    (turns,) = receiver.points("gen_ai.client.operation.duration")
    assert turns[0].pop("server.port") > 0
    assert turns[0] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "acme",
        "gen_ai.request.model": "scripted",
        "server.address": "127.0.0.1",
    }
    counts = {
        name: sum(point.count for _, point in receiver.points(name))
        for name, metric in receiver.metrics.items()
        if metric.WhichOneof("data") == "histogram"
    }
    # What was sent in pieces may have come in one.
    counts.pop("gen_ai.client.operation.time_per_output_chunk", None)
    assert counts == {
        "gen_ai.client.token.usage": 8,
        "gen_ai.client.operation.duration": 4,
        "gen_ai.client.operation.time_to_first_chunk": 4,
        "gen_ai.server.request.duration": 2,
        "gen_ai.server.time_to_first_token": 2,
        "gen_ai.server.time_per_output_token": 2,
        "gen_ai.invoke_agent.duration": 2,
        "gen_ai.invoke_agent.inference_calls": 2,
        "gen_ai.invoke_agent.tool_calls": 2,
        "gen_ai.execute_tool.duration": 2,
        "fumehood.sandbox.phase.duration": 6,
        "http.server.request.duration": 2,
    }
    assert {scope for _, scope in receiver.schema_urls} == {SCHEMA_URL}
    assert {path for path, _ in receiver.schema_urls} == {"/v1/traces", "/v1/metrics", "/v1/logs"}
    ((_, active),) = receiver.points("fumehood.responses.active")
    assert active.as_int == 0
    starts = {each["fumehood.sandbox.start"]: point.as_int for each, point in receiver.points(STARTS)}
    assert starts.pop("reused") == 1  # by the second response, which continues the first
    assert (starts.keys() <= {"warm", "cold"}, sum(starts.values())) == (True, 1)
    ended = {each["fumehood.sandbox.status"]: point.as_int for each, point in receiver.points(EXECUTIONS)}
    assert ended == {"ok": 1, "lost": 1}


def _is_told(receiver: OtlpReceiver, trace_id: bytes) -> None:
    spans = [span for _, span in receiver.spans if span.trace_id == trace_id]
    turns = {span.span_id: span for span in spans if span.name == "chat scripted"}
    found = [event for event in receiver.events if event.trace_id == trace_id]
    assert {event.span_id for event in found} == set(turns)
    events = sorted(found, key=lambda event: event.time_unix_nano)
    assert {event.event_name for event in events} == {"gen_ai.client.inference.operation.details"}
    for event in events:
        told = decode_attributes(event.attributes)
        assert told["gen_ai.request.model"] == "scripted"
        assert validate(told["gen_ai.input.messages"]) == validate(told["gen_ai.output.messages"]) == []
        (definition,) = told["gen_ai.tool.definitions"]
        assert definition["name"] == "code_interpreter"
        written = decode_attributes(turns[event.span_id].attributes)["gen_ai.output.messages"]
        assert json.loads(written) == told["gen_ai.output.messages"]
    first, last = (decode_attributes(event.attributes) for event in events)
    assert first["gen_ai.output.messages"][0]["parts"][0]["tool_call"] == {
        "type": "code_interpreter",
        "code": "print(6 * 7)",
    }
    seen = [part for message in last["gen_ai.input.messages"] for part in message["parts"]]
    assert [part["type"] for part in seen] == ["text", "tool_call", "tool_call_response"]
    assert seen[2]["response"]["outputs"] == [{"type": "logs", "logs": "42"}]


def _joins_call_and_result(spans: Sequence[Span], sent_messages: Any) -> None:
    """By the id that the model knows, in what one turn wrote, in what ran, and in what the next turn was sent."""
    first, last = (decode_attributes(span.attributes) for span in spans if span.name == "chat scripted")
    (call,) = [span for span in spans if span.name == "execute_tool code_interpreter"]
    written = json.loads(first["gen_ai.output.messages"])[0]["parts"][0]
    sent = [part for message in json.loads(last["gen_ai.input.messages"]) for part in message["parts"]]
    known = decode_attributes(call.attributes)
    assert [written["id"], sent[1]["id"], sent[2]["id"]] == [known["gen_ai.tool.call.id"]] * 3
    assert sent[1]["tool_call"] == written["tool_call"]
    assert sent[2]["response"]["outputs"][0]["logs"] == known["gen_ai.tool.call.result"]
    (asked,), answered = sent_messages[-2]["tool_calls"], sent_messages[-1]
    assert asked["id"] == answered["tool_call_id"] == sent[1]["id"]
    assert json.loads(asked["function"]["arguments"])["code"] == sent[1]["tool_call"]["code"]
    assert answered["content"] == sent[2]["response"]["outputs"][0]["logs"]


def _is_one_conversation(receiver: OtlpReceiver, first: bytes, second: bytes) -> None:
    spans = {
        trace_id: [span for _, span in receiver.spans if span.trace_id == trace_id]
        for trace_id in (first, second)
    }
    runs = {
        trace_id: next(span for span in found if span.name == "invoke_agent")
        for trace_id, found in spans.items()
    }
    known = {trace_id: decode_attributes(run.attributes) for trace_id, run in runs.items()}
    assert {run["gen_ai.provider.name"] for run in known.values()} == {"acme"}
    assert known[second]["fumehood.previous_response.id"] == known[first]["gen_ai.response.id"]
    assert [link.span_id for link in runs[second].links] == [runs[first].span_id]
    assert not runs[first].links
    named = {
        decode_attributes(span.attributes).get("gen_ai.conversation.id")
        for found in spans.values()
        for span in found
        if span.name.startswith(("invoke_agent", "chat", "execute_tool"))
    }
    assert named == {known[first]["gen_ai.response.id"]}
    turns = [decode_attributes(span.attributes) for span in spans[first] if span.name == "chat scripted"]
    assert {(turn["gen_ai.response.id"], turn["gen_ai.response.model"]) for turn in turns} == {
        ("chatcmpl-1", "scripted-2026")
    }


def _has_the_metrics_page(receiver: OtlpReceiver) -> None:
    """What /metrics has of sandboxes, their pool and the limits."""
    for name in ("capacity", "pool_size", "pool_available", "instances", "pending_creations"):
        ((labels, point),) = receiver.points(f"fumehood.sandbox.{name}")
        assert labels == {}
        assert point.as_int >= 0
    (_, capacity), (_, instances) = (
        receiver.points(f"fumehood.sandbox.{name}")[0] for name in ("capacity", "instances")
    )
    assert capacity.as_int >= instances.as_int > 0
    assert receiver.metrics["fumehood.disk_free"].unit == "By"
    rejected = {
        labels["limit"]: point.as_int for labels, point in receiver.points("fumehood.limit_rejections")
    }
    assert rejected.keys() >= {"rate", "server_concurrency"}
    calls = {
        (labels["type"], labels["status"]): point.as_int
        for labels, point in receiver.points("fumehood.tool_calls")
    }
    assert calls == {("code_interpreter", "completed"): 1, ("code_interpreter", "failed"): 1}


def _is_complained_of(receiver: OtlpReceiver, trace_id: bytes) -> None:
    """Of code that took its sandbox with it."""
    (call,) = [
        span
        for _, span in receiver.spans
        if span.trace_id == trace_id and span.name == "execute_tool code_interpreter"
    ]
    assert decode_attributes(call.attributes)["error.type"] == "lost"
    assert call.status.code == Status.STATUS_CODE_ERROR
    (ran,) = [
        span
        for _, span in receiver.spans
        if span.parent_span_id == call.span_id and span.name == "sandbox run"
    ]
    assert ran.status.code == Status.STATUS_CODE_ERROR
    assert decode_attributes(ran.attributes)["error.type"] == "lost"
    errors = {labels.get("error.type") for labels, _ in receiver.points("gen_ai.execute_tool.duration")}
    assert errors == {None, "lost"}
    events = {
        event.event_name: decode_attributes(event.attributes)["error.type"]
        for event in receiver.events
        if event.span_id == call.span_id
    }
    assert events == {"fumehood.sandbox.lost": "lost", "fumehood.tool.failed": "lost"}


# --- failures of real sandboxes ---------------------------------------------------------------------------

GREEDY = "import mmap\nm = mmap.mmap(-1, 2 << 30)\nb = b'x' * (64 << 20)\nwhile True: m.write(b)"
FAILURES = {
    "timeout": code_call("while True: pass"),
    "lost": code_call("import os; os._exit(3)"),
    "install_failed": code_call("print(1)", requirements=["./not-a-package"]),
    **({"out_of_memory": code_call(GREEDY)} if has_cgroups() else {}),
}


@pytest.mark.slow
def test_failures_of_real_sandboxes_are_told_apart(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings(model, execution_timeout=5) | {
            "telemetry": {"otlp": receiver.address, "log_format": "json"}
        }
        with (
            gateway_process.run_gateway(tmp_path, settings, FAST_EXPORT_ENVIRONMENT) as running,
            make_client(running) as client,
        ):
            for failing in FAILURES.values():
                model.script(failing, text_answer("It broke."))
                client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
            assert running.stop() == 0
    for name in ("execute_tool code_interpreter", "sandbox run"):
        spans = [span for _, span in receiver.spans if span.name == name]
        assert {decode_attributes(span.attributes)["error.type"] for span in spans} == set(FAILURES)
        assert {span.status.code for span in spans} == {Status.STATUS_CODE_ERROR}
    counted = {labels["error.type"] for labels, _ in receiver.points("gen_ai.execute_tool.duration")}
    assert counted == set(FAILURES)
