"""Files of a conversation on their way into a container; imports `interfaces` and `protocol`.

They are put there with the first call, once. That a file was there when a call ran is read off the conversation itself,
whoever keeps it: a call of that container comes after the file.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from fumehood.aside import aside
from fumehood.interfaces import Caller, Containers, Files
from fumehood.protocol.attachments import Attachment, decode_inline, file_name, file_parts
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import ApiError, NotFound
from fumehood.protocol.names import FreeNames, free_name, in_words
from fumehood.protocol.sandbox_errors import SandboxError

_MEMORY = "fumehood:files"
_MOST_NAMED = 20
_MOST_REMEMBERED = 500
_MOST_CARRIED = 3 << 20  # characters of contents that a compaction takes along


class _Remembered(msgspec.Struct):
    file: Attachment
    containers: list[str] = []


class _Memory(msgspec.Struct, tag_field="type", tag=_MEMORY):
    files: list[_Remembered]


_memories = msgspec.json.Decoder(_Memory)


@dataclass(slots=True)
class Known:
    """A file that the conversation speaks of.

    entry, place: the item that has it, and its number among the files there; None once that was compacted.
    containers: those that had a call after it.
    """

    file: Attachment
    entry: Entry | None = None
    place: int = 0
    containers: set[str] = field(default_factory=set[str])


def files_of(past: Sequence[Segment], container_of: Callable[[Entry], str | None]) -> list[Known]:
    """All files of a conversation, each once.

    container_of: where a call ran; None for an item that is none.
    """
    known: dict[str, Known] = {}
    for segment in past:
        for entry in segment.entries:
            if entry.type == _MEMORY:
                known |= {one.file.name: one for one in _recalled(entry)}
            elif known and (container := container_of(entry)) is not None:
                for one in known.values():
                    one.containers.add(container)
            for place, file in enumerate(entry.attachments):
                if file.name:
                    before = known.get(file.name)
                    seen = before.containers if before is not None else set[str]()
                    known[file.name] = Known(file, entry, place, seen)
    return list(known.values())


async def chosen_files(
    uploads: Files | None,
    caller: Caller,
    file_ids: Sequence[str],
    earlier: str | None,
    had: Collection[str],
) -> list[Known]:
    """The uploads that a request wants in its container.

    Raises NotFound for one that is not there, unless the conversation has used a container before: what that was given
    is there, and for the rest it is too late to refuse the request.
    earlier: that container; had: the uploads that it was given.
    """
    chosen: list[Known] = []
    names = FreeNames(())
    for file_id in file_ids:
        given = {earlier} if earlier is not None and file_id in had else set[str]()
        try:
            name = file_name(await _filename(uploads, caller, file_id))
        except NotFound:
            if earlier is None:
                raise
            if given:
                continue
            name = file_name(file_id)
        chosen.append(Known(Attachment(name=names.take(name), file_id=file_id), containers=given))
    return chosen


async def _filename(uploads: Files | None, caller: Caller, file_id: str) -> str:
    if uploads is None:
        raise NotFound("this server keeps no uploads.")
    return (await uploads.file(caller, file_id)).filename


async def memory_of(files: Sequence[Known], kept: Sequence[Entry]) -> bytes | None:
    """What has to be remembered of them once their items are compacted, all but those that are kept; for `files_of`."""
    contents = await _lost_otherwise(files, kept)
    remembered = [
        _Remembered(
            replace(one.file, text=None, left_out=0, data=contents.get(one.file.name)), sorted(one.containers)
        )
        for one in files[-_MOST_REMEMBERED:]
    ]
    return msgspec.json.encode(_Memory(remembered)) if remembered else None


async def _lost_otherwise(files: Sequence[Known], kept: Sequence[Entry]) -> dict[str, str]:
    """Contents that are nowhere but in items which are going, by the names of the files: the latest that there is room
    for, since whoever carries the conversation carries them as well.
    """
    found: dict[str, str] = {}
    room = _MOST_CARRIED
    staying = {id(entry) for entry in kept}
    for one in reversed(files):
        if one.containers or one.file.file_id or id(one.entry) in staying:
            continue
        data = await _data(one)
        if data is not None and len(data) <= room:
            found[one.file.name] = data
            room -= len(data)
    return found


def _recalled(entry: Entry) -> list[Known]:
    try:
        memory = _memories.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [Known(one.file, containers=set(one.containers)) for one in memory.files if one.file.name]


class Carried:
    """The files that a container has to be given before the next call."""

    def __init__(self, containers: Containers, caller: Caller, container_id: str) -> None:
        self._containers = containers
        self._caller = caller
        self._container_id = container_id
        self._waiting: list[Known] = []
        self._turn = asyncio.Lock()

    def add(self, files: Sequence[Known]) -> None:
        self._waiting += [one for one in files if self._container_id not in one.containers]

    async def bring(self) -> str:
        """Put them there, where that was not done yet; what there is to tell the model. Raises nothing of its own."""
        if not self._waiting:
            return ""
        async with self._turn:  # calls may run side by side
            waiting, self._waiting = self._waiting, []
            return await self._bring_all(waiting) if waiting else ""

    async def _bring_all(self, waiting: Sequence[Known]) -> str:
        try:
            records = await self._containers.files(self._caller, self._container_id)
        except NotFound:
            records = ()
        there = {record.path: record for record in records}
        brought: list[str] = []
        missing: list[str] = []
        for one in waiting:
            if one.containers and one.file.name in there and there[one.file.name].source == "user":
                continue  # it came along from the container before this one
            try:
                record = await self._bring(one, there)
            except (ApiError, SandboxError) as error:
                missing.append(f"{one.file.name} is not there: {error.message}")
            else:
                there[record.path] = record
                brought.append(_told(one.file.name, record.path))
        return "\n".join([*_sentence(list(dict.fromkeys(brought))), *missing])

    async def _bring(self, one: Known, there: Mapping[str, ContainerFileRecord]) -> ContainerFileRecord:
        """Raises ApiError."""
        content = await _content(one)
        if content is None:
            if not one.file.file_id:
                raise NotFound("it was given too long ago.")
            (record,) = await self._containers.place(self._caller, self._container_id, [one.file.file_id])
            return record
        known = there.get(one.file.name)
        if known is not None and await self._holds(known, content):
            return known
        path = free_name(one.file.name, there)
        return await self._containers.put(self._caller, self._container_id, path, content)

    async def _holds(self, record: ContainerFileRecord, content: bytes) -> bool:
        if record.bytes != len(content):
            return False
        start = 0
        pieces = self._containers.read(self._caller, self._container_id, record.id)
        async with aclosing(pieces):
            async for piece in pieces:
                if content[start : start + len(piece)] != piece:
                    return False
                start += len(piece)
        return start == len(content)


async def _content(one: Known) -> bytes | None:
    """What the conversation itself holds; None if it only refers to it."""
    data = None if one.file.file_id else await _data(one)
    return None if data is None else await aside(len(data), _decoded, data)


async def _data(one: Known) -> str | None:
    """That content as it is written in the conversation, mostly a data: URL; None if it is not there."""
    if one.file.data is not None or one.entry is None:
        return one.file.data
    return await aside(len(one.entry.raw), _inline, one.entry, one.place)


def _inline(entry: Entry, place: int) -> str | None:
    parts = file_parts(entry.type, entry.raw)
    return parts[place].part.inline if place < len(parts) else None


def _decoded(data: str) -> bytes | None:
    try:
        return decode_inline(data)[1]
    except ValueError:
        return None


def _told(name: str, path: str) -> str:
    return f"{DATA_DIRECTORY}/{path}" + ("" if path == name else f" ({name})")


def _sentence(brought: Sequence[str]) -> list[str]:
    return [f"Files of the user: {in_words(brought, _MOST_NAMED)}."] if brought else []
