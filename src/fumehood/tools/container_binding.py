"""Binds a request to its container.

All hosted tools of a conversation share one container at a time, so that each call finds the files of earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import Caller, Clock, ConfiguredTool, Container, ContainerService, FileService
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.sandbox.sandbox_messages import NetworkAllowlist
from fumehood.tools.container_config import ContainerChoice
from fumehood.tools.container_inputs import PendingFiles, collect_conversation_files, resolve_uploads
from fumehood.tools.produced_files import list_existing_files, to_produced_file

_CALL_TYPES = frozenset({"code_interpreter_call", "shell_call"})
_GONE_NOTICE = (
    "The container of the earlier calls is gone, with their variables and files; "
    "this call began in a new one."
)
_EXPIRED_NOTICE = (
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call "
    "began in a new one, with the files that the user had put there."
)
DEFAULT_SPEC = ContainerSpec()
_MAX_NAMED_FILES = 50


@dataclass(slots=True)
class ContainerBinding:
    """The container of a request's hosted calls. It is created by the first of them.

    spec: the specification of a new container.
    notices: text for the model, sent once with the next result.
    replaces: the container that this one replaces, see `ContainerService.open_container`.
    previous_container: the last container of the conversation; previous_uploads: the uploads copied there.
    pending_files: files to copy before the first call; file_names: names of the uploads among them.
    """

    containers: ContainerService
    caller: Caller
    container_id: str
    spec: ContainerSpec
    notices: str = ""
    replaces: str | None = None
    previous_container: str | None = None
    previous_uploads: frozenset[str] = frozenset()
    file_names: list[str] = field(default_factory=list[str])
    pending_files: PendingFiles = field(init=False)
    _open_handles: list[Container] = field(default_factory=list[Container])

    def __post_init__(self) -> None:
        self.pending_files = PendingFiles(self.containers, self.caller, self.container_id)

    def pop_notices(self) -> str:
        notices, self.notices = self.notices, ""
        return notices

    async def open(self) -> Container:
        """Open the container and copy the pending files. Raises ApiError."""
        container = await self.containers.open_container(
            self.caller, self.container_id, self.spec, self.replaces
        )
        self._open_handles.append(container)
        notice = await self.pending_files.copy_to_container()
        self.notices = "\n".join(filter(None, [self.notices, notice]))
        return container

    def release(self) -> None:
        """Release the container: there are no further calls."""
        while self._open_handles:
            self._open_handles.pop().release()

    async def add_uploads(self, uploads: FileService | None, choice: ContainerChoice) -> None:
        """Schedule the uploads that a tool names. Raises InvalidRequest for a missing one."""
        try:
            files = await resolve_uploads(
                uploads, self.caller, choice.spec.file_ids, self.previous_container, self.previous_uploads
            )
        except NotFound as error:
            raise InvalidRequest(
                f"{choice.param_path}.file_ids: {error.message}", param="tools", code="file_not_found"
            ) from None
        self.pending_files.add(files)
        self.file_names = list(dict.fromkeys([*self.file_names, *(file.file.name for file in files)]))

    async def list_files(self) -> Sequence[ProducedFile]:
        records = await list_existing_files(self.containers, self.caller, self.container_id)
        return [to_produced_file(record) for record in records]

    def describe(self) -> tuple[str, str]:
        """Describe the working directory and the network for the tool description."""
        network = "There is no network."
        if isinstance(self.spec.network, NetworkAllowlist):
            domains = ", ".join(sanitize_name(domain) for domain in self.spec.network.allowed_domains)
            network = f"There is no network but HTTP and HTTPS to {domains}."
        named = ", ".join(self.file_names[:_MAX_NAMED_FILES]) + (
            ", …" if self.file_names[_MAX_NAMED_FILES:] else ""
        )
        directory = (
            f"The working directory is {DATA_DIRECTORY}. Files of the user are there{f': {named}' if named else ''}. "
            "Files that you write there can be downloaded: link them in your answer as "
            f"[name](sandbox:{DATA_DIRECTORY}/name)."
        )
        return directory, network


class ConfiguredContainerTool[SandboxServerSettings]:
    """Base of configured tools that run in the container of a request."""

    def __init__(self, binding: ContainerBinding, settings: SandboxServerSettings, clock: Clock) -> None:
        self.binding = binding
        self._settings = settings
        self._clock = clock

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        wanted = frozenset(paths)
        return [file for file in await self.binding.list_files() if file.path in wanted]

    def close(self) -> None:
        self.binding.release()


async def bind_container(
    containers: ContainerService,
    uploads: FileService | None,
    caller: Caller,
    choice: ContainerChoice,
    past: Sequence[ConversationSegment],
    other_tools: Sequence[ConfiguredTool],
) -> ContainerBinding:
    """Bind a tool to the container that it names, else to that of another tool of the request, else to the last one of
    the conversation, else to a new one. Raises ApiError with the parameter `tools`.
    """
    try:
        containers.validate_spec(choice.spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{choice.param_path}.{error.message}", param="tools") from None
    bindings = (tool.binding for tool in other_tools if isinstance(tool, ConfiguredContainerTool))
    shared = next(bindings, None)
    if choice.container_id is not None:
        binding = await _bind_named(containers, caller, choice.container_id, choice.spec)
    elif shared is not None:
        shared.spec = _merge_specs(shared.spec, choice.spec)
        await shared.add_uploads(uploads, choice)
        return shared
    else:
        binding = await _bind_automatic(containers, caller, choice.spec, past)
    await binding.add_uploads(uploads, choice)
    binding.pending_files.add(collect_conversation_files(past, find_call_container))
    return binding


async def _bind_named(
    containers: ContainerService, caller: Caller, container_id: str, spec: ContainerSpec
) -> ContainerBinding:
    try:
        await containers.check_active(caller, container_id)
        await containers.get_container(caller, container_id)  # counts as use, so that it does not expire now
    except (NotFound, ContainerExpired) as error:
        raise type(error)(error.message, param="tools") from None
    return ContainerBinding(containers, caller, container_id, spec)


async def _bind_automatic(
    containers: ContainerService, caller: Caller, spec: ContainerSpec, past: Sequence[ConversationSegment]
) -> ContainerBinding:
    used = list_used_containers(past)
    if not used:
        return ContainerBinding(containers, caller, containers.reserve_id(), spec)
    previous = used[-1]
    try:
        # Counts as use: it must not be evicted as the most idle container while the model thinks.
        record = await containers.get_container(caller, previous)
    except NotFound:
        return ContainerBinding(
            containers, caller, containers.reserve_id(), spec, _GONE_NOTICE, previous_container=previous
        )
    uploads = frozenset(record.spec.file_ids)
    if record.status == "expired":
        return ContainerBinding(
            containers, caller, containers.reserve_id(), spec, _EXPIRED_NOTICE, previous, previous, uploads
        )
    return ContainerBinding(
        containers, caller, previous, spec, previous_container=previous, previous_uploads=uploads
    )


def _merge_specs(one: ContainerSpec, other: ContainerSpec) -> ContainerSpec:
    """Merge the specifications of two tools that share a container. Raises InvalidRequest if they conflict."""
    merged: dict[str, object] = {}
    for setting in msgspec.structs.fields(ContainerSpec):
        default, first, second = (getattr(spec, setting.name) for spec in (DEFAULT_SPEC, one, other))
        if setting.name == "file_ids":
            merged[setting.name] = tuple(dict.fromkeys((*first, *second)))
        elif first != second and default not in (first, second):
            raise InvalidRequest(
                f"code_interpreter and shell share one container, but ask for a different {setting.name}.",
                param="tools",
            )
        else:
            merged[setting.name] = second if first == default else first
    return msgspec.convert(merged, ContainerSpec)


# ---- containers of the conversation -----------------------------------------------------------------------------


class _Environment(msgspec.Struct):
    container_id: str | None = None


class _CallLocation(msgspec.Struct):
    """The container of a call; a local shell call has none."""

    container_id: str | None = None
    environment: _Environment | None = None


_location_decoder = msgspec.json.Decoder(_CallLocation)


def find_call_container(entry: ConversationEntry) -> str | None:
    """The container of a hosted call; None for any other item."""
    if entry.type not in _CALL_TYPES:
        return None
    try:
        location = _location_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return location.container_id or (location.environment.container_id if location.environment else None)


def list_used_containers(past: Sequence[ConversationSegment]) -> list[str]:
    """The containers of all calls, each once, the latest last."""
    found: dict[str, None] = {}
    for segment in past:
        for entry in segment.entries:
            container_id = find_call_container(entry)
            if container_id is not None:
                found.pop(container_id, None)
                found[container_id] = None
    return list(found)
