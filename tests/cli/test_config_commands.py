"""`fumehood config check`: what it accepts, what it names, and what it shows."""

from pathlib import Path

import pytest
import yaml

from fumehood.gateway_config import GatewayConfig, load_config
from tests.support.cli_runner import CommandResult, run_command

EXAMPLE = Path(__file__).resolve().parents[2] / "config.example.yaml"
SETTINGS = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__"


@pytest.fixture(autouse=True)
def isolated_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(*arguments: str | Path, **environ: str) -> CommandResult:
    return run_command("config", "check", *map(str, arguments), **environ)


def write(text: str, name: str = "fumehood.yaml") -> Path:
    file = Path(name).absolute()
    file.write_text(text)
    return file


def test_the_example_is_valid() -> None:
    result = check(EXAMPLE)
    assert result.streams == (0, f"{EXAMPLE} is a valid configuration of the gateway.", "")


def test_without_a_file_the_variables_are_checked() -> None:
    assert check().out == "The environment is a valid configuration of the gateway."
    result = check(FUMEHOOD_SERVER__PRT="1")
    assert result.streams == (
        1,
        "",
        "error: FUMEHOOD_SERVER__PRT: there is no setting server.prt; did you mean port?",
    )
    result = check(FUMEHOOD_CONFIG=str(write("server: {port: x}")))
    assert (result.code, "server.port: expected int" in result.err) == (1, True)
    assert check(FUMEHOOD_LIMITS="none").code == 1


def test_every_problem_is_one_line_with_its_source() -> None:
    file = write("server: {prt: 1}\nlimits: {turns: 0}\n")
    result = check(file, FUMEHOOD_AUTH__REQUIRED="perhaps")
    assert result.code == 1
    assert result.err.splitlines() == [
        "error: FUMEHOOD_AUTH__REQUIRED: expected bool, got str.",
        f"error: {file}: there is no setting server.prt; did you mean port?",
        f"error: {file}: limits.turns: expected int >= 1.",
    ]


def test_the_file_of_a_sandbox_server_is_recognised() -> None:
    file = write("pool: 2\nlimits: best-effort\negress: off\n")
    assert check(file).out == f"{file} is a valid configuration of the sandbox server."
    assert check(file, "--for", "gateway").code == 1
    result = check(write("capcity: 4\npool: 3\n"))
    assert (result.code, "did you mean capacity?" in result.err) == (1, True)
    result = check("--for", "sandbox", FUMEHOOD_SANDBOX_POOL="many")
    assert (result.code, result.err) == (1, "error: FUMEHOOD_SANDBOX_POOL: expected int, got str.")


def test_the_settings_of_the_embedded_server_are_checked_with_the_gateways() -> None:
    sandbox = write("poool: 3\n", "sandbox.yaml")
    result = check(**{f"{SETTINGS}SANDBOX_CONFIG": str(sandbox)})
    assert result.err == f"error: {sandbox}: there is no setting poool; did you mean pool?"
    assert check(FUMEHOOD_SANDBOX_POOOL="1").code == 1
    remote = {f"{SETTINGS}SANDBOX_URL": "http://127.0.0.1:8090", "FUMEHOOD_SANDBOX_POOOL": "1"}
    assert check(**remote).code == 0


def test_invalid_usage_is_not_an_invalid_configuration() -> None:
    result = check("none.yaml")
    assert (result.code, "none.yaml: No such file or directory" in result.error_text) == (2, True)
    assert check("--for", "client").code == 2


def test_secrets_that_are_not_there_yet_are_a_warning() -> None:
    file = write(
        "models: [{base_url: 'http://h/v1', api_key_env: NO_SUCH_KEY}]\ncompaction: {keys_file: none}\n"
    )
    result = check(file)
    assert result.code == 0
    assert (
        "warning: models[0].api_key_env names the variable NO_SUCH_KEY, which is not set here." in result.err
    )
    assert "warning: compaction.keys_file: there is no file none." in result.err
    assert "NO_SUCH_KEY" not in check(file, NO_SUCH_KEY="x").err


def test_show_prints_what_is_in_effect_and_can_be_loaded_again() -> None:
    file = write("server: {port: 1}\nlimits: {body_bytes: 64m}\n")
    environ = {"FUMEHOOD_SERVER__PORT": "2", "FUMEHOOD_LIMITS": "best-effort", "XDG_DATA_HOME": "/data"}
    result = check(file, "--show", **environ)
    assert result.code == 0
    assert "Variables that count: FUMEHOOD_SERVER__PORT." in result.err
    shown = yaml.safe_load(result.out)
    assert shown["server"]["port"] == 2
    assert shown["limits"]["body_bytes"] == 64 << 20
    assert shown["storage"]["url"] == "sqlite:////data/fumehood/fumehood.db"
    assert shown["providers"]["code_interpreter"]["settings"]["sandbox_limits"] == "best-effort"
    assert shown.keys() == set(GatewayConfig.__struct_fields__)
    assert load_config(write(result.out, "again.yaml"), {}).server.port == 2
    assert check("--for", "sandbox", "--show").out.startswith("mode: namespaces\nlimits: enforced\npool: 4\n")


def test_show_masks_secrets(tmp_path: Path) -> None:
    file = write(
        "models: [{base_url: 'http://h/v1', api_key_env: KEY, headers: {X-Key: s3cret},"
        " extra_body: {seed: 7, nested: {auth_token: s3cret}}}]\n"
        "telemetry: {otlp: 'http://user:s3cret@h:4318'}\n"
    )
    result = check(file, "--show", KEY="s3cret")
    assert "s3cret" not in result.out + result.err
    (model,) = yaml.safe_load(result.out)["models"]
    assert (model["api_key_env"], model["headers"], model["extra_body"]["seed"]) == (
        "KEY",
        {"X-Key": "***"},
        7,
    )
    sandbox = tmp_path / "sandbox.yaml"
    sandbox.write_text("index_url: https://user:s3cret@index.example/simple\n")
    sandbox.chmod(0o600)
    result = check(sandbox, "--show")
    assert "s3cret" not in result.out + result.err
    assert "index_url: https://***@index.example/simple" in result.out


def test_nothing_is_created(tmp_path: Path) -> None:
    assert check("--show", XDG_DATA_HOME=str(tmp_path / "data")).code == 0
    assert list(tmp_path.iterdir()) == []
