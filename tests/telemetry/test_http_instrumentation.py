"""Spans and metrics of HTTP requests, by the semantic conventions."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from fumehood.http_server.asgi_exchange import REQUEST_OUTCOME, Application, RequestOutcome
from fumehood.telemetry.http_instrumentation import HttpServerMiddleware
from fumehood.telemetry.operation_records import RecordDispatcher
from fumehood.telemetry.otel_metrics import ModelNameLimiter, OtelMetrics
from fumehood.telemetry.span_emitter import SpanEmitter
from fumehood.telemetry.trace_context import TraceContextPropagator, get_caller_context
from tests.telemetry.test_otel_metrics import read_values

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class TracedApp:
    """An application that answers as it is told, with the spans of its requests."""

    def __init__(self, route: str = "", status: int = 200, error: BaseException | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        propagator = TraceContextPropagator({})
        emitter = SpanEmitter(provider.get_tracer("test"), propagator)
        self.metrics = OtelMetrics(ModelNameLimiter())
        self._dispatcher = RecordDispatcher([self.metrics, emitter], on_start=emitter.on_start)
        self.seen_span_ids: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.seen_span_ids.append(get_current_span(get_caller_context()).get_span_context().span_id)
            scope[REQUEST_OUTCOME] = RequestOutcome(route, status)
            if error is not None:
                raise error

        self._app: Application = HttpServerMiddleware(app, self._dispatcher, propagator)

    async def request(self, method: str = "GET", path: str = "/", **headers: str) -> ReadableSpan | None:
        scope: Any = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"api_key=secret",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        try:
            await self._app(scope, _unused, _unused)
        finally:
            self._dispatcher.flush()
        found = self.exporter.get_finished_spans()
        return found[-1] if found else None


async def _unused(*_: Any) -> Any:
    raise AssertionError("nobody sends or receives here")


async def test_a_request_is_a_server_span_below_the_callers() -> None:
    traced = TracedApp("/v1/responses/{response_id}", 200)
    span = await traced.request(
        "GET", "/v1/responses/resp_1", host="gw.example:8080", traceparent=f"00-{TRACE}-{SPAN}-01"
    )
    assert span is not None
    assert span.context is not None
    assert span.parent is not None
    assert (span.name, span.kind) == ("GET /v1/responses/{response_id}", SpanKind.SERVER)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert traced.seen_span_ids == [span.context.span_id]
    assert dict(span.attributes or {}) == {
        "http.request.method": "GET",
        "http.route": "/v1/responses/{response_id}",
        "http.response.status_code": 200,
        "url.path": "/v1/responses/resp_1",
        "url.scheme": "http",
        "server.address": "gw.example",
        "server.port": 8080,
    }
    assert span.status.status_code is StatusCode.UNSET
    ((labels, count, _),) = read_values(traced.metrics, "http.server.request.duration")
    assert (labels, count) == (
        {
            "http.request.method": "GET",
            "url.scheme": "http",
            "http.route": "/v1/responses/{response_id}",
            "http.response.status_code": 200,
        },
        1,
    )


@pytest.mark.parametrize(
    ("status", "error"), [(404, None), (429, None), (500, "500"), (503, "503"), (0, "client_disconnected")]
)
async def test_only_the_servers_own_errors_are_errors(status: int, error: str | None) -> None:
    traced = TracedApp("/v1/files", status)
    span = await traced.request("POST", "/v1/files")
    assert span is not None
    assert (span.attributes or {}).get("error.type") == error
    assert (span.status.status_code is StatusCode.ERROR) is (error is not None)
    ((labels, _, _),) = read_values(traced.metrics, "http.server.request.duration")
    assert labels.get("error.type") == error


@pytest.mark.parametrize("raised", [RuntimeError("with a secret"), asyncio.CancelledError()])
async def test_an_exception_is_the_error_and_is_passed_on(raised: BaseException) -> None:
    traced = TracedApp("/v1/files", 200, raised)
    with pytest.raises(type(raised)):
        await traced.request()
    (span,) = traced.exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == type(raised).__name__
    assert "secret" not in str(span.to_json())


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [("BREW", "/v1/pots", "HTTP"), ("GET", "/nowhere", "GET"), ("HEAD", "/nowhere", "HEAD")],
)
async def test_unknown_methods_and_paths_name_no_span(method: str, path: str, name: str) -> None:
    traced = TracedApp("", 404)
    span = await traced.request(method, path)
    assert span is not None
    assert span.name == name
    ((labels, _, _),) = read_values(traced.metrics, "http.server.request.duration")
    assert path not in str(labels)
    assert labels["http.request.method"] == ("_OTHER" if name == "HTTP" else method)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json"])
async def test_probes_and_scrapers_are_not_recorded(path: str) -> None:
    traced = TracedApp(path)
    assert await traced.request("GET", path) is None
    assert read_values(traced.metrics, "http.server.request.duration") == []
    assert len(traced.seen_span_ids) == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("[::1]:8080", ("[::1]", 8080)),
        ("gw.example", ("gw.example", 80)),
        ("gw.example:port", (None, None)),
        ("", (None, None)),
    ],
)
async def test_the_host_is_read_from_its_header(host: str, expected: tuple[Any, Any]) -> None:
    span = await TracedApp().request(host=host)
    assert span is not None
    attributes = span.attributes or {}
    assert (attributes.get("server.address"), attributes.get("server.port")) == expected
