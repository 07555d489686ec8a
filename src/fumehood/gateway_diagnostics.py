"""Checks for `fumehood doctor --config`: whether a gateway with these settings can serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import fumehood
from fumehood.gateway_config import CodeInterpreterSettings, ConfigError, GatewayConfig
from fumehood.models import ModelSettings, Secret, read_secret
from fumehood.models.upstream_checks import diagnose_upstream
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.sandbox_client import RemoteSandboxProvider
from fumehood.sandbox_client.kubernetes import diagnose_cluster
from fumehood.sandbox_server.diagnostics import diagnose
from fumehood.sandbox_server.settings_loader import load_sandbox_config
from fumehood.sandbox_wiring import open_cluster_api, read_sandbox_token

type GatewayFindingState = Literal["ok", "warning", "missing"]


class _Finding(Protocol):
    """What the checks of hosts, clusters and model servers have in common."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> GatewayFindingState: ...

    @property
    def detail(self) -> str: ...

    @property
    def advice(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GatewayFinding:
    """`missing` keeps the gateway from serving, `warning` limits it; `advice` says what to do."""

    name: str
    state: GatewayFindingState
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Everything that was found about what a gateway needs."""

    is_usable: bool
    findings: Sequence[GatewayFinding]


async def diagnose_gateway(config: GatewayConfig, environ: Mapping[str, str]) -> GatewayReport:
    """Check what the settings refer to: the sandboxes, and each model server, by trial requests."""
    findings: list[GatewayFinding] = []
    interpreter = config.providers.code_interpreter
    if interpreter.enabled:
        try:
            findings += await _check_sandboxes(interpreter.settings, environ)
        except ConfigError as error:
            findings.append(GatewayFinding("sandboxes", "missing", str(error), "Correct the setting."))
    else:
        detail = "Off: providers.code_interpreter.enabled is false."
        findings.append(GatewayFinding("sandboxes", "warning", detail))
    if not config.models:
        detail = "None: only `direct` runs the code that it is sent."
        findings.append(GatewayFinding("models", "warning", detail, "Name a model server in `models`."))
    for model in config.models:
        findings += await _check_model(model, environ)
    return GatewayReport(all(finding.state != "missing" for finding in findings), findings)


async def _check_sandboxes(
    settings: CodeInterpreterSettings, environ: Mapping[str, str]
) -> list[GatewayFinding]:
    """Raises ConfigError."""
    if settings.claims_pods:
        return await _check_cluster(settings, environ)
    if settings.sandbox_url is not None:
        return [await _check_server(settings.sandbox_url, read_sandbox_token(settings, environ))]
    named = settings.sandbox_config
    loaded = load_sandbox_config(
        None if named is None else Path(named),
        environ,
        options={"mode": settings.sandbox_mode, "limits": settings.sandbox_limits},
    ).settings
    report = await diagnose(replace(loaded, pool=0, capacity=1))
    return [_prefix("sandboxes", finding) for finding in report.findings]


async def _check_cluster(
    settings: CodeInterpreterSettings, environ: Mapping[str, str]
) -> list[GatewayFinding]:
    read_sandbox_token(settings, environ)
    api = open_cluster_api(settings, environ)
    try:
        findings = await diagnose_cluster(
            api,
            settings.sandbox_namespace or api.namespace,
            settings.sandbox_template,
            settings.sandbox_warm_pool,
            settings.sandbox_warm_pools,
            fumehood.__version__,
        )
    finally:
        await api.close()
    return [_prefix("cluster", finding) for finding in findings]


async def _check_server(url: str, token: str | None) -> GatewayFinding:
    async with RemoteSandboxProvider(url, token) as remote:
        try:
            health = await remote.health()
            count = len(await remote.list_sandboxes())
        except SandboxError as error:
            advice = "Start `fumehood sandbox` there, and check sandbox_url and its token."
            return GatewayFinding("sandboxes: server", "missing", error.message, advice)
    detail = f"{url} answers: mode {health.mode}, version {health.version}, {count} of {health.capacity} sandboxes."
    return GatewayFinding("sandboxes: server", "ok", detail)


async def _check_model(model: ModelSettings, environ: Mapping[str, str]) -> list[GatewayFinding]:
    where = f"model {model.match}"
    if model.base_url is None:
        return [GatewayFinding(where, "ok", f"{model.backend}: it needs no server.")]
    if model.backend != "chat_completions":
        detail = f"{model.base_url} is not checked: trial requests are made for chat completions only."
        return [GatewayFinding(where, "warning", detail)]
    try:
        key = None if model.api_key_env is None else Secret(read_secret(environ, model.api_key_env))
    except (KeyError, ValueError):
        detail = f"The variable {model.api_key_env} is not set, or holds no valid key."
        return [GatewayFinding(where, "missing", detail, "Set it for the gateway.")]
    name = model.name or (None if model.is_pattern else model.match)
    report = await diagnose_upstream(model.base_url, key, name)
    return [_prefix(where, finding) for finding in report.findings]


def _prefix(where: str, finding: _Finding) -> GatewayFinding:
    return GatewayFinding(f"{where}: {finding.name}", finding.state, finding.detail, finding.advice)
