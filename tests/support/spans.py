"""A receiver of spans over OTLP, and what tests ask of them; imports OpenTelemetry's types of the wire."""

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE = 60.0
# For whoever sends here: soon, and not compressed.
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}


class SpanReceiver:
    """`address` is what `telemetry.otlp` is to be."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, Span]] = []
        self._came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        with self._came:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (service,) = [
                    each.value.string_value
                    for each in resource.resource.attributes
                    if each.key == "service.name"
                ]
                self._spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._came.notify_all()

    def trace(self, trace_id: bytes, number: int) -> Sequence[tuple[str, Span]]:
        """The spans of one trace with the services that sent them, in the order of their beginnings; waits until there
        are so many.
        """

        def found() -> list[tuple[str, Span]]:
            return [(service, span) for service, span in self._spans if span.trace_id == trace_id]

        with self._came:
            assert self._came.wait_for(lambda: len(found()) >= number, PATIENCE), [
                span.name for _, span in found()
            ]
            return sorted(found(), key=lambda each: each[1].start_time_unix_nano)
