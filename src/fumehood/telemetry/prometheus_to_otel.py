"""Exports what `/metrics` has over OTLP: reads the Prometheus page when OpenTelemetry exports, and converts it."""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Iterator
from time import time_ns

from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.parser import text_string_to_metric_families

_READ_SECONDS = 3.0
_PREFIX = "fumehood_"
# Counted by call and not by sandbox server: `OtelMetrics` exports them.
_NAMES_OF_CALLS = frozenset({"fumehood.sandbox.starts", "fumehood.sandbox.executions"})
_UNITS = {"seconds": "s", "bytes": "By"}


class PrometheusToOtelBridge:
    """A page that is read in an event loop and exported from another thread.

    Counters are cumulative since `open`, whatever temporality is preferred. Histograms are not exported: those of
    OpenTelemetry's conventions say the same.
    """

    def __init__(self) -> None:
        self._read_page: Callable[[], Awaitable[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at_ns = time_ns()
        self._last_page = b""

    def open(self, read_page: Callable[[], Awaitable[bytes]]) -> None:
        self._read_page = read_page
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Read the page for the last time: the loop does not run while the last export waits for it."""
        if self._read_page is not None:
            self._last_page = await self._read_page()
        self._read_page = None

    def collect(self) -> list[Metric]:
        """Return the counters and gauges of the page as it is now. Call it from another thread than the loop's."""
        page, now = self._fetch(), time_ns()
        return [*self._convert(page, now)]

    def _fetch(self) -> bytes:
        read_page, loop = self._read_page, self._loop
        if read_page is None or loop is None or loop.is_closed():
            return self._last_page

        async def read() -> bytes:
            return await read_page()

        pending = asyncio.run_coroutine_threadsafe(read(), loop)
        try:
            self._last_page = pending.result(_READ_SECONDS)
        except (TimeoutError, concurrent.futures.CancelledError):
            pending.cancel()
        return self._last_page

    def _convert(self, page: bytes, now: int) -> Iterator[Metric]:
        for family in text_string_to_metric_families(page.decode()):
            is_number = family.type in ("counter", "gauge") and family.name.startswith(_PREFIX)
            if not is_number or to_otel_name(family.name)[0] in _NAMES_OF_CALLS:
                continue
            points = [
                NumberDataPoint(
                    sample.labels,
                    self._started_at_ns if family.type == "counter" else 0,
                    now,
                    int(sample.value) if float(sample.value).is_integer() else sample.value,
                )
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            if points:
                yield _to_metric(family, points)


def _to_metric(family: PrometheusMetric, points: list[NumberDataPoint]) -> Metric:
    name, unit = to_otel_name(family.name)
    if family.type == "counter":
        data: Sum | Gauge = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(points)
    return Metric(name, family.documentation, unit, data)


def to_otel_name(name: str) -> tuple[str, str]:
    """Return OpenTelemetry's name and unit of a metric: dots after the namespaces, the unit not in the name.

    Whoever translates it back for Prometheus gets the name on the page, so that the same dashboards serve.
    """
    stem, _, suffix = name.removesuffix("_total").rpartition("_")
    unit = _UNITS.get(suffix, "")
    stem = stem if unit else name.removesuffix("_total")
    for namespace in ("fumehood_sandbox_", _PREFIX):
        if stem.startswith(namespace):
            return namespace.replace("_", ".") + stem.removeprefix(namespace), unit or "1"
    return stem, unit or "1"
