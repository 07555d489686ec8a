"""Sends spans where the operator says, by OpenTelemetry's SDK and its own variables; imports it, and siblings."""

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from fumehood import __version__
from fumehood.interfaces import HostedTool, Models, Runs
from fumehood.serving.exchange import Application
from fumehood.telemetry.contents import OutputMessages
from fumehood.telemetry.observing import ObservedModels, ObservedRuns, ObservedTool
from fumehood.telemetry.quick_spans import QuickExporter, QuickTracer
from fumehood.telemetry.seen import Observer
from fumehood.telemetry.spans import Spans, no_contents
from fumehood.telemetry.trace_context import Propagation

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURING = frozenset({"true", "span_only", "span_and_event"})


class Tracing:
    """The wrappers of one gateway, and the thread that sends what they tell."""

    def __init__(self, exporter: SpanExporter, environ: Mapping[str, str]) -> None:
        name = environ.get("OTEL_SERVICE_NAME") or "fumehood"
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        captures = environ.get(CAPTURE, "").lower() in _CAPTURING
        tracer = QuickTracer(self._provider, processor, "fumehood", __version__)
        self._propagation = Propagation(environ)
        contents = OutputMessages() if captures else no_contents
        self._observer = Observer([Spans(tracer, self._propagation, contents)])

    def models(self, models: Models) -> Models:
        return ObservedModels(models, self._observer)

    def tools(self, tools: Sequence[HostedTool]) -> list[HostedTool]:
        return [ObservedTool(tool, self._observer) for tool in tools]

    def runs(self, runs: Runs) -> Runs:
        return ObservedRuns(runs, self._observer)

    def edge(self, app: Application) -> Application:
        return self._propagation.at_the_edge(app)

    def close(self) -> None:
        """Send what is left; takes as long as the receiver does."""
        self._provider.shutdown()


def tracing_to(endpoint: str, environ: Mapping[str, str]) -> Tracing:
    """With the address that other signals would share, as in OTEL_EXPORTER_OTLP_ENDPOINT."""
    return Tracing(QuickExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), environ)
