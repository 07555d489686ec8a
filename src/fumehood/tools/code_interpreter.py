"""The hosted tool `code_interpreter`: Python in containers, for any model; imports `interfaces`, `protocol`, siblings.

docs/code-interpreter.md tells what the model is offered and what clients see.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, Clock, Containers, Files, Memory
from fumehood.protocol.attachments import Attachment, file_name, free_name
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.conversation import Entry, Exchange, Segment
from fumehood.protocol.errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import NetworkAllowlist
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.tools.carried import Carried, Known, files_of, memory_of
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
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call "
    "began in a new one, with the files that the user had put there."
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


@dataclass(frozen=True, slots=True)
class _Active:
    """Where the calls of a request run.

    news: what the model should know of it. heir_of: see `Containers.open`.
    earlier: the container that the conversation has used last; file_ids: the uploads that it was given.
    """

    container_id: str
    news: str = ""
    heir_of: str | None = None
    earlier: str | None = None
    file_ids: frozenset[str] = frozenset()


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

    async def offer(self, spec: ToolSpec, caller: Caller, past: Sequence[Segment]) -> "OfferedInterpreter":
        choice = read_container(spec)
        self._approve(choice.spec)
        if choice.container_id is not None:
            active = await self._named(caller, choice.container_id)
        else:
            active = await self._automatic(caller, past)
        chosen = await self._chosen(caller, choice.spec.file_ids, active)
        files = [*chosen, *files_of(past, _container_of_call)]
        place = Workplace(
            self._containers,
            self._clock,
            self._settings,
            active.container_id,
            choice.spec,
            Carried(self._containers, caller, active.container_id, files),
            active.news,
            active.heir_of,
        )
        description = self._describe(choice.spec, [one.file.name for one in chosen])
        function = FunctionSpec(name=NAME, description=description, parameters=_PARAMETERS)
        return OfferedInterpreter(place, caller, function)

    def _approve(self, spec: ContainerSpec) -> None:
        try:
            self._containers.approve(spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"container.{error.message}", param="tools") from None

    async def _named(self, caller: Caller, container_id: str) -> "_Active":
        try:
            await self._containers.check(caller, container_id)
        except (NotFound, ContainerExpired) as error:
            raise type(error)(error.message, param="tools") from None
        return _Active(container_id)

    async def _automatic(self, caller: Caller, past: Sequence[Segment]) -> "_Active":
        """The container that the conversation used last, or the name of a new one."""
        earlier = _newest_container(past)
        if earlier is None:
            return _Active(self._containers.reserve())
        try:
            record = await self._containers.check(caller, earlier)
        except NotFound:
            return _Active(self._containers.reserve(), _GONE, earlier=earlier)
        except ContainerExpired:
            record = await self._containers.container(caller, earlier)
            return _Active(
                self._containers.reserve(), _EXPIRED, earlier, earlier, frozenset(record.spec.file_ids)
            )
        return _Active(earlier, earlier=earlier, file_ids=frozenset(record.spec.file_ids))

    async def _chosen(self, caller: Caller, file_ids: Sequence[str], active: "_Active") -> list[Known]:
        """The uploads that the request wants in the container. Raises InvalidRequest for one that is not there, unless
        the conversation has had a container before: what that was given, it has.
        """
        chosen: list[Known] = []
        for file_id in file_ids:
            had = {active.earlier} if file_id in active.file_ids and active.earlier else set[str]()
            try:
                file = await self._upload(caller, file_id)
            except NotFound as error:
                if active.earlier is None:
                    raise InvalidRequest(
                        f"container.file_ids: {error.message}", param="tools", code="file_not_found"
                    ) from None
                if had:
                    continue
                file = Attachment(name=clean_name(file_id, 80), file_id=file_id)
            name = free_name(file.name, [one.file.name for one in chosen])
            chosen.append(Known(msgspec.structs.replace(file, name=name), containers=had))
        return chosen

    async def _upload(self, caller: Caller, file_id: str) -> Attachment:
        if self._uploads is None:
            raise NotFound("this server keeps no uploads.")
        record = await self._uploads.file(caller, file_id)
        return Attachment(name=file_name(record.filename), file_id=file_id)

    def _describe(self, spec: ContainerSpec, names: Sequence[str]) -> str:
        settings = self._settings
        listed = f": {', '.join(names[:_MOST_TOLD])}{', …' if names[_MOST_TOLD:] else ''}" if names else ""
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
            f"- The working directory is {DATA_DIRECTORY}. Files of the user are there{listed}. Files that you write "
            f"there can be downloaded: link them in your answer as [name](sandbox:{DATA_DIRECTORY}/name).\n"
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
        files = files_of(past, _container_of_call)
        items = [msgspec.json.encode(one) for one in remembered]
        if (kept := memory_of(files)) is not None:
            items.append(kept)
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


def _container_of_call(entry: Entry) -> str | None:
    return _container_of(entry) if entry.type == _ITEM else None


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
