"""A conversation as input of the Responses API, each segment rendered once.

Nothing is sent with an id but reasoning, which its server will not take back without: ids are promised to clients, and
a server that keeps nothing cannot know them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.models.chat_completions.chat_content_parts import (
    ChatFilePart,
    ChatTextPart,
    render_file,
)
from fumehood.models.rendering.foreign_items import ForeignCall, ForeignResult
from fumehood.models.rendering.foreign_items import read_foreign_item as read_foreign
from fumehood.models.rendering.item_content import ItemContent, ItemContentPart, ensure_json_object, join_text
from fumehood.models.rendering.rendering_cache import render_segments
from fumehood.models.responses_api.encrypted_reasoning import ReasoningOrigin
from fumehood.protocol.attachments import Attachment, describe_unshown_file, is_file_part
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.safe_names import sanitize_name

RESPONSES_RENDERING_VERSION = 2  # of these rules: what an earlier one rendered is not used
_PLACEHOLDER_ID = "rs_0"  # where some servers want one and none of them looks
_UNFINISHED_STATUSES = ("in_progress", "incomplete")


# --- items as clients and we wrote them ---------------------------------------------------------------


class _Role(msgspec.Struct):
    role: str = "user"


class _AssistantMessage(msgspec.Struct):
    content: ItemContent = None
    phase: str | None = None


class _InputContent(msgspec.Struct):
    content: str | list[Raw] | None = None


class _Part(msgspec.Struct):
    type: str = ""
    file_id: str | None = None
    file_data: str | None = None


class _Call(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    status: str | None = None
    namespace: str | None = None
    caller: dict[str, Raw] | None = None


class _CallOutputId(msgspec.Struct):
    """The result of a call of any type; that of a local shell has the call's id as its own."""

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


# --- items as they are sent ---------------------------------------------------------------------------


class _InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model said is a string: of a list some servers want ids and more, of a string none."""

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


class _InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class _InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str


class _InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    filename: str
    file_data: str


_encode = msgspec.json.Encoder().encode
_role_decoder = msgspec.json.Decoder(_Role)
_part_decoder = msgspec.json.Decoder(_Part)
_file_decoder = msgspec.json.Decoder(ItemContentPart)
_object_decoder = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesDialect:
    """What models differ in. `customs`: they know custom tools; `foreign`: their server knows items of other tools,
    which others are told of as of functions.
    """

    takes_images: bool = False
    developer_role: bool = False
    replay_reasoning: bool = False
    custom_tools: bool = False
    foreign_items: bool = False
    takes_files: bool = True

    @property
    def cache_key(self) -> str:
        flags = (
            self.takes_images,
            self.developer_role,
            self.replay_reasoning,
            self.custom_tools,
            self.foreign_items,
            self.takes_files,
        )
        return f"responses/{RESPONSES_RENDERING_VERSION}/" + "".join("y" if flag else "n" for flag in flags)


class ResponsesRenderer:
    """Writes conversations as items of the Responses API."""

    def __init__(self, dialect: ResponsesDialect) -> None:
        self._dialect = dialect
        self._cache_key = dialect.cache_key

    def render_input(self, segments: Sequence[ConversationSegment], origin: ReasoningOrigin) -> list[bytes]:
        """The inside of `input`, in pieces that a comma goes between; raises InvalidRequest for what cannot be shown to
        such a server.
        """

        def render(entries: Sequence[ConversationEntry], left: bytes) -> tuple[bytes, bytes]:
            return _SegmentRenderer(self._dialect, origin).render(entries), left

        return render_segments(segments, f"{self._cache_key}/{origin.fingerprint}", render)[0]


class _SegmentRenderer:
    """The rendering of one segment."""

    def __init__(self, dialect: ResponsesDialect, origin: ReasoningOrigin) -> None:
        self._dialect = dialect
        self._origin = origin
        self._items: list[bytes] = []
        self._reasoning: list[bytes] = []  # is sent with what follows from it, or not at all
        self._results: list[bytes] = []  # of hosted calls, to follow all calls of their turn
        self._foreign_call_ids: set[str] = set()  # calls of other tools that were told of
        self._hosted_call_ids: set[str] = set()  # and of hosted ones
        self._turn = 0

    def render(self, entries: Sequence[ConversationEntry]) -> bytes:
        """Raises InvalidRequest."""
        try:
            answered = {_get_answered_id(entry) for entry in entries if entry.type.endswith("_output")}
            for entry in entries:
                self._add_item(entry, answered)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequest(f"An item cannot be read: {error}", param="input") from None
        self._end_turn()
        return b",".join(self._items)

    def _add_item(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        if entry.turn != self._turn or entry.turn == 0:
            self._end_turn(keep_reasoning=entry.turn == self._turn)
            self._turn = entry.turn
        if entry.exchange is not None and self._has_rendered_call(entry.exchange):
            self._add_exchange(entry.exchange, answered_ids)
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
            case "compaction":
                raise InvalidRequest(
                    "An item of type 'compaction' cannot be shown to this model.", param="input"
                )
            case _ if self._dialect.foreign_items:
                self._append_rendered(entry.raw)
            case _:
                self._add_foreign_item(entry, answered_ids)

    def _append_rendered(self, item: bytes) -> None:
        """What the model made, or a client's; the reasoning before it goes with it."""
        self._items += self._reasoning
        self._reasoning.clear()
        self._items.append(item)

    def _end_turn(self, *, keep_reasoning: bool = False) -> None:
        self._items += self._results
        self._results.clear()
        if not keep_reasoning:
            self._reasoning.clear()

    # ---- items ------------------------------------------------------------------------------------------------

    def _add_message(self, entry: ConversationEntry) -> None:
        role = _role_decoder.decode(entry.raw).role
        match role:
            case "assistant":
                said = msgspec.json.decode(entry.raw, type=_AssistantMessage)
                text = join_text(said.content)
                if text:
                    self._append_rendered(_encode(_InputMessage("assistant", text, said.phase or UNSET)))
                return
            case "user" | "system":
                pass
            case "developer":
                role = "developer" if self._dialect.developer_role else "system"
            case other:
                raise InvalidRequest(
                    f"A message cannot have the role {sanitize_name(other)!r}.", param="input"
                )
        content = msgspec.json.decode(entry.raw, type=_InputContent).content
        self._reasoning.clear()
        self._items.append(_encode(_InputMessage(role, self._render_content(content, entry))))

    def _add_reasoning(self, entry: ConversationEntry) -> None:
        """Under seal to the model that made it; as text where the operator says so; else it is not sent."""
        reasoning = msgspec.json.decode(entry.raw, type=_Reasoning)
        summary = reasoning.summary or []
        opened = self._origin.unwrap(reasoning.encrypted_content or "")
        texts = [part.text for part in reasoning.content or () if part.text]
        if opened is not None:
            their_id, sealed = opened
            self._reasoning.append(_encode(_SentReasoning(summary, id=their_id, encrypted_content=sealed)))
        elif texts and self._dialect.replay_reasoning:
            content = [_ReasoningText(text) for text in texts]
            self._reasoning.append(
                _encode(_SentReasoning(summary, id=entry.id or _PLACEHOLDER_ID, content=content))
            )

    def _add_call(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        call = msgspec.json.decode(entry.raw, type=_Call)
        if call.status in _UNFINISHED_STATUSES and call.call_id not in answered_ids:
            self._reasoning.clear()
            return
        if (call.namespace or call.caller) and self._dialect.foreign_items:
            self._append_rendered(entry.raw)
        elif entry.type == "function_call":
            self._append_rendered(
                _encode(_FunctionCall(call.call_id, call.name, ensure_json_object(call.arguments)))
            )
        elif self._dialect.custom_tools:
            self._append_rendered(_encode(_CustomCall(call.call_id, call.name, call.input)))
        else:
            arguments = _encode({"input": call.input}).decode()
            self._append_rendered(_encode(_FunctionCall(call.call_id, call.name, arguments)))

    def _add_output(self, entry: ConversationEntry) -> None:
        told = msgspec.json.decode(entry.raw, type=_Output)
        custom = entry.type == "custom_tool_call_output" and self._dialect.custom_tools
        kind = _CustomOutput if custom else _FunctionOutput
        self._items.append(_encode(kind(told.call_id, self._render_content(told.output, entry))))

    def _add_foreign_item(self, entry: ConversationEntry, answered_ids: set[str | None]) -> None:
        match read_foreign(entry):
            case ForeignCall() as call if call.call_id in answered_ids:
                self._foreign_call_ids.add(call.call_id)
                arguments = ensure_json_object(call.arguments)
                self._append_rendered(_encode(_FunctionCall(call.call_id, call.name, arguments)))
            case ForeignResult() as result if result.call_id in self._foreign_call_ids:
                self._items.append(_encode(_FunctionOutput(result.call_id, result.text)))
            case ToolExchange() as exchange:
                self._add_exchange(exchange, answered_ids)
            case _:
                pass

    def _render_content(self, content: str | list[Raw] | None, entry: ConversationEntry) -> str | list[Raw]:
        """The parts as they are, but for files that are known here; raises InvalidRequest."""
        if content is None or isinstance(content, str):
            return content or ""
        files = iter(entry.attachments)
        return [self._render_part(raw, files) for raw in content]

    def _render_part(self, raw: Raw, attachments: Iterator[Attachment]) -> Raw:
        part = _part_decoder.decode(raw)
        found = next(attachments, None) if is_file_part(part.type) else None
        if found is None or not found.name:
            return _check_part(raw, part)
        if found.gone:
            return Raw(_encode(_InputText(describe_unshown_file(found))))
        if part.type == "input_image":
            return (
                _replace_file_id(raw) if found.data is None else _replace_file_id(raw, image_url=found.data)
            )
        takes_files = (self._dialect.takes_files or found.given) and not found.too_large
        if part.file_data and takes_files:
            return _replace_file_id(raw)
        match render_file(_file_decoder.decode(raw), found, takes_files=takes_files):
            case ChatTextPart(text):
                return Raw(_encode(_InputText(text)))
            case ChatFilePart(file):
                return Raw(_encode(_InputFile(file.filename, file.file_data)))
            case _:
                return raw

    def _has_rendered_call(self, exchange: ToolExchange) -> bool:
        """A result alone is told if its call was: as a function, that is, and not as its server's own."""
        return exchange.tells != "result" or exchange.call_id in self._hosted_call_ids

    def _add_exchange(self, exchange: ToolExchange, answered_ids: set[str | None]) -> None:
        if exchange.tells == "call" and exchange.call_id not in answered_ids:
            return  # nobody can answer it any more
        if exchange.tells != "result":
            self._hosted_call_ids.add(exchange.call_id)
            arguments = ensure_json_object(exchange.arguments)
            self._append_rendered(_encode(_FunctionCall(exchange.call_id, exchange.name, arguments)))
        if exchange.tells == "call":
            return
        output: str | list[Raw] = exchange.output
        if exchange.images and self._dialect.takes_images:
            images = [Raw(_encode(_InputImage(url))) for url in exchange.images]
            output = [Raw(_encode(_InputText(exchange.output))), *images]
        self._results.append(_encode(_FunctionOutput(exchange.call_id, output)))


def _get_answered_id(entry: ConversationEntry) -> str | None:
    answer = msgspec.json.decode(entry.raw, type=_CallOutputId)
    return answer.call_id or answer.id


def _check_part(raw: Raw, part: _Part) -> Raw:
    """The part as it is; raises InvalidRequest for a file that only this server could know."""
    if part.file_id:
        raise InvalidRequest(
            f"The {sanitize_name(part.type)} with the file_id {sanitize_name(part.file_id)!r} cannot be shown to this "
            "model: its server takes files inline or by their address.",
            param="input",
        )
    return raw


def _replace_file_id(raw: Raw, **replacements: str) -> Raw:
    """The part with its content in place of an id that the server could not know."""
    fields = {name: value for name, value in _object_decoder.decode(raw).items() if name != "file_id"}
    return Raw(_encode(fields | replacements))
