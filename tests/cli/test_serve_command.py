"""`fumehood serve` as a process of its own: how it starts, what it refuses, how it ends."""

import json
import logging
import re
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fumehood.gateway_config import GatewayConfig
from tests.support import gateway_process
from tests.support.cli_runner import FUMEHOOD, CommandResult, run_command, run_fumehood
from tests.support.gateway_process import ScriptedModelServer
from tests.support.sandbox_runs import build_environment
from tests.support.waiting import becomes_true

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
    nowhere = tmp_path / "settings.yaml"
    nowhere.write_text("mode: pod\nguest_socket: /nonexistent/guest.sock\n")
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


# --- what it says when it is ready --------------------------------------------------------------------


def start_and_stop(*options: str, cwd: Path, **environ: str) -> tuple[str, str]:
    """What a server says until it has listed its models, on each stream."""
    log = cwd / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [FUMEHOOD, "serve", "--port", "0", *options],
            cwd=cwd,
            env={**build_environment(), **environ},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout as stdout:
        first = stdout.readline()
        assert "--quiet" in options or becomes_true(lambda: "sandboxes" in log.read_text(), 30), (
            log.read_text()
        )
        process.terminate()
        assert process.wait(60) == 0
        return first + stdout.read(), log.read_text()


NO_SANDBOXES = {"FUMEHOOD_PROVIDERS__CODE_INTERPRETER__ENABLED": "false"}


def test_it_says_what_it_serves(tmp_path: Path) -> None:
    data = tmp_path / "data"
    out, err = start_and_stop(cwd=tmp_path, XDG_DATA_HOME=str(data), FUMEHOOD_SANDBOX_PRELOAD="")
    (url,) = re.findall(r"Serving the Responses API on (http://127\.0\.0\.1:\d+)/v1\n", out)
    rows = dict(re.findall(r"^  (\w+) +(.+)$", err, re.MULTILINE))
    assert rows.keys() == {"models", "data", "keys", "sandboxes", "try"}
    assert rows["models"].startswith("direct, which runs the code it is sent")
    assert rows["data"] == str(data / "fumehood")
    assert rows["keys"].startswith("none, open to this machine; `fumehood keys create` creates one")
    assert rows["sandboxes"].startswith("on this host, mode namespaces, limits ")
    assert rows["sandboxes"].endswith(", 4 kept warm, at most 256")
    assert rows["try"].startswith(f"curl {url}/v1/responses -H 'content-type: application/json' -d '{{")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "stderr"]
    assert (data / "fumehood").stat().st_mode & 0o777 == 0o700


def test_it_names_the_models_of_the_server_and_the_keys(tmp_path: Path) -> None:
    database = tmp_path / "here" / "fumehood.db"
    assert run_command("keys", "create", "--data", "here").code == 0
    assert database.exists()
    listed = {"object": "list", "data": [{"id": "qwen3"}, {"id": "llama\x1b[2J"}]}
    with ScriptedModelServer(json.dumps(listed).encode()) as models:
        _, err = start_and_stop("--upstream", models.url, "--data", "here", cwd=tmp_path, **NO_SANDBOXES)
    rows = dict(re.findall(r"^  (\w+) +(.+)$", err, re.MULTILINE))
    assert rows["models"].startswith("qwen3, llama")
    assert rows["models"].endswith(f"(from {models.url})")
    assert "\x1b" not in err
    assert rows["data"] == str(tmp_path / "here")
    assert rows["keys"] == "required; there is one. `fumehood keys create --data here` creates another"
    assert rows["sandboxes"] == "off (providers.code_interpreter.enabled is false)"
    assert '-H "authorization: Bearer $OPENAI_API_KEY"' in rows["try"]
    assert '"model": "qwen3"' in rows["try"]


def test_a_model_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    _, err = start_and_stop("--upstream", nowhere, cwd=tmp_path, **NO_SANDBOXES)
    assert f"* (from {nowhere}, which lists none now)" in err


def test_quiet_and_json_leave_only_the_address(tmp_path: Path) -> None:
    out, err = start_and_stop(
        "--quiet", cwd=tmp_path, FUMEHOOD_TELEMETRY__LOG_LEVEL="warning", **NO_SANDBOXES
    )
    assert re.fullmatch(r"Serving the Responses API on http://127\.0\.0\.1:\d+/v1\n", out)
    assert err == ""
    out, err = start_and_stop(cwd=tmp_path, FUMEHOOD_TELEMETRY__LOG_FORMAT="json", **NO_SANDBOXES)
    assert out.count("\n") == 1
    lines = [json.loads(line) for line in err.splitlines()]
    (serving,) = [line for line in lines if line["event"] == "serving"]
    assert serving["where"] in out
    assert serving.keys() >= {"models", "data", "keys", "sandboxes"}


def test_an_earlier_database_in_the_working_directory_is_named(tmp_path: Path) -> None:
    old = tmp_path / "fumehood.db"
    old.touch()
    _, err = start_and_stop(cwd=tmp_path, XDG_DATA_HOME=str(tmp_path / "data"), **NO_SANDBOXES)
    assert f"{old} is not used: the data is in {tmp_path}/data/fumehood." in err
    assert f"start with --data {tmp_path}." in err
    assert old.stat().st_size == 0
    _, err = start_and_stop("--data", ".", cwd=tmp_path, **NO_SANDBOXES)
    assert "is not used" not in err
    assert old.stat().st_size > 0


def test_earlier_blobs_in_the_working_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "owner").touch()
    (tmp_path / "data").mkdir()
    _, err = start_and_stop(
        cwd=tmp_path, FUMEHOOD_STORAGE__URL=f"sqlite:///{tmp_path}/data/x.db", **NO_SANDBOXES
    )
    assert f"{tmp_path}/blobs is not used: files are in {tmp_path}/data/blobs." in err


def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = start_and_fail("--port", "0", "--data", "file/data", cwd=tmp_path, **NO_SANDBOXES)
    assert "file/data/fumehood.db cannot be opened" in error
    assert "Choose another directory with --data DIR." in error


# --- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "file", "limits"),
    [
        ([], {}, "", "enforced"),
        (["--limits", "best-effort"], {}, "", "best-effort"),
        ([], {"FUMEHOOD_LIMITS": "best-effort"}, "", "best-effort"),
        ([], {f"{SETTINGS}SANDBOX_LIMITS": "best-effort"}, "", "best-effort"),
        ([], {f"{SETTINGS}SANDBOX_LIMITS": "enforced", "FUMEHOOD_LIMITS": "best-effort"}, "", "enforced"),
        ([], {"FUMEHOOD_LIMITS": "best-effort"}, "{sandbox_limits: enforced}", "enforced"),
        (["--limits", "best-effort"], {}, "{sandbox_limits: enforced}", "best-effort"),
        (["--limits", "enforced"], {f"{SETTINGS}SANDBOX_LIMITS": "best-effort"}, "", "enforced"),
    ],
)
def test_limits_by_option_by_variable_and_by_setting(
    options: list[str], environ: dict[str, str], file: str, limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specific name overrides the one that all commands read; an option overrides both."""
    found: list[str] = []

    def record(settings: GatewayConfig, *_: object) -> None:
        found.append(settings.providers.code_interpreter.settings.sandbox_limits)

    monkeypatch.setattr("fumehood.cli.serve_command._run", record)
    monkeypatch.delenv("FUMEHOOD_LIMITS", raising=False)
    if file:
        Path("config.yaml").write_text(f"providers: {{code_interpreter: {{settings: {file}}}}}")
        options = [*options, "--config", "config.yaml"]
    assert run_serve(*options, **environ).code == 0
    assert found == [limits]


def test_limits_reach_the_sandboxes(tmp_path: Path) -> None:
    out, err = start_and_stop("--limits", "best-effort", cwd=tmp_path, FUMEHOOD_SANDBOX_PRELOAD="")
    assert out.startswith("Serving")
    assert "limits best-effort: memory may not be limited" in err


def test_limits_of_another_server_are_its_own() -> None:
    result = run_serve("--limits", "best-effort", **{f"{SETTINGS}SANDBOX_URL": "http://127.0.0.1:1"})
    assert result.code == 2
    assert "cannot be combined with sandbox_url: that server decides" in result.error_text
    assert run_serve("--limits", "some").code == 2
