"""The metrics page as OpenTelemetry exports it."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import Gauge, Sum

from fumehood.telemetry.prometheus_to_otel import PrometheusToOtelBridge, to_otel_name

PAGE = b"""\
# HELP fumehood_sandbox_pool_available Sandboxes in the pool.
# TYPE fumehood_sandbox_pool_available gauge
fumehood_sandbox_pool_available 3
# HELP fumehood_limit_rejections_total Requests rejected by a limit.
# TYPE fumehood_limit_rejections_total counter
fumehood_limit_rejections_total{limit="rate"} 2
# HELP fumehood_sandbox_memory_bytes Memory.
# TYPE fumehood_sandbox_memory_bytes gauge
fumehood_sandbox_memory_bytes 1.5
# HELP fumehood_request_duration_seconds Time.
# TYPE fumehood_request_duration_seconds histogram
fumehood_request_duration_seconds_bucket{le="+Inf"} 1
fumehood_request_duration_seconds_count 1
fumehood_request_duration_seconds_sum 1
# HELP fumehood_sandbox_starts_total Sandboxes handed out.
# TYPE fumehood_sandbox_starts_total counter
fumehood_sandbox_starts_total{kind="warm"} 1
# HELP other Not ours.
# TYPE other gauge
other 1
"""


def points(data: Any) -> list[tuple[dict[str, Any], float]]:
    return [(dict(point.attributes), point.value) for point in data.data_points]


async def test_gauges_and_counters_are_exported_with_names_and_units_of_opentelemetry() -> None:
    page = PrometheusToOtelBridge()

    async def read() -> bytes:
        return PAGE

    page.open(read)
    found = {metric.name: metric for metric in await asyncio.to_thread(page.collect)}
    assert set(found) == {
        "fumehood.sandbox.pool_available",
        "fumehood.limit_rejections",
        "fumehood.sandbox.memory",
    }
    available, rejected = found["fumehood.sandbox.pool_available"], found["fumehood.limit_rejections"]
    assert isinstance(available.data, Gauge)
    assert points(available.data) == [({}, 3)]
    assert isinstance(rejected.data, Sum)
    assert rejected.data.is_monotonic
    assert points(rejected.data) == [({"limit": "rate"}, 2)]
    assert (found["fumehood.sandbox.memory"].unit, available.description) == ("By", "Sandboxes in the pool.")


async def test_the_last_page_is_exported_after_the_loop_has_ended() -> None:
    page = PrometheusToOtelBridge()

    async def read() -> bytes:
        return PAGE

    page.open(read)
    await page.close()
    assert len(page.collect()) == 3


def test_without_a_page_there_is_nothing() -> None:
    assert PrometheusToOtelBridge().collect() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fumehood_sandbox_pool_size", ("fumehood.sandbox.pool_size", "1")),
        ("fumehood_file_bytes_total", ("fumehood.file", "By")),
        ("fumehood_open_streams", ("fumehood.open_streams", "1")),
    ],
)
def test_names(name: str, expected: tuple[str, str]) -> None:
    assert to_otel_name(name) == expected
