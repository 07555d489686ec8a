"""Distributions in plain numbers, and how they get into what OpenTelemetry's SDK sends.

An instrument of the SDK takes about fourteen microseconds for every number, which is more than the gateway has for
a streamed event. So numbers are counted here, and become points when the SDK's reader asks for them.
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

from fumehood.metrics import BucketHistogram

INSTRUMENTATION_SCOPE = "fumehood"
_MAX_SERIES = 2000  # of one instrument, as in the SDK
_OVERFLOW_LABELS = (("otel.metric.overflow", True),)
_NOT_RECORDED = cast(
    "float", None
)  # the least and the greatest are not kept; on the wire they may be left out

type Labels = tuple[tuple[str, str | int | bool], ...]


class HistogramInstrument:
    """One instrument: a distribution for every set of labels."""

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

    def collect(self, temporality: AggregationTemporality) -> Metric | None:
        """All of it, or what has come since the last time; None if there is nothing. For one thread, the reader's."""
        began, now = self._interval_start, time_ns()
        delta = temporality is AggregationTemporality.DELTA
        points: list[HistogramDataPoint] = []
        for labels, point in list(self._series.items()):
            numbers, total = list(point.counts), point.sum
            if delta:
                before, total_before = self._exported.get(labels, ([0] * len(numbers), 0.0))
                self._exported[labels] = numbers, total
                numbers = [number - earlier for number, earlier in zip(numbers, before, strict=True)]
                total -= total_before
            if any(numbers):
                points.append(self._build_data_point(labels, began, now, numbers, total))
        if delta:
            self._interval_start = now
        return (
            Metric(self.name, self._description, self._unit, Histogram(points, temporality))
            if points
            else None
        )

    def _build_data_point(
        self, labels: Labels, began: int, now: int, numbers: Sequence[int], total: float
    ) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=began,
            time_unix_nano=now,
            count=sum(numbers),
            sum=total,
            bucket_counts=numbers,
            explicit_bounds=self._bounds,
            min=_NOT_RECORDED,
            max=_NOT_RECORDED,
        )


class HistogramMetricExporter(OTLPMetricExporter):
    """Sends these distributions with what the SDK has counted itself."""

    def __init__(self, instruments: Sequence[HistogramInstrument], **settings: Any) -> None:
        super().__init__(**settings)
        self._instruments = instruments
        chosen = self._preferred_temporality or {}
        self._temporality = chosen.get(Instrument, AggregationTemporality.CUMULATIVE)

    @override
    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        read = [each.collect(self._temporality) for each in self._instruments]
        found = [metric for metric in read if metric is not None]
        resources = [
            ResourceMetrics(
                each.resource, [_append_metrics(scope, found) for scope in each.scope_metrics], ""
            )
            for each in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(resources), timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


def _append_metrics(scope: ScopeMetrics, metrics: Sequence[Metric]) -> ScopeMetrics:
    """What is sent of one scope has to be together."""
    if scope.scope.name != INSTRUMENTATION_SCOPE:
        return scope
    return ScopeMetrics(scope.scope, [*scope.metrics, *metrics], scope.schema_url)
