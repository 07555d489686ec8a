"""Traces that begin before the gateway and go on behind it."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from openai import OpenAI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from fumehood.client.adapters.openai import OpenAIAdapter
from fumehood.telemetry.client_telemetry import ClientTelemetry
from tests.e2e.conftest import INTERPRETER, OUTPUTS, make_client, make_settings, make_settings_without_code
from tests.support import gateway_process
from tests.support.client_prompts import HOSTED, prompt, query_tool
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer, tool_call, tool_calls
from tests.support.otlp_receiver import FAST_EXPORT_ENVIRONMENT, OtlpReceiver
from tests.support.raw_model_server import document


@dataclass(frozen=True)
class Line:
    """A client, a gateway, another gateway behind it, a model's server behind that; the gateways send spans."""

    client: OpenAI
    model: ScriptedModelServer
    receiver: OtlpReceiver


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    near, far = tmp_path_factory.mktemp("near"), tmp_path_factory.mktemp("far")
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        telemetry = {"telemetry": {"otlp": receiver.address, "log_format": "json"}}
        behind = make_settings_without_code(model) | telemetry
        with gateway_process.run_gateway(
            far, behind, FAST_EXPORT_ENVIRONMENT | {"OTEL_SERVICE_NAME": "far"}
        ) as last:
            models = [
                {"match": "far", "name": "scripted", "backend": "responses", "base_url": last.url},
                {"match": "strange", "base_url": model.url, "trace_context": False},
                {"match": "scripted", "base_url": model.url},
            ]
            before = behind | {"models": models}
            first = gateway_process.run_gateway(
                near, before, FAST_EXPORT_ENVIRONMENT | {"OTEL_SERVICE_NAME": "near"}
            )
            with first as running, make_client(running) as client:
                yield Line(client, model, receiver)


@dataclass(frozen=True)
class Trace:
    """One that a caller has begun."""

    id: str
    span: str

    @property
    def parent(self) -> str:
        return f"00-{self.id}-{self.span}-01"

    @property
    def bytes(self) -> bytes:
        return bytes.fromhex(self.id)


def begin_trace() -> Trace:
    return Trace(secrets.token_hex(16), secrets.token_hex(8))


def test_gateway_before_gateway_is_one_trace(line: Line) -> None:
    line.model.script(text_answer("Hi"))
    trace = begin_trace()
    headers = {"traceparent": trace.parent, "tracestate": "vendor=a,other@b=c"}
    events: Any = line.client.responses.create(model="far", input="?", stream=True, extra_headers=headers)
    assert [event.type for event in events][-1] == "response.completed"
    spans = line.receiver.trace(trace.bytes, 6)
    assert [(service, span.name) for service, span in spans] == [
        ("near", "POST /v1/responses"),
        ("near", "invoke_agent"),
        ("near", "chat far"),
        ("far", "POST /v1/responses"),
        ("far", "invoke_agent"),
        ("far", "chat scripted"),
    ]
    chain = [bytes.fromhex(trace.span), *(span.span_id for _, span in spans)]
    assert [span.parent_span_id for _, span in spans] == chain[:-1]
    assert {span.trace_state for _, span in spans} == {"vendor=a,other@b=c"}
    (asked,) = line.model.requests
    assert asked.headers["traceparent"] == f"00-{trace.id}-{chain[-1].hex()}-01"
    assert asked.headers["tracestate"] == "vendor=a,other@b=c"


def test_whoever_is_asked_again_is_told_the_same(line: Line) -> None:
    trace = begin_trace()
    line.model.script(document(b"{}", "503 Busy"), document(b"{}", "503 Busy"), text_answer("Hi"))
    line.client.responses.create(model="scripted", input="?", extra_headers={"traceparent": trace.parent})
    _, _, (_, chat) = line.receiver.trace(trace.bytes, 3)
    sent = [asked.headers["traceparent"] for asked in line.model.requests]
    assert sent == 3 * [f"00-{trace.id}-{chat.span_id.hex()}-01"]


def test_a_server_need_not_be_told(line: Line) -> None:
    trace = begin_trace()
    line.model.script(text_answer("Hi"))
    line.client.responses.create(model="strange", input="?", extra_headers={"traceparent": trace.parent})
    assert [span.name for _, span in line.receiver.trace(trace.bytes, 3)] == [
        "POST /v1/responses",
        "invoke_agent",
        "chat strange",
    ]
    assert not {"traceparent", "tracestate"} & set(line.model.requests[0].headers)


def test_a_caller_that_does_not_sample_is_not_recorded_but_the_trace_goes_on(line: Line) -> None:
    trace, after = begin_trace(), begin_trace()
    unsampled = trace.parent.removesuffix("01") + "00"
    line.model.script(text_answer("Hi"), text_answer("Hi"))
    line.client.responses.create(model="scripted", input="?", extra_headers={"traceparent": unsampled})
    line.client.responses.create(model="scripted", input="?", extra_headers={"traceparent": after.parent})
    sent = line.model.requests[0].headers["traceparent"]
    assert (sent[3:35], sent[-2:]) == (trace.id, "00")
    line.receiver.trace(after.bytes, 3)
    assert line.receiver.trace(trace.bytes, 0) == []


def test_a_connection_and_each_of_its_messages_may_have_a_trace(line: Line) -> None:
    whole, single = begin_trace(), begin_trace()
    line.model.script(*(text_answer("Hi") for _ in range(4)))
    metadata = {"ws_request_header_traceparent": single.parent, "ws_request_header_tracestate": "a=b"}
    with line.client.responses.connect(extra_headers={"traceparent": whole.parent}) as connection:
        sent: list[Any] = [{}, {"client_metadata": metadata}]
        sent += [{"client_metadata": {"ws_request_header_traceparent": wrong}} for wrong in ("00-1-2-01", 7)]
        for more in sent:
            message: Any = {"type": "response.create", "model": "scripted", "input": "?", **more}
            connection.send(message)
            for event in connection:
                if event.type == "response.completed":
                    break
    spans = line.receiver.trace(single.bytes, 2)
    assert [span.parent_span_id for _, span in spans] == [bytes.fromhex(single.span), spans[0][1].span_id]
    assert spans[0][1].trace_state == "a=b"
    assert [span.name for _, span in line.receiver.trace(whole.bytes, 6)] == [
        "invoke_agent",
        "chat scripted",
    ] * 3
    assert [asked.headers["traceparent"][3:35] for asked in line.model.requests] == [
        *(whole.id, single.id, whole.id, whole.id)
    ]


def test_what_is_no_context_is_passed_over(line: Line) -> None:
    trace, other = begin_trace(), begin_trace()
    line.model.script(*(text_answer("Hi") for _ in range(3)))
    ask: Any = line.client.responses.create
    ask(model="scripted", input="?", extra_headers={"traceparent": f"{trace.parent}, {other.parent}"})
    ask(model="scripted", input="?", extra_headers={"traceparent": trace.parent.upper()})
    ask(model="scripted", input="?", extra_headers={"tracestate": "vendor=a"})
    sent = [asked.headers for asked in line.model.requests]
    assert len({headers["traceparent"][3:35] for headers in sent} | {trace.id, other.id}) == 5
    assert not any("tracestate" in headers for headers in sent)


def test_a_turn_of_no_run_is_its_callers_too(line: Line) -> None:
    trace = begin_trace()
    line.model.script(text_answer("Short."))
    line.client.responses.compact(
        model="scripted", input="A long story", extra_headers={"traceparent": trace.parent}
    )
    (_, request), (_, chat) = line.receiver.trace(trace.bytes, 2)
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/responses/compact", trace.span)
    assert (chat.name, chat.parent_span_id) == ("chat scripted", request.span_id)


def test_code_sees_nothing_of_the_trace(tmp_path: Path) -> None:
    trace = begin_trace()
    looks = f"""
import glob, os
found = repr(dict(os.environ)).lower()
for name in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        found += open(name).read().lower()
    except PermissionError:
        pass
words = ["{trace.id[:16]}" + "{trace.id[16:]}", "trace" + "parent", "trace" + "state", "otel" + "_"]
print("path" in found, [word for word in words if word in found])
"""
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings(model) | {"telemetry": {"otlp": receiver.address, "log_format": "json"}}
        with (
            gateway_process.run_gateway(
                tmp_path, settings, FAST_EXPORT_ENVIRONMENT | {"TRACEPARENT": trace.parent}
            ) as running,
            make_client(running) as client,
        ):
            model.script(code_call(looks), text_answer("Done."))
            response: Any = client.responses.create(
                model="scripted",
                input="?",
                tools=[INTERPRETER],
                include=OUTPUTS,
                extra_headers={"traceparent": trace.parent, "tracestate": "a=b"},
            )
            assert len(receiver.trace(trace.bytes, 5)) >= 5
    assert response.output[0].outputs[0].logs == "True []\n"


# --- with the client --------------------------------------------------------------------------------------


def evaluate_prompt(receiver: OtlpReceiver, client: OpenAI, **settings: Any) -> bytes:
    """One prompt, in a span of the user's own, all of it exported to the receiver; the id of its trace."""
    tracers = TracerProvider(resource=Resource({"service.name": "mine"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{receiver.address}/v1/traces")
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = ClientTelemetry(tracer_provider=tracers)
    adapter = OpenAIAdapter(model="scripted", client=client, observer=telemetry, **settings)
    with tracers.get_tracer("mine").start_as_current_span("mine") as span:
        adapter.evaluate(prompt(query_tool))
    tracers.shutdown()
    return span.get_span_context().trace_id.to_bytes(16)


def tree(spans: Sequence[tuple[str, Span]], parent: bytes = b"", depth: int = 0) -> list[str]:
    """Each span below its parent, with whom it is of."""
    lines: list[str] = []
    for service, span in spans:
        if span.parent_span_id == parent:
            lines += [f"{'  ' * depth}{service}: {span.name}", *tree(spans, span.span_id, depth + 1)]
    return lines


def test_client_and_gateway_are_one_trace(line: Line) -> None:
    call = tool_call("run_query", {"sql": "x"}, call_id="c1")
    line.model.script(tool_calls(call), text_answer("Done."))
    trace = evaluate_prompt(line.receiver, line.client)
    assert tree(line.receiver.trace(trace, 11)) == snapshot(
        [
            "mine: mine",
            "  mine: invoke_agent task",
            "    mine: chat scripted",
            "      near: POST /v1/responses",
            "        near: invoke_agent",
            "          near: chat scripted",
            "    mine: execute_tool run_query",
            "    mine: chat scripted",
            "      near: POST /v1/responses",
            "        near: invoke_agent",
            "          near: chat scripted",
        ]
    )


@pytest.mark.slow
def test_client_gateway_and_sandbox_are_one_trace(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings(model) | {"telemetry": {"otlp": receiver.address, "log_format": "json"}}
        with (
            gateway_process.run_gateway(tmp_path, settings, FAST_EXPORT_ENVIRONMENT) as running,
            make_client(running) as client,
        ):
            model.script(code_call("print(6 * 7)"), text_answer("It is 42."))
            trace = evaluate_prompt(receiver, client, hosted_tools=HOSTED)
            assert running.stop() == 0
        spans = receiver.trace(trace, 9)
    phases = {span.span_id: span.parent_span_id for _, span in spans if span.name.startswith("sandbox ")}
    (ran,) = [span.span_id for _, span in spans if span.name == "execute_tool code_interpreter"]
    assert set(phases.values()) == {ran}
    assert tree([each for each in spans if each[1].span_id not in phases]) == snapshot(
        [
            "mine: mine",
            "  mine: invoke_agent task",
            "    mine: chat scripted",
            "      fumehood: POST /v1/responses",
            "        fumehood: invoke_agent",
            "          fumehood: chat scripted",
            "          fumehood: execute_tool code_interpreter",
            "          fumehood: chat scripted",
        ]
    )
