"""Where the hosted calls of a request run: a container that all tools share; imports `interfaces` and siblings.

A conversation has one container at a time, whichever tool has used it: what one call writes, the next finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fumehood.interfaces import Caller, Container, Containers, OfferedTool
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerSpec
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import ContainerExpired, InvalidRequest, NotFound
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import NetworkAllowlist
from fumehood.tools.container_config import ContainerChoice
from fumehood.tools.produced import produced_file

_CALLS = frozenset({"code_interpreter_call", "shell_call"})
_GONE = "The container of the earlier calls is gone, with their variables and files; this call began in a new one."
_EXPIRED = (
    "The container of the earlier calls has expired, with their variables and the files that they wrote; this call "
    "began in a new one, with the files that the user had put there."
)
USUAL = ContainerSpec()


@dataclass(slots=True)
class Workplace:
    """The container of one request's calls, by its id; it begins with the first of them.

    spec: what it is to be like, if it is a new one.
    news: what the model should know first; told with the first result, and then not again.
    heir_of: the container that this one replaces, see `Containers.open`.
    """

    containers: Containers
    caller: Caller
    container_id: str
    spec: ContainerSpec
    news: str = ""
    heir_of: str | None = None

    def take_news(self) -> str:
        news, self.news = self.news, ""
        return news

    async def open(self) -> Container:
        """Raises ApiError."""
        return await self.containers.open(self.caller, self.container_id, self.spec, self.heir_of)

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
        directory = (
            f"The working directory is {DATA_DIRECTORY}. Files of the user are there. Files that you write there can "
            f"be downloaded: link them in your answer as [name](sandbox:{DATA_DIRECTORY}/name)."
        )
        return directory, network


class OfferedInContainer:
    """What offered tools that run in containers have in common."""

    def __init__(self, place: Workplace) -> None:
        self.place = place

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        wanted = frozenset(paths)
        return [file for file in await self.place.files() if file.path in wanted]


async def find_workplace(
    containers: Containers,
    caller: Caller,
    choice: ContainerChoice,
    past: Sequence[Segment],
    beside: Sequence[OfferedTool],
) -> Workplace:
    """The container that is named; else that of another tool of the request, else the one which the conversation used
    last, else a new one. Raises ApiError, with `tools` for its parameter.
    """
    _approve(containers, choice)
    named = choice.container_id
    if named is not None:
        try:
            await containers.check(caller, named)
        except (NotFound, ContainerExpired) as error:
            raise type(error)(error.message, param="tools") from None
        return Workplace(containers, caller, named, choice.spec)
    for tool in beside:
        if isinstance(tool, OfferedInContainer):
            tool.place.spec = _joined(tool.place.spec, choice.spec)
            return tool.place
    earlier = _newest_container(past)
    if earlier is None:
        return Workplace(containers, caller, containers.reserve(), choice.spec)
    try:
        await containers.check(caller, earlier)
    except NotFound:
        return Workplace(containers, caller, containers.reserve(), choice.spec, _GONE)
    except ContainerExpired:
        return Workplace(containers, caller, containers.reserve(), choice.spec, _EXPIRED, earlier)
    return Workplace(containers, caller, earlier, choice.spec)


def _approve(containers: Containers, choice: ContainerChoice) -> None:
    try:
        containers.approve(choice.spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{choice.where}.{error.message}", param="tools") from None


def _joined(one: ContainerSpec, other: ContainerSpec) -> ContainerSpec:
    """What both ask for, where they share a container: who says nothing takes what the other says."""
    chosen: dict[str, object] = {}
    for field in msgspec.structs.fields(ContainerSpec):
        usual, mine, theirs = (getattr(spec, field.name) for spec in (USUAL, one, other))
        if field.name == "file_ids":
            chosen[field.name] = tuple(dict.fromkeys((*mine, *theirs)))
        elif mine != theirs and usual not in (mine, theirs):
            raise InvalidRequest(
                f"code_interpreter and shell share one container, and ask for another {field.name} of it each.",
                param="tools",
            )
        else:
            chosen[field.name] = theirs if mine == usual else mine
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
