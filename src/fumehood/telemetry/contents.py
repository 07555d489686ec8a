"""What was said, as messages of the conventions, bounded and redacted; imports msgspec, and what is below.

Recorded only where the operator asks for it. What goes wrong here costs the content, never the rest.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, override

import msgspec

from fumehood.parts.canonical import Json, JsonObject, Part, Reasoning, Text, ToolCall, ToolResult
from fumehood.parts.content import CUT_PART, bounded, redacted, without_data
from fumehood.parts.convert import from_vendor
from fumehood.parts.messages import finish_reason, to_messages
from fumehood.parts.validate import validate
from fumehood.parts.views import SOURCE, to_view
from fumehood.protocol import models
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.telemetry.conventions import LONGEST, finish_reason_of
from fumehood.telemetry.seen import CallSeen, Listener, RunSeen, Seen, TurnSeen

_LOOKED_AT = 4  # times as much may be read to find what is recorded

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
INSTRUCTIONS, DEFINITIONS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
ARGUMENTS, RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"

type ProfileName = Literal["option1", "option2", "option3", "option3-alternative", "phoenix"]


@dataclass(frozen=True, slots=True)
class Profile:
    """The view of `parts` that messages are written in, and whether what leads back to the items is recorded, too."""

    view: str
    way_back: bool = True


PROFILES: dict[ProfileName, Profile] = {
    "option1": Profile("option1"),
    "option2": Profile("option2"),
    "option3": Profile("option3"),
    "option3-alternative": Profile("option3-alternative"),
    "phoenix": Profile("option1", way_back=False),
}

# Tools that models are offered as functions, and that are more than that to everybody else: the argument that matters.
_HOSTED = {"code_interpreter": "code", "shell": "commands"}


class Contents(Listener):
    """Puts what was said into what has ended, before that is forgotten.

    in_spans, in_events: who of them wants it.
    longest: bytes for all attributes of a span together; half of them are for the output.
    """

    def __init__(
        self,
        profile: ProfileName = "option2",
        *,
        in_spans: bool = True,
        in_events: bool = False,
        longest: int = LONGEST,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self.in_spans = in_spans
        self.in_events = in_events
        self._profile = PROFILES[profile]
        self._longest = longest
        self._redact = redact

    @override
    def ended(self, seen: Seen) -> None:
        if not self.in_events and not seen.sampled:
            return
        match seen:
            case RunSeen(request=CreateResponse() as request):
                seen.content = self._of_run(request, seen.response)
            case TurnSeen(request=models.ModelRequest() as request):
                seen.content = self._of_turn(request, seen)
            case CallSeen():
                seen.content = self._of_call(seen)
            case _:
                pass

    # ---- runs, turns, calls ---------------------------------------------------------------------------------------

    def _of_run(self, request: CreateResponse, response: Response | None) -> JsonObject:
        given = request.input if isinstance(request.input, list) else []
        raws, left_out = _latest([bytes(raw) for raw in reversed(given)], _LOOKED_AT * self._longest)
        asked: list[Part] = _from_items(raws)
        if isinstance(request.input, str):
            left_out = int(len(request.input) > _LOOKED_AT * self._longest)
            asked = [] if left_out else [Text(content=request.input, role="user")]
        told = request.instructions
        instructions: list[Part] = [Text(content=told, role="system")] if isinstance(told, str) else []
        if isinstance(told, list):
            instructions = _from_items([bytes(raw) for raw in told])
        tools = _definitions(map(msgspec.json.decode, request.tools or ()))
        found = self._asked(asked, left_out, instructions, tools)
        if response is not None:
            parts = from_vendor("openai", msgspec.json.decode(msgspec.json.encode(response.output)))
            ending = _ending(response, parts)
            found[OUTPUT] = self._messages(parts, self._longest // 2, ending, way_back=self._profile.way_back)
        return found

    def _of_turn(self, request: models.ModelRequest, turn: TurnSeen) -> JsonObject:
        entries = (entry for segment in reversed(request.segments) for entry in reversed(segment.entries))
        raws, left_out = _latest((entry.raw for entry in entries), _LOOKED_AT * self._longest)
        told = request.instructions
        instructions: list[Part] = [] if told is None else [Text(content=told, role="system")]
        functions: list[JsonObject] = [
            {
                "type": "function",
                "name": each.name,
                "description": each.description,
                "parameters": msgspec.json.decode(each.parameters),
            }
            for each in request.functions
        ]
        others: list[JsonObject] = [
            {"type": each.type, "name": each.name or each.type} for each in request.others
        ]
        found = self._asked(_from_items(raws), left_out, instructions, [*functions, *others])
        ending = turn.finish_reason or "error"
        found[OUTPUT] = self._messages(_said(turn.pieces or ()), self._longest // 2, ending)
        return found

    def _of_call(self, call: CallSeen) -> JsonObject:
        found: JsonObject = {}
        for name, text in ((ARGUMENTS, call.arguments), (RESULT, call.output)):
            if text:
                part: list[Part] = self._cleaned([Text(content=text)])
                written = bounded(to_view(self._profile.view, part), self._longest // 2)
                found[name] = "" if not written else written[0].get("content", "")
        return found

    def _asked(
        self, asked: list[Part], left_out: int, instructions: list[Part], tools: list[JsonObject]
    ) -> JsonObject:
        found: JsonObject = {INPUT: self._messages(asked, self._longest // 4, None, left_out)}
        if instructions:
            written = _bare(to_view(self._profile.view, self._cleaned(instructions)))
            found[INSTRUCTIONS] = [*bounded(written, self._longest // 8)]
        if tools:
            found[DEFINITIONS] = [*_within(self._redacted(tools), self._longest // 8)]
        return found

    # ---- what may be told, and how much of it ---------------------------------------------------------------------

    def _cleaned(self, parts: list[Part]) -> list[Part]:
        parts = without_data(parts)
        return parts if self._redact is None else redacted(parts, self._redact)

    def _redacted(self, tools: list[JsonObject]) -> list[JsonObject]:
        if self._redact is None:
            return tools
        return [{"type": tool["type"], "name": tool["name"]} for tool in tools]

    def _messages(
        self,
        parts: list[Part],
        share: int,
        ending: str | None,
        left_out: int = 0,
        *,
        way_back: bool = False,
    ) -> list[Json]:
        if left_out:
            called = {part.call_id for part in parts if isinstance(part, ToolCall)}
            parts = [part for part in parts if not isinstance(part, ToolResult) or part.call_id in called]
        messages = to_messages(self._profile.view, self._cleaned(parts), ending)
        each = share // max(1, len(messages))
        messages = [_bounded_message(message, each, way_back=way_back) for message in messages]
        while messages and (_size(messages) > share or validate([*messages])):
            gone = max(1, len(messages) // 2)
            left_out += sum(len(_parts_of(message)) for message in messages[:gone])
            messages = messages[gone:]
        if left_out:
            cut: JsonObject = {"role": "system", "parts": [{"type": CUT_PART, "parts": left_out}]}
            messages.insert(0, cut if ending is None else {**cut, "finish_reason": ending})
        return [*messages]


def _size(value: Json | Sequence[JsonObject]) -> int:
    return len(json.dumps(value))


def _parts_of(message: JsonObject) -> list[JsonObject]:
    parts = message["parts"]
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _bounded_message(message: JsonObject, share: int, *, way_back: bool) -> JsonObject:
    parts = _parts_of(message)
    return {**message, "parts": [*bounded(parts if way_back else _bare(parts), share)]}


def _bare(parts: list[JsonObject]) -> list[JsonObject]:
    """Without what leads back to the items."""
    return [{key: value for key, value in part.items() if key != SOURCE} for part in parts]


def _within(tools: list[JsonObject], share: int) -> list[JsonObject]:
    """Tools with all that is known of them, or without their parameters, or only their names, or only some of those."""
    for kept in (None, ("type", "name", "description"), ("type", "name")):
        found = tools if kept is None else [{key: tool[key] for key in kept if key in tool} for tool in tools]
        if _size(found) <= share:
            return found
    return [{"type": tool["type"], "name": tool["name"]} for tool in tools[: share // 300]]


def _definitions(tools: Iterable[Json]) -> list[JsonObject]:
    """What may be told of the tools of a request; the settings of some hold secrets."""
    found: list[JsonObject] = []
    for tool in tools:
        if isinstance(tool, dict):
            kept = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            kind = str(tool.get("type", "function"))
            named = {"type": kind, "name": str(tool.get("name") or kind)}
            found.append({**named, **kept} if kind == "function" else {**named})
    return found


# --- items and events as parts ------------------------------------------------------------------------


def _from_items(raws: Sequence[bytes]) -> list[Part]:
    return from_vendor("openai", [msgspec.json.decode(raw) for raw in raws]) if raws else []


def _latest(newest_first: Iterable[bytes], bytes_left: int) -> tuple[list[bytes], int]:
    """The last items that are not too much to be looked at, in their order, and how many came before them."""
    found: list[bytes] = []
    left_out = 0
    for raw in newest_first:
        bytes_left -= len(raw)
        if bytes_left < 0:
            left_out += 1
        else:
            found.append(raw)
    return found[::-1], left_out


def _ending(response: Response, parts: list[Part]) -> str:
    if response.status in ("failed", "cancelled"):
        return finish_reason_of(response.status)
    if response.incomplete_details is not None:
        return finish_reason_of(response.incomplete_details.reason)
    return finish_reason(parts)


def _said(pieces: Iterable[models.AnyModelEvent]) -> list[Part]:
    """The events of a turn as the parts of a message."""
    parts: list[tuple[Part, list[str]]] = []
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        match piece:
            case models.Text(delta=delta) | models.Refused(delta=delta):
                _continue(parts, Text, delta)
            case models.Thought(delta=delta) | models.Summary(delta=delta):
                _continue(parts, Reasoning, delta)
            case models.CallStarted():
                kind = piece.name if piece.name in _HOSTED else "function"
                call = ToolCall(
                    kind=kind, name=piece.name, payload={}, call_id=piece.call_id, execution="client"
                )
                calls[piece.key] = []
                parts.append((call, calls[piece.key]))
            case models.CallArguments():
                calls[piece.key].append(piece.delta)
            case models.ItemPassed():
                parts += [(part, []) for part in _from_items([bytes(piece.item)])]
            case _:
                pass
    for part, written in parts:
        if isinstance(part, Text | Reasoning) and written:
            part.content = "".join(written)
        elif isinstance(part, ToolCall) and not part.payload:
            part.payload = _payload(part.kind, _arguments("".join(written)))
    return [part for part, _ in parts]


def _continue(parts: list[tuple[Part, list[str]]], kind: type[Text | Reasoning], delta: str) -> None:
    if not parts or not isinstance(parts[-1][0], kind) or not parts[-1][1]:
        parts.append((kind(content=""), []))
    parts[-1][1].append(delta)


def _payload(kind: str, arguments: Json) -> JsonObject:
    if kind == "function":
        return {"arguments": arguments}
    field = _HOSTED[kind]
    return {field: arguments.get(field) if isinstance(arguments, dict) else None}


def _arguments(written: str) -> Json:
    try:
        return msgspec.json.decode(written)
    except (ValueError, RecursionError):
        return written
