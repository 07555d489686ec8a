"""Renders a conversation as `input` of the Responses API.

Items are sent without ids, since the server stores nothing and does not know them. Reasoning is the exception: servers
require its id.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.models.rendering.conversation_items import (
    UNFINISHED_STATUSES,
    CallItem,
    ItemContentPart,
    MessageItem,
    ensure_json_object,
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
from fumehood.models.responses_api.reasoning_origin import ReasoningOrigin
from fumehood.protocol.attachments import Attachment, describe_unshown_file, is_file_part
from fumehood.protocol.conversation import (
    ConversationEntry,
    ConversationSegment,
    Rendering,
    ToolExchange,
)
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.client_tools_as_functions import (
    CLIENT_TOOL_BY_ITEM,
    read_client_call,
    read_client_result,
)
from fumehood.protocol.openai.items import InputText

_PLACEHOLDER_ID = "rs_0"  # some servers require an id and none uses it


# --- items of the conversation ------------------------------------------------------------------------


class _RawMessage(msgspec.Struct):
    role: str = "user"
    content: str | list[Raw] | None = None


class _Part(msgspec.Struct):
    type: str = ""
    file_id: str | None = None
    file_data: str | None = None


class _CallOutputId(msgspec.Struct):
    """The call id of any output item; local_shell_call_output has it as `id`."""

    call_id: str | None = None
    id: str | None = None


class _Output(msgspec.Struct):
    call_id: str
    output: str | list[Raw] | None = None


class _ReasoningPart(msgspec.Struct):
    text: str = ""


class _Reasoning(msgspec.Struct):
    content: list[_ReasoningPart] | None = None
    summary: list[Raw] | None = None
    encrypted_content: str | None = None


# --- items in the request -----------------------------------------------------------------------------


class _InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """Assistant content is a string: for a list, some servers require ids and more."""

    role: str
    content: str | list[Raw]
    phase: str | UnsetType = UNSET


class _FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[Raw]


class _CustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class _CustomOutput(msgspec.Struct, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: str | list[Raw]


class _ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class _SentReasoning(msgspec.Struct, tag_field="type", tag="reasoning", omit_defaults=True):
    summary: list[Raw]
    id: str = ""
    content: list[_ReasoningText] = []
    encrypted_content: str = ""


class _InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str


class _InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    filename: str
    file_data: str


_encode = msgspec.json.Encoder().encode
_message_decoder = msgspec.json.Decoder(_RawMessage)
_part_decoder = msgspec.json.Decoder(_Part)
_reasoning_part_decoder = msgspec.json.Decoder(_ReasoningPart)
_file_decoder = msgspec.json.Decoder(ItemContentPart)
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_carry_decoder = msgspec.json.Decoder(list[str])


def render_input(
    features: ServerFeatures, segments: Sequence[ConversationSegment], origin: ReasoningOrigin
) -> list[bytes]:
    """The elements of `input`, in chunks of one or more. Raises InvalidRequest for items it cannot render."""

    def render(entries: Sequence[ConversationEntry], carry: bytes) -> Rendering:
        awaited_ids = _carry_decoder.decode(carry) if carry else []
        return _SegmentRenderer(features, origin, awaited_ids).render(entries)

    return render_segments(segments, f"responses/{features.cache_key}/{origin.fingerprint}", render)[0]


class _SegmentRenderer:
    """Renders one segment."""

    def __init__(
        self, features: ServerFeatures, origin: ReasoningOrigin, awaited_ids: Sequence[str] = ()
    ) -> None:
        self._features = features
        self._origin = origin
        self._items: list[bytes] = []
        self._reasoning: list[bytes] = []  # sent with the item that follows, or not at all
        self._results: list[bytes] = []  # of hosted calls; they follow all calls of the turn
        self._foreign_call_ids: set[str] = set()  # rendered calls of other servers' tools
        # Rendered calls of client tools without a result, which may come with the next segment.
        self._awaited_ids = dict.fromkeys(awaited_ids)
        self._hosted_call_ids: set[str] = set()  # rendered calls of hosted tools
        self._turn = 0

    def render(self, entries: Sequence[ConversationEntry]) -> Rendering:
        """The items, and the calls that the next segment may answer. Raises InvalidRequest."""
        try:
            answered_ids = {_get_answered_id(entry) for entry in entries if entry.type.endswith("_output")}
            for entry in entries:
                self._add_item(entry, answered_ids)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequest(f"An item cannot be decoded: {error}", param="input") from None
        self._end_turn()
        return b",".join(self._items), _encode([*self._awaited_ids]) if self._awaited_ids else EMPTY

    def _add_item(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        if entry.turn != self._turn or entry.turn == 0:
            self._end_turn(keep_reasoning=entry.turn == self._turn)
            self._turn = entry.turn
        exchange = entry.exchange
        # A result alone needs a call that was rendered as a function.
        if exchange is not None and (exchange.half != "result" or exchange.call_id in self._hosted_call_ids):
            self._add_exchange(exchange, answered_ids)
            return
        if exchange is not None and self._add_client_result(exchange.call_id, exchange.output):
            return
        match entry.type:
            case "message":
                self._add_message(entry)
            case "reasoning":
                self._add_reasoning(entry)
            case "function_call" | "custom_tool_call":
                self._add_call(entry, answered_ids)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(entry)
            case _ if self._features.takes_item(entry.type):
                self._append_rendered(entry.raw)
            case _ if entry.type in CLIENT_TOOL_BY_ITEM:
                self._add_client_tool_item(entry, answered_ids)
            case _:
                self._add_foreign_item(entry, answered_ids)

    def _append_rendered(self, item: bytes) -> None:
        """Append an item, after the reasoning that led to it."""
        self._items += self._reasoning
        self._reasoning.clear()
        self._items.append(item)

    def _append_function_call(self, call_id: str, name: str, arguments: str) -> None:
        self._append_rendered(_encode(_FunctionCall(call_id, name, ensure_json_object(arguments))))

    def _end_turn(self, *, keep_reasoning: bool = False) -> None:
        self._items += self._results
        self._results.clear()
        if not keep_reasoning:
            self._reasoning.clear()

    # ---- items ------------------------------------------------------------------------------------------------

    def _add_message(self, entry: ConversationEntry) -> None:
        message = _message_decoder.decode(entry.raw)
        if message.role == "assistant":
            answer = msgspec.json.decode(entry.raw, type=MessageItem)
            text = join_text(answer.content)
            if text:
                self._append_rendered(_encode(_InputMessage("assistant", text, answer.phase or UNSET)))
            return
        role = self._features.get_input_role(message.role)
        self._reasoning.clear()
        self._items.append(_encode(_InputMessage(role, self._render_content(message.content, entry))))

    def _add_reasoning(self, entry: ConversationEntry) -> None:
        """Send encrypted reasoning to the model that produced it; else its text if `replay_reasoning` is set."""
        reasoning = msgspec.json.decode(entry.raw, type=_Reasoning)
        summary = reasoning.summary or []
        unwrapped = self._origin.unwrap(reasoning.encrypted_content or "")
        texts = [part.text for part in reasoning.content or () if part.text]
        if unwrapped is not None:
            item_id, encrypted = unwrapped
            self._reasoning.append(_encode(_SentReasoning(summary, id=item_id, encrypted_content=encrypted)))
        elif texts and self._features.replay_reasoning:
            content = [_ReasoningText(text) for text in texts]
            if [_reasoning_part_decoder.decode(part).text for part in summary] == texts:
                summary = []  # the gateway repeats text as summary for clients that ask for one
            self._reasoning.append(
                _encode(_SentReasoning(summary, id=entry.id or _PLACEHOLDER_ID, content=content))
            )

    def _add_call(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        call = msgspec.json.decode(entry.raw, type=CallItem)
        if call.status in UNFINISHED_STATUSES and call.call_id not in answered_ids:
            self._reasoning.clear()
            return
        if (call.namespace or call.caller) and self._features.foreign_items:
            self._append_rendered(entry.raw)
        elif entry.type == "function_call":
            self._append_function_call(call.call_id, call.name, call.arguments)
        elif self._features.custom_tools:
            self._append_rendered(_encode(_CustomCall(call.call_id, call.name, call.input)))
        else:
            self._append_function_call(call.call_id, call.name, _encode({"input": call.input}).decode())

    def _add_output(self, entry: ConversationEntry) -> None:
        output = msgspec.json.decode(entry.raw, type=_Output)
        is_custom = entry.type == "custom_tool_call_output" and self._features.custom_tools
        item_class = _CustomOutput if is_custom else _FunctionOutput
        self._items.append(_encode(item_class(output.call_id, self._render_content(output.output, entry))))

    def _add_client_tool_item(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        call = read_client_call(entry.type, entry.raw)
        result = read_client_result(entry.type, entry.raw)
        if result is not None:
            self._add_client_result(result.call_id, result.text)
        elif call is None:
            self._add_foreign_item(entry, answered_ids)
        elif call.call_id in answered_ids or (entry.turn and call.is_awaited):
            self._awaited_ids[call.call_id] = None
            self._append_function_call(call.call_id, call.name, call.arguments)

    def _add_client_result(self, call_id: str, text: str) -> bool:
        """Add the result of a call of a client tool. False if no such call was rendered."""
        if call_id not in self._awaited_ids:
            return False
        del self._awaited_ids[call_id]
        self._items.append(_encode(_FunctionOutput(call_id, text)))
        return True

    def _add_foreign_item(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        match convert_unsupported_item(entry):
            case ExternalToolCall() as call if call.call_id in answered_ids:
                self._foreign_call_ids.add(call.call_id)
                self._append_function_call(call.call_id, call.name, call.arguments)
            case ExternalToolResult() as result if result.call_id in self._foreign_call_ids:
                self._items.append(_encode(_FunctionOutput(result.call_id, result.text)))
            case ExternalToolResult() as result:
                self._add_client_result(result.call_id, result.text)
            case ToolExchange() as exchange:
                self._add_exchange(exchange, answered_ids)
            case _:
                pass

    def _render_content(self, content: str | list[Raw] | None, entry: ConversationEntry) -> str | list[Raw]:
        """The parts unchanged, except for resolved files. Raises InvalidRequest."""
        if content is None or isinstance(content, str):
            return content or ""
        files = iter(entry.attachments)
        return [self._render_part(raw, files) for raw in content]

    def _render_part(self, raw: Raw, attachments: Iterator[Attachment]) -> Raw:
        part = _part_decoder.decode(raw)
        attachment = next(attachments, None) if is_file_part(part.type) else None
        if attachment is None or not attachment.name:
            return _check_part(raw, part)
        if attachment.gone:
            return Raw(_encode(InputText(describe_unshown_file(attachment))))
        if part.type == "input_image":
            return (
                _replace_file_id(raw)
                if attachment.data is None
                else _replace_file_id(raw, image_url=attachment.data)
            )
        takes_files = (self._features.takes_files or attachment.sent_to_model) and not attachment.too_large
        if part.file_data and takes_files:
            return _replace_file_id(raw)
        rendered = render_file(_file_decoder.decode(raw), attachment, takes_files=takes_files)
        if isinstance(rendered, str):
            return Raw(_encode(InputText(rendered)))
        return Raw(_encode(_InputFile(rendered.filename, rendered.file_data)))

    def _add_exchange(self, exchange: ToolExchange, answered_ids: set[str | None]) -> None:
        if exchange.half == "call" and exchange.call_id not in answered_ids:
            return  # its result is missing
        if exchange.half != "result":
            self._hosted_call_ids.add(exchange.call_id)
            self._append_function_call(exchange.call_id, exchange.name, exchange.arguments)
        if exchange.half == "call":
            return
        output: str | list[Raw] = exchange.output
        if exchange.images and self._features.takes_images:
            images = [Raw(_encode(_InputImage(url))) for url in exchange.images]
            output = [Raw(_encode(InputText(exchange.output))), *images]
        self._results.append(_encode(_FunctionOutput(exchange.call_id, output)))


def _get_answered_id(entry: ConversationEntry) -> str | None:
    output = msgspec.json.decode(entry.raw, type=_CallOutputId)
    return output.call_id or output.id


def _check_part(raw: Raw, part: _Part) -> Raw:
    """The part unchanged. Raises InvalidRequest for a file_id that the server does not know."""
    if part.file_id:
        raise InvalidRequest(
            f"The {sanitize_name(part.type)} with the file_id {sanitize_name(part.file_id)!r} cannot be shown to this "
            "model: its server takes files inline or by their address.",
            param="input",
        )
    return raw


def _replace_file_id(raw: Raw, **replacements: str) -> Raw:
    """The part without its file_id, with the content instead."""
    fields = {name: value for name, value in _object_decoder.decode(raw).items() if name != "file_id"}
    return Raw(_encode(fields | replacements))
