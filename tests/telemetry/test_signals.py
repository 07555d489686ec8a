"""The standard variables, and the end when nobody answers; imports `telemetry`, `wiring` and the support."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack

import pytest

from fumehood import wiring
from fumehood.config import Config, Misconfigured, TelemetrySettings
from fumehood.figures import Figures
from fumehood.telemetry.conventions import CAPTURE
from fumehood.telemetry.signals import EMIT, Signals, SignalSettings
from tests.support.otlp import PATIENCE, Receiver, attributes
from tests.telemetry.test_observing import observed

ALL = {"/v1/traces", "/v1/metrics", "/v1/logs"}
LOGGED = {EMIT: "true"}


@pytest.fixture
def set_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Mapping[str, str]]:
    """The SDK looks at the variables of the process."""

    def variables(chosen: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        return chosen

    return variables


def send(environ: Mapping[str, str], settings: SignalSettings | None = None) -> None:
    """One response, and whatever is told of it."""

    async def run() -> None:
        signals = Signals(settings or SignalSettings(), environ, Figures())
        try:
            assert await observed(signals.observer, told=False) == "completed"
        finally:
            await signals.close()

    asyncio.run(run())


type SetAll = Callable[[Mapping[str, str]], Mapping[str, str]]


def test_one_address_is_for_all_signals(receiver: Receiver, set_all: SetAll) -> None:
    send(set_all(LOGGED | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address}))
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


def test_the_setting_is_such_an_address_and_the_variable_of_one_signal_goes_before_it(
    receiver: Receiver, set_all: SetAll
) -> None:
    environ = set_all(LOGGED | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{receiver.address}/mine/v1/metrics"})
    send(environ, SignalSettings(endpoint=f"{receiver.address}/"))
    assert receiver.paths() == {"/v1/traces", "/mine/v1/metrics", "/v1/logs"}


def test_headers_are_sent(receiver: Receiver, set_all: SetAll) -> None:
    send(
        set_all(
            LOGGED
            | {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20all",
                "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20traces",
            }
        )
    )
    assert {(path, headers["authorization"]) for path, headers in receiver.asked} == {
        ("/v1/traces", "Bearer traces"),
        ("/v1/metrics", "Bearer all"),
        ("/v1/logs", "Bearer all"),
    }


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_a_signal_that_nobody_wants_is_not_sent(signal: str, receiver: Receiver, set_all: SetAll) -> None:
    chosen = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, f"OTEL_{signal.upper()}_EXPORTER": "none"}
    send(set_all(LOGGED | chosen))
    assert receiver.paths() == ALL - {f"/v1/{signal}"}


def test_the_sampler_is_the_operators(receiver: Receiver, set_all: SetAll) -> None:
    send(
        set_all(
            LOGGED
            | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "OTEL_TRACES_SAMPLER": "always_off"}
            | {CAPTURE: "span_only"}
        )
    )
    assert receiver.paths() == ALL - {"/v1/traces"}


def test_the_service_and_its_resource_are_called_as_the_operator_says(
    receiver: Receiver, set_all: SetAll
) -> None:
    chosen = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=one,deployment.environment.name=test",
    }
    send(set_all(chosen))
    assert {(each["service.name"], each["deployment.environment.name"]) for each in receiver.resources} == {
        ("one", "test")
    }
    receiver.resources.clear()
    send(set_all(chosen | {"OTEL_SERVICE_NAME": "two"}))
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
def test_content_is_where_the_operator_wants_it(
    capture: str, spans: bool, events: bool, receiver: Receiver, set_all: SetAll
) -> None:
    send(
        set_all({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, CAPTURE: capture}),
        SignalSettings(profile="option1"),
    )
    told = {span.name: attributes(span.attributes) for _, span in receiver.spans}
    for name in ("invoke_agent", "chat scripted"):
        assert ("gen_ai.output.messages" in told[name]) is spans
        assert ("gen_ai.input.messages" in told[name]) is spans
    assert ("gen_ai.tool.call.result" in told["execute_tool echo"]) is spans
    assert bool(receiver.events) is events
    assert all("gen_ai.output.messages" in attributes(each.attributes) for each in receiver.events)
    if not spans and not events:
        assert "Done" not in str(told)


class Silent:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    running = Silent()
    yield running
    running.close()


def test_whoever_does_not_answer_does_not_hold_up_the_end(silent: Silent, set_all: SetAll) -> None:
    environ = set_all(LOGGED | {"OTEL_EXPORTER_OTLP_ENDPOINT": silent.address})
    began = time.monotonic()
    send(environ)
    assert time.monotonic() - began < 8  # it would be ten for every signal


def test_how_long_an_answer_may_take_is_the_operators(
    silent: Silent, set_all: SetAll, caplog: pytest.LogCaptureFixture
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
        send(
            set_all(
                {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.1"}
            )
        )
        assert gave_up.wait(PATIENCE)
        assert time.monotonic() - began < 8  # ten seconds are usual
    finally:
        logging.getLogger("opentelemetry").removeHandler(handler)


# ---- what a gateway makes of it ---------------------------------------------------------------------------------


async def signals_of(environ: Mapping[str, str], **settings: object) -> Signals | None:
    async with AsyncExitStack() as stack:
        config = Config(telemetry=TelemetrySettings(**settings))  # type: ignore[arg-type]
        return wiring.open_signals(config, environ, Figures(), stack)


async def test_nothing_is_there_unless_it_is_asked_for() -> None:
    assert await signals_of({}) is None
    assert await signals_of({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert await signals_of({"OTEL_SDK_DISABLED": "True"}, otlp="http://127.0.0.1:9") is None


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_a_signal_without_an_address_is_sent_nowhere(
    signal: str, receiver: Receiver, set_all: SetAll
) -> None:
    variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
    environ = set_all(LOGGED | {variable: f"{receiver.address}/v1/{signal}"})
    assert asyncio.run(signals_of(environ)) is not None
    send(environ)
    assert receiver.paths() == {f"/v1/{signal}"}


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {}, "OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/json"}, {}, "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "collector:4318"}, {}, "_LOGS_ENDPOINT: an address is written"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, {}, "OTEL_METRICS_EXPORTER: otlp and none"),
        ({}, {"redact": "no.such:thing"}, "telemetry.redact: no.such:thing cannot be found"),
        ({}, {"redact": "json"}, "telemetry.redact: json cannot be found"),
        ({}, {"redact": "json:__name__"}, "is no function"),
    ],
)
async def test_what_is_not_there_is_said_at_once(
    environ: Mapping[str, str], settings: Mapping[str, object], words: str
) -> None:
    with pytest.raises(Misconfigured, match=words):
        await signals_of(environ, otlp="http://127.0.0.1:9", **settings)


def test_a_redactor_that_gives_back_no_text_is_not_believed() -> None:
    redact = wiring.find_redactor("json:dumps")
    assert redact is not None
    assert redact("a") == '"a"'
    broken = wiring.find_redactor("builtins:len")
    assert broken is not None
    with pytest.raises(TypeError):
        broken("a")
