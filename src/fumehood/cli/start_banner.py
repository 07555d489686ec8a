"""Prints what a server serves, once it is ready."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fumehood.gateway_config import CodeInterpreterSettings, GatewayConfig, StorageLocation
    from fumehood.sandbox_server.settings import SandboxServerSettings

_MAX_MODELS = 8
_JSON = "-H 'content-type: application/json'"
DIRECT_MODEL = "direct"


def print_banner(rows: Mapping[str, str]) -> None:
    """Print the rows to standard error, below the address that is on standard output."""
    sys.stdout.flush()
    width = max(map(len, rows))
    print(
        *(f"  {name:{width}}  {text}" for name, text in rows.items()), sep="\n", file=sys.stderr, flush=True
    )


# ---- the gateway ------------------------------------------------------------------------------------------------


def describe_models(config: "GatewayConfig", listed: list[str] | None) -> str:
    """listed: the names that the model servers list; None if nobody asked them."""
    if not config.models:
        return "direct, which runs the code it is sent; set a model server with --upstream URL"
    servers = ", ".join(dict.fromkeys(model.base_url or model.backend for model in config.models))
    if listed:
        more = f" and {len(listed) - _MAX_MODELS} more" if len(listed) > _MAX_MODELS else ""
        return f"{', '.join(listed[:_MAX_MODELS])}{more} (from {servers})"
    patterns = ", ".join(dict.fromkeys(model.match for model in config.models))
    return f"{patterns} (from {servers}{'' if listed is None else ', which lists none now'})"


def describe_degraded(reasons: Sequence[str]) -> str:
    """reasons: why model servers cannot serve."""
    return f"{' '.join(reasons)} `fumehood doctor --upstream URL` says more."


def describe_data(location: "StorageLocation") -> str:
    directory = location.directory.absolute()
    if (location.database, location.blobs) == (
        location.directory / "fumehood.db",
        location.directory / "blobs",
    ):
        return str(directory)
    return f"{location.database.absolute()}, files in {location.blobs.absolute()}"


def describe_keys(key_count: int | None, *, is_keyless: bool, is_loopback: bool, create: str) -> str:
    """create: the command that creates a key for this gateway."""
    audience = "this machine" if is_loopback else "everybody"
    if key_count is None:
        return f"not required (auth.required is false): open to {audience}"
    if is_keyless:
        return f"none, open to {audience}; `{create}` creates one, which is then required"
    if not key_count:
        return f"required, but all are revoked: `{create}` creates one"
    return f"required; there {'is one' if key_count == 1 else f'are {key_count}'}. `{create}` creates another"


def describe_sandboxes(settings: "CodeInterpreterSettings", *, enabled: bool) -> str:
    if not enabled:
        return "off (providers.code_interpreter.enabled is false)"
    if settings.sandbox_url is not None:
        return f"from {settings.sandbox_url}"
    if settings.claims_pods:
        pools = [
            settings.sandbox_warm_pool or settings.sandbox_template,
            *settings.sandbox_warm_pools.values(),
        ]
        return f"pods of {', '.join(dict.fromkeys(filter(None, pools)))}, claimed from agent-sandbox"
    limits = _describe_limits(settings.sandbox_limits)
    pool = _describe_pool(settings.sandbox_pool, settings.sandbox_capacity)
    return f"on this host, mode {settings.sandbox_mode}, {limits}, {pool}"


def suggest_request(url: str, model: str | None, *, runs_code: bool, needs_key: bool) -> str:
    """model: a model to ask; None if none is known."""
    key = ' -H "authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    if model is None:
        return f"curl {url}/v1/models{key}"
    question = "```python\nprint(6 * 7)\n```" if model == DIRECT_MODEL else "What is 6 * 7? Compute it."
    body = {"model": model, "tools": [{"type": "code_interpreter"}] if runs_code else [], "input": question}
    return f"curl {url}/v1/responses{key} {_JSON} -d {shlex.quote(json.dumps(body))}"


def keys_command(config: Path | None, data: Path | None) -> str:
    """The command that creates a key in the database of these options."""
    options = [("--config", config), ("--data", data)]
    given = [f" {name} {shlex.quote(str(value))}" for name, value in options if value is not None]
    return f"fumehood keys create{''.join(given)}"


# ---- the sandbox server -----------------------------------------------------------------------------------------


def describe_sandbox_server(
    settings: "SandboxServerSettings", url: str, *, has_token: bool
) -> Mapping[str, str]:
    network = "off"
    if settings.egress != "off":
        domains = settings.egress_domains
        network = "allow-lists of any domain" if domains is None else f"allow-lists of {', '.join(domains)}"
    return {
        "sandboxes": f"{_describe_limits(settings.limits)}, {_describe_pool(settings.pool, settings.capacity)}",
        "token": "required" if has_token else "none, open to this machine",
        "packages": "callers and code may install them" if settings.packages else "those that are installed",
        "network": network,
        "try": _suggest_execution(url, has_token=has_token),
    }


def _suggest_execution(url: str, *, has_token: bool) -> str:
    server = url
    if url.startswith("unix:"):
        server = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    key = ' -H "authorization: Bearer $FUMEHOOD_SANDBOX_TOKEN"' if has_token else ""
    return f'curl {server}/execute{key} {_JSON} -d \'{{"code": "print(6 * 7)"}}\''


def _describe_limits(limits: str) -> str:
    return "limits enforced" if limits == "enforced" else f"limits {limits}: memory may not be limited"


def _describe_pool(pool: int, capacity: int) -> str:
    return f"{pool} kept warm, at most {capacity}"
