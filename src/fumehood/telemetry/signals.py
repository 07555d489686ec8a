"""Sends what was seen where the operator says, by OpenTelemetry's SDK and its own variables; imports it, and siblings."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from fumehood import __version__
from fumehood.figures import Figures
from fumehood.interfaces import HostedTool, Models, Runs
from fumehood.serving.exchange import Application
from fumehood.telemetry.contents import OutputMessages
from fumehood.telemetry.metrics import Metrics, ModelNames
from fumehood.telemetry.observing import ObservedModels, ObservedRuns, ObservedTool
from fumehood.telemetry.points import SCOPE, PointExporter
from fumehood.telemetry.seen import Listener, Observer
from fumehood.telemetry.spans import Spans, no_contents
from fumehood.telemetry.trace_context import Propagation

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURING = frozenset({"true", "span_only", "span_and_event"})
_LAST_SECONDS = 2.0  # that a receiver which does not answer may hold up the end


class _Exporter(Protocol):
    def shutdown(self) -> None: ...


class Signals:
    """The wrappers of one gateway, and the threads that send what they tell.

    endpoint: the address that all signals share, None to leave it to the variables.
    models: those that metrics may be told of by name, whoever asks for them.
    """

    def __init__(
        self, endpoint: str | None, environ: Mapping[str, str], figures: Figures, models: Sequence[str] = ()
    ) -> None:
        self._environ = environ
        self._endpoint = endpoint
        self._resource = _resource()
        self._ends: list[tuple[Callable[[], None], _Exporter]] = []
        self._propagation = Propagation(environ)
        listeners: list[Listener] = []
        if self._wants("traces"):
            listeners.append(self._spans())
        if self._wants("metrics"):
            listeners.append(self._metrics(figures, models))
        self._observer = Observer(listeners)

    # ---- what is put around the seams -----------------------------------------------------------------------------

    def models(self, models: Models) -> Models:
        return ObservedModels(models, self._observer)

    def tools(self, tools: Sequence[HostedTool]) -> list[HostedTool]:
        return [ObservedTool(tool, self._observer) for tool in tools]

    def runs(self, runs: Runs) -> Runs:
        return ObservedRuns(runs, self._observer)

    def edge(self, app: Application) -> Application:
        return self._propagation.at_the_edge(app)

    # ---- the three signals ----------------------------------------------------------------------------------------

    def _wants(self, signal: str) -> bool:
        return self._environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"

    def _address(self, signal: str) -> str | None:
        """The variable of one signal goes before what all of them share; the SDK knows the others."""
        if self._endpoint is None or self._environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
            return None
        return f"{self._endpoint.rstrip('/')}/v1/{signal}"

    def _spans(self) -> Spans:
        exporter = OTLPSpanExporter(endpoint=self._address("traces"))
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._ends.append((provider.shutdown, exporter))
        captures = self._environ.get(CAPTURE, "").lower() in _CAPTURING
        tracer = provider.get_tracer(SCOPE, __version__)
        return Spans(tracer, self._propagation, OutputMessages() if captures else no_contents)

    def _metrics(self, figures: Figures, models: Sequence[str]) -> Metrics:
        metrics = Metrics(ModelNames(models))
        exporter = PointExporter(metrics.instruments, endpoint=self._address("metrics"))
        provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource=self._resource,
            shutdown_on_exit=False,
            exemplar_filter=AlwaysOffExemplarFilter(),
        )
        self._ends.append((provider.shutdown, exporter))
        metrics.observe(provider.get_meter(SCOPE, __version__), figures)
        return metrics

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is left, as far as that takes no longer than two seconds."""
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
