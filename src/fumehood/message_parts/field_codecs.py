"""Field codecs: extract values from JSON and restore them exactly.

A codec decodes a value into what the part holds and a remainder that stays in the item, and encodes both back. A value
is extracted only if it round-trips, so a codec may be simple: what it does not understand stays in the item.
"""

import base64
import json
from collections.abc import Callable

import msgspec

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.json_path_access import copy_json, is_same_json

type Extraction = tuple[Json, Json]  # decoded value, remainder


class FieldCodec(msgspec.Struct, frozen=True):
    """`decode` raises ValueError for what it cannot read; `encode` accepts any value, since parts may be edited."""

    decode: Callable[[Json], Extraction]
    encode: Callable[[Json, Json], Json]


# --- codecs, by the names in `fumehood.source` --------------------------------------------------------


def _decode_identity(value: Json) -> Extraction:
    return value, None


def _encode_identity(value: Json, _remainder: Json) -> Json:
    return value


def _decode_single(value: Json) -> Extraction:
    return [value], None


def _encode_single(value: Json, _remainder: Json) -> Json:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _output_codec(name: str, **others: str) -> FieldCodec:
    """A codec for a text that becomes the member `name` of the only output; `others` are its other members."""

    def decode(value: Json) -> Extraction:
        if not isinstance(value, str):
            raise ValueError
        return [{**others, name: value}], None

    def encode(value: Json, _remainder: Json) -> Json:
        texts = [entry.get(name) for entry in _objects(value)]
        return "".join(text for text in texts if isinstance(text, str))

    return FieldCodec(decode, encode)


# JSON inside JSON: servers differ in spaces and escapes.
_JSON_STYLES: tuple[tuple[tuple[str, str], bool], ...] = (
    ((", ", ": "), True),
    ((",", ":"), False),
    ((", ", ": "), False),
    ((",", ":"), True),
)


def _json_member_codec(name: str, *, as_list: bool = False) -> FieldCodec:
    """A codec for one member of an object in JSON text; as a list of one if `as_list`."""

    def decode(value: Json) -> Extraction:
        if not isinstance(value, str):
            raise ValueError
        found: Json = json.loads(value)
        if not isinstance(found, dict) or name not in found:
            raise ValueError
        for number in range(len(_JSON_STYLES)):
            if _dump_json(found, number) == value:
                member = found[name]
                return ([member] if as_list else member), [number, {**found, name: None}]
        raise ValueError

    def encode(value: Json, rest: Json) -> Json:
        member = _encode_single(value, None) if as_list else value
        if not isinstance(rest, list) or len(rest) != 2 or not isinstance(rest[1], dict):
            return _dump_json({name: member}, 0)
        return _dump_json({**rest[1], name: member}, rest[0])

    return FieldCodec(decode, encode)


def _decode_json_text(value: Json) -> Extraction:
    """Parse an object in JSON text in place: the remainder is its style and the object."""
    if not isinstance(value, str):
        raise ValueError
    found: Json = json.loads(value)
    if isinstance(found, dict):
        for number in range(len(_JSON_STYLES)):
            if _dump_json(found, number) == value:
                return None, [number, found]
    raise ValueError


def _encode_json_text(_value: Json, rest: Json) -> Json:
    if not isinstance(rest, list) or len(rest) != 2 or not isinstance(rest[1], dict):
        return "{}"
    return _dump_json(rest[1], rest[0])


def parse_json_object(text: str | None) -> JsonObject:
    """Return the object in JSON text; an empty one for anything else."""
    try:
        found: Json = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _decode_base64_text(value: Json) -> Extraction:
    if not isinstance(value, str):
        raise ValueError
    return base64.b64decode(value, validate=True).decode(), None


def _encode_base64_text(value: Json, _remainder: Json) -> Json:
    return base64.b64encode(str(value).encode()).decode() if isinstance(value, str) else value


def _dump_json(value: JsonObject, style: Json) -> str:
    known = isinstance(style, int) and 0 <= style < len(_JSON_STYLES)
    separators, ascii_only = _JSON_STYLES[style if known and isinstance(style, int) else 0]
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)


_STREAM_NAMES = ("stdout", "stderr")


def _decode_streams(value: Json) -> Extraction:
    """Decode Anthropic's result of code: text by stream, and files."""
    if not isinstance(value, dict):
        raise ValueError
    outputs: list[Json] = []
    rest = dict(value)
    for stream in _STREAM_NAMES:
        if isinstance(value.get(stream), str):
            outputs.append({"type": "logs", "logs": value[stream], "stream": stream})
            rest[stream] = None
    outputs += [{"type": "file", "file_id": file_id} for file_id in _extract_file_ids(rest)]
    if not outputs:
        raise ValueError
    return outputs, rest


def _encode_streams(value: Json, remainder: Json) -> Json:
    result: JsonObject = dict(remainder) if isinstance(remainder, dict) else {"content": []}
    entries = _objects(value)
    for stream in _STREAM_NAMES:
        texts = [
            str(entry.get("logs", ""))
            for entry in entries
            if entry.get("type") == "logs" and entry.get("stream", "stdout") == stream
        ]
        if texts or not isinstance(remainder, dict):
            result[stream] = "".join(texts)
    if file_ids := [entry.get("file_id") for entry in entries if entry.get("type") == "file"]:
        result["content"] = _restore_file_ids(result.get("content"), file_ids, {})
    return result


def _decode_process(value: Json) -> Extraction:
    """Decode the result of one command: stdout, stderr and return_code, and produced files."""
    if not isinstance(value, dict):
        raise ValueError
    names = {"stdout": "stdout", "stderr": "stderr", "return_code": "exit_code"}
    output: JsonObject = {ours: value[theirs] for theirs, ours in names.items() if theirs in value}
    if not output:
        raise ValueError
    rest: JsonObject = {key: None if key in names else inner for key, inner in value.items()}
    if file_ids := _extract_file_ids(rest):
        output["file_ids"] = file_ids
    return [output], rest


def _encode_process(value: Json, remainder: Json) -> Json:
    result: JsonObject = dict(remainder) if isinstance(remainder, dict) else {"content": []}
    for entry in _objects(value)[:1]:
        outcome = entry.get("outcome")
        output = {**(outcome if isinstance(outcome, dict) else {}), **entry}
        for ours, theirs in (("stdout", "stdout"), ("stderr", "stderr"), ("exit_code", "return_code")):
            if ours in output:
                result[theirs] = output[ours]
        files = output.get("file_ids")
        if isinstance(files, list):
            new_entry: JsonObject = {"type": "bash_code_execution_output"}
            result["content"] = _restore_file_ids(result.get("content"), files, new_entry)
    return result


def _extract_file_ids(result: JsonObject) -> list[Json]:
    """Remove and return the ids of produced files in `content`; none if an entry is not a file."""
    content = result.get("content")
    entries = _objects(content)
    file_ids = [entry.get("file_id") for entry in entries]
    if not file_ids or entries != content or not all(isinstance(file_id, str) for file_id in file_ids):
        return []
    result["content"] = [{**entry, "file_id": None} for entry in entries]
    return file_ids


def _restore_file_ids(content: Json, file_ids: list[Json], new_entry: JsonObject) -> list[Json]:
    """Return the entries of `content` with these ids; new entries if their number differs."""
    entries = _objects(content)
    if len(entries) != len(file_ids):
        entries = [new_entry] * len(file_ids)
    return [{**entry, "file_id": file_id} for entry, file_id in zip(entries, file_ids, strict=True)]


def _encode_shell_outputs(value: Json, _remainder: Json) -> Json:
    """Encode results of commands in OpenAI's form, with the exit code in `outcome`."""
    if not isinstance(value, list):
        return value
    return [
        _encode_shell_output(entry) if isinstance(entry, dict) and "outcome" not in entry else entry
        for entry in value
    ]


def _encode_shell_output(entry: JsonObject) -> JsonObject:
    code = entry.get("exit_code")
    outcome: JsonObject = {"type": "exit", "exit_code": 0 if code is None else code}
    streams: JsonObject = {key: value for key, value in entry.items() if key not in ("exit_code", "file_ids")}
    return {"stdout": "", "stderr": "", **streams, "outcome": outcome}


def _decode_data_url(value: Json) -> Extraction:
    """Decode the data of a `data:` URL; the prefix is the remainder."""
    if not isinstance(value, str) or not value.startswith("data:") or ";base64," not in value:
        raise ValueError
    head, _, data = value.partition(";base64,")
    return data, f"{head};base64,"


def _encode_data_url(value: Json, remainder: Json) -> Json:
    return f"{remainder}{value}" if isinstance(remainder, str) else value


def _objects(value: Json) -> list[JsonObject]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


FIELD_CODECS = {
    "": FieldCodec(_decode_identity, _encode_identity),
    "one": FieldCodec(_decode_single, _encode_single),
    "log": _output_codec("logs", type="logs"),
    "stdout": _output_codec("stdout"),
    "json": FieldCodec(_decode_json_text, _encode_json_text),
    "base64": FieldCodec(_decode_base64_text, _encode_base64_text),
    "json.code": _json_member_codec("code"),
    "json.url": _json_member_codec("url"),
    "json.prompt": _json_member_codec("prompt"),
    "json.query": _json_member_codec("query", as_list=True),
    "json.queries": _json_member_codec("queries"),
    "streams": FieldCodec(_decode_streams, _encode_streams),
    "process": FieldCodec(_decode_process, _encode_process),
    "ran": FieldCodec(_decode_identity, _encode_shell_outputs),
    "data_url": FieldCodec(_decode_data_url, _encode_data_url),
}


def extract(value: Json, codec: str) -> Extraction | None:
    """Return the decoded value and the remainder, or None if they do not restore the value exactly."""
    try:
        extraction, rest = FIELD_CODECS[codec].decode(value)
    except (ValueError, RecursionError):
        return None
    return (
        (extraction, rest)
        if is_same_json(FIELD_CODECS[codec].encode(copy_json(extraction), copy_json(rest)), value)
        else None
    )
