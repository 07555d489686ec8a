"""Which container a tool asks for, in every shape in which clients say it; imports `protocol`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.protocol.containers import ContainerSpec, memory_tier, network_policy
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.sandbox import MemoryTier
from fumehood.protocol.tools import ToolSpec


class _Automatic(msgspec.Struct, kw_only=True):
    """What a new container is to be like. Nulls are tolerated, and so are fields that nobody here knows."""

    memory_limit: str | None = None
    file_ids: list[str] | None = None
    network_policy: dict[str, Raw] | None = None
    skills: list[Raw] | None = None


class _Fields(_Automatic):
    type: Literal["auto"] | None = None
    id: str | None = None


class _Tool(msgspec.Struct):
    container: str | _Fields | None = None


class _Environment(_Automatic):
    type: str = "local"
    container_id: str | None = None


class _Shell(msgspec.Struct):
    environment: _Environment | None = None


@dataclass(frozen=True, slots=True)
class ContainerChoice:
    """An existing container by its id, or None and what a new one is to be like; `where` says it in the tool."""

    container_id: str | None
    spec: ContainerSpec
    where: str = "container"


def read_container(spec: ToolSpec) -> ContainerChoice:
    """The container that a code interpreter asks for; raises InvalidRequest. Whether there may be such a one,
    `Containers.approve` says.
    """
    try:
        container = msgspec.json.decode(spec.raw, type=_Tool).container
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    if container is None:
        return ContainerChoice(None, ContainerSpec())
    if isinstance(container, str):
        return ContainerChoice(container, ContainerSpec())
    if container.id is not None:
        return ContainerChoice(container.id, ContainerSpec(memory=_memory(container, "container")))
    if container.type is None:
        raise _refused("container must be an id, or an object whose type is 'auto'.")
    return ContainerChoice(None, _chosen(container, "container"))


def read_environment(spec: ToolSpec) -> ContainerChoice | None:
    """The container that a shell asks for; None for a shell that is the client's to run. Raises InvalidRequest."""
    try:
        environment = msgspec.json.decode(spec.raw, type=_Shell).environment
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    where = "environment"
    match environment:
        case None | _Environment(type="local"):
            return None
        case _Environment(type="container_auto"):
            return ContainerChoice(None, _chosen(environment, where), where)
        case _Environment(type="container_reference", container_id=str()):
            return ContainerChoice(environment.container_id, ContainerSpec(), where)
        case _Environment(type="container_reference"):
            raise _refused("environment.container_id is missing.")
        case _:
            raise _refused("environment.type must be 'container_auto', 'container_reference' or 'local'.")


def _memory(container: _Automatic, where: str) -> MemoryTier:
    try:
        return memory_tier(container.memory_limit, f"{where}.memory_limit")
    except InvalidRequest as error:
        raise _refused(error.message) from None


def _chosen(container: _Automatic, where: str) -> ContainerSpec:
    memory = _memory(container, where)
    if container.skills:
        raise _refused(f"{where}.skills is not served by this server.")
    try:
        network = network_policy(container.network_policy, f"{where}.network_policy")
    except InvalidRequest as error:
        raise _refused(error.message) from None
    file_ids = tuple(dict.fromkeys(container.file_ids or ()))
    return ContainerSpec(memory=memory, network=network, file_ids=file_ids)


def echoed(spec: ToolSpec) -> bytes:
    """A code interpreter as its response shows it: with a container, and without secrets. Raises InvalidRequest."""
    try:
        tool = msgspec.json.decode(spec.raw, type=dict[str, Raw])
        container = msgspec.json.decode(spec.raw, type=_Tool).container
        if container is None:
            tool["container"] = Raw(b'{"type":"auto"}')
        elif isinstance(container, _Fields) and container.id is not None:
            tool["container"] = Raw(msgspec.json.encode(container.id))
        elif isinstance(container, _Fields):
            tool["container"] = _without_secrets(tool["container"], container.network_policy)
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    return msgspec.json.encode(tool)


def echoed_shell(spec: ToolSpec) -> bytes:
    """As `echoed`, for a shell."""
    try:
        tool = msgspec.json.decode(spec.raw, type=dict[str, Raw])
        environment = msgspec.json.decode(spec.raw, type=_Shell).environment
        if environment is not None:
            tool["environment"] = _without_secrets(tool["environment"], environment.network_policy)
    except msgspec.DecodeError as error:
        raise _refused(f"{spec.type}: {error}") from None
    return msgspec.json.encode(tool)


def _without_secrets(raw: Raw, policy: Mapping[str, Raw] | None) -> Raw:
    if policy is None:
        return raw
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    shown = {key: value for key, value in policy.items() if key != "domain_secrets"}
    return Raw(msgspec.json.encode({**fields, "network_policy": shown}))


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools")
