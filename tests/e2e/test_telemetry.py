"""Spans of a gateway with real sandboxes, as a receiver of OTLP gets them; imports the protocol and the support."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fumehood.parts.validate import validate
from tests.e2e.conftest import client_of, settings_for
from tests.support import served
from tests.support.served import Model, answer, runs


@contextmanager
def receiver() -> Generator[tuple[str, list[Span]]]:
    """Its address, and the spans that came."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_streamed_turn_with_code_is_one_trace(tmp_path: Path) -> None:
    with receiver() as (address, spans), Model() as model:
        settings = settings_for(model) | {"telemetry": {"otlp": address}}
        capture = {
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        model.script(runs("print(6 * 7)"), answer("It is 42."))
        with served.serving(tmp_path, settings, capture) as running, client_of(running) as client:
            tool: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
            for _ in client.responses.create(model="scripted", input="?", tools=[tool], stream=True):
                pass
            assert running.stop() == 0
    assert sorted(span.name for span in spans) == [
        *("chat scripted", "chat scripted", "execute_tool code_interpreter", "invoke_agent")
    ]
    (root,) = [span for span in spans if not span.parent_span_id]
    assert {span.parent_span_id for span in spans} == {b"", root.span_id}
    assert len({span.trace_id for span in spans}) == 1
    (call,) = [span for span in spans if span.name.startswith("execute_tool")]
    assert (
        root.start_time_unix_nano
        < call.start_time_unix_nano
        < call.end_time_unix_nano
        < root.end_time_unix_nano
    )
    (written,) = [each.value.string_value for each in root.attributes if each.key == "gen_ai.output.messages"]
    messages = json.loads(written)
    assert validate(messages) == []
    parts = messages[0]["parts"]
    assert parts[0]["server_tool_call"]["code"] == "print(6 * 7)"
    assert parts[1]["server_tool_call_response"]["outputs"] == [{"type": "logs", "logs": "42\n"}]
