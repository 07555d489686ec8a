"""Sends what was seen where the operator says, by OpenTelemetry's SDK and its variables; imports it,
`interfaces`, `figures`, `serving` and siblings.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from fumehood import __version__
from fumehood.figures import Figures
from fumehood.interfaces import HostedTool, Models, Runs
from fumehood.serving.exchange import Application
from fumehood.telemetry.collector import CollectorSession
from fumehood.telemetry.contents import Contents, ProfileName
from fumehood.telemetry.conventions import CAPTURE, LONGEST
from fumehood.telemetry.events import Events
from fumehood.telemetry.metrics import Metrics, ModelNames
from fumehood.telemetry.observing import ObservedModels, ObservedRuns, ObservedTool
from fumehood.telemetry.points import SCOPE, PointExporter
from fumehood.telemetry.quick_spans import QuickExporter, QuickTracer
from fumehood.telemetry.seen import Listener, Observer
from fumehood.telemetry.spans import Spans
from fumehood.telemetry.trace_context import Propagation

EMIT = "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT"
# Who has what was said: spans, events.
_CAPTURING = {
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
_SESSIONS = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER"
_SESSIONS_OF = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}_CREDENTIAL_PROVIDER"
_LAST_SECONDS = 2.0  # that a receiver which does not answer may hold up the end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """What the configuration says of telemetry.

    endpoint: the address that all signals share, None to leave it to the variables.
    profile, content_bytes, redact: how what was said is written, how much of it, and who looks over it before.
    models: those that metrics may be told of by name, whoever asks for them.
    """

    endpoint: str | None = None
    profile: ProfileName = "option2"
    content_bytes: int = LONGEST
    redact: Callable[[str], str] | None = None
    models: Sequence[str] = ()


class _Exporter(Protocol):
    def shutdown(self) -> None: ...


class Signals:
    """The wrappers of one gateway, and the threads that send what they tell."""

    def __init__(self, settings: SignalSettings, environ: Mapping[str, str], figures: Figures) -> None:
        self._environ = environ
        self._endpoint = settings.endpoint
        self._resource = _resource()
        self._ends: list[tuple[Callable[[], None], _Exporter]] = []
        self._propagation = Propagation(environ)
        contents = self._contents(settings)
        listeners: list[Listener] = []
        if self._wants("metrics"):
            listeners.append(self._metrics(figures, settings.models))
        if self._wants("logs"):
            listeners.append(self._events(with_content=contents is not None and contents.in_events))
        begins = None
        if self._wants("traces"):
            spans = self._spans(with_content=contents is not None and contents.in_spans)
            listeners.append(spans)  # last: what it is told is sent as it is
            begins = spans.began
        self.observer = Observer(listeners, contents, begins)

    # ---- what is put around the seams -----------------------------------------------------------------------------

    def models(self, models: Models) -> Models:
        return ObservedModels(models, self.observer)

    def tools(self, tools: Sequence[HostedTool]) -> list[HostedTool]:
        return [ObservedTool(tool, self.observer) for tool in tools]

    def runs(self, runs: Runs) -> Runs:
        return ObservedRuns(runs, self.observer)

    def edge(self, app: Application) -> Application:
        return self._propagation.at_the_edge(app)

    # ---- the three signals ----------------------------------------------------------------------------------------

    def _wants(self, signal: str) -> bool:
        """One without an address is not sent to where the SDK guesses that somebody listens."""
        variables = (_ENDPOINT, _ENDPOINT_OF.format(signal.upper()))
        sent = self._endpoint or any(self._environ.get(variable) for variable in variables)
        return (
            bool(sent) and self._environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"
        )

    def _address(self, signal: str) -> str | None:
        """The variable of one signal goes before what all of them share; the SDK knows the others."""
        if not self._endpoint or self._environ.get(_ENDPOINT_OF.format(signal.upper())):
            return None
        return f"{self._endpoint.rstrip('/')}/v1/{signal}"

    def _session(self, signal: str) -> CollectorSession | None:
        """None where the operator has named who makes sessions."""
        named = (_SESSIONS, _SESSIONS_OF.format(signal.upper()))
        return None if any(self._environ.get(variable) for variable in named) else CollectorSession()

    def _contents(self, settings: SignalSettings) -> Contents | None:
        """None unless the operator asks for it in words that are known."""
        said = self._environ.get(CAPTURE, "").strip().lower()
        if said not in _CAPTURING:
            logger.warning("%s: %r is not known; no content is recorded", CAPTURE, said)
        in_spans, in_events = _CAPTURING.get(said, (False, False))
        if not in_spans and not in_events:
            return None
        return Contents(
            settings.profile,
            in_spans=in_spans,
            in_events=in_events,
            longest=settings.content_bytes,
            redact=settings.redact,
        )

    def _spans(self, *, with_content: bool) -> Spans:
        exporter = QuickExporter(
            self._resource,
            InstrumentationScope(SCOPE, __version__),
            endpoint=self._address("traces"),
            session=self._session("traces"),
        )
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter)
        provider.add_span_processor(processor)
        self._ends.append((provider.shutdown, exporter))
        return Spans(QuickTracer(provider, processor), self._propagation, with_content=with_content)

    def _events(self, *, with_content: bool) -> Events:
        """By the conventions, an event for every turn is only there where it is asked for."""
        exporter = OTLPLogExporter(endpoint=self._address("logs"), session=self._session("logs"))
        provider = LoggerProvider(self._resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._ends.append((provider.shutdown, exporter))
        wanted = self._environ.get(EMIT, str(with_content)).strip().lower() == "true"
        return Events(provider.get_logger(SCOPE, __version__), with_details=wanted, with_content=with_content)

    def _metrics(self, figures: Figures, models: Sequence[str]) -> Metrics:
        metrics = Metrics(ModelNames(models))
        exporter = PointExporter(
            metrics.instruments, endpoint=self._address("metrics"), session=self._session("metrics")
        )
        provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource=self._resource,
            shutdown_on_exit=False,
            exemplar_filter=AlwaysOffExemplarFilter(),
        )
        self._ends.append((provider.shutdown, exporter))
        metrics.observe(provider.get_meter(SCOPE, __version__), figures, lambda: self.observer.running)
        return metrics

    # ---- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send what is left, as far as that takes no longer than two seconds."""
        self.observer.tell()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        until = time.monotonic() + _LAST_SECONDS
        # Daemons: who waits for an answer beyond that keeps no process alive.
        ending = [
            (threading.Thread(target=end, daemon=True, name="telemetry-end"), exporter)
            for end, exporter in self._ends
        ]
        for thread, _ in ending:
            thread.start()
        for thread, exporter in ending:
            thread.join(max(0, until - time.monotonic()))
            if thread.is_alive():
                exporter.shutdown()  # it tries no more


def _resource() -> Resource:
    """What the variables say; where they name no service, it is called after us."""
    found = Resource({"service.version": __version__}).merge(Resource.create())
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        return found.merge(Resource({"service.name": SCOPE}))
    return found
