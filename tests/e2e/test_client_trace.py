"""The client before a gateway, both telling one receiver of OTLP: one trace."""

from collections.abc import Sequence
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
from tests.e2e.conftest import make_client, make_settings, make_settings_without_code
from tests.support import gateway_process
from tests.support.client_prompts import HOSTED, prompt, query_tool
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer, tool_call, tool_calls
from tests.support.otlp_receiver import FAST_EXPORT_ENVIRONMENT, OtlpReceiver


def evaluated(receiver: OtlpReceiver, client: OpenAI, **settings: Any) -> bytes:
    """One prompt, in a span of the user's own, all of it told to the receiver; the id of its trace."""
    tracers = TracerProvider(resource=Resource({"service.name": "mine"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{receiver.address}/v1/traces")
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = ClientTelemetry(tracer_provider=tracers)
    adapter = OpenAIAdapter(model="scripted", client=client, observer=telemetry, **settings)
    with tracers.get_tracer("mine").start_as_current_span("mine") as span:
        adapter.evaluate(prompt(query_tool))
    tracers.shutdown()
    return span.get_span_context().trace_id.to_bytes(16)


def tree(told: Sequence[tuple[str, Span]], parent: bytes = b"", depth: int = 0) -> list[str]:
    """Each span below its parent, with whom it is of."""
    lines: list[str] = []
    for service, span in told:
        if span.parent_span_id == parent:
            lines += [f"{'  ' * depth}{service}: {span.name}", *tree(told, span.span_id, depth + 1)]
    return lines


def test_client_and_gateway_are_one_trace(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings_without_code(model) | {"telemetry": {"otlp": receiver.address}}
        model.script(tool_calls(tool_call("run_query", {"sql": "x"}, call_id="c1")), text_answer("Done."))
        with (
            gateway_process.run_gateway(tmp_path, settings, FAST_EXPORT_ENVIRONMENT) as running,
            make_client(running) as client,
        ):
            trace = evaluated(receiver, client)
            assert running.stop() == 0
        told = receiver.trace(trace, 9)
    assert tree(told) == snapshot(
        [
            "mine: mine",
            "  mine: invoke_agent task",
            "    mine: chat scripted",
            "      fumehood: invoke_agent",
            "        fumehood: chat scripted",
            "    mine: execute_tool run_query",
            "    mine: chat scripted",
            "      fumehood: invoke_agent",
            "        fumehood: chat scripted",
        ]
    )


@pytest.mark.slow
def test_client_gateway_and_sandbox_are_one_trace(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, ScriptedModelServer() as model:
        settings = make_settings(model) | {"telemetry": {"otlp": receiver.address}}
        model.script(code_call("print(6 * 7)"), text_answer("It is 42."))
        with (
            gateway_process.run_gateway(tmp_path, settings, FAST_EXPORT_ENVIRONMENT) as running,
            make_client(running) as client,
        ):
            trace = evaluated(receiver, client, hosted_tools=HOSTED)
            assert running.stop() == 0
        told = receiver.trace(trace, 8)
    phases = {span.span_id: span.parent_span_id for _, span in told if span.name.startswith("sandbox ")}
    (ran,) = [span.span_id for _, span in told if span.name == "execute_tool code_interpreter"]
    assert set(phases.values()) == {ran}
    assert tree([each for each in told if each[1].span_id not in phases]) == snapshot(
        [
            "mine: mine",
            "  mine: invoke_agent task",
            "    mine: chat scripted",
            "      fumehood: invoke_agent",
            "        fumehood: chat scripted",
            "        fumehood: execute_tool code_interpreter",
            "        fumehood: chat scripted",
        ]
    )
