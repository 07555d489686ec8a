"""The client before a gateway, both telling one receiver of OTLP: one trace; imports the SDKs and the support."""

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from openai import OpenAI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from fumehood.client.adapters.openai import OpenAIAdapter
from fumehood.telemetry.client import ClientTelemetry
from tests.e2e.conftest import client_of, settings_for, settings_without_code
from tests.e2e.test_telemetry import receiver
from tests.support import served
from tests.support.client_prompts import HOSTED, prompt, query_tool
from tests.support.served import Model, answer, call, calls, runs

UNPACKED = {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}


def evaluated(address: str, client: OpenAI, **settings: Any) -> None:
    """One prompt, in a span of the user's own, all of it told to the receiver."""
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{address}/v1/traces")))
    telemetry = ClientTelemetry(tracer_provider=tracers)
    adapter = OpenAIAdapter(model="scripted", client=client, observer=telemetry, **settings)
    with tracers.get_tracer("mine").start_as_current_span("mine"):
        adapter.evaluate(prompt(query_tool))
    tracers.shutdown()


def tree(spans: list[Span]) -> list[str]:
    """Each span below its parent, in the order in which they began."""
    assert len({span.trace_id for span in spans}) == 1
    known = {span.span_id for span in spans}

    def below(parent: bytes, depth: int) -> list[str]:
        lines: list[str] = []
        for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
            if (span.parent_span_id if span.parent_span_id in known else b"") == parent:
                lines += ["  " * depth + span.name, *below(span.span_id, depth + 1)]
        return lines

    return below(b"", 0)


def test_client_and_gateway_are_one_trace(tmp_path: Path) -> None:
    with receiver() as (address, spans), Model() as model:
        settings = settings_without_code(model) | {"telemetry": {"otlp": address}}
        model.script(calls(call("run_query", {"sql": "x"}, call_id="c1")), answer("Done."))
        with served.serving(tmp_path, settings, UNPACKED) as running, client_of(running) as client:
            evaluated(address, client)
            assert running.stop() == 0
    assert tree(spans) == snapshot(
        [
            "mine",
            "  invoke_agent task",
            "    chat scripted",
            "      invoke_agent",
            "        chat scripted",
            "    execute_tool run_query",
            "    chat scripted",
            "      invoke_agent",
            "        chat scripted",
        ]
    )


@pytest.mark.slow
def test_client_gateway_and_sandbox_are_one_trace(tmp_path: Path) -> None:
    with receiver() as (address, spans), Model() as model:
        settings = settings_for(model) | {"telemetry": {"otlp": address}}
        model.script(runs("print(6 * 7)"), answer("It is 42."))
        with served.serving(tmp_path, settings, UNPACKED) as running, client_of(running) as client:
            evaluated(address, client, hosted_tools=HOSTED)
            assert running.stop() == 0
    phases = [span for span in spans if span.name.startswith("sandbox ")]
    assert tree([span for span in spans if span not in phases]) == snapshot(
        [
            "mine",
            "  invoke_agent task",
            "    chat scripted",
            "      invoke_agent",
            "        chat scripted",
            "        execute_tool code_interpreter",
            "        chat scripted",
        ]
    )
    (ran,) = [span for span in spans if span.name == "execute_tool code_interpreter"]
    assert phases
    assert {span.parent_span_id for span in phases} == {ran.span_id}
