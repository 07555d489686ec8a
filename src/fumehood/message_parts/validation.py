"""Validation of parts, alone and as pairs of calls and responses, and the published JSON Schemas of parts.

`python -m tools.build_message_parts` writes the schemas to `published_schemas/`, one file for each representation.
"""

from collections.abc import Iterator
from importlib import resources
from typing import cast

import msgspec

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.part_schema import TOOL_PART_TYPES, find_part_error


class PartProblem(msgspec.Struct, frozen=True):
    """location: the position of the part, such as `[2]` or `[0].parts[1]`."""

    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" if self.location else self.reason


def validate(document: Json, *, compat: bool = False) -> list[PartProblem]:
    """Return all problems of a part, a list of parts, or messages with parts, in order."""
    found: list[PartProblem] = []
    pairing = _PairingCheck()
    for location, part in _iter_parts(document):
        if reason := find_part_error(part, compat=compat):
            found.append(PartProblem(location, reason))
        else:
            found += [PartProblem(location, reason) for reason in pairing.add(cast(JsonObject, part))]
    return found


def _iter_parts(document: Json) -> Iterator[tuple[str, Json]]:
    entries = document if isinstance(document, list) else [document]
    for number, entry in enumerate(entries):
        location = f"[{number}]" if isinstance(document, list) else ""
        if isinstance(entry, dict) and "type" not in entry and isinstance(entry.get("parts"), list):
            for inner, part in enumerate(cast(list[Json], entry["parts"])):
                yield f"{location}.parts[{inner}]", part
        else:
            yield location, entry


class _PairingCheck:
    """The calls and responses of a sequence so far, by id."""

    def __init__(self) -> None:
        self._kinds_by_call_id: dict[str, str] = {}
        self._answered_ids: set[str] = set()
        self._open_calls_by_kind: dict[str, int] = {}

    def add(self, part: JsonObject) -> Iterator[str]:
        part_type = TOOL_PART_TYPES.get(cast(str, part["type"]))
        if part_type is None:
            return
        shared = part.get("id")
        for key, side in ((part_type.call, "call"), (part_type.response, "response")):
            if not key or key not in part:
                continue
            payload = part[key]
            # Before typed payloads, all tools were functions.
            kind = payload.get("type") if isinstance(payload, dict) else "function"
            kind_name = str(kind)
            if side == "call":
                yield from self._check_call(shared, kind_name)
            else:
                # An object for both halves may hold only the response to a call in an earlier message.
                yield from self._check_response(shared, kind_name, alone=not part_type.holds_both)

    def _check_call(self, shared: Json, kind: str) -> Iterator[str]:
        if not isinstance(shared, str):
            self._open_calls_by_kind[kind] = self._open_calls_by_kind.get(kind, 0) + 1
        elif shared in self._kinds_by_call_id:
            yield f"the id {shared} is called a second time"
        elif shared in self._answered_ids:
            yield f"the call {shared} comes after its response"
        else:
            self._kinds_by_call_id[shared] = kind

    def _check_response(self, shared: Json, kind: str, *, alone: bool) -> Iterator[str]:
        if not isinstance(shared, str):
            if self._open_calls_by_kind.get(kind):
                self._open_calls_by_kind[kind] -= 1
            elif alone:
                yield f"a {kind} response without an id has no call before it"
            return
        if shared in self._answered_ids:
            yield f"the call {shared} is answered a second time"
        elif shared not in self._kinds_by_call_id:
            if alone:
                yield f"the response {shared} has no call before it"
        elif self._kinds_by_call_id[shared] != kind:
            yield f"the call {shared} is of the kind {self._kinds_by_call_id[shared]}, its response of the kind {kind}"
        self._answered_ids.add(shared)


def read_published_schema(representation: str) -> bytes:
    """Return the JSON Schema of a part in this representation."""
    schemas = resources.files("fumehood.message_parts").joinpath("published_schemas")
    return schemas.joinpath(f"{representation}.json").read_bytes()
