"""Vendor codecs: table-driven, lossless mapping between a vendor's items and canonical parts.

An `ItemMapping` says which value of an item is which field of a part. `decode_item` moves values from an item into
parts, `encode_item` puts them back; both work the same for all vendors.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from fumehood.message_parts import tool_payloads
from fumehood.message_parts.canonical_parts import (
    Execution,
    FieldOrigin,
    GenericPart,
    Json,
    JsonObject,
    JsonPath,
    Part,
    Status,
    ToolCallPart,
    ToolCallResponsePart,
    ToolPart,
    VendorRoundTripData,
)
from fumehood.message_parts.execution_timing import EXECUTION_METADATA, read_timing
from fumehood.message_parts.field_codecs import FIELD_CODECS, extract, parse_json_object
from fumehood.message_parts.json_path_access import (
    MISSING,
    copy_json,
    get_at_path,
    get_text_at_path,
    set_at_path,
)
from fumehood.message_parts.part_schema import find_name_error
from fumehood.message_parts.partial_items import VendorStreamCollector

# The vendors' words for a status; other words are ignored.
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
    """The field `name` of the payload is at `path` in the item, read by `codec`.

    Several mappings of one name are alternatives: the first whose value can be read is used. Without a name, the value
    is JSON text that is parsed in place, so that later mappings reach into it: as `path`, then 1, then a member.
    is_fallback: used only if no other mapping has read anything at `path` or below it, so that nothing stays hidden.
    """

    name: str
    path: JsonPath
    codec: str = ""
    is_fallback: bool = False


def _parse_path(written: str) -> JsonPath:
    """Split `"content.0.text"` into steps; numbers are list indexes."""
    return tuple(int(step) if step.isdigit() else step for step in written.split("."))


def map_fields(**paths: str) -> tuple[FieldMapping, ...]:
    """Map `code="input.code"`, with a codec after a bar: `queries="input.query|one"`. An empty path is the name."""
    made: list[FieldMapping] = []
    for name, written in paths.items():
        path, _, codec = written.partition("|")
        made.append(FieldMapping(name, _parse_path(path or name), codec))
    return tuple(made)


def map_fallback(name: str, path: str) -> tuple[FieldMapping, ...]:
    return (FieldMapping(name, _parse_path(path), is_fallback=True),)


class ItemMapping(msgspec.Struct, frozen=True, kw_only=True):
    """One type of item.

    type, kind: the vendor's name and ours.
    call, response: the fields of each half; an item with both is split into two parts.
    id, call_id: paths of the ids; without a call_id, call and response share the id.
    name: path of the tool's own name, for kinds that have one.
    failed: path of a value that is present only on failure.
    execution: who runs it, or a function that reads it from the item.
    started_at, ended_at, duration_ms: paths of times, where the vendor reports them.
    template: an item of this type before fields are set, if it needs more than the type.
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
    started_at: JsonPath = ()
    ended_at: JsonPath = ()
    duration_ms: JsonPath = ()
    template: JsonObject = {}

    @property
    def is_unified(self) -> bool:
        return self.call is not None and self.response is not None

    def build_call(self, item: JsonObject) -> ToolCallPart:
        return ToolCallPart(
            kind=self.kind,
            name=self._read_name(item),
            payload={},
            id=get_text_at_path(item, self.id),
            call_id=self._read_shared_id(item),
            vendor_type=self.type,
            execution=self._resolve_execution(item),
            status=self._read_status(item),
            extra=self._read_timing(item),
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
            extra=self._read_timing(item) if self.call is None else {},
        )

    def read_failure(self, item: JsonObject) -> str:
        """Return the vendor's word for a failure; empty if the item has not failed."""
        if self._read_status(item) != "failed":
            return ""
        return get_text_at_path(item, self.failed) or get_text_at_path(item, self.status) or "failed"

    def nested_under(self, prefix: JsonPath) -> "ItemMapping":
        """Return the mapping for items that hold this one in a member."""

        def moved(side: tuple[FieldMapping, ...] | None) -> tuple[FieldMapping, ...] | None:
            if side is None:
                return None
            return tuple(msgspec.structs.replace(field, path=(*prefix, *field.path)) for field in side)

        inner = {key: getattr(self, key) for key in _PATH_FIELDS}
        paths = {key: (*prefix, *path) if path else () for key, path in inner.items()}
        return msgspec.structs.replace(self, call=moved(self.call), response=moved(self.response), **paths)

    def _read_status(self, item: JsonObject) -> Status | None:
        if self.failed and get_at_path(item, self.failed) not in (MISSING, None, False, ""):
            return "failed"
        return VENDOR_STATUSES.get(get_text_at_path(item, self.status) or "")

    def _read_name(self, item: JsonObject) -> str:
        """Return the tool's own name; the kind if it has none, or one that stands for another kind."""
        name = get_text_at_path(item, self.name)
        return self.kind if name is None or find_name_error(name, self.kind) else name

    def _read_timing(self, item: JsonObject) -> JsonObject:
        """Return `execution_metadata` for the part, with what the vendor has observed."""
        paths = (self.started_at, self.ended_at, self.duration_ms)
        started_at, ended_at, duration = (get_at_path(item, path) if path else MISSING for path in paths)
        timing = read_timing(started_at, ended_at, duration)
        return {EXECUTION_METADATA: timing} if timing else {}

    def _read_shared_id(self, item: JsonObject) -> str | None:
        shared = get_at_path(item, self.call_id) if self.call_id else MISSING
        return get_text_at_path(item, self.id if shared is MISSING else self.call_id)

    def _resolve_execution(self, item: JsonObject) -> Execution:
        return self.execution(item) if callable(self.execution) else self.execution


_PATH_FIELDS = ("id", "call_id", "name", "status", "failed", "started_at", "ended_at", "duration_ms")


class PartSkeleton(msgspec.Struct, frozen=True):
    """An empty part, with the fields to extract from its item.

    fields: names are payload fields of a call or response. In any other part they are attributes that it needs, or
    optional fields that it shows beside them, such as annotations.
    is_required: the part exists even if no field is present.
    failure: what a failed response has as its error, unless the item has one in words.
    """

    part: Part
    fields: tuple[FieldMapping, ...]
    is_required: bool = True
    failure: str = ""


def draft_tool_parts(item: JsonObject, mapping: ItemMapping) -> list[PartSkeleton]:
    made: list[PartSkeleton] = []
    if mapping.call is not None:
        made.append(PartSkeleton(mapping.build_call(item), _expand_json_members(item, mapping)))
    if mapping.response is not None:
        failure = mapping.read_failure(item)
        made.append(
            PartSkeleton(
                mapping.build_response(item),
                mapping.response,
                is_required=mapping.call is None or bool(failure),
                failure=failure,
            )
        )
    return made


def _expand_json_members(item: JsonObject, mapping: ItemMapping) -> tuple[FieldMapping, ...]:
    """Add fields for the other members of arguments in JSON text, of which the table names one."""
    fields = mapping.call or ()
    for path in dict.fromkeys(field.path for field in fields if field.codec.startswith(_JSON_MEMBER)):
        found = parse_json_object(get_text_at_path(item, path))
        others = found.keys() - {field.codec.removeprefix(_JSON_MEMBER) for field in fields} - {"", "type"}
        kind = tool_payloads.TOOL_KINDS.get(mapping.kind)
        if kind is not None:
            others -= tool_payloads.payload_fields(kind, call=True) | tool_payloads.payload_fields(
                kind, call=False
            )
        if others:
            # Order matters: what is parsed in place comes before what is read from it.
            members = [_to_member_mapping(field) for field in fields if field.path == path and field.codec]
            more = [FieldMapping(name, (*path, 1, name)) for name in sorted(others)]
            rest = [field for field in fields if field.path != path or not field.codec]
            return (*rest, FieldMapping("", path, "json"), *members, *more)
    return fields


_JSON_MEMBER = "json."


def _to_member_mapping(field: FieldMapping) -> FieldMapping:
    member = field.codec.removeprefix(_JSON_MEMBER)
    return FieldMapping(field.name, (*field.path, 1, member), "one" if member == "query" else "")


def draft_error() -> list[PartSkeleton]:
    """Draft an error that ended a stream or a response: an opaque item that shows message and code."""
    prefixes: tuple[JsonPath, ...] = ((), ("error",))
    fields = [
        FieldMapping(name, (*prefix, member))
        for prefix in prefixes
        for name, member in (("message", "message"), ("code", "code"), ("code", "type"))
        if prefix or member != "type"
    ]
    return [PartSkeleton(GenericPart(type="error"), tuple(fields))]


def draft_entries(
    item: JsonObject, key: str, draft: Callable[[JsonObject, JsonPath], list[PartSkeleton]]
) -> list[PartSkeleton]:
    """Draft the parts of the objects in the list at `key`. draft: called with each object and its path."""
    entries = item.get(key)
    made: list[PartSkeleton] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            made += draft(entry, (key, number))
    return made


# --- from the vendor ----------------------------------------------------------------------------------


def decode_item(vendor: str, item: Json, drafts: list[PartSkeleton], list_index: int = 0) -> list[Part]:
    """Decode one item into parts. An item that lacks what its drafts need becomes an opaque part."""
    rest = copy_json(item)
    parts: list[Part] = []
    for draft in drafts:
        extracted = _extract_fields(rest, draft)
        if extracted is not None:
            draft.part.source = VendorRoundTripData(
                vendor=vendor, is_continuation=bool(parts), extracted_fields=extracted, list_index=list_index
            )
            parts.append(draft.part)
    if not parts:
        return [wrap_opaque_item(vendor, item, list_index)]
    parts[0].source = msgspec.structs.replace(cast(VendorRoundTripData, parts[0].source), item=rest)
    return parts


def wrap_opaque_item(vendor: str, item: Json, list_index: int = 0) -> GenericPart:
    kind = item.get("type") if isinstance(item, dict) else None
    source = VendorRoundTripData(vendor=vendor, item=copy_json(item), list_index=list_index)
    return GenericPart(type=kind if isinstance(kind, str) else "", source=source)


def _extract_fields(item: Json, draft: PartSkeleton) -> list[FieldOrigin] | None:
    """Move the fields of a draft from the item into the part; None, and no change, if the part would be incomplete."""
    part = draft.part
    if isinstance(part, ToolPart):
        part.payload = dict.fromkeys(_required_fields(part.kind, call=isinstance(part, ToolCallPart)))
    extraction = _FieldExtraction(item, draft)
    for field in draft.fields:
        if not field.is_fallback:
            extraction.extract(field)
    extraction.undo_unused_parsing()
    for field in draft.fields:
        if field.is_fallback and not extraction.has_read(field.path):
            extraction.extract(field)
    if extraction.is_complete():
        if draft.failure and isinstance(part, ToolPart):
            part.payload.setdefault("error", draft.failure)
        return extraction.fields
    extraction.undo()
    return None


class _FieldExtraction:
    """The fields that have been moved from an item into one part, and how to undo it."""

    def __init__(self, item: Json, draft: PartSkeleton) -> None:
        self._item = item
        self._draft = draft
        self._before: list[Json] = []
        self.fields: list[FieldOrigin] = []

    def extract(self, field: FieldMapping) -> None:
        value = get_at_path(self._item, field.path)
        if value is MISSING or self._is_superseded(field, value):
            return
        extraction = extract(value, field.codec)
        if extraction is None or not (
            not field.name or _try_set_field(self._draft.part, field.name, extraction[0])
        ):
            return
        self.fields.append(FieldOrigin(field.name, field.path, field.codec))
        self._before.append(value)
        set_at_path(self._item, field.path, extraction[1])

    def _is_superseded(self, field: FieldMapping, value: Json) -> bool:
        """Whether the field has been read, or has a better source than an empty value here."""
        if field.name and any(move.field == field.name for move in self.fields):
            return True
        if field.name == "error" and self._draft.failure and value in (None, ""):
            return True
        if value is not None:
            return False
        others = [other for other in self._draft.fields if other.name == field.name and other is not field]
        return any(get_at_path(self._item, other.path) not in (MISSING, None) for other in others)

    def has_read(self, path: JsonPath) -> bool:
        """Whether a value at the path, or below it, is in the part."""
        return any(
            move.field and value is not None and move.path[: len(path)] == path
            for move, value in zip(self.fields, self._before, strict=True)
        )

    def undo_unused_parsing(self) -> None:
        while self.fields and not self.fields[-1].field:
            self._undo_last()

    def is_complete(self) -> bool:
        part = self._draft.part
        if isinstance(part, ToolPart):
            is_call = isinstance(part, ToolCallPart)
            is_valid = not tool_payloads.find_payload_error(part.kind, part.payload, call=is_call)
            has_values = any(value is not None for value in self._before)
            return is_valid and (self._draft.is_required or has_values)
        needed = {field.name for field in self._draft.fields} & _PLAIN_FIELDS
        extracted = {field.field for field in self.fields}
        return needed <= extracted and bool(extracted)

    def undo(self) -> None:
        while self.fields:
            self._undo_last()

    def _undo_last(self) -> None:
        set_at_path(self._item, self.fields.pop().path, self._before.pop())


def _required_fields(kind: str, *, call: bool) -> tuple[str, ...]:
    known = tool_payloads.TOOL_KINDS.get(kind)
    return () if known is None else tool_payloads.required_fields(known, call=call)


def _try_set_field(part: Part, name: str, value: Json) -> bool:
    """Set the field if its value is valid for the part."""
    if isinstance(part, ToolPart):
        changed: JsonObject = {**part.payload, name: value}
        if tool_payloads.find_payload_error(part.kind, changed, call=isinstance(part, ToolCallPart)):
            return False
        part.payload = changed
        return True
    if name not in _PLAIN_FIELDS:
        if value:
            part.extra = {**part.extra, name: value}
        return bool(value)
    if not isinstance(value, str):
        return False
    setattr(part, name, value)
    return True


# --- to the vendor ------------------------------------------------------------------------------------


def encode_item(parts: list[Part]) -> Json:
    """Restore the item of these parts: the first holds the rest of it, all hold values of it. Raises ValueError."""
    source = parts[0].source
    if source is None or source.item is msgspec.UNSET:
        raise ValueError("the first part has no vendor item")
    item = copy_json(source.item)
    # In reverse order: an earlier field may contain a later one.
    for part in reversed(parts):
        for field in reversed(part.source.extracted_fields if part.source is not None else []):
            item = _restore_field(item, field, get_part_field(part, field.field))
    return item


def _restore_field(item: Json, field: FieldOrigin, value: Json) -> Json:
    left = get_at_path(item, field.path)
    codec = FIELD_CODECS.get(field.codec)
    if codec is None:
        raise ValueError(f"there is no codec {field.codec!r}")
    rest = None if left is MISSING else left
    return set_at_path(item, field.path, codec.encode(copy_json(value), rest))


def get_part_field(part: Part, name: str) -> Json:
    if isinstance(part, ToolPart):
        return part.payload.get(name)
    if name not in _PLAIN_FIELDS:
        return part.extra.get(name)
    value = getattr(part, name, None)
    return value if isinstance(value, str) else None


_PLAIN_FIELDS = frozenset({"content", "uri", "file_id"})


# --- a vendor -----------------------------------------------------------------------------------------


class TextItemTemplate(msgspec.Struct, frozen=True):
    """An item for plain text, and the path of the text in it."""

    item: JsonObject
    path: JsonPath


def derive_no_calls(_document: Json, _observed: list[Part]) -> list[ToolPart]:
    return []


class VendorCodec(msgspec.Struct, frozen=True, kw_only=True):
    """One API of one vendor.

    item_mappings: the first of a kind is used to write parts of other vendors.
    draft_parts: the drafts of an item, by its type; none for an unknown type.
    text, user_text, reasoning: templates for text of the model, of the user (if it differs), and for reasoning.
    find_item_lists: paths of the item lists in a whole response.
    derive_calls: calls that are not items, derived from other data of a whole response.
    stream: creates an empty stream.
    """

    name: str
    title: str
    item_mappings: tuple[ItemMapping, ...]
    draft_parts: Callable[[JsonObject], list[PartSkeleton]]
    text: TextItemTemplate
    find_item_lists: Callable[[Json], list[JsonPath]]
    stream: Callable[[], VendorStreamCollector]
    user_text: TextItemTemplate | None = None
    reasoning: TextItemTemplate | None = None
    derive_calls: Callable[[Json, list[Part]], list[ToolPart]] = derive_no_calls
