"""Gemini's generateContent: code as two parts, other tools as calls or only as metadata; imports `fumehood.parts`.

The REST API writes members in camel case, Google's SDK dumps them in snake case; both are read.
"""

import re

from msgspec import UnsetType

from fumehood.parts.canonical import (
    Blob,
    Json,
    JsonObject,
    Part,
    Path,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    Uri,
)
from fumehood.parts.lenses import MISSING, at, text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields

_TOOLS = {
    "GOOGLE_SEARCH_WEB": "web_search",
    "GOOGLE_SEARCH_IMAGE": "image_search",
    "FILE_SEARCH": "file_search",
    "URL_CONTEXT": "url_context",
    "GOOGLE_MAPS": "google_maps",
}


_QUERIED = ("web_search", "image_search", "file_search", "google_maps")


def _call(tool: str, kind: str) -> Shape:
    return Shape(
        type=f"toolCall:{tool}",
        kind=kind,
        call=fields(queries="args.queries") if kind in _QUERIED else fields(arguments="args"),
        status=(),
        begins={"toolCall": {"toolType": tool, "args": {}}},
    )


def _response(tool: str, kind: str) -> Shape:
    return Shape(
        type=f"toolResponse:{tool}",
        kind=kind,
        result=fields(response=""),
        status=(),
        begins={"toolResponse": {"toolType": tool, "response": {}}},
    )


# Each as it is inside of the member that is named before the colon.
_INNER = (
    Shape(
        type="executableCode",
        kind="code_interpreter",
        call=fields(code="", language=""),
        status=(),
        begins={"executableCode": {"language": "PYTHON", "code": ""}},
    ),
    Shape(
        type="codeExecutionResult",
        kind="code_interpreter",
        result=fields(outputs="output|log"),
        status=("outcome",),
        begins={"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": ""}},
    ),
    *(_call(tool, kind) for tool, kind in _TOOLS.items()),
    *(_response(tool, kind) for tool, kind in _TOOLS.items()),
    Shape(
        type="functionCall",
        kind="function",
        call=fields(arguments="args"),
        name=("name",),
        status=(),
        execution="client",
        begins={"functionCall": {"name": "", "args": {}}},
    ),
    Shape(
        type="functionResponse",
        kind="function",
        result=fields(result="response"),
        name=("name",),
        status=(),
        execution="client",
        begins={"functionResponse": {"name": "", "response": {}}},
    ),
)
_BY_TYPE = {shape.type: shape for shape in _INNER}
SHAPES = tuple(shape.within((shape.type.partition(":")[0],)) for shape in _INNER)
_MEMBERS = tuple(dict.fromkeys(shape.type.partition(":")[0] for shape in _INNER))


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter.group().lower()}", name)


def claims(item: JsonObject) -> list[Claim]:
    for member in _MEMBERS:
        for spelt in (member, _snake(member)):
            inner = item.get(spelt)
            if isinstance(inner, dict) and (shape := _shape_of(member, inner)):
                return claims_of(item, shape.within((spelt,)))
    if isinstance(item.get("text"), str):
        part = Reasoning(content="") if item.get("thought") is True else Text(content="")
        return [Claim(part, fields(content="text"))]
    return _medium(item)


def _shape_of(member: str, inner: JsonObject) -> Shape | None:
    """A tool of the vendor's that is not known here is a kind of its own."""
    if member not in ("toolCall", "toolResponse"):
        return _BY_TYPE[member]
    tool = text_at(inner, ("toolType",)) or text_at(inner, ("tool_type",))
    if not tool:
        return None
    make = _call if member == "toolCall" else _response
    return _BY_TYPE.get(f"{member}:{tool}") or make(tool, tool.lower())


def _medium(item: JsonObject) -> list[Claim]:
    for member, mime_name in (("inlineData", "mimeType"), ("inline_data", "mime_type")):
        if isinstance(at(item, (member, "data")), str):
            mime = text_at(item, (member, mime_name))
            part = Blob(content="", modality=_modality(mime), mime_type=mime)
            return [Claim(part, (Field("content", (member, "data")),))]
    for member, mime_name, uri in (
        ("fileData", "mimeType", "fileUri"),
        ("file_data", "mime_type", "file_uri"),
    ):
        if isinstance(at(item, (member, uri)), str):
            mime = text_at(item, (member, mime_name))
            return [
                Claim(Uri(uri="", modality=_modality(mime), mime_type=mime), (Field("uri", (member, uri)),))
            ]
    return []


def _modality(mime: str | None) -> str:
    return (mime or "file").partition("/")[0]


# --- whole responses ----------------------------------------------------------------------------------


def places(document: Json) -> list[Path]:
    """Parts are in the content of candidates; a stream is a list of responses, a conversation one of contents."""
    if isinstance(document, list):
        return [(number, *place) for number, entry in enumerate(document) for place in places(entry)]
    if not isinstance(document, dict):
        return []
    if isinstance(document.get("parts"), list):
        return [("parts",)]
    found = [
        ("candidates", number, "content", "parts") for number, _ in enumerate(_list(document, "candidates"))
    ]
    return [place for place in found if isinstance(at(document, place), list)]


def _list(value: Json | None, *names: str) -> list[Json]:
    for name in names:
        inner = value.get(name) if isinstance(value, dict) else None
        if isinstance(inner, list):
            return inner
    return []


def _texts(values: list[Json]) -> list[Json]:
    return [value for value in values if isinstance(value, str)]


def derived(document: Json, observed: list[Part]) -> list[ToolCall | ToolResult]:
    """Searches and fetches that are told in a candidate's metadata, unless their calls are among the parts."""
    seen = {part.kind for part in observed if isinstance(part, ToolCall)}
    made: list[ToolCall | ToolResult] = []
    for entry in document if isinstance(document, list) else [document]:
        for candidate in _list(entry, "candidates"):
            made += [part for part in _told(candidate) if part.kind not in seen]
    return made


def _told(candidate: Json) -> list[ToolCall | ToolResult]:
    if not isinstance(candidate, dict):
        return []
    made: list[ToolCall | ToolResult] = []
    grounding = candidate.get("groundingMetadata") or candidate.get("grounding_metadata")
    chunks = _list(grounding, "groundingChunks", "grounding_chunks")
    for kind, asked, member, names in _GROUNDED:
        queries = _texts(_list(grounding, asked, _snake(asked)))
        results = _sources(chunks, member, names)
        if queries or results:
            made += _pair(kind, {"queries": queries or None}, {"results": results})
    fetched = candidate.get("urlContextMetadata") or candidate.get("url_context_metadata")
    if pages := _list(fetched, "urlMetadata", "url_metadata"):
        urls = [text_at(page, ("retrievedUrl",)) or text_at(page, ("retrieved_url",)) for page in pages]
        made += _pair("url_context", {"urls": [url for url in urls if url]}, {"results": pages})
    return made


# Searches that leave their mark in an answer: their queries, if these are told, and what was found.
_GROUNDED: tuple[tuple[str, str, str, dict[str, tuple[str, ...]]], ...] = (
    ("web_search", "webSearchQueries", "web", {"url": ("uri",), "title": ("title",)}),
    (
        "image_search",
        "imageSearchQueries",
        "image",
        {"url": ("sourceUri",), "image_url": ("imageUri",), "title": ("title",)},
    ),
    (
        "file_search",
        "retrievalQueries",
        "retrievedContext",
        {"file_id": ("uri", "documentName"), "title": ("title",), "text": ("text",)},
    ),
    ("google_maps", "", "maps", {"url": ("uri",), "title": ("title",), "place_id": ("placeId",)}),
)


def _sources(chunks: list[Json], member: str, names: dict[str, tuple[str, ...]]) -> list[Json]:
    """What chunks of one sort say, by our names for theirs."""
    found: list[Json] = []
    for chunk in chunks:
        inner = _either(chunk, member)
        if isinstance(inner, dict):
            named = {ours: _first_text(inner, theirs) for ours, theirs in names.items()}
            found.append({name: value for name, value in named.items() if value is not None})
    return found


def _first_text(value: JsonObject, names: tuple[str, ...]) -> str | None:
    texts = (_either(value, name) for name in names)
    return next((text for text in texts if isinstance(text, str)), None)


def _either(value: Json, name: str) -> Json | UnsetType:
    """In the spelling of REST, or of the SDK."""
    found = at(value, (name,))
    return at(value, (_snake(name),)) if found is MISSING else found


def _pair(kind: str, call: JsonObject, result: JsonObject) -> list[ToolCall | ToolResult]:
    return [
        ToolCall(kind=kind, name=kind, payload=call, provenance="synthesized"),
        ToolResult(kind=kind, payload=result, provenance="synthesized"),
    ]


VENDOR = Vendor(
    name="gemini",
    title="Gemini generateContent",
    shapes=SHAPES,
    claims=claims,
    text=Saying({"text": ""}, ("text",)),
    reasoning=Saying({"text": "", "thought": True}, ("text",)),
    places=places,
    derived=derived,
)
