"""Sends what was seen where the operator says, by OpenTelemetry's SDK and its variables."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, override

import requests
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from urllib3.exceptions import HTTPError

from fumehood import __version__
from fumehood.http_server.asgi_request import Application
from fumehood.interfaces import HostedTool, ModelProvider, RunService
from fumehood.metrics import GatewayStats
from fumehood.telemetry.content_capture import ContentCapture, ProfileName
from fumehood.telemetry.histogram_export import INSTRUMENTATION_SCOPE, HistogramMetricExporter
from fumehood.telemetry.instrumentation import (
    InstrumentedHostedTool,
    InstrumentedModelProvider,
    InstrumentedRunService,
)
from fumehood.telemetry.log_events import LogEventEmitter
from fumehood.telemetry.otel_metrics import ModelNameLimiter, OtelMetrics
from fumehood.telemetry.otlp_span_encoding import EncodingSpanExporter, EncodingTracer
from fumehood.telemetry.semantic_conventions import CAPTURE_CONTENT_VARIABLE, MAX_CONTENT_BYTES
from fumehood.telemetry.span_records import RecordDispatcher, RecordListener
from fumehood.telemetry.spans import SpanEmitter
from fumehood.telemetry.trace_context import TraceContextPropagator

_MAX_RESPONSE_BYTES = 64 << 10


_READ_SIZE = 4 << 10


_DEFAULT_TIMEOUT_SECONDS = 10.0


class BoundedReadSession(requests.Session):
    """One for the SDK's exporters, which look at the status and the headers of an answer alone. The rest is read as far
    as it is short and comes soon, so that the connection can be used again; else it is hung up.
    """

    @override
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **{**options, "stream": True})
        timeout = options.get("timeout")
        until = time.monotonic() + (timeout if isinstance(timeout, int | float) else _DEFAULT_TIMEOUT_SECONDS)
        left = _MAX_RESPONSE_BYTES
        try:
            while left > 0 and time.monotonic() < until:
                piece = answer.raw.read1(_READ_SIZE, decode_content=False)
                if not piece:
                    return answer
                left -= len(piece)
        except (HTTPError, OSError):
            pass  # what matters has been said
        answer.close()
        return answer


EMIT_EVENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT"


# Who has what was said: spans, events.
_CAPTURE_TARGETS = {
    "": (False, False),
    "false": (False, False),
    "no_content": (False, False),
    "true": (True, False),
    "span_only": (True, False),
    "event_only": (False, True),
    "span_and_event": (True, True),
}


_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


_ENDPOINT_OF = "OTEL_EXPORTER_OTLP_{}_ENDPOINT"


_CREDENTIAL_PROVIDER = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER"


_CREDENTIAL_PROVIDER_OF = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}_CREDENTIAL_PROVIDER"


_SHUTDOWN_SECONDS = 2.0  # that a receiver which does not answer may hold up the end


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpPipelineSettings:
    """What the configuration says of telemetry.

    endpoint: the address that all signals share, None to leave it to the variables.
    profile, content_bytes, redact: how what was said is written, how much of it, and who looks over it before.
    models: those that metrics may be told of by name, whoever asks for them.
    """

    endpoint: str | None = None
    profile: ProfileName = "option2"
    content_bytes: int = MAX_CONTENT_BYTES
    redact: Callable[[str], str] | None = None
    models: Sequence[str] = ()


class _SupportsShutdown(Protocol):
    def shutdown(self) -> None: ...


class OtlpPipeline:
    """The wrappers of one gateway, and the threads that send what they tell."""

    def __init__(
        self, settings: OtlpPipelineSettings, environ: Mapping[str, str], figures: GatewayStats
    ) -> None:
        self._environ = environ
        self._endpoint = settings.endpoint
        self._resource = _create_resource()
        self._shutdowns: list[tuple[Callable[[], None], _SupportsShutdown]] = []
        self._propagator = TraceContextPropagator(environ)
        contents = self._create_content_capture(settings)
        listeners: list[RecordListener] = []
        if self._is_enabled("metrics"):
            listeners.append(self._create_metrics(figures, settings.models))
        if self._is_enabled("logs"):
            listeners.append(
                self._create_event_emitter(with_content=contents is not None and contents.in_events)
            )
        begins = None
        if self._is_enabled("traces"):
            spans = self._create_span_emitter(with_content=contents is not None and contents.in_spans)
            listeners.append(spans)  # last: what it is told is sent as it is
            begins = spans.on_start
        self.dispatcher = RecordDispatcher(listeners, contents, begins)

    # ---- what is put around the seams -----------------------------------------------------------------------------

    def instrument_models(self, models: ModelProvider) -> ModelProvider:
        return InstrumentedModelProvider(models, self.dispatcher)

    def instrument_tools(self, tools: Sequence[HostedTool]) -> list[HostedTool]:
        return [InstrumentedHostedTool(tool, self.dispatcher) for tool in tools]

    def instrument_runs(self, runs: RunService) -> RunService:
        return InstrumentedRunService(runs, self.dispatcher)

    def wrap_application(self, app: Application) -> Application:
        return self._propagator.wrap_application(app)

    # ---- the three signals ----------------------------------------------------------------------------------------

    def _is_enabled(self, signal: str) -> bool:
        """One without an address is not sent to where the SDK guesses that somebody listens."""
        variables = (_ENDPOINT, _ENDPOINT_OF.format(signal.upper()))
        sent = self._endpoint or any(self._environ.get(variable) for variable in variables)
        return (
            bool(sent) and self._environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"
        )

    def _endpoint_of(self, signal: str) -> str | None:
        """The variable of one signal goes before what all of them share; the SDK knows the others."""
        if not self._endpoint or self._environ.get(_ENDPOINT_OF.format(signal.upper())):
            return None
        return f"{self._endpoint.rstrip('/')}/v1/{signal}"

    def _create_session(self, signal: str) -> BoundedReadSession | None:
        """None where the operator has named who makes sessions."""
        named = (_CREDENTIAL_PROVIDER, _CREDENTIAL_PROVIDER_OF.format(signal.upper()))
        return None if any(self._environ.get(variable) for variable in named) else BoundedReadSession()

    def _create_content_capture(self, settings: OtlpPipelineSettings) -> ContentCapture | None:
        """None unless the operator asks for it in words that are known."""
        said = self._environ.get(CAPTURE_CONTENT_VARIABLE, "").strip().lower()
        if said not in _CAPTURE_TARGETS:
            logger.warning("%s: %r is not known; no content is recorded", CAPTURE_CONTENT_VARIABLE, said)
        in_spans, in_events = _CAPTURE_TARGETS.get(said, (False, False))
        if not in_spans and not in_events:
            return None
        return ContentCapture(
            settings.profile,
            in_spans=in_spans,
            in_events=in_events,
            max_bytes=settings.content_bytes,
            redact=settings.redact,
        )

    def _create_span_emitter(self, *, with_content: bool) -> SpanEmitter:
        exporter = EncodingSpanExporter(
            self._resource,
            InstrumentationScope(INSTRUMENTATION_SCOPE, __version__),
            endpoint=self._endpoint_of("traces"),
            session=self._create_session("traces"),
        )
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter)
        provider.add_span_processor(processor)
        self._shutdowns.append((provider.shutdown, exporter))
        return SpanEmitter(EncodingTracer(provider, processor), self._propagator, with_content=with_content)

    def _create_event_emitter(self, *, with_content: bool) -> LogEventEmitter:
        """By the conventions, an event for every turn is only there where it is asked for."""
        exporter = OTLPLogExporter(endpoint=self._endpoint_of("logs"), session=self._create_session("logs"))
        provider = LoggerProvider(self._resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._shutdowns.append((provider.shutdown, exporter))
        wanted = self._environ.get(EMIT_EVENT_VARIABLE, str(with_content)).strip().lower() == "true"
        return LogEventEmitter(
            provider.get_logger(INSTRUMENTATION_SCOPE, __version__),
            with_details=wanted,
            with_content=with_content,
        )

    def _create_metrics(self, figures: GatewayStats, models: Sequence[str]) -> OtelMetrics:
        metrics = OtelMetrics(ModelNameLimiter(models))
        exporter = HistogramMetricExporter(
            metrics.instruments,
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
            provider.get_meter(INSTRUMENTATION_SCOPE, __version__),
            figures,
            lambda: self.dispatcher.running_count,
        )
        return metrics

    # ---- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send what is left, as far as that takes no longer than two seconds."""
        self.dispatcher.flush()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        until = time.monotonic() + _SHUTDOWN_SECONDS
        # Daemons: who waits for an answer beyond that keeps no process alive.
        ending = [
            (threading.Thread(target=end, daemon=True, name="telemetry-end"), exporter)
            for end, exporter in self._shutdowns
        ]
        for thread, _ in ending:
            thread.start()
        for thread, exporter in ending:
            thread.join(max(0, until - time.monotonic()))
            if thread.is_alive():
                exporter.shutdown()  # it tries no more


def _create_resource() -> Resource:
    """What the variables say; where they name no service, it is called after us."""
    found = Resource({"service.version": __version__}).merge(Resource.create())
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        return found.merge(Resource({"service.name": INSTRUMENTATION_SCOPE}))
    return found
