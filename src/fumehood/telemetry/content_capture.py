"""What was said, as messages of the conventions, bounded and redacted.

Recorded only where the operator asks for it. What goes wrong here costs the content, never the rest.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, override

import msgspec

from fumehood.message_parts import (
    SOURCE_FIELD,
    TRUNCATED_PART_TYPE,
    Json,
    JsonObject,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    from_vendor,
    infer_finish_reason,
    redact_parts,
    replace_inline_data,
    to_messages,
    to_representation,
    truncate_parts,
    validate,
)
from fumehood.protocol import model_turns
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.telemetry.semantic_conventions import MAX_CONTENT_BYTES, map_finish_reason
from fumehood.telemetry.span_records import RecordListener, RunRecord, SpanRecord, ToolCallRecord, TurnRecord

_READ_FACTOR = 4  # times as much may be read to find what is recorded

INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS, TOOL_DEFINITIONS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
TOOL_CALL_ARGUMENTS, TOOL_CALL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"

type ProfileName = Literal["option1", "option2", "option3", "option3-alternative", "phoenix"]


@dataclass(frozen=True, slots=True)
class CaptureProfile:
    """The view of `parts` that messages are written in, and whether what leads back to the items is recorded, too."""

    representation: str
    keeps_vendor_items: bool = True


CAPTURE_PROFILES: dict[ProfileName, CaptureProfile] = {
    "option1": CaptureProfile("option1"),
    "option2": CaptureProfile("option2"),
    "option3": CaptureProfile("option3"),
    "option3-alternative": CaptureProfile("option3-alternative"),
    "phoenix": CaptureProfile("option1", keeps_vendor_items=False),
}

# Tools that models are offered as functions, and that are more than that to everybody else: the argument that matters.
_HOSTED_TOOL_ARGUMENTS = {"code_interpreter": "code", "shell": "commands"}


class ContentCapture(RecordListener):
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
        max_bytes: int = MAX_CONTENT_BYTES,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self.in_spans = in_spans
        self.in_events = in_events
        self._profile = CAPTURE_PROFILES[profile]
        self._max_bytes = max_bytes
        self._redactor = redact

    @override
    def on_end(self, record: SpanRecord) -> None:
        if not self.in_events and not record.is_sampled:
            return
        match record:
            case RunRecord(request=CreateResponse() as request):
                record.content = self._capture_run(request, record.response)
            case TurnRecord(request=model_turns.ModelRequest() as request):
                record.content = self._capture_turn(request, record)
            case ToolCallRecord():
                record.content = self._capture_call(record)
            case _:
                pass

    # ---- runs, turns, calls ---------------------------------------------------------------------------------------

    def _capture_run(self, request: CreateResponse, response: Response | None) -> JsonObject:
        given = request.input if isinstance(request.input, list) else []
        raws, left_out = _take_latest([bytes(raw) for raw in reversed(given)], _READ_FACTOR * self._max_bytes)
        asked: list[Part] = _parts_of_items(raws)
        if isinstance(request.input, str):
            left_out = int(len(request.input) > _READ_FACTOR * self._max_bytes)
            asked = [] if left_out else [TextPart(content=request.input, role="user")]
        told = request.instructions
        instructions: list[Part] = [TextPart(content=told, role="system")] if isinstance(told, str) else []
        if isinstance(told, list):
            instructions = _parts_of_items([bytes(raw) for raw in told])
        tools = _safe_tool_definitions(map(msgspec.json.decode, request.tools or ()))
        found = self._capture_request(asked, left_out, instructions, tools)
        if response is not None:
            parts = from_vendor("openai", msgspec.json.decode(msgspec.json.encode(response.output)))
            ending = _finish_reason_of_response(response, parts)
            found[OUTPUT_MESSAGES] = self._build_messages(
                parts, self._max_bytes // 2, ending, keep_vendor_items=self._profile.keeps_vendor_items
            )
        return found

    def _capture_turn(self, request: model_turns.ModelRequest, turn: TurnRecord) -> JsonObject:
        entries = (entry for segment in reversed(request.segments) for entry in reversed(segment.entries))
        raws, left_out = _take_latest((entry.raw for entry in entries), _READ_FACTOR * self._max_bytes)
        told = request.instructions
        instructions: list[Part] = [] if told is None else [TextPart(content=told, role="system")]
        functions: list[JsonObject] = [
            {
                "type": "function",
                "name": each.name,
                "description": each.description,
                "parameters": msgspec.json.decode(each.parameters),
            }
            for each in request.function_tools
        ]
        others: list[JsonObject] = [
            {"type": each.type, "name": each.name or each.type} for each in request.other_tools
        ]
        found = self._capture_request(_parts_of_items(raws), left_out, instructions, [*functions, *others])
        ending = turn.finish_reason or "error"
        found[OUTPUT_MESSAGES] = self._build_messages(
            _parts_of_turn(turn.events or ()), self._max_bytes // 2, ending
        )
        return found

    def _capture_call(self, call: ToolCallRecord) -> JsonObject:
        found: JsonObject = {}
        for name, text in ((TOOL_CALL_ARGUMENTS, call.arguments), (TOOL_CALL_RESULT, call.output)):
            if text:
                part: list[Part] = self._redact_parts([TextPart(content=text)])
                written = truncate_parts(
                    to_representation(self._profile.representation, part), self._max_bytes // 2
                )
                found[name] = "" if not written else written[0].get("content", "")
        return found

    def _capture_request(
        self, asked: list[Part], left_out: int, instructions: list[Part], tools: list[JsonObject]
    ) -> JsonObject:
        found: JsonObject = {
            INPUT_MESSAGES: self._build_messages(asked, self._max_bytes // 4, None, left_out)
        }
        if instructions:
            written = _drop_sources(
                to_representation(self._profile.representation, self._redact_parts(instructions))
            )
            found[SYSTEM_INSTRUCTIONS] = [*truncate_parts(written, self._max_bytes // 8)]
        if tools:
            found[TOOL_DEFINITIONS] = [
                *_fit_tool_definitions(self._redact_tool_definitions(tools), self._max_bytes // 8)
            ]
        return found

    # ---- what may be told, and how much of it ---------------------------------------------------------------------

    def _redact_parts(self, parts: list[Part]) -> list[Part]:
        parts = replace_inline_data(parts)
        return parts if self._redactor is None else redact_parts(parts, self._redactor)

    def _redact_tool_definitions(self, tools: list[JsonObject]) -> list[JsonObject]:
        if self._redactor is None:
            return tools
        return [{"type": tool["type"], "name": tool["name"]} for tool in tools]

    def _build_messages(
        self,
        parts: list[Part],
        max_bytes: int,
        finish_reason: str | None,
        dropped_count: int = 0,
        *,
        keep_vendor_items: bool = False,
    ) -> list[Json]:
        if dropped_count:
            called = {part.call_id for part in parts if isinstance(part, ToolCallPart)}
            parts = [
                part for part in parts if not isinstance(part, ToolCallResponsePart) or part.call_id in called
            ]
        messages = to_messages(self._profile.representation, self._redact_parts(parts), finish_reason)
        each = max_bytes // max(1, len(messages))
        messages = [
            _truncate_message(message, each, keep_vendor_items=keep_vendor_items) for message in messages
        ]
        while messages and (_json_size(messages) > max_bytes or validate([*messages])):
            gone = max(1, len(messages) // 2)
            dropped_count += sum(len(_parts_of(message)) for message in messages[:gone])
            messages = messages[gone:]
        if dropped_count:
            cut: JsonObject = {
                "role": "system",
                "parts": [{"type": TRUNCATED_PART_TYPE, "parts": dropped_count}],
            }
            messages.insert(0, cut if finish_reason is None else {**cut, "finish_reason": finish_reason})
        return [*messages]


def _json_size(value: Json | Sequence[JsonObject]) -> int:
    return len(json.dumps(value))


def _parts_of(message: JsonObject) -> list[JsonObject]:
    parts = message["parts"]
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _truncate_message(message: JsonObject, max_bytes: int, *, keep_vendor_items: bool) -> JsonObject:
    parts = _parts_of(message)
    return {
        **message,
        "parts": [*truncate_parts(parts if keep_vendor_items else _drop_sources(parts), max_bytes)],
    }


def _drop_sources(parts: list[JsonObject]) -> list[JsonObject]:
    """Without what leads back to the items."""
    return [{key: value for key, value in part.items() if key != SOURCE_FIELD} for part in parts]


def _fit_tool_definitions(tools: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    """Tools with all that is known of them, or without their parameters, or only their names, or only some of those."""
    for kept in (None, ("type", "name", "description"), ("type", "name")):
        found = tools if kept is None else [{key: tool[key] for key in kept if key in tool} for tool in tools]
        if _json_size(found) <= max_bytes:
            return found
    return [{"type": tool["type"], "name": tool["name"]} for tool in tools[: max_bytes // 300]]


def _safe_tool_definitions(tools: Iterable[Json]) -> list[JsonObject]:
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


def _parts_of_items(raws: Sequence[bytes]) -> list[Part]:
    return from_vendor("openai", [msgspec.json.decode(raw) for raw in raws]) if raws else []


def _take_latest(newest_first: Iterable[bytes], bytes_left: int) -> tuple[list[bytes], int]:
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


def _finish_reason_of_response(response: Response, parts: list[Part]) -> str:
    if response.status in ("failed", "cancelled"):
        return map_finish_reason(response.status)
    if response.incomplete_details is not None:
        return map_finish_reason(response.incomplete_details.reason)
    return infer_finish_reason(parts)


def _parts_of_turn(pieces: Iterable[model_turns.AnyModelEvent]) -> list[Part]:
    """The events of a turn as the parts of a message."""
    parts: list[tuple[Part, list[str]]] = []
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        match piece:
            case model_turns.ModelTextDelta(delta=delta) | model_turns.ModelRefusalDelta(delta=delta):
                _append_delta(parts, TextPart, delta)
            case (
                model_turns.ModelReasoningDelta(delta=delta)
                | model_turns.ModelReasoningSummaryDelta(delta=delta)
            ):
                _append_delta(parts, ReasoningPart, delta)
            case model_turns.ModelCallStarted():
                kind = piece.name if piece.name in _HOSTED_TOOL_ARGUMENTS else "function"
                call = ToolCallPart(
                    kind=kind, name=piece.name, payload={}, call_id=piece.call_id, execution="client"
                )
                calls[piece.key] = []
                parts.append((call, calls[piece.key]))
            case model_turns.ModelCallArgumentsDelta():
                calls[piece.key].append(piece.delta)
            case model_turns.ModelPassthroughItem():
                parts += [(part, []) for part in _parts_of_items([bytes(piece.item)])]
            case _:
                pass
    for part, written in parts:
        if isinstance(part, TextPart | ReasoningPart) and written:
            part.content = "".join(written)
        elif isinstance(part, ToolCallPart) and not part.payload:
            part.payload = _build_payload(part.kind, _parse_arguments("".join(written)))
    return [part for part, _ in parts]


def _append_delta(
    parts: list[tuple[Part, list[str]]], kind: type[TextPart | ReasoningPart], delta: str
) -> None:
    if not parts or not isinstance(parts[-1][0], kind) or not parts[-1][1]:
        parts.append((kind(content=""), []))
    parts[-1][1].append(delta)


def _build_payload(kind: str, arguments: Json) -> JsonObject:
    if kind == "function":
        return {"arguments": arguments}
    field = _HOSTED_TOOL_ARGUMENTS[kind]
    return {field: arguments.get(field) if isinstance(arguments, dict) else None}


def _parse_arguments(written: str) -> Json:
    try:
        return msgspec.json.decode(written)
    except (ValueError, RecursionError):
        return written
