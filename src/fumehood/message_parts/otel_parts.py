"""Representations: canonical parts as the JSON that OpenTelemetry records (specification 002), and back.

- option 1: `tool_call` and `tool_call_response` for all tools, with typed payloads and `arguments` for backends.
- option 2: `server_tool_call` and `server_tool_call_response` for tools that a server ran; adopted by OpenTelemetry.
- option 3: one `server_tool` for both halves; its alternative names them `request` and `response`.

In options 2 and 3, tools that the client runs are as in option 1. Readers recognise a representation by its part
types. What only the way back to the vendor needs is in one field, `fumehood.source`.
"""

import heapq
from collections.abc import Iterable
from typing import cast, get_args

import msgspec

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Execution,
    FieldOrigin,
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
    ToolPart,
    UriPart,
    VendorRoundTripData,
    pair_calls,
)
from fumehood.message_parts.json_path_access import is_same_json
from fumehood.message_parts.part_schema import (
    PLAIN_PART_FIELDS,
    REPRESENTATIONS,
    TOOL_PART_TYPES,
    MalformedPartError,
    ToolPartType,
    find_name_error,
    find_part_error,
)

SOURCE_FIELD = "fumehood.source"
# The part type of an opaque item, which is in the source.
OPAQUE_ITEM_TYPE = "fumehood:item"

_UNIFIED_PART_TYPES = {
    "option3": TOOL_PART_TYPES["server_tool"],
    "option3-alternative": TOOL_PART_TYPES["server_tool_execution"],
}
_CLIENT_KINDS = frozenset({"function", "computer", "apply_patch"})
_EXECUTIONS: tuple[str, ...] = get_args(Execution.__value__)
_STATUSES: tuple[str, ...] = get_args(Status.__value__)


class UnknownRepresentationError(Exception):
    """The name is not one of `REPRESENTATIONS`."""


# --- to a representation ----------------------------------------------------------------------------------------


def to_representation(representation: str, parts: list[Part]) -> list[JsonObject]:
    if representation not in REPRESENTATIONS:
        raise UnknownRepresentationError(
            f"There is no representation {representation!r}; there are {', '.join(REPRESENTATIONS)}."
        )
    if representation in _UNIFIED_PART_TYPES:
        return _write_unified_parts(_UNIFIED_PART_TYPES[representation], parts)
    return [_write_part(part, separate_server_tools=representation == "option2") for part in parts]


def _write_part(part: Part, *, separate_server_tools: bool) -> JsonObject:
    if not isinstance(part, ToolPart):
        return _write_plain_part(part)
    apart = separate_server_tools and part.execution == "server"
    record = _build_source_record(part, "server" if apart else _default_execution(part.kind), None)
    payload: JsonObject = {"type": part.kind, **part.payload}
    made: JsonObject
    if isinstance(part, ToolCallPart):
        kind = "server_tool_call" if apart else "tool_call"
        made = {"type": kind, "id": part.call_id, "name": part.name, kind: payload}
    else:
        kind = "server_tool_call_response" if apart else "tool_call_response"
        made = {"type": kind, "id": part.call_id, TOOL_PART_TYPES[kind].response: payload}
    others = {
        name: value
        for name, value in part.extra.items()
        if name not in made and name not in TOOL_PART_TYPES[kind].forbidden_fields
    }
    if isinstance(part, ToolCallPart) and not apart:
        made["arguments"] = _build_arguments(part)
    return {**made, **others, **_add_displaced_fields(record, part.extra, others)}


def _add_displaced_fields(record: JsonObject, members: JsonObject, remaining: JsonObject) -> JsonObject:
    """Add fields to the record that mean something else in this representation than in the one they came from."""
    displaced: JsonObject = {name: value for name, value in members.items() if name not in remaining}
    if not displaced:
        return record
    known = record.get(SOURCE_FIELD)
    return {SOURCE_FIELD: {**(known if isinstance(known, dict) else {}), "aside": displaced}}


def _build_arguments(call: ToolCallPart) -> Json:
    """Return the arguments for backends: those of a function, or the payload as a function would have it."""
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
        case ToolPart():
            raise AssertionError("calls and responses are written elsewhere")
    return {**made, **part.extra, **record}


def part_type_name(part: Part) -> str:
    """Return the type of a part in option 2, or the vendor's own type."""
    if isinstance(part, GenericPart):
        return part.type
    return str(_write_part(part, separate_server_tools=True)["type"])


def _media_fields(part: BlobPart | FilePart | UriPart) -> JsonObject:
    return {"mime_type": part.mime_type, "modality": part.modality}


def _write_unified_parts(part_type: ToolPartType, parts: list[Part]) -> list[JsonObject]:
    """Write one object for call and response, at the position of the call, with the distance of a later response."""
    made: dict[int, JsonObject] = {}
    for position, part in enumerate(parts):
        if not isinstance(part, ToolPart) or part.execution == "client":
            made[position] = _write_part(part, separate_server_tools=True)
    for positions in pair_calls(parts):
        # A half whose other half ran at the client stands alone.
        halves = {
            position: parts[position]
            for position in positions
            if position is not None and position not in made
        }
        if halves:
            made[min(halves)] = _write_pair(part_type, cast(dict[int, ToolPart], halves))
    return [made[position] for position in sorted(made)]


def _write_pair(part_type: ToolPartType, halves: dict[int, ToolPart]) -> JsonObject:
    """halves: by position, the call first."""
    both = _merge_halves(part_type, [*halves.values()])
    call_at, result_at = min(halves), max(halves)
    if result_at > call_at + 1:
        record = both.setdefault(SOURCE_FIELD, {})
        cast(JsonObject, record)["response_after"] = result_at - call_at
    return both


def _merge_halves(part_type: ToolPartType, halves: list[ToolPart]) -> JsonObject:
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
        others = {
            name: value
            for name, value in half.extra.items()
            if _can_keep_field(part_type, made, status, name, value)
        }
        if half is first and _has_own_tool_name(first):
            others["name"] = made["name"]
        of_half = _add_displaced_fields(_build_source_record(half, "server", status), half.extra, others)
        of_half = cast(JsonObject, of_half.get(SOURCE_FIELD, {}))
        if half is not first and others:
            of_half["members"] = [*others]
        if of_half:
            record["call" if isinstance(half, ToolCallPart) else "response"] = of_half
        made |= others
    if part_type.type == "server_tool_execution":
        timing = made.pop("execution_metadata", {})
        known: JsonObject = {} if status is None else {"status": status}
        made["execution_metadata"] = {**known, **timing} if isinstance(timing, dict) else timing
    elif status is not None:
        made.setdefault("status", status)
    return {**made, SOURCE_FIELD: record} if record else made


def _has_own_tool_name(half: ToolPart) -> bool:
    """Whether a response without its call holds the tool's name in a field."""
    name = half.extra.get("name")
    if isinstance(half, ToolCallPart) or not isinstance(name, str) or name == half.kind:
        return False
    return not find_name_error(name, half.kind)


def _can_keep_field(
    part_type: ToolPartType, made: JsonObject, status: Status | None, name: str, value: Json
) -> bool:
    """Whether a field of a half can be written to the common object and read back from it."""
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
    """Build `fumehood.source`; empty where the representation already says it all."""
    record: JsonObject = {}
    source = part.source
    if source is not None:
        record["vendor"] = source.vendor
    if isinstance(part, ToolPart):
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


def _round_trip_fields(source: VendorRoundTripData) -> JsonObject:
    record: JsonObject = {}
    if source.item is not msgspec.UNSET:
        record["item"] = source.item
    if source.is_continuation:
        record["follows"] = True
    if source.extracted_fields:
        record["moved"] = [_write_extracted_field(field) for field in source.extracted_fields]
    if source.list_index:
        record["place"] = source.list_index
    if source.envelope is not None:
        paths: list[Json] = [list(path) for path in source.envelope.item_list_paths]
        record["envelope"] = {"document": source.envelope.document, "places": paths}
    return record


def _write_extracted_field(field: FieldOrigin) -> list[Json]:
    return [field.field, list(field.path), *([field.codec] if field.codec else [])]


# --- messages of OpenTelemetry's attributes ---------------------------------------------------------------------


def to_messages(representation: str, parts: list[Part], finish_reason: str | None = None) -> list[JsonObject]:
    """Build messages in a representation: with a finish reason as in `gen_ai.output.messages`, else as input.

    Calls that a server ran are in the assistant's message with their responses. Responses of the client are messages of
    role `tool`; in option 1 all responses are, because backends look for them there.
    """
    groups: list[tuple[str, list[Part]]] = []
    for part in parts:
        role = _role_of(part, responses_apart=representation.startswith("option1"))
        if not groups or groups[-1][0] != role:
            groups.append((role, []))
        groups[-1][1].append(part)
    return [_build_message(representation, role, group, finish_reason) for role, group in groups]


def _build_message(
    representation: str, role: str, parts: list[Part], finish_reason: str | None
) -> JsonObject:
    written: list[Json] = [*to_representation(representation, parts)]
    message: JsonObject = {"role": role, "parts": written}
    return message if finish_reason is None else {**message, "finish_reason": finish_reason}


def _role_of(part: Part, *, responses_apart: bool) -> str:
    if isinstance(part, TextPart):
        return part.role
    if isinstance(part, ToolCallResponsePart) and (responses_apart or part.execution == "client"):
        return "tool"
    return "assistant"


def infer_finish_reason(parts: list[Part]) -> str:
    """Infer the finish reason where the vendor does not give one: waiting for the client's tools, or done."""
    call_ids = {
        part.call_id for part in parts if isinstance(part, ToolCallPart) and part.execution == "client"
    }
    answered = {part.call_id for part in parts if isinstance(part, ToolCallResponsePart)}
    return "tool_call" if call_ids - answered else "stop"


# --- from a representation --------------------------------------------------------------------------------------


def from_representation(raw_parts: Iterable[Json], *, compat: bool = False) -> list[Part]:
    """Read parts of any representation. compat: accept parts from before option 1. Raises MalformedPartError."""
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
    """What one part was read as.

    delayed_response: a response that does not directly follow its call, with its distance.
    """

    parts: list[Part]
    delayed_response: tuple[int, ToolCallResponsePart] | None = None


def _read_part(members: JsonObject) -> _ReadResult:
    kind = cast(str, members.pop("type"))
    record = members.pop(SOURCE_FIELD, None)
    found: JsonObject = record if isinstance(record, dict) else {}
    part_type = TOOL_PART_TYPES.get(kind)
    if part_type is None:
        return _ReadResult([_read_plain(kind, members, found)])
    if part_type.holds_both:
        return _read_unified(part_type, members, found)
    return _ReadResult([_read_half(part_type, members, found)])


def _read_half(part_type: ToolPartType, members: JsonObject, record: JsonObject) -> Part:
    shared = cast(str | None, members.pop("id", None))
    payload = dict(cast(JsonObject, members.pop(part_type.call or part_type.response)))
    kind = cast(str, payload.pop("type"))
    implied: Execution = _default_execution(kind) if part_type.type.startswith("tool_") else "server"
    if part_type.response:
        part: ToolPart = ToolCallResponsePart(kind=kind, payload=payload, call_id=shared, extra=members)
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


def _read_unified(part_type: ToolPartType, members: JsonObject, record: JsonObject) -> _ReadResult:
    shared, name = cast(str | None, members.pop("id", None)), cast(str, members.pop("name"))
    status = _pop_status(part_type, members)
    made: list[ToolPart] = []
    for key, half in ((part_type.call, "call"), (part_type.response, "response")):
        if key not in members:
            continue
        payload = dict(cast(JsonObject, members.pop(key)))
        kind = cast(str, payload.pop("type"))
        part: ToolPart
        if half == "call":
            part = ToolCallPart(kind=kind, name=name, payload=payload, call_id=shared)
        else:
            part = ToolCallResponsePart(kind=kind, payload=payload, call_id=shared)
        half_record = record.get(half)
        known: JsonObject = half_record if isinstance(half_record, dict) else {}
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


def _pop_status(part_type: ToolPartType, members: JsonObject) -> Json:
    """Remove and return the status; unknown words stay where they are."""
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


def _restore_source(part: ToolPart, record: JsonObject, default_execution: Execution) -> None:
    id_, status = record.get("id"), record.get("status")
    part.id = id_ if isinstance(id_, str) else part.call_id
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
    fields = {key: cast(str, members.pop(key)) for key in PLAIN_PART_FIELDS[kind]}
    match kind:
        case "text":
            role = _string_or_empty(record.get("role")) or "assistant"
            return TextPart(content=fields["content"], role=role, source=source, extra=members)
        case "reasoning":
            return ReasoningPart(content=fields["content"], source=source, extra=members)
        case _:
            mime = cast(str | None, members.pop("mime_type", None))
            made = {"blob": BlobPart, "file": FilePart, "uri": UriPart}[kind]
            return made(**fields, mime_type=mime, source=source, extra=members)


def _string_or_empty(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _read_source(record: JsonObject) -> VendorRoundTripData | None:
    """Read what `_build_source_record` has written. Raises whatever malformed JSON causes."""
    vendor = record.get("vendor")
    if not isinstance(vendor, str):
        return None
    extracted = [_read_extracted_field(entry) for entry in cast(list[Json], record.get("moved", []))]
    envelope, list_index = record.get("envelope"), record.get("place", 0)
    if not isinstance(list_index, int):
        raise ValueError("`place` is not a number")
    return VendorRoundTripData(
        vendor=vendor,
        item=record.get("item", msgspec.UNSET),
        is_continuation=record.get("follows") is True,
        extracted_fields=extracted,
        list_index=list_index,
        envelope=None if envelope is None else _read_envelope(cast(JsonObject, envelope)),
    )


def _read_extracted_field(entry: Json) -> FieldOrigin:
    field, path, *codec = cast(list[Json], entry)
    return FieldOrigin(_string_or_empty(field), _read_path(path), _string_or_empty(codec[0]) if codec else "")


def _read_envelope(record: JsonObject) -> ResponseEnvelope:
    paths = [_read_path(path) for path in cast(list[Json], record["places"])]
    return ResponseEnvelope(document=record["document"], item_list_paths=paths)


def _read_path(value: Json) -> JsonPath:
    return msgspec.convert(value, tuple[str | int, ...])


# --- from the form before option 1 --------------------------------------------------------------------


def upgrade_part(part: Json) -> Json:
    """Upgrade a call or response without a typed payload to option 1; return anything else unchanged.

    Such tools were functions, so they become functions unless the response says otherwise. Fields that option 1 uses
    differently are kept in `fumehood.before`.
    """
    if not isinstance(part, dict) or not find_part_error(part) or find_part_error(part, compat=True):
        return part
    part_type = TOOL_PART_TYPES[cast(str, part["type"])]
    displaced = part_type.forbidden_fields | ({part_type.call} if part_type.call else frozenset[str]())
    before = {key: value for key, value in part.items() if key in displaced}
    remaining: JsonObject = {key: value for key, value in part.items() if key not in displaced}
    if before:
        remaining["fumehood.before"] = before
    if part_type.call:
        return {**remaining, part_type.call: {"type": "function", "arguments": part.get("arguments")}}
    return {**remaining, part_type.response: {"type": "function", "result": part.get("response")}}
