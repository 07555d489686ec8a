"""OpenTelemetry metrics: GenAI metrics of the semantic conventions, and fumehood's own for sandboxes and containers.

A turn or a response costs a few additions, a streamed event nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import override

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from fumehood.metrics import BucketHistogram, GatewayStats
from fumehood.telemetry.histogram_export import HistogramInstrument, Labels
from fumehood.telemetry.semantic_conventions import (
    DURATION_BUCKETS,
    OWN_PROVIDER,
    TOKEN_BUCKETS,
    map_provider,
)
from fumehood.telemetry.span_records import (
    RecordListener,
    RunRecord,
    SandboxTimingRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)

OTHER_MODEL = "_OTHER"  # the conventions' label for values outside the known set
_MAX_MODEL_NAMES = 100

# The buckets that the conventions advise.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_AGENT_BUCKETS = tuple(0.1 * 2**power for power in range(13))
_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
# A warm sandbox is acquired within a millisecond.
_PHASE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ModelNameLimiter:
    """Bounds the model names used as labels, because callers may invent any number of names.

    Allowed are the configured names and the first hundred others that a model has answered to.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._remaining = _MAX_MODEL_NAMES

    def label(self, model: str | None, *, has_answered: bool) -> str:
        if model is None:
            return OTHER_MODEL
        if model not in self._known:
            if not has_answered or not self._remaining:
                return OTHER_MODEL
            self._remaining -= 1
            self._known.add(model)
        return model


@dataclass(frozen=True, slots=True)
class _TurnHistograms:
    """The histograms of successful turns of one model at one server, cached to look them up once a turn."""

    labels: Labels
    durations: BucketHistogram
    first_chunks: BucketHistogram
    chunks: BucketHistogram
    input_tokens: BucketHistogram
    output_tokens: BucketHistogram


@dataclass(frozen=True, slots=True)
class _RunHistograms:
    """The histograms of successful responses, by requested and answering model."""

    labels: Labels
    agent_labels: Labels
    requests: BucketHistogram
    agents: BucketHistogram
    first_tokens: BucketHistogram
    each_token: BucketHistogram


class OtelMetrics(RecordListener):
    """Counts ended records. `HistogramMetricExporter` reads `instruments`."""

    needs_chunk_times = True

    def __init__(self, names: ModelNameLimiter) -> None:
        self._model_names = names
        self._token_usage = HistogramInstrument(
            "gen_ai.client.token.usage", "{token}", "Tokens used by turns.", TOKEN_BUCKETS
        )
        self._turn_durations = _duration_histogram(
            "gen_ai.client.operation.duration", "Duration of model turns."
        )
        self._time_to_first_chunk = _duration_histogram(
            "gen_ai.client.operation.time_to_first_chunk", "Time to the first chunk of a streamed turn."
        )
        self._time_per_output_chunk = _duration_histogram(
            "gen_ai.client.operation.time_per_output_chunk", "Time between chunks of streamed turns."
        )
        self._request_durations = _duration_histogram(
            "gen_ai.server.request.duration", "Duration of responses."
        )
        self._time_to_first_token = _duration_histogram(
            "gen_ai.server.time_to_first_token",
            "Time to the first token of a streamed response.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._time_per_output_token = _duration_histogram(
            "gen_ai.server.time_per_output_token",
            "Time per output token after the first of each turn, without tools.",
            _OUTPUT_TOKEN_BUCKETS,
        )
        self._agent_durations = _duration_histogram(
            "gen_ai.invoke_agent.duration", "Duration of responses, tools included.", _AGENT_BUCKETS
        )
        self._agent_turns = HistogramInstrument(
            "gen_ai.invoke_agent.inference_calls",
            "{inference_call}",
            "Model turns per response.",
            _COUNT_BUCKETS,
        )
        self._agent_calls = HistogramInstrument(
            "gen_ai.invoke_agent.tool_calls",
            "{tool_call}",
            "Hosted tool calls per response.",
            _COUNT_BUCKETS,
        )
        self._agent_turn_counts, self._agent_call_counts = (
            self._agent_turns.series(()),
            self._agent_calls.series(()),
        )
        self._tool_call_durations = _duration_histogram(
            "gen_ai.execute_tool.duration", "Duration of hosted tool calls."
        )
        self._phase_durations = _duration_histogram(
            "fumehood.sandbox.phase.duration",
            "Duration of acquiring a sandbox, installing packages, running code, finding files.",
            _PHASE_BUCKETS,
        )
        self._turn_histograms: dict[tuple[str, tuple[str, int] | None], _TurnHistograms] = {}
        self._run_histograms: dict[tuple[str, str | None], _RunHistograms] = {}
        self.sandbox_starts = Counter[str]()

    @property
    def instruments(self) -> Sequence[HistogramInstrument]:
        return [each for each in vars(self).values() if isinstance(each, HistogramInstrument)]

    # ---- records --------------------------------------------------------------------------------------------

    @override
    def on_end(self, record: SpanRecord) -> None:
        if isinstance(record, TurnRecord):
            self._record_turn(record)
        elif isinstance(record, RunRecord):
            self._record_run(record)
        elif isinstance(record, ToolCallRecord):
            labels: Labels = (("gen_ai.tool.name", record.name), ("gen_ai.tool.type", "extension"))
            self._tool_call_durations.series(_add_error_label(labels, record)).observe(record.seconds)
        elif isinstance(record, SandboxTimingRecord):
            self._record_timing(record)

    def _record_turn(self, turn: TurnRecord) -> None:
        server, end, seconds = turn.server, turn.end, turn.seconds
        series = self._turn_histograms.get((turn.model, server))
        if series is None:
            model = self._model_names.label(turn.model, has_answered=end is not None)
            series = self._turn_histograms.get((model, server)) or self._create_turn_histograms(model, server)
        if turn.error:
            self._turn_durations.series(_add_error_label(series.labels, turn)).observe(seconds)
        else:
            series.durations.observe(seconds)
        if turn.time_to_first_chunk and turn.streamed:
            series.first_chunks.observe(turn.time_to_first_chunk / 1e9)
            if turn.chunk_times is not None:
                series.chunks.merge(turn.take_chunk_intervals())
        if end is not None and end.usage is not None:
            series.input_tokens.observe(end.usage.input_tokens)
            series.output_tokens.observe(end.usage.output_tokens)

    def _create_turn_histograms(self, model: str, server: tuple[str, int] | None) -> "_TurnHistograms":
        labels: Labels = (
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", map_provider(server)),
            ("gen_ai.request.model", model),
        )
        if server is not None:
            labels += (("server.address", server[0]), ("server.port", server[1]))
        self._turn_histograms[model, server] = series = _TurnHistograms(
            labels,
            durations=self._turn_durations.series(labels),
            first_chunks=self._time_to_first_chunk.series(labels),
            chunks=self._time_per_output_chunk.series(labels),
            input_tokens=self._token_usage.series((*labels, ("gen_ai.token.type", "input"))),
            output_tokens=self._token_usage.series((*labels, ("gen_ai.token.type", "output"))),
        )
        return series

    def _record_run(self, run: RunRecord) -> None:
        summary, has_answered, seconds = run.response_summary, bool(run.time_to_first_token), run.seconds
        answering = None if summary is None else summary.model
        series = None if run.model is None else self._run_histograms.get((run.model, answering))
        if series is None:
            model = self._model_names.label(run.model, has_answered=has_answered)
            if answering is not None:
                answering = self._model_names.label(answering, has_answered=has_answered)
            series = self._run_histograms.get((model, answering)) or self._create_run_histograms(
                model, answering
            )
        if run.error:
            self._request_durations.series(_add_error_label(series.labels, run)).observe(seconds)
            self._agent_durations.series(_add_error_label(series.agent_labels, run)).observe(seconds)
        else:
            series.requests.observe(seconds)
            series.agents.observe(seconds)
        if run.turns:
            self._agent_turn_counts.observe(run.turns)
            self._agent_call_counts.observe(run.calls)
        if run.error or summary is None or not has_answered or not run.streamed:
            return
        series.first_tokens.observe(run.time_to_first_token / 1e9)
        after_first = (0 if summary.usage is None else summary.usage.output_tokens) - run.turns
        if after_first > 0:
            series.each_token.observe(run.generation_time / 1e9 / after_first)

    def _create_run_histograms(self, model: str, answering: str | None) -> "_RunHistograms":
        labels: Labels = (
            ("gen_ai.operation.name", "invoke_agent"),
            ("gen_ai.provider.name", OWN_PROVIDER),
            ("gen_ai.request.model", model),
        )
        if answering is not None:
            labels += (("gen_ai.response.model", answering),)
        agent_labels: Labels = (("gen_ai.request.model", model),)
        self._run_histograms[model, answering] = series = _RunHistograms(
            labels,
            agent_labels,
            requests=self._request_durations.series(labels),
            agents=self._agent_durations.series(agent_labels),
            first_tokens=self._time_to_first_token.series(labels),
            each_token=self._time_per_output_token.series(labels),
        )
        return series

    def _record_timing(self, record: SandboxTimingRecord) -> None:
        timing = record.timing
        labels = _add_error_label((("fumehood.sandbox.phase", timing.name),), record)
        self._phase_durations.series(labels).observe(record.seconds)
        start = timing.attributes.get("start")
        if start is not None:
            self.sandbox_starts[start] += 1

    # ---- read when they are exported ------------------------------------------------------------------------

    def register_observables(self, meter: Meter, stats: GatewayStats, running: Callable[[], int]) -> None:
        """Register the metrics that the meter reads from elsewhere: current numbers, and counters of the gateway."""
        containers = stats.containers
        meter.create_observable_up_down_counter(
            "fumehood.responses.active", [_observe_number(running)], "{response}", "Responses in progress."
        )
        meter.create_observable_counter(
            "fumehood.sandbox.starts",
            [_observe_counts(lambda: self.sandbox_starts, "fumehood.sandbox.start")],
            "{sandbox}",
            "Sandboxes acquired by calls: warm (from the pool), cold (created), kept (from an earlier call).",
        )
        meter.create_observable_counter(
            "fumehood.sandbox.executions",
            [_observe_counts(lambda: containers.ended_calls, "fumehood.sandbox.status")],
            "{execution}",
            "Executions of code and commands, by status.",
        )
        meter.create_observable_up_down_counter(
            "fumehood.sandbox.executions.active",
            [_observe_number(lambda: containers.running_calls)],
            "{execution}",
            "Executions that run or wait.",
        )
        meter.create_observable_up_down_counter(
            "fumehood.containers.live",
            [_observe_number(lambda: containers.live_containers)],
            "{container}",
            "Live containers of all tenants.",
        )
        meter.create_observable_counter(
            "fumehood.containers.ended",
            [_observe_counts(lambda: containers.ended, "fumehood.container.end")],
            "{container}",
            "Containers that have ended, by reason.",
        )


type _Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _observe_number(read: Callable[[], int]) -> _Callback:
    return lambda _: [Observation(read())]


def _observe_counts(read: Callable[[], Mapping[str, int]], label: str) -> _Callback:
    return lambda _: [Observation(number, {label: value}) for value, number in list(read().items())]


def _duration_histogram(
    name: str, description: str, bounds: Sequence[float] = DURATION_BUCKETS
) -> HistogramInstrument:
    return HistogramInstrument(name, "s", description, bounds)


def _add_error_label(labels: Labels, record: SpanRecord) -> Labels:
    return (*labels, ("error.type", record.error)) if record.error else labels
