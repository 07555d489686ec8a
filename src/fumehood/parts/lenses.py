"""Takes values out of JSON and puts them back exactly; imports `fumehood.parts.canonical`.

A lens reads one form as another: it gives what it read and what it left, and writes both back. A value is moved only
if it comes back the same, so a lens may be simple: what it does not understand stays where it was.
"""

import json
from collections.abc import Callable
from typing import cast

import msgspec

from fumehood.parts.canonical import Json, JsonObject, Path

type Taken = tuple[Json, Json]  # what was read, what is left


class Lens(msgspec.Struct, frozen=True):
    """`get` raises ValueError for what it cannot read; `put` takes anything, since parts may have been changed."""

    get: Callable[[Json], Taken]
    put: Callable[[Json, Json], Json]


def same(one: Json, other: Json) -> bool:
    """Equal as JSON text: 1, 1.0 and true are three things, and the order of keys counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        theirs = cast(JsonObject, other)
        return list(one) == list(theirs) and all(same(value, theirs[key]) for key, value in one.items())
    if isinstance(one, list):
        values = cast(list[Json], other)
        return len(one) == len(values) and all(map(same, one, values))
    return one == other or (one != one and other != other)


def copied(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    return value


# --- paths --------------------------------------------------------------------------------------------

MISSING = msgspec.UNSET


def at(value: Json, path: Path) -> Json | msgspec.UnsetType:
    if not path:
        return value
    step = path[0]
    if isinstance(value, dict) and isinstance(step, str) and step in value:
        return at(value[step], path[1:])
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return at(value[step], path[1:])
    return MISSING


def text_at(value: Json, path: Path) -> str | None:
    found = at(value, path) if path else None
    return found if isinstance(found, str) else None


def put_at(value: Json, path: Path, new: Json) -> Json:
    """`value` with `new` at `path`; members on the way that are missing are made, places in lists are not."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        if not isinstance(value, list) or not 0 <= step < len(value):
            raise ValueError(f"there is no place {step}")
        value[step] = put_at(value[step], rest, new)
        return value
    members = value if isinstance(value, dict) else {}
    members[step] = put_at(members.get(step), rest, new)
    return members


# --- the lenses, by the names that parts carry --------------------------------------------------------


def _whole(value: Json) -> Taken:
    return value, None


def _unchanged(value: Json, _left: Json) -> Json:
    return value


def _one(value: Json) -> Taken:
    return [value], None


def _only(value: Json, _left: Json) -> Json:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _log(value: Json) -> Taken:
    if not isinstance(value, str):
        raise ValueError
    return [{"type": "logs", "logs": value}], None


def _log_text(value: Json, _left: Json) -> Json:
    texts = [entry.get("logs") for entry in _objects(value)]
    return "".join(text for text in texts if isinstance(text, str))


def _stdout(value: Json) -> Taken:
    if not isinstance(value, str):
        raise ValueError
    return [{"stdout": value}], None


def _stdout_text(value: Json, _left: Json) -> Json:
    texts = [entry.get("stdout") for entry in _objects(value)]
    return "".join(text for text in texts if isinstance(text, str))


# How JSON is written inside JSON: vendors' servers differ in spaces and escapes.
_STYLES: tuple[tuple[tuple[str, str], bool], ...] = (
    ((", ", ": "), True),
    ((",", ":"), False),
    ((", ", ": "), False),
    ((",", ":"), True),
)


def _member(name: str, *, listed: bool = False) -> Lens:
    """One member of an object that is written as JSON text; alone in a list, if that is what the field wants."""

    def get(value: Json) -> Taken:
        if not isinstance(value, str):
            raise ValueError
        found: Json = json.loads(value)
        if not isinstance(found, dict) or name not in found:
            raise ValueError
        for number in range(len(_STYLES)):
            if _dumped(found, number) == value:
                taken = found[name]
                return ([taken] if listed else taken), [number, {**found, name: None}]
        raise ValueError

    def put(value: Json, left: Json) -> Json:
        taken = _only(value, None) if listed else value
        if not isinstance(left, list) or len(left) != 2 or not isinstance(left[1], dict):
            return _dumped({name: taken}, 0)
        return _dumped({**left[1], name: taken}, left[0])

    return Lens(get, put)


def _dumped(value: JsonObject, style: Json) -> str:
    known = isinstance(style, int) and 0 <= style < len(_STYLES)
    separators, ascii_only = _STYLES[style if known and isinstance(style, int) else 0]
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)


_STREAMS = ("stdout", "stderr")


def _streams(value: Json) -> Taken:
    """Anthropic's result of code: texts by stream, and files."""
    if not isinstance(value, dict):
        raise ValueError
    outputs: list[Json] = []
    left = dict(value)
    for stream in _STREAMS:
        if isinstance(value.get(stream), str):
            outputs.append({"type": "logs", "logs": value[stream], "stream": stream})
            left[stream] = None
    files = value.get("content")
    if isinstance(files, list) and all(_has_file(entry) for entry in files):
        entries = _objects(files)
        outputs += [{"type": "file", "file_id": entry["file_id"]} for entry in entries]
        left["content"] = [{**entry, "file_id": None} for entry in entries]
    if not outputs:
        raise ValueError
    return outputs, left


def _has_file(entry: Json) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("file_id"), str)


def _put_streams(value: Json, left: Json) -> Json:
    result: JsonObject = dict(left) if isinstance(left, dict) else {"content": []}
    entries = _objects(value)
    for stream in _STREAMS:
        texts = [
            str(entry.get("logs", ""))
            for entry in entries
            if entry.get("type") == "logs" and entry.get("stream", "stdout") == stream
        ]
        if texts or not isinstance(left, dict):
            result[stream] = "".join(texts)
    files = [entry for entry in entries if entry.get("type") == "file"]
    if files:
        kept = result.get("content")
        frames = kept if isinstance(kept, list) and len(kept) == len(files) else [None] * len(files)
        result["content"] = [
            {**(frame if isinstance(frame, dict) else {}), "file_id": entry.get("file_id")}
            for frame, entry in zip(frames, files, strict=True)
        ]
    return result


def _process(value: Json) -> Taken:
    """The result of one command: stdout, stderr and return_code beside whatever else, and the files that it left."""
    if not isinstance(value, dict):
        raise ValueError
    names = {"stdout": "stdout", "stderr": "stderr", "return_code": "exit_code"}
    output: JsonObject = {ours: value[theirs] for theirs, ours in names.items() if theirs in value}
    if not output:
        raise ValueError
    left: JsonObject = {key: None if key in names else inner for key, inner in value.items()}
    files = value.get("content")
    if isinstance(files, list) and files and all(_has_file(entry) for entry in files):
        entries = _objects(files)
        output["file_ids"] = [entry["file_id"] for entry in entries]
        left["content"] = [{**entry, "file_id": None} for entry in entries]
    return [output], left


def _put_process(value: Json, left: Json) -> Json:
    result: JsonObject = dict(left) if isinstance(left, dict) else {"content": []}
    for entry in _objects(value)[:1]:
        outcome = entry.get("outcome")
        told = {**(outcome if isinstance(outcome, dict) else {}), **entry}
        for ours, theirs in (("stdout", "stdout"), ("stderr", "stderr"), ("exit_code", "return_code")):
            if ours in told:
                result[theirs] = told[ours]
        files = told.get("file_ids")
        if isinstance(files, list):
            frames = _objects(result.get("content"))
            if len(frames) != len(files):
                frames = [{"type": "bash_code_execution_output"} for _ in files]
            result["content"] = [
                {**frame, "file_id": file} for frame, file in zip(frames, files, strict=True)
            ]
    return result


def _put_ran(value: Json, _left: Json) -> Json:
    """Results of commands; OpenAI has all of each, and the code in its outcome."""
    if not isinstance(value, list):
        return value
    return [_ran(entry) if isinstance(entry, dict) and "outcome" not in entry else entry for entry in value]


def _ran(entry: JsonObject) -> JsonObject:
    code = entry.get("exit_code")
    outcome: JsonObject = {"type": "exit", "exit_code": 0 if code is None else code}
    told: JsonObject = {key: value for key, value in entry.items() if key not in ("exit_code", "file_ids")}
    return {"stdout": "", "stderr": "", **told, "outcome": outcome}


def _data_url(value: Json) -> Taken:
    """The data of a `data:` URL; what is before it is left."""
    if not isinstance(value, str) or not value.startswith("data:") or ";base64," not in value:
        raise ValueError
    head, _, data = value.partition(";base64,")
    return data, f"{head};base64,"


def _put_data_url(value: Json, left: Json) -> Json:
    return f"{left}{value}" if isinstance(left, str) else value


def _objects(value: Json) -> list[JsonObject]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


LENSES = {
    "": Lens(_whole, _unchanged),
    "one": Lens(_one, _only),
    "log": Lens(_log, _log_text),
    "stdout": Lens(_stdout, _stdout_text),
    "json.code": _member("code"),
    "json.prompt": _member("prompt"),
    "json.query": _member("query", listed=True),
    "json.queries": _member("queries"),
    "streams": Lens(_streams, _put_streams),
    "process": Lens(_process, _put_process),
    "ran": Lens(_whole, _put_ran),
    "data_url": Lens(_data_url, _put_data_url),
}


def take(value: Json, lens: str) -> Taken | None:
    """What the lens reads and leaves, or None if it cannot be put back as it was."""
    try:
        taken, left = LENSES[lens].get(value)
    except (ValueError, RecursionError):
        return None
    return (taken, left) if same(LENSES[lens].put(copied(taken), copied(left)), value) else None
