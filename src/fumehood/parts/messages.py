"""Parts as the messages that OpenTelemetry's attributes hold; imports its siblings."""

from fumehood.parts.canonical import Json, JsonObject, Part, Text, ToolCall, ToolResult
from fumehood.parts.views import to_view


def to_messages(view: str, parts: list[Part], finish_reason: str | None = None) -> list[JsonObject]:
    """Messages with the parts of a view: as `gen_ai.output.messages` has them with a finish reason, else as input.

    What a server ran belongs to the assistant's message, call and response. What the client answered is a message of
    the tool's; in option 1 every response is, since that is where backends look.
    """
    groups: list[tuple[str, list[Part]]] = []
    for part in parts:
        role = _role(part, apart=view.startswith("option1"))
        if not groups or groups[-1][0] != role:
            groups.append((role, []))
        groups[-1][1].append(part)
    return [_message(view, role, group, finish_reason) for role, group in groups]


def _message(view: str, role: str, parts: list[Part], finish_reason: str | None) -> JsonObject:
    written: list[Json] = [*to_view(view, parts)]
    message: JsonObject = {"role": role, "parts": written}
    return message if finish_reason is None else {**message, "finish_reason": finish_reason}


def _role(part: Part, *, apart: bool) -> str:
    if isinstance(part, Text):
        return part.role
    if isinstance(part, ToolResult) and (apart or part.execution == "client"):
        return "tool"
    return "assistant"


def finish_reason(parts: list[Part]) -> str:
    """Why the model stopped, where the vendor's word is not at hand: it waits for the client's tools, or is done."""
    asked = {part.call_id for part in parts if isinstance(part, ToolCall) and part.execution == "client"}
    answered = {part.call_id for part in parts if isinstance(part, ToolResult)}
    return "tool_call" if asked - answered else "stop"
