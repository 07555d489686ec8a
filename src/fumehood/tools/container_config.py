"""Parses the container configuration of tools, in all forms that clients send."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import ContainerSpec, parse_memory_tier, parse_network_policy
from fumehood.protocol.openai.tool_specs import ToolSpec
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier


class _AutoContainer(msgspec.Struct, kw_only=True):
    """Settings of a new container. Nulls and unknown fields are accepted."""

    memory_limit: str | None = None
    file_ids: list[str] | None = None
    network_policy: dict[str, Raw] | None = None
    skills: list[Raw] | None = None


class _ContainerFields(_AutoContainer):
    type: Literal["auto"] | None = None
    id: str | None = None


class _CodeInterpreterConfig(msgspec.Struct):
    container: str | _ContainerFields | None = None


class _ShellEnvironment(_AutoContainer):
    type: str = "local"
    container_id: str | None = None


class _ShellConfig(msgspec.Struct):
    environment: _ShellEnvironment | None = None


@dataclass(frozen=True, slots=True)
class ContainerChoice:
    """An existing container by id, or the specification of a new one; `param_path` is its field in the tool."""

    container_id: str | None
    spec: ContainerSpec
    param_path: str = "container"


def read_container_choice(spec: ToolSpec) -> ContainerChoice:
    """Read the container of a code interpreter. Raises InvalidRequest.

    `ContainerService.validate_spec` checks whether the server allows it.
    """
    container = _decode(spec, _CodeInterpreterConfig).container
    if container is None:
        return ContainerChoice(None, ContainerSpec())
    if isinstance(container, str):
        return ContainerChoice(container, ContainerSpec())
    if container.id is not None:
        return ContainerChoice(container.id, ContainerSpec(memory=_read_memory_tier(container, "container")))
    if container.type is None:
        raise _invalid_tool("container must be an id, or an object whose type is 'auto'.")
    return ContainerChoice(None, _read_container_spec(container, "container"))


def read_shell_environment(spec: ToolSpec) -> ContainerChoice | None:
    """Read the container of a shell; None for a shell that the client runs. Raises InvalidRequest."""
    environment = _decode(spec, _ShellConfig).environment
    match environment:
        case None | _ShellEnvironment(type="local"):
            return None
        case _ShellEnvironment(type="container_auto"):
            container_spec = _read_container_spec(environment, "environment")
            return ContainerChoice(None, container_spec, "environment")
        case _ShellEnvironment(type="container_reference", container_id=str()):
            return ContainerChoice(environment.container_id, ContainerSpec(), "environment")
        case _ShellEnvironment(type="container_reference"):
            raise _invalid_tool("environment.container_id is missing.")
        case _:
            raise _invalid_tool(
                "environment.type must be 'container_auto', 'container_reference' or 'local'."
            )


def _read_memory_tier(container: _AutoContainer, where: str) -> MemoryTier:
    try:
        return parse_memory_tier(container.memory_limit, f"{where}.memory_limit")
    except InvalidRequest as error:
        raise _invalid_tool(error.message) from None


def _read_container_spec(container: _AutoContainer, where: str) -> ContainerSpec:
    memory = _read_memory_tier(container, where)
    if container.skills:
        raise _invalid_tool(f"{where}.skills is not supported by this server.")
    try:
        network = parse_network_policy(container.network_policy, f"{where}.network_policy")
    except InvalidRequest as error:
        raise _invalid_tool(error.message) from None
    file_ids = tuple(dict.fromkeys(container.file_ids or ()))
    return ContainerSpec(memory=memory, network=network, file_ids=file_ids)


def echo_code_interpreter(spec: ToolSpec) -> bytes:
    """The tool as the response echoes it: with a container and without secrets. Raises InvalidRequest."""
    tool = _decode(spec, dict[str, Raw])
    container = _decode(spec, _CodeInterpreterConfig).container
    if container is None:
        tool["container"] = Raw(b'{"type":"auto"}')
    elif isinstance(container, _ContainerFields) and container.id is not None:
        tool["container"] = Raw(msgspec.json.encode(container.id))
    elif isinstance(container, _ContainerFields):
        tool["container"] = _remove_secrets(tool["container"], container.network_policy)
    return msgspec.json.encode(tool)


def echo_shell(spec: ToolSpec) -> bytes:
    """As `echo_code_interpreter`, for a shell."""
    tool = _decode(spec, dict[str, Raw])
    environment = _decode(spec, _ShellConfig).environment
    if environment is not None:
        tool["environment"] = _remove_secrets(tool["environment"], environment.network_policy)
    return msgspec.json.encode(tool)


def _remove_secrets(raw: Raw, policy: Mapping[str, Raw] | None) -> Raw:
    if policy is None:
        return raw
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    public = {key: value for key, value in policy.items() if key != "domain_secrets"}
    return Raw(msgspec.json.encode({**fields, "network_policy": public}))


def _decode[ConfigT](spec: ToolSpec, config_type: type[ConfigT]) -> ConfigT:
    try:
        return msgspec.json.decode(spec.raw, type=config_type)
    except msgspec.DecodeError as error:
        raise _invalid_tool(f"{spec.type}: {error}") from None


def _invalid_tool(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools")
