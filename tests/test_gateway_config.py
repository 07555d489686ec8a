"""Settings: file, variables, options, refusals, and the example that has all of them."""

import re
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec
import pytest
import yaml

from fumehood.gateway_config import ConfigError, GatewayConfig, load_config, resolve_secret
from fumehood.models.model_settings import ModelSettings

EXAMPLE = Path(__file__).resolve().parent.parent / "config.example.yaml"
INTERPRETER = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def settings_of(kind: Any, path: str = "") -> list[str]:
    """Every leaf of the tree; a list of sections counts by its first."""
    found: list[str] = []
    for name, hint in get_type_hints(kind).items():
        below = f"{path}{name}"
        element = get_args(hint)[0] if get_args(hint) else hint
        if isinstance(element, type) and issubclass(element, msgspec.Struct):
            found += settings_of(element, f"{below}.")
        else:
            found.append(below)
    return found


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, list) and tree:
        return leaves(cast("list[Any]", tree)[0], path)
    if not isinstance(tree, dict) or not tree:
        return {path.rstrip("."): tree}
    found: dict[str, Any] = {}
    for key, below in cast("dict[str, Any]", tree).items():
        found |= leaves(below, f"{path}{key}.")
    return found


# --- the example --------------------------------------------------------------------------------------


def test_the_example_has_every_setting_and_no_other() -> None:
    written = leaves(yaml.safe_load(EXAMPLE.read_text()))
    written.pop("providers.file_search.settings")  # a section without settings yet
    assert sorted(written) == sorted(settings_of(GatewayConfig))


def test_the_example_shows_the_defaults() -> None:
    loaded = load_config(EXAMPLE, {})
    assert loaded.models == (ModelSettings(base_url="http://127.0.0.1:8000/v1"),)
    assert msgspec.structs.replace(loaded, models=()) == GatewayConfig()


def test_the_example_says_what_each_setting_means() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if re.match(r"\s+(- )?\w+: \S", line)]
    assert [line for line in lines if "#" not in line and not line.endswith("settings: {}")] == []


# --- where settings come from -------------------------------------------------------------------------


def test_options_come_before_variables_and_those_before_the_file(file: Path) -> None:
    file.write_text("server: {host: localhost, port: 1, shutdown_grace: 5}\nlimits:\nmodels:\n")
    config = load_config(
        file, {"FUMEHOOD_SERVER__PORT": "2", "FUMEHOOD_SERVER__SHUTDOWN_GRACE": "7.5"}, {"server.port": 3}
    )
    assert (config.server.host, config.server.port, config.server.shutdown_grace) == ("localhost", 3, 7.5)
    assert config.limits == GatewayConfig().limits


@pytest.mark.parametrize(
    ("variable", "text", "found"),
    [
        ("FUMEHOOD_SERVER__ALLOWED_HOSTS", "a.example, b.example", ("a.example", "b.example")),
        ("FUMEHOOD_SERVER__ALLOWED_HOSTS", '["a.example"]', ("a.example",)),
        ("FUMEHOOD_SERVER__HOST", "0", "0"),
        ("FUMEHOOD_AUTH__REQUIRED", "false", False),
        ("FUMEHOOD_TELEMETRY__LOG_FORMAT", "json", "json"),
        (f"{INTERPRETER}SANDBOX_URL", "null", None),
        (f"{INTERPRETER}SANDBOX_URL", "http://127.0.0.1:1", "http://127.0.0.1:1"),
        (f"{INTERPRETER}EXECUTION_TIMEOUT", "2.5", 2.5),
        ("FUMEHOOD_LIMITS__BODY_BYTES", "64m", 64 << 20),
        ("FUMEHOOD_LIMITS__BODY_BYTES", "1000", 1000),
    ],
)
def test_variables_by_type(variable: str, text: str, found: object) -> None:
    value: Any = load_config(None, {variable: text})
    for name in variable.removeprefix("FUMEHOOD_").lower().split("__"):
        value = getattr(value, name)
    assert value == found


def test_models_in_a_variable() -> None:
    config = load_config(None, {"FUMEHOOD_MODELS": '[{"match": "a*", "base_url": "http://h/v1"}]'})
    assert [model.match for model in config.models] == ["a*"]


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "FUMEHOOD_LIMITS": "enforced",
        "FUMEHOOD_SANDBOX_TOKEN": "x",
        "FUMEHOOD_PORT": "tcp://1.2.3.4:5",
    }
    assert load_config(None, others) == GatewayConfig()


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {prot: 1}", "there is no setting server.prot; did you mean port?"),
        ("servr: {}", "there is no setting servr; did you mean server?"),
        ("server: {zzz: 1}", "there is no setting server.zzz; there are host, port, allowed_hosts, cors_origins, "),
        ("server: {port: 70000}", "server.port: expected int <= 65535."),
        ("server: {port: x}", "server.port: expected int, got str."),
        ("server: 3", "server: expected a section with settings below it."),
        ("server: {port: 1}\nserver: {}", "has server twice, again at line 2."),
        ("limits: {body_bytes: lots}", "limits.body_bytes: expected a number of bytes, or a size such as 512m"),
        ("storage: {url: 'sqlite:///a.db', directory: /srv}", "storage.url: it excludes directory"),
        ("telemetry: {log_format: xml}", "telemetry.log_format: 'xml' is not one of text, json."),
        ("models: [{base_url: 'http://h', backend: x}]", "models[0].backend: 'x' is not one of chat_completions, "),
        ("limits: {body_bytes: 0}", "limits.body_bytes: expected int >= 1."),
        ("models: [{base_url: 'http://h', api_key: sk-s3cret}]", "models[0].api_key must not be in the configuration"),
        ("models: [{base_url: 'http://h', api_key_env: sk-s3cret}]", "models[0].api_key_env: give the name"),
        ("models: [{match: a}]", "models[0]: base_url is missing"),
        ("models: [{base_url: 'http://u:s3cret@h'}]", "models[0]: base_url contains a user or a password"),
        ("models: [{base_url: 'http://h', retrys: 1}]", "there is no setting models[0].retrys; did you mean retries?"),
        ("storage: {url: 'postgres://u:s3cret@h/d'}", "storage.url: only sqlite:///FILE is supported."),
        ("providers: {file_search: {enabled: true}}", "providers.file_search.enabled: this version does not"),
        ("telemetry: {otlp: 'h:4318'}", "telemetry.otlp: write a URL such as http://HOST:4318"),
        ("- a", "should hold sections such as"),
        ("a: [", "is not YAML at line 1"),
        ("\tserver: {}", "is not YAML at line 1"),
        ("a: " + "[" * 5000 + "]" * 5000, "is nested too deeply."),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        # Specification 003, FR-016 and US4-2: one or the other.
        ("{sandbox_url: 'http://h', sandbox_template: t}", "sandbox_url: it excludes sandbox_template"),
        ("{sandbox_url: 'http://h', sandbox_warm_pool: p}", "sandbox_url: it excludes sandbox_template"),
        (
            "{sandbox_url: 'http://h', sandbox_warm_pools: {4g: p}}",
            "sandbox_url: it excludes sandbox_template",
        ),
        ("{sandbox_template: t}", "sandbox_token_file: pods require the token"),
        ("{sandbox_token_file: /t}", "sandbox_token_file: it needs a sandbox_url"),
        (
            "{sandbox_url: 'http://h', sandbox_token_file: /t, sandbox_token_env: T}",
            "sandbox_token_env: it excludes sandbox_token_file",
        ),
        ("{sandbox_warm_pool: P_1, sandbox_token_file: /t}", "sandbox_warm_pool: 'P_1' cannot be a name"),
        ("{sandbox_warm_pools: {2g: p}, sandbox_token_file: /t}", "sandbox_warm_pools"),
        (
            "{sandbox_warm_pool: p, sandbox_warm_pools: {1g: q}, sandbox_token_file: /t}",
            "sandbox_warm_pools: 1g is the pool of sandbox_warm_pool",
        ),
        ("{sandbox_namespace: n}", "sandbox_namespace: it needs a sandbox_template or a sandbox_warm_pool"),
        ("{sandbox_kubeconfig: /k}", "sandbox_kubeconfig: it needs a sandbox_template"),
        ("{sandbox_url: 'ftp://h'}", "sandbox_url 'ftp://h' is not the URL of a server, such as http://"),
        ("{sandbox_url: 'http://h:99999'}", "sandbox_url 'http://h:99999' is not the URL"),
        ("{sandbox_url: 'http://u:s3cret@h'}", "sandbox_url contains a user or a password"),
        ("{sandbox_url: 'http://u:s3cret@h:99999'}", "sandbox_url is not the URL"),
        ("{sandbox_token_env: TOKEN}", "sandbox_token_env: it needs a sandbox_url"),
        ("{execution_timeout: 0}", "execution_timeout: expected float > 0"),
    ],
)
def test_sandboxes_that_cannot_be_had(file: Path, settings: str, said: str) -> None:
    file.write_text(f"providers: {{code_interpreter: {{settings: {settings}}}}}")
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    assert f"providers.code_interpreter.settings.{said}" in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        "{sandbox_template: t, sandbox_token_file: /t}",
        "{sandbox_warm_pool: p, sandbox_token_env: T}",
        "{sandbox_template: t, sandbox_warm_pool: p, sandbox_token_file: /t}",
        "{sandbox_warm_pools: {1g: p, 64g: q.r}, sandbox_token_file: /t, sandbox_namespace: n}",
    ],
)
def test_pools_that_can_be_claimed_from(file: Path, settings: str) -> None:
    file.write_text(f"providers: {{code_interpreter: {{settings: {settings}}}}}")
    assert load_config(file, {}).providers.code_interpreter.settings.claims_pods


@pytest.mark.parametrize("url", ["http://h:1", "https://h/x", "unix:/run/sandboxes"])
def test_sandbox_servers_that_can_be_reached(file: Path, url: str) -> None:
    file.write_text(f"providers: {{code_interpreter: {{settings: {{sandbox_url: '{url}'}}}}}}")
    assert load_config(file, {}).providers.code_interpreter.settings.sandbox_url == url


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("FUMEHOOD_SERVER__PRT", "1", "FUMEHOOD_SERVER__PRT: there is no setting server.prt; did you mean port?"),
        ("FUMEHOOD_SERVER__PORT", "x", "FUMEHOOD_SERVER__PORT: expected int, got str."),
        ("FUMEHOOD_SERVER__PORT__X", "1", "FUMEHOOD_SERVER__PORT__X: server.port has no settings below it."),
        ("FUMEHOOD_MODELS", "[{", "FUMEHOOD_MODELS: it should hold JSON."),
        ("FUMEHOOD_MODELS", '[{"match": "a"}]', "FUMEHOOD_MODELS: models[0]: base_url is missing"),
        (f"{INTERPRETER}SANDBOX_URL", "ftp://h", f"{INTERPRETER}SANDBOX_URL: providers.code_interpreter"),
        ("FUMEHOOD_SERVR__PORT", "1", "did you mean server?"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_meant_are_refused(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {variable: text})
    assert said in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary", {})


def test_all_problems_are_told_each_with_its_source(file: Path) -> None:
    file.write_text("server: {prt: 1, port: x}\ntelemetry: {log_format: xml}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file, {"FUMEHOOD_LIMITS__TURNS": "0"})
    assert refused.value.problems == (
        "FUMEHOOD_LIMITS__TURNS: expected int >= 1.",
        f"{file}: there is no setting server.prt; did you mean port?",
        f"{file}: server.port: expected int, got str.",
        f"{file}: telemetry.log_format: 'xml' is not one of text, json.",
    )


# --- where the data is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "environ", "database", "blobs"),
    [
        ({}, {"HOME": "/home/a"}, "/home/a/.local/share/fumehood/fumehood.db", "/home/a/.local/share/fumehood/blobs"),
        ({}, {"HOME": "/home/a", "XDG_DATA_HOME": "/d"}, "/d/fumehood/fumehood.db", "/d/fumehood/blobs"),
        ({}, {"HOME": "/", "XDG_DATA_HOME": "r"}, "/.local/share/fumehood/fumehood.db", "/.local/share/fumehood/blobs"),
        ({}, {"HOME": "/h", "STATE_DIRECTORY": "/var/lib/x:/var/lib/y"}, "/var/lib/x/fumehood.db", "/var/lib/x/blobs"),
        ({"directory": "/srv"}, {"HOME": "/h"}, "/srv/fumehood.db", "/srv/blobs"),
        ({"directory": "here"}, {"HOME": "/h"}, "here/fumehood.db", "here/blobs"),
        ({"directory": "/srv", "blobs": "/big"}, {"HOME": "/h"}, "/srv/fumehood.db", "/big"),
        ({"url": "sqlite:////srv/x.db"}, {"HOME": "/h"}, "/srv/x.db", "/srv/blobs"),
        ({"url": "sqlite:///x.db", "blobs": "./b"}, {"HOME": "/h"}, "x.db", "b"),
    ],
)  # fmt: skip
def test_where_the_data_is(
    settings: dict[str, str], environ: dict[str, str], database: str, blobs: str
) -> None:
    overrides = {f"storage.{name}": value for name, value in settings.items()}
    location = load_config(None, {}, overrides).storage.locate(environ)
    assert (str(location.database), str(location.blobs)) == (database, blobs)
    assert location.is_default == (not settings)


# --- secrets ------------------------------------------------------------------------------------------


def test_a_secret_is_in_its_variable_or_nothing_starts() -> None:
    assert resolve_secret({}, None, "s") is None
    assert resolve_secret({"KEY": " abc \n"}, "KEY", "s") == "abc"
    for environ in ({}, {"KEY": ""}, {"KEY": "a\nb"}, {"KEY": "schlüssel"}):
        with pytest.raises(ConfigError, match="s names the variable KEY, which is not set") as refused:
            resolve_secret(environ, "KEY", "s")
        assert "schl" not in str(refused.value)
