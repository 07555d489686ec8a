"""Loads and validates the settings from a TOML file and from environment variables."""

import difflib
import ipaddress
import math
import os
import re
import ssl
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAliasType, get_args, get_origin, get_type_hints

import msgspec

from fumehood.http_server.address_policy import parse_networks
from fumehood.http_server.secret_files import InsecureSecretFile, check_secret_file
from fumehood.sandbox_server.egress.domain_names import parse_domain_name
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
_BYTE_SETTINGS = frozenset(name for name in SETTING_NAMES if name.endswith("_bytes")) | {
    *("tenant_memory", "memory_total", "disk_reserve"),
}
_SIZE_PATTERN = re.compile(r"(\d+) ?([kmgt])(?:ib)?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_ZERO_ALLOWED = frozenset(
    {
        *("pool", "queued_executions", "retained_executions", "retained_output_bytes"),
        *("max_tombstones", "tombstone_seconds"),
        *("produced_files", "produced_bytes", "interrupt_grace", "disk_backing_ratio", "disk_reserve"),
    }
)
_NONE_IF_ZERO = frozenset({"idle_seconds"})
_MIN_UID, _MAX_UID = 65_536, 4_000_000_000


class InvalidSetting(ValueError):
    """Names the source, the setting and what is expected; never the value, which may hold credentials."""


def load_setting_values(file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by setting name; environment variables override the file. Raises InvalidSetting."""
    return {**(_load_file(file) if file is not None else {}), **_load_environment(environ)}


def _load_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            content = tomllib.loads(opened.read().decode("utf-8"))
        if _holds_password(content.get("index_url")):
            check_secret_file(status, file)
    except InsecureSecretFile as error:
        raise InvalidSetting(
            f"index_url in {file} holds a password, and the file is not safe: {error}"
        ) from None
    except OSError as error:
        raise InvalidSetting(f"{file}: {error.strerror}") from None
    except UnicodeError:
        raise InvalidSetting(f"{file} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f"{file} is not TOML: {error}") from None
    return {
        name: _convert_value(name, value, f"{name} in {file}", strict=True) for name, value in content.items()
    }


def _holds_password(address: object) -> bool:
    return isinstance(address, str) and "@" in address.partition("://")[2].partition("/")[0]


def _load_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        rest = variable.removeprefix(ENVIRONMENT_PREFIX)
        if rest == variable or rest in _COMMAND_VARIABLES or _KUBERNETES_VARIABLE.fullmatch(rest):
            continue
        name = rest.lower()
        values[name] = _convert_value(name, text, variable, strict=False)
    return values


def _convert_value(name: str, value: object, where: str, *, strict: bool) -> Any:
    if name not in SETTING_NAMES:
        raise InvalidSetting(f"{where}: {_explain_unknown_setting(name)}")
    hint = _get_type(name)
    if _is_optional(hint) and (value == "none" or (name in _NONE_IF_ZERO and value in (0, "0"))):
        return None
    if name in _BYTE_SETTINGS and isinstance(value, str) and (size := _SIZE_PATTERN.fullmatch(value.strip())):
        value = int(size[1]) * _UNITS[size[2].lower()]
    elif not strict and isinstance(value, str):
        value = _split_text(hint, value.strip())
    try:
        converted = msgspec.convert(value, hint, strict=strict, dec_hook=_decode_path)
    except (msgspec.ValidationError, ValueError):
        raise InvalidSetting(f"{where} must be {_describe_type(name, hint)}") from None
    try:
        _check_value(name, converted)
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{where}: {error}") from None
    return converted


def _explain_unknown_setting(name: str) -> str:
    if name in _COMMAND_LINE_OPTIONS:
        return f"this is no setting, but an option of the command: --{name.replace('_', '-')}"
    if name == "token":
        return "put the token into a file of its own and name it with --token-file"
    close = difflib.get_close_matches(name, SETTING_NAMES, n=1)
    return f"there is no such setting; {f'did you mean {close[0]}?' if close else 'docs/sandbox-server.md has all'}"


# ---- types ----------------------------------------------------------------------------------------------------


def _get_type(name: str) -> Any:
    hint = get_type_hints(SandboxServerSettings)[name]
    return hint.__value__ if isinstance(hint, TypeAliasType) else hint


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, UnionType) and NoneType in get_args(hint)


def _strip_none(hint: Any) -> Any:
    """The type without `| None`."""
    return next(kind for kind in get_args(hint) if kind is not NoneType) if _is_optional(hint) else hint


def _decode_path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str) or not Path(value).is_absolute():
        raise ValueError("not an absolute path")
    return Path(value)


def _split_text(hint: Any, text: str) -> object:
    """Parse the one-line form of lists and tables."""
    origin = get_origin(_strip_none(hint))
    if origin not in (tuple, Mapping):
        return {"on": "true", "off": "false"}.get(text, text) if hint is bool else text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if origin is tuple:
        return parts
    pairs = [part.partition("=") for part in parts]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _describe_type(name: str, hint: Any) -> str:
    kind = _strip_none(hint)
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(get_args(kind))
    if origin is tuple:
        return f"a list of {'numbers' if int in get_args(kind) else 'texts'}; in a variable, with commas between them"
    if origin is Mapping:
        return "a table of names and addresses; in a variable, name=address with commas between them"
    if name in _BYTE_SETTINGS:
        return "a number of bytes, or a text such as 512m or 4g"
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "an absolute path"}
    return words.get(kind, "a text")


# ---- values ---------------------------------------------------------------------------------------------------


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        minimum = "at least 0" if name in _ZERO_ALLOWED else "more than 0"
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _ZERO_ALLOWED):
            raise ValueError(f"it must be {minimum}")
    if (check := _CHECKS.get(name)) is not None and value is not None:
        check(value)


def _check_uid_base(first: int) -> None:
    if not _MIN_UID <= first <= _MAX_UID:
        raise ValueError(f"it must be from {_MIN_UID} to {_MAX_UID}, where no other users are")


def _check_index_url(url: str) -> None:
    if not url.startswith(("https://", "http://", "file://")):
        raise ValueError("it must be a URL that begins with https://, http:// or file://")


def _check_domains(domains: tuple[str, ...]) -> None:
    for domain in domains:
        try:
            parse_domain_name(domain)
        except ValueError as error:
            raise ValueError(f"{domain!r} cannot be allowed: {error}") from None


def _check_ports(ports: tuple[int, ...]) -> None:
    if not all(0 < port < 65536 for port in ports):
        raise ValueError("a port is a number from 1 to 65535")


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
    "uid_base": _check_uid_base,
    "index_url": _check_index_url,
    "egress_domains": _check_domains,
    "egress_ports": _check_ports,
    "egress_private_networks": parse_networks,
    "egress_hosts": _check_hosts,
    "egress_ca_file": _check_ca_file,
    "find_links": _check_directory,
}
