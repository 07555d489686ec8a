"""How a vendor writes each kind of call and result, and the way there and back.

A `Shape` is a table: which value of the vendor's item is which field of the part. `lift` moves values out of an item
into parts, `lower` puts them back; both are the same for all vendors, and lossless whatever the item is.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from fumehood.message_parts import tool_payloads
from fumehood.message_parts.canonical_parts import (
    Execution,
    ExtractedField,
    GenericPart,
    Json,
    JsonObject,
    JsonPath,
    Part,
    Status,
    ToolCallPart,
    ToolCallResponsePart,
    VendorSource,
)
from fumehood.message_parts.field_codecs import (
    FIELD_CODECS,
    MISSING,
    copy_json,
    extract,
    get_at_path,
    get_text_at_path,
    set_at_path,
)

# The vendors' words for the same five states; a word that is not here says nothing.
VENDOR_STATUSES: dict[str, Status] = {
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


class FieldMapping(msgspec.Struct, frozen=True):
    """`name` in the payload is what the vendor has at `path`, read through `lens`."""

    name: str
    path: JsonPath
    codec: str = ""


def _parse_path(written: str) -> JsonPath:
    """`"content.0.text"` as steps; numbers are places in lists."""
    return tuple(int(step) if step.isdigit() else step for step in written.split("."))


def map_fields(**paths: str) -> tuple[FieldMapping, ...]:
    """`code="input.code"`; a lens is named behind a bar: `queries="input.query|one"`. No path means the same name."""
    made: list[FieldMapping] = []
    for name, written in paths.items():
        place, _, lens = written.partition("|")
        made.append(FieldMapping(name, _parse_path(place or name), lens))
    return tuple(made)


class ItemMapping(msgspec.Struct, frozen=True, kw_only=True):
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
    call: tuple[FieldMapping, ...] | None = None
    response: tuple[FieldMapping, ...] | None = None
    id: JsonPath = ("id",)
    call_id: JsonPath = ()
    name: JsonPath = ()
    status: JsonPath = ("status",)
    failed: JsonPath = ()
    execution: Execution | Callable[[JsonObject], Execution] = "server"
    template: JsonObject = {}

    @property
    def is_unified(self) -> bool:
        return self.call is not None and self.response is not None

    def build_call(self, item: JsonObject) -> ToolCallPart:
        name = get_text_at_path(item, self.name)
        return ToolCallPart(
            kind=self.kind,
            name=self.kind if name is None else name,
            payload={},
            id=get_text_at_path(item, self.id),
            call_id=self._read_shared_id(item),
            vendor_type=self.type,
            execution=self._resolve_execution(item),
            status=self._read_status(item),
        )

    def build_response(self, item: JsonObject) -> ToolCallResponsePart:
        return ToolCallResponsePart(
            kind=self.kind,
            payload={},
            id=get_text_at_path(item, self.id),
            call_id=self._read_shared_id(item),
            vendor_type=self.type,
            execution=self._resolve_execution(item),
            status=self._read_status(item),
        )

    def nested_under(self, prefix: JsonPath) -> "ItemMapping":
        """The same, for items that have it in a member."""

        def moved(side: tuple[FieldMapping, ...] | None) -> tuple[FieldMapping, ...] | None:
            if side is None:
                return None
            return tuple(FieldMapping(field.name, (*prefix, *field.path), field.codec) for field in side)

        inner = {key: getattr(self, key) for key in ("id", "call_id", "name", "status", "failed")}
        paths = {key: (*prefix, *place) if place else () for key, place in inner.items()}
        return msgspec.structs.replace(self, call=moved(self.call), response=moved(self.response), **paths)

    def _read_status(self, item: JsonObject) -> Status | None:
        if self.failed and get_at_path(item, self.failed) not in (MISSING, None, False, ""):
            return "failed"
        return VENDOR_STATUSES.get(get_text_at_path(item, self.status) or "")

    def _read_shared_id(self, item: JsonObject) -> str | None:
        shared = get_at_path(item, self.call_id) if self.call_id else MISSING
        return get_text_at_path(item, self.id if shared is MISSING else self.call_id)

    def _resolve_execution(self, item: JsonObject) -> Execution:
        return self.execution(item) if callable(self.execution) else self.execution


class PartDraft(msgspec.Struct, frozen=True):
    """A part, yet empty, with the values that it would take out of its item.

    fields: their names are members of a call's or result's payload, and attributes of any other part.
    needed: it is there even if it has nothing to say.
    """

    part: Part
    fields: tuple[FieldMapping, ...]
    is_required: bool = True


def draft_tool_parts(item: JsonObject, mapping: ItemMapping) -> list[PartDraft]:
    made: list[PartDraft] = []
    if mapping.call is not None:
        made.append(PartDraft(mapping.build_call(item), mapping.call))
    if mapping.response is not None:
        made.append(
            PartDraft(mapping.build_response(item), mapping.response, is_required=mapping.call is None)
        )
    return made


# --- from the vendor ----------------------------------------------------------------------------------


def decode_item(vendor: str, item: Json, drafts: list[PartDraft], list_index: int = 0) -> list[Part]:
    """The parts of one item. An item that does not give what its claims need is carried whole."""
    left = copy_json(item)
    parts: list[Part] = []
    for claim in drafts:
        moved = _extract_fields(left, claim)
        if moved is not None:
            claim.part.source = VendorSource(
                vendor=vendor, is_continuation=bool(parts), extracted_fields=moved, list_index=list_index
            )
            parts.append(claim.part)
    if not parts:
        return [wrap_opaque_item(vendor, item, list_index)]
    parts[0].source = msgspec.structs.replace(cast(VendorSource, parts[0].source), item=left)
    return parts


def wrap_opaque_item(vendor: str, item: Json, list_index: int = 0) -> GenericPart:
    kind = item.get("type") if isinstance(item, dict) else None
    source = VendorSource(vendor=vendor, item=copy_json(item), list_index=list_index)
    return GenericPart(type=kind if isinstance(kind, str) else "", source=source)


def _extract_fields(item: Json, draft: PartDraft) -> list[ExtractedField] | None:
    """Moves what is claimed out of the item and into the part, or nothing if that would be no part."""
    part = draft.part
    if isinstance(part, ToolCallPart | ToolCallResponsePart):
        part.payload = dict.fromkeys(_required_fields(part.kind, call=isinstance(part, ToolCallPart)))
    moved: list[ExtractedField] = []
    before: list[Json] = []
    for field in draft.fields:
        value = get_at_path(item, field.path)
        if value is MISSING or any(move.field == field.name for move in moved):
            continue
        taken = extract(value, field.codec)
        if taken is None or not _try_set_field(part, field.name, taken[0]):
            continue
        moved.append(ExtractedField(field.name, field.path, field.codec))
        before.append(value)
        set_at_path(item, field.path, taken[1])
    if _is_complete(draft, len(moved), any(value is not None for value in before)):
        return moved
    for move, value in zip(reversed(moved), reversed(before), strict=True):
        set_at_path(item, move.path, value)
    return None


def _is_complete(draft: PartDraft, count: int, has_values: bool) -> bool:
    part = draft.part
    if not isinstance(part, ToolCallPart | ToolCallResponsePart):
        return count == len(draft.fields)
    fits = not tool_payloads.find_payload_error(part.kind, part.payload, call=isinstance(part, ToolCallPart))
    return fits and (draft.is_required or has_values)


def _required_fields(kind: str, *, call: bool) -> tuple[str, ...]:
    known = tool_payloads.TOOL_KINDS.get(kind)
    return () if known is None else tool_payloads.required_fields(known, call=call)


def _try_set_field(part: Part, name: str, value: Json) -> bool:
    """Sets the field if the part allows this value in it."""
    if isinstance(part, ToolCallPart | ToolCallResponsePart):
        changed: JsonObject = {**part.payload, name: value}
        if tool_payloads.find_payload_error(part.kind, changed, call=isinstance(part, ToolCallPart)):
            return False
        part.payload = changed
        return True
    if not isinstance(value, str):
        return False
    setattr(part, name, value)
    return True


# --- to the vendor ------------------------------------------------------------------------------------


def encode_item(parts: list[Part]) -> Json:
    """The item that these parts were lifted from: the first has what was left of it, all have values of it."""
    source = parts[0].source
    if source is None or source.item is msgspec.UNSET:
        raise ValueError("the first part does not know its item")
    item = copy_json(source.item)
    # The last that was moved goes back first: what it stands in may have been moved before it.
    for part in reversed(parts):
        for move in reversed(part.source.extracted_fields if part.source is not None else []):
            item = _restore_field(item, move, get_part_field(part, move.field))
    return item


def _restore_field(item: Json, field: ExtractedField, value: Json) -> Json:
    left = get_at_path(item, field.path)
    lens = FIELD_CODECS.get(field.codec)
    if lens is None:
        raise ValueError(f"there is no lens {field.codec!r}")
    rest = None if left is MISSING else left
    return set_at_path(item, field.path, lens.encode(copy_json(value), rest))


def get_part_field(part: Part, name: str) -> Json:
    if isinstance(part, ToolCallPart | ToolCallResponsePart):
        return part.payload.get(name)
    value = getattr(part, name, None) if name in _PLAIN_FIELDS else None
    return value if isinstance(value, str) else None


_PLAIN_FIELDS = frozenset({"content", "uri", "file_id"})


# --- a vendor -----------------------------------------------------------------------------------------


class TextTemplate(msgspec.Struct, frozen=True):
    """How the vendor writes plain text: an item, and where the text goes."""

    item: JsonObject
    path: JsonPath


def find_no_item_lists(_document: Json) -> list[JsonPath]:
    return []


def derive_no_calls(_document: Json, _observed: list[Part]) -> list[ToolCallPart | ToolCallResponsePart]:
    return []


class VendorCodec(msgspec.Struct, frozen=True, kw_only=True):
    """One API of one vendor.

    shapes: the first of a kind is the one that parts from elsewhere are written in.
    claims: what an item is, by its own type; nothing for types not known here.
    text, asked, reasoning: what the model says, what it was told (if that is written otherwise), what it thinks.
    places: where in a whole response the lists of items are.
    derived: calls that the items do not show, made of what a whole response tells beside them.
    """

    name: str
    title: str
    item_mappings: tuple[ItemMapping, ...]
    draft_parts: Callable[[JsonObject], list[PartDraft]]
    text: TextTemplate
    user_text: TextTemplate | None = None
    reasoning: TextTemplate | None = None
    find_item_lists: Callable[[Json], list[JsonPath]] = find_no_item_lists
    derive_calls: Callable[[Json, list[Part]], list[ToolCallPart | ToolCallResponsePart]] = derive_no_calls
