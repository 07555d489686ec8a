"""Copies the files of a conversation into its container.

Files are copied once, with the first call. Whether a container has a file already follows from the conversation: one of
its calls comes after the file.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from fumehood.cpu_worker import run_in_worker
from fumehood.interfaces import Caller, ContainerService, FileService
from fumehood.protocol.attachments import Attachment, decode_inline, find_file_parts, sanitize_file_name
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.name_sanitizing import FreeNameAllocator, find_free_name, join_names
from fumehood.protocol.openai.api_errors import ApiError, NotFound
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.tools.produced_files import list_existing_files

_SNAPSHOT_TYPE = "fumehood:files"
_MAX_NAMED_FILES = 20
_MAX_SNAPSHOT_FILES = 500
_MAX_CARRIED_CHARACTERS = 3 << 20  # contents that a compaction carries along


class _FileSnapshot(msgspec.Struct):
    file: Attachment
    containers: list[str] = []


class _FilesSnapshot(msgspec.Struct, tag_field="type", tag=_SNAPSHOT_TYPE):
    files: list[_FileSnapshot]


_snapshot_decoder = msgspec.json.Decoder(_FilesSnapshot)


@dataclass(slots=True)
class ConversationFile:
    """A file of the conversation.

    entry, part_index: the item with the file, and its index among the item's files; None after a compaction.
    containers: those with a call after the file.
    """

    file: Attachment
    entry: ConversationEntry | None = None
    part_index: int = 0
    containers: set[str] = field(default_factory=set[str])


def collect_conversation_files(
    past: Sequence[ConversationSegment], container_of: Callable[[ConversationEntry], str | None]
) -> list[ConversationFile]:
    """All files of a conversation, by unique name.

    container_of: returns the container of a call, None for any other item.
    """
    files: dict[str, ConversationFile] = {}
    for segment in past:
        for entry in segment.entries:
            if entry.type == _SNAPSHOT_TYPE:
                files |= {restored.file.name: restored for restored in _restore_files(entry)}
            elif files and (container := container_of(entry)) is not None:
                for file in files.values():
                    file.containers.add(container)
            for index, attachment in enumerate(entry.attachments):
                if attachment.name:
                    previous = files.get(attachment.name)
                    containers = previous.containers if previous is not None else set[str]()
                    files[attachment.name] = ConversationFile(attachment, entry, index, containers)
    return list(files.values())


async def resolve_uploads(
    uploads: FileService | None,
    caller: Caller,
    file_ids: Sequence[str],
    previous_container: str | None,
    previous_uploads: Collection[str],
) -> list[ConversationFile]:
    """Resolve the uploads that a tool names in `file_ids`.

    Raises NotFound for a missing one, unless the conversation already used a container: then the request must not fail.
    previous_container: that container; previous_uploads: the uploads that were copied there.
    """
    resolved: list[ConversationFile] = []
    names = FreeNameAllocator(())
    for file_id in file_ids:
        containers = (
            {previous_container}
            if previous_container is not None and file_id in previous_uploads
            else set[str]()
        )
        try:
            name = sanitize_file_name(await _find_filename(uploads, caller, file_id))
        except NotFound:
            if previous_container is None:
                raise
            if containers:
                continue
            name = sanitize_file_name(file_id)
        resolved.append(
            ConversationFile(Attachment(name=names.allocate(name), file_id=file_id), containers=containers)
        )
    return resolved


async def _find_filename(uploads: FileService | None, caller: Caller, file_id: str) -> str:
    if uploads is None:
        raise NotFound("this server stores no uploads.")
    return (await uploads.get_file(caller, file_id)).filename


async def snapshot_files(
    files: Sequence[ConversationFile], kept: Sequence[ConversationEntry]
) -> bytes | None:
    """Encode the files for a compaction, to be read by `collect_conversation_files`; None if there are none."""
    contents = await _collect_inline_contents(files, kept)
    snapshots = [
        _FileSnapshot(
            replace(file.file, text=None, omitted_bytes=0, data=contents.get(file.file.name)),
            sorted(file.containers),
        )
        for file in files[-_MAX_SNAPSHOT_FILES:]
    ]
    return msgspec.json.encode(_FilesSnapshot(snapshots)) if snapshots else None


async def _collect_inline_contents(
    files: Sequence[ConversationFile], kept: Sequence[ConversationEntry]
) -> dict[str, str]:
    """Contents that exist only in items which the compaction removes, by file name.

    The latest ones that fit: the client carries them with every request.
    """
    contents: dict[str, str] = {}
    room = _MAX_CARRIED_CHARACTERS
    kept_ids = {id(entry) for entry in kept}
    for file in reversed(files):
        if file.containers or file.file.file_id or id(file.entry) in kept_ids:
            continue
        data = await _read_inline_data(file)
        if data is not None and len(data) <= room:
            contents[file.file.name] = data
            room -= len(data)
    return contents


def _restore_files(entry: ConversationEntry) -> list[ConversationFile]:
    try:
        snapshot = _snapshot_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [
        ConversationFile(file.file, containers=set(file.containers))
        for file in snapshot.files
        if file.file.name
    ]


class PendingFiles:
    """Files to copy into a container before its next call."""

    def __init__(self, containers: ContainerService, caller: Caller, container_id: str) -> None:
        self._containers = containers
        self._caller = caller
        self._container_id = container_id
        self._pending: list[ConversationFile] = []
        self._lock = asyncio.Lock()

    def add(self, files: Sequence[ConversationFile]) -> None:
        self._pending += [file for file in files if self._container_id not in file.containers]

    async def copy_to_container(self) -> str:
        """Copy the pending files; return a notice for the model. Failures become part of the notice."""
        if not self._pending:
            return ""
        async with self._lock:  # calls may run in parallel
            pending, self._pending = self._pending, []
            return await self._copy_all(pending) if pending else ""

    async def _copy_all(self, pending: Sequence[ConversationFile]) -> str:
        records = await list_existing_files(self._containers, self._caller, self._container_id)
        existing = {record.path: record for record in records}
        copied: list[str] = []
        notices: list[str] = []
        for pending_file in pending:
            name = pending_file.file.name
            if pending_file.containers and name in existing and existing[name].source == "user":
                continue  # it was copied from the previous container
            try:
                record = await self._copy_file(pending_file, existing)
            except (ApiError, SandboxError) as error:
                notices.append(f"{name} is not there: {error.message}")
            else:
                existing[record.path] = record
                copied.append(
                    f"{DATA_DIRECTORY}/{record.path}" + ("" if record.path == name else f" ({name})")
                )
        if copied:
            notices.insert(0, f"Files of the user: {join_names([*dict.fromkeys(copied)], _MAX_NAMED_FILES)}.")
        return "\n".join(notices)

    async def _copy_file(
        self, file: ConversationFile, existing: Mapping[str, ContainerFileRecord]
    ) -> ContainerFileRecord:
        """Raises ApiError."""
        content = await _read_content(file)
        if content is None:
            if not file.file.file_id:
                raise NotFound("it was given too long ago.")
            (record,) = await self._containers.copy_uploads(
                self._caller, self._container_id, [file.file.file_id]
            )
            return record
        known = existing.get(file.file.name)
        if known is not None and await self._has_content(known, content):
            return known
        path = find_free_name(file.file.name, existing)
        return await self._containers.write_file(self._caller, self._container_id, path, content)

    async def _has_content(self, record: ContainerFileRecord, content: bytes) -> bool:
        if record.bytes != len(content):
            return False
        start = 0
        chunks = self._containers.read_file(self._caller, self._container_id, record.id)
        async with aclosing(chunks):
            async for chunk in chunks:
                if content[start : start + len(chunk)] != chunk:
                    return False
                start += len(chunk)
        return start == len(content)


async def _read_content(file: ConversationFile) -> bytes | None:
    """The inline content; None if the conversation only references the file."""
    data = None if file.file.file_id else await _read_inline_data(file)
    return None if data is None else await run_in_worker(len(data), _decode_data, data)


async def _read_inline_data(file: ConversationFile) -> str | None:
    """The inline content as written in the conversation, mostly a data: URL; None if there is none."""
    if file.file.data is not None or file.entry is None:
        return file.file.data
    return await run_in_worker(len(file.entry.raw), _find_inline_data, file.entry, file.part_index)


def _find_inline_data(entry: ConversationEntry, part_index: int) -> str | None:
    parts = find_file_parts(entry.type, entry.raw)
    return parts[part_index].part.inline_data if part_index < len(parts) else None


def _decode_data(data: str) -> bytes | None:
    try:
        return decode_inline(data)[1]
    except ValueError:
        return None
