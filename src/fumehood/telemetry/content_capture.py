"""Content capture: messages of runs, turns and tool calls in the form of the conventions, redacted and truncated.

Off unless the operator asks for it. A failure here costs the content, never the span or event.
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

_READ_FACTOR = 4  # reads up to this many times the bytes that are recorded

INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS, TOOL_DEFINITIONS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
TOOL_CALL_ARGUMENTS, TOOL_CALL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"

type ProfileName = Literal["option1", "option2", "option3", "option3-alternative", "phoenix"]


@dataclass(frozen=True, slots=True)
class CaptureProfile:
    """How messages are written: the representation, and whether vendor items are recorded for the way back."""

    representation: str
    keeps_vendor_items: bool = True


CAPTURE_PROFILES: dict[ProfileName, CaptureProfile] = {
    "option1": CaptureProfile("option1"),
    "option2": CaptureProfile("option2"),
    "option3": CaptureProfile("option3"),
    "option3-alternative": CaptureProfile("option3-alternative"),
    "phoenix": CaptureProfile("option1", keeps_vendor_items=False),
}

# Hosted tools that models see as functions, with the argument that becomes the payload.
_HOSTED_TOOL_ARGUMENTS = {"code_interpreter": "code", "shell": "commands"}


class ContentCapture(RecordListener):
    """Fills `SpanRecord.content` when an operation ends, before the record drops its request and response.

    in_spans, in_events: where the content goes.
    max_bytes: limit for all attributes of a span together; half of it is for the output.
    redact: called with every text; returns what may be recorded.
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
        if not self.in_events and not record.span.is_recording():
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
        items = request.input if isinstance(request.input, list) else []
        raws, dropped = _take_latest([bytes(raw) for raw in reversed(items)], _READ_FACTOR * self._max_bytes)
        input_parts: list[Part] = _parts_of_items(raws)
        if isinstance(request.input, str):
            dropped = int(len(request.input) > _READ_FACTOR * self._max_bytes)
            input_parts = [] if dropped else [TextPart(content=request.input, role="user")]
        text = request.instructions
        instructions: list[Part] = [TextPart(content=text, role="system")] if isinstance(text, str) else []
        if isinstance(text, list):
            instructions = _parts_of_items([bytes(raw) for raw in text])
        tools = _safe_tool_definitions(map(msgspec.json.decode, request.tools or ()))
        content = self._capture_request(input_parts, dropped, instructions, tools)
        if response is not None:
            parts = from_vendor("openai", msgspec.json.decode(msgspec.json.encode(response.output)))
            content[OUTPUT_MESSAGES] = self._build_messages(
                parts,
                self._max_bytes // 2,
                _finish_reason_of_response(response, parts),
                keep_vendor_items=self._profile.keeps_vendor_items,
            )
        return content

    def _capture_turn(self, request: model_turns.ModelRequest, turn: TurnRecord) -> JsonObject:
        entries = (entry for segment in reversed(request.segments) for entry in reversed(segment.entries))
        raws, dropped = _take_latest((entry.raw for entry in entries), _READ_FACTOR * self._max_bytes)
        text = request.instructions
        instructions: list[Part] = [] if text is None else [TextPart(content=text, role="system")]
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
        content = self._capture_request(_parts_of_items(raws), dropped, instructions, [*functions, *others])
        content[OUTPUT_MESSAGES] = self._build_messages(
            _parts_of_turn(turn.events or ()), self._max_bytes // 2, turn.finish_reason or "error"
        )
        return content

    def _capture_call(self, call: ToolCallRecord) -> JsonObject:
        content: JsonObject = {}
        for name, text in ((TOOL_CALL_ARGUMENTS, call.arguments), (TOOL_CALL_RESULT, call.output)):
            if text:
                redacted = self._redact_parts([TextPart(content=text)])
                parts = truncate_parts(
                    to_representation(self._profile.representation, redacted), self._max_bytes // 2
                )
                content[name] = "" if not parts else parts[0].get("content", "")
        return content

    def _capture_request(
        self, input_parts: list[Part], dropped: int, instructions: list[Part], tools: list[JsonObject]
    ) -> JsonObject:
        content: JsonObject = {
            INPUT_MESSAGES: self._build_messages(input_parts, self._max_bytes // 4, None, dropped)
        }
        if instructions:
            parts = _drop_sources(
                to_representation(self._profile.representation, self._redact_parts(instructions))
            )
            content[SYSTEM_INSTRUCTIONS] = [*truncate_parts(parts, self._max_bytes // 8)]
        if tools:
            content[TOOL_DEFINITIONS] = [
                *_fit_tool_definitions(self._redact_tool_definitions(tools), self._max_bytes // 8)
            ]
        return content

    # ---- redaction and limits ---------------------------------------------------------------------

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
            call_ids = {part.call_id for part in parts if isinstance(part, ToolCallPart)}
            parts = [
                part
                for part in parts
                if not isinstance(part, ToolCallResponsePart) or part.call_id in call_ids
            ]
        messages = to_messages(self._profile.representation, self._redact_parts(parts), finish_reason)
        message_bytes = max_bytes // max(1, len(messages))
        messages = [
            _truncate_message(message, message_bytes, keep_vendor_items=keep_vendor_items)
            for message in messages
        ]
        while messages and (_json_size(messages) > max_bytes or validate([*messages])):
            half = max(1, len(messages) // 2)
            dropped_count += sum(len(_parts_of(message)) for message in messages[:half])
            messages = messages[half:]
        if dropped_count:
            notice: JsonObject = {
                "role": "system",
                "parts": [{"type": TRUNCATED_PART_TYPE, "parts": dropped_count}],
            }
            messages.insert(
                0, notice if finish_reason is None else {**notice, "finish_reason": finish_reason}
            )
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
    """Drop the vendor items, which only conversion back to the vendor needs."""
    return [{key: value for key, value in part.items() if key != SOURCE_FIELD} for part in parts]


def _fit_tool_definitions(tools: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    """Drop parameters, then descriptions, then the last tools until the rest fits."""
    for keys in (None, ("type", "name", "description"), ("type", "name")):
        fitted = (
            tools if keys is None else [{key: tool[key] for key in keys if key in tool} for tool in tools]
        )
        if _json_size(fitted) <= max_bytes:
            return fitted
    return [{"type": tool["type"], "name": tool["name"]} for tool in tools[: max_bytes // 300]]


def _safe_tool_definitions(tools: Iterable[Json]) -> list[JsonObject]:
    """Return names of tools, and descriptions and parameters of functions. Other settings may hold secrets."""
    definitions: list[JsonObject] = []
    for tool in tools:
        if isinstance(tool, dict):
            details = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            kind = str(tool.get("type", "function"))
            header = {"type": kind, "name": str(tool.get("name") or kind)}
            definitions.append({**header, **details} if kind == "function" else {**header})
    return definitions


# --- items and events as parts ------------------------------------------------------------------------


def _parts_of_items(raws: Sequence[bytes]) -> list[Part]:
    return from_vendor("openai", [msgspec.json.decode(raw) for raw in raws]) if raws else []


def _take_latest(newest_first: Iterable[bytes], bytes_left: int) -> tuple[list[bytes], int]:
    """Return the latest items that fit, oldest first, and the number of dropped ones."""
    latest: list[bytes] = []
    dropped = 0
    for raw in newest_first:
        bytes_left -= len(raw)
        if bytes_left < 0:
            dropped += 1
        else:
            latest.append(raw)
    return latest[::-1], dropped


def _finish_reason_of_response(response: Response, parts: list[Part]) -> str:
    if response.status in ("failed", "cancelled"):
        return map_finish_reason(response.status)
    if response.incomplete_details is not None:
        return map_finish_reason(response.incomplete_details.reason)
    return infer_finish_reason(parts)


def _parts_of_turn(events: Iterable[model_turns.AnyModelEvent]) -> list[Part]:
    """Build the parts of a message from the events of a turn."""
    parts: list[tuple[Part, list[str]]] = []
    calls: dict[int, list[str]] = {}
    for event in events:
        match event:
            case model_turns.ModelTextDelta(delta=delta) | model_turns.ModelRefusalDelta(delta=delta):
                _append_delta(parts, TextPart, delta)
            case (
                model_turns.ModelReasoningDelta(delta=delta)
                | model_turns.ModelReasoningSummaryDelta(delta=delta)
            ):
                _append_delta(parts, ReasoningPart, delta)
            case model_turns.ModelCallStarted():
                kind = event.name if event.name in _HOSTED_TOOL_ARGUMENTS else "function"
                call = ToolCallPart(
                    kind=kind, name=event.name, payload={}, call_id=event.call_id, execution="client"
                )
                calls[event.key] = []
                parts.append((call, calls[event.key]))
            case model_turns.ModelCallArgumentsDelta():
                calls[event.key].append(event.delta)
            case model_turns.ModelPassthroughItem():
                parts += [(part, []) for part in _parts_of_items([bytes(event.item)])]
            case _:
                pass
    for part, deltas in parts:
        if isinstance(part, TextPart | ReasoningPart) and deltas:
            part.content = "".join(deltas)
        elif isinstance(part, ToolCallPart) and not part.payload:
            part.payload = _build_payload(part.kind, _parse_arguments("".join(deltas)))
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


def _parse_arguments(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
