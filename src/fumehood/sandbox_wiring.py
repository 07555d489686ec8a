"""Opens the sandboxes that the configuration asks for: of this host, of another server, or of a cluster."""

import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from fumehood.gateway_config import CodeInterpreterSettings, ConfigError, GatewayConfig, resolve_secret
from fumehood.gateway_stats import ClaimStats
from fumehood.http_server.secret_files import InsecureSecretFile, read_secret_file
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_client import LocalServerProvider, LocalServerSettings, RemoteSandboxProvider
from fumehood.sandbox_client.kubernetes import (
    ClaimSettings,
    CredentialsError,
    KubernetesApi,
    KubernetesSandboxProvider,
    WarmPoolError,
    find_warm_pools,
    load_credentials,
)

type GatewaySandboxProvider = LocalServerProvider | RemoteSandboxProvider | KubernetesSandboxProvider

_SECTION = "providers.code_interpreter.settings"
_CLAIM_SLACK_SECONDS = 600.0
_MAX_TOKEN_BYTES = 1 << 14


class StartupError(Exception):
    """The gateway cannot start on this machine. The message says why and what to do."""


def has_local_sandboxes(config: GatewayConfig) -> bool:
    """Whether sandboxes run in a server of this process, and end with it."""
    interpreter = config.providers.code_interpreter
    return interpreter.settings.sandbox_url is None and not (
        interpreter.enabled and interpreter.settings.claims_pods
    )


def get_memory_tiers(sandboxes: GatewaySandboxProvider) -> tuple[MemoryTier, ...] | None:
    """Return the tiers that there are sandboxes of; None if the server makes any."""
    return sandboxes.memory_tiers if isinstance(sandboxes, KubernetesSandboxProvider) else None


async def open_sandboxes(
    config: GatewayConfig, environ: Mapping[str, str], stack: AsyncExitStack, gateway: str, stats: ClaimStats
) -> GatewaySandboxProvider:
    """Connect to a sandbox server or a cluster, or start a local server. Raises ConfigError, StartupError.

    A local server is started, and a cluster asked, only if the code interpreter is enabled.

    gateway: identifies the containers' database.
    """
    interpreter = config.providers.code_interpreter
    settings = interpreter.settings
    if settings.sandbox_url is not None:
        remote = RemoteSandboxProvider(settings.sandbox_url, token=read_sandbox_token(settings, environ))
        stack.push_async_callback(remote.close)
        return remote
    if not has_local_sandboxes(config):
        return await _open_cluster(config, environ, stack, gateway, stats)
    local = LocalServerProvider(_build_local_settings(settings, environ))
    stack.push_async_callback(local.close)
    if interpreter.enabled:
        try:
            await local.start()
        except SandboxError as error:
            raise StartupError(f"{error.message} `fumehood doctor` says what to do.") from error
    return local


def read_sandbox_token(settings: CodeInterpreterSettings, environ: Mapping[str, str]) -> str | None:
    """Return the token of the sandbox servers. Raises ConfigError."""
    if settings.sandbox_token_file is None:
        return resolve_secret(environ, settings.sandbox_token_env, f"{_SECTION}.sandbox_token_env")
    setting = f"{_SECTION}.sandbox_token_file: {settings.sandbox_token_file}"
    try:
        content = read_secret_file(Path(settings.sandbox_token_file), _MAX_TOKEN_BYTES)
        token = content.decode("ascii").strip()
    except InsecureSecretFile as error:
        raise ConfigError(f"{setting}: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{setting} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting} holds no valid token: printable ASCII without spaces.")
    return token


def open_cluster_api(settings: CodeInterpreterSettings, environ: Mapping[str, str]) -> KubernetesApi:
    """Return the API server of the cluster, without asking it anything. Raises ConfigError."""
    try:
        return KubernetesApi(load_credentials(settings.sandbox_kubeconfig, environ))
    except CredentialsError as error:
        raise ConfigError(f"{_SECTION}.sandbox_kubeconfig: {error}.") from error


async def _open_cluster(
    config: GatewayConfig, environ: Mapping[str, str], stack: AsyncExitStack, gateway: str, stats: ClaimStats
) -> KubernetesSandboxProvider:
    settings = config.providers.code_interpreter.settings
    token = read_sandbox_token(settings, environ)
    api = open_cluster_api(settings, environ)
    stack.push_async_callback(api.close)
    namespace = settings.sandbox_namespace or api.namespace
    advice = "`fumehood doctor --config FILE` says more."
    try:
        pools = await find_warm_pools(
            api,
            namespace,
            settings.sandbox_template,
            settings.sandbox_warm_pool,
            settings.sandbox_warm_pools,
        )
    except WarmPoolError as error:
        raise StartupError(f"Sandboxes cannot be claimed: {error}. {advice}") from error
    provider = KubernetesSandboxProvider(
        api,
        ClaimSettings(
            namespace=namespace,
            pools=pools,
            gateway=gateway,
            replica=_name_replica(),
            lifetime=_claim_lifetime(config),
            slack=_CLAIM_SLACK_SECONDS,
            in_flight=settings.claims_in_flight,
        ),
        token=token,
        port=settings.sandbox_port,
        stats=stats,
    )
    stack.push_async_callback(provider.close)
    try:
        await provider.start()
    except SandboxError as error:
        raise StartupError(f"{error.message} {advice}") from error
    return provider


def _claim_lifetime(config: GatewayConfig) -> float:
    """Seconds that a claim is needed if nobody extends it: a container's idle time, or the longest call."""
    settings = config.providers.code_interpreter.settings
    if settings.isolation == "container":
        return 60.0 * settings.max_idle_minutes
    return config.limits.response_seconds + settings.claim_timeout


def _name_replica() -> str:
    """Return a label for this process: the name of its pod or host."""
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in socket.gethostname())
    return f"{name[:48].strip('-') or 'gateway'}-{os.getpid()}"


def _build_local_settings(
    settings: CodeInterpreterSettings, environ: Mapping[str, str]
) -> LocalServerSettings:
    variables = {name: value for name, value in environ.items() if _is_sandbox_variable(name)}
    if settings.allowed_domains:
        variables["FUMEHOOD_SANDBOX_EGRESS"] = "allowlist"
        if "*" not in settings.allowed_domains:
            variables["FUMEHOOD_SANDBOX_EGRESS_DOMAINS"] = ",".join(settings.allowed_domains)
    return LocalServerSettings(
        mode=settings.sandbox_mode,
        limits=settings.sandbox_limits,
        pool=settings.sandbox_pool,
        capacity=settings.sandbox_capacity,
        options=()
        if settings.sandbox_config is None
        else ("--config", str(Path(settings.sandbox_config).absolute())),
        environment=variables,
    )


def _is_sandbox_variable(variable: str) -> bool:
    """Whether the sandbox server gets the variable: its settings, and package indexes, which may contain a password."""
    if variable.startswith("FUMEHOOD_SANDBOX_"):
        return variable not in (
            "FUMEHOOD_SANDBOX_TOKEN",
            "FUMEHOOD_SANDBOX_METRICS_TOKEN",
            "FUMEHOOD_SANDBOX_CONFIG",
        )
    return variable in ("FUMEHOOD_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
