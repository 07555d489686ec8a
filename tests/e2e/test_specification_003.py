"""What of specification 003 only the whole gateway can show.

The rest is in tests/tools/test_specification_003.py; names are as there.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import RunningGateway, make_client, make_settings
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer, tool_call, tool_calls
from tests.support.sandbox_runs import has_cgroups

INTERPRETER: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS: Any = ["code_interpreter_call.outputs"]
TOKEN = "a-token-that-nobody-guesses"


def test_sc_001_a_model_calls_runs_and_reads_within_the_loop(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print(2 ** 64)"), text_answer("18446744073709551616"))
    response = gateway.strict.responses.create(model="scripted", input="2 ** 64?", tools=[INTERPRETER])
    assert response.output_text == "18446744073709551616"
    offered, read = gateway.model.requests
    (function,) = [tool["function"] for tool in offered.json["tools"]]
    assert function["name"] == "code_interpreter"
    assert function["parameters"]["required"] == ["code"]
    assert read.json["messages"][-1]["role"] == "tool"
    assert read.json["messages"][-1]["content"].startswith("18446744073709551616")


def test_us1_2_and_fr_014_the_events_in_order(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("1"), text_answer("."))
    events = list(
        gateway.strict.responses.create(model="scripted", input="?", tools=[INTERPRETER], stream=True)
    )
    lifecycle = [event.type for event in events if ".code_interpreter_call." in event.type]
    assert lifecycle == [
        "response.code_interpreter_call.in_progress",
        "response.code_interpreter_call.interpreting",
        "response.code_interpreter_call.completed",
    ]


def test_ec_2_a_call_without_a_stream_runs_just_the_same(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print('ran')"), text_answer("."))
    response = gateway.strict.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], include=OUTPUTS
    )
    ran: Any = response.output[0]
    assert ran.outputs[0].logs == "ran\n"


def test_ec_4_two_calls_in_one_turn(gateway: RunningGateway) -> None:
    gateway.model.script(
        tool_calls(
            tool_call("code_interpreter", {"code": "print('one')"}, call_id="call_a"),
            tool_call("code_interpreter", {"code": "print('two')"}, call_id="call_b", index=1),
        ),
        text_answer("."),
    )
    response = gateway.strict.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], include=OUTPUTS
    )
    outputs: list[Any] = [item for item in response.output if item.type == "code_interpreter_call"]
    assert [item.outputs[0].logs for item in outputs] == ["one\n", "two\n"]
    results = [message for message in gateway.model.requests[1].json["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call_a", "call_b"]


def test_ec_3_a_gateway_without_the_tool(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings(model) | {"providers": {"code_interpreter": {"enabled": False}}}
        with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
            with pytest.raises(openai.BadRequestError, match="code_interpreter is not enabled"):
                client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
            assert not model.requests
            model.script(text_answer("Hello"))
            assert client.responses.create(model="scripted", input="?").output_text == "Hello"
            assert "tools" not in model.requests[0].json


@contextmanager
def sandbox_server() -> Generator[str]:
    """`fumehood sandbox` with a token; its address."""
    limits = "enforced" if has_cgroups() else "best-effort"
    command = [sys.executable, "-m", "fumehood", "sandbox", "--listen", "127.0.0.1:0", "--limits", limits]
    with subprocess.Popen(
        [*command, "--pool", "1", "--preload", ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "FUMEHOOD_SANDBOX_TOKEN": TOKEN},
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                threading.Thread(target=process.stdout.read, daemon=True).start()
                try:
                    yield found[0]
                finally:
                    process.terminate()
                    process.wait(30)
                return
        raise AssertionError(f"it did not serve: {said}")


def test_us4_1_fr_013_and_sc_005_a_sandbox_server_elsewhere(tmp_path: Path) -> None:
    with ScriptedModelServer() as model, sandbox_server() as url:
        interpreter = {"sandbox_url": url, "sandbox_token_env": "TOKEN_OF_THE_SANDBOXES"}
        settings = make_settings(model) | {"providers": {"code_interpreter": {"settings": interpreter}}}
        environment = {"TOKEN_OF_THE_SANDBOXES": TOKEN}
        with (
            gateway_process.run_gateway(tmp_path, settings, environment) as running,
            make_client(running) as client,
        ):
            model.script(code_call("x = 41"), text_answer("ok"))
            first = client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
        # Another gateway on the same files finds the container again: its sandbox is the server's.
        with (
            gateway_process.run_gateway(tmp_path, settings, environment) as running,
            make_client(running) as client,
        ):
            model.script(code_call("print(x + 1)"), text_answer("42"))
            second = client.responses.create(
                model="scripted",
                input="?",
                tools=[INTERPRETER],
                include=OUTPUTS,
                previous_response_id=first.id,
            )
            ran: Any = second.output[0]
            assert ran.outputs[0].logs == "42\n"
            assert not any(TOKEN in line for line in running.output)


@pytest.mark.parametrize("other", ["sandbox_template", "sandbox_warm_pool"])
def test_us4_2_and_fr_016_a_server_and_a_template_exclude_each_other(tmp_path: Path, other: str) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings(model, sandbox_url="http://127.0.0.1:1", **{other: "python"})
        with pytest.raises(AssertionError, match=rf"sandbox_url[\s\S]*{other}|{other}[\s\S]*sandbox_url"):
            gateway_process.start_gateway(tmp_path, settings)


def test_fr_015_the_provider_is_configured_in_the_file(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings(model, execution_timeout=1.0, always_include_outputs=True)
        with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
            model.script(
                code_call("print('begun')\nwhile True: pass"), code_call("print('alive')"), text_answer("ok")
            )
            response = client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
            stopped: Any = response.output[0]
            after: Any = response.output[1]
            assert stopped.status == "failed"
            assert "begun" in stopped.outputs[0].logs
            assert after.outputs[0].logs == "alive\n"
            assert "longer than 1 s " in model.requests[1].json["messages"][-1]["content"]


def test_isolation_by_execution_gives_every_call_a_sandbox_of_its_own(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings(model, isolation="execution")
        with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
            model.script(
                code_call("x = 1\nopen('kept.txt', 'w').write('file')"),
                code_call("print(open('kept.txt').read(), 'x' in globals())"),
                text_answer("ok"),
            )
            response = client.responses.create(
                model="scripted", input="?", tools=[INTERPRETER], include=OUTPUTS
            )
            second: Any = response.output[1]
            assert second.outputs[0].logs == "file False\n"
