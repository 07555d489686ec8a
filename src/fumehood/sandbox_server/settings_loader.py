"""Loads and checks the settings of the sandbox server."""

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fumehood.configuration import ConfigError, ConfigSchema, LoadedConfig, load_settings
from fumehood.http_server.address_policy import parse_networks
from fumehood.http_server.secret_files import InsecureSecretFile, check_secret_file
from fumehood.sandbox_server.egress.domain_parsing import parse_domain_name
from fumehood.sandbox_server.settings import SandboxServerSettings

ENVIRONMENT_PREFIX = "FUMEHOOD_SANDBOX_"
SETTING_NAMES = tuple(field.name for field in fields(SandboxServerSettings))
# Variables with this prefix that the command itself reads.
_COMMAND_VARIABLES = frozenset({"TOKEN", "METRICS_TOKEN", "CONFIG"})
# Kubernetes sets these for every service called fumehood-sandbox.
_KUBERNETES_VARIABLE = re.compile(r"SERVICE_(HOST|PORT)(_.*)?|PORT(_.*)?")
_COMMAND_LINE_OPTIONS = frozenset(
    {
        "listen",
        "socket",
        "token_file",
        "metrics_token_file",
        "grace",
        "exit_with_stdin",
        "log_format",
        "log_level",
        "config",
    }
)


def load_sandbox_config(
    file: Path | None,
    environ: Mapping[str, str],
    *,
    options: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> LoadedConfig[SandboxServerSettings]:
    """Read `defaults`, the file, FUMEHOOD_SANDBOX_… variables and `options`; later ones win. Raises ConfigError."""
    loaded = load_settings(SANDBOX_SCHEMA, file, environ, options=options, defaults=defaults)
    if loaded.settings.idle_seconds == 0:  # never
        return replace(loaded, settings=replace(loaded.settings, idle_seconds=None))
    return loaded


def _names_setting(rest: str) -> bool:
    return rest not in _COMMAND_VARIABLES and _KUBERNETES_VARIABLE.fullmatch(rest) is None


def _explain_unknown(name: str) -> str | None:
    if name in _COMMAND_LINE_OPTIONS:
        return f"it is an option of the command: --{name.replace('_', '-')}."
    if name == "token":
        return "put the token into a file of its own and name that with --token-file."
    return None


def _check_file(file: Path, status: os.stat_result, content: Mapping[str, Any]) -> None:
    address = content.get("index_url")
    if not isinstance(address, str) or "@" not in address.partition("://")[2].partition("/")[0]:
        return
    try:
        check_secret_file(status, file)
    except InsecureSecretFile as error:
        raise ConfigError(f"{file}: index_url holds a password, and the file is not safe: {error}.") from None


# ---- values ---------------------------------------------------------------------------------------------------


def _find_problems(settings: SandboxServerSettings) -> Iterator[str]:
    for name, check in _CHECKS.items():
        value = getattr(settings, name)
        if value is not None:
            try:
                check(value)
            except (OSError, ValueError) as error:
                yield f"{name}: {error}."


def _check_index_url(url: str) -> None:
    if not url.startswith(("https://", "http://", "file://")):
        raise ValueError("expected a URL that begins with https://, http:// or file://")


def _check_domains(domains: tuple[str, ...]) -> None:
    for domain in domains:
        try:
            parse_domain_name(domain)
        except ValueError as error:
            raise ValueError(f"{domain!r} cannot be allowed: {error}") from None


def _check_hosts(hosts: Mapping[str, str]) -> None:
    _check_domains(tuple(hosts))
    for address in hosts.values():
        ipaddress.ip_address(address)


def _check_ca_file(file: Path) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise ValueError(f"{file} holds no certificates in PEM form") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "index_url": _check_index_url,
    "egress_domains": _check_domains,
    "egress_private_networks": parse_networks,
    "egress_hosts": _check_hosts,
    "egress_ca_file": _check_ca_file,
    "find_links": _check_directory,
}

SANDBOX_SCHEMA = ConfigSchema(
    settings=SandboxServerSettings,
    prefix=ENVIRONMENT_PREFIX,
    example="settings such as `pool: 4`",
    is_setting_variable=_names_setting,
    explain_unknown=_explain_unknown,
    find_problems=_find_problems,
    check_file=_check_file,
)
