"""`container` of a code interpreter tool, in every shape that clients send; imports `protocol`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.protocol.containers import ContainerSpec
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.sandbox import (
    MEMORY_TIERS,
    MemoryTier,
    NetworkAllowlist,
    NetworkDisabled,
    NetworkPolicy,
)
from fumehood.protocol.tools import ToolSpec

ANY_DOMAIN = "*"


class _Network(msgspec.Struct):
    type: Literal["disabled", "allowlist"]


class _Fields(msgspec.Struct):
    """Nulls are tolerated, and so are fields that nobody here knows."""

    type: Literal["auto"] | None = None
    id: str | None = None
    memory_limit: str | None = None
    file_ids: list[str] | None = None
    network_policy: dict[str, Raw] | None = None


class _Tool(msgspec.Struct):
    container: str | _Fields | None = None


@dataclass(frozen=True, slots=True)
class ContainerChoice:
    """An existing container by its id, or None and what a new one is to be like."""

    container_id: str | None
    spec: ContainerSpec


def read_container(spec: ToolSpec, allowed_domains: Collection[str]) -> ContainerChoice:
    """Raises InvalidRequest; `allowed_domains` is the most that a container may reach."""
    try:
        container = msgspec.json.decode(spec.raw, type=_Tool).container
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    if container is None:
        return ContainerChoice(None, ContainerSpec())
    if isinstance(container, str):
        return ContainerChoice(container, ContainerSpec())
    memory = _memory(container.memory_limit)
    if container.id is not None:
        return ContainerChoice(container.id, ContainerSpec(memory=memory))
    if container.type is None:
        raise _refused("container must be an id, or an object whose type is 'auto'.")
    if container.file_ids:
        raise _refused("container.file_ids is not served yet: this server has no files to put there.")
    network = _network(container.network_policy, allowed_domains)
    return ContainerChoice(None, ContainerSpec(memory=memory, network=network))


def _memory(limit: str | None) -> MemoryTier:
    if limit is None:
        return ContainerSpec().memory
    for tier in MEMORY_TIERS:
        if tier == limit:
            return tier
    tiers = ", ".join(f"'{tier}'" for tier in MEMORY_TIERS)
    raise _refused(f"container.memory_limit must be one of {tiers}, not '{limit[:20]}'.")


def _network(policy: dict[str, Raw] | None, allowed_domains: Collection[str]) -> NetworkPolicy:
    if policy is None:
        return NetworkDisabled()
    where = "container.network_policy"
    known = {key: value for key, value in policy.items() if key in {"allowed_domains", "domain_secrets"}}
    try:
        if msgspec.json.decode(msgspec.json.encode(policy), type=_Network).type == "disabled":
            return NetworkDisabled()
        network = msgspec.json.decode(
            msgspec.json.encode({**known, "type": "allowlist"}), type=NetworkAllowlist
        )
    except msgspec.DecodeError as error:
        raise _refused(f"{where}: {error}") from None
    if not allowed_domains:
        raise _refused(f"{where}: this server allows containers no network.")
    if ANY_DOMAIN not in allowed_domains:
        beyond = [domain for domain in network.allowed_domains if domain.lower() not in allowed_domains]
        if beyond:
            raise _refused(f"{where}: this server does not allow the domain {beyond[0]!r}.")
    return network


def echoed(spec: ToolSpec) -> bytes:
    """The tool as its response shows it: with a container, and without secrets. Raises InvalidRequest."""
    try:
        tool = msgspec.json.decode(spec.raw, type=dict[str, Raw])
        container = msgspec.json.decode(spec.raw, type=_Tool).container
        if container is None:
            tool["container"] = Raw(b'{"type":"auto"}')
        elif isinstance(container, _Fields):
            tool["container"] = _echoed_container(tool["container"], container)
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    return msgspec.json.encode(tool)


def _echoed_container(raw: Raw, container: _Fields) -> Raw:
    if container.id is not None:
        return Raw(msgspec.json.encode(container.id))
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    if container.network_policy is not None:
        policy = {key: value for key, value in container.network_policy.items() if key != "domain_secrets"}
        fields["network_policy"] = Raw(msgspec.json.encode(policy))
    return Raw(msgspec.json.encode(fields))


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools")
