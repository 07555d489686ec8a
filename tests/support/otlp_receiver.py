"""A receiver of spans, metrics and events over OTLP, and what tests ask of it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TIMEOUT_SECONDS = 60.0
# For whoever sends here: soon, and not compressed.
FAST_EXPORT_ENVIRONMENT = {
    "OTEL_BSP_SCHEDULE_DELAY": "20",
    "OTEL_BLRP_SCHEDULE_DELAY": "20",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
}


class OtlpReceiver:
    """`address` is what `telemetry.otlp` is to be.

    received_requests: the path and the headers of every request. resources: what was said of the senders.
    schema_urls: of every scope, with the path it came by.
    """

    def __init__(self) -> None:
        self.received_requests: list[tuple[str, Mapping[str, str]]] = []
        self.resources: list[dict[str, Any]] = []
        self.spans: list[tuple[str, Span]] = []
        self.metrics: dict[str, Metric] = {}
        self.events: list[LogRecord] = []
        self.schema_urls: set[tuple[str, str]] = set()
        self._received = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver._receive(
                    self.path, {key.lower(): value for key, value in self.headers.items()}, body
                )
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02])
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _receive(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        with self._received:
            self.received_requests.append((path, headers))
            if path.endswith("/v1/traces"):
                self._receive_spans(ExportTraceServiceRequest.FromString(body))
            elif path.endswith("/v1/metrics"):
                self._receive_metrics(ExportMetricsServiceRequest.FromString(body))
            elif path.endswith("/v1/logs"):
                self._receive_events(ExportLogsServiceRequest.FromString(body))
            self._received.notify_all()

    def _receive_spans(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = self._record_resource(resource.resource)
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.schema_urls |= {("/v1/traces", scope.schema_url) for scope in resource.scope_spans}

    def _receive_metrics(self, request: ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            self._record_resource(resource.resource)
            self.metrics |= {each.name: each for scope in resource.scope_metrics for each in scope.metrics}
            self.schema_urls |= {("/v1/metrics", scope.schema_url) for scope in resource.scope_metrics}

    def _receive_events(self, request: ExportLogsServiceRequest) -> None:
        for resource in request.resource_logs:
            self._record_resource(resource.resource)
            self.events += [record for scope in resource.scope_logs for record in scope.log_records]
            self.schema_urls |= {("/v1/logs", scope.schema_url) for scope in resource.scope_logs}

    def _record_resource(self, resource: Resource) -> str:
        told = decode_attributes(resource.attributes)
        self.resources.append(told)
        return told["service.name"]

    # ---- what tests ask -------------------------------------------------------------------------------------------

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self._received:
            assert self._received.wait_for(what, TIMEOUT_SECONDS), self.received_requests

    def trace(self, trace_id: bytes, number: int) -> Sequence[tuple[str, Span]]:
        """The spans of one trace with the services that sent them, in the order of their beginnings; waits until there
        are so many.
        """

        def found() -> list[tuple[str, Span]]:
            return [(service, span) for service, span in self.spans if span.trace_id == trace_id]

        self.wait_for(lambda: len(found()) >= number)
        return sorted(found(), key=lambda each: each[1].start_time_unix_nano)

    def paths(self) -> set[str]:
        return {path for path, _ in self.received_requests}

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Of the last time that this metric came, each with its attributes."""
        metric = self.metrics[name]
        kind = metric.WhichOneof("data")
        assert kind is not None, name
        return [(decode_attributes(point.attributes), point) for point in getattr(metric, kind).data_points]


def decode_attributes(written: Sequence[KeyValue]) -> dict[str, Any]:
    return {each.key: _decode_value(each.value) for each in written}


def _decode_value(written: AnyValue) -> Any:
    kind = written.WhichOneof("value")
    if kind == "array_value":
        return [_decode_value(each) for each in written.array_value.values]
    if kind == "kvlist_value":
        return decode_attributes(written.kvlist_value.values)
    return None if kind is None else getattr(written, kind)
