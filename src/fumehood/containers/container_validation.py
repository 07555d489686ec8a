"""Validation of container specs and of file paths in containers."""

import msgspec

from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.domain_secret_sealer import find_forbidden_domain, normalize_domain
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import NetworkAllowlist

_MAX_NAME_LENGTH = 256
_MAX_COMPONENT_BYTES = 255
_MAX_PATH_DEPTH = 32
_MAX_PATH_BYTES = 4096
_RESERVED_PREFIX = ".fumehood-"  # of the sandbox server's own files in the data directory


def check_container_spec(spec: ContainerSpec, settings: ContainerSettings) -> ContainerSpec:
    """Return the spec with its defaults. Raises InvalidRequest for what the settings do not allow."""
    if not 0 < len(spec.name) <= _MAX_NAME_LENGTH or not spec.name.isprintable():
        raise _invalid_parameter("name", f"a name has 1 to {_MAX_NAME_LENGTH} printable characters")
    if isinstance(spec.network, NetworkAllowlist):
        _check_network(spec.network, settings)
    if settings.memory_tiers is not None and spec.memory not in settings.memory_tiers:
        tiers = " or ".join(settings.memory_tiers)
        raise _invalid_parameter(
            "memory_limit", f"this server has containers of {tiers}, not of {spec.memory}"
        )
    minutes = settings.idle_minutes
    if spec.idle_minutes is not None:
        minutes, maximum = spec.idle_minutes, settings.max_idle_minutes
        if not 1 <= minutes <= maximum:
            raise _invalid_parameter("expires_after.minutes", f"this server allows 1 to {maximum} minutes")
    if len(spec.file_ids) > settings.file_limits.files:
        raise _invalid_parameter("file_ids", f"a container has at most {settings.file_limits.files} files")
    return msgspec.structs.replace(spec, idle_minutes=minutes)


def _check_network(network: NetworkAllowlist, settings: ContainerSettings) -> None:
    if not settings.allowed_domains:
        raise _invalid_parameter("network_policy", "this server allows containers no network")
    domain = find_forbidden_domain(network, settings.allowed_domains)
    if domain is not None:
        raise _invalid_parameter(
            "network_policy", f"this server does not allow the domain '{sanitize_name(domain)}'"
        )
    domains = {normalize_domain(domain) for domain in network.allowed_domains}
    for secret in network.domain_secrets:
        if normalize_domain(secret.domain) not in domains:
            raise _invalid_parameter(
                "network_policy", f"the secret {secret.name} is for a domain that is not in allowed_domains"
            )


def validate_file_path(name: str) -> str:
    """Return the path below /mnt/data for a file name that a user chose. Raises InvalidRequest."""
    path = name.removeprefix(f"{DATA_DIRECTORY}/")
    reason = _explain_invalid_path(path)
    if reason is not None:
        raise InvalidRequest(
            f"A file cannot be called '{sanitize_name(name, 100)}': {reason}.",
            param="file",
            code="invalid_value",
        )
    return path


def choose_file_name(filename: str, fallback: str) -> str:
    """Return the name of an upload in a container; `fallback` if its own name is not valid there."""
    name = filename.rpartition("/")[2]
    return name if _explain_invalid_path(name) is None else fallback


def _explain_invalid_path(path: str) -> str | None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return f"a path is relative to {DATA_DIRECTORY}, without empty parts, '.' or '..'"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "it holds a control character"
    try:
        longest, total = max(len(part.encode()) for part in parts), len(path.encode())
    except UnicodeEncodeError:
        return "it is not text"
    if longest > _MAX_COMPONENT_BYTES or len(parts) > _MAX_PATH_DEPTH or total > _MAX_PATH_BYTES:
        return (
            f"a path has at most {_MAX_PATH_DEPTH} parts of {_MAX_COMPONENT_BYTES} bytes, "
            f"and {_MAX_PATH_BYTES} bytes in all"
        )
    return (
        f"names that start with {_RESERVED_PREFIX} are reserved"
        if path.startswith(_RESERVED_PREFIX)
        else None
    )


def _invalid_parameter(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {reason}.", param=param, code="invalid_value")
