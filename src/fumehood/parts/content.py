"""What of a conversation may be recorded: redaction, pictures by their digests, and bounds; imports its siblings.

Whatever is done here is done to the way back as well: what was taken out of a part is not in its source either.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import msgspec

from fumehood.parts.canonical import (
    Blob,
    Envelope,
    File,
    Json,
    JsonObject,
    Other,
    Part,
    Reasoning,
    Source,
    Text,
    ToolCall,
    ToolResult,
    Uri,
)
from fumehood.parts.forms import FORMS
from fumehood.parts.lenses import same
from fumehood.parts.views import SOURCE

CUT = "fumehood.cut"
CUT_PART = "fumehood:cut"
TOO_DEEP = "[nested too deeply]"

# Members of an item that say what it is, or which one. Further inside, such names may be anybody's, and hold content.
_STRUCTURE = frozenset({"type", "id", "call_id", "tool_use_id", "tool_call_id", "status", "role", "object"})
_HEAD = frozenset({"type", "id", "name"})
_DATA_URL = r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,"
_ONLY_DATA = re.compile(_DATA_URL + r"[\w+/=%\r\n-]*", re.ASCII | re.IGNORECASE)
_DATA_IN_TEXT = re.compile(_DATA_URL + r"[\w+/%-]+={0,2}", re.ASCII | re.IGNORECASE)
# Members that hold data; what is called just `data` does where something beside it says of which sort.
_DATA = ("bytes", "file_data", "input_audio", "b64_json", "partial_image_b64")
_DATA_OF_SORT = ("data", "blob", *_DATA)
_MEDIUM = frozenset({"mime_type", "mimeType", "media_type", "format"})
_MEDIA = frozenset({"image", "audio", "video", "document", "output_audio"})
# Shorter texts may look like base64 by chance, if one does not insist on how it is spelt.
_DATA_LENGTH = 32
_LONGEST = (1 << 16, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6)

type Change = Callable[[Json], Json]


def _changed(part: Part, change: Change) -> Part:
    """The part with all its content changed, and its source."""
    made = msgspec.structs.replace(
        part, source=_changed_source(part.source, change), extra=_object(change(part.extra))
    )
    match made:
        case ToolCall() | ToolResult():
            made.payload = _object(change(made.payload))
        case Text() | Reasoning() | Blob():
            made.content = _string(change(made.content))
        case Uri():
            made.uri = _string(change(made.uri))
        case File() | Other():
            pass
    return made


def _changed_source(source: Source | None, change: Change) -> Source | None:
    if source is None:
        return None
    item = source.item
    if isinstance(item, dict):
        kept = {key: value for key, value in item.items() if key in _STRUCTURE and isinstance(value, str)}
        item = {**_object(change(item)), **kept}
    elif item is not msgspec.UNSET:
        item = change(item)
    envelope = source.envelope
    if envelope is not None:
        envelope = Envelope(document=change(envelope.document), places=envelope.places)
    return msgspec.structs.replace(source, item=item, envelope=envelope)


def _object(value: Json) -> JsonObject:
    return cast(JsonObject, value)


def _string(value: Json) -> str:
    return cast(str, value)


# --- redaction ----------------------------------------------------------------------------------------


def redacted(parts: list[Part], redact: Callable[[str], str]) -> list[Part]:
    """The parts with every text of their content as `redact` gives it back; names of tools, types and ids stay.

    A text that is JSON is given to it as it is written, and then the texts in it: escapes may hide what it looks for.
    """

    def change(value: Json) -> Json:
        if isinstance(value, str):
            shown = redact(value)
            try:
                inner = _escaped_json(shown)
                changed = change(inner)
                return shown if same(changed, inner) else json.dumps(changed)
            except RecursionError:  # what cannot be looked through is not shown
                return TOO_DEEP
        if isinstance(value, list):
            return [change(inner) for inner in value]
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        return value

    return [_changed(part, change) for part in parts]


def _escaped_json(text: str) -> Json:
    """What the text says if it is JSON with escapes in it; null if there is nothing to be found."""
    if "\\" not in text or text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def without_way_back(parts: list[Part]) -> list[Part]:
    """The parts without their vendor's items, which are content as a whole."""
    return [
        msgspec.structs.replace(
            part, source=None if part.source is None else Source(vendor=part.source.vendor)
        )
        for part in parts
    ]


# --- pictures and other data --------------------------------------------------------------------------


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """Data that was in line."""

    digest: str
    bytes: int

    @property
    def uri(self) -> str:
        return f"urn:{self.digest}"


def without_data(parts: list[Part]) -> list[Part]:
    """The parts with data in base64 replaced by what identifies it: its digest, its size, its type."""
    return [_without_data(part) for part in parts]


def _without_data(part: Part) -> Part:
    if isinstance(part, Blob):
        medium = _medium(part.content)
        source = _changed_source(part.source, _referred)
        if source is not None:
            # The address goes back to where the data was, as an address: its lens would take it for data.
            moved = [msgspec.structs.replace(move, field="uri", lens="") for move in source.moved]
            source = msgspec.structs.replace(source, moved=moved)
        extra: JsonObject = {**part.extra, "digest": medium.digest, "bytes": medium.bytes}
        return Uri(
            uri=medium.uri, modality=part.modality, mime_type=part.mime_type, source=source, extra=extra
        )
    made = _changed(part, _referred)
    if isinstance(part, ToolResult) and isinstance(made, ToolResult) and part.kind == "image_generation":
        picture = part.payload.get("result")
        medium = _drawn(picture) if isinstance(picture, str) else None
        if medium is not None:
            made.payload["result"] = {"type": "uri", "modality": "image", "uri": medium.uri, **_told(medium)}
    return made


def _drawn(picture: str) -> Medium | None:
    """A picture in line; it may also be told by its address, or in words."""
    if _is_data_url(picture):
        return _medium_of_url(picture)
    return None if _decoded(picture) is None else _medium(picture)


def _referred(value: Json) -> Json:
    if isinstance(value, list):
        return [_referred(inner) for inner in value]
    if isinstance(value, str):
        return _referred_in_text(value)
    if not isinstance(value, dict):
        return value
    made: JsonObject = {key: _referred(inner) for key, inner in value.items()}
    if name := _member_with_data(value):
        return {**made, name: None, **_told(_medium(_string(value[name])))}
    found = [inner for inner in value.values() if _is_data_url(inner)]
    return {**made, **_told(_medium_of_url(found[0]))} if found else made


def _referred_in_text(text: str) -> str:
    if _is_data_url(text):
        return _medium_of_url(text).uri
    return _DATA_IN_TEXT.sub(lambda found: _medium_of_url(found.group()).uri, text)


def _member_with_data(value: JsonObject) -> str:
    """Which member holds data in base64, by the words that vendors have for it; nothing where none does."""
    sort = value.get("type")
    if sort == "base64" and isinstance(value.get("data"), str):
        return "data"
    told = value.keys() & _MEDIUM or (isinstance(sort, str) and sort in _MEDIA)
    for name in _DATA_OF_SORT if told else _DATA:
        data = value.get(name)
        if isinstance(data, str) and _is_data(data):
            return name
    return ""


def _is_data(text: str) -> bool:
    if not text or text.isdecimal():
        return False
    return _decoded(text, strictly=len(text) < _DATA_LENGTH) is not None


def _told(medium: Medium) -> JsonObject:
    return {"digest": medium.digest, "bytes": medium.bytes}


def _is_data_url(value: Json) -> bool:
    return isinstance(value, str) and _ONLY_DATA.fullmatch(value) is not None


def _medium_of_url(value: Json) -> Medium:
    text = value if isinstance(value, str) else ""
    return _medium(unquote(text[text.find(",") + 1 :]))


def _decoded(data: str, *, strictly: bool = False) -> bytes | None:
    """Of base64 in any spelling: with the letters of URLs, in lines, without the signs at its end."""
    if not strictly:
        data = data.translate(_PLAIN)
        data += "=" * (-len(data) % 4)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None


_PLAIN = str.maketrans({"-": "+", "_": "/", "\r": None, "\n": None})


def _medium(data: str) -> Medium:
    content = _decoded(data)
    if content is None:
        content = data.encode("utf-8", "surrogatepass")
    return Medium(digest=f"sha256:{hashlib.sha256(content).hexdigest()}", bytes=len(content))


# --- bounds -------------------------------------------------------------------------------------------


def bounded(written: list[JsonObject], limit: int) -> list[JsonObject]:
    """Parts of a view that take at most `limit` bytes as JSON, and say what was cut.

    First to go is the way back, then the ends of long texts, then the last parts. What is left is valid: a cut text is
    a text, and its part tells under `fumehood.cut` how many characters are missing where.
    """
    if _size(written) <= limit:
        return written
    bare = [_without_source(part) for part in written]
    if _size(bare) <= limit:
        return bare
    for longest in _LONGEST:
        bare = [_shortened(part, longest) for part in bare]
        if _size(bare) <= limit:
            return bare
    return _fewer(bare, limit)


def _size(value: Json | list[JsonObject]) -> int:
    """With everything beyond ASCII escaped, which is never less than UTF-8 takes."""
    return len(json.dumps(value, separators=(",", ":")))


def _without_source(part: JsonObject) -> JsonObject:
    if SOURCE not in part:
        return part
    kept = {key: value for key, value in part.items() if key != SOURCE}
    return {**kept, CUT: {**_cut_before(part), SOURCE: True}}


def _cut_before(part: JsonObject) -> JsonObject:
    known = part.get(CUT)
    return known if isinstance(known, dict) else {}


def _shortened(part: JsonObject, longest: int) -> JsonObject:
    cuts: JsonObject = {}
    earlier = _cut_before(part)
    types = _types_of_payloads(part)

    def shorten(value: Json, place: str) -> Json:
        if isinstance(value, str):
            if len(value) <= longest or place in types:
                return value
            before = earlier.get(place)
            cuts[place] = len(value) - longest + (before if isinstance(before, int) else 0)
            return value[:longest]
        if isinstance(value, list):
            return [shorten(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
        if isinstance(value, dict):
            return {key: shorten(inner, f"{place}.{key}") for key, inner in value.items()}
        return value

    made: JsonObject = {}
    for key, value in part.items():
        if key != CUT:
            made[key] = value if key in _HEAD else shorten(value, key)
    told: JsonObject = {**earlier, **cuts}
    return {**made, CUT: told} if told else made


def _types_of_payloads(part: JsonObject) -> set[str]:
    """Where it is said what a payload is; without that, it would be none."""
    form = FORMS.get(str(part.get("type")))
    return set() if form is None else {f"{key}.type" for key in (form.call, form.response) if key}


def _fewer(parts: list[JsonObject], limit: int) -> list[JsonObject]:
    sizes = [_size(part) + 1 for part in parts]
    total = sum(sizes)
    for count in range(len(parts) - 1, -1, -1):
        total -= sizes[count]
        cut: JsonObject = {"type": CUT_PART, "parts": len(parts) - count}
        if total + _size([cut]) <= limit:
            return [*parts[:count], cut]
    return []
