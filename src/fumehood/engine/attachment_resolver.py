"""Finds out what the files and pictures of an input are, before anything begins.

What was found is kept with the item: whoever continues the conversation finds it as it was, whatever has become of an
upload or an address meanwhile.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fumehood.engine.truncation import read_role
from fumehood.interfaces import AttachmentLoader, Caller, ReserveMemory
from fumehood.protocol.attachments import (
    Attachment,
    InputFilePart,
    LocatedFilePart,
    find_file_parts,
    may_contain_files,
    sanitize_file_name,
)
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.safe_names import FreeNameAllocator
from fumehood.worker_threads import run_in_worker

_MAX_FILES = 200
_MAX_URLS = 20  # addresses: each may take its time
_MAX_BYTES = 64 << 20  # that are read for one request; it may be short and name much


@dataclass(frozen=True, slots=True)
class ResolvedAttachments:
    """The items of a request with what was found of their files.

    hidden: those that the model will not be shown, and where they stand; without what it has answered already.
    """

    entries: tuple[ConversationEntry, ...]
    hidden_files: Sequence[tuple[str, Attachment]] = ()


class AttachmentResolver:
    """Has the files of an input found, and keeps with its items what they are."""

    def __init__(self, attachments: AttachmentLoader | None) -> None:
        self._attachments = attachments

    async def resolve(
        self,
        entries: tuple[ConversationEntry, ...],
        caller: Caller,
        past: Sequence[ConversationSegment],
        forward_files: Callable[[], bool],
        reserve_memory: ReserveMemory | None = None,
    ) -> ResolvedAttachments:
        """Raises InvalidRequest that names the part, and what `take` raises, which is told of what is read.

        gives_files: whether the model is given files that are no text.
        """
        holding = [
            number
            for number, entry in enumerate(entries)
            if not entry.attachments and may_contain_files(entry.type, entry.raw)
        ]
        if self._attachments is None or not holding:
            return ResolvedAttachments(entries)
        read = await run_in_worker(
            sum([len(entries[number].raw) for number in holding]),
            _read_file_parts,
            [entries[number] for number in holding],
        )
        if sum(map(len, read)) > _MAX_FILES:
            raise InvalidRequest(
                f"At most {_MAX_FILES} files and pictures can be given at once.", param="input"
            )
        whole, answered = forward_files(), _count_answered(entries)
        names, budget = _AttachmentNames(past, entries), _AttachmentBudget()
        attached = list(entries)
        hidden: list[tuple[str, Attachment]] = []
        for number, parts in zip(holding, read, strict=True):
            found: list[Attachment] = []
            for place, part in parts:
                where = f"input[{number}].{place}"
                finding = self._attachments.load_attachment(
                    caller, part, with_content=whole, reserve_memory=reserve_memory
                )
                one = await _resolve_part(finding, part, where, number < answered)
                budget.spend(part, one)
                is_there = (one.data or part.inline_data) is not None and not one.too_large
                given = whole and one.kind == "binary" and is_there
                found.append(names.assign(replace(one, given=given)))
                if number >= answered and found[-1].is_hidden:
                    hidden.append((where, found[-1]))
            attached[number] = replace(entries[number], attachments=tuple(found))
        return ResolvedAttachments(tuple(attached), hidden)


async def _resolve_part(
    finding: Awaitable[Attachment], part: InputFilePart, where: str, is_answered: bool
) -> Attachment:
    """What the model has answered already need not be there any more."""
    try:
        return await finding
    except NotFound as error:
        if is_answered:
            kind = "picture" if part.type == "input_image" else "binary"
            name = sanitize_file_name(part.filename or part.file_id or "")
            return Attachment(name=name, kind=kind, file_id=part.file_id or "", gone=True)
        raise _make_rejection(where, error) from None
    except InvalidRequest as error:
        raise _make_rejection(where, error) from None


def _read_file_parts(entries: Sequence[ConversationEntry]) -> list[list[LocatedFilePart]]:
    return [find_file_parts(entry.type, entry.raw) for entry in entries]


def _count_answered(entries: Sequence[ConversationEntry]) -> int:
    """How many of the items stand before something that a model made of them."""
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        said = entry.type == "message" and read_role(entry) != "assistant"
        if not said and not entry.type.endswith("_output"):
            return number
    return 0


def _make_rejection(where: str, error: NotFound | InvalidRequest) -> InvalidRequest:
    param = f"{where}.{error.param}" if error.param else where
    return InvalidRequest(f"{where}: {error.message}", param=param, code=error.wire_code)


class _AttachmentBudget:
    """What the files of one request may take."""

    def __init__(self) -> None:
        self._bytes = _MAX_BYTES
        self._urls = _MAX_URLS

    def spend(self, part: InputFilePart, found: Attachment) -> None:
        """Raises InvalidRequest."""
        self._bytes -= found.size
        self._urls -= found.data is not None and part.inline_data is None and part.file_id is None
        if self._bytes < 0 or self._urls < 0:
            raise InvalidRequest(
                f"The files that the input refers to are more than {_MAX_BYTES:,} bytes, or more than "
                f"{_MAX_URLS} are to be fetched. Refer to less.",
                param="input",
            )


class _AttachmentNames:
    """Names that are given out; an upload has the same one wherever it is named."""

    def __init__(self, past: Sequence[ConversationSegment], entries: Sequence[ConversationEntry]) -> None:
        known = [one for segment in past for entry in segment.entries for one in entry.attachments]
        known += [one for entry in entries for one in entry.attachments]
        self._free = FreeNameAllocator({one.name for one in known if one.name})
        self._upload_names = {one.file_id: one.name for one in known if one.file_id}

    def assign(self, found: Attachment) -> Attachment:
        if not found.name:
            return found
        name = self._upload_names.get(found.file_id) or self._free.allocate(found.name)
        if found.file_id:
            self._upload_names[found.file_id] = name
        return replace(found, name=name)
