"""Files of a conversation on their way into a container.

They are put there with the first call, once. That a file was there when a call ran is read off the conversation itself,
whoever keeps it: a call of that container comes after the file.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from fumehood.interfaces import Caller, ContainerService, FileService
from fumehood.protocol.attachments import Attachment, decode_inline, find_file_parts, sanitize_file_name
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import ApiError, NotFound
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.safe_names import FreeNameAllocator, find_free_name, join_names
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.worker_threads import run_in_worker

_SNAPSHOT_TYPE = "fumehood:files"
_MAX_NAMED_FILES = 20
_MAX_SNAPSHOT_FILES = 500
_MAX_CARRIED_CHARACTERS = 3 << 20  # characters of contents that a compaction takes along


class _FileSnapshot(msgspec.Struct):
    file: Attachment
    containers: list[str] = []


class _FilesSnapshot(msgspec.Struct, tag_field="type", tag=_SNAPSHOT_TYPE):
    files: list[_FileSnapshot]


_snapshot_decoder = msgspec.json.Decoder(_FilesSnapshot)


@dataclass(slots=True)
class ConversationFile:
    """A file that the conversation speaks of.

    entry, place: the item that has it, and its number among the files there; None once that was compacted.
    containers: those that had a call after it.
    """

    file: Attachment
    entry: ConversationEntry | None = None
    part_index: int = 0
    containers: set[str] = field(default_factory=set[str])


def collect_conversation_files(
    past: Sequence[ConversationSegment], container_of: Callable[[ConversationEntry], str | None]
) -> list[ConversationFile]:
    """All files of a conversation, each once.

    container_of: where a call ran; None for an item that is none.
    """
    known: dict[str, ConversationFile] = {}
    for segment in past:
        for entry in segment.entries:
            if entry.type == _SNAPSHOT_TYPE:
                known |= {one.file.name: one for one in _restore_files(entry)}
            elif known and (container := container_of(entry)) is not None:
                for one in known.values():
                    one.containers.add(container)
            for place, file in enumerate(entry.attachments):
                if file.name:
                    before = known.get(file.name)
                    seen = before.containers if before is not None else set[str]()
                    known[file.name] = ConversationFile(file, entry, place, seen)
    return list(known.values())


async def resolve_uploads(
    uploads: FileService | None,
    caller: Caller,
    file_ids: Sequence[str],
    previous_container: str | None,
    previous_uploads: Collection[str],
) -> list[ConversationFile]:
    """The uploads that a request wants in its container.

    Raises NotFound for one that is not there, unless the conversation has used a container before: what that was given
    is there, and for the rest it is too late to refuse the request.
    earlier: that container; had: the uploads that it was given.
    """
    chosen: list[ConversationFile] = []
    names = FreeNameAllocator(())
    for file_id in file_ids:
        given = (
            {previous_container}
            if previous_container is not None and file_id in previous_uploads
            else set[str]()
        )
        try:
            name = sanitize_file_name(await _find_filename(uploads, caller, file_id))
        except NotFound:
            if previous_container is None:
                raise
            if given:
                continue
            name = sanitize_file_name(file_id)
        chosen.append(
            ConversationFile(Attachment(name=names.allocate(name), file_id=file_id), containers=given)
        )
    return chosen


async def _find_filename(uploads: FileService | None, caller: Caller, file_id: str) -> str:
    if uploads is None:
        raise NotFound("this server keeps no uploads.")
    return (await uploads.get_file(caller, file_id)).filename


async def snapshot_files(
    files: Sequence[ConversationFile], kept: Sequence[ConversationEntry]
) -> bytes | None:
    """What has to be remembered of them once their items are compacted, all but those that are kept; for `files_of`."""
    contents = await _collect_inline_contents(files, kept)
    remembered = [
        _FileSnapshot(
            replace(one.file, text=None, left_out=0, data=contents.get(one.file.name)), sorted(one.containers)
        )
        for one in files[-_MAX_SNAPSHOT_FILES:]
    ]
    return msgspec.json.encode(_FilesSnapshot(remembered)) if remembered else None


async def _collect_inline_contents(
    files: Sequence[ConversationFile], kept: Sequence[ConversationEntry]
) -> dict[str, str]:
    """Contents that are nowhere but in items which are going, by the names of the files: the latest that there is room
    for, since whoever carries the conversation carries them as well.
    """
    found: dict[str, str] = {}
    room = _MAX_CARRIED_CHARACTERS
    staying = {id(entry) for entry in kept}
    for one in reversed(files):
        if one.containers or one.file.file_id or id(one.entry) in staying:
            continue
        data = await _read_inline_data(one)
        if data is not None and len(data) <= room:
            found[one.file.name] = data
            room -= len(data)
    return found


def _restore_files(entry: ConversationEntry) -> list[ConversationFile]:
    try:
        memory = _snapshot_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [
        ConversationFile(one.file, containers=set(one.containers)) for one in memory.files if one.file.name
    ]


class PendingFiles:
    """The files that a container has to be given before the next call."""

    def __init__(self, containers: ContainerService, caller: Caller, container_id: str) -> None:
        self._containers = containers
        self._caller = caller
        self._container_id = container_id
        self._pending: list[ConversationFile] = []
        self._lock = asyncio.Lock()

    def add(self, files: Sequence[ConversationFile]) -> None:
        self._pending += [one for one in files if self._container_id not in one.containers]

    async def copy_to_container(self) -> str:
        """Put them there, where that was not done yet; what there is to tell the model. Raises nothing of its own."""
        if not self._pending:
            return ""
        async with self._lock:  # calls may run side by side
            waiting, self._pending = self._pending, []
            return await self._copy_all(waiting) if waiting else ""

    async def _copy_all(self, waiting: Sequence[ConversationFile]) -> str:
        try:
            records = await self._containers.list_files(self._caller, self._container_id)
        except NotFound:
            records = ()
        there = {record.path: record for record in records}
        brought: list[str] = []
        missing: list[str] = []
        for one in waiting:
            if one.containers and one.file.name in there and there[one.file.name].source == "user":
                continue  # it came along from the container before this one
            try:
                record = await self._copy_file(one, there)
            except (ApiError, SandboxError) as error:
                missing.append(f"{one.file.name} is not there: {error.message}")
            else:
                there[record.path] = record
                brought.append(_describe_path(one.file.name, record.path))
        return "\n".join([*_describe_copied(list(dict.fromkeys(brought))), *missing])

    async def _copy_file(
        self, one: ConversationFile, there: Mapping[str, ContainerFileRecord]
    ) -> ContainerFileRecord:
        """Raises ApiError."""
        content = await _read_content(one)
        if content is None:
            if not one.file.file_id:
                raise NotFound("it was given too long ago.")
            (record,) = await self._containers.copy_uploads(
                self._caller, self._container_id, [one.file.file_id]
            )
            return record
        known = there.get(one.file.name)
        if known is not None and await self._has_content(known, content):
            return known
        path = find_free_name(one.file.name, there)
        return await self._containers.write_file(self._caller, self._container_id, path, content)

    async def _has_content(self, record: ContainerFileRecord, content: bytes) -> bool:
        if record.bytes != len(content):
            return False
        start = 0
        pieces = self._containers.read_file(self._caller, self._container_id, record.id)
        async with aclosing(pieces):
            async for piece in pieces:
                if content[start : start + len(piece)] != piece:
                    return False
                start += len(piece)
        return start == len(content)


async def _read_content(one: ConversationFile) -> bytes | None:
    """What the conversation itself holds; None if it only refers to it."""
    data = None if one.file.file_id else await _read_inline_data(one)
    return None if data is None else await run_in_worker(len(data), _decode_data, data)


async def _read_inline_data(one: ConversationFile) -> str | None:
    """That content as it is written in the conversation, mostly a data: URL; None if it is not there."""
    if one.file.data is not None or one.entry is None:
        return one.file.data
    return await run_in_worker(len(one.entry.raw), _find_inline_data, one.entry, one.part_index)


def _find_inline_data(entry: ConversationEntry, place: int) -> str | None:
    parts = find_file_parts(entry.type, entry.raw)
    return parts[place].part.inline_data if place < len(parts) else None


def _decode_data(data: str) -> bytes | None:
    try:
        return decode_inline(data)[1]
    except ValueError:
        return None


def _describe_path(name: str, path: str) -> str:
    return f"{DATA_DIRECTORY}/{path}" + ("" if path == name else f" ({name})")


def _describe_copied(brought: Sequence[str]) -> list[str]:
    return [f"Files of the user: {join_names(brought, _MAX_NAMED_FILES)}."] if brought else []
