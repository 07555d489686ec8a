"""`fumehood serve` as a process of its own: how it starts, what it refuses, how it ends; imports the support."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import served

NO_CODE: dict[str, Any] = {"providers": {"code_interpreter": {"enabled": False}}}


def run(
    *options: str, environment: dict[str, str] | None = None, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """A server that should not start."""
    return subprocess.run(
        [sys.executable, "-m", "fumehood", "serve", *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(environment or {})},
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.replace("│", " ").split())


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def test_help_says_what_it_is_for(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("--config", "--host", "--port", "--upstream", "--upstream-key-env", "FUMEHOOD_SERVER__PORT"):
        assert word in done.stdout


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_a_place_that_others_can_reach_is_refused(tmp_path: Path, host: str) -> None:
    for environment in ({}, {"FUMEHOOD_AUTH__REQUIRED": "false"}):
        done = run("--host", host, environment=environment, cwd=tmp_path)
        assert done.returncode == 2
        assert f"{host} can be reached from other machines and there are no keys yet" in said(done)
    done = run("--host", host, "--allow-unauthenticated", cwd=tmp_path)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--config", "none.yaml"], {}, "none.yaml: No such file or directory."),
        ([], {"FUMEHOOD_SERVER__PRT": "1"}, "there is no setting server.prt; did you mean port?"),
        (["--upstream-key-env", "KEY"], {}, "it goes with --upstream"),
        (["--upstream", "nonsense"], {}, "base_url 'nonsense' is not the address of a model server"),
        (
            ["--upstream", "http://127.0.0.1:1/v1", "--upstream-key-env", "NO_SUCH_KEY"],
            {},
            "the environment variable NO_SUCH_KEY for the models '*' is not set",
        ),
        (
            [],
            {
                "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_URL": "http://127.0.0.1:1",
                "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_TOKEN_ENV": "NO_SUCH_TOKEN",
            },
            "sandbox_token_env names the variable NO_SUCH_TOKEN, which holds nothing",
        ),
        (
            [],
            {
                "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_URL": "http://127.0.0.1:1",
                "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_TEMPLATE": "python",
            },
            "it excludes sandbox_template and sandbox_warm_pool",
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(
    tmp_path: Path, options: list[str], environment: dict[str, str], words: str
) -> None:
    done = run("--port", "0", *options, environment=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert words in said(done)
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert done.returncode == 125
    assert "cannot be listened on: Address already in use. Choose another port" in said(done)


def test_where_code_cannot_be_isolated_nobody_is_served(tmp_path: Path) -> None:
    nowhere = tmp_path / "settings.toml"
    nowhere.write_text('bubblewrap = "/bin/false"\n')
    variable = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_CONFIG"
    done = run("--port", "0", environment={variable: str(nowhere)}, cwd=tmp_path)
    assert done.returncode == 125
    assert "`fumehood doctor` says what to do." in said(done)
    assert "Traceback" not in done.stderr


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    running = served.start(tmp_path, NO_CODE)
    try:
        assert [card["id"] for card in get(f"{running.url}/models")["data"]] == ["direct"]
        assert get(running.url.replace("/v1", "/readyz")) == {"status": "ready"}
        asked = urllib.request.Request(
            f"{running.url}/responses",
            json.dumps(
                {"model": "direct", "input": "a secret", "tools": [{"type": "code_interpreter"}]}
            ).encode(),
            {"content-type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
        # Specification 003, edge case: what is not enabled is refused.
        assert refused.value.code == 400
        assert "code_interpreter is not enabled" in refused.value.read().decode()
        refused.value.close()
    finally:
        assert running.stop() == 0
    output = "".join(running.output)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    assert [(line["route"], line["status"]) for line in requests] == [
        ("/v1/models", 200),
        ("/readyz", 200),
        ("/v1/responses", 400),
    ]
    assert requests[-1]["model"] == "direct"
    assert re.fullmatch(r"req_[0-9a-f]{32}", requests[-1]["request_id"])
    assert "secret" not in output


def test_two_servers_do_not_share_a_database(tmp_path: Path) -> None:
    with served.serving(tmp_path, NO_CODE):
        done = run("--config", str(tmp_path / "config.json"), "--port", "0", cwd=tmp_path)
    assert done.returncode == 125
    assert "Traceback" not in done.stderr
    assert "gateway.db" in said(done)
