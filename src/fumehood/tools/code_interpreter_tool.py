"""The hosted tool `code_interpreter`: Python in containers, for any model. See docs/code-interpreter.md."""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from fumehood.interfaces import (
    Caller,
    Clock,
    CompactedToolState,
    ConfiguredTool,
    ContainerService,
    FileService,
    ToolCallContext,
)
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from fumehood.tools.call_output_collector import NO_OUTPUT
from fumehood.tools.container_binding import (
    ConfiguredContainerTool,
    bind_container,
    find_call_container,
    list_used_containers,
)
from fumehood.tools.container_config import echo_code_interpreter, read_container_choice
from fumehood.tools.container_inputs import ConversationFile, collect_conversation_files, snapshot_files
from fumehood.tools.interpreter_call import TOOL_NAME, CodeInterpreterToolSettings, InterpreterCallSession
from fumehood.tools.produced_files import list_existing_files, to_produced_file

_ITEM_TYPE = "code_interpreter_call"
_PARAMETERS = Raw(
    msgspec.json.encode(
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The Python code to run."},
                "requirements": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": 'Packages to install first, e.g. ["humanize", "polars>=1.0"].',
                },
            },
            "required": ["code"],
            "additionalProperties": False,
        }
    )
)
_OUTPUT_NOT_STORED = "(the output was not kept)"
_MAX_SNAPSHOT_CONTAINERS = 8  # containers in the snapshot of a compaction
_MAX_LISTED_FILES = 50  # files of a container in the snapshot and in the note for the model


class _ContainerSnapshot(msgspec.Struct, kw_only=True, tag_field="type", tag=_ITEM_TYPE):
    """Replaces the calls of a container after a compaction."""

    container_id: str
    files: list[ProducedFile]


class _ReplayedOutput(msgspec.Struct):
    type: str = ""
    logs: str | None = None
    url: str | None = None


class _ReplayedCall(msgspec.Struct):
    """An item that a client sends back, possibly without its outputs."""

    id: str | None = None
    code: str | None = None
    outputs: list[_ReplayedOutput] | None = None


_replayed_decoder = msgspec.json.Decoder(_ReplayedCall)


class CodeInterpreterTool:
    """A `HostedTool`."""

    types = frozenset({TOOL_NAME})
    item_types = frozenset({_ITEM_TYPE})
    finds_files = True

    def __init__(
        self,
        containers: ContainerService,
        clock: Clock,
        settings: CodeInterpreterToolSettings | None = None,
        uploads: FileService | None = None,
    ) -> None:
        self._containers = containers
        self._clock = clock
        self._settings = settings or CodeInterpreterToolSettings()
        self._uploads = uploads

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> "ConfiguredCodeInterpreter":
        choice = read_container_choice(spec)
        binding = await bind_container(self._containers, self._uploads, caller, choice, past, other_tools)
        return ConfiguredCodeInterpreter(binding, self._settings, self._clock)

    def echo_spec(self, spec: ToolSpec) -> bytes:
        return echo_code_interpreter(spec)

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        try:
            item = _replayed_decoder.decode(entry.raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        urls = [output.url for output in item.outputs or () if output.url is not None]
        return ToolExchange(
            call_id=item.id or f"call_{hashlib.sha256(entry.raw).hexdigest()[:24]}",
            name=TOOL_NAME,
            arguments=msgspec.json.encode({"code": item.code or ""}).decode(),
            output=_OUTPUT_NOT_STORED if item.outputs is None else _format_outputs(item.outputs),
            images=tuple(url for url in urls if url.startswith("data:image/")),
        )

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        """Snapshot the containers that any tool used, latest last, with their files, and the files not copied yet."""
        ids = list_used_containers(past)[-_MAX_SNAPSHOT_CONTAINERS:]
        snapshots = [await self._snapshot_container(caller, container_id) for container_id in ids]
        # A container may hold ten thousand files, and clients send the sealed snapshot with every request.
        items = [
            msgspec.json.encode(replace(snapshot, files=snapshot.files[-_MAX_LISTED_FILES:]))
            for snapshot in snapshots
        ]
        files = collect_conversation_files(past, find_call_container)
        if (pending := await snapshot_files(files, kept_items)) is not None:
            items.append(pending)
        if not items:
            return None
        notes = [
            f"The code interpreter was used in an earlier container, {snapshot.container_id}."
            for snapshot in snapshots[:-1]
        ]
        notes += [_describe_container(snapshot) for snapshot in snapshots[-1:]]
        return CompactedToolState(items, "\n".join([*notes, *_describe_given_files(files)]))

    async def _snapshot_container(self, caller: Caller, container_id: str) -> _ContainerSnapshot:
        records = await list_existing_files(self._containers, caller, container_id)
        return _ContainerSnapshot(
            container_id=sanitize_name(container_id), files=[to_produced_file(record) for record in records]
        )


class ConfiguredCodeInterpreter(ConfiguredContainerTool[CodeInterpreterToolSettings]):
    """A `ConfiguredTool`."""

    @property
    def function(self) -> ModelToolDefinition:
        return ModelToolDefinition(name=TOOL_NAME, description=self._describe(), parameters=_PARAMETERS)

    def start_call(self, context: ToolCallContext) -> InterpreterCallSession:
        return InterpreterCallSession(self.binding, self._settings, self._clock, context)

    def _describe(self) -> str:
        settings = self._settings
        state = (
            "Variables, imports and files are kept from call to call."
            if settings.keeps_variables
            else "Files are kept from call to call; variables and imports are not."
        )
        directory, network = self.binding.describe()
        return (
            f"Runs Python {settings.python} in an isolated container and returns what it prints, the value of the "
            "last expression and the names of the files it wrote. The user sees the figures it shows.\n"
            f"- {state}\n"
            f"- {directory}\n"
            f"- Installed: {', '.join(settings.libraries)} and more; name other packages in `requirements`.\n"
            f"- {network}\n"
            f"- Code may run for {settings.execution_timeout:g} seconds."
        )


def _describe_given_files(files: Sequence[ConversationFile]) -> list[str]:
    if not files:
        return []
    names = ", ".join(file.file.name for file in files[-_MAX_LISTED_FILES:])
    return [f"The user has given these files, which code finds in {DATA_DIRECTORY}: {names}."]


def _describe_container(container: _ContainerSnapshot) -> str:
    files = container.files
    if not files:
        return f"The code interpreter's container is {container.container_id}; it holds no files."
    listed = ", ".join(f"{file.path} ({file.bytes} bytes)" for file in files[-_MAX_LISTED_FILES:])
    more = f", and {len(files) - _MAX_LISTED_FILES} older ones" if len(files) > _MAX_LISTED_FILES else ""
    return f"Files in the code interpreter's container {container.container_id}: {listed}{more}."


def _format_outputs(outputs: Sequence[_ReplayedOutput]) -> str:
    figures = 0
    parts: list[str] = []
    for output in outputs:
        if output.url is not None:
            figures += 1
            parts.append(f"[figure {figures}]")
        elif output.logs:
            parts.append(output.logs)
    return "\n".join(parts) or NO_OUTPUT
