"""The OpenTelemetry pipeline of one gateway: providers, OTLP exporters and the SDK's environment variables."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, override

import requests
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from urllib3.exceptions import HTTPError

from fumehood import __version__
from fumehood.gateway_stats import GatewayStats
from fumehood.http_server.asgi_exchange import Application
from fumehood.interfaces import HostedTool, ModelProvider, RunService
from fumehood.telemetry.content_capture import ContentRecorder, ProfileName
from fumehood.telemetry.histogram_export import INSTRUMENTATION_SCOPE, HistogramMetricExporter
from fumehood.telemetry.http_instrumentation import HttpServerMiddleware
from fumehood.telemetry.instrumentation import (
    InstrumentedHostedTool,
    InstrumentedModelProvider,
    InstrumentedRunService,
)
from fumehood.telemetry.log_event_emitter import LogEventEmitter
from fumehood.telemetry.operation_records import RecordDispatcher, RecordListener
from fumehood.telemetry.otel_metrics import ModelNameLimiter, OtelMetrics
from fumehood.telemetry.prometheus_to_otel import PrometheusToOtelBridge
from fumehood.telemetry.semantic_conventions import (
    MAX_CONTENT_BYTES,
    OWN_PROVIDER,
    SCHEMA_URL,
    read_capture_targets,
)
from fumehood.telemetry.span_emitter import SpanEmitter
from fumehood.telemetry.span_encoding import use_in_place_encoding
from fumehood.telemetry.trace_context import TraceContextPropagator

EMIT_EVENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_ENDPOINT_OF = "OTEL_EXPORTER_OTLP_{}_ENDPOINT"
_CREDENTIAL_PROVIDER = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER"
_CREDENTIAL_PROVIDER_OF = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}_CREDENTIAL_PROVIDER"

_MAX_RESPONSE_BYTES = 64 << 10
_READ_SIZE = 4 << 10
_DEFAULT_TIMEOUT_SECONDS = 10.0
_SHUTDOWN_SECONDS = 2.0  # for all exporters together, even if a receiver does not respond


class BoundedReadSession(requests.Session):
    """A session for the SDK's exporters, which use only the status and headers of a response.

    A short body that arrives within the timeout is read, so that the connection can be reused; else it is closed.
    """

    @override
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        response = super().send(request, **{**options, "stream": True})
        timeout = options.get("timeout")
        deadline = time.monotonic() + (
            timeout if isinstance(timeout, int | float) else _DEFAULT_TIMEOUT_SECONDS
        )
        remaining = _MAX_RESPONSE_BYTES
        try:
            while remaining > 0 and time.monotonic() < deadline:
                chunk = response.raw.read1(_READ_SIZE, decode_content=False)
                if not chunk:
                    return response
                remaining -= len(chunk)
        except (HTTPError, OSError):
            pass  # status and headers have arrived
        response.close()
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpPipelineSettings:
    """The telemetry section of the configuration.

    endpoint: base URL for all signals, None to leave it to the environment.
    profile, content_bytes, redact: representation, size limit and redaction of captured content.
    models: names that metrics use as labels from the start.
    provider_name: what the gateway calls itself, and servers that no vendor is known to run.
    """

    endpoint: str | None = None
    profile: ProfileName = "option2"
    content_bytes: int = MAX_CONTENT_BYTES
    redact: Callable[[str], str] | None = None
    models: Sequence[str] = ()
    provider_name: str = OWN_PROVIDER


class _SupportsShutdown(Protocol):
    def shutdown(self) -> None: ...


class OtlpPipeline:
    """Instruments the seams of one gateway, and owns the SDK's exporters and their threads."""

    def __init__(
        self, settings: OtlpPipelineSettings, environ: Mapping[str, str], stats: GatewayStats
    ) -> None:
        self._environ = environ
        self._endpoint = settings.endpoint
        self._provider_name = settings.provider_name
        self._metrics_page = PrometheusToOtelBridge()
        self._resource = _create_resource()
        self._shutdowns: list[tuple[Callable[[], None], _SupportsShutdown]] = []
        self._propagator = TraceContextPropagator(environ)
        capture = self._create_content_capture(settings)
        listeners: list[RecordListener] = []
        if self._is_enabled("metrics"):
            listeners.append(self._create_metrics(stats, settings.models))
        if self._is_enabled("logs"):
            listeners.append(
                self._create_event_emitter(with_content=capture is not None and capture.in_events)
            )
        on_start = None
        if self._is_enabled("traces"):
            spans = self._create_span_emitter(with_content=capture is not None and capture.in_spans)
            listeners.append(spans)
            on_start = spans.on_start
        self.dispatcher = RecordDispatcher(listeners, capture, on_start)

    # ---- instrumentation ------------------------------------------------------------------------------------------

    def instrument_models(self, models: ModelProvider) -> ModelProvider:
        return InstrumentedModelProvider(models, self.dispatcher, self._provider_name)

    def instrument_tools(self, tools: Sequence[HostedTool]) -> list[HostedTool]:
        return [InstrumentedHostedTool(tool, self.dispatcher) for tool in tools]

    def instrument_runs(self, runs: RunService) -> RunService:
        return InstrumentedRunService(runs, self.dispatcher, self._provider_name)

    def wrap_application(self, app: Application) -> Application:
        return HttpServerMiddleware(app, self.dispatcher, self._propagator)

    def export_metrics_page(self, read_page: Callable[[], Awaitable[bytes]]) -> None:
        """Export what a page in Prometheus's text format has, too. read_page: called in this event loop."""
        self._metrics_page.open(read_page)

    async def close_metrics_page(self) -> None:
        """Read the page for the last time."""
        await self._metrics_page.close()

    # ---- the three signals ----------------------------------------------------------------------------------------

    def _is_enabled(self, signal: str) -> bool:
        """A signal needs an endpoint: the SDK's default of localhost is not used."""
        variables = (_ENDPOINT, _ENDPOINT_OF.format(signal.upper()))
        if not self._endpoint and not any(self._environ.get(variable) for variable in variables):
            return False
        return self._environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"

    def _endpoint_of(self, signal: str) -> str | None:
        """Return None where the SDK reads it from the environment: a signal's own variable takes precedence."""
        if not self._endpoint or self._environ.get(_ENDPOINT_OF.format(signal.upper())):
            return None
        return f"{self._endpoint.rstrip('/')}/v1/{signal}"

    def _create_session(self, signal: str) -> BoundedReadSession | None:
        """Return None where the operator has named a credential provider, which makes the session."""
        variables = (_CREDENTIAL_PROVIDER, _CREDENTIAL_PROVIDER_OF.format(signal.upper()))
        return None if any(self._environ.get(variable) for variable in variables) else BoundedReadSession()

    def _create_content_capture(self, settings: OtlpPipelineSettings) -> ContentRecorder | None:
        """Return None unless the operator asks for content."""
        in_spans, in_events = read_capture_targets(self._environ)
        if not in_spans and not in_events:
            return None
        return ContentRecorder(
            settings.profile,
            in_spans=in_spans,
            in_events=in_events,
            max_bytes=settings.content_bytes,
            redact=settings.redact,
        )

    def _create_span_emitter(self, *, with_content: bool) -> SpanEmitter:
        exporter = OTLPSpanExporter(
            endpoint=self._endpoint_of("traces"), session=self._create_session("traces")
        )
        use_in_place_encoding()
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._shutdowns.append((provider.shutdown, exporter))
        tracer = provider.get_tracer(INSTRUMENTATION_SCOPE, __version__, schema_url=SCHEMA_URL)
        return SpanEmitter(tracer, self._propagator, with_content=with_content)

    def _create_event_emitter(self, *, with_content: bool) -> LogEventEmitter:
        """By the conventions, an event for every turn is opt-in."""
        exporter = OTLPLogExporter(endpoint=self._endpoint_of("logs"), session=self._create_session("logs"))
        provider = LoggerProvider(self._resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._shutdowns.append((provider.shutdown, exporter))
        with_details = self._environ.get(EMIT_EVENT_VARIABLE, str(with_content)).strip().lower() == "true"
        return LogEventEmitter(
            provider.get_logger(INSTRUMENTATION_SCOPE, __version__, SCHEMA_URL),
            with_details=with_details,
            with_content=with_content,
        )

    def _create_metrics(self, stats: GatewayStats, models: Sequence[str]) -> OtelMetrics:
        metrics = OtelMetrics(ModelNameLimiter(models))
        exporter = HistogramMetricExporter(
            metrics.instruments,
            self._metrics_page,
            endpoint=self._endpoint_of("metrics"),
            session=self._create_session("metrics"),
        )
        provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource=self._resource,
            shutdown_on_exit=False,
            exemplar_filter=AlwaysOffExemplarFilter(),
        )
        self._shutdowns.append((provider.shutdown, exporter))
        metrics.register_observables(
            provider.get_meter(INSTRUMENTATION_SCOPE, __version__, SCHEMA_URL),
            stats,
            lambda: self.dispatcher.running_count,
        )
        return metrics

    # ---- shutdown --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Export what is left, for at most two seconds."""
        self.dispatcher.flush()
        await self._metrics_page.close()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        # Daemon threads: one that still waits for a receiver does not keep the process alive.
        threads = [
            (threading.Thread(target=shutdown, daemon=True, name="telemetry-shutdown"), exporter)
            for shutdown, exporter in self._shutdowns
        ]
        for thread, _ in threads:
            thread.start()
        for thread, exporter in threads:
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                exporter.shutdown()  # stops its retries


def _create_resource() -> Resource:
    """Return the resource of the environment; the service name defaults to fumehood."""
    resource = Resource({"service.version": __version__}).merge(Resource.create())
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        return resource.merge(Resource({"service.name": INSTRUMENTATION_SCOPE}))
    return resource
