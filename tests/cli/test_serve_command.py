"""`fumehood serve` as a process of its own: how it starts, what it refuses, how it ends."""

import json
import logging
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import gateway_process
from tests.support.cli_runner import CommandResult, run_command, run_fumehood

SETTINGS = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__"
NO_CODE: dict[str, Any] = {"providers": {"code_interpreter": {"enabled": False}}}


def run_serve(*options: str, **environ: str) -> CommandResult:
    """A server that should not start, in this process."""
    return run_command("serve", *options, **environ)


def start_and_fail(*options: str, cwd: Path, **environ: str) -> str:
    """The error of a server that cannot start, in a process of its own."""
    result = run_fumehood("serve", *options, cwd=cwd, **environ)
    assert "Traceback" not in result.stderr
    assert result.returncode == 125
    return " ".join(result.stderr.split())


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture(autouse=True)
def isolated_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where tests are started, and what they log stays with them."""
    monkeypatch.chdir(tmp_path)
    for name in ("fumehood", "uvicorn"):
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(
                logging.getLogger(name), attribute, getattr(logging.getLogger(name), attribute)
            )


def test_help_says_what_it_is_for() -> None:
    result = run_serve("--help")
    assert result.code == 0
    for word in ("--config", "--host", "--port", "--upstream", "--upstream-key-env", "FUMEHOOD_SERVER__PORT"):
        assert word in result.out


@pytest.mark.parametrize("options", [(), ("--allow-unauthenticated",)])
def test_a_public_address_is_refused_without_keys(options: tuple[str, ...]) -> None:
    result = run_serve("--host", "0.0.0.0", "--port", "0", *options)
    assert result.code == 2
    assert "0.0.0.0 can be reached from other machines and there are no keys" in result.error_text
    assert "create one with `fumehood keys create`" in result.error_text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_a_public_address_needs_more_than_a_setting(host: str) -> None:
    result = run_serve("--host", host, FUMEHOOD_AUTH__REQUIRED="false")
    assert result.code == 2
    assert f"{host} can be reached from other machines and auth.required is false" in result.error_text


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--config", "none.yaml"], {}, "none.yaml: No such file or directory."),
        ([], {"FUMEHOOD_SERVER__PRT": "1"}, "there is no setting server.prt; did you mean port?"),
        (["--upstream-key-env", "KEY"], {}, "requires --upstream"),
        (["--upstream", "nonsense"], {}, "base_url 'nonsense' is not the URL of a server"),
        (
            ["--upstream", "http://127.0.0.1:1/v1", "--upstream-key-env", "NO_SUCH_KEY"],
            {},
            "the environment variable NO_SUCH_KEY for the models '*' is not set",
        ),
        (
            [],
            {f"{SETTINGS}SANDBOX_URL": "http://127.0.0.1:1", f"{SETTINGS}SANDBOX_TOKEN_ENV": "NO_SUCH_TOKEN"},
            "sandbox_token_env names the variable NO_SUCH_TOKEN, which is not set",
        ),
        (
            [],
            {"FUMEHOOD_SERVER__CORS_ORIGINS": "*"},
            "without keys, * would let every web page run code here",
        ),
        (
            [],
            {"FUMEHOOD_SERVER__CORS_ORIGINS": "https://app.example/"},
            "server.cors_origins: write an origin as browsers do",
        ),
        # Specification 003, US4-2 and FR-016.
        (
            [],
            {f"{SETTINGS}SANDBOX_URL": "http://127.0.0.1:1", f"{SETTINGS}SANDBOX_TEMPLATE": "python"},
            "it excludes sandbox_template and sandbox_warm_pool",
        ),
    ],
)
def test_invalid_configuration(options: list[str], environment: dict[str, str], words: str) -> None:
    result = run_serve("--port", "0", *options, **environment)
    assert result.code == 2
    assert words in result.error_text


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_serve("--port", str(taken.getsockname()[1]))
    assert result.code == 125
    assert ": Address already in use. Choose another port" in result.error_text


def test_it_does_not_start_without_isolation(tmp_path: Path) -> None:
    nowhere = tmp_path / "settings.toml"
    nowhere.write_text('mode = "pod"\nguest_socket = "/nonexistent/guest.sock"\n')
    environ = {f"{SETTINGS}SANDBOX_CONFIG": str(nowhere)}
    error = start_and_fail("--port", "0", cwd=tmp_path, **environ)
    assert "`fumehood doctor` says what to do." in error


def test_it_serves_until_a_signal_stops_it(tmp_path: Path) -> None:
    running = gateway_process.start_gateway(tmp_path, NO_CODE)
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
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(asked, timeout=30)
        # Specification 003, edge case: what is not enabled is refused.
        assert answer.value.code == 400
        assert "code_interpreter is not enabled" in answer.value.read().decode()
        answer.value.close()
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


def test_it_is_not_ready_without_its_sandbox_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = {"providers": {"code_interpreter": {"settings": {"sandbox_url": nowhere}}}}
    with gateway_process.run_gateway(tmp_path, settings) as running:
        assert get(running.url.replace("/v1", "/healthz")) == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError) as answer:
            get(running.url.replace("/v1", "/readyz"))
        assert answer.value.code == 503
        assert "The sandbox server does not answer" in answer.value.read().decode()
        answer.value.close()


def test_two_servers_do_not_share_a_database(tmp_path: Path) -> None:
    with gateway_process.run_gateway(tmp_path, NO_CODE):
        error = start_and_fail("--config", str(tmp_path / "config.json"), "--port", "0", cwd=tmp_path)
    assert "gateway.db" in error
