"""Histograms that are counted here and exported by OpenTelemetry's SDK.

An instrument of the SDK takes about 14 µs for each number, more than the gateway spends on a streamed event. So numbers
are counted in plain lists and become data points when the SDK's reader exports.
"""

from collections.abc import Sequence
from time import time_ns
from typing import Any, cast, override

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Histogram as Instrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)

from fumehood.gateway_stats import BucketHistogram
from fumehood.telemetry.prometheus_to_otel import PrometheusToOtelBridge

INSTRUMENTATION_SCOPE = "fumehood"
_MAX_SERIES = 2000  # of one instrument, as in the SDK
_OVERFLOW_LABELS = (("otel.metric.overflow", True),)
_NOT_RECORDED = cast("float", None)  # min and max are optional in OTLP

type Labels = tuple[tuple[str, str | int | bool], ...]


class HistogramInstrument:
    """One instrument: a histogram for each set of labels."""

    def __init__(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._unit = unit
        self._description = description
        self._bounds = bounds
        self._series: dict[Labels, BucketHistogram] = {}
        self._exported: dict[Labels, tuple[list[int], float]] = {}
        self._interval_start = time_ns()

    def series(self, labels: Labels) -> BucketHistogram:
        point = self._series.get(labels)
        if point is None:
            if len(self._series) >= _MAX_SERIES:
                labels = _OVERFLOW_LABELS
            point = self._series.setdefault(labels, BucketHistogram(self._bounds))
        return point

    def observe(self, labels: Labels, value: float) -> None:
        self.series(labels).observe(value)

    def collect(self, temporality: AggregationTemporality) -> Metric | None:
        """Return the data points, cumulative or since the last call; None if there are none. Not thread-safe."""
        start, now = self._interval_start, time_ns()
        delta = temporality is AggregationTemporality.DELTA
        points: list[HistogramDataPoint] = []
        for labels, point in list(self._series.items()):
            counts, total = list(point.counts), point.sum
            if delta:
                exported, exported_total = self._exported.get(labels, ([0] * len(counts), 0.0))
                self._exported[labels] = counts, total
                counts = [count - earlier for count, earlier in zip(counts, exported, strict=True)]
                total -= exported_total
            if any(counts):
                points.append(self._build_data_point(labels, start, now, counts, total))
        if delta:
            self._interval_start = now
        return (
            Metric(self.name, self._description, self._unit, Histogram(points, temporality))
            if points
            else None
        )

    def _build_data_point(
        self, labels: Labels, start: int, now: int, counts: Sequence[int], total: float
    ) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start,
            time_unix_nano=now,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=self._bounds,
            min=_NOT_RECORDED,
            max=_NOT_RECORDED,
        )


class HistogramMetricExporter(OTLPMetricExporter):
    """Exports these histograms, and the metrics of a page, together with the SDK's own metrics."""

    def __init__(
        self,
        instruments: Sequence[HistogramInstrument],
        page: PrometheusToOtelBridge | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._instruments = instruments
        self._page = page
        preferred = self._preferred_temporality or {}
        self._temporality = preferred.get(Instrument, AggregationTemporality.CUMULATIVE)

    @override
    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        collected = [each.collect(self._temporality) for each in self._instruments]
        metrics = [metric for metric in collected if metric is not None]
        if self._page is not None:
            metrics += self._page.collect()
        resources = [
            ResourceMetrics(
                each.resource, [_append_metrics(scope, metrics) for scope in each.scope_metrics], ""
            )
            for each in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(resources), timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


def _append_metrics(scope: ScopeMetrics, metrics: Sequence[Metric]) -> ScopeMetrics:
    """Add the metrics to our own scope, which must not appear twice in a request."""
    if scope.scope.name != INSTRUMENTATION_SCOPE:
        return scope
    return ScopeMetrics(scope.scope, [*scope.metrics, *metrics], scope.schema_url)
