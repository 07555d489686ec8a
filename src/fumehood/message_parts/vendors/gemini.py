"""Gemini's generateContent: code as two parts, other tools as calls or only as metadata.

The REST API writes camel case, Google's SDK snake case; both are read.
"""

import re
from typing import cast

from msgspec import UnsetType

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Json,
    JsonObject,
    JsonPath,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    ToolPart,
    UriPart,
)
from fumehood.message_parts.json_path_access import MISSING, copy_json, get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector, read_int, read_object
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_error,
    draft_tool_parts,
    map_fallback,
    map_fields,
)

_KINDS_BY_TOOL = {
    "GOOGLE_SEARCH_WEB": "web_search",
    "GOOGLE_SEARCH_IMAGE": "image_search",
    "FILE_SEARCH": "file_search",
    "URL_CONTEXT": "url_context",
    "GOOGLE_MAPS": "google_maps",
}


_KINDS_WITH_QUERIES = ("web_search", "image_search", "file_search", "google_maps")


def _call_mapping(tool: str, kind: str) -> ItemMapping:
    return ItemMapping(
        type=f"toolCall:{tool}",
        kind=kind,
        call=(
            *(map_fields(queries="args.queries") if kind in _KINDS_WITH_QUERIES else ()),
            *map_fallback("arguments", "args"),
        ),
        status=(),
        template={"toolCall": {"toolType": tool, "args": {}}},
    )


def _response_mapping(tool: str, kind: str) -> ItemMapping:
    return ItemMapping(
        type=f"toolResponse:{tool}",
        kind=kind,
        response=map_fields(response=""),
        status=(),
        template={"toolResponse": {"toolType": tool, "response": {}}},
    )


# Paths are inside the member that is named before the colon.
_INNER_MAPPINGS = (
    ItemMapping(
        type="executableCode",
        kind="code_interpreter",
        call=map_fields(code="", language=""),
        status=(),
        template={"executableCode": {"language": "PYTHON", "code": ""}},
    ),
    ItemMapping(
        type="codeExecutionResult",
        kind="code_interpreter",
        response=map_fields(outputs="output|log"),
        status=("outcome",),
        template={"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": ""}},
    ),
    *(_call_mapping(tool, kind) for tool, kind in _KINDS_BY_TOOL.items()),
    *(_response_mapping(tool, kind) for tool, kind in _KINDS_BY_TOOL.items()),
    ItemMapping(
        type="functionCall",
        kind="function",
        call=map_fields(arguments="args", partial_arguments="partialArgs"),
        name=("name",),
        status=(),
        execution="client",
        template={"functionCall": {"name": "", "args": {}}},
    ),
    ItemMapping(
        type="functionResponse",
        kind="function",
        response=map_fields(result="response", parts=""),
        name=("name",),
        status=(),
        execution="client",
        template={"functionResponse": {"name": "", "response": {}}},
    ),
)
_BY_TYPE = {mapping.type: mapping for mapping in _INNER_MAPPINGS}
ITEM_MAPPINGS = tuple(mapping.nested_under((mapping.type.partition(":")[0],)) for mapping in _INNER_MAPPINGS)
_TOOL_FIELDS = tuple(dict.fromkeys(mapping.type.partition(":")[0] for mapping in _INNER_MAPPINGS))


def _to_snake_case(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter.group().lower()}", name)


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    for member in _TOOL_FIELDS:
        for spelling in (member, _to_snake_case(member)):
            inner = item.get(spelling)
            if isinstance(inner, dict) and (mapping := _mapping_of(member, inner)):
                return draft_tool_parts(item, mapping.nested_under((spelling,)))
    if isinstance(item.get("text"), str):
        part = ReasoningPart(content="") if item.get("thought") is True else TextPart(content="")
        return [PartSkeleton(part, map_fields(content="text"))]
    for member in ("audioTranscription", "audio_transcription"):
        if get_text_at_path(item, (member, "text")) is not None:
            return [PartSkeleton(TextPart(content=""), map_fields(content=f"{member}.text"))]
    if item.get("type") == "error" or (item.keys() == {"error"} and isinstance(item["error"], dict)):
        return draft_error()
    return _draft_media(item)


def _mapping_of(member: str, inner: JsonObject) -> ItemMapping | None:
    """Return the mapping of a part; an unknown tool becomes a kind of its own."""
    if member not in ("toolCall", "toolResponse"):
        return _BY_TYPE[member]
    tool = get_text_at_path(inner, ("toolType",)) or get_text_at_path(inner, ("tool_type",))
    if not tool:
        return None
    make = _call_mapping if member == "toolCall" else _response_mapping
    return _BY_TYPE.get(f"{member}:{tool}") or make(tool, tool.lower())


def _draft_media(item: JsonObject) -> list[PartSkeleton]:
    for member, mime_name in (("inlineData", "mimeType"), ("inline_data", "mime_type")):
        if isinstance(get_at_path(item, (member, "data")), str):
            mime = get_text_at_path(item, (member, mime_name))
            part = BlobPart(content="", modality=_modality_of(mime), mime_type=mime)
            fields = (FieldMapping("content", (member, "data")), *_name_fields(member))
            return [PartSkeleton(part, fields)]
    for member, mime_name, uri in (
        ("fileData", "mimeType", "fileUri"),
        ("file_data", "mime_type", "file_uri"),
    ):
        if isinstance(get_at_path(item, (member, uri)), str):
            mime = get_text_at_path(item, (member, mime_name))
            return [
                PartSkeleton(
                    UriPart(uri="", modality=_modality_of(mime), mime_type=mime),
                    (FieldMapping("uri", (member, uri)), *_name_fields(member)),
                )
            ]
    return []


def _name_fields(member: str) -> list[FieldMapping]:
    return [FieldMapping("filename", (member, name)) for name in ("displayName", "display_name")]


def _modality_of(mime: str | None) -> str:
    return (mime or "file").partition("/")[0]


# --- whole responses ----------------------------------------------------------------------------------


def find_item_lists(document: Json) -> list[JsonPath]:
    """Parts are in the content of candidates; a stream is a list of responses, a conversation a list of contents."""
    if isinstance(document, list):
        return [(number, *path) for number, entry in enumerate(document) for path in find_item_lists(entry)]
    if not isinstance(document, dict):
        return []
    if isinstance(document.get("parts"), list):
        return [("parts",)]
    found = [
        ("candidates", number, "content", "parts")
        for number, _ in enumerate(_read_list(document, "candidates"))
    ]
    return [path for path in found if isinstance(get_at_path(document, path), list)]


def _read_list(value: Json | None, *names: str) -> list[Json]:
    for name in names:
        inner = value.get(name) if isinstance(value, dict) else None
        if isinstance(inner, list):
            return inner
    return []


def derive_calls(document: Json, observed: list[Part]) -> list[ToolPart]:
    """Derive searches and fetches from a candidate's metadata, unless their calls are among the parts."""
    seen = {part.kind for part in observed if isinstance(part, ToolCallPart)}
    made: list[ToolPart] = []
    for entry in document if isinstance(document, list) else [document]:
        for candidate in _read_list(entry, "candidates"):
            made += [part for part in _derive_from_metadata(candidate) if part.kind not in seen]
    return made


def _derive_from_metadata(candidate: Json) -> list[ToolPart]:
    if not isinstance(candidate, dict):
        return []
    made: list[ToolPart] = []
    grounding = candidate.get("groundingMetadata") or candidate.get("grounding_metadata")
    chunks = _read_list(grounding, "groundingChunks", "grounding_chunks")
    for kind, call_ids, member, names in _GROUNDING_TOOLS:
        listed = _read_list(grounding, call_ids, _to_snake_case(call_ids))
        queries: list[Json] = [query for query in listed if isinstance(query, str)]
        results = _read_grounding_chunks(chunks, member, names)
        if queries or results:
            made += _synthesize_pair(kind, {"queries": queries or None}, {"results": results})
    fetched = candidate.get("urlContextMetadata") or candidate.get("url_context_metadata")
    if pages := _read_list(fetched, "urlMetadata", "url_metadata"):
        urls = [
            get_text_at_path(page, ("retrievedUrl",)) or get_text_at_path(page, ("retrieved_url",))
            for page in pages
        ]
        made += _synthesize_pair("url_context", {"urls": [url for url in urls if url]}, {"results": pages})
    return made


# Searches in grounding metadata: their queries, if present, and their results.
_GROUNDING_TOOLS: tuple[tuple[str, str, str, dict[str, tuple[str, ...]]], ...] = (
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


def _read_grounding_chunks(chunks: list[Json], member: str, names: dict[str, tuple[str, ...]]) -> list[Json]:
    """Read chunks of one type, with our names for their fields."""
    found: list[Json] = []
    for chunk in chunks:
        inner = _read_either_spelling(chunk, member)
        if isinstance(inner, dict):
            named = {ours: _read_first_text(inner, theirs) for ours, theirs in names.items()}
            found.append({name: value for name, value in named.items() if value is not None})
    return found


def _read_first_text(value: JsonObject, names: tuple[str, ...]) -> str | None:
    texts = (_read_either_spelling(value, name) for name in names)
    return next((text for text in texts if isinstance(text, str)), None)


def _read_either_spelling(value: Json, name: str) -> Json | UnsetType:
    """Read a member in camel case or snake case."""
    found = get_at_path(value, (name,))
    return get_at_path(value, (_to_snake_case(name),)) if found is MISSING else found


def _synthesize_pair(kind: str, call: JsonObject, result: JsonObject) -> list[ToolPart]:
    return [
        ToolCallPart(kind=kind, name=kind, payload=call, provenance="synthesized"),
        ToolCallResponsePart(kind=kind, payload=result, provenance="synthesized"),
    ]


# --- the stream ----------------------------------------------------------------------------------------


_RESPONSE_FIELDS = frozenset(
    name
    for field in ("candidates", "usageMetadata", "promptFeedback", "modelVersion", "responseId", "error")
    for name in (field, _to_snake_case(field))
)


class GeminiStream(VendorStreamCollector):
    """Each chunk is a response. Parts are appended, other members replaced."""

    def __init__(self) -> None:
        super().__init__()
        self._response: JsonObject = {}
        self._candidates: dict[int, JsonObject] = {}
        self._parts: dict[int, list[tuple[JsonObject, list[str]]]] = {}

    def recognizes(self, event: JsonObject) -> bool:
        return not event.keys().isdisjoint(_RESPONSE_FIELDS)

    def feed(self, event: JsonObject) -> None:
        self._response |= {key: copy_json(value) for key, value in event.items() if key != "candidates"}
        candidates = event.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else []:
            if isinstance(candidate, dict):
                self._add_candidate(read_int(candidate, "index"), candidate)

    def _add_candidate(self, index: int, candidate: JsonObject) -> None:
        known = self._candidates.setdefault(index, {})
        content = read_object(candidate, "content")
        known |= {key: copy_json(value) for key, value in candidate.items() if key != "content"}
        known["content"] = {
            **read_object(known, "content"),
            **{k: v for k, v in content.items() if k != "parts"},
        }
        parts = content.get("parts")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict):
                self._append_part(self._parts.setdefault(index, []), part)

    def _append_part(self, parts: list[tuple[JsonObject, list[str]]], part: JsonObject) -> None:
        """Append a part; text is joined only when it is read."""
        last, deltas = parts[-1] if parts else ({}, [])
        if _is_text(last) and _is_text(part) and last.get("thought") == part.get("thought"):
            deltas.append(cast(str, part["text"]))
        else:
            started = [cast(str, part["text"])] if _is_text(part) else []
            parts.append((cast(JsonObject, copy_json(part)), started))

    def build_document(self) -> Json:
        candidates: list[Json] = []
        for index in sorted(self._candidates):
            known = self._candidates[index]
            parts: list[Json] = [
                {**part, "text": "".join(deltas)} if deltas else part
                for part, deltas in self._parts.get(index, [])
            ]
            content: JsonObject = {**read_object(known, "content"), "parts": parts}
            candidates.append({**known, "content": content})
        return {"candidates": candidates, **self._response} if candidates else {**self._response}


def _is_text(part: JsonObject) -> bool:
    return isinstance(part.get("text"), str) and part.keys() <= {"text", "thought"}


VENDOR = VendorCodec(
    name="gemini",
    title="Gemini generateContent",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate({"text": ""}, ("text",)),
    reasoning=TextItemTemplate({"text": "", "thought": True}, ("text",)),
    find_item_lists=find_item_lists,
    derive_calls=derive_calls,
    stream=GeminiStream,
)
