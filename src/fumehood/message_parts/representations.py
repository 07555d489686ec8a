"""Parts as OpenTelemetry records them, in the ways of specification 002, and back.

- option 1: `tool_call` and `tool_call_response` for all tools, with typed payloads; `arguments` where backends look.
- option 2: `server_tool_call` and `server_tool_call_response` for tools that a server ran, which OpenTelemetry adopted.
- option 3: one `server_tool` for both halves; its alternative calls them `request` and `response`.

In options 2 and 3, tools that the client runs are as in option 1. A view is recognised by the types of its parts. What
only the way back needs is in one field, `fumehood.source`.
"""

import heapq
from collections.abc import Iterable
from typing import cast, get_args

import msgspec

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Execution,
    ExtractedField,
    FilePart,
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
    UriPart,
    VendorSource,
    pair_calls,
)
from fumehood.message_parts.field_codecs import is_same_json
from fumehood.message_parts.part_types import (
    PLAIN_PART_FIELDS,
    REPRESENTATIONS,
    TOOL_PART_TYPES,
    MalformedPartError,
    PartType,
    find_name_error,
    find_part_error,
)

SOURCE_FIELD = "fumehood.source"
# An item of a vendor's that is no part: whatever it is, it is in the source.
OPAQUE_ITEM_TYPE = "fumehood:item"

_UNIFIED_PART_TYPES = {
    "option3": TOOL_PART_TYPES["server_tool"],
    "option3-alternative": TOOL_PART_TYPES["server_tool_execution"],
}
_CLIENT_KINDS = frozenset({"function", "computer", "apply_patch"})
_EXECUTIONS: tuple[str, ...] = get_args(Execution.__value__)
_STATUSES: tuple[str, ...] = get_args(Status.__value__)


class UnknownRepresentationError(Exception):
    """The view's name is not one of `VIEWS`."""


# --- to a view ----------------------------------------------------------------------------------------


def to_representation(representation: str, parts: list[Part]) -> list[JsonObject]:
    if representation not in REPRESENTATIONS:
        raise UnknownRepresentationError(
            f"There is no view {representation!r}; there are {', '.join(REPRESENTATIONS)}."
        )
    if representation in _UNIFIED_PART_TYPES:
        return _write_unified_parts(_UNIFIED_PART_TYPES[representation], parts)
    return [_write_part(part, separate_server_tools=representation == "option2") for part in parts]


def _write_part(part: Part, *, separate_server_tools: bool) -> JsonObject:
    if not isinstance(part, ToolCallPart | ToolCallResponsePart):
        return _write_plain_part(part)
    apart = separate_server_tools and part.execution == "server"
    record = _build_source_record(part, "server" if apart else _default_execution(part.kind), None)
    payload: JsonObject = {"type": part.kind, **part.payload}
    made: JsonObject
    if isinstance(part, ToolCallResponsePart):
        kind, key = ("server_tool_call_response",) * 2 if apart else ("tool_call_response", "response")
        made = {"type": kind, "id": part.call_id, key: payload}
    else:
        kind = "server_tool_call" if apart else "tool_call"
        made = {"type": kind, "id": part.call_id, "name": part.name, kind: payload}
    beside = {
        name: value
        for name, value in part.extra.items()
        if name not in made and name not in TOOL_PART_TYPES[kind].forbidden_fields
    }
    if isinstance(part, ToolCallPart) and not apart:
        made["arguments"] = _build_arguments(part)
    return {**made, **beside, **_add_displaced_fields(record, part.extra, beside)}


def _add_displaced_fields(record: JsonObject, members: JsonObject, kept: JsonObject) -> JsonObject:
    """The record, also of those members that mean something else in this view than in the one they came from."""
    aside: JsonObject = {name: value for name, value in members.items() if name not in kept}
    if not aside:
        return record
    known = record.get(SOURCE_FIELD)
    return {SOURCE_FIELD: {**(known if isinstance(known, dict) else {}), "aside": aside}}


def _build_arguments(call: ToolCallPart) -> Json:
    """What backends show: the arguments themselves, or what they would be if the tool were a function."""
    if "arguments" in call.payload:
        return call.payload["arguments"]
    return {name: value for name, value in call.payload.items() if value is not None}


def _write_plain_part(part: Part) -> JsonObject:
    record = _build_source_record(part)
    match part:
        case TextPart() | ReasoningPart():
            made: JsonObject = {
                "type": "text" if isinstance(part, TextPart) else "reasoning",
                "content": part.content,
            }
        case BlobPart():
            made = {"type": "blob", **_media_fields(part), "content": part.content}
        case FilePart():
            made = {"type": "file", **_media_fields(part), "file_id": part.file_id}
        case UriPart():
            made = {"type": "uri", **_media_fields(part), "uri": part.uri}
        case GenericPart():
            made = {"type": part.type if part.source is None else OPAQUE_ITEM_TYPE}
        case ToolCallPart() | ToolCallResponsePart():
            raise AssertionError("calls and results have forms of their own")
    return {**made, **part.extra, **record}


def part_type_name(part: Part) -> str:
    """What a part is called: the type that option 2 gives it, or its vendor's own."""
    if isinstance(part, GenericPart):
        return part.type
    return str(_write_part(part, separate_server_tools=True)["type"])


def _media_fields(part: BlobPart | FilePart | UriPart) -> JsonObject:
    return {"mime_type": part.mime_type, "modality": part.modality}


def _write_unified_parts(part_type: PartType, parts: list[Part]) -> list[JsonObject]:
    """One object for call and result, where the call was; a result that is not right behind it says how far it was."""
    made: dict[int, JsonObject] = {}
    for position, part in enumerate(parts):
        if not isinstance(part, ToolCallPart | ToolCallResponsePart) or part.execution == "client":
            made[position] = _write_part(part, separate_server_tools=True)
    for places in pair_calls(parts):
        # A half whose other half ran with the client is on its own.
        halves = {place: parts[place] for place in places if place is not None and place not in made}
        if halves:
            made[min(halves)] = _write_pair(
                part_type, cast(dict[int, ToolCallPart | ToolCallResponsePart], halves)
            )
    return [made[position] for position in sorted(made)]


def _write_pair(part_type: PartType, halves: dict[int, ToolCallPart | ToolCallResponsePart]) -> JsonObject:
    """`halves` by their positions, the call first."""
    both = _merge_halves(part_type, [*halves.values()])
    call_at, result_at = min(halves), max(halves)
    if result_at > call_at + 1:
        record = both.setdefault(SOURCE_FIELD, {})
        cast(JsonObject, record)["response_after"] = result_at - call_at
    return both


def _merge_halves(part_type: PartType, halves: list[ToolCallPart | ToolCallResponsePart]) -> JsonObject:
    first, last = halves[0], halves[-1]
    made: JsonObject = {
        "type": part_type.type,
        "id": first.call_id,
        "name": first.name if isinstance(first, ToolCallPart) else first.kind,
    }
    record: JsonObject = {}
    status = last.status or first.status
    for half in halves:
        made[part_type.call if isinstance(half, ToolCallPart) else part_type.response] = {
            "type": half.kind,
            **half.payload,
        }
    if _has_own_tool_name(first):
        made["name"] = first.extra["name"]
    for half in halves:
        beside = {
            name: value
            for name, value in half.extra.items()
            if _can_keep_field(part_type, made, status, name, value)
        }
        if half is first and _has_own_tool_name(first):
            beside["name"] = made["name"]
        of_half = _add_displaced_fields(_build_source_record(half, "server", status), half.extra, beside)
        of_half = cast(JsonObject, of_half.get(SOURCE_FIELD, {}))
        if half is not first and beside:
            of_half["members"] = [*beside]
        if of_half:
            record["call" if isinstance(half, ToolCallPart) else "response"] = of_half
        made |= beside
    if part_type.type == "server_tool_execution":
        timing = made.pop("execution_metadata", {})
        known: JsonObject = {} if status is None else {"status": status}
        made["execution_metadata"] = {**known, **timing} if isinstance(timing, dict) else timing
    elif status is not None:
        made.setdefault("status", status)
    return {**made, SOURCE_FIELD: record} if record else made


def _has_own_tool_name(half: ToolCallPart | ToolCallResponsePart) -> bool:
    """A result whose call is not there may have the tool's name as a member."""
    name = half.extra.get("name")
    if isinstance(half, ToolCallPart) or not isinstance(name, str) or name == half.kind:
        return False
    return not find_name_error(name, half.kind)


def _can_keep_field(
    part_type: PartType, made: JsonObject, status: Status | None, name: str, value: Json
) -> bool:
    """Whether a member of a half can stand in the object of both, and is then read as what it is."""
    if name in made or name in part_type.forbidden_fields or name in (part_type.call, part_type.response):
        return False
    if part_type.type == "server_tool":
        return name != "status" or (status is None and value not in _STATUSES)
    if name != "execution_metadata":
        return True
    if not isinstance(value, dict):
        return status is None
    return "status" not in value or (status is None and value["status"] not in _STATUSES)


def _default_execution(kind: str) -> Execution:
    return "client" if kind in _CLIENT_KINDS else "server"


def _build_source_record(
    part: Part, execution: Execution = "server", status: Status | None = None
) -> JsonObject:
    """`fumehood.source`, or nothing where the view says it all: who runs it, and how far it got."""
    record: JsonObject = {}
    source = part.source
    if source is not None:
        record["vendor"] = source.vendor
    if isinstance(part, ToolCallPart | ToolCallResponsePart):
        if part.vendor_type:
            record["type"] = part.vendor_type
        if part.id is not None and part.id != part.call_id:
            record["id"] = part.id
        if part.status != status:
            record["status"] = part.status
        if part.execution != execution:
            record["execution"] = part.execution
        if part.provenance != "observed":
            record["provenance"] = part.provenance
    elif isinstance(part, TextPart) and part.role != "assistant":
        record["role"] = part.role
    elif isinstance(part, GenericPart) and source is not None:
        record["type"] = part.type
    if source is not None:
        record |= _round_trip_fields(source)
    return {SOURCE_FIELD: record} if record else {}


def _round_trip_fields(source: VendorSource) -> JsonObject:
    record: JsonObject = {}
    if source.item is not msgspec.UNSET:
        record["item"] = source.item
    if source.is_continuation:
        record["follows"] = True
    if source.extracted_fields:
        record["moved"] = [_write_extracted_field(move) for move in source.extracted_fields]
    if source.list_index:
        record["place"] = source.list_index
    if source.envelope is not None:
        places: list[Json] = [list(place) for place in source.envelope.item_list_paths]
        record["envelope"] = {"document": source.envelope.document, "places": places}
    return record


def _write_extracted_field(field: ExtractedField) -> list[Json]:
    return [field.field, list(field.path), *([field.codec] if field.codec else [])]


# --- from a view --------------------------------------------------------------------------------------


def from_representation(raw_parts: Iterable[Json], *, compat: bool = False) -> list[Part]:
    """The parts of any view; raises `Malformed` where one is none. `compat` also takes the form before option 1."""
    parts: list[Part] = []
    late: list[tuple[int, int, ToolCallResponsePart]] = []
    for number, raw in enumerate(raw_parts):
        while late and late[0][0] <= len(parts):
            parts.append(heapq.heappop(late)[-1])
        part = upgrade_part(raw) if compat else raw
        if problem := find_part_error(part):
            raise MalformedPartError(f"part {number}: {problem}")
        members = dict(cast(JsonObject, part))
        try:
            read = _read_part(members)
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedPartError(f"part {number}: `{SOURCE_FIELD}` cannot be read: {error}") from error
        parts += read.parts
        if read.delayed_response is not None:
            after, result = read.delayed_response
            heapq.heappush(late, (len(parts) - 1 + after, number, result))
    return [*parts, *(result for *_, result in sorted(late, key=lambda each: each[:2]))]


class _ReadResult(msgspec.Struct):
    """What one part of a view was read as.

    `late`: a result that is not right behind its call, and by how many places it comes after it.
    """

    parts: list[Part]
    delayed_response: tuple[int, ToolCallResponsePart] | None = None


def _read_part(members: JsonObject) -> _ReadResult:
    kind = cast(str, members.pop("type"))
    record = members.pop(SOURCE_FIELD, None)
    found: JsonObject = record if isinstance(record, dict) else {}
    form = TOOL_PART_TYPES.get(kind)
    if form is None:
        return _ReadResult([_read_plain(kind, members, found)])
    if form.holds_both:
        return _read_unified(form, members, found)
    return _ReadResult([_read_half(form, members, found)])


def _read_half(part_type: PartType, members: JsonObject, record: JsonObject) -> Part:
    shared = cast(str | None, members.pop("id", None))
    payload = dict(cast(JsonObject, members.pop(part_type.call or part_type.response)))
    kind = cast(str, payload.pop("type"))
    implied: Execution = _default_execution(kind) if part_type.type.startswith("tool_") else "server"
    if part_type.response:
        part: ToolCallPart | ToolCallResponsePart = ToolCallResponsePart(
            kind=kind, payload=payload, call_id=shared, extra=members
        )
    else:
        name = cast(str, members.pop("name"))
        part = ToolCallPart(kind=kind, name=name, payload=payload, call_id=shared, extra=members)
        if is_same_json(members.get("arguments"), _build_arguments(part)):
            members.pop("arguments", None)
    part.extra |= _displaced_fields(record)
    _restore_source(part, record, implied)
    return part


def _displaced_fields(record: JsonObject) -> JsonObject:
    found = record.get("aside")
    return found if isinstance(found, dict) else {}


def _read_unified(part_type: PartType, members: JsonObject, record: JsonObject) -> _ReadResult:
    shared, name = cast(str | None, members.pop("id", None)), cast(str, members.pop("name"))
    status = _pop_status(part_type, members)
    made: list[ToolCallPart | ToolCallResponsePart] = []
    for key, half in ((part_type.call, "call"), (part_type.response, "response")):
        if key not in members:
            continue
        payload = dict(cast(JsonObject, members.pop(key)))
        kind = cast(str, payload.pop("type"))
        part: ToolCallPart | ToolCallResponsePart
        if half == "call":
            part = ToolCallPart(kind=kind, name=name, payload=payload, call_id=shared)
        else:
            part = ToolCallResponsePart(kind=kind, payload=payload, call_id=shared)
        said = record.get(half)
        known: JsonObject = said if isinstance(said, dict) else {}
        _restore_source(part, {"status": status, **known}, "server")
        for own in cast(list[str], known.get("members", [])):
            part.extra[own] = members.pop(own)
        part.extra |= _displaced_fields(known)
        made.append(part)
    if isinstance(made[0], ToolCallResponsePart) and name != made[0].kind:
        members["name"] = name
    made[0].extra = {**members, **made[0].extra}
    after = record.get("response_after")
    if len(made) > 1 and isinstance(after, int) and not isinstance(after, bool):
        return _ReadResult([made[0]], (after, cast(ToolCallResponsePart, made[1])))
    return _ReadResult([*made])


def _pop_status(part_type: PartType, members: JsonObject) -> Json:
    """What the object says of its status; words that nobody knows stay where they are."""
    if part_type.type == "server_tool":
        return members.pop("status") if members.get("status") in _STATUSES else None
    timing = members.get("execution_metadata")
    if not isinstance(timing, dict):
        return None
    metadata = dict(timing)
    status = metadata.pop("status") if metadata.get("status") in _STATUSES else None
    members["execution_metadata"] = metadata
    if not metadata:
        members.pop("execution_metadata")
    return status


def _restore_source(
    part: ToolCallPart | ToolCallResponsePart, record: JsonObject, default_execution: Execution
) -> None:
    said, status = record.get("id"), record.get("status")
    part.id = said if isinstance(said, str) else part.call_id
    part.vendor_type = _string_or_empty(record.get("type"))
    part.status = cast(Status, status) if status in _STATUSES else None
    execution = record.get("execution")
    part.execution = cast(Execution, execution) if execution in _EXECUTIONS else default_execution
    part.provenance = "synthesized" if record.get("provenance") == "synthesized" else "observed"
    part.source = _read_source(record)


def _read_plain(kind: str, members: JsonObject, record: JsonObject) -> Part:
    source = _read_source(record)
    if kind == OPAQUE_ITEM_TYPE and source is not None:
        return GenericPart(type=_string_or_empty(record.get("type")), source=source, extra=members)
    if kind not in PLAIN_PART_FIELDS:
        return GenericPart(type=kind, extra=members)
    taken = {key: cast(str, members.pop(key)) for key in PLAIN_PART_FIELDS[kind]}
    match kind:
        case "text":
            role = _string_or_empty(record.get("role")) or "assistant"
            return TextPart(content=taken["content"], role=role, source=source, extra=members)
        case "reasoning":
            return ReasoningPart(content=taken["content"], source=source, extra=members)
        case _:
            mime = cast(str | None, members.pop("mime_type", None))
            made = {"blob": BlobPart, "file": FilePart, "uri": UriPart}[kind]
            return made(**taken, mime_type=mime, source=source, extra=members)


def _string_or_empty(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _read_source(record: JsonObject) -> VendorSource | None:
    """What was written by `_way_back`; raises what reading JSON of another shape raises."""
    vendor = record.get("vendor")
    if not isinstance(vendor, str):
        return None
    moved = [_read_extracted_field(entry) for entry in cast(list[Json], record.get("moved", []))]
    envelope, place = record.get("envelope"), record.get("place", 0)
    if not isinstance(place, int):
        raise ValueError("`place` is no number")
    return VendorSource(
        vendor=vendor,
        item=record.get("item", msgspec.UNSET),
        is_continuation=record.get("follows") is True,
        extracted_fields=moved,
        list_index=place,
        envelope=None if envelope is None else _read_envelope(cast(JsonObject, envelope)),
    )


def _read_extracted_field(entry: Json) -> ExtractedField:
    field, path, *lens = cast(list[Json], entry)
    return ExtractedField(
        _string_or_empty(field), _read_path(path), _string_or_empty(lens[0]) if lens else ""
    )


def _read_envelope(record: JsonObject) -> ResponseEnvelope:
    places = [_read_path(place) for place in cast(list[Json], record["places"])]
    return ResponseEnvelope(document=record["document"], item_list_paths=places)


def _read_path(value: Json) -> JsonPath:
    return msgspec.convert(value, tuple[str | int, ...])


# --- from the form before option 1 --------------------------------------------------------------------


def upgrade_part(part: Json) -> Json:
    """A call or response as it was before payloads had types, as option 1 has it; anything else as it is.

    Tools were functions then, so that is what they become, unless the response says what it is. Members that option 1
    gives another meaning are kept in `fumehood.before`.
    """
    if not isinstance(part, dict) or not find_part_error(part) or find_part_error(part, compat=True):
        return part
    form = TOOL_PART_TYPES[cast(str, part["type"])]
    aside = form.forbidden_fields | ({form.call} if form.call else frozenset[str]())
    before = {key: value for key, value in part.items() if key in aside}
    kept: JsonObject = {key: value for key, value in part.items() if key not in aside}
    if before:
        kept["fumehood.before"] = before
    if form.call:
        return {**kept, form.call: {"type": "function", "arguments": part.get("arguments")}}
    return {**kept, form.response: {"type": "function", "result": part.get("response")}}
