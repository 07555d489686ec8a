"""Parts as OpenTelemetry records them, in the ways of specification 002, and back; imports its siblings.

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

from fumehood.parts.canonical import (
    Blob,
    Envelope,
    Execution,
    File,
    Json,
    JsonObject,
    Move,
    Other,
    Part,
    Path,
    Reasoning,
    Source,
    Status,
    Text,
    ToolCall,
    ToolResult,
    Uri,
    pairs,
)
from fumehood.parts.forms import FORMS, PLAIN, VIEWS, Form, Malformed, problem_of, problem_of_name
from fumehood.parts.lenses import same

SOURCE = "fumehood.source"
# An item of a vendor's that is no part: whatever it is, it is in the source.
ITEM = "fumehood:item"

_UNIFIED = {"option3": FORMS["server_tool"], "option3-alternative": FORMS["server_tool_execution"]}
_CLIENTS_KINDS = frozenset({"function", "computer", "apply_patch"})
_SIDES: tuple[str, ...] = get_args(Execution.__value__)
_STATUSES: tuple[str, ...] = get_args(Status.__value__)


class NoSuchView(Exception):
    """The view's name is not one of `VIEWS`."""


# --- to a view ----------------------------------------------------------------------------------------


def to_view(view: str, parts: list[Part]) -> list[JsonObject]:
    if view not in VIEWS:
        raise NoSuchView(f"There is no view {view!r}; there are {', '.join(VIEWS)}.")
    if view in _UNIFIED:
        return _unified(_UNIFIED[view], parts)
    return [_rendered(part, servers=view == "option2") for part in parts]


def _rendered(part: Part, *, servers: bool) -> JsonObject:
    if not isinstance(part, ToolCall | ToolResult):
        return _plain(part)
    apart = servers and part.execution == "server"
    record = _record(part, "server" if apart else _usual(part.kind), None)
    payload: JsonObject = {"type": part.kind, **part.payload}
    made: JsonObject
    if isinstance(part, ToolResult):
        kind, key = ("server_tool_call_response",) * 2 if apart else ("tool_call_response", "response")
        made = {"type": kind, "id": part.call_id, key: payload}
    else:
        kind = "server_tool_call" if apart else "tool_call"
        made = {"type": kind, "id": part.call_id, "name": part.name, kind: payload}
    beside = {
        name: value
        for name, value in part.extra.items()
        if name not in made and name not in FORMS[kind].forbidden
    }
    if isinstance(part, ToolCall) and not apart:
        made["arguments"] = _arguments(part)
    return {**made, **beside, **_with_aside(record, part.extra, beside)}


def _with_aside(record: JsonObject, members: JsonObject, beside: JsonObject) -> JsonObject:
    """The record, also of those members that mean something else in this view than in the one they came from."""
    aside: JsonObject = {name: value for name, value in members.items() if name not in beside}
    if not aside:
        return record
    known = record.get(SOURCE)
    return {SOURCE: {**(known if isinstance(known, dict) else {}), "aside": aside}}


def _arguments(call: ToolCall) -> Json:
    """What backends show: the arguments themselves, or what they would be if the tool were a function."""
    if "arguments" in call.payload:
        return call.payload["arguments"]
    return {name: value for name, value in call.payload.items() if value is not None}


def _plain(part: Part) -> JsonObject:
    record = _record(part)
    match part:
        case Text() | Reasoning():
            made: JsonObject = {
                "type": "text" if isinstance(part, Text) else "reasoning",
                "content": part.content,
            }
        case Blob():
            made = {"type": "blob", **_medium(part), "content": part.content}
        case File():
            made = {"type": "file", **_medium(part), "file_id": part.file_id}
        case Uri():
            made = {"type": "uri", **_medium(part), "uri": part.uri}
        case Other():
            made = {"type": part.type if part.source is None else ITEM}
        case ToolCall() | ToolResult():
            raise AssertionError("calls and results have forms of their own")
    return {**made, **part.extra, **record}


def type_of(part: Part) -> str:
    """What a part is called: the type that option 2 gives it, or its vendor's own."""
    if isinstance(part, Other):
        return part.type
    return str(_rendered(part, servers=True)["type"])


def _medium(part: Blob | File | Uri) -> JsonObject:
    return {"mime_type": part.mime_type, "modality": part.modality}


def _unified(form: Form, parts: list[Part]) -> list[JsonObject]:
    """One object for call and result, where the call was; a result that is not right behind it says how far it was."""
    made: dict[int, JsonObject] = {}
    for position, part in enumerate(parts):
        if not isinstance(part, ToolCall | ToolResult) or part.execution == "client":
            made[position] = _rendered(part, servers=True)
    for places in pairs(parts):
        # A half whose other half ran with the client is on its own.
        halves = {place: parts[place] for place in places if place is not None and place not in made}
        if halves:
            made[min(halves)] = _together(form, cast(dict[int, ToolCall | ToolResult], halves))
    return [made[position] for position in sorted(made)]


def _together(form: Form, halves: dict[int, ToolCall | ToolResult]) -> JsonObject:
    """`halves` by their positions, the call first."""
    both = _both(form, [*halves.values()])
    call_at, result_at = min(halves), max(halves)
    if result_at > call_at + 1:
        record = both.setdefault(SOURCE, {})
        cast(JsonObject, record)["response_after"] = result_at - call_at
    return both


def _both(form: Form, halves: list[ToolCall | ToolResult]) -> JsonObject:
    first, last = halves[0], halves[-1]
    made: JsonObject = {
        "type": form.type,
        "id": first.call_id,
        "name": first.name if isinstance(first, ToolCall) else first.kind,
    }
    record: JsonObject = {}
    status = last.status or first.status
    for half in halves:
        made[form.call if isinstance(half, ToolCall) else form.response] = {"type": half.kind, **half.payload}
    if _names_its_tool(first):
        made["name"] = first.extra["name"]
    for half in halves:
        beside = {
            name: value for name, value in half.extra.items() if _stays(form, made, status, name, value)
        }
        if half is first and _names_its_tool(first):
            beside["name"] = made["name"]
        of_half = _with_aside(_record(half, "server", status), half.extra, beside)
        of_half = cast(JsonObject, of_half.get(SOURCE, {}))
        if half is not first and beside:
            of_half["members"] = [*beside]
        if of_half:
            record["call" if isinstance(half, ToolCall) else "response"] = of_half
        made |= beside
    if form.type == "server_tool_execution":
        timing = made.pop("execution_metadata", {})
        known: JsonObject = {} if status is None else {"status": status}
        made["execution_metadata"] = {**known, **timing} if isinstance(timing, dict) else timing
    elif status is not None:
        made.setdefault("status", status)
    return {**made, SOURCE: record} if record else made


def _names_its_tool(half: ToolCall | ToolResult) -> bool:
    """A result whose call is not there may have the tool's name as a member."""
    name = half.extra.get("name")
    if isinstance(half, ToolCall) or not isinstance(name, str) or name == half.kind:
        return False
    return not problem_of_name(name, half.kind)


def _stays(form: Form, made: JsonObject, status: Status | None, name: str, value: Json) -> bool:
    """Whether a member of a half can stand in the object of both, and is then read as what it is."""
    if name in made or name in form.forbidden or name in (form.call, form.response):
        return False
    if form.type == "server_tool":
        return name != "status" or (status is None and value not in _STATUSES)
    if name != "execution_metadata":
        return True
    if not isinstance(value, dict):
        return status is None
    return "status" not in value or (status is None and value["status"] not in _STATUSES)


def _usual(kind: str) -> Execution:
    return "client" if kind in _CLIENTS_KINDS else "server"


def _record(part: Part, execution: Execution = "server", status: Status | None = None) -> JsonObject:
    """`fumehood.source`, or nothing where the view says it all: who runs it, and how far it got."""
    record: JsonObject = {}
    source = part.source
    if source is not None:
        record["vendor"] = source.vendor
    if isinstance(part, ToolCall | ToolResult):
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
    elif isinstance(part, Text) and part.role != "assistant":
        record["role"] = part.role
    elif isinstance(part, Other) and source is not None:
        record["type"] = part.type
    if source is not None:
        record |= _way_back(source)
    return {SOURCE: record} if record else {}


def _way_back(source: Source) -> JsonObject:
    record: JsonObject = {}
    if source.item is not msgspec.UNSET:
        record["item"] = source.item
    if source.follows:
        record["follows"] = True
    if source.moved:
        record["moved"] = [_written(move) for move in source.moved]
    if source.place:
        record["place"] = source.place
    if source.envelope is not None:
        places: list[Json] = [list(place) for place in source.envelope.places]
        record["envelope"] = {"document": source.envelope.document, "places": places}
    return record


def _written(move: Move) -> list[Json]:
    return [move.field, list(move.path), *([move.lens] if move.lens else [])]


# --- from a view --------------------------------------------------------------------------------------


def from_view(written: Iterable[Json], *, compat: bool = False) -> list[Part]:
    """The parts of any view; raises `Malformed` where one is none. `compat` also takes the form before option 1."""
    parts: list[Part] = []
    late: list[tuple[int, int, ToolResult]] = []
    for number, raw in enumerate(written):
        while late and late[0][0] <= len(parts):
            parts.append(heapq.heappop(late)[-1])
        part = upgrade(raw) if compat else raw
        if problem := problem_of(part):
            raise Malformed(f"part {number}: {problem}")
        members = dict(cast(JsonObject, part))
        try:
            read = _read(members)
        except (ValueError, TypeError, KeyError) as error:
            raise Malformed(f"part {number}: `{SOURCE}` cannot be read: {error}") from error
        parts += read.parts
        if read.late is not None:
            after, result = read.late
            heapq.heappush(late, (len(parts) - 1 + after, number, result))
    return [*parts, *(result for *_, result in sorted(late, key=lambda each: each[:2]))]


class _Read(msgspec.Struct):
    """What one part of a view was read as.

    `late`: a result that is not right behind its call, and by how many places it comes after it.
    """

    parts: list[Part]
    late: tuple[int, ToolResult] | None = None


def _read(members: JsonObject) -> _Read:
    kind = cast(str, members.pop("type"))
    record = members.pop(SOURCE, None)
    found: JsonObject = record if isinstance(record, dict) else {}
    form = FORMS.get(kind)
    if form is None:
        return _Read([_read_plain(kind, members, found)])
    if form.together:
        return _read_unified(form, members, found)
    return _Read([_read_half(form, members, found)])


def _read_half(form: Form, members: JsonObject, record: JsonObject) -> Part:
    shared = cast(str | None, members.pop("id", None))
    payload = dict(cast(JsonObject, members.pop(form.call or form.response)))
    kind = cast(str, payload.pop("type"))
    implied: Execution = _usual(kind) if form.type.startswith("tool_") else "server"
    if form.response:
        part: ToolCall | ToolResult = ToolResult(kind=kind, payload=payload, call_id=shared, extra=members)
    else:
        name = cast(str, members.pop("name"))
        part = ToolCall(kind=kind, name=name, payload=payload, call_id=shared, extra=members)
        if same(members.get("arguments"), _arguments(part)):
            members.pop("arguments", None)
    part.extra |= _aside(record)
    _remember(part, record, implied)
    return part


def _aside(record: JsonObject) -> JsonObject:
    found = record.get("aside")
    return found if isinstance(found, dict) else {}


def _read_unified(form: Form, members: JsonObject, record: JsonObject) -> _Read:
    shared, name = cast(str | None, members.pop("id", None)), cast(str, members.pop("name"))
    status = _taken_status(form, members)
    made: list[ToolCall | ToolResult] = []
    for key, half in ((form.call, "call"), (form.response, "response")):
        if key not in members:
            continue
        payload = dict(cast(JsonObject, members.pop(key)))
        kind = cast(str, payload.pop("type"))
        part: ToolCall | ToolResult
        if half == "call":
            part = ToolCall(kind=kind, name=name, payload=payload, call_id=shared)
        else:
            part = ToolResult(kind=kind, payload=payload, call_id=shared)
        said = record.get(half)
        known: JsonObject = said if isinstance(said, dict) else {}
        _remember(part, {"status": status, **known}, "server")
        for own in cast(list[str], known.get("members", [])):
            part.extra[own] = members.pop(own)
        part.extra |= _aside(known)
        made.append(part)
    if isinstance(made[0], ToolResult) and name != made[0].kind:
        members["name"] = name
    made[0].extra = {**members, **made[0].extra}
    after = record.get("response_after")
    if len(made) > 1 and isinstance(after, int) and not isinstance(after, bool):
        return _Read([made[0]], (after, cast(ToolResult, made[1])))
    return _Read([*made])


def _taken_status(form: Form, members: JsonObject) -> Json:
    """What the object says of its status; words that nobody knows stay where they are."""
    if form.type == "server_tool":
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


def _remember(part: ToolCall | ToolResult, record: JsonObject, implied: Execution) -> None:
    said, status = record.get("id"), record.get("status")
    part.id = said if isinstance(said, str) else part.call_id
    part.vendor_type = _text(record.get("type"))
    part.status = cast(Status, status) if status in _STATUSES else None
    execution = record.get("execution")
    part.execution = cast(Execution, execution) if execution in _SIDES else implied
    part.provenance = "synthesized" if record.get("provenance") == "synthesized" else "observed"
    part.source = _source(record)


def _read_plain(kind: str, members: JsonObject, record: JsonObject) -> Part:
    source = _source(record)
    if kind == ITEM and source is not None:
        return Other(type=_text(record.get("type")), source=source, extra=members)
    if kind not in PLAIN:
        return Other(type=kind, extra=members)
    taken = {key: cast(str, members.pop(key)) for key in PLAIN[kind]}
    match kind:
        case "text":
            role = _text(record.get("role")) or "assistant"
            return Text(content=taken["content"], role=role, source=source, extra=members)
        case "reasoning":
            return Reasoning(content=taken["content"], source=source, extra=members)
        case _:
            mime = cast(str | None, members.pop("mime_type", None))
            made = {"blob": Blob, "file": File, "uri": Uri}[kind]
            return made(**taken, mime_type=mime, source=source, extra=members)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _source(record: JsonObject) -> Source | None:
    """What was written by `_way_back`; raises what reading JSON of another shape raises."""
    vendor = record.get("vendor")
    if not isinstance(vendor, str):
        return None
    moved = [_move(entry) for entry in cast(list[Json], record.get("moved", []))]
    envelope, place = record.get("envelope"), record.get("place", 0)
    if not isinstance(place, int):
        raise ValueError("`place` is no number")
    return Source(
        vendor=vendor,
        item=record.get("item", msgspec.UNSET),
        follows=record.get("follows") is True,
        moved=moved,
        place=place,
        envelope=None if envelope is None else _envelope(cast(JsonObject, envelope)),
    )


def _move(entry: Json) -> Move:
    field, path, *lens = cast(list[Json], entry)
    return Move(_text(field), _path(path), _text(lens[0]) if lens else "")


def _envelope(record: JsonObject) -> Envelope:
    places = [_path(place) for place in cast(list[Json], record["places"])]
    return Envelope(document=record["document"], places=places)


def _path(value: Json) -> Path:
    return msgspec.convert(value, tuple[str | int, ...])


# --- from the form before option 1 --------------------------------------------------------------------


def upgrade(part: Json) -> Json:
    """A call or response as it was before payloads had types, as option 1 has it; anything else as it is.

    Tools were functions then, so that is what they become, unless the response says what it is. Members that option 1
    gives another meaning are kept in `fumehood.before`.
    """
    if not isinstance(part, dict) or not problem_of(part) or problem_of(part, compat=True):
        return part
    form = FORMS[cast(str, part["type"])]
    aside = form.forbidden | ({form.call} if form.call else frozenset[str]())
    before = {key: value for key, value in part.items() if key in aside}
    kept: JsonObject = {key: value for key, value in part.items() if key not in aside}
    if before:
        kept["fumehood.before"] = before
    if form.call:
        return {**kept, form.call: {"type": "function", "arguments": part.get("arguments")}}
    return {**kept, form.response: {"type": "function", "result": part.get("response")}}
