"""OpenTelemetry metrics: GenAI metrics of the semantic conventions, and fumehood's own for sandboxes and containers.

A turn or a response costs a few additions, a streamed event nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import override

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from fumehood.gateway_stats import GatewayStats
from fumehood.telemetry.histogram_export import HistogramInstrument, Labels
from fumehood.telemetry.operation_records import (
    HttpRequestRecord,
    RecordListener,
    RunRecord,
    SandboxPhaseRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.semantic_conventions import DURATION_BUCKETS, TOKEN_BUCKETS

OTHER_MODEL = "_OTHER"  # the conventions' label for values outside the known set
_MAX_MODEL_NAMES = 100

# The buckets that the conventions advise.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_AGENT_BUCKETS = tuple(0.1 * 2**power for power in range(13))
_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
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


class OtelMetrics(RecordListener):
    """Records the `gen_ai.*` histograms (tokens, durations, time to first token) when a run, turn or tool call ends.

    `HistogramMetricExporter` reads `instruments`.
    """

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
        self._tool_call_durations = _duration_histogram(
            "gen_ai.execute_tool.duration", "Duration of hosted tool calls."
        )
        self._phase_durations = _duration_histogram(
            "fumehood.sandbox.phase.duration",
            "Duration of acquiring a sandbox, installing packages, running code, finding files.",
            _PHASE_BUCKETS,
        )
        self._http_durations = _duration_histogram(
            "http.server.request.duration", "Duration of HTTP requests.", _HTTP_BUCKETS
        )
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
            self._tool_call_durations.observe(_add_error_label(labels, record), record.seconds)
        elif isinstance(record, SandboxPhaseRecord):
            self._record_timing(record)
        elif isinstance(record, HttpRequestRecord):
            self._record_request(record)

    def _record_turn(self, turn: TurnRecord) -> None:
        labels: Labels = (
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", turn.provider),
            (
                "gen_ai.request.model",
                self._model_names.label(turn.model, has_answered=turn.end is not None),
            ),
        )
        if turn.server is not None:
            labels += (("server.address", turn.server[0]), ("server.port", turn.server[1]))
        self._turn_durations.observe(_add_error_label(labels, turn), turn.seconds)
        if turn.time_to_first_chunk and turn.streamed:
            self._time_to_first_chunk.observe(labels, turn.time_to_first_chunk / 1e9)
            if turn.chunk_times is not None:
                self._time_per_output_chunk.series(labels).merge(turn.take_chunk_intervals())
        usage = None if turn.end is None else turn.end.usage
        if usage is not None:
            self._token_usage.observe((*labels, ("gen_ai.token.type", "input")), usage.input_tokens)
            self._token_usage.observe((*labels, ("gen_ai.token.type", "output")), usage.output_tokens)

    def _record_run(self, run: RunRecord) -> None:
        summary, has_answered = run.response_summary, bool(run.time_to_first_token)
        model: Labels = (
            ("gen_ai.request.model", self._model_names.label(run.model, has_answered=has_answered)),
        )
        labels: Labels = (
            ("gen_ai.operation.name", "invoke_agent"),
            ("gen_ai.provider.name", run.provider),
            *model,
        )
        if summary is not None:
            answering = self._model_names.label(summary.model, has_answered=has_answered)
            labels += (("gen_ai.response.model", answering),)
        self._request_durations.observe(_add_error_label(labels, run), run.seconds)
        self._agent_durations.observe(_add_error_label(model, run), run.seconds)
        if run.turns:
            self._agent_turns.observe((), run.turns)
            self._agent_calls.observe((), run.calls)
        if run.error or summary is None or not has_answered or not run.streamed:
            return
        self._time_to_first_token.observe(labels, run.time_to_first_token / 1e9)
        after_first = (0 if summary.usage is None else summary.usage.output_tokens) - run.turns
        if after_first > 0:
            self._time_per_output_token.observe(labels, run.generation_time / 1e9 / after_first)

    def _record_request(self, request: HttpRequestRecord) -> None:
        labels: Labels = (("http.request.method", request.method), ("url.scheme", request.scheme))
        if request.route:
            labels += (("http.route", request.route),)
        if request.status:
            labels += (("http.response.status_code", request.status),)
        self._http_durations.observe(_add_error_label(labels, request), request.seconds)

    def _record_timing(self, record: SandboxPhaseRecord) -> None:
        timing = record.timing
        labels = _add_error_label((("fumehood.sandbox.phase", timing.name),), record)
        self._phase_durations.observe(labels, record.seconds)
        start = timing.attributes.get("start")
        if start is not None:
            self.sandbox_starts[str(start)] += 1

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
