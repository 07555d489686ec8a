"""Conversion from any vendor's items to canonical parts, back, and to another vendor's items.

A stream is assembled into the document that the vendor would have sent without streaming, and converted like it.
"""

import json
from collections.abc import Iterator
from typing import cast

import msgspec

from fumehood.message_parts.canonical_parts import (
    FieldOrigin,
    GenericPart,
    Json,
    JsonObject,
    JsonPath,
    Part,
    ReasoningPart,
    ResponseEnvelope,
    Status,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    ToolPart,
    VendorRoundTripData,
    pair_calls,
)
from fumehood.message_parts.field_codecs import FIELD_CODECS
from fumehood.message_parts.json_path_access import (
    MISSING,
    copy_json,
    get_at_path,
    get_text_at_path,
    set_at_path,
)
from fumehood.message_parts.otel_parts import SOURCE_FIELD, from_representation, to_representation
from fumehood.message_parts.part_schema import REPRESENTATIONS, MalformedPartError
from fumehood.message_parts.vendor_codec import (
    ItemMapping,
    TextItemTemplate,
    VendorCodec,
    decode_item,
    encode_item,
    wrap_opaque_item,
)
from fumehood.message_parts.vendors import VENDORS


class UnknownVendorError(Exception):
    """The vendor's name is not one of `VENDORS`."""


def get_vendor(name: str) -> VendorCodec:
    found = VENDORS.get(name)
    if found is None:
        raise UnknownVendorError(f"There is no vendor {name!r}; there are {', '.join(VENDORS)}.")
    return found


# --- from the vendor ----------------------------------------------------------------------------------


def from_vendor(name: str, document: Json) -> list[Part]:
    """Convert a list of items, one item, or a whole response to parts. Accepts any JSON and loses nothing of it.

    Raises UnknownVendorError for an unknown vendor.
    """
    vendor = get_vendor(name)
    paths = vendor.find_item_lists(document)
    if not paths and isinstance(document, list):
        parts = _decode_items(vendor, document, 0)
        _align_execution(parts)
        return parts
    rest, is_response = copy_json(document), bool(paths)
    parts: list[Part] = []
    for number, path in enumerate(paths):
        parts += _decode_items(vendor, cast(list[Json], get_at_path(document, path)), number)
        rest = set_at_path(rest, path, None)
    if not parts:
        paths, rest = [()], None
        parts = _decode_items(vendor, [document], 0)
    envelope = ResponseEnvelope(document=rest, item_list_paths=paths)
    parts[0].source = msgspec.structs.replace(cast(VendorRoundTripData, parts[0].source), envelope=envelope)
    errors = _derive_errors(document) if is_response and not _shows_error(parts) else ()
    for part in [*vendor.derive_calls(document, parts), *errors]:
        part.source = VendorRoundTripData(vendor=vendor.name)
        parts.append(part)
    _align_execution(parts)
    return parts


def _decode_items(vendor: VendorCodec, items: list[Json], list_index: int) -> list[Part]:
    parts: list[Part] = []
    for item in items:
        if isinstance(item, dict):
            parts += decode_item(vendor.name, item, vendor.draft_parts(item), list_index)
        else:
            parts.append(wrap_opaque_item(vendor.name, item, list_index))
    return parts


# An error of the whole response, which is not an item.
_RESPONSE_ERROR_TYPE = "response_error"
_ERROR_FIELDS = ("error", "last_error", "promptFeedback", "prompt_feedback")
_MESSAGE_FIELDS = ("message", "blockReasonMessage", "block_reason_message", "blockReason", "block_reason")


def _shows_error(parts: list[Part]) -> bool:
    """Whether the only part is the response itself, with its error."""
    return len(parts) == 1 and isinstance(parts[0], GenericPart) and "message" in parts[0].extra


def _derive_errors(document: Json) -> Iterator[GenericPart]:
    """Derive a part from each error beside the items: of a response, a run step, or one in a list of them."""
    listed = get_at_path(document, ("data",))
    entries = listed if isinstance(listed, list) else document if isinstance(document, list) else [document]
    for entry in entries:
        for field in _ERROR_FIELDS:
            messages = (get_text_at_path(entry, (field, name)) for name in _MESSAGE_FIELDS)
            message = next((text for text in messages if text), None)
            if message is not None:
                code = get_at_path(entry, (field, "code"))
                known: JsonObject = {} if code in (MISSING, None) else {"code": cast(Json, code)}
                yield GenericPart(type=_RESPONSE_ERROR_TYPE, extra={"message": message, **known})


def _align_execution(parts: list[Part]) -> None:
    """Give each response the `execution` of its call: some vendors say it only there."""
    for call_at, result_at in pair_calls(parts):
        if call_at is not None and result_at is not None:
            call, result = parts[call_at], parts[result_at]
            if isinstance(call, ToolCallPart) and isinstance(result, ToolCallResponsePart):
                result.execution = call.execution


# --- from a vendor's stream ---------------------------------------------------------------------------

_OPEN_STATUSES = (None, "in_progress")


class UnrecognizedStreamError(Exception):
    """Events were fed, and none of them could be read. The message says which vendor's stream was expected."""


def _describe_event(event: Json) -> str:
    """Name the event by its type or its fields. Values are content and are not shown."""
    if not isinstance(event, dict):
        return "not an object"
    for name in ("type", "event", "event_type"):
        if isinstance(kind := event.get(name), str):
            return f"{kind[:80]!r}"
    return f"an object with {', '.join(sorted(event)[:5]) or 'no fields'}"


class StreamAssembler:
    """Accepts the events of one response and returns its items and parts at any time.

    After the last event they are what the vendor would have sent without streaming. Before, or after an interrupted
    stream, they are what has arrived: the start of a text, the complete arguments of a call.
    """

    def __init__(self, vendor: str) -> None:
        self._vendor = vendor
        self._stream = get_vendor(vendor).stream()
        self._unrecognized = list[Json]()
        self._has_recognized = False

    def feed(self, event: Json) -> None:
        """Add an event. Unknown events of a known stream are ignored."""
        if isinstance(event, dict) and self._stream.recognizes(event):
            self._has_recognized = True
            self._stream.feed(event)
        elif event != {} and not self._has_recognized:
            self._unrecognized = [*self._unrecognized[:1], event]

    def build_document(self) -> Json:
        """Return the items, or the response, as far as they have arrived.

        Raises UnrecognizedStreamError if events have arrived, and none of them belongs to a stream of the vendor.
        """
        if self._unrecognized and not self._has_recognized:
            raise UnrecognizedStreamError(
                f"The stream cannot be read as one of {self._vendor}: its first event is "
                f"{_describe_event(self._unrecognized[0])}. Name the vendor that sent it."
            )
        document = self._stream.build_document()
        if not document and self._stream.partial_items.lost_deltas:
            raise UnrecognizedStreamError(
                f"The stream of {self._vendor} has texts of items whose start is missing. Feed it from its first event."
            )
        return document

    def build_parts(self, end_status: Status | None = None) -> list[Part]:
        """Return the parts. end_status: the status of unfinished calls if the stream has ended.

        Raises UnrecognizedStreamError as `build_document` does.
        """
        parts = from_vendor(self._vendor, self.build_document())
        tools = [part for part in parts if isinstance(part, ToolPart)]
        settled = {part.call_id for part in tools if part.call_id and part.status not in _OPEN_STATUSES}
        unfinished = self._stream.partial_items.unfinished_positions
        item = -1
        for part in parts:
            if part.source is not None and part.source.item is not msgspec.UNSET:
                item += 1
            if item in unfinished and isinstance(part, ToolPart) and part.status in _OPEN_STATUSES:
                part.status = part.status if part.call_id in settled else end_status or "in_progress"
        return parts


# --- to a vendor --------------------------------------------------------------------------------------


def to_vendor(name: str, parts: list[Part], dropped: list[Part] | None = None) -> Json:
    """Convert parts to items of the vendor.

    Parts that came from this vendor become what `from_vendor` was given; others become its nearest equivalent.
    Synthesized parts of the same vendor do not become items. Parts without an equivalent are appended to `dropped`.

    Raises UnknownVendorError for an unknown vendor.
    """
    vendor = get_vendor(name)
    documents: list[_VendorDocument] = [_VendorDocument()]
    names = {part.call_id: part.name for part in parts if isinstance(part, ToolCallPart)}
    try:
        for group in _group_by_item(vendor, parts):
            source = group[0].source
            if source is not None and _has_vendor_item(vendor, group[0]):
                if source.envelope is not None and documents[-1].envelope is not None:
                    documents.append(_VendorDocument())
                documents[-1].envelope = source.envelope or documents[-1].envelope
                documents[-1].items.append((source.list_index, encode_item(group)))
            elif (made := _build_item(vendor, group, names)) is not None:
                documents[-1].items.append((0, made))
            elif dropped is not None:
                dropped += group
        return documents[0].build() if len(documents) == 1 else _concatenate(documents)
    except ValueError as error:
        raise MalformedPartError(f"`{SOURCE_FIELD}` cannot be restored: {error}") from error


class _VendorDocument(msgspec.Struct):
    """The document of one `from_vendor` call: items with their positions in the envelope, or a list without one."""

    envelope: ResponseEnvelope | None = None
    items: list[tuple[int, Json]] = []

    @property
    def is_list(self) -> bool:
        return self.envelope is None or (self.envelope.item_list_paths == [()] and len(self.items) != 1)

    def build(self) -> Json:
        if self.envelope is None or self.is_list:
            return [item for _, item in self.items]
        if self.envelope.item_list_paths == [()]:
            return self.items[0][1]
        lists: list[list[Json]] = [[] for _ in self.envelope.item_list_paths]
        for index, item in self.items:
            if not 0 <= index < len(lists):
                raise ValueError(f"there is no list {index}")
            lists[index].append(item)
        document = copy_json(self.envelope.document)
        for path, found in zip(self.envelope.item_list_paths, lists, strict=True):
            document = set_at_path(document, path, [*found])
        return document


def _concatenate(documents: list[_VendorDocument]) -> Json:
    """Return one document as it is, several as a list."""
    made: list[Json] = []
    for document in documents:
        whole = document.build()
        if document.is_list and isinstance(whole, list):
            made += whole
        else:
            made.append(whole)
    return made


def _group_by_item(vendor: VendorCodec, parts: list[Part]) -> list[list[Part]]:
    """Group parts by item: as they came from this vendor, else as it would write them."""
    results = {call: result for call, result in pair_calls(parts) if call is not None and result is not None}
    groups: list[list[Part]] = []
    joined: set[int] = set()
    last: _ItemGroup | None = None
    for position, part in enumerate(parts):
        if position in joined or _is_derived(vendor, part):
            continue
        if last is not None and last.accepts(part):
            last.add(part)
            groups[-1].append(part)
            continue
        groups.append([part])
        last = _ItemGroup(part) if _has_vendor_item(vendor, part) else None
        result = results.get(position)
        if result is None or _has_vendor_item(vendor, part) or _has_vendor_item(vendor, parts[result]):
            continue
        if isinstance(part, ToolCallPart) and _mapping_for(vendor, part).is_unified:
            joined.add(result)
            groups[-1].append(parts[result])
    return groups


def _has_vendor_item(vendor: VendorCodec, part: Part) -> bool:
    source = part.source
    return source is not None and source.vendor == vendor.name and source.item is not msgspec.UNSET


class _ItemGroup:
    """Consecutive parts of one item."""

    def __init__(self, first: Part) -> None:
        self._source = cast(VendorRoundTripData, first.source)
        self._paths: set[JsonPath] = set()
        self._calls: set[tuple[str | None, str]] = set()
        self.add(first)

    def add(self, part: Part) -> None:
        self._paths.update(field.path for field in cast(VendorRoundTripData, part.source).extracted_fields)
        if isinstance(part, ToolCallPart):
            self._calls.add((part.call_id, part.kind))

    def accepts(self, part: Part) -> bool:
        """Whether the part continues this item, and not another item whose first part is missing."""
        source = part.source
        if source is None or not source.is_continuation or source.vendor != self._source.vendor:
            return False
        if isinstance(part, ToolCallResponsePart) and (part.call_id, part.kind) not in self._calls:
            return False
        return all(
            field.path not in self._paths and self._is_vacant(field) for field in source.extracted_fields
        )

    def _is_vacant(self, field: FieldOrigin) -> bool:
        rest = get_at_path(cast(Json, self._source.item), field.path)
        return rest is not MISSING and (rest is None or field.codec != "")


def _is_derived(vendor: VendorCodec, part: Part) -> bool:
    is_synthesized = (isinstance(part, ToolPart) and part.provenance == "synthesized") or (
        isinstance(part, GenericPart) and part.type == _RESPONSE_ERROR_TYPE
    )
    return is_synthesized and part.source is not None and part.source.vendor == vendor.name


# --- in another vendor's words ------------------------------------------------------------------------


def _mapping_for(vendor: VendorCodec, part: ToolPart) -> ItemMapping:
    """Return the mapping of the part's kind; that of functions if the vendor has none."""
    for kind in (part.kind, "function"):
        for mapping in vendor.item_mappings:
            side = mapping.call if isinstance(part, ToolCallPart) else mapping.response
            if mapping.kind == kind and side is not None:
                return mapping
    raise AssertionError(f"{vendor.name} has no functions")


def _build_item(vendor: VendorCodec, group: list[Part], names: dict[str | None, str]) -> Json | None:
    """Build the item of a group. names: tool names by call id; some vendors repeat the name in the response."""
    first = group[0]
    if isinstance(first, ToolPart):
        tools = [part for part in group if isinstance(part, ToolPart)]
        return _build_tool_item(_mapping_for(vendor, first), tools, names.get(first.call_id))
    if isinstance(first, TextPart):
        is_input = first.role != "assistant" and vendor.user_text is not None
        return _build_text_item(vendor.user_text if is_input else vendor.text, first.content, first.role)
    if isinstance(first, ReasoningPart):
        return _build_text_item(vendor.reasoning, first.content)
    if isinstance(first, GenericPart) and first.source is not None and first.source.item is not msgspec.UNSET:
        return copy_json(first.source.item)
    return None


def _build_text_item(template: TextItemTemplate | None, text: str, role: str = "assistant") -> Json | None:
    if template is None:
        return None
    item = set_at_path(copy_json(template.item), template.path, text)
    return set_at_path(item, ("role",), role) if "role" in template.item else item


def _build_tool_item(mapping: ItemMapping, parts: list[ToolPart], name: str | None) -> Json:
    item = copy_json(mapping.template or {"type": mapping.type})
    for part in parts:
        shared = part.call_id if part.call_id is not None else part.id
        item = _fill_if_empty(item, mapping.call_id, shared)
        item = _fill_if_empty(
            item, mapping.id, part.id if mapping.call_id and part.id is not None else shared
        )
        item = _fill_if_empty(item, mapping.name, name)
        word = get_text_at_path(item, mapping.status)
        if word in _VENDOR_STATUS_WORDS and part.status is not None:
            item = set_at_path(item, mapping.status, _VENDOR_STATUS_WORDS[word].get(part.status, word))
        if part.status == "failed" and mapping.failed and get_at_path(item, mapping.failed) is False:
            item = set_at_path(item, mapping.failed, True)
        item = _write_payload(item, mapping, part)
    return item


# The vendor's words for other states, by the word in the template.
_VENDOR_STATUS_WORDS: dict[str, dict[Status, str]] = {
    "completed": {
        "in_progress": "in_progress",
        "incomplete": "incomplete",
        "failed": "failed",
        "cancelled": "incomplete",
    },
    "success": {"incomplete": "error", "failed": "error", "cancelled": "error"},
    "OUTCOME_OK": {"incomplete": "OUTCOME_FAILED", "failed": "OUTCOME_FAILED", "cancelled": "OUTCOME_FAILED"},
}


def _fill_if_empty(item: Json, path: JsonPath, value: str | None) -> Json:
    if not path or value is None or get_at_path(item, path) not in (MISSING, None, ""):
        return item
    return set_at_path(item, path, value)


def _write_payload(item: Json, mapping: ItemMapping, part: ToolPart) -> Json:
    payload = part.payload if mapping.kind == part.kind else _as_function_payload(part)
    done: set[str] = set()
    for field in (mapping.call if isinstance(part, ToolCallPart) else mapping.response) or ():
        value = payload.get(field.name)
        if field.name in done or value is None or (field.is_fallback and done):
            continue
        done.add(field.name)
        before = get_at_path(item, field.path)
        rest = None if before is MISSING else before
        written = (
            FIELD_CODECS[field.codec].encode(copy_json(value), rest)
            if field.codec
            else _coerce_like(copy_json(value), rest)
        )
        item = set_at_path(item, field.path, written)
    return item


def _as_function_payload(part: ToolPart) -> JsonObject:
    """Return the payload as that of a function: arguments and output of an MCP tool, else the whole payload."""
    if isinstance(part, ToolCallPart):
        return {"arguments": part.payload.get("arguments") if part.kind == "mcp" else part.payload}
    return {"result": part.payload.get("output") if part.kind == "mcp" else part.payload}


def _coerce_like(value: Json, example: Json) -> Json:
    """Convert a value to text or to JSON, whichever the example is: vendors differ in how functions write arguments."""
    if isinstance(example, str) and not isinstance(value, str):
        return json.dumps(value)
    if isinstance(example, dict) and not isinstance(value, dict):
        found = _parse_object(value)
        return {"result": value} if found is None else found
    if isinstance(example, list) and not isinstance(value, list):
        return [{"text": value if isinstance(value, str) else json.dumps(value)}]
    return value


def _parse_object(value: Json) -> JsonObject | None:
    try:
        found: Json = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# --- anything to anything -----------------------------------------------------------------------------


def list_formats() -> list[str]:
    """Return the names of all vendors and representations, which `convert` accepts."""
    return [*VENDORS, *REPRESENTATIONS]


def convert(source: str, target: str, document: Json, dropped: list[Part] | None = None) -> Json:
    """Convert a document from one vendor or representation to another.

    Parts that the target has no equivalent for are appended to `dropped`.
    Raises UnknownVendorError for an unknown name.
    """
    if source in REPRESENTATIONS:
        written = document if isinstance(document, list) else [document]
        parts = from_representation(written, compat=source == "option1-compat")
    else:
        parts = from_vendor(source, document)
    return (
        [*to_representation(target, parts)]
        if target in REPRESENTATIONS
        else to_vendor(target, parts, dropped)
    )
