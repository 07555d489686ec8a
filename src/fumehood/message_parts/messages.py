"""Parts as the messages that OpenTelemetry's attributes hold."""

from fumehood.message_parts.canonical_parts import (
    Json,
    JsonObject,
    Part,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
)
from fumehood.message_parts.representations import to_representation


def to_messages(representation: str, parts: list[Part], finish_reason: str | None = None) -> list[JsonObject]:
    """Messages with the parts of a view: as `gen_ai.output.messages` has them with a finish reason, else as input.

    What a server ran belongs to the assistant's message, call and response. What the client answered is a message of
    the tool's; in option 1 every response is, since that is where backends look.
    """
    groups: list[tuple[str, list[Part]]] = []
    for part in parts:
        role = _role_of(part, responses_apart=representation.startswith("option1"))
        if not groups or groups[-1][0] != role:
            groups.append((role, []))
        groups[-1][1].append(part)
    return [_build_message(representation, role, group, finish_reason) for role, group in groups]


def _build_message(
    representation: str, role: str, parts: list[Part], finish_reason: str | None
) -> JsonObject:
    written: list[Json] = [*to_representation(representation, parts)]
    message: JsonObject = {"role": role, "parts": written}
    return message if finish_reason is None else {**message, "finish_reason": finish_reason}


def _role_of(part: Part, *, responses_apart: bool) -> str:
    if isinstance(part, TextPart):
        return part.role
    if isinstance(part, ToolCallResponsePart) and (responses_apart or part.execution == "client"):
        return "tool"
    return "assistant"


def infer_finish_reason(parts: list[Part]) -> str:
    """Why the model stopped, where the vendor's word is not at hand: it waits for the client's tools, or is done."""
    asked = {part.call_id for part in parts if isinstance(part, ToolCallPart) and part.execution == "client"}
    answered = {part.call_id for part in parts if isinstance(part, ToolCallResponsePart)}
    return "tool_call" if asked - answered else "stop"
