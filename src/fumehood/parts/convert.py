"""From any vendor's items to parts and back, and to another vendor's; imports its siblings."""

import json
from typing import cast

import msgspec

from fumehood.parts.canonical import (
    Envelope,
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
    pairs,
)
from fumehood.parts.forms import VIEWS, Malformed
from fumehood.parts.lenses import LENSES, MISSING, at, copied, put_at, text_at
from fumehood.parts.shapes import Saying, Shape, Vendor, lift, lower, whole
from fumehood.parts.vendors import VENDORS
from fumehood.parts.views import SOURCE, from_view, to_view


class NoSuchVendor(Exception):
    """The vendor's name is not one of `VENDORS`."""


def vendor_named(name: str) -> Vendor:
    found = VENDORS.get(name)
    if found is None:
        raise NoSuchVendor(f"There is no vendor {name!r}; there are {', '.join(VENDORS)}.")
    return found


# --- from the vendor ----------------------------------------------------------------------------------


def from_vendor(name: str, document: Json) -> list[Part]:
    """The parts of a list of items, of one item, or of a whole response. Takes any JSON and loses nothing of it."""
    vendor = vendor_named(name)
    places = vendor.places(document)
    if not places and isinstance(document, list):
        parts = _lifted(vendor, document, 0)
        _settle(parts)
        return parts
    left = copied(document)
    parts: list[Part] = []
    for number, place in enumerate(places):
        parts += _lifted(vendor, cast(list[Json], at(document, place)), number)
        left = put_at(left, place, None)
    if not parts:
        places, left = [()], None
        parts = _lifted(vendor, [document], 0)
    envelope = Envelope(document=left, places=places)
    parts[0].source = msgspec.structs.replace(cast(Source, parts[0].source), envelope=envelope)
    for part in vendor.derived(document, parts):
        part.source = Source(vendor=vendor.name)
        parts.append(part)
    _settle(parts)
    return parts


def _lifted(vendor: Vendor, items: list[Json], place: int) -> list[Part]:
    parts: list[Part] = []
    for item in items:
        if isinstance(item, dict):
            parts += lift(vendor.name, item, vendor.claims(item), place)
        else:
            parts.append(whole(vendor.name, item, place))
    return parts


def _settle(parts: list[Part]) -> None:
    """What only the pair tells: a result is run where its call was."""
    for call_at, result_at in pairs(parts):
        if call_at is not None and result_at is not None:
            call, result = parts[call_at], parts[result_at]
            if isinstance(call, ToolCall) and isinstance(result, ToolResult):
                result.execution = call.execution


# --- to a vendor --------------------------------------------------------------------------------------


def to_vendor(name: str, parts: list[Part], left_out: list[Part] | None = None) -> Json:
    """What `from_vendor` was given, if the parts came from this vendor; else its nearest words for them.

    Parts that were only derived from what stands beside the items do not become items of their own vendor. Those that
    the vendor has no words for are added to `left_out`.
    """
    vendor = vendor_named(name)
    documents: list[_Document] = [_Document()]
    names = {part.call_id: part.name for part in parts if isinstance(part, ToolCall)}
    try:
        for group in _groups(vendor, parts):
            source = group[0].source
            if source is not None and _knows_its_item(vendor, group[0]):
                if source.envelope is not None and documents[-1].envelope is not None:
                    documents.append(_Document())
                documents[-1].envelope = source.envelope or documents[-1].envelope
                documents[-1].items.append((source.place, lower(group)))
            elif (made := _made(vendor, group, names)) is not None:
                documents[-1].items.append((0, made))
            elif left_out is not None:
                left_out += group
        return documents[0].whole() if len(documents) == 1 else _in_a_row(documents)
    except ValueError as error:
        raise Malformed(f"`{SOURCE}` does not lead back: {error}") from error


class _Document(msgspec.Struct):
    """What one call of `from_vendor` was given: items with their places in the envelope, or alone."""

    envelope: Envelope | None = None
    items: list[tuple[int, Json]] = []

    @property
    def is_list(self) -> bool:
        return self.envelope is None or (self.envelope.places == [()] and len(self.items) != 1)

    def whole(self) -> Json:
        if self.envelope is None or self.is_list:
            return [item for _, item in self.items]
        if self.envelope.places == [()]:
            return self.items[0][1]
        lists: list[list[Json]] = [[] for _ in self.envelope.places]
        for place, item in self.items:
            if not 0 <= place < len(lists):
                raise ValueError(f"there is no place {place}")
            lists[place].append(item)
        document = copied(self.envelope.document)
        for path, found in zip(self.envelope.places, lists, strict=True):
            document = put_at(document, path, [*found])
        return document


def _in_a_row(documents: list[_Document]) -> Json:
    """Parts of several documents, one after another, are a list of these."""
    made: list[Json] = []
    for document in documents:
        whole = document.whole()
        if document.is_list and isinstance(whole, list):
            made += whole
        else:
            made.append(whole)
    return made


def _groups(vendor: Vendor, parts: list[Part]) -> list[list[Part]]:
    """Parts by the item they are of: as they came from this vendor, else as it would write them."""
    results = {call: result for call, result in pairs(parts) if call is not None and result is not None}
    groups: list[list[Part]] = []
    joined: set[int] = set()
    last: _Origin | None = None
    for position, part in enumerate(parts):
        if position in joined or _is_derived(vendor, part):
            continue
        if last is not None and last.has(part):
            last.add(part)
            groups[-1].append(part)
            continue
        groups.append([part])
        last = _Origin(part) if _knows_its_item(vendor, part) else None
        result = results.get(position)
        if result is None or _knows_its_item(vendor, part) or _knows_its_item(vendor, parts[result]):
            continue
        if isinstance(part, ToolCall) and _shape_for(vendor, part).unified:
            joined.add(result)
            groups[-1].append(parts[result])
    return groups


def _knows_its_item(vendor: Vendor, part: Part) -> bool:
    source = part.source
    return source is not None and source.vendor == vendor.name and source.item is not msgspec.UNSET


class _Origin:
    """The item of the parts that stand in a row, as far as they are here."""

    def __init__(self, first: Part) -> None:
        self._source = cast(Source, first.source)
        self._taken: set[Path] = set()
        self._called: set[tuple[str | None, str]] = set()
        self.add(first)

    def add(self, part: Part) -> None:
        self._taken.update(move.path for move in _moved(part))
        if isinstance(part, ToolCall):
            self._called.add((part.call_id, part.kind))

    def has(self, part: Part) -> bool:
        """Whether it is a further part of this item, not of another whose first part was left out."""
        source = part.source
        if source is None or not source.follows or source.vendor != self._source.vendor:
            return False
        if isinstance(part, ToolResult) and (part.call_id, part.kind) not in self._called:
            return False
        return all(move.path not in self._taken and self._lacks(move) for move in source.moved)

    def _lacks(self, move: Move) -> bool:
        left = at(cast(Json, self._source.item), move.path)
        return left is not MISSING and (left is None or move.lens != "")


def _moved(part: Part) -> list[Move]:
    return part.source.moved if part.source is not None else []


def _is_derived(vendor: Vendor, part: Part) -> bool:
    told = isinstance(part, ToolCall | ToolResult) and part.provenance == "synthesized"
    return told and part.source is not None and part.source.vendor == vendor.name


# --- in another vendor's words ------------------------------------------------------------------------


def _shape_for(vendor: Vendor, part: ToolCall | ToolResult) -> Shape:
    """A kind that the vendor has no word for is written as a function's."""
    for kind in (part.kind, "function"):
        for shape in vendor.shapes:
            side = shape.call if isinstance(part, ToolCall) else shape.result
            if shape.kind == kind and side is not None:
                return shape
    raise AssertionError(f"{vendor.name} has no functions")


def _made(vendor: Vendor, group: list[Part], names: dict[str | None, str]) -> Json | None:
    """`names`: of all tools that were called, by their calls; some vendors repeat them with the result."""
    first = group[0]
    if isinstance(first, ToolCall | ToolResult):
        tools = [part for part in group if isinstance(part, ToolCall | ToolResult)]
        return _built(_shape_for(vendor, first), tools, names.get(first.call_id))
    if isinstance(first, Text):
        asked = first.role != "assistant" and vendor.asked is not None
        return _said(vendor.asked if asked else vendor.text, first.content, first.role)
    if isinstance(first, Reasoning):
        return _said(vendor.reasoning, first.content)
    if isinstance(first, Other) and first.source is not None and first.source.item is not msgspec.UNSET:
        return copied(first.source.item)
    return None


def _said(saying: Saying | None, text: str, role: str = "assistant") -> Json | None:
    if saying is None:
        return None
    item = put_at(copied(saying.begins), saying.path, text)
    return put_at(item, ("role",), role) if "role" in saying.begins else item


def _built(shape: Shape, parts: list[ToolCall | ToolResult], name: str | None) -> Json:
    item = copied(shape.begins or {"type": shape.type})
    for part in parts:
        shared = part.call_id if part.call_id is not None else part.id
        item = _filled(item, shape.call_id, shared)
        item = _filled(item, shape.id, part.id if shape.call_id and part.id is not None else shared)
        item = _filled(item, shape.name, name)
        word = text_at(item, shape.status)
        if word in _WORDS and part.status is not None:
            item = put_at(item, shape.status, _WORDS[word].get(part.status, word))
        item = _written(item, shape, part)
    return item


# By the word that an item begins with, what the vendor says instead.
_WORDS: dict[str, dict[Status, str]] = {
    "completed": {
        "in_progress": "in_progress",
        "incomplete": "incomplete",
        "failed": "failed",
        "cancelled": "incomplete",
    },
    "success": {"incomplete": "error", "failed": "error", "cancelled": "error"},
    "OUTCOME_OK": {"incomplete": "OUTCOME_FAILED", "failed": "OUTCOME_FAILED", "cancelled": "OUTCOME_FAILED"},
}


def _filled(item: Json, where: Path, value: str | None) -> Json:
    if not where or value is None or at(item, where) not in (MISSING, None, ""):
        return item
    return put_at(item, where, value)


def _written(item: Json, shape: Shape, part: ToolCall | ToolResult) -> Json:
    payload = part.payload if shape.kind == part.kind else _as_of_a_function(part)
    done: set[str] = set()
    for field in (shape.call if isinstance(part, ToolCall) else shape.result) or ():
        value = payload.get(field.name)
        if field.name in done or value is None:
            continue
        done.add(field.name)
        before = at(item, field.path)
        left = None if before is MISSING else before
        written = (
            LENSES[field.lens].put(copied(value), left) if field.lens else _as_expected(copied(value), left)
        )
        item = put_at(item, field.path, written)
    return item


def _as_of_a_function(part: ToolCall | ToolResult) -> JsonObject:
    """MCP tools are functions, too; of any other kind the payload as a whole is what was asked and answered."""
    if isinstance(part, ToolCall):
        return {"arguments": part.payload.get("arguments") if part.kind == "mcp" else part.payload}
    return {"result": part.payload.get("output") if part.kind == "mcp" else part.payload}


def _as_expected(value: Json, example: Json) -> Json:
    """Arguments and results of functions are text for some vendors and objects or lists for others."""
    if isinstance(example, str) and not isinstance(value, str):
        return json.dumps(value)
    if isinstance(example, dict) and not isinstance(value, dict):
        found = _parsed(value)
        return {"result": value} if found is None else found
    if isinstance(example, list) and not isinstance(value, list):
        return [{"text": value if isinstance(value, str) else json.dumps(value)}]
    return value


def _parsed(value: Json) -> JsonObject | None:
    try:
        found: Json = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# --- anything to anything -----------------------------------------------------------------------------


def names() -> list[str]:
    """What can be converted from and to."""
    return [*VENDORS, *VIEWS]


def convert(source: str, target: str, document: Json, left_out: list[Part] | None = None) -> Json:
    """A document of one vendor or view as another has it: a list of parts or items, or what it once was a list of.

    `left_out` is for parts that the target has no words for.
    """
    if source in VIEWS:
        written = document if isinstance(document, list) else [document]
        parts = from_view(written, compat=source == "option1-compat")
    else:
        parts = from_vendor(source, document)
    return [*to_view(target, parts)] if target in VIEWS else to_vendor(target, parts, left_out)
