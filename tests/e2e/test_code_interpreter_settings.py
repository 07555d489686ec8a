"""Gateways with other settings of the code interpreter than those of the shared one."""

from pathlib import Path
from typing import Any, cast

import openai
import pytest

from tests.e2e.conftest import INTERPRETER, OUTPUTS, RunningGateway, make_client, make_settings, read_logs
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer
from tests.support.sandbox_process import run_sandbox_server

TOKEN = "a-token-that-nobody-guesses"


def test_a_gateway_without_the_tool(gateway: RunningGateway) -> None:
    with make_client(gateway.far) as client:
        gateway.model.script(text_answer("Hello"))
        with pytest.raises(openai.BadRequestError, match="code_interpreter is not enabled"):
            client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
        assert not gateway.model.requests
        assert client.responses.create(model="scripted", input="?").output_text == "Hello"
        assert "tools" not in gateway.model.requests[0].json


def test_a_sandbox_server_elsewhere(tmp_path: Path) -> None:
    options = ("--listen", "127.0.0.1:0", "--pool", "1")
    with (
        ScriptedModelServer() as model,
        run_sandbox_server(*options, environment={"FUMEHOOD_SANDBOX_TOKEN": TOKEN}) as (_, url),
    ):
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
            assert read_logs(second) == "42\n"
            assert not any(TOKEN in line for line in running.output)


def test_the_provider_is_configured_in_the_file(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings(
            model, execution_timeout=1.0, always_include_outputs=True, isolation="execution"
        )
        with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
            model.script(
                code_call("x = 1\nopen('kept.txt', 'w').write('file')\nprint('begun')"),
                code_call("print('begun')\nwhile True: pass"),
                code_call("print(open('kept.txt').read(), 'x' in globals())"),
                text_answer("ok"),
            )
            response = client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
            _, stopped, after, _ = cast("list[Any]", response.output)
            assert stopped.status == "failed"
            assert "begun" in stopped.outputs[0].logs
            assert "longer than 1 s " in model.requests[2].json["messages"][-1]["content"]
            # Every call has a sandbox of its own, with the files of earlier calls and without their variables.
            assert after.outputs[0].logs == "file False\n"
