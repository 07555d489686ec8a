"""Where the hosted calls of a request run: a container that all tools share.

A conversation has one container at a time, whichever tool has used it: what one call writes, the next finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import Caller, Clock, ConfiguredTool, Container, ContainerService, FileService
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.safe_names import sanitize_name
from fumehood.protocol.sandbox.sandbox_messages import NetworkAllowlist
from fumehood.tools.container_config import ContainerChoice
from fumehood.tools.container_inputs import PendingFiles, collect_conversation_files, resolve_uploads
from fumehood.tools.produced_files import to_produced_file

_CALL_TYPES = frozenset({"code_interpreter_call", "shell_call"})
_GONE_NOTICE = "The container of the earlier calls is gone, with their variables and files; this call began in a new one."
_EXPIRED_NOTICE = (
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call "
    "began in a new one, with the files that the user had put there."
)
DEFAULT_SPEC = ContainerSpec()
_MAX_NAMED_FILES = 50


@dataclass(slots=True)
class ContainerBinding:
    """The container of one request's calls, by its id; it begins with the first of them.

    spec: what it is to be like, if it is a new one.
    news: what the model should know first; told with the first result, and then not again.
    heir_of: the container that this one replaces, see `Containers.open`.
    earlier: the container that the conversation has used last; had: the uploads that it was given.
    carried: files that it has to be given before the first call; names: of those among them that the tools name.
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
        news, self.notices = self.notices, ""
        return news

    async def open(self) -> Container:
        """The container, with the files that belong there. Raises ApiError."""
        container = await self.containers.open_container(
            self.caller, self.container_id, self.spec, self.replaces
        )
        self._open_handles.append(container)
        told = await self.pending_files.copy_to_container()
        self.notices = "\n".join(filter(None, [self.notices, told]))
        return container

    def release(self) -> None:
        """There will be no further call."""
        while self._open_handles:
            self._open_handles.pop().release()

    async def add_uploads(self, uploads: FileService | None, choice: ContainerChoice) -> None:
        """Have the uploads brought that a tool names; raises InvalidRequest for one that is not there."""
        wanted = choice.spec.file_ids
        try:
            chosen = await resolve_uploads(
                uploads, self.caller, wanted, self.previous_container, self.previous_uploads
            )
        except NotFound as error:
            raise InvalidRequest(
                f"{choice.param_path}.file_ids: {error.message}", param="tools", code="file_not_found"
            ) from None
        self.pending_files.add(chosen)
        self.file_names = list(dict.fromkeys([*self.file_names, *(one.file.name for one in chosen)]))

    async def list_files(self) -> Sequence[ProducedFile]:
        """All that are there; none before it has begun, and once it is over."""
        try:
            records = await self.containers.list_files(self.caller, self.container_id)
        except NotFound:
            return ()
        return [to_produced_file(record) for record in records]

    def describe(self) -> tuple[str, str]:
        """What a model should know of its directory and of its network, whatever it runs there."""
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


class ConfiguredContainerTool[Settings]:
    """What offered tools that run in containers have in common: one container for all calls of a request."""

    def __init__(self, binding: ContainerBinding, settings: Settings, clock: Clock) -> None:
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
    beside: Sequence[ConfiguredTool],
) -> ContainerBinding:
    """The container that is named; else that of another tool of the request, else the one which the conversation used
    last, else a new one; with the files of the conversation. Raises ApiError, with `tools` for its parameter.
    """
    _check_spec(containers, choice)
    shared = _find_shared_binding(beside)
    if choice.container_id is not None:
        place = await _bind_named(containers, caller, choice.container_id, choice.spec)
    elif shared is not None:
        shared.spec = _merge_specs(shared.spec, choice.spec)
        await shared.add_uploads(uploads, choice)
        return shared
    else:
        place = await _bind_automatic(containers, caller, choice.spec, past)
    await place.add_uploads(uploads, choice)
    place.pending_files.add(collect_conversation_files(past, find_call_container))
    return place


def _find_shared_binding(beside: Sequence[ConfiguredTool]) -> ContainerBinding | None:
    for tool in beside:
        if isinstance(tool, ConfiguredContainerTool):
            return tool.binding
    return None


async def _bind_named(
    containers: ContainerService, caller: Caller, container_id: str, spec: ContainerSpec
) -> ContainerBinding:
    try:
        await containers.check_active(caller, container_id)
        await containers.get_container(caller, container_id)  # a use of it, from now on
    except (NotFound, ContainerExpired) as error:
        raise type(error)(error.message, param="tools") from None
    return ContainerBinding(containers, caller, container_id, spec)


async def _bind_automatic(
    containers: ContainerService, caller: Caller, spec: ContainerSpec, past: Sequence[ConversationSegment]
) -> ContainerBinding:
    earlier = _find_latest_container(past)
    if earlier is None:
        return ContainerBinding(containers, caller, containers.reserve_id(), spec)
    try:
        # A use of it: while the model thinks, it must not be the one that was idle longest.
        record = await containers.get_container(caller, earlier)
    except NotFound:
        return ContainerBinding(
            containers, caller, containers.reserve_id(), spec, _GONE_NOTICE, previous_container=earlier
        )
    had = frozenset(record.spec.file_ids)
    if record.status == "expired":
        return ContainerBinding(
            containers, caller, containers.reserve_id(), spec, _EXPIRED_NOTICE, earlier, earlier, had
        )
    return ContainerBinding(
        containers, caller, earlier, spec, previous_container=earlier, previous_uploads=had
    )


def _check_spec(containers: ContainerService, choice: ContainerChoice) -> None:
    try:
        containers.validate_spec(choice.spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{choice.param_path}.{error.message}", param="tools") from None


def _merge_specs(one: ContainerSpec, other: ContainerSpec) -> ContainerSpec:
    """What both ask for, where they share a container: who says nothing takes what the other says."""
    chosen: dict[str, object] = {}
    for setting in msgspec.structs.fields(ContainerSpec):
        usual, mine, theirs = (getattr(spec, setting.name) for spec in (DEFAULT_SPEC, one, other))
        if setting.name == "file_ids":
            chosen[setting.name] = tuple(dict.fromkeys((*mine, *theirs)))
        elif mine != theirs and usual not in (mine, theirs):
            raise InvalidRequest(
                f"code_interpreter and shell share one container, and ask for another {setting.name} of it each.",
                param="tools",
            )
        else:
            chosen[setting.name] = theirs if mine == usual else mine
    return msgspec.convert(chosen, ContainerSpec)


# ---- along the conversation -------------------------------------------------------------------------------------


class _Environment(msgspec.Struct):
    container_id: str | None = None


class _CallLocation(msgspec.Struct):
    """Where a call says that it ran; a local shell's says nowhere."""

    container_id: str | None = None
    environment: _Environment | None = None


_location_decoder = msgspec.json.Decoder(_CallLocation)


def find_call_container(entry: ConversationEntry) -> str | None:
    """The container that a call used; None for an item that is no such call."""
    if entry.type not in _CALL_TYPES:
        return None
    try:
        used = _location_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return used.container_id or (used.environment.container_id if used.environment else None)


def list_used_containers(past: Sequence[ConversationSegment]) -> list[str]:
    """All that calls have used, each once, the latest last."""
    found: dict[str, None] = {}
    for segment in past:
        for entry in segment.entries:
            container_id = find_call_container(entry)
            if container_id is not None:
                found.pop(container_id, None)
                found[container_id] = None
    return list(found)


def _find_latest_container(past: Sequence[ConversationSegment]) -> str | None:
    for segment in reversed(past):
        for entry in reversed(segment.entries):
            container_id = find_call_container(entry)
            if container_id is not None:
                return container_id
    return None
