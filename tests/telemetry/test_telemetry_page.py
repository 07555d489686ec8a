"""docs/telemetry.md names all metrics, events and spans, and no other."""

import re
from pathlib import Path
from typing import get_args

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fumehood import containers
from fumehood.gateway_stats import GatewayStats
from fumehood.telemetry import log_event_emitter
from fumehood.telemetry.content_capture import ProfileName
from fumehood.telemetry.otel_metrics import ModelNameLimiter, OtelMetrics

TEXT = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")


def table(title: str) -> set[str]:
    section = re.split(r"^#{2,3} ", TEXT.partition(f"\n### {title}\n")[2], flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_every_metric_is_on_the_page() -> None:
    metrics, figures, reader = OtelMetrics(ModelNameLimiter()), GatewayStats(), InMemoryMetricReader()
    metrics.register_observables(
        MeterProvider([reader], shutdown_on_exit=False).get_meter("test"), figures, lambda: 0
    )
    metrics.sandbox_starts["warm"] += 1
    figures.containers.ended_calls["ok"] += 1
    figures.containers.ended["idle"] += 1
    data = reader.get_metrics_data()
    assert data is not None
    observed = {
        metric.name
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert table("Metrics of the gateway") == observed | {each.name for each in metrics.instruments}


def test_every_span_is_on_the_page() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(containers.__path__[0]).glob("*.py"))
    phases = set(re.findall(r'\b(?:start_timing|split_off_start)\(\s*"(\w+)"', source))
    others = {"METHOD ROUTE", "invoke_agent", "chat MODEL", "execute_tool NAME"}
    assert table("Spans of the gateway") == others | {f"sandbox {phase}" for phase in phases}


def test_every_event_is_on_the_page() -> None:
    sent = {
        log_event_emitter.INFERENCE_DETAILS,
        log_event_emitter.OPERATION_EXCEPTION,
        log_event_emitter.TOOL_FAILED,
        log_event_emitter.SANDBOX_LOST,
    }
    assert table("Events of the gateway") == sent


def test_every_profile_is_on_the_page() -> None:
    (line,) = [line for line in TEXT.splitlines() if line.startswith("| `telemetry.profile` |")]
    assert set(get_args(ProfileName.__value__)) <= set(re.findall(r"`([\w-]+)`", line))
