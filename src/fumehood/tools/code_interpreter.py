"""The hosted tool `code_interpreter`: Python in containers, for any model; imports `interfaces`, `protocol`, siblings.

docs/code-interpreter.md tells what the model is offered and what clients see.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, Clock, Containers, Memory
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.conversation import Entry, Exchange, Segment
from fumehood.protocol.errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import NetworkAllowlist
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.tools.code_session import NAME, NOTHING, CodeSession, InterpreterSettings, Workplace
from fumehood.tools.container_config import echoed, read_container
from fumehood.tools.produced import produced_file

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
_GONE = "The container of the earlier calls is gone, with their variables and files; this call began in a new one."
_EXPIRED = (
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call began "
    "in a new one, with the files that the user had put there."
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
    container_id: str | None = None
    outputs: list[_ReplayedOutput] | None = None


_replayed = msgspec.json.Decoder(_Replayed)


class CodeInterpreter:
    """A `HostedTool`."""

    types = frozenset({NAME})
    item_types = frozenset({_ITEM})
    finds_files = True

    def __init__(
        self, containers: Containers, clock: Clock, settings: InterpreterSettings | None = None
    ) -> None:
        self._containers = containers
        self._clock = clock
        self._settings = settings or InterpreterSettings()

    async def offer(self, spec: ToolSpec, caller: Caller, past: Sequence[Segment]) -> "OfferedInterpreter":
        choice = read_container(spec)
        self._approve(choice.spec)
        container_id, news, heir_of = choice.container_id, "", None
        if container_id is not None:
            await self._check_named(caller, container_id)
        else:
            container_id, news, heir_of = await self._automatic(caller, past)
        place = Workplace(
            self._containers, self._clock, self._settings, container_id, choice.spec, news, heir_of
        )
        function = FunctionSpec(name=NAME, description=self._describe(choice.spec), parameters=_PARAMETERS)
        return OfferedInterpreter(place, caller, function)

    def _approve(self, spec: ContainerSpec) -> None:
        try:
            self._containers.approve(spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"container.{error.message}", param="tools") from None

    async def _check_named(self, caller: Caller, container_id: str) -> None:
        try:
            await self._containers.check(caller, container_id)
        except (NotFound, ContainerExpired) as error:
            raise type(error)(error.message, param="tools") from None

    async def _automatic(self, caller: Caller, past: Sequence[Segment]) -> tuple[str, str, str | None]:
        """The container that the conversation used last, or the name of a new one; what there is to tell; and whose
        files the new one is given.
        """
        earlier = _newest_container(past)
        if earlier is None:
            return self._containers.reserve(), "", None
        try:
            await self._containers.check(caller, earlier)
        except NotFound:
            return self._containers.reserve(), _GONE, None
        except ContainerExpired:
            return self._containers.reserve(), _EXPIRED, earlier
        return earlier, "", None

    def _describe(self, spec: ContainerSpec) -> str:
        settings = self._settings
        state = (
            "Variables, imports and files are kept from call to call."
            if settings.keeps_variables
            else "Files are kept from call to call; variables and imports are not."
        )
        network = "There is no network."
        if isinstance(spec.network, NetworkAllowlist):
            domains = ", ".join(clean_name(domain) for domain in spec.network.allowed_domains)
            network = f"There is no network but HTTP and HTTPS to {domains}."
        return (
            f"Runs Python {settings.python} in an isolated container and returns what it prints, the value of the "
            "last expression and the names of the files it wrote. The user sees the figures it shows.\n"
            f"- {state}\n"
            f"- The working directory is {DATA_DIRECTORY}. Files of the user are there. Files that you write there can "
            f"be downloaded: link them in your answer as [name](sandbox:{DATA_DIRECTORY}/name).\n"
            f"- Installed: {', '.join(settings.libraries)} and more; name other packages in `requirements`.\n"
            f"- {network}\n"
            f"- Code may run for {settings.execution_timeout:g} seconds."
        )

    def echo(self, spec: ToolSpec) -> bytes:
        return echoed(spec)

    def recall(self, entry: Entry) -> Exchange | None:
        try:
            item = _replayed.decode(entry.raw)
        except msgspec.DecodeError:
            return None
        urls = [output.url for output in item.outputs or () if output.url is not None]
        return Exchange(
            call_id=item.id or f"call_{hashlib.sha256(entry.raw).hexdigest()[:24]}",
            name=NAME,
            arguments=msgspec.json.encode({"code": item.code or ""}).decode(),
            output=_NOT_KEPT if item.outputs is None else _as_text(item.outputs),
            images=tuple(url for url in urls if url.startswith("data:image/")),
        )

    async def remember(self, caller: Caller, past: Sequence[Segment]) -> Memory | None:
        """The containers that were used, the latest last, each with its files."""
        ids = _containers(past)[-_MOST_REMEMBERED:]
        remembered = [await self._remembered(caller, container_id) for container_id in ids]
        if not remembered:
            return None
        items = [msgspec.json.encode(one) for one in remembered]
        *earlier, last = remembered
        notes = [
            f"The code interpreter was used in an earlier container, {one.container_id}." for one in earlier
        ]
        return Memory(items, "\n".join([*notes, _told(last)]))

    async def _remembered(self, caller: Caller, container_id: str) -> _Remembered:
        try:
            records = await self._containers.files(caller, container_id)
        except NotFound:  # it never began, or is over; whoever offers the next one has to know
            records = ()
        return _Remembered(
            container_id=clean_name(container_id), files=[produced_file(record) for record in records]
        )


class OfferedInterpreter:
    """An `OfferedTool`: one container for all calls of a request."""

    def __init__(self, workplace: Workplace, caller: Caller, function: FunctionSpec) -> None:
        self._place = workplace
        self._caller = caller
        self._function = function

    @property
    def function(self) -> FunctionSpec:
        return self._function

    def begin(self, context: CallContext) -> CodeSession:
        return CodeSession(self._place, context)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        try:
            records = await self._place.containers.files(self._caller, self._place.container_id)
        except NotFound:  # it has not begun, or is over
            return ()
        wanted = frozenset(paths)
        return [file for file in map(produced_file, records) if file.path in wanted]


def _newest_container(past: Sequence[Segment]) -> str | None:
    for segment in reversed(past):
        for entry in reversed(segment.entries):
            if entry.type == _ITEM:
                return _container_of(entry)
    return None


def _containers(past: Sequence[Segment]) -> list[str]:
    """All that calls have used, each once, the latest last."""
    found: dict[str, None] = {}
    for segment in past:
        for entry in segment.entries:
            container_id = _container_of(entry) if entry.type == _ITEM else None
            if container_id is not None:
                found.pop(container_id, None)
                found[container_id] = None
    return list(found)


def _container_of(entry: Entry) -> str | None:
    try:
        return _replayed.decode(entry.raw).container_id
    except msgspec.DecodeError:
        return None


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
