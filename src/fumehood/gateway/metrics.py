"""Counts and times what the gateway does, for Prometheus; imports prometheus_client and `protocol`.

Everything is counted in plain numbers, in one thread, and becomes metrics when somebody asks for them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import override

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.protocol.items import CodeInterpreterCall, ShellCall
from fumehood.protocol.responses import Response, Usage

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip


class Metrics(Collector):
    """One set of figures on a registry of its own, so that two gateways in one process do not add up.

    streams: how many answers are being streamed now.
    turns: how many models were asked for; whoever asks them counts.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.turns = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter[tuple[str, int]]()
        self._durations: dict[str, _Durations] = {}
        self._events = 0
        self._responses = Counter[str]()
        self._tokens = Counter[str]()
        self._calls = Counter[tuple[str, str]]()
        self._uploads = 0
        self._file_bytes = Counter[str]()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """`route` is the pattern, never what a caller wrote; 0 is a caller who left before any answer."""
        self._requests[route, status] += 1
        durations = self._durations.get(route)
        if durations is None:
            durations = self._durations[route] = _Durations()
        durations.add(seconds)

    def streamed(self, events: int) -> None:
        self._events += events

    def ended(self, response: Response) -> None:
        self._responses[response.status] += 1
        if response.usage is not None:
            self.used(response.usage)
        for item in response.output:
            if isinstance(item, CodeInterpreterCall):
                self._calls["code_interpreter", item.status] += 1
            elif isinstance(item, ShellCall):
                self._calls["shell", item.status] += 1

    def used(self, usage: Usage) -> None:
        self._tokens["input"] += usage.input_tokens
        self._tokens["output"] += usage.output_tokens

    def uploaded(self, size: int) -> None:
        self._uploads += 1
        self._file_bytes["in"] += size

    def downloaded(self, size: int) -> None:
        self._file_bytes["out"] += size

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @override
    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fumehood_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), number in self._requests.items():
            requests.add_metric([route, str(status)], number)
        yield requests
        seconds = HistogramMetricFamily(
            "fumehood_request_seconds",
            "From the head of a request to the end of its answer.",
            labels=["route"],
        )
        for route, durations in self._durations.items():
            seconds.add_metric([route], durations.buckets(), durations.total)
        yield seconds
        yield GaugeMetricFamily("fumehood_streams", "Answers being streamed now.", self.streams)
        yield CounterMetricFamily("fumehood_events", "Events streamed.", self._events)
        yield _counted("fumehood_responses", "Responses that ended, by status.", "status", self._responses)
        yield CounterMetricFamily("fumehood_turns", "Turns that models were asked for.", self.turns)
        yield _counted("fumehood_tokens", "Tokens that models read and wrote.", "direction", self._tokens)
        calls = CounterMetricFamily(
            "fumehood_tool_calls", "Calls of hosted tools, by type and status.", labels=["type", "status"]
        )
        for labels, number in self._calls.items():
            calls.add_metric([*labels], number)
        yield calls
        yield CounterMetricFamily("fumehood_uploads", "Files uploaded.", self._uploads)
        yield _counted(
            "fumehood_file_bytes", "Bytes of files uploaded and downloaded.", "direction", self._file_bytes
        )


def _counted(name: str, documentation: str, label: str, numbers: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], number)
    return family


class _Durations:
    """How often something took how long."""

    def __init__(self) -> None:
        self.total = 0.0
        self._numbers = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self.total += seconds
        self._numbers[bisect_left(_BOUNDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        names = (*map(str, map(float, _BOUNDS)), "+Inf")
        return [*zip(names, accumulate(self._numbers), strict=True)]
