"""Clients from npm against the gateway."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import RunningGateway
from tests.support import client_conversation, npm
from tests.support.gateway_process import reasoning_answer, text_answer, tool_call, tool_calls
from tests.support.waiting import becomes_true

pytestmark = [pytest.mark.slow, npm.needed]


@pytest.mark.parametrize("package", ["openai", "openai-next"])
def test_openai(gateway: RunningGateway, package: str) -> None:
    client_conversation.script(gateway.model, 2)
    told = json.loads(npm.node(npm.HERE / "openai.mjs", package, gateway.process.url))
    assert told["texts"] == [client_conversation.LINK, client_conversation.SUM, client_conversation.SUM]
    assert told["code"] == client_conversation.ADD
    assert told["last"] == "response.completed"
    assert told["file"] == client_conversation.FILE.decode()
    assert len(set(told["containers"])) == 1
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 2)


def test_the_ai_sdk(gateway: RunningGateway) -> None:
    client_conversation.script(gateway.model, 2)
    told = json.loads(npm.node(npm.HERE / "ai-sdk.mjs", gateway.process.url, "stored"))
    assert told["texts"] == [client_conversation.LINK, client_conversation.SUM, client_conversation.SUM]
    assert told["file"] == client_conversation.FILE.decode()
    assert [part for part in told["parts"] if part.startswith("tool-")][-2:] == ["tool-call", "tool-result"]
    assert [result["output"]["outputs"][0]["logs"] for result in told["results"]] == [
        "kept 3\n",
        "14 1,4,9\n",
    ]
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 2)


def test_the_ai_sdk_with_a_container_of_its_own(gateway: RunningGateway) -> None:
    """Where nothing is stored, it does not give calls back; then the container has to be named."""
    client_conversation.script(gateway.model, 1)
    told = json.loads(npm.node(npm.HERE / "ai-sdk.mjs", gateway.process.url, "unstored"))
    assert told["texts"] == [client_conversation.LINK, client_conversation.SUM]
    assert gateway.model.requests[-1].json["messages"][-1]["content"] == client_conversation.ADDED


def test_the_ai_sdk_shows_reasoning_and_sends_it_back(gateway: RunningGateway) -> None:
    gateway.model.script(
        reasoning_answer("Let me think.", "Yes"), reasoning_answer("Once more.", "Still yes")
    )
    told = json.loads(npm.node(npm.HERE / "ai-sdk.mjs", gateway.process.url, "reasoning"))
    assert told == {"thoughts": ["Let me think.", "Once more."], "texts": ["Yes", "Still yes"]}
    assert gateway.model.requests[1].json["messages"][1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Let me think.",
    }


FAILING = [("failing.mjs", "openai"), ("failing.mjs", "openai-next"), ("ai-sdk.mjs",)]


def fail(gateway: RunningGateway, client: tuple[str, ...]) -> Any:
    script, *package = client
    mode = () if package else ("failing",)
    return json.loads(npm.node(npm.HERE / script, *package, gateway.process.url, *mode))


@pytest.mark.parametrize("client", FAILING, ids="-".join)
def test_a_call_that_fails(gateway: RunningGateway, client: tuple[str, ...]) -> None:
    gateway.model.script(*client_conversation.lost_sandbox())
    told = fail(gateway, client)
    assert "error" not in told
    assert told["text"] == client_conversation.LOST
    assert ("response.code_interpreter_call.failed" in told["types"]) == (client[0] == "failing.mjs")


@pytest.mark.parametrize("package", ["openai", "openai-next"])
def test_a_call_that_fails_by_the_helper_of_the_sdk(gateway: RunningGateway, package: str) -> None:
    gateway.model.script(*client_conversation.lost_sandbox())
    told = json.loads(npm.node(npm.HERE / "failing.mjs", package, gateway.process.url, "helper"))
    assert "error" not in told
    assert told["text"] == client_conversation.LOST
    assert "response.code_interpreter_call.completed" in told["types"]  # at another one it would throw
    assert "response.code_interpreter_call.failed" not in told["types"]
    assert told["done"] == told["final"] == "failed"


@pytest.mark.parametrize("package", ["openai", "openai-next"])
def test_tools_of_the_client_by_the_helper_of_the_sdk(gateway: RunningGateway, package: str) -> None:
    """It throws at events that it has no case for, those of commands and patches among them."""
    patch = {"type": "create_file", "path": "a.txt", "diff": "+one\n"}
    gateway.model.script(
        tool_calls(
            tool_call("shell", {"commands": ["ls"]}),
            tool_call("apply_patch", patch, call_id="call_2", index=1),
        )
    )
    told = json.loads(npm.node(npm.HERE / "client-tools.mjs", package, gateway.process.url))
    assert "error" not in told
    assert told["output"] == [["ls"], patch]
    assert told["types"][-1] == "response.completed"


@pytest.mark.parametrize("client", FAILING, ids="-".join)
def test_a_model_server_that_breaks(gateway: RunningGateway, client: tuple[str, ...]) -> None:
    gateway.model.script(*client_conversation.broken_connection())
    assert "broke before its response was complete" in fail(gateway, client)["error"]


# --- Codex --------------------------------------------------------------------------------------------


def codex_home(gateway: RunningGateway, tmp_path: Path, method: str) -> Mapping[str, str]:
    """The environment of a Codex that knows the gateway alone. Whatever else it looks for is not there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f"""
        model = "scripted"
        model_provider = "fumehood"
        check_for_update_on_startup = false

        [model_providers.fumehood]
        name = "Fumehood"
        base_url = "{gateway.process.url}"
        wire_api = "responses"
        supports_websockets = {str(method == "WEBSOCKET").lower()}

        [analytics]
        enabled = false

        [features]
        plugins = false
        """
    )
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere)
    return {
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "PATH": os.environ["PATH"],
        "NO_PROXY": "127.0.0.1",
        **proxies,
    }


def count_logged(gateway: RunningGateway, method: str) -> int:
    """How many responses were made that way."""
    return sum(f'"method":"{method}","route":"/v1/responses"' in line for line in gateway.process.output)


@pytest.mark.parametrize(
    "method",
    ["POST", "WEBSOCKET"],
)
def test_codex(gateway: RunningGateway, tmp_path: Path, method: str) -> None:
    codex = codex_home(gateway, tmp_path, method)
    before = count_logged(gateway, method)
    place = tmp_path / "project"
    place.mkdir()
    (place / "notes.txt").write_text("The word is fume.")
    script = npm.INSTALLED / "@openai" / "codex" / "bin" / "codex.js"
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

    gateway.model.script(
        tool_calls(tool_call("exec_command", {"cmd": "cat notes.txt"})), text_answer("It is fume.")
    )
    assert npm.node(script, *options, "Which word?", cwd=place, env=codex).strip() == "It is fume."
    read = gateway.model.requests[1].json["messages"][-1]
    assert read["role"] == "tool"
    assert read["content"].endswith("The word is fume.")
    offered = [tool["function"]["name"] for tool in gateway.model.requests[0].json["tools"]]
    assert "exec_command" in offered
    assert "web_search" not in offered

    gateway.model.script(text_answer("Still fume."))
    assert (
        npm.node(script, *options, "resume", "--last", "Sure?", cwd=place, env=codex).strip() == "Still fume."
    )
    (resumed,) = gateway.model.requests
    roles = [message["role"] for message in resumed.json["messages"]]
    assert roles[-4:] == ["assistant", "tool", "assistant", "user"]
    # The log is written a little later.
    assert becomes_true(lambda: count_logged(gateway, method) >= before + 3, npm.PATIENCE)
