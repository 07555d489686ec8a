"""The hosted tool `code_interpreter`: Python in containers, for any model; imports `interfaces`, `protocol`, siblings.

docs/code-interpreter.md tells what the model is offered and what clients see.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from fumehood.interfaces import CallContext, Caller, Clock, Containers, Files, Memory, OfferedTool
from fumehood.protocol.containers import DATA_DIRECTORY
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.errors import NotFound
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.names import clean_name
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.tools.carried import Known, files_of, memory_of
from fumehood.tools.code_session import NAME, CodeSession, InterpreterSettings
from fumehood.tools.container_config import echoed, read_container
from fumehood.tools.produced import produced_file
from fumehood.tools.running import NOTHING
from fumehood.tools.workplace import (
    OfferedInContainer,
    container_of,
    find_workplace,
    used_containers,
)

_ITEM = "code_interpreter_call"
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
_NOT_KEPT = "(the output was not kept)"
_MOST_REMEMBERED = 8  # containers of a conversation that is compacted
_MOST_TOLD = 50  # files of the last one that the model is told of


class _Remembered(msgspec.Struct, kw_only=True, tag_field="type", tag=_ITEM):
    """What stands for the calls of a container once they are compacted."""

    container_id: str
    files: list[ProducedFile]


class _ReplayedOutput(msgspec.Struct):
    type: str = ""
    logs: str | None = None
    url: str | None = None


class _Replayed(msgspec.Struct):
    """An item that a client gives back, with whatever it has left of it."""

    id: str | None = None
    code: str | None = None
    outputs: list[_ReplayedOutput] | None = None


_replayed = msgspec.json.Decoder(_Replayed)


class CodeInterpreter:
    """A `HostedTool`."""

    types = frozenset({NAME})
    item_types = frozenset({_ITEM})
    finds_files = True

    def __init__(
        self,
        containers: Containers,
        clock: Clock,
        settings: InterpreterSettings | None = None,
        uploads: Files | None = None,
    ) -> None:
        self._containers = containers
        self._clock = clock
        self._settings = settings or InterpreterSettings()
        self._uploads = uploads

    async def offer(
        self, spec: ToolSpec, caller: Caller, past: Sequence[Segment], beside: Sequence[OfferedTool] = ()
    ) -> "OfferedInterpreter":
        choice = read_container(spec)
        place = await find_workplace(self._containers, self._uploads, caller, choice, past, beside)
        return OfferedInterpreter(place, self._settings, self._clock)

    def echo(self, spec: ToolSpec) -> bytes:
        return echoed(spec)

    def recall(self, entry: Entry) -> ToolExchange | None:
        try:
            item = _replayed.decode(entry.raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        urls = [output.url for output in item.outputs or () if output.url is not None]
        return ToolExchange(
            call_id=item.id or f"call_{hashlib.sha256(entry.raw).hexdigest()[:24]}",
            name=NAME,
            arguments=msgspec.json.encode({"code": item.code or ""}).decode(),
            output=_NOT_KEPT if item.outputs is None else _as_text(item.outputs),
            images=tuple(url for url in urls if url.startswith("data:image/")),
        )

    async def remember(
        self, caller: Caller, past: Sequence[Segment], kept: Sequence[Entry] = ()
    ) -> Memory | None:
        """The containers that were used, by any tool, the latest last, each with its files; and files that wait."""
        ids = used_containers(past)[-_MOST_REMEMBERED:]
        remembered = [await self._remembered(caller, container_id) for container_id in ids]
        # A container may hold ten thousand files, and clients carry what is sealed with every request.
        items = [msgspec.json.encode(replace(one, files=one.files[-_MOST_TOLD:])) for one in remembered]
        files = files_of(past, container_of)
        if (waiting := await memory_of(files, kept)) is not None:
            items.append(waiting)
        if not items:
            return None
        notes = [
            f"The code interpreter was used in an earlier container, {one.container_id}."
            for one in remembered[:-1]
        ]
        notes += [_told(one) for one in remembered[-1:]]
        return Memory(items, "\n".join([*notes, *_given(files)]))

    async def _remembered(self, caller: Caller, container_id: str) -> _Remembered:
        try:
            records = await self._containers.files(caller, container_id)
        except NotFound:  # it never began, or is over; whoever offers the next one has to know
            records = ()
        return _Remembered(
            container_id=clean_name(container_id), files=[produced_file(record) for record in records]
        )


class OfferedInterpreter(OfferedInContainer[InterpreterSettings]):
    """An `OfferedTool`."""

    @property
    def function(self) -> FunctionSpec:
        return FunctionSpec(name=NAME, description=self._describe(), parameters=_PARAMETERS)

    def begin(self, context: CallContext) -> CodeSession:
        return CodeSession(self.place, self._settings, self._clock, context)

    def _describe(self) -> str:
        settings = self._settings
        state = (
            "Variables, imports and files are kept from call to call."
            if settings.keeps_variables
            else "Files are kept from call to call; variables and imports are not."
        )
        directory, network = self.place.describe()
        return (
            f"Runs Python {settings.python} in an isolated container and returns what it prints, the value of the "
            "last expression and the names of the files it wrote. The user sees the figures it shows.\n"
            f"- {state}\n"
            f"- {directory}\n"
            f"- Installed: {', '.join(settings.libraries)} and more; name other packages in `requirements`.\n"
            f"- {network}\n"
            f"- Code may run for {settings.execution_timeout:g} seconds."
        )


def _given(files: Sequence[Known]) -> list[str]:
    if not files:
        return []
    names = ", ".join(one.file.name for one in files[-_MOST_TOLD:])
    return [f"The user has given these files, which code finds in {DATA_DIRECTORY}: {names}."]


def _told(container: _Remembered) -> str:
    files = container.files
    if not files:
        return f"The code interpreter's container is {container.container_id}; it holds no files."
    listed = ", ".join(f"{file.path} ({file.bytes} bytes)" for file in files[-_MOST_TOLD:])
    more = f", and {len(files) - _MOST_TOLD} older ones" if len(files) > _MOST_TOLD else ""
    return f"Files in the code interpreter's container {container.container_id}: {listed}{more}."


def _as_text(outputs: Sequence[_ReplayedOutput]) -> str:
    figures = 0
    parts: list[str] = []
    for output in outputs:
        if output.url is not None:
            figures += 1
            parts.append(f"[figure {figures}]")
        elif output.logs:
            parts.append(output.logs)
    return "\n".join(parts) or NOTHING
