"""A conversation as message parts, with the ids and texts that the model was sent.

A hosted call is an item of its own for clients, and a function call for the model. Spans of a model turn have the
latter, so that a call in the output of one turn and its response in the input of the next have one id.
"""

from collections.abc import Iterator, Sequence

import msgspec

from fumehood.message_parts import (
    BlobPart,
    FilePart,
    Json,
    JsonObject,
    Part,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    UriPart,
    from_vendor,
)
from fumehood.protocol.attachments import Attachment, render_file_text
from fumehood.protocol.conversation import COMPACTION_TYPE, ConversationEntry, ToolExchange

# Hosted tools that models see as functions, with the argument that becomes the payload.
_HOSTED_TOOL_ARGUMENTS = {"code_interpreter": "code", "shell": "commands"}


def parts_of_items(raws: Sequence[bytes]) -> list[Part]:
    return from_vendor("openai", [msgspec.json.decode(raw) for raw in raws]) if raws else []


def parts_of_conversation(
    entries: Sequence[ConversationEntry], *, with_reasoning: bool = False
) -> list[Part]:
    """Return the parts of consecutive entries of a conversation. with_reasoning: the model is sent its reasoning."""
    parts: list[Part] = []
    for entry in entries:
        if entry.exchange is not None:
            parts += _parts_of_exchange(entry.exchange)
        elif entry.type != COMPACTION_TYPE and (with_reasoning or entry.type != "reasoning"):
            parts += _show_attachments(parts_of_items([entry.raw]), entry.attachments)
    return parts


def _show_attachments(parts: list[Part], attachments: Sequence[Attachment]) -> list[Part]:
    """Replace files by the text that the model reads of them."""
    remaining = iter(attachments)
    shown: list[Part] = []
    for part in parts:
        attachment = next(remaining, None) if isinstance(part, FilePart | UriPart | BlobPart) else None
        if attachment is None or attachment.text is None:
            shown.append(part)
        else:
            text = render_file_text(attachment.name, attachment.text, attachment.omitted_bytes)
            shown.append(TextPart(content=text, role="user"))
    return shown


# --- calls as the model sees them -----------------------------------------------------------------------


def make_call_part(call_id: str, name: str) -> ToolCallPart:
    """Return a call that a model makes, without its payload."""
    kind = name if name in _HOSTED_TOOL_ARGUMENTS else "function"
    return ToolCallPart(kind=kind, name=name, payload={}, call_id=call_id, execution="client")


def build_call_payload(kind: str, arguments: str) -> JsonObject:
    """Return the payload of a call with these arguments, which may be anything."""
    found = _parse_json(arguments)
    if kind == "function":
        return {"arguments": found}
    field = _HOSTED_TOOL_ARGUMENTS[kind]
    value = found.get(field) if isinstance(found, dict) else None
    payload: JsonObject = {field: value if _is_valid_argument(kind, value) else None}
    is_all = isinstance(found, dict) and found.keys() == {field} and payload[field] is not None
    return payload if is_all else {**payload, "arguments": found}


def _is_valid_argument(kind: str, value: Json) -> bool:
    if kind == "shell":
        return isinstance(value, list) and all(isinstance(command, str) for command in value)
    return isinstance(value, str)


def _parts_of_exchange(exchange: ToolExchange) -> Iterator[Part]:
    call = make_call_part(exchange.call_id, exchange.name)
    if exchange.half != "result":
        call.payload = build_call_payload(call.kind, exchange.arguments)
        yield call
    if exchange.half != "call":
        yield ToolCallResponsePart(
            kind=call.kind,
            payload=_build_response_payload(call.kind, exchange.output),
            call_id=exchange.call_id,
            execution="client",
        )
        for url in exchange.images:
            head, _, data = url.partition(";base64,")
            yield BlobPart(content=data, modality="image", mime_type=head.removeprefix("data:") or None)


def _build_response_payload(kind: str, output: str) -> JsonObject:
    match kind:
        case "code_interpreter":
            return {"outputs": [{"type": "logs", "logs": output}]}
        case "shell":
            return {"outputs": [{"stdout": output}]}
        case _:
            return {"result": output}


def _parse_json(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
