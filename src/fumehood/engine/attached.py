"""Finds out what the files and pictures of an input are, before anything begins; imports `interfaces` and siblings.

What was found is kept with the item: whoever continues the conversation finds it as it was, whatever has become of an
upload or an address meanwhile.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fumehood.aside import aside
from fumehood.engine.truncation import role_of
from fumehood.interfaces import Attachments, Caller, TakeRoom
from fumehood.protocol.attachments import (
    Attachment,
    FilePart,
    Placed,
    file_name,
    file_parts,
    may_hold_files,
)
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import InvalidRequest, NotFound
from fumehood.protocol.names import FreeNames

_MOST_FILES = 200
_MOST_FETCHED = 20  # addresses: each may take its time
_MOST_BYTES = 64 << 20  # that are read for one request; it may be short and name much


@dataclass(frozen=True, slots=True)
class Attached:
    """The items of a request with what was found of their files.

    hidden: those that the model will not be shown, and where they stand; without what it has answered already.
    """

    entries: tuple[Entry, ...]
    hidden: Sequence[tuple[str, Attachment]] = ()


class Attacher:
    """Has the files of an input found, and keeps with its items what they are."""

    def __init__(self, attachments: Attachments | None) -> None:
        self._attachments = attachments

    async def attach(
        self,
        entries: tuple[Entry, ...],
        caller: Caller,
        past: Sequence[Segment],
        gives_files: Callable[[], bool],
        take: TakeRoom | None = None,
    ) -> Attached:
        """Raises InvalidRequest that names the part, and what `take` raises, which is told of what is read.

        gives_files: whether the model is given files that are no text.
        """
        holding = [
            number
            for number, entry in enumerate(entries)
            if not entry.attachments and may_hold_files(entry.type, entry.raw)
        ]
        if self._attachments is None or not holding:
            return Attached(entries)
        read = await aside(
            sum([len(entries[number].raw) for number in holding]),
            _read,
            [entries[number] for number in holding],
        )
        if sum(map(len, read)) > _MOST_FILES:
            raise InvalidRequest(
                f"At most {_MOST_FILES} files and pictures can be given at once.", param="input"
            )
        whole, answered = gives_files(), _answered(entries)
        names, budget = _Names(past, entries), _Budget()
        attached = list(entries)
        hidden: list[tuple[str, Attachment]] = []
        for number, parts in zip(holding, read, strict=True):
            found: list[Attachment] = []
            for place, part in parts:
                where = f"input[{number}].{place}"
                finding = self._attachments.find(caller, part, whole=whole, take=take)
                one = await _found(finding, part, where, number < answered)
                budget.spend(part, one)
                is_there = (one.data or part.inline) is not None and not one.too_large
                given = whole and one.kind == "binary" and is_there
                found.append(names.given_to(replace(one, given=given)))
                if number >= answered and found[-1].hidden:
                    hidden.append((where, found[-1]))
            attached[number] = replace(entries[number], attachments=tuple(found))
        return Attached(tuple(attached), hidden)


async def _found(finding: Awaitable[Attachment], part: FilePart, where: str, answered: bool) -> Attachment:
    """What the model has answered already need not be there any more."""
    try:
        return await finding
    except NotFound as error:
        if answered:
            kind = "picture" if part.type == "input_image" else "binary"
            name = file_name(part.filename or part.file_id or "")
            return Attachment(name=name, kind=kind, file_id=part.file_id or "", gone=True)
        raise _refused(where, error) from None
    except InvalidRequest as error:
        raise _refused(where, error) from None


def _read(entries: Sequence[Entry]) -> list[list[Placed]]:
    return [file_parts(entry.type, entry.raw) for entry in entries]


def _answered(entries: Sequence[Entry]) -> int:
    """How many of the items stand before something that a model made of them."""
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        said = entry.type == "message" and role_of(entry) != "assistant"
        if not said and not entry.type.endswith("_output"):
            return number
    return 0


def _refused(where: str, error: NotFound | InvalidRequest) -> InvalidRequest:
    param = f"{where}.{error.param}" if error.param else where
    return InvalidRequest(f"{where}: {error.message}", param=param, code=error.wire_code)


class _Budget:
    """What the files of one request may take."""

    def __init__(self) -> None:
        self._bytes = _MOST_BYTES
        self._addresses = _MOST_FETCHED

    def spend(self, part: FilePart, found: Attachment) -> None:
        """Raises InvalidRequest."""
        self._bytes -= found.size
        self._addresses -= found.data is not None and part.inline is None and part.file_id is None
        if self._bytes < 0 or self._addresses < 0:
            raise InvalidRequest(
                f"The files that the input refers to are more than {_MOST_BYTES:,} bytes, or more than "
                f"{_MOST_FETCHED} are to be fetched. Refer to less.",
                param="input",
            )


class _Names:
    """Names that are given out; an upload has the same one wherever it is named."""

    def __init__(self, past: Sequence[Segment], entries: Sequence[Entry]) -> None:
        known = [one for segment in past for entry in segment.entries for one in entry.attachments]
        known += [one for entry in entries for one in entry.attachments]
        self._free = FreeNames({one.name for one in known if one.name})
        self._of_uploads = {one.file_id: one.name for one in known if one.file_id}

    def given_to(self, found: Attachment) -> Attachment:
        if not found.name:
            return found
        name = self._of_uploads.get(found.file_id) or self._free.take(found.name)
        if found.file_id:
            self._of_uploads[found.file_id] = name
        return replace(found, name=name)
