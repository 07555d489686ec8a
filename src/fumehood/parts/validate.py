"""Tells what is wrong with parts, one by one and as pairs; imports its siblings."""

from collections.abc import Iterator
from typing import cast

import msgspec

from fumehood.parts.canonical import Json, JsonObject
from fumehood.parts.forms import FORMS, problem_of


class Problem(msgspec.Struct, frozen=True):
    """`where` is the part's place in what was given, such as `[2]` or `[0].parts[1]`."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason


def validate(document: Json, *, compat: bool = False) -> list[Problem]:
    """All problems of a part, a list of parts, or messages with parts, in their order."""
    found: list[Problem] = []
    pairing = _Pairing()
    for where, part in _parts(document):
        if reason := problem_of(part, compat=compat):
            found.append(Problem(where, reason))
        else:
            found += [Problem(where, reason) for reason in pairing.add(cast(JsonObject, part))]
    return found


def _parts(document: Json) -> Iterator[tuple[str, Json]]:
    entries = document if isinstance(document, list) else [document]
    for number, entry in enumerate(entries):
        where = f"[{number}]" if isinstance(document, list) else ""
        if isinstance(entry, dict) and "type" not in entry and isinstance(entry.get("parts"), list):
            for inner, part in enumerate(cast(list[Json], entry["parts"])):
                yield f"{where}.parts[{inner}]", part
        else:
            yield where, entry


class _Pairing:
    """What a sequence of parts said so far, by id: which kind was called, and whether it was answered."""

    def __init__(self) -> None:
        self._called: dict[str, str] = {}
        self._answered: set[str] = set()
        self._open: dict[str, int] = {}

    def add(self, part: JsonObject) -> Iterator[str]:
        form = FORMS.get(cast(str, part["type"]))
        if form is None:
            return
        shared = part.get("id")
        for key, side in ((form.call, "call"), (form.response, "response")):
            if not key or key not in part:
                continue
            payload = part[key]
            # Before payloads had types, all tools were functions.
            kind = payload.get("type") if isinstance(payload, dict) else "function"
            said = str(kind)
            if side == "call":
                yield from self._call(shared, said)
            else:
                # One object for both halves may hold a response whose call was in an earlier message.
                yield from self._response(shared, said, alone=not form.together)

    def _call(self, shared: Json, kind: str) -> Iterator[str]:
        if not isinstance(shared, str):
            self._open[kind] = self._open.get(kind, 0) + 1
        elif shared in self._called:
            yield f"the id {shared} is called a second time"
        elif shared in self._answered:
            yield f"the call {shared} comes after its response"
        else:
            self._called[shared] = kind

    def _response(self, shared: Json, kind: str, *, alone: bool) -> Iterator[str]:
        if not isinstance(shared, str):
            if self._open.get(kind):
                self._open[kind] -= 1
            elif alone:
                yield f"a {kind} response without an id has no call before it"
            return
        if shared in self._answered:
            yield f"the call {shared} is answered a second time"
        elif shared not in self._called:
            if alone:
                yield f"the response {shared} has no call before it"
        elif self._called[shared] != kind:
            yield f"the call {shared} is of the kind {self._called[shared]}, its response of the kind {kind}"
        self._answered.add(shared)
