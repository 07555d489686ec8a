"""Metrics of runs, turns, calls and phases, as they are exported."""

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric

from fumehood.protocol.model_turns import ModelRequest, ModelTurnEnded
from fumehood.protocol.openai.responses import Usage
from fumehood.telemetry.histogram_export import HistogramInstrument
from fumehood.telemetry.operation_records import (
    RecordDispatcher,
    SandboxPhaseRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.otel_metrics import OTHER_MODEL, ModelNameLimiter, OtelMetrics
from fumehood.telemetry.semantic_conventions import map_provider
from fumehood.testing import says
from fumehood.timed_steps import TimedStep
from tests.support.turn_records import start_turn
from tests.telemetry.test_instrumentation import run_instrumented

CUMULATIVE, DELTA = AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA


def read_points(metrics: OtelMetrics, name: str) -> list[HistogramDataPoint]:
    (metric,) = [each.collect(CUMULATIVE) for each in metrics.instruments if each.name == name]
    return [] if metric is None else list(_points(metric))


def _points(metric: Metric | None) -> Sequence[HistogramDataPoint]:
    assert metric is not None
    assert isinstance(metric.data, Histogram)
    return metric.data.data_points


def read_values(metrics: OtelMetrics, name: str) -> list[tuple[dict[str, Any], int, float]]:
    return [(dict(each.attributes or {}), each.count, each.sum) for each in read_points(metrics, name)]


CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "fumehood",
    "gen_ai.request.model": "scripted",
}
RUN = {
    "gen_ai.operation.name": "invoke_agent",
    "gen_ai.provider.name": "fumehood",
    "gen_ai.request.model": "scripted",
    "gen_ai.response.model": "scripted",
}


async def test_a_streamed_run_with_a_call_is_counted_by_the_conventions() -> None:
    metrics = OtelMetrics(ModelNameLimiter())
    assert await run_instrumented(RecordDispatcher([metrics])) == "completed"
    assert read_values(metrics, "gen_ai.client.token.usage") == [
        (CHAT | {"gen_ai.token.type": "input"}, 2, 20),
        (CHAT | {"gen_ai.token.type": "output"}, 2, 6),
    ]
    counted = {
        each.name: [(dict(point.attributes or {}), point.count) for point in read_points(metrics, each.name)]
        for each in metrics.instruments
        if each.name != "gen_ai.client.token.usage"
    }
    events = counted.pop("gen_ai.client.operation.time_per_output_chunk")
    assert counted == {
        "gen_ai.client.operation.duration": [(CHAT, 2)],
        "gen_ai.client.operation.time_to_first_chunk": [(CHAT, 2)],
        "gen_ai.server.request.duration": [(RUN, 1)],
        "gen_ai.server.time_to_first_token": [(RUN, 1)],
        "gen_ai.server.time_per_output_token": [(RUN, 1)],
        "gen_ai.invoke_agent.duration": [({"gen_ai.request.model": "scripted"}, 1)],
        "gen_ai.invoke_agent.inference_calls": [({}, 1)],
        "gen_ai.invoke_agent.tool_calls": [({}, 1)],
        "gen_ai.execute_tool.duration": [({"gen_ai.tool.name": "echo", "gen_ai.tool.type": "extension"}, 1)],
        "fumehood.sandbox.phase.duration": [],
        "http.server.request.duration": [],
    }
    assert [labels for labels, _ in events] == [CHAT]
    (turns,) = read_points(metrics, "gen_ai.invoke_agent.inference_calls")
    (calls,) = read_points(metrics, "gen_ai.invoke_agent.tool_calls")
    assert (turns.sum, calls.sum) == (2, 1)


async def test_responses_that_are_not_streamed_have_no_time_to_first_chunk() -> None:
    metrics = OtelMetrics(ModelNameLimiter())
    await run_instrumented(RecordDispatcher([metrics]), stream=False)
    found = {each.name for each in metrics.instruments if read_points(metrics, each.name)}
    assert not found & {
        "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.operation.time_per_output_chunk",
        "gen_ai.server.time_to_first_token",
    }
    assert "gen_ai.client.operation.duration" in found


def create_turn(model: str = "m", *, error: str = "", server: tuple[str, int] | None = None) -> TurnRecord:
    record = start_turn(ModelRequest(model=model), server)
    record.error = error
    if not error:
        record.add_events(says("x"))
        record.add_events([ModelTurnEnded("stop", Usage(input_tokens=1, output_tokens=2))])
    record.duration_ns = 1
    return record


def test_errors_and_servers_are_labels() -> None:
    metrics = OtelMetrics(ModelNameLimiter(["m"]))
    metrics.on_end(create_turn(error="server_error", server=("api.openai.com", 443)))
    ((labels, count, _),) = read_values(metrics, "gen_ai.client.operation.duration")
    assert (labels, count) == (
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "m",
            "server.address": "api.openai.com",
            "server.port": 443,
            "error.type": "server_error",
        },
        1,
    )
    assert read_points(metrics, "gen_ai.client.token.usage") == []


@pytest.mark.parametrize("error", ["", "model_not_found"])
def test_invented_model_names_do_not_grow_the_metrics(error: str) -> None:
    metrics = OtelMetrics(ModelNameLimiter(["known"]))
    for number in range(300):
        metrics.on_end(create_turn(f"invented-{number}", error=error))
    metrics.on_end(create_turn("known", error=error))
    models = {
        labels["gen_ai.request.model"]: count
        for labels, count, _ in read_values(metrics, "gen_ai.client.operation.duration")
    }
    assert models["known"] == 1
    assert models[OTHER_MODEL] == (300 if error else 200)
    assert len(models) == (2 if error else 102)


def test_an_instrument_has_a_bound_of_its_own() -> None:
    instrument = HistogramInstrument("x", "s", "", (1,))
    for number in range(3000):
        instrument.series((("label", number),)).observe(1)
    found = _points(instrument.collect(CUMULATIVE))
    assert len(found) == 2001
    assert found[-1].attributes == {"otel.metric.overflow": True}
    assert found[-1].count == 1000


def test_deltas_and_sums() -> None:
    instrument = HistogramInstrument("x", "s", "", (1, 2))
    for temporality, expected in ((CUMULATIVE, [1, 2]), (DELTA, [1, 1])):
        instrument = HistogramInstrument("x", "s", "", (1, 2))
        instrument.series(()).observe(1.5)
        first = _points(instrument.collect(temporality))[0]
        instrument.series(()).observe(5)
        second = _points(instrument.collect(temporality))[0]
        assert [first.count, second.count] == expected
        assert (first.bucket_counts, second.bucket_counts[2]) == ([0, 1, 0], 1)
        assert (first.start_time_unix_nano == second.start_time_unix_nano) is (temporality is CUMULATIVE)
    assert instrument.collect(DELTA) is None


def test_phases_and_starts_are_counted() -> None:
    metrics = OtelMetrics(ModelNameLimiter())
    call = ToolCallRecord(name="code_interpreter", call_id="c")
    acquired, broken = TimedStep("acquire", None), TimedStep("run", None)
    acquired.set_attribute("start", "warm")
    metrics.on_end(SandboxPhaseRecord(timing=acquired, call=call, duration_ns=1_000_000))
    metrics.on_end(SandboxPhaseRecord(timing=broken, call=call, duration_ns=2_000_000, error="cancelled"))
    assert read_values(metrics, "fumehood.sandbox.phase.duration") == [
        ({"fumehood.sandbox.phase": "acquire"}, 1, 0.001),
        ({"fumehood.sandbox.phase": "run", "error.type": "cancelled"}, 1, 0.002),
    ]


@pytest.mark.parametrize(
    ("host", "provider"),
    [
        ("API.openai.com", "openai"),
        ("mine.openai.azure.com", "azure.ai.openai"),
        ("openai.com.example", "fumehood"),
        ("127.0.0.1", "fumehood"),
    ],
)
def test_vendors_are_known_by_their_servers(host: str, provider: str) -> None:
    assert map_provider((host, 443)) == provider
    assert map_provider(None) == "fumehood"
