"""What survives when clients leave and processes are killed."""

import concurrent.futures
import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import (
    INTERPRETER,
    OUTPUTS,
    RunningGateway,
    make_client,
    make_settings,
    make_settings_without_code,
    read_logs,
)
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer, code_call, text_answer
from tests.support.raw_model_server import chunk, stream
from tests.support.waiting import becomes_true


def test_a_client_that_leaves_takes_its_run_along(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("import time\nfor n in range(600): time.sleep(0.1)"))
    with gateway.client.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], stream=True
    ) as events:
        response_id = ""
        container = ""
        for event in events:
            if event.type == "response.created":
                response_id = event.response.id
            elif event.type == "response.output_item.added":
                container = getattr(event.item, "container_id", "")
            elif event.type == "response.code_interpreter_call.interpreting":
                break
    assert becomes_true(lambda: gateway.client.responses.retrieve(response_id).status == "cancelled")
    # The code was interrupted, not the sandbox ended: it can be used at once.
    gateway.model.script(code_call("print(n < 600)"), text_answer("ok"))
    tool: Any = {"type": "code_interpreter", "container": container}
    after = gateway.client.responses.create(model="scripted", input="?", tools=[tool], include=OUTPUTS)
    assert read_logs(after) == "True\n"


def test_a_client_that_leaves_while_the_model_writes(gateway: RunningGateway) -> None:
    gate, _ = gateway.model.event()
    gateway.model.script(stream(chunk({"content": "Hel"}), gate))
    response_id = ""
    with gateway.client.responses.create(model="scripted", input="?", stream=True) as events:
        for event in events:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
    assert becomes_true(lambda: gateway.client.responses.retrieve(response_id).status == "cancelled")
    assert gateway.client.responses.retrieve(response_id).output_text == "Hel"


def test_200_streams_at_once(gateway: RunningGateway) -> None:
    gateway.model.script(*(text_answer("a", "b", "c") for _ in range(200)))

    def one(_: int) -> str:
        with gateway.client.responses.create(model="scripted", input="?", stream=True) as events:
            return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        assert list(pool.map(one, range(200))) == ["abc"] * 200


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        acknowledged: list[str] = []
        for _ in range(3):
            running = gateway_process.start_gateway(tmp_path, make_settings_without_code(model))
            model.script(*(text_answer("kept") for _ in range(1000)))
            stop = threading.Timer(0.5, running.kill)
            with make_client(running) as client:
                for earlier in acknowledged[-5:]:
                    assert client.responses.retrieve(earlier).output_text == "kept"
                stop.start()
                with contextlib.suppress(openai.APIConnectionError):
                    while True:
                        acknowledged.append(client.responses.create(model="scripted", input="?").id)
            stop.join()
        with (
            gateway_process.run_gateway(tmp_path, make_settings_without_code(model)) as running,
            make_client(running) as client,
        ):
            assert len(acknowledged) >= 3
            for earlier in acknowledged:
                assert client.responses.retrieve(earlier).output_text == "kept"
            model.script(text_answer("on"))
            after = client.responses.create(
                model="scripted", input="?", previous_response_id=acknowledged[-1]
            )
            assert after.output_text == "on"


def test_what_was_running_is_failed_and_nothing_runs_twice(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        running = gateway_process.start_gateway(tmp_path, make_settings(model))
        model.script(code_call("import time; time.sleep(30)"), text_answer("never"))
        response_id = ""
        with (
            make_client(running) as client,
            client.responses.create(model="scripted", input="?", tools=[INTERPRETER], stream=True) as events,
        ):
            for event in events:
                if event.type == "response.created":
                    response_id = event.response.id
                if event.type == "response.code_interpreter_call.interpreting":
                    assert client.responses.retrieve(response_id).status == "in_progress"
                    running.kill()
                    break
        with (
            gateway_process.run_gateway(tmp_path, make_settings(model)) as again,
            make_client(again) as client,
        ):
            found = client.responses.retrieve(response_id)
            assert found.status == "failed"
            assert found.error is not None
            assert "stopped while" in found.error.message
            assert (
                len(model.requests) == 1
            )  # the second turn never came, and the first was not asked for again


def test_a_second_gateway_on_the_same_file_refuses(tmp_path: Path) -> None:
    with (
        ScriptedModelServer() as model,
        gateway_process.run_gateway(tmp_path, make_settings_without_code(model)),
        pytest.raises(AssertionError, match="another"),
    ):
        gateway_process.start_gateway(tmp_path, make_settings_without_code(model))


def test_a_graceful_end(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        running = gateway_process.start_gateway(tmp_path, make_settings_without_code(model))
        gate, let_go = model.event()
        model.script(stream(chunk({"content": "x"}), gate, chunk(finish="stop"), b"data: [DONE]\n\n"))
        seen: list[str] = []
        with (
            make_client(running) as client,
            client.responses.create(model="scripted", input="?", stream=True) as events,
        ):
            for event in events:
                seen.append(event.type)
                if event.type == "response.output_text.delta":
                    running.process.terminate()
                    threading.Timer(0.5, let_go).start()
        assert seen[-1] == "response.completed"
        assert running.wait_for_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_and_what_ran_has_failed(
    tmp_path: Path, number: signal.Signals
) -> None:
    with ScriptedModelServer() as model:
        gate, _ = model.event()
        running = gateway_process.start_gateway(tmp_path, make_settings_without_code(model))
        model.script(stream(chunk({"content": "x"}), gate))
        response_id, began = "", 0.0
        with (
            make_client(running) as client,
            client.responses.create(model="scripted", input="?", stream=True) as events,
            contextlib.suppress(httpx.TransportError, openai.APIError),
        ):
            for event in events:
                if event.type == "response.created":
                    response_id = event.response.id
                elif event.type == "response.output_text.delta":
                    running.process.send_signal(number)
                    assert becomes_true(lambda: not accepts(running))
                    began = time.monotonic()
                    running.process.send_signal(number)
        assert running.wait_for_exit() == 0
        assert time.monotonic() - began < 10  # the grace would have been 30 s
        with (
            gateway_process.run_gateway(tmp_path, make_settings_without_code(model)) as again,
            make_client(again) as client,
        ):
            found = client.responses.retrieve(response_id)
            assert found.status == "failed"
            assert found.error is not None
            assert "stopped while" in found.error.message
            assert len(model.requests) == 1


def test_one_signal_cancels_and_keeps_what_runs_beyond_the_grace(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        gate, _ = model.event()
        settings = {**make_settings_without_code(model), "server": {"shutdown_grace": 0.5}}
        running = gateway_process.start_gateway(tmp_path, settings)
        model.script(stream(chunk({"content": "x"}), gate))
        last: Any = None
        with (
            make_client(running) as client,
            client.responses.create(model="scripted", input="?", stream=True) as events,
        ):
            for last in events:
                if last.type == "response.output_text.delta":
                    running.process.terminate()
        assert running.wait_for_exit() == 0
        assert last.response.status == "cancelled"
        with gateway_process.run_gateway(tmp_path, settings) as again, make_client(again) as client:
            found = client.responses.retrieve(last.response.id)
            assert (found.status, found.output_text) == ("cancelled", "x")


def accepts(running: GatewayProcess) -> bool:
    try:
        httpx.get(running.url.replace("/v1", "/healthz"), timeout=5)
    except httpx.TransportError:
        return False
    return True
