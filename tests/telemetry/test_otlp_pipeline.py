"""The standard environment variables, and shutdown with an unresponsive collector."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack

import pytest

from fumehood import wiring
from fumehood.gateway_config import ConfigError, GatewayConfig, TelemetrySettings
from fumehood.gateway_stats import GatewayStats
from fumehood.telemetry.otlp_pipeline import EMIT_EVENT_VARIABLE, OtlpPipeline, OtlpPipelineSettings
from fumehood.telemetry.semantic_conventions import CAPTURE_CONTENT_VARIABLE
from tests.support.otlp_receiver import TIMEOUT_SECONDS, OtlpReceiver, decode_attributes
from tests.telemetry.test_instrumentation import run_instrumented

ALL = {"/v1/traces", "/v1/metrics", "/v1/logs"}
LOGGED = {EMIT_EVENT_VARIABLE: "true"}


@pytest.fixture
def set_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Mapping[str, str]]:
    """The SDK looks at the variables of the process."""

    def variables(chosen: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        return chosen

    return variables


def run_pipeline(environ: Mapping[str, str], settings: OtlpPipelineSettings | None = None) -> None:
    """Run one response and export its telemetry."""

    async def run() -> None:
        signals = OtlpPipeline(settings or OtlpPipelineSettings(), environ, GatewayStats())
        try:
            assert await run_instrumented(signals.dispatcher, flush=False) == "completed"
        finally:
            await signals.close()

    asyncio.run(run())


type SetVariables = Callable[[Mapping[str, str]], Mapping[str, str]]


def test_one_endpoint_serves_all_signals(receiver: OtlpReceiver, set_all: SetVariables) -> None:
    run_pipeline(set_all(LOGGED | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address}))
    assert receiver.paths() == ALL
    assert {name for _, span in receiver.spans for name in [span.name]} == {
        *("invoke_agent", "chat scripted", "execute_tool echo")
    }
    assert [record.event_name for record in receiver.events] == [
        "gen_ai.client.inference.operation.details"
    ] * 2
    assert {event.span_id for event in receiver.events} == {
        span.span_id for _, span in receiver.spans if span.name == "chat scripted"
    }
    assert "gen_ai.client.operation.duration" in receiver.metrics
    assert {each["service.name"] for each in receiver.resources} == {"fumehood"}


def test_the_variable_of_one_signal_precedes_the_setting(
    receiver: OtlpReceiver, set_all: SetVariables
) -> None:
    environ = set_all(LOGGED | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{receiver.address}/mine/v1/metrics"})
    run_pipeline(environ, OtlpPipelineSettings(endpoint=f"{receiver.address}/"))
    assert receiver.paths() == {"/v1/traces", "/mine/v1/metrics", "/v1/logs"}


def test_headers_are_sent(receiver: OtlpReceiver, set_all: SetVariables) -> None:
    run_pipeline(
        set_all(
            LOGGED
            | {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20all",
                "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20traces",
            }
        )
    )
    assert {(path, headers["authorization"]) for path, headers in receiver.received_requests} == {
        ("/v1/traces", "Bearer traces"),
        ("/v1/metrics", "Bearer all"),
        ("/v1/logs", "Bearer all"),
    }


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_a_disabled_signal_is_not_exported(
    signal: str, receiver: OtlpReceiver, set_all: SetVariables
) -> None:
    chosen = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, f"OTEL_{signal.upper()}_EXPORTER": "none"}
    run_pipeline(set_all(LOGGED | chosen))
    assert receiver.paths() == ALL - {f"/v1/{signal}"}


def test_the_sampler_is_configurable(receiver: OtlpReceiver, set_all: SetVariables) -> None:
    run_pipeline(
        set_all(
            LOGGED
            | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "OTEL_TRACES_SAMPLER": "always_off"}
            | {CAPTURE_CONTENT_VARIABLE: "span_only"}
        )
    )
    assert receiver.paths() == ALL - {"/v1/traces"}


def test_the_resource_is_configurable(receiver: OtlpReceiver, set_all: SetVariables) -> None:
    chosen = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=one,deployment.environment.name=test",
    }
    run_pipeline(set_all(chosen))
    assert {(each["service.name"], each["deployment.environment.name"]) for each in receiver.resources} == {
        ("one", "test")
    }
    receiver.resources.clear()
    run_pipeline(set_all(chosen | {"OTEL_SERVICE_NAME": "two"}))
    assert {each["service.name"] for each in receiver.resources} == {"two"}


@pytest.mark.parametrize(
    ("capture", "spans", "events"),
    [
        ("", False, False),
        ("true", True, False),
        ("SPAN_ONLY", True, False),
        ("event_only", False, True),
        ("span_and_event", True, True),
        ("no_content", False, False),
        ("yes please", False, False),
    ],
)
def test_content_goes_where_the_variable_says(
    capture: str, spans: bool, events: bool, receiver: OtlpReceiver, set_all: SetVariables
) -> None:
    run_pipeline(
        set_all({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, CAPTURE_CONTENT_VARIABLE: capture}),
        OtlpPipelineSettings(profile="option1"),
    )
    attributes = {span.name: decode_attributes(span.attributes) for _, span in receiver.spans}
    for name in ("invoke_agent", "chat scripted"):
        assert ("gen_ai.output.messages" in attributes[name]) is spans
        assert ("gen_ai.input.messages" in attributes[name]) is spans
    assert ("gen_ai.tool.call.result" in attributes["execute_tool echo"]) is spans
    assert bool(receiver.events) is events
    assert all("gen_ai.output.messages" in decode_attributes(each.attributes) for each in receiver.events)
    if not spans and not events:
        assert "Done" not in str(attributes)


class SilentServer:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    running = SilentServer()
    yield running
    running.close()


def test_a_silent_collector_does_not_delay_shutdown(silent: SilentServer, set_all: SetVariables) -> None:
    environ = set_all(LOGGED | {"OTEL_EXPORTER_OTLP_ENDPOINT": silent.address})
    began = time.monotonic()
    run_pipeline(environ)
    assert time.monotonic() - began < 8  # it would be ten for every signal


def test_the_export_timeout_is_configurable(
    silent: SilentServer, set_all: SetVariables, caplog: pytest.LogCaptureFixture
) -> None:
    gave_up = threading.Event()

    class Failed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Failed to export spans" in record.getMessage():
                gave_up.set()

    handler = Failed()
    logging.getLogger("opentelemetry").addHandler(handler)
    try:
        began = time.monotonic()
        address = f"{silent.address}/v1/traces"
        run_pipeline(
            set_all(
                {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.1"}
            )
        )
        assert gave_up.wait(TIMEOUT_SECONDS)
        assert time.monotonic() - began < 8  # ten seconds are usual
    finally:
        logging.getLogger("opentelemetry").removeHandler(handler)


# ---- what a gateway makes of it ---------------------------------------------------------------------------------


async def open_pipeline(environ: Mapping[str, str], **settings: object) -> OtlpPipeline | None:
    async with AsyncExitStack() as stack:
        config = GatewayConfig(telemetry=TelemetrySettings(**settings))  # type: ignore[arg-type]
        return wiring.open_telemetry(config, environ, GatewayStats(), stack)


async def test_telemetry_is_off_by_default() -> None:
    assert await open_pipeline({}) is None
    assert await open_pipeline({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert await open_pipeline({"OTEL_SDK_DISABLED": "True"}, otlp="http://127.0.0.1:9") is None


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_a_signal_without_an_endpoint_is_not_exported(
    signal: str, receiver: OtlpReceiver, set_all: SetVariables
) -> None:
    variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
    environ = set_all(LOGGED | {variable: f"{receiver.address}/v1/{signal}"})
    assert asyncio.run(open_pipeline(environ)) is not None
    run_pipeline(environ)
    assert receiver.paths() == {f"/v1/{signal}"}


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {}, "OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/json"}, {}, "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "collector:4318"}, {}, "_LOGS_ENDPOINT: write a URL"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, {}, "OTEL_METRICS_EXPORTER: only otlp and none"),
        ({}, {"redact": "no.such:thing"}, "telemetry.redact: no.such:thing cannot be found"),
        ({}, {"redact": "json"}, "telemetry.redact: json cannot be found"),
        ({}, {"redact": "json:__name__"}, "is no function"),
    ],
)
async def test_invalid_settings_raise_at_start(
    environ: Mapping[str, str], settings: Mapping[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await open_pipeline(environ, otlp="http://127.0.0.1:9", **settings)


def test_a_redactor_must_return_text() -> None:
    redact = wiring.load_redactor("json:dumps")
    assert redact is not None
    assert redact("a") == '"a"'
    broken = wiring.load_redactor("builtins:len")
    assert broken is not None
    with pytest.raises(TypeError):
        broken("a")
