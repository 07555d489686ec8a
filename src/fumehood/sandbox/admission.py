"""What a container may be asked for here; imports msgspec and `protocol`, and the settings beside."""

import msgspec

from fumehood.protocol.containers import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import NetworkAllowlist
from fumehood.sandbox.ceiling import beyond, spelt
from fumehood.sandbox.container import ContainerSettings

_LONGEST_NAME = 256
_LONGEST_PART = 255  # bytes
_MOST_PARTS = 32
_LONGEST_PATH = 4096  # bytes
_OWN_PREFIX = ".fumehood-"  # at the top of the data directory it is the sandbox server's


def approved(spec: ContainerSpec, settings: ContainerSettings) -> ContainerSpec:
    """See `Containers.approve`."""
    if not 0 < len(spec.name) <= _LONGEST_NAME or not spec.name.isprintable():
        raise _refused("name", f"a name has 1 to {_LONGEST_NAME} printable characters")
    if isinstance(spec.network, NetworkAllowlist):
        _check_network(spec.network, settings)
    minutes = settings.idle_minutes
    if spec.idle_minutes is not None:
        minutes, most = spec.idle_minutes, settings.longest_idle_minutes
        if not 1 <= minutes <= most:
            raise _refused("expires_after.minutes", f"this server allows 1 to {most} minutes")
    if len(spec.file_ids) > settings.files.files:
        raise _refused("file_ids", f"a container has at most {settings.files.files} files")
    return msgspec.structs.replace(spec, idle_minutes=minutes)


def _check_network(network: NetworkAllowlist, settings: ContainerSettings) -> None:
    ceiling = settings.allowed_domains
    if not ceiling:
        raise _refused("network_policy", "this server allows containers no network")
    domain = beyond(network, ceiling)
    if domain is not None:
        raise _refused("network_policy", f"this server does not allow the domain '{clean_name(domain)}'")
    domains = {spelt(domain) for domain in network.allowed_domains}
    for secret in network.domain_secrets:
        if spelt(secret.domain) not in domains:
            raise _refused(
                "network_policy", f"the secret {secret.name} is for a domain that is not in allowed_domains"
            )


def path_of(name: str) -> str:
    """Where a file goes that a user calls so: a path below /mnt/data. Raises InvalidRequest."""
    path = name.removeprefix(f"{DATA_DIRECTORY}/")
    reason = _unfit(path)
    if reason is not None:
        raise InvalidRequest(
            f"A file cannot be called '{clean_name(name, 100)}': {reason}.",
            param="file",
            code="invalid_value",
        )
    return path


def name_for(filename: str, instead: str) -> str:
    """The name in a container of an upload that is called so; `instead` where no file can be."""
    name = filename.rpartition("/")[2]
    return name if _unfit(name) is None else instead


def _unfit(path: str) -> str | None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return f"a path is relative to {DATA_DIRECTORY}, without empty parts, '.' or '..'"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "it holds a control character"
    try:
        longest, whole = max(len(part.encode()) for part in parts), len(path.encode())
    except UnicodeEncodeError:
        return "it is not text"
    if longest > _LONGEST_PART or len(parts) > _MOST_PARTS or whole > _LONGEST_PATH:
        return f"a path has at most {_MOST_PARTS} parts of {_LONGEST_PART} bytes, and {_LONGEST_PATH} in all"
    return "such names are the sandbox server's own" if path.startswith(_OWN_PREFIX) else None


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {reason}.", param=param, code="invalid_value")
