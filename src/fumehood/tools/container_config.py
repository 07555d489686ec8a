"""`container` of a code interpreter tool, in every shape that clients send; imports `protocol`."""

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.protocol.containers import ContainerSpec, memory_tier, network_policy
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.tools import ToolSpec


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


def read_container(spec: ToolSpec) -> ContainerChoice:
    """Raises InvalidRequest. Whether there may be such a container, `Containers.approve` says."""
    try:
        container = msgspec.json.decode(spec.raw, type=_Tool).container
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    if container is None:
        return ContainerChoice(None, ContainerSpec())
    if isinstance(container, str):
        return ContainerChoice(container, ContainerSpec())
    try:
        return _chosen(container)
    except InvalidRequest as error:
        raise _refused(error.message) from None


def _chosen(container: _Fields) -> ContainerChoice:
    memory = memory_tier(container.memory_limit, "container.memory_limit")
    if container.id is not None:
        return ContainerChoice(container.id, ContainerSpec(memory=memory))
    if container.type is None:
        raise _refused("container must be an id, or an object whose type is 'auto'.")
    network = network_policy(container.network_policy, "container.network_policy")
    file_ids = tuple(dict.fromkeys(container.file_ids or ()))
    return ContainerChoice(None, ContainerSpec(memory=memory, network=network, file_ids=file_ids))


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
