"""The settings of the gateway: reads them from a YAML file and the environment, and validates them.

config.example.yaml describes every setting. Secrets are not settings: a setting whose name ends in `_env` names the
environment variable that holds one.
"""

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fumehood.files import InputSettings, UploadSettings
from fumehood.models import ModelSettings, check_url, read_secret
from fumehood.setting_types import NonNegative, Positive, Seconds, SettingsSection

type Port = Annotated[int, Meta(ge=0, le=65_535)]
type LogLevel = Literal["debug", "info", "warning", "error"]

ENV_PREFIX = "FUMEHOOD_"
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SQLITE_PREFIX = "sqlite:///"
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")


class ConfigError(ValueError):
    """One sentence: the source, the setting, and what to do. It never contains a value that could be a secret."""


class ServerSettings(SettingsSection, frozen=True):
    """Where the gateway listens, and for whom."""

    host: str = "127.0.0.1"
    port: Port = 8080
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    shutdown_grace: Annotated[float, Meta(ge=0, le=3600)] = 30.0

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host name can resolve to anything
            return False


class StorageSettings(SettingsSection, frozen=True):
    """The database and the directory of files."""

    url: str = "sqlite:///fumehood.db"
    blobs: str = "./blobs"
    min_free_bytes: NonNegative = 256 << 20

    @property
    def database_path(self) -> Path:
        return Path(self.url.removeprefix(_SQLITE_PREFIX))


class CompactionKeySettings(SettingsSection, frozen=True):
    """The keys that seal compacted conversations. Without any, a key is created beside the database."""

    keys_file: str | None = None
    keys_env: str | None = None


class AuthSettings(SettingsSection, frozen=True):
    required: bool = True


class CodeInterpreterSettings(SettingsSection, frozen=True):
    """The code interpreter, its containers, and the sandbox server that runs them."""

    isolation: Literal["container", "execution"] = "container"
    execution_timeout: Seconds = 60.0
    claim_timeout: Seconds = 30.0
    sandbox_url: str | None = None
    sandbox_token_env: str | None = None
    sandbox_template: str | None = None
    sandbox_warm_pool: str | None = None
    sandbox_mode: Literal["namespaces", "unsafe-degraded"] = "namespaces"
    sandbox_limits: Literal["enforced", "best-effort"] = "enforced"
    sandbox_pool: Annotated[int, Meta(ge=0, le=1000)] = 4
    sandbox_capacity: Positive = 256
    sandbox_config: str | None = None
    allowed_domains: tuple[str, ...] = ()
    always_include_outputs: bool = False
    inline_bytes: NonNegative = 1 << 20
    inline_total_bytes: NonNegative = 4 << 20
    model_output_characters: Annotated[int, Meta(ge=100)] = 20_000
    stored_output_characters: Annotated[int, Meta(ge=100)] = 1 << 18
    file_bytes: Positive = 64 << 20
    container_bytes: Positive = 2 << 30
    container_files: Positive = 10_000
    idle_minutes: Positive = 20
    max_idle_minutes: Positive = 60
    max_lifetime_hours: Annotated[float, Meta(gt=0, le=8760)] = 24.0
    retention_hours: Annotated[float, Meta(ge=0, le=8760)] = 168.0
    retained_bytes: NonNegative = 2 << 30


class CodeInterpreterSection(SettingsSection, frozen=True):
    enabled: bool = True
    settings: CodeInterpreterSettings = CodeInterpreterSettings()


class ShellSettings(SettingsSection, frozen=True):
    execution_timeout: Seconds = 60.0
    model_output_characters: Annotated[int, Meta(ge=100)] = 20_000
    stored_output_characters: Annotated[int, Meta(ge=100)] = 1 << 18


class ShellSection(SettingsSection, frozen=True):
    """The shell runs in the containers of the code interpreter, and only if that is enabled."""

    enabled: bool = True
    settings: ShellSettings = ShellSettings()


class FileSearchSettings(SettingsSection, frozen=True):
    """Has no settings in this version: file search cannot be enabled yet."""


class FileSearchSection(SettingsSection, frozen=True):
    enabled: bool = False
    settings: FileSearchSettings = FileSearchSettings()


class WebSearchSettings(SettingsSection, frozen=True):
    backend: Literal["searxng"] = "searxng"
    url: str | None = None


class WebSearchSection(SettingsSection, frozen=True):
    enabled: bool = False
    settings: WebSearchSettings = WebSearchSettings()


class HostedToolsSection(SettingsSection, frozen=True):
    code_interpreter: CodeInterpreterSection = CodeInterpreterSection()
    shell: ShellSection = ShellSection()
    file_search: FileSearchSection = FileSearchSection()
    web_search: WebSearchSection = WebSearchSection()


class LimitSettings(SettingsSection, frozen=True):
    """Limits of requests, responses and readers."""

    requests_per_minute: Positive | None = None
    concurrent: Positive = 64
    concurrent_total: Positive = 512
    containers_per_tenant: Positive = 50
    body_bytes: Positive = 32 << 20
    body_bytes_total: Positive = 512 << 20
    min_body_bytes_per_second: NonNegative = 1024
    turns: Positive = 64
    response_seconds: Seconds = 1800.0
    max_turn_characters: Annotated[int, Meta(ge=1000)] = 1 << 22
    max_reader_lag_events: Positive = 10_000
    max_reader_lag_seconds: Seconds = 30.0


class TelemetrySettings(SettingsSection, frozen=True):
    """Metrics, traces and logs."""

    metrics: bool = True
    otlp: str | None = None
    profile: Literal["option1", "option2", "option3", "option3-alternative", "phoenix"] = "option2"
    content_bytes: Annotated[int, Meta(ge=10_000)] = 200_000
    redact: str | None = None
    provider_name: Annotated[str, Meta(min_length=1, max_length=64)] = "fumehood"
    log_format: Literal["text", "json"] = "text"
    log_level: LogLevel = "info"


class GatewayConfig(SettingsSection, frozen=True):
    """All settings. Without models, the built-in `direct` model executes the code of the user's message."""

    server: ServerSettings = ServerSettings()
    models: tuple[ModelSettings, ...] = ()
    storage: StorageSettings = StorageSettings()
    compaction: CompactionKeySettings = CompactionKeySettings()
    inputs: InputSettings = InputSettings()
    auth: AuthSettings = AuthSettings()
    providers: HostedToolsSection = HostedToolsSection()
    files: UploadSettings = UploadSettings()
    limits: LimitSettings = LimitSettings()
    telemetry: TelemetrySettings = TelemetrySettings()


# ---- reading ----------------------------------------------------------------------------------------------------


def load_config(
    file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> GatewayConfig:
    """Read the file, then the environment, then `overrides` by dotted path; later ones win. Raises ConfigError."""
    tree = {} if file is None else _read_yaml(file)
    where = "the configuration" if file is None else str(file)
    for variable, text in sorted(environ.items()):
        path = _parse_variable_name(variable)
        if path is not None:
            _set_at_path(tree, path, _parse_variable(_find_setting_type(path, variable), text, variable))
    for dotted, value in (overrides or {}).items():
        _set_at_path(tree, dotted.split("."), value)
    _check_names(tree, GatewayConfig, where, "")
    try:
        config = msgspec.convert(tree, GatewayConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_format_validation_error(str(error))}") from None
    for problem in _find_problems(config):
        raise ConfigError(f"{where}: {problem}")
    return config


def resolve_secret(environ: Mapping[str, str], variable: str | None, setting: str) -> str | None:
    """Read the secret from the variable that `setting` names. Raises ConfigError if it is missing or malformed."""
    if variable is None:
        return None
    try:
        return read_secret(environ, variable)
    except (KeyError, ValueError):
        raise ConfigError(
            f"{setting} names the variable {variable}, which is not set or holds no valid key."
        ) from None


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        content: object = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from None
    except UnicodeError:
        raise ConfigError(f"{file} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(
            f"{file} is not YAML{line}: {getattr(error, 'problem', 'it cannot be read')}."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} should hold sections such as `server:` and `models:`.")
    return cast("dict[str, Any]", content)


def _parse_variable_name(variable: str) -> list[str] | None:
    """The path of the setting that a variable names; None if it names none."""
    rest = variable.removeprefix(ENV_PREFIX)
    if rest == variable or ("__" not in rest and rest != "MODELS"):
        return None
    return rest.lower().split("__")


def _set_at_path(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        below: object = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = cast("dict[str, Any]", below)
    tree[path[-1]] = value


def _find_setting_type(path: Sequence[str], variable: str) -> Any:
    """The type of the setting at a path."""
    kind: Any = GatewayConfig
    for depth, name in enumerate(path):
        if not _is_section(kind):
            raise ConfigError(f"{variable}: {'.'.join(path[:depth])} has no settings below it.")
        hints = get_type_hints(kind, include_extras=True)
        if name not in hints:
            raise ConfigError(f"{variable}: {_describe_unknown_setting(name, hints, '.'.join(path[:depth]))}")
        kind = hints[name]
    return kind


def _parse_variable(kind: Any, text: str, variable: str) -> object:
    """Convert the text of a variable to what the file would hold."""
    plain, optional = _unwrap_optional(kind)
    if optional and text.strip().lower() in ("", "null", "none"):
        return None
    if get_origin(plain) is tuple or _is_section(plain):
        return _parse_structured_variable(plain, text, variable)
    if plain is str or get_origin(plain) is Literal:
        return text
    try:
        return msgspec.convert(text.strip(), plain, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{variable}: {_format_validation_error(str(error))}") from None


def _parse_structured_variable(kind: Any, text: str, variable: str) -> object:
    if get_origin(kind) is tuple and get_args(kind)[0] is str and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise ConfigError(f"{variable} should hold JSON.") from None


# ---- consistency checks --------------------------------------------------------------------------------------


def _find_problems(config: GatewayConfig) -> Iterator[str]:
    """Problems in settings that are valid one by one."""
    for number, model in enumerate(config.models):
        for problem in _find_variable_problems("api_key_env", model.api_key_env):
            yield f"models[{number}].{problem}"
    for origin in config.server.cors_origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            yield "server.cors_origins: write an origin as browsers do, e.g. https://app.example, or *."
    interpreter = config.providers.code_interpreter
    if interpreter.enabled:
        for problem in _find_interpreter_problems(interpreter.settings):
            yield f"providers.code_interpreter.settings.{problem}"
    yield from _find_input_problems(config.inputs)
    yield from _find_telemetry_problems(config.telemetry)
    for problem in _find_variable_problems("keys_env", config.compaction.keys_env):
        yield f"compaction.{problem}"
    if config.compaction.keys_env is not None and config.compaction.keys_file is not None:
        yield "compaction.keys_env: it excludes keys_file; set only one of them."
    if not config.storage.url.startswith(_SQLITE_PREFIX) or config.storage.url == _SQLITE_PREFIX:
        yield "storage.url: only sqlite:///FILE is supported."
    for name, enabled in (
        ("providers.file_search.enabled", config.providers.file_search.enabled),
        ("providers.web_search.enabled", config.providers.web_search.enabled),
    ):
        if enabled:
            yield f"{name}: this version does not support it yet; set it to false."


def _find_telemetry_problems(settings: TelemetrySettings) -> Iterator[str]:
    if settings.otlp is not None and not settings.otlp.startswith(("http://", "https://")):
        yield "telemetry.otlp: write a URL such as http://HOST:4318."


def _find_input_problems(settings: InputSettings) -> Iterator[str]:
    for network in settings.fetch_private_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError:
            yield "inputs.fetch_private_networks: write a network as 10.1.0.0/16."


def _find_interpreter_problems(settings: CodeInterpreterSettings) -> Iterator[str]:
    uses_cluster = settings.sandbox_template is not None or settings.sandbox_warm_pool is not None
    if settings.sandbox_url is not None and uses_cluster:
        yield "sandbox_url: it excludes sandbox_template and sandbox_warm_pool; set only one kind."
    if uses_cluster:
        yield "sandbox_template: this version cannot claim pods yet; set sandbox_url, or neither."
    if settings.sandbox_url is not None:
        yield from _find_url_problems("sandbox_url", settings.sandbox_url)
    elif settings.sandbox_token_env is not None:
        yield "sandbox_token_env: it needs a sandbox_url; the embedded server has no token."
    yield from _find_variable_problems("sandbox_token_env", settings.sandbox_token_env)
    if settings.idle_minutes > settings.max_idle_minutes:
        yield "idle_minutes: it must not exceed max_idle_minutes."


def _find_url_problems(setting: str, url: str) -> Iterator[str]:
    if url.startswith("unix:/"):
        return
    try:
        check_url(setting, url, "http://127.0.0.1:8000 or unix:/run/sandbox.sock")
    except ValueError as error:
        yield f"{error}."


def _find_variable_problems(setting: str, variable: str | None) -> Iterator[str]:
    if variable is not None and _VARIABLE_NAME.fullmatch(variable) is None:
        yield f"{setting}: give the name of a variable, not its value."


# ---- names and types --------------------------------------------------------------------------------------------


def _resolve_alias(kind: Any) -> Any:
    while True:
        if isinstance(kind, TypeAliasType):
            kind = kind.__value__
        elif get_origin(kind) is Annotated and _is_section(get_args(kind)[0]):
            kind = get_args(kind)[0]
        else:
            return kind


def _unwrap_optional(kind: Any) -> tuple[Any, bool]:
    kind = _resolve_alias(kind)
    if isinstance(kind, UnionType) and NoneType in get_args(kind):
        return _resolve_alias(next(part for part in get_args(kind) if part is not NoneType)), True
    return kind, False


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _check_names(tree: object, kind: Any, where: str, path: str) -> None:
    """Reject unknown settings, with a suggestion, and unknown choices. Raises ConfigError."""
    if get_origin(kind) is Literal and isinstance(tree, str) and tree not in get_args(kind):
        raise ConfigError(f"{where}: {path}: {tree[:200]!r} is not one of {', '.join(get_args(kind))}.")
    if get_origin(kind) is tuple and isinstance(tree, list):
        for number, element in enumerate(cast("list[object]", tree)):
            _check_names(element, get_args(kind)[0], where, f"{path}[{number}]")
    if not _is_section(kind) or not isinstance(tree, dict):
        return
    hints = get_type_hints(kind, include_extras=True)
    section = cast("dict[str, object]", tree)
    for name, value in [*section.items()]:
        if name not in hints:
            raise ConfigError(f"{where}: {_describe_unknown_setting(str(name), hints, path)}")
        below, _ = _unwrap_optional(hints[name])
        if value is None and (_is_section(below) or get_origin(below) is tuple):
            del section[name]  # an empty section
        else:
            _check_names(value, below, where, f"{path}.{name}" if path else name)


def _describe_unknown_setting(name: str, known: Mapping[str, Any], path: str) -> str:
    full = f"{path}.{name}" if path else name
    if f"{name}_env" in known:
        return (
            f"{full} must not be in the configuration: put it into a variable, and name that in {name}_env."
        )
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
    return f"there is no setting {full[:200]}; {advice}"


def _format_validation_error(text: str) -> str:
    """msgspec's message with the setting first."""
    message, _, path = text.partition(" - at ")
    setting = path.strip("`").removeprefix("$").removeprefix(".")
    message = message.replace("`", "").replace("Expected", "expected", 1).replace("Invalid", "invalid", 1)
    return f"{setting}: {message}." if setting else f"{message}."
