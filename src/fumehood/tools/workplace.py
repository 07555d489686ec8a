"""Where the hosted calls of a request run: a container that all tools share; imports `interfaces` and siblings.

A conversation has one container at a time, whichever tool has used it: what one call writes, the next finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import Caller, Clock, Container, Containers, Files, OfferedTool
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import NetworkAllowlist
from fumehood.tools.carried import Carried, chosen_files, files_of
from fumehood.tools.container_config import ContainerChoice
from fumehood.tools.produced import produced_file

_CALLS = frozenset({"code_interpreter_call", "shell_call"})
_GONE = "The container of the earlier calls is gone, with their variables and files; this call began in a new one."
_EXPIRED = (
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call "
    "began in a new one, with the files that the user had put there."
)
USUAL = ContainerSpec()
_MOST_NAMED = 50


@dataclass(slots=True)
class Workplace:
    """The container of one request's calls, by its id; it begins with the first of them.

    spec: what it is to be like, if it is a new one.
    news: what the model should know first; told with the first result, and then not again.
    heir_of: the container that this one replaces, see `Containers.open`.
    earlier: the container that the conversation has used last; had: the uploads that it was given.
    carried: files that it has to be given before the first call; names: of those among them that the tools name.
    """

    containers: Containers
    caller: Caller
    container_id: str
    spec: ContainerSpec
    news: str = ""
    heir_of: str | None = None
    earlier: str | None = None
    had: frozenset[str] = frozenset()
    names: list[str] = field(default_factory=list[str])
    carried: Carried = field(init=False)
    _opened: list[Container] = field(default_factory=list[Container])

    def __post_init__(self) -> None:
        self.carried = Carried(self.containers, self.caller, self.container_id)

    def take_news(self) -> str:
        news, self.news = self.news, ""
        return news

    async def open(self) -> Container:
        """The container, with the files that belong there. Raises ApiError."""
        container = await self.containers.open(self.caller, self.container_id, self.spec, self.heir_of)
        self._opened.append(container)
        told = await self.carried.bring()
        self.news = "\n".join(filter(None, [self.news, told]))
        return container

    def leave(self) -> None:
        """There will be no further call."""
        while self._opened:
            self._opened.pop().leave()

    async def give(self, uploads: Files | None, choice: ContainerChoice) -> None:
        """Have the uploads brought that a tool names; raises InvalidRequest for one that is not there."""
        wanted = choice.spec.file_ids
        try:
            chosen = await chosen_files(uploads, self.caller, wanted, self.earlier, self.had)
        except NotFound as error:
            raise InvalidRequest(
                f"{choice.where}.file_ids: {error.message}", param="tools", code="file_not_found"
            ) from None
        self.carried.add(chosen)
        self.names = list(dict.fromkeys([*self.names, *(one.file.name for one in chosen)]))

    async def files(self) -> Sequence[ProducedFile]:
        """All that are there; none before it has begun, and once it is over."""
        try:
            records = await self.containers.files(self.caller, self.container_id)
        except NotFound:
            return ()
        return [produced_file(record) for record in records]

    def describe(self) -> tuple[str, str]:
        """What a model should know of its directory and of its network, whatever it runs there."""
        network = "There is no network."
        if isinstance(self.spec.network, NetworkAllowlist):
            domains = ", ".join(clean_name(domain) for domain in self.spec.network.allowed_domains)
            network = f"There is no network but HTTP and HTTPS to {domains}."
        named = ", ".join(self.names[:_MOST_NAMED]) + (", …" if self.names[_MOST_NAMED:] else "")
        directory = (
            f"The working directory is {DATA_DIRECTORY}. Files of the user are there{f': {named}' if named else ''}. "
            "Files that you write there can be downloaded: link them in your answer as "
            f"[name](sandbox:{DATA_DIRECTORY}/name)."
        )
        return directory, network


class OfferedInContainer[Settings]:
    """What offered tools that run in containers have in common: one container for all calls of a request."""

    def __init__(self, place: Workplace, settings: Settings, clock: Clock) -> None:
        self.place = place
        self._settings = settings
        self._clock = clock

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        wanted = frozenset(paths)
        return [file for file in await self.place.files() if file.path in wanted]

    def close(self) -> None:
        self.place.leave()


async def find_workplace(
    containers: Containers,
    uploads: Files | None,
    caller: Caller,
    choice: ContainerChoice,
    past: Sequence[Segment],
    beside: Sequence[OfferedTool],
) -> Workplace:
    """The container that is named; else that of another tool of the request, else the one which the conversation used
    last, else a new one; with the files of the conversation. Raises ApiError, with `tools` for its parameter.
    """
    _approve(containers, choice)
    shared = _shared(beside)
    if choice.container_id is not None:
        place = await _named(containers, caller, choice.container_id, choice.spec)
    elif shared is not None:
        shared.spec = _joined(shared.spec, choice.spec)
        await shared.give(uploads, choice)
        return shared
    else:
        place = await _automatic(containers, caller, choice.spec, past)
    await place.give(uploads, choice)
    place.carried.add(files_of(past, container_of))
    return place


def _shared(beside: Sequence[OfferedTool]) -> Workplace | None:
    for tool in beside:
        if isinstance(tool, OfferedInContainer):
            return tool.place
    return None


async def _named(containers: Containers, caller: Caller, container_id: str, spec: ContainerSpec) -> Workplace:
    try:
        await containers.check(caller, container_id)
        await containers.container(caller, container_id)  # a use of it, from now on
    except (NotFound, ContainerExpired) as error:
        raise type(error)(error.message, param="tools") from None
    return Workplace(containers, caller, container_id, spec)


async def _automatic(
    containers: Containers, caller: Caller, spec: ContainerSpec, past: Sequence[Segment]
) -> Workplace:
    earlier = _newest_container(past)
    if earlier is None:
        return Workplace(containers, caller, containers.reserve(), spec)
    try:
        # A use of it: while the model thinks, it must not be the one that was idle longest.
        record = await containers.container(caller, earlier)
    except NotFound:
        return Workplace(containers, caller, containers.reserve(), spec, _GONE, earlier=earlier)
    had = frozenset(record.spec.file_ids)
    if record.status == "expired":
        return Workplace(containers, caller, containers.reserve(), spec, _EXPIRED, earlier, earlier, had)
    return Workplace(containers, caller, earlier, spec, earlier=earlier, had=had)


def _approve(containers: Containers, choice: ContainerChoice) -> None:
    try:
        containers.approve(choice.spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{choice.where}.{error.message}", param="tools") from None


def _joined(one: ContainerSpec, other: ContainerSpec) -> ContainerSpec:
    """What both ask for, where they share a container: who says nothing takes what the other says."""
    chosen: dict[str, object] = {}
    for setting in msgspec.structs.fields(ContainerSpec):
        usual, mine, theirs = (getattr(spec, setting.name) for spec in (USUAL, one, other))
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


class _Used(msgspec.Struct):
    """Where a call says that it ran; a local shell's says nowhere."""

    container_id: str | None = None
    environment: _Environment | None = None


_used = msgspec.json.Decoder(_Used)


def container_of(entry: Entry) -> str | None:
    """The container that a call used; None for an item that is no such call."""
    if entry.type not in _CALLS:
        return None
    try:
        used = _used.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return used.container_id or (used.environment.container_id if used.environment else None)


def used_containers(past: Sequence[Segment]) -> list[str]:
    """All that calls have used, each once, the latest last."""
    found: dict[str, None] = {}
    for segment in past:
        for entry in segment.entries:
            container_id = container_of(entry)
            if container_id is not None:
                found.pop(container_id, None)
                found[container_id] = None
    return list(found)


def _newest_container(past: Sequence[Segment]) -> str | None:
    for segment in reversed(past):
        for entry in reversed(segment.entries):
            container_id = container_of(entry)
            if container_id is not None:
                return container_id
    return None
