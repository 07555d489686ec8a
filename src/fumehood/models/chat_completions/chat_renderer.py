"""Renders a conversation as Chat Completions messages.

A turn is one assistant message with all its calls, followed by the results in the order of the calls. If the client
still has to answer a call, the results from that call on are carried over to the start of the next segment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.rendering.conversation_items import (
    UNFINISHED_STATUSES,
    CallItem,
    InlineFile,
    ItemContent,
    ItemContentPart,
    MessageItem,
    ensure_json_object,
    get_part_text,
    join_text,
    render_file,
)
from fumehood.models.rendering.rendering_cache import EMPTY, render_segments
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.models.rendering.unsupported_tool_items import (
    ExternalToolCall,
    ExternalToolResult,
    convert_unsupported_item,
)
from fumehood.protocol.attachments import Attachment, InputImageUrl, describe_unshown_file, is_file_part
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, Rendering, ToolExchange
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.client_tools_as_functions import (
    CLIENT_TOOL_BY_ITEM,
    read_client_call,
    read_client_result,
)

# Tool messages cannot contain media; a user message after them does.
_MEDIA_HEADING = "What the calls above showed:"
_SEE_NEXT_MESSAGE = "(in the message after the results)"
_UNKNOWN_ATTACHMENT = Attachment()


# --- items of the conversation ------------------------------------------------------------------------


class _Output(msgspec.Struct):
    call_id: str
    output: ItemContent = None


class _ReasoningText(msgspec.Struct):
    text: str = ""


class _Reasoning(msgspec.Struct):
    content: list[_ReasoningText] | None = None
    summary: list[_ReasoningText] | None = None


# --- Chat Completions messages ------------------------------------------------------------------------


class _ChatTextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _ChatImageUrl(msgspec.Struct):
    url: str
    detail: str | UnsetType = UNSET


class _ChatImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _ChatImageUrl


class _ChatFilePart(msgspec.Struct, tag_field="type", tag="file"):
    file: InlineFile


type _ChatContentPart = _ChatTextPart | _ChatImagePart | _ChatFilePart


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_ChatContentPart]


class _ChatFunction(msgspec.Struct):
    name: str
    arguments: str


class _ChatCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: _ChatFunction


class _ChatAssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_ChatCall] | UnsetType = UNSET


class _ChatToolMessage(msgspec.Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str


class _PendingResult(msgspec.Struct):
    """A result that is carried over; its content is None until the client sends it."""

    call_id: str
    content: str | None


class _CarriedResults(msgspec.Struct):
    """Results that a segment carries over to the next one, and the media that follow them."""

    results: list[_PendingResult] = []
    media: list[_ChatContentPart] = []


_encode = msgspec.json.Encoder().encode
_carry_decoder = msgspec.json.Decoder(_CarriedResults)
# The first bytes of messages of these roles. They occur nowhere else: in JSON strings, quotes are escaped.
_USER_PREFIX, _SYSTEM_PREFIX, _DEVELOPER_PREFIX = (
    b'{"role":"%b",' % role for role in (b"user", b"system", b"developer")
)
_MEDIA_MESSAGE_PREFIX = _encode(_ChatMessage("user", [_ChatTextPart(_MEDIA_HEADING)])).removesuffix(b"]}")


def render_messages(
    features: ServerFeatures, instructions: str | None, segments: Sequence[ConversationSegment]
) -> list[bytes]:
    """The elements of `messages`, in chunks of one or more. Raises InvalidRequest for items it cannot render."""

    def render(entries: Sequence[ConversationEntry], carry: bytes) -> Rendering:
        carried = _carry_decoder.decode(carry) if carry else _CarriedResults()
        return _SegmentRenderer(features, carried).render(entries)

    parts, carry = render_segments(segments, f"chat/{features.cache_key}", render)
    if carry:
        raise _missing_output_error(_carry_decoder.decode(carry))
    if instructions:
        parts.insert(0, _encode(_ChatMessage("system", instructions)))
    return parts if _has_user_message(parts) else _ensure_user_message(parts)


def _has_user_message(parts: Sequence[bytes]) -> bool:
    """Whether there is a user message other than the media of tool results."""
    for part in parts:
        position = part.find(_USER_PREFIX)
        while position >= 0:
            if not part.startswith(_MEDIA_MESSAGE_PREFIX, position):
                return True
            position = part.find(_USER_PREFIX, position + 1)
    return False


def _ensure_user_message(parts: list[bytes]) -> list[bytes]:
    """Turn the last system message into a user message: many chat templates reject a conversation without one. The
    cached renderings stay unchanged, since the next request may have a user message.
    """
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        position = max(part.rfind(_SYSTEM_PREFIX), part.rfind(_DEVELOPER_PREFIX))
        if position >= 0:
            role = _SYSTEM_PREFIX if part.startswith(_SYSTEM_PREFIX, position) else _DEVELOPER_PREFIX
            parts[number] = part[:position] + _USER_PREFIX + part[position + len(role) :]
            break
    return parts


@dataclass(slots=True, eq=False)
class _AssistantTurn:
    """One assistant message and the results of its calls."""

    number: int
    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[str, _ChatFunction] = field(default_factory=dict[str, _ChatFunction])
    results: dict[str, str] = field(default_factory=dict[str, str])
    media: list[_ChatContentPart] = field(default_factory=list[_ChatContentPart])
    optional_calls: set[str] = field(default_factory=set[str])  # calls that are rendered only with a result
    has_result: bool = False


class _SegmentRenderer:
    """Renders one segment."""

    def __init__(self, features: ServerFeatures, carry: _CarriedResults) -> None:
        self._features = features
        self._carry = carry
        self._messages: list[_AssistantTurn | _ChatMessage] = []
        self._turn_by_call_id: dict[str, _AssistantTurn] = {}
        self._pending_results = {result.call_id: result for result in carry.results}

    def render(self, entries: Sequence[ConversationEntry]) -> Rendering:
        """The messages and the carry for the next segment. Raises InvalidRequest."""
        for entry in entries:
            try:
                self._add_item(entry)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidRequest(
                    f"An item of type {entry.type!r} cannot be decoded: {error}", param="input"
                ) from None
        messages: list[bytes] = []
        if entries and (self._carry.results or self._carry.media):
            if any(result.content is None for result in self._carry.results):
                raise _missing_output_error(self._carry)
            messages += [
                _encode(_ChatToolMessage(result.call_id, result.content or ""))
                for result in self._carry.results
            ]
            messages += _encode_media_message(self._carry.media)
            self._carry = _CarriedResults()
        carry = self._carry
        for number, message in enumerate(self._messages):
            if isinstance(message, _ChatMessage):
                messages.append(_encode(message))
                continue
            carry = _encode_turn(message, self._features.replay_reasoning, messages)
            if carry.results and number + 1 < len(self._messages):
                raise _missing_output_error(carry)
        return b",".join(messages), _encode(carry) if carry.results else EMPTY

    # ---- items ------------------------------------------------------------------------------------------------

    def _add_item(self, entry: ConversationEntry) -> None:
        if entry.exchange is not None:
            self._add_exchange(entry, entry.exchange)
            return
        match entry.type:
            case "message":
                self._add_message(entry)
            case "function_call" | "custom_tool_call":
                self._add_call(entry)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(entry)
            case "reasoning":
                self._add_reasoning(entry)
            case _ if entry.type in CLIENT_TOOL_BY_ITEM:
                self._add_client_tool_item(entry)
            case _:
                self._add_foreign_item(entry)

    def _add_message(self, entry: ConversationEntry) -> None:
        message = msgspec.json.decode(entry.raw, type=MessageItem)
        if message.role == "assistant":
            self._get_turn(entry.turn, begins_message=True).texts.append(join_text(message.content))
            return
        role = self._features.get_input_role(message.role)
        content = _render_content(message.content, entry.attachments, takes_files=self._features.takes_files)
        self._messages.append(_ChatMessage(role, content))

    def _add_reasoning(self, entry: ConversationEntry) -> None:
        reasoning = msgspec.json.decode(entry.raw, type=_Reasoning)
        turn = self._get_turn(entry.turn, begins_message=True)
        turn.reasoning += [part.text for part in reasoning.content or reasoning.summary or ()]

    def _add_call(self, entry: ConversationEntry) -> None:
        call = msgspec.json.decode(entry.raw, type=CallItem)
        is_custom = entry.type == "custom_tool_call"
        arguments = _encode({"input": call.input}).decode() if is_custom else call.arguments
        is_unfinished = call.status in UNFINISHED_STATUSES
        self._append_call(entry.turn, call.call_id, call.name, arguments, is_optional=is_unfinished)

    def _add_output(self, entry: ConversationEntry) -> None:
        output = msgspec.json.decode(entry.raw, type=_Output)
        text, media = _split_text_and_media(
            output.output, entry.attachments, takes_files=self._features.takes_files
        )
        if not self._set_result(output.call_id, text, media):
            raise InvalidRequest(
                f"No tool call found for function call output with call_id {sanitize_name(output.call_id)}.",
                param="input",
            )

    def _set_result(self, call_id: str, text: str, media: Sequence[_ChatContentPart] = ()) -> bool:
        """Set the result of a call of this segment, in any order, or of a carried-over call. False if there is none."""
        turn = self._turn_by_call_id.get(call_id)
        if turn is not None:
            turn.results[call_id] = text
            turn.media += media
            turn.has_result = True
            return True
        pending = self._pending_results.get(call_id)
        if pending is not None:
            pending.content = text
            self._carry.media += media
        return pending is not None

    def _add_client_tool_item(self, entry: ConversationEntry) -> None:
        call = read_client_call(entry.type, entry.raw)
        result = read_client_result(entry.type, entry.raw)
        if call is not None:
            # The answer to a call of ours may come with the next segment; those of others are as they were sent.
            is_optional = entry.turn == 0 or not call.is_awaited
            self._append_call(entry.turn, call.call_id, call.name, call.arguments, is_optional=is_optional)
        elif result is not None:
            self._set_result(result.call_id, result.text)
        else:
            self._add_foreign_item(entry)

    def _add_foreign_item(self, entry: ConversationEntry) -> None:
        match convert_unsupported_item(entry):
            case ExternalToolCall() as call:
                self._append_call(entry.turn, call.call_id, call.name, call.arguments, is_optional=True)
            case ExternalToolResult() as result:
                self._set_result(result.call_id, result.text)
            case ToolExchange() as exchange:
                self._add_exchange(entry, exchange)
            case None:
                pass

    def _add_exchange(self, entry: ConversationEntry, exchange: ToolExchange) -> None:
        images = exchange.images if self._features.takes_images else ()
        media = [_ChatImagePart(_ChatImageUrl(url)) for url in images]
        if exchange.half == "result":
            self._set_result(exchange.call_id, exchange.output, media)
            return
        is_half = exchange.half == "call"
        turn = self._append_call(
            entry.turn, exchange.call_id, exchange.name, exchange.arguments, is_optional=is_half
        )
        if not is_half:
            turn.results[exchange.call_id] = exchange.output
            turn.media += media

    # ---- turns ------------------------------------------------------------------------------------------------

    def _append_call(
        self, turn_number: int, call_id: str, name: str, arguments: str, *, is_optional: bool
    ) -> _AssistantTurn:
        """Append a call to its turn; an optional one is rendered only with a result."""
        turn = self._turn_by_call_id[call_id] = self._get_turn(turn_number)
        turn.calls[call_id] = _ChatFunction(name, ensure_json_object(arguments))
        if is_optional:
            turn.optional_calls.add(call_id)
        return turn

    def _get_turn(self, number: int, *, begins_message: bool = False) -> _AssistantTurn:
        """The turn for an item with this number. Items without a number (0) share a turn until a result comes, or an
        item that begins a message.
        """
        last = self._messages[-1] if self._messages else None
        if isinstance(last, _AssistantTurn) and last.number == number:
            has_message = last.has_result or (begins_message and (last.texts or last.calls))
            if number or not has_message:
                return last
        turn = _AssistantTurn(number)
        self._messages.append(turn)
        return turn


def _encode_turn(turn: _AssistantTurn, replay_reasoning: bool, messages: list[bytes]) -> _CarriedResults:
    """Append the message and its results; returns what is carried over to the next segment."""
    calls = {
        call_id: call
        for call_id, call in turn.calls.items()
        if call_id in turn.results or call_id not in turn.optional_calls
    }
    text = "".join(turn.texts)
    reasoning = "\n".join(turn.reasoning) if replay_reasoning else ""
    if text or calls or reasoning:
        message = _ChatAssistantMessage(text if text or not calls else None)
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = [_ChatCall(call_id, call) for call_id, call in calls.items()]
        messages.append(_encode(message))
    results = [_PendingResult(call_id, turn.results.get(call_id)) for call_id in calls]
    ready = next((number for number, result in enumerate(results) if result.content is None), len(results))
    messages += [
        _encode(_ChatToolMessage(result.call_id, result.content or "")) for result in results[:ready]
    ]
    if ready < len(results):
        return _CarriedResults(results[ready:], turn.media)
    messages += _encode_media_message(turn.media)
    return _CarriedResults()


def _encode_media_message(parts: Sequence[_ChatContentPart]) -> list[bytes]:
    return [_encode(_ChatMessage("user", [_ChatTextPart(_MEDIA_HEADING), *parts]))] if parts else []


def _missing_output_error(carry: _CarriedResults) -> InvalidRequest:
    missing = next(result.call_id for result in carry.results if result.content is None)
    return InvalidRequest(f"No tool output found for function call {sanitize_name(missing)}.", param="input")


# --- content ------------------------------------------------------------------------------------------


def _render_content(
    content: ItemContent, attachments: Sequence[Attachment], *, takes_files: bool
) -> str | list[_ChatContentPart]:
    """Render the content of a message; text alone as a string, which every server accepts. Raises InvalidRequest."""
    parts = _render_parts(content, attachments, takes_files)
    texts = [part.text for part in parts if isinstance(part, _ChatTextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _split_text_and_media(
    content: ItemContent, attachments: Sequence[Attachment], *, takes_files: bool
) -> tuple[str, list[_ChatContentPart]]:
    """The text of a tool result, and its media, which go into a user message. Raises InvalidRequest."""
    parts = _render_parts(content, attachments, takes_files)
    media: list[_ChatContentPart] = [part for part in parts if not isinstance(part, _ChatTextPart)]
    text = "\n".join(part.text for part in parts if isinstance(part, _ChatTextPart))
    return (text or _SEE_NEXT_MESSAGE if media else text), media


def _render_parts(
    content: ItemContent, attachments: Sequence[Attachment], takes_files: bool
) -> list[_ChatContentPart]:
    if content is None or isinstance(content, str):
        return [_ChatTextPart(content or "")]
    files = iter(attachments)  # one for each file and image part; none if they were not resolved
    return [_render_part(part, files, takes_files) for part in content]


def _render_part(
    part: ItemContentPart, attachments: Iterator[Attachment], takes_files: bool
) -> _ChatContentPart:
    if not is_file_part(part.type):
        return _ChatTextPart(get_part_text(part))
    attachment = next(attachments, _UNKNOWN_ATTACHMENT)
    if attachment.gone:
        return _ChatTextPart(describe_unshown_file(attachment))
    if part.type == "input_image":
        return _render_image(part, attachment)
    rendered = render_file(part, attachment, takes_files=takes_files or attachment.sent_to_model)
    return _ChatTextPart(rendered) if isinstance(rendered, str) else _ChatFilePart(rendered)


def _render_image(part: ItemContentPart, attachment: Attachment) -> _ChatImagePart:
    image_url = part.image_url
    url = attachment.data or (image_url.url if isinstance(image_url, InputImageUrl) else image_url)
    detail = part.detail or (image_url.detail if isinstance(image_url, InputImageUrl) else None)
    if not url or not url.startswith(("data:image/", "https://", "http://")):
        raise InvalidRequest(
            "An input_image needs an image_url: a data: URL of the image, or an http(s) URL.",
            param="input",
        )
    return _ChatImagePart(_ChatImageUrl(url, detail or UNSET))
