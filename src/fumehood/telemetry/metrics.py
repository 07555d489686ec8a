"""Metrics of what was seen, by the conventions, and of sandboxes by our own; imports the API, `figures`,
`protocol` and siblings.

What is counted for a turn or a response is a handful of additions; nothing is done for a streamed event.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import override

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from fumehood.figures import Distribution, Figures
from fumehood.protocol.responses import Usage
from fumehood.telemetry.conventions import OWN, SECONDS, TOKENS, provider_of
from fumehood.telemetry.points import Distributions, Labels
from fumehood.telemetry.seen import CallSeen, Listener, PhaseSeen, RunSeen, Seen, TurnSeen

OTHER = "_OTHER"  # as the conventions call what has no name of its own
_MOST_MODELS = 100

# As the conventions advise.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_EACH_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_AGENT = tuple(0.1 * 2**power for power in range(13))
_TIMES = (1, 2, 4, 8, 16, 32, 64, 128)
# A sandbox that waited is there within a millisecond.
_PHASES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ModelNames:
    """Names that a metric may be labelled with: those of the configuration, and the first hundred others that a model
    has answered to. Callers may invent as many as they like.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._room = _MOST_MODELS

    def label(self, model: str | None, *, answered: bool) -> str:
        if model is None:
            return OTHER
        if model not in self._known:
            if not answered or not self._room:
                return OTHER
            self._room -= 1
            self._known.add(model)
        return model


@dataclass(frozen=True, slots=True)
class _TurnSeries:
    """Where turns of a model at a server are counted, looked up once; what failed has further labels."""

    labels: Labels
    durations: Distribution
    first_chunks: Distribution
    chunks: Distribution
    input_tokens: Distribution
    output_tokens: Distribution


@dataclass(frozen=True, slots=True)
class _RunSeries:
    """The same for responses, by the model that was asked for and the one that answered."""

    labels: Labels
    agent_labels: Labels
    requests: Distribution
    agents: Distribution
    first_tokens: Distribution
    each_token: Distribution


class Metrics(Listener):
    """`instruments` are read by whoever sends them."""

    wants_moments = True

    def __init__(self, names: ModelNames) -> None:
        self._names = names
        self._tokens = Distributions("gen_ai.client.token.usage", "{token}", "Tokens of turns.", TOKENS)
        self._turns = _seconds("gen_ai.client.operation.duration", "How long turns of models take.")
        self._first_chunks = _seconds(
            "gen_ai.client.operation.time_to_first_chunk", "Until the first piece of a streamed turn comes."
        )
        self._chunks = _seconds(
            "gen_ai.client.operation.time_per_output_chunk", "Between the pieces of streamed turns."
        )
        self._requests = _seconds("gen_ai.server.request.duration", "How long responses take.")
        self._first_tokens = _seconds(
            "gen_ai.server.time_to_first_token",
            "Until a model writes the first token of a streamed response.",
            _FIRST_TOKEN,
        )
        self._each_token = _seconds(
            "gen_ai.server.time_per_output_token",
            "For every token after the first ones of turns, while models write.",
            _EACH_TOKEN,
        )
        self._agents = _seconds(
            "gen_ai.invoke_agent.duration", "How long responses take, tools included.", _AGENT
        )
        self._agent_turns = Distributions(
            "gen_ai.invoke_agent.inference_calls", "{inference_call}", "Turns of a response.", _TIMES
        )
        self._agent_calls = Distributions(
            "gen_ai.invoke_agent.tool_calls", "{tool_call}", "Calls of hosted tools in a response.", _TIMES
        )
        self._turns_of_agents, self._calls_of_agents = self._agent_turns.of(()), self._agent_calls.of(())
        self._calls = _seconds("gen_ai.execute_tool.duration", "How long calls of hosted tools take.")
        self._phases = _seconds(
            "fumehood.sandbox.phase.duration",
            "Acquiring a sandbox, installing packages, running code, finding files.",
            _PHASES,
        )
        self._of_turns: dict[tuple[str, tuple[str, int] | None], _TurnSeries] = {}
        self._of_runs: dict[tuple[str, str | None], _RunSeries] = {}
        self.starts = Counter[str]()

    @property
    def instruments(self) -> Sequence[Distributions]:
        return [each for each in vars(self).values() if isinstance(each, Distributions)]

    # ---- what was seen --------------------------------------------------------------------------------------------

    @override
    def ended(self, seen: Seen) -> None:
        if isinstance(seen, TurnSeen):
            self._turn(seen)
        elif isinstance(seen, RunSeen):
            self._run(seen)
        elif isinstance(seen, CallSeen):
            labels: Labels = (("gen_ai.tool.name", seen.name), ("gen_ai.tool.type", "extension"))
            self._calls.of(_with_error(labels, seen)).add(seen.seconds)
        elif isinstance(seen, PhaseSeen):
            self._phase(seen)

    def _turn(self, turn: TurnSeen) -> None:
        server, end, seconds = turn.server, turn.end, turn.took / 1e9
        series = self._of_turns.get((turn.model, server))
        if series is None:
            model = self._names.label(turn.model, answered=end is not None)
            series = self._of_turns.get((model, server)) or self._turn_series(model, server)
        if turn.error:
            self._turns.of(_with_error(series.labels, turn)).add(seconds)
        else:
            series.durations.add(seconds)
        if turn.first and turn.streamed:
            series.first_chunks.add(turn.first / 1e9)
            if turn.moments is not None:
                series.chunks.add_all(turn.gaps())
        if end is not None and end.usage is not None:
            series.input_tokens.add(end.usage.input_tokens)
            series.output_tokens.add(end.usage.output_tokens)

    def _turn_series(self, model: str, server: tuple[str, int] | None) -> "_TurnSeries":
        labels: Labels = (
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", provider_of(server)),
            ("gen_ai.request.model", model),
        )
        if server is not None:
            labels += (("server.address", server[0]), ("server.port", server[1]))
        self._of_turns[model, server] = series = _TurnSeries(
            labels,
            durations=self._turns.of(labels),
            first_chunks=self._first_chunks.of(labels),
            chunks=self._chunks.of(labels),
            input_tokens=self._tokens.of((*labels, ("gen_ai.token.type", "input"))),
            output_tokens=self._tokens.of((*labels, ("gen_ai.token.type", "output"))),
        )
        return series

    def _run(self, run: RunSeen) -> None:
        answer, begun, seconds = run.answer, bool(run.first), run.took / 1e9
        answered = None if answer is None else answer.model
        series = None if run.model is None else self._of_runs.get((run.model, answered))
        if series is None:
            model = self._names.label(run.model, answered=begun)
            if answered is not None:
                answered = self._names.label(answered, answered=begun)
            series = self._of_runs.get((model, answered)) or self._run_series(model, answered)
        if run.error:
            self._requests.of(_with_error(series.labels, run)).add(seconds)
            self._agents.of(_with_error(series.agent_labels, run)).add(seconds)
        else:
            series.requests.add(seconds)
            series.agents.add(seconds)
        if run.turns:
            self._turns_of_agents.add(run.turns)
            self._calls_of_agents.add(run.calls)
        if run.error or answer is None or not begun or not run.streamed:
            return
        series.first_tokens.add(run.first / 1e9)
        after_first = _tokens_of(answer.usage) - run.turns
        if after_first > 0:
            series.each_token.add(run.writing / 1e9 / after_first)

    def _run_series(self, model: str, answered: str | None) -> "_RunSeries":
        labels: Labels = (
            ("gen_ai.operation.name", "invoke_agent"),
            ("gen_ai.provider.name", OWN),
            ("gen_ai.request.model", model),
        )
        if answered is not None:
            labels += (("gen_ai.response.model", answered),)
        agent_labels: Labels = (("gen_ai.request.model", model),)
        self._of_runs[model, answered] = series = _RunSeries(
            labels,
            agent_labels,
            requests=self._requests.of(labels),
            agents=self._agents.of(agent_labels),
            first_tokens=self._first_tokens.of(labels),
            each_token=self._each_token.of(labels),
        )
        return series

    def _phase(self, seen: PhaseSeen) -> None:
        phase = seen.phase
        self._phases.of(_with_error((("fumehood.sandbox.phase", phase.name),), seen)).add(seen.seconds)
        start = phase.facts.get("start")
        if start is not None:
            self.starts[start] += 1

    # ---- what is asked for when it is sent ------------------------------------------------------------------------

    def observe(self, meter: Meter, figures: Figures, running: Callable[[], int]) -> None:
        """Have the meter ask for what is only looked at: how many there are now, and what others have counted."""
        containers = figures.containers
        meter.create_observable_up_down_counter(
            "fumehood.responses.active", [_numbers(running)], "{response}", "Being made now."
        )
        meter.create_observable_counter(
            "fumehood.sandbox.starts",
            [_counted(lambda: self.starts, "fumehood.sandbox.start")],
            "{sandbox}",
            "How calls got their sandboxes: warm ones were waiting, cold ones were made, kept ones were theirs.",
        )
        meter.create_observable_counter(
            "fumehood.sandbox.executions",
            [_counted(lambda: containers.calls, "fumehood.sandbox.status")],
            "{execution}",
            "Code and commands, by how they ended.",
        )
        meter.create_observable_up_down_counter(
            "fumehood.sandbox.executions.active",
            [_numbers(lambda: containers.running)],
            "{execution}",
            "Code and commands that run or wait.",
        )
        meter.create_observable_up_down_counter(
            "fumehood.containers.live", [_numbers(lambda: containers.live)], "{container}", "Of all tenants."
        )
        meter.create_observable_counter(
            "fumehood.containers.ended",
            [_counted(lambda: containers.ended, "fumehood.container.end")],
            "{container}",
            "Containers that have ended, by why.",
        )


type _Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _numbers(read: Callable[[], int]) -> _Callback:
    return lambda _: [Observation(read())]


def _counted(read: Callable[[], Mapping[str, int]], label: str) -> _Callback:
    return lambda _: [Observation(number, {label: value}) for value, number in list(read().items())]


def _seconds(name: str, description: str, bounds: Sequence[float] = SECONDS) -> Distributions:
    return Distributions(name, "s", description, bounds)


def _with_error(labels: Labels, seen: Seen) -> Labels:
    return (*labels, ("error.type", seen.error)) if seen.error else labels


def _tokens_of(usage: Usage | None) -> int:
    return 0 if usage is None else usage.output_tokens
