"""Messages of canonical parts, as OpenTelemetry's attributes hold them."""

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
    """Build messages in a representation: with a finish reason as in `gen_ai.output.messages`, else as input.

    Calls that a server ran are in the assistant's message with their responses. Responses of the client are messages of
    role `tool`; in option 1 all responses are, because backends look for them there.
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
    """Infer the finish reason where the vendor does not give one: waiting for the client's tools, or done."""
    call_ids = {
        part.call_id for part in parts if isinstance(part, ToolCallPart) and part.execution == "client"
    }
    answered = {part.call_id for part in parts if isinstance(part, ToolCallResponsePart)}
    return "tool_call" if call_ids - answered else "stop"
