"""Resolves the files and images of an input before the run starts.

The result is stored with the item, so that a continued conversation does not depend on the upload or the URL any more.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.context_truncation import read_role
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
from fumehood.protocol.name_sanitizing import FreeNameAllocator
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound

_MAX_FILES = 200
_MAX_URLS = 20  # each fetch may be slow
_MAX_BYTES = 64 << 20  # read for one request, which can be short and reference much


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """The items of a request with their attachments.

    hidden_files: files that the model is not sent, each with its parameter path; without those already answered.
    """

    entries: tuple[ConversationEntry, ...]
    hidden_files: Sequence[tuple[str, Attachment]] = ()


class AttachmentResolver:
    """Loads the files of an input and attaches them to its items."""

    def __init__(self, attachments: AttachmentLoader | None) -> None:
        self._attachments = attachments

    async def resolve(
        self,
        entries: tuple[ConversationEntry, ...],
        caller: Caller,
        past: Sequence[ConversationSegment],
        forward_files: Callable[[], bool],
        reserve_memory: ReserveMemory | None = None,
    ) -> ResolvedInput:
        """Raises InvalidRequest with the part's path, and what `reserve_memory` raises for the bytes that are read.

        forward_files: whether to send the model files that are not text.
        """
        with_files = [
            number
            for number, entry in enumerate(entries)
            if not entry.attachments and may_contain_files(entry.type, entry.raw)
        ]
        if self._attachments is None or not with_files:
            return ResolvedInput(entries)
        file_parts = await run_in_worker(
            sum([len(entries[number].raw) for number in with_files]),
            _read_file_parts,
            [entries[number] for number in with_files],
        )
        if sum(map(len, file_parts)) > _MAX_FILES:
            raise InvalidRequest(
                f"At most {_MAX_FILES} files and pictures can be given at once.", param="input"
            )
        with_content, answered = forward_files(), _count_answered(entries)
        names, budget = _AttachmentNames(past, entries), _AttachmentBudget()
        resolved = list(entries)
        hidden: list[tuple[str, Attachment]] = []
        for number, parts in zip(with_files, file_parts, strict=True):
            attachments: list[Attachment] = []
            for path, part in parts:
                param = f"input[{number}].{path}"
                loading = self._attachments.load_attachment(
                    caller, part, with_content=with_content, reserve_memory=reserve_memory
                )
                attachment = await _resolve_part(loading, part, param, number < answered)
                budget.spend(part, attachment)
                has_content = (attachment.data or part.inline_data) is not None and not attachment.too_large
                given = with_content and attachment.kind == "binary" and has_content
                attachments.append(names.assign(replace(attachment, sent_to_model=given)))
                if number >= answered and attachments[-1].is_hidden:
                    hidden.append((param, attachments[-1]))
            resolved[number] = replace(entries[number], attachments=tuple(attachments))
        return ResolvedInput(tuple(resolved), hidden)


async def _resolve_part(
    loading: Awaitable[Attachment], part: InputFilePart, param: str, is_answered: bool
) -> Attachment:
    """Await the attachment. A missing file is only an error if the model has not answered the item yet."""
    try:
        return await loading
    except NotFound as error:
        if is_answered:
            kind = "picture" if part.type == "input_image" else "binary"
            name = sanitize_file_name(part.filename or part.file_id or "")
            return Attachment(name=name, kind=kind, file_id=part.file_id or "", gone=True)
        raise _make_rejection(param, error) from None
    except InvalidRequest as error:
        raise _make_rejection(param, error) from None


def _read_file_parts(entries: Sequence[ConversationEntry]) -> list[list[LocatedFilePart]]:
    return [find_file_parts(entry.type, entry.raw) for entry in entries]


def _count_answered(entries: Sequence[ConversationEntry]) -> int:
    """The number of items before the last one that a model wrote."""
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        is_input_message = entry.type == "message" and read_role(entry) != "assistant"
        if not is_input_message and not entry.type.endswith("_output"):
            return number
    return 0


def _make_rejection(path: str, error: NotFound | InvalidRequest) -> InvalidRequest:
    param = f"{path}.{error.param}" if error.param else path
    return InvalidRequest(f"{path}: {error.message}", param=param, code=error.wire_code)


class _AttachmentBudget:
    """Limits the bytes and URLs of one request."""

    def __init__(self) -> None:
        self._bytes = _MAX_BYTES
        self._urls = _MAX_URLS

    def spend(self, part: InputFilePart, attachment: Attachment) -> None:
        """Raises InvalidRequest if the budget is exceeded."""
        self._bytes -= attachment.size
        self._urls -= attachment.data is not None and part.inline_data is None and part.file_id is None
        if self._bytes < 0 or self._urls < 0:
            raise InvalidRequest(
                f"The files that the input refers to are more than {_MAX_BYTES:,} bytes, or more than "
                f"{_MAX_URLS} are to be fetched. Refer to less.",
                param="input",
            )


class _AttachmentNames:
    """Assigns unique names to attachments; an upload keeps its name throughout the conversation."""

    def __init__(self, past: Sequence[ConversationSegment], entries: Sequence[ConversationEntry]) -> None:
        known = [file for segment in past for entry in segment.entries for file in entry.attachments]
        known += [file for entry in entries for file in entry.attachments]
        self._free = FreeNameAllocator({file.name for file in known if file.name})
        self._upload_names = {file.file_id: file.name for file in known if file.file_id}

    def assign(self, attachment: Attachment) -> Attachment:
        if not attachment.name:
            return attachment
        name = self._upload_names.get(attachment.file_id) or self._free.allocate(attachment.name)
        if attachment.file_id:
            self._upload_names[attachment.file_id] = name
        return replace(attachment, name=name)
