"""The settings of the gateway: reads them from a YAML file and the environment, and validates them.

config.example.yaml describes every setting. Secrets are not settings: a setting whose name ends in `_env` names the
environment variable that holds one.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fumehood.configuration import (
    BYTES_UNIT,
    ByteSize,
    ConfigError,
    ConfigSchema,
    NonNegative,
    NonNegativeByteSize,
    Positive,
    Seconds,
    SettingsSection,
    load_settings,
)
from fumehood.files import InputSettings, UploadSettings
from fumehood.models import ModelSettings, check_url, read_secret
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier

__all__ = [
    "GATEWAY_SCHEMA",
    "CodeInterpreterSettings",
    "ConfigError",
    "GatewayConfig",
    "StorageLocation",
    "TelemetrySettings",
    "find_data_directory",
    "load_config",
    "resolve_secret",
]

type Port = Annotated[int, Meta(ge=0, le=65_535)]
type LogLevel = Literal["debug", "info", "warning", "error"]

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of objects in Kubernetes: a DNS subdomain.
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_MAX_OBJECT_NAME = 253
_SQLITE_PREFIX = "sqlite:///"
DATABASE_NAME = "fumehood.db"
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")


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


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where the gateway keeps its data; `is_default` if no setting says so."""

    directory: Path
    database: Path
    blobs: Path
    is_default: bool


class StorageSettings(SettingsSection, frozen=True):
    """The database and the directory of files.

    directory: contains both, unless `url` and `blobs` say otherwise; None means the user's data directory.
    """

    directory: str | None = None
    url: str | None = None
    blobs: str | None = None
    min_free_bytes: NonNegativeByteSize = 256 << 20

    def locate(self, environ: Mapping[str, str]) -> StorageLocation:
        """Where the data is. Relative paths are relative to the working directory. Raises ConfigError."""
        if self.url is not None:
            database = Path(self.url.removeprefix(_SQLITE_PREFIX))
            directory = database.parent
        else:
            directory = (
                find_data_directory(environ) if self.directory is None else Path(self.directory).expanduser()
            )
            database = directory / DATABASE_NAME
        blobs = directory / "blobs" if self.blobs is None else Path(self.blobs)
        return StorageLocation(
            directory, database, blobs, is_default=self.url is None and self.directory is None
        )


def find_data_directory(environ: Mapping[str, str]) -> Path:
    """systemd's STATE_DIRECTORY, else `fumehood` in the user's XDG data directory. Raises ConfigError."""
    if state := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(state)
    base = Path(environ.get("XDG_DATA_HOME", ""))
    if base.is_absolute():  # XDG: others are to be ignored
        return base / "fumehood"
    home = environ.get("HOME") or str(Path("~").expanduser())
    if not Path(home).is_absolute():
        raise ConfigError(
            "storage.directory: this user has no home directory: choose a directory with --data DIR."
        )
    return Path(home) / ".local" / "share" / "fumehood"


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
    sandbox_token_file: str | None = None
    sandbox_template: str | None = None
    sandbox_warm_pool: str | None = None
    sandbox_warm_pools: dict[MemoryTier, str] = msgspec.field(default_factory=dict[MemoryTier, str])
    sandbox_namespace: str | None = None
    sandbox_kubeconfig: str | None = None
    sandbox_port: Annotated[int, Meta(ge=1, le=65_535)] = 8080
    claims_in_flight: Positive = 64
    sandbox_mode: Literal["namespaces", "unsafe-degraded"] = "namespaces"
    sandbox_limits: Literal["enforced", "best-effort"] = "enforced"
    sandbox_pool: Annotated[int, Meta(ge=0, le=1000)] = 4
    sandbox_capacity: Positive = 256
    sandbox_config: str | None = None
    allowed_domains: tuple[str, ...] = ()
    always_include_outputs: bool = False
    inline_bytes: NonNegativeByteSize = 1 << 20
    inline_total_bytes: NonNegativeByteSize = 4 << 20
    model_output_characters: Annotated[int, Meta(ge=100)] = 20_000
    stored_output_characters: Annotated[int, Meta(ge=100)] = 1 << 18
    file_bytes: ByteSize = 64 << 20
    container_bytes: ByteSize = 2 << 30
    container_files: Positive = 10_000
    idle_minutes: Positive = 20
    max_idle_minutes: Positive = 60
    max_lifetime_hours: Annotated[float, Meta(gt=0, le=8760)] = 24.0
    retention_hours: Annotated[float, Meta(ge=0, le=8760)] = 168.0
    retained_bytes: NonNegativeByteSize = 2 << 30

    @property
    def claims_pods(self) -> bool:
        """Whether sandboxes are pods of a cluster."""
        return bool(self.sandbox_template or self.sandbox_warm_pool or self.sandbox_warm_pools)


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
    body_bytes: ByteSize = 32 << 20
    body_bytes_total: ByteSize = 512 << 20
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
    content_bytes: Annotated[int, Meta(ge=10_000, extra=BYTES_UNIT)] = 200_000
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


def _names_setting(rest: str) -> bool:
    return "__" in rest or rest == "MODELS"


def load_config(
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> GatewayConfig:
    """Read `defaults`, the file, the environment and `overrides`; later ones win. Raises ConfigError."""
    return load_settings(GATEWAY_SCHEMA, file, environ, options=overrides, defaults=defaults).settings


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
    yield from _find_storage_problems(config.storage)
    for name, enabled in (
        ("providers.file_search.enabled", config.providers.file_search.enabled),
        ("providers.web_search.enabled", config.providers.web_search.enabled),
    ):
        if enabled:
            yield f"{name}: this version does not support it yet; set it to false."


def _find_storage_problems(settings: StorageSettings) -> Iterator[str]:
    url = settings.url
    if url is not None and settings.directory is not None:
        yield "storage.url: it excludes directory; set only one of them."
    if url is not None and (not url.startswith(_SQLITE_PREFIX) or url == _SQLITE_PREFIX):
        yield "storage.url: only sqlite:///FILE is supported."


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
    uses_cluster = settings.claims_pods
    if settings.sandbox_url is not None and uses_cluster:
        yield "sandbox_url: it excludes sandbox_template and sandbox_warm_pool; set only one kind."
    if settings.sandbox_url is not None:
        yield from _find_url_problems("sandbox_url", settings.sandbox_url)
    yield from _find_token_problems(settings)
    if uses_cluster:
        yield from _find_cluster_problems(settings)
    else:
        for name, value in (
            ("sandbox_namespace", settings.sandbox_namespace),
            ("sandbox_kubeconfig", settings.sandbox_kubeconfig),
        ):
            if value is not None:
                yield f"{name}: it needs a sandbox_template or a sandbox_warm_pool."
    if settings.idle_minutes > settings.max_idle_minutes:
        yield "idle_minutes: it must not exceed max_idle_minutes."


def _find_token_problems(settings: CodeInterpreterSettings) -> Iterator[str]:
    for name, value in (
        ("sandbox_token_env", settings.sandbox_token_env),
        ("sandbox_token_file", settings.sandbox_token_file),
    ):
        if value is not None and settings.sandbox_url is None and not settings.claims_pods:
            yield f"{name}: it needs a sandbox_url; the embedded server has no token."
    if settings.sandbox_token_env is not None and settings.sandbox_token_file is not None:
        yield "sandbox_token_env: it excludes sandbox_token_file; set only one of them."
    yield from _find_variable_problems("sandbox_token_env", settings.sandbox_token_env)


def _find_cluster_problems(settings: CodeInterpreterSettings) -> Iterator[str]:
    if settings.sandbox_token_env is None and settings.sandbox_token_file is None:
        yield (
            "sandbox_token_file: pods require the token of their sandbox servers: name the file of the mounted Secret."
        )
    other = settings.sandbox_warm_pools.get("1g")
    if other is not None and (settings.sandbox_template or settings.sandbox_warm_pool not in (None, other)):
        yield (
            "sandbox_warm_pools: 1g is the pool of sandbox_warm_pool or sandbox_template; set it in one place only."
        )
    names = {
        "sandbox_template": settings.sandbox_template,
        "sandbox_warm_pool": settings.sandbox_warm_pool,
        "sandbox_namespace": settings.sandbox_namespace,
        **{f"sandbox_warm_pools.{tier}": pool for tier, pool in settings.sandbox_warm_pools.items()},
    }
    for setting, name in names.items():
        if name is not None and (len(name) > _MAX_OBJECT_NAME or _OBJECT_NAME.fullmatch(name) is None):
            yield f"{setting}: {name!r} cannot be a name in Kubernetes: lower-case letters, digits, - and . only."


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


GATEWAY_SCHEMA = ConfigSchema(
    settings=GatewayConfig,
    prefix="FUMEHOOD_",
    example="sections such as `server:` and `models:`",
    is_setting_variable=_names_setting,
    find_problems=_find_problems,
)
