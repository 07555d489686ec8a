"""Counts and times what the gateway does, for Prometheus; imports prometheus_client, `protocol` and siblings."""

import contextlib
from collections.abc import Generator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fumehood.protocol.items import CodeInterpreterCall
from fumehood.protocol.responses import TERMINAL, Response

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip


class Metrics:
    """One set of figures on a registry of its own, so that two gateways in one process do not add up.

    registry: for those who count what the gateway cannot see.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "fumehood_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "fumehood_request_seconds",
            "From the head of a request to the end of its answer.",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._streams = Gauge("fumehood_streams", "Answers being streamed now.", registry=self.registry)
        self._events = Counter("fumehood_events", "Events streamed.", registry=self.registry)
        responses = Counter(
            "fumehood_responses", "Responses that ended, by status.", ["status"], registry=self.registry
        )
        tokens = Counter(
            "fumehood_tokens", "Tokens that models read and wrote.", ["direction"], registry=self.registry
        )
        self._calls = Counter(
            "fumehood_tool_calls",
            "Calls of hosted tools that ended, by type and status.",
            ["type", "status"],
            registry=self.registry,
        )
        # Looking labels up is slower than everything else here.
        self._responses = {status: responses.labels(status) for status in TERMINAL}
        self._read = tokens.labels("input")
        self._written = tokens.labels("output")
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """`route` is the pattern, never what a caller wrote; 0 is a caller who left before any answer."""
        figures = self._by_route.get((route, status))
        if figures is None:
            figures = (self._requests.labels(route, str(status)), self._seconds.labels(route))
            self._by_route[route, status] = figures
        figures[0].inc()
        figures[1].observe(seconds)

    @contextlib.contextmanager
    def streaming(self) -> Generator[None]:
        self._streams.inc()
        try:
            yield
        finally:
            self._streams.dec()

    def streamed(self, events: int) -> None:
        self._events.inc(events)

    def ended(self, response: Response) -> None:
        if (ended := self._responses.get(response.status)) is not None:
            ended.inc()
        if response.usage is not None:
            self._read.inc(response.usage.input_tokens)
            self._written.inc(response.usage.output_tokens)
        for item in response.output:
            if isinstance(item, CodeInterpreterCall):
                self._calls.labels("code_interpreter", item.status).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
