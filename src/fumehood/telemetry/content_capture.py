"""Content capture: messages of runs, turns and tool calls in the form of the conventions, redacted and truncated.

Off unless the operator asks for it. A failure here costs the content, never the span or event.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal, override

import msgspec

from fumehood.message_parts import (
    EXECUTION_METADATA,
    Json,
    JsonObject,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    build_timing,
    from_vendor,
    infer_finish_reason,
)
from fumehood.protocol import model_turns
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.telemetry.conversation_parts import (
    build_call_payload,
    make_call_part,
    parts_of_conversation,
    parts_of_items,
)
from fumehood.telemetry.message_writer import MessageWriter
from fumehood.telemetry.operation_records import (
    RecordListener,
    RunRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.semantic_conventions import (
    INPUT_MESSAGES,
    MAX_CONTENT_BYTES,
    OUTPUT_MESSAGES,
    SYSTEM_INSTRUCTIONS,
    TOOL_CALL_ARGUMENTS,
    TOOL_CALL_RESULT,
    TOOL_DEFINITIONS,
    map_finish_reason,
)

_READ_FACTOR = 4  # reads up to this many times the bytes that are recorded

# A representation of message parts, or `phoenix`: option 1 without the vendor items that the way back needs.
type ProfileName = Literal["option1", "option2", "option3", "option3-alternative", "phoenix"]


class ContentRecorder(RecordListener):
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
        self._keeps_vendor_items = profile != "phoenix"
        self._writer = MessageWriter("option1" if profile == "phoenix" else profile, redact)
        self._max_bytes = max_bytes
        self._redacts = redact is not None

    @override
    def on_end(self, record: SpanRecord) -> None:
        if not self.in_events and not record.span.is_recording():
            return
        match record:
            case RunRecord(request=CreateResponse() as request):
                record.content = self._capture_run(request, record)
            case TurnRecord(request=model_turns.ModelRequest() as request):
                record.content = self._capture_turn(request, record)
            case ToolCallRecord():
                record.content = self._capture_call(record)
            case _:
                pass

    # ---- runs, turns, calls ---------------------------------------------------------------------------------------

    def _capture_run(self, request: CreateResponse, run: RunRecord) -> JsonObject:
        items = request.input if isinstance(request.input, list) else []
        newest_first = [bytes(raw) for raw in reversed(items)]
        raws, dropped = _take_latest(newest_first, _READ_FACTOR * self._max_bytes, len)
        input_parts: list[Part] = parts_of_items(raws)
        if isinstance(request.input, str):
            dropped = int(len(request.input) > _READ_FACTOR * self._max_bytes)
            input_parts = [] if dropped else [TextPart(content=request.input, role="user")]
        text = request.instructions
        instructions: list[Part] = [TextPart(content=text, role="system")] if isinstance(text, str) else []
        if isinstance(text, list):
            instructions = parts_of_items([bytes(raw) for raw in text])
        tools = _safe_tool_definitions(map(msgspec.json.decode, request.tools or ()))
        content = self._capture_request(input_parts, dropped, instructions, tools)
        response = run.response
        if response is not None:
            parts = from_vendor("openai", msgspec.json.decode(msgspec.json.encode(response.output)))
            _add_timings(parts, run.call_timings)
            content[OUTPUT_MESSAGES] = [
                *self._writer.write_messages(
                    parts,
                    self._max_bytes // 2,
                    _finish_reason_of_response(response, parts),
                    keep_vendor_items=self._keeps_vendor_items,
                )
            ]
        return content

    def _capture_turn(self, request: model_turns.ModelRequest, turn: TurnRecord) -> JsonObject:
        newest_first = (
            entry for segment in reversed(request.segments) for entry in reversed(segment.entries)
        )
        entries, dropped = _take_latest(newest_first, _READ_FACTOR * self._max_bytes, _entry_size)
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
            {"type": each.type, "name": each.name or each.type} for each in request.server_tools
        ]
        input_parts = parts_of_conversation(entries, with_reasoning=turn.replays_reasoning)
        content = self._capture_request(input_parts, dropped, instructions, [*functions, *others])
        content[OUTPUT_MESSAGES] = [
            *self._writer.write_messages(
                _parts_of_turn(turn.events or ()), self._max_bytes // 2, turn.finish_reason or "error"
            )
        ]
        return content

    def _capture_call(self, call: ToolCallRecord) -> JsonObject:
        content: JsonObject = {}
        for name, text in ((TOOL_CALL_ARGUMENTS, call.arguments), (TOOL_CALL_RESULT, call.output)):
            if text:
                parts = self._writer.write_parts([TextPart(content=text)], self._max_bytes // 2)
                content[name] = "" if not parts else parts[0].get("content", "")
        return content

    def _capture_request(
        self, input_parts: list[Part], dropped: int, instructions: list[Part], tools: list[JsonObject]
    ) -> JsonObject:
        messages = self._writer.write_messages(input_parts, self._max_bytes // 4, dropped_count=dropped)
        content: JsonObject = {INPUT_MESSAGES: [*messages]}
        share = self._max_bytes // 8
        if instructions:
            content[SYSTEM_INSTRUCTIONS] = [*self._writer.write_parts(instructions, share)]
        if tools:
            if self._redacts:
                tools = [{"type": tool["type"], "name": tool["name"]} for tool in tools]
            content[TOOL_DEFINITIONS] = [*_fit_tool_definitions(tools, share)]
        return content


def _fit_tool_definitions(tools: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    """Drop parameters, then descriptions, then the last tools until the rest fits."""
    for keys in (None, ("type", "name", "description"), ("type", "name")):
        fitted = (
            tools if keys is None else [{key: tool[key] for key in keys if key in tool} for tool in tools]
        )
        if len(json.dumps(fitted)) <= max_bytes:
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


def _entry_size(entry: ConversationEntry) -> int:
    return entry.size


def _take_latest[Item](
    newest_first: Iterable[Item], bytes_left: int, size_of: Callable[[Item], int]
) -> tuple[list[Item], int]:
    """Return the latest items that fit, oldest first, and the number of dropped ones."""
    latest: list[Item] = []
    dropped = 0
    for item in newest_first:
        bytes_left -= size_of(item)
        if bytes_left < 0:
            dropped += 1
        else:
            latest.append(item)
    return latest[::-1], dropped


def _add_timings(parts: list[Part], timings: Mapping[str, tuple[int, int]]) -> None:
    """Add when the gateway's own calls started, and how long they took unless the item says it."""
    for part in parts:
        observed = timings.get(part.id or "") if isinstance(part, ToolCallPart) else None
        if observed is not None:
            started_at_ns, duration_ns = observed
            started_at = datetime.fromtimestamp(started_at_ns / 1e9, UTC)
            known = part.extra.get(EXECUTION_METADATA)
            timing = build_timing(started_at, duration_ns / 1e6)
            part.extra = {
                **part.extra,
                EXECUTION_METADATA: {**timing, **(known if isinstance(known, dict) else {})},
            }


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
                call = make_call_part(event.call_id, event.name)
                calls[event.key] = []
                parts.append((call, calls[event.key]))
            case model_turns.ModelCallArgumentsDelta():
                calls[event.key].append(event.delta)
            case model_turns.ModelPassthroughItem():
                parts += [(part, []) for part in parts_of_items([bytes(event.item)])]
            case _:
                pass
    for part, deltas in parts:
        if isinstance(part, TextPart | ReasoningPart) and deltas:
            part.content = "".join(deltas)
        elif isinstance(part, ToolCallPart) and not part.payload:
            part.payload = build_call_payload(part.kind, "".join(deltas))
    return [part for part, _ in parts]


def _append_delta(
    parts: list[tuple[Part, list[str]]], kind: type[TextPart | ReasoningPart], delta: str
) -> None:
    if not parts or not isinstance(parts[-1][0], kind) or not parts[-1][1]:
        parts.append((kind(content=""), []))
    parts[-1][1].append(delta)
