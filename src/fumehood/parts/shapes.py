"""How a vendor writes each kind of call and result, and the way there and back; imports its siblings.

A `Shape` is a table: which value of the vendor's item is which field of the part. `lift` moves values out of an item
into parts, `lower` puts them back; both are the same for all vendors, and lossless whatever the item is.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from fumehood.parts import payloads
from fumehood.parts.canonical import (
    Execution,
    Json,
    JsonObject,
    Move,
    Other,
    Part,
    Path,
    Source,
    Status,
    ToolCall,
    ToolResult,
)
from fumehood.parts.lenses import LENSES, MISSING, at, copied, put_at, take, text_at

# The vendors' words for the same five states; a word that is not here says nothing.
STATUSES: dict[str, Status] = {
    "in_progress": "in_progress",
    "queued": "in_progress",
    "interpreting": "in_progress",
    "searching": "in_progress",
    "generating": "in_progress",
    "calling": "in_progress",
    "completed": "completed",
    "success": "completed",
    "OUTCOME_OK": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "error": "failed",
    "OUTCOME_FAILED": "failed",
    "OUTCOME_DEADLINE_EXCEEDED": "failed",
    "cancelled": "cancelled",
    "expired": "failed",
    "TOOL_CALL_STATUS_IN_PROGRESS": "in_progress",
    "TOOL_CALL_STATUS_COMPLETED": "completed",
    "TOOL_CALL_STATUS_INCOMPLETE": "incomplete",
    "TOOL_CALL_STATUS_FAILED": "failed",
}


class Field(msgspec.Struct, frozen=True):
    """`name` in the payload is what the vendor has at `path`, read through `lens`."""

    name: str
    path: Path
    lens: str = ""


def _path(written: str) -> Path:
    """`"content.0.text"` as steps; numbers are places in lists."""
    return tuple(int(step) if step.isdigit() else step for step in written.split("."))


def fields(**paths: str) -> tuple[Field, ...]:
    """`code="input.code"`; a lens is named behind a bar: `queries="input.query|one"`. No path means the same name."""
    made: list[Field] = []
    for name, written in paths.items():
        place, _, lens = written.partition("|")
        made.append(Field(name, _path(place or name), lens))
    return tuple(made)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One type of item.

    type: as the vendor says it; `kind`: as we do.
    call, result: what it holds of either; an item that holds both is split.
    id, call_id: where they are; in an item without a call_id the id is what call and result share.
    name: where the tool's own name is, for kinds that have them.
    failed: where something is said only if it went wrong.
    execution: who runs it, or how the item tells.
    begins: an item of this type before anything is put into it, if there must be more than the type.
    """

    type: str
    kind: str
    call: tuple[Field, ...] | None = None
    result: tuple[Field, ...] | None = None
    id: Path = ("id",)
    call_id: Path = ()
    name: Path = ()
    status: Path = ("status",)
    failed: Path = ()
    execution: Execution | Callable[[JsonObject], Execution] = "server"
    begins: JsonObject = {}

    @property
    def unified(self) -> bool:
        return self.call is not None and self.result is not None

    def call_of(self, item: JsonObject) -> ToolCall:
        name = text_at(item, self.name)
        return ToolCall(
            kind=self.kind,
            name=self.kind if name is None else name,
            payload={},
            id=text_at(item, self.id),
            call_id=self._shared_id(item),
            vendor_type=self.type,
            execution=self._executed_by(item),
            status=self._status(item),
        )

    def result_of(self, item: JsonObject) -> ToolResult:
        return ToolResult(
            kind=self.kind,
            payload={},
            id=text_at(item, self.id),
            call_id=self._shared_id(item),
            vendor_type=self.type,
            execution=self._executed_by(item),
            status=self._status(item),
        )

    def within(self, prefix: Path) -> "Shape":
        """The same, for items that have it in a member."""

        def moved(side: tuple[Field, ...] | None) -> tuple[Field, ...] | None:
            if side is None:
                return None
            return tuple(Field(field.name, (*prefix, *field.path), field.lens) for field in side)

        inner = {key: getattr(self, key) for key in ("id", "call_id", "name", "status", "failed")}
        paths = {key: (*prefix, *place) if place else () for key, place in inner.items()}
        return msgspec.structs.replace(self, call=moved(self.call), result=moved(self.result), **paths)

    def _status(self, item: JsonObject) -> Status | None:
        if self.failed and at(item, self.failed) not in (MISSING, None, False, ""):
            return "failed"
        return STATUSES.get(text_at(item, self.status) or "")

    def _shared_id(self, item: JsonObject) -> str | None:
        shared = at(item, self.call_id) if self.call_id else MISSING
        return text_at(item, self.id if shared is MISSING else self.call_id)

    def _executed_by(self, item: JsonObject) -> Execution:
        return self.execution(item) if callable(self.execution) else self.execution


class Claim(msgspec.Struct, frozen=True):
    """A part, yet empty, with the values that it would take out of its item.

    fields: their names are members of a call's or result's payload, and attributes of any other part.
    needed: it is there even if it has nothing to say.
    """

    part: Part
    fields: tuple[Field, ...]
    needed: bool = True


def claims_of(item: JsonObject, shape: Shape) -> list[Claim]:
    made: list[Claim] = []
    if shape.call is not None:
        made.append(Claim(shape.call_of(item), shape.call))
    if shape.result is not None:
        made.append(Claim(shape.result_of(item), shape.result, needed=shape.call is None))
    return made


# --- from the vendor ----------------------------------------------------------------------------------


def lift(vendor: str, item: Json, claims: list[Claim], place: int = 0) -> list[Part]:
    """The parts of one item. An item that does not give what its claims need is carried whole."""
    left = copied(item)
    parts: list[Part] = []
    for claim in claims:
        moved = _take(left, claim)
        if moved is not None:
            claim.part.source = Source(vendor=vendor, follows=bool(parts), moved=moved, place=place)
            parts.append(claim.part)
    if not parts:
        return [whole(vendor, item, place)]
    parts[0].source = msgspec.structs.replace(cast(Source, parts[0].source), item=left)
    return parts


def whole(vendor: str, item: Json, place: int = 0) -> Other:
    kind = item.get("type") if isinstance(item, dict) else None
    source = Source(vendor=vendor, item=copied(item), place=place)
    return Other(type=kind if isinstance(kind, str) else "", source=source)


def _take(item: Json, claim: Claim) -> list[Move] | None:
    """Moves what is claimed out of the item and into the part, or nothing if that would be no part."""
    part = claim.part
    if isinstance(part, ToolCall | ToolResult):
        part.payload = dict.fromkeys(_required(part.kind, call=isinstance(part, ToolCall)))
    moved: list[Move] = []
    before: list[Json] = []
    for field in claim.fields:
        value = at(item, field.path)
        if value is MISSING or any(move.field == field.name for move in moved):
            continue
        taken = take(value, field.lens)
        if taken is None or not _accepts(part, field.name, taken[0]):
            continue
        moved.append(Move(field.name, field.path, field.lens))
        before.append(value)
        put_at(item, field.path, taken[1])
    if _is_part(claim, len(moved), any(value is not None for value in before)):
        return moved
    for move, value in zip(reversed(moved), reversed(before), strict=True):
        put_at(item, move.path, value)
    return None


def _is_part(claim: Claim, count: int, anything: bool) -> bool:
    part = claim.part
    if not isinstance(part, ToolCall | ToolResult):
        return count == len(claim.fields)
    fits = not payloads.problem_with(part.kind, part.payload, call=isinstance(part, ToolCall))
    return fits and (claim.needed or anything)


def _required(kind: str, *, call: bool) -> tuple[str, ...]:
    known = payloads.KINDS.get(kind)
    return () if known is None else payloads.required_in(known, call=call)


def _accepts(part: Part, name: str, value: Json) -> bool:
    """Sets the field if the part allows this value in it."""
    if isinstance(part, ToolCall | ToolResult):
        changed: JsonObject = {**part.payload, name: value}
        if payloads.problem_with(part.kind, changed, call=isinstance(part, ToolCall)):
            return False
        part.payload = changed
        return True
    if not isinstance(value, str):
        return False
    setattr(part, name, value)
    return True


# --- to the vendor ------------------------------------------------------------------------------------


def lower(parts: list[Part]) -> Json:
    """The item that these parts were lifted from: the first has what was left of it, all have values of it."""
    source = parts[0].source
    if source is None or source.item is msgspec.UNSET:
        raise ValueError("the first part does not know its item")
    item = copied(source.item)
    # The last that was moved goes back first: what it stands in may have been moved before it.
    for part in reversed(parts):
        for move in reversed(part.source.moved if part.source is not None else []):
            item = _put_back(item, move, value_of(part, move.field))
    return item


def _put_back(item: Json, move: Move, value: Json) -> Json:
    left = at(item, move.path)
    lens = LENSES.get(move.lens)
    if lens is None:
        raise ValueError(f"there is no lens {move.lens!r}")
    rest = None if left is MISSING else left
    return put_at(item, move.path, lens.put(copied(value), rest))


def value_of(part: Part, name: str) -> Json:
    if isinstance(part, ToolCall | ToolResult):
        return part.payload.get(name)
    value = getattr(part, name, None) if name in _ATTRIBUTES else None
    return value if isinstance(value, str) else None


_ATTRIBUTES = frozenset({"content", "uri", "file_id"})


# --- a vendor -----------------------------------------------------------------------------------------


class Saying(msgspec.Struct, frozen=True):
    """How the vendor writes plain text: an item, and where the text goes."""

    begins: JsonObject
    path: Path


def no_places(_document: Json) -> list[Path]:
    return []


def nothing_derived(_document: Json, _observed: list[Part]) -> list[ToolCall | ToolResult]:
    return []


class Vendor(msgspec.Struct, frozen=True, kw_only=True):
    """One API of one vendor.

    shapes: the first of a kind is the one that parts from elsewhere are written in.
    claims: what an item is, by its own type; nothing for types not known here.
    text, asked, reasoning: what the model says, what it was told (if that is written otherwise), what it thinks.
    places: where in a whole response the lists of items are.
    derived: calls that the items do not show, made of what a whole response tells beside them.
    """

    name: str
    title: str
    shapes: tuple[Shape, ...]
    claims: Callable[[JsonObject], list[Claim]]
    text: Saying
    asked: Saying | None = None
    reasoning: Saying | None = None
    places: Callable[[Json], list[Path]] = no_places
    derived: Callable[[Json, list[Part]], list[ToolCall | ToolResult]] = nothing_derived
