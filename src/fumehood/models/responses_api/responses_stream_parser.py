"""Reads the answer of a server that speaks the Responses API.

Items are told apart by their place in the output, since some servers change an item's id from event to event. None of
the server's ids is passed on but those of calls, by which results are matched.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import Raw

from fumehood.models.responses_api.encrypted_reasoning import ReasoningOrigin
from fumehood.models.upstream.stream_parser import (
    MAX_LINE_BYTES,
    MAX_RESPONSE_BYTES,
    UpstreamStreamParser,
    arguments_to_json,
    clamp_token_count,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.conversation import COMPACTION_TYPE
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughItem,
    ModelReasoningDelta,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
    TurnEndReason,
)
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.ids import MAX_ID_LENGTH, new_id
from fumehood.protocol.openai.items import MessagePhase, UrlCitationAnnotation
from fumehood.protocol.openai.responses import InputTokensDetails, OutputTokensDetails, Usage

_MAX_CALLS = 128
_ID_PREFIX = re.compile(r"([a-z]{1,8})_")
_ITEM_TYPE = re.compile(r"[a-z][a-z_:.-]{0,63}")
_PHASES: Mapping[str | None, MessagePhase] = {"commentary": "commentary", "final_answer": "final_answer"}
# What a client has to answer although it is none of its functions and custom tools.
_CLIENT_CALL_TYPES = frozenset(
    {"apply_patch_call", "local_shell_call", "computer_call", "mcp_approval_request"}
)
_INPUT_PREFIX = '{"input":"'
_NULL = Raw(b"null")


# --- as servers write it ------------------------------------------------------------------------------


class _Tag(msgspec.Struct):
    type: str = ""


class _Part(_Tag):
    text: str = ""
    refusal: str = ""
    annotations: list[Raw] | None = None
    logprobs: list[Raw] | None = None


class _Item(msgspec.Struct):
    """An item of any type."""

    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, object] | None = None
    execution: str | None = None
    environment: _Tag | None = None
    phase: str | None = None
    arguments: str | dict[str, object] | None = None
    input: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None

    @property
    def is_plain_call(self) -> bool:
        """A call that is its name and its arguments. Of others the server wants back what nobody here knows."""
        return self.type in ("function_call", "custom_tool_call") and not self.namespace and not self.caller

    @property
    def awaits_client(self) -> bool:
        match self.type:
            case "function_call" | "custom_tool_call":
                return True
            case "shell_call":
                return self.environment is None or self.environment.type == "local"
            case "tool_search_call":
                return self.execution == "client"
            case _:
                return self.type in _CLIENT_CALL_TYPES


class _InputDetails(msgspec.Struct):
    cached_tokens: float | None = None
    cache_write_tokens: float | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: float | None = None


class _Usage(msgspec.Struct):
    input_tokens: float | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _IncompleteDetails(msgspec.Struct):
    reason: str | None = None


class _UpstreamEvent(msgspec.Struct):
    """An event of any type, a whole response, or an error."""

    type: str = ""
    status: str | None = None
    output: list[Raw] | None = None
    usage: _Usage | None = None
    incomplete_details: _IncompleteDetails | None = None
    error: Raw = _NULL
    delta: str | None = None
    output_index: int | None = None
    item_id: str | None = None
    summary_index: int | None = None
    logprobs: list[Raw] | None = None
    text: str | dict[str, Raw] | None = None  # of a response, what was asked of its text
    refusal: str | None = None
    arguments: str | dict[str, object] | None = None
    input: str | None = None
    annotation: Raw = _NULL
    item: Raw = _NULL
    response: Raw = _NULL
    object: str | None = None
    message: str | None = None
    code: str | int | None = None


_event_decoder = msgspec.json.Decoder(_UpstreamEvent)
_item_decoder = msgspec.json.Decoder(_Item, strict=False)
_response_decoder = msgspec.json.Decoder(_UpstreamEvent, strict=False)
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_citation_decoder = msgspec.json.Decoder(UrlCitationAnnotation)

type _ItemKey = int | str | None


@dataclass(slots=True, eq=False)
class _OpenCall:
    key: int
    is_custom: bool
    has_arguments: bool = False


class _MalformedOutput(ValueError):
    """What cannot be made sense of."""


class ResponsesStreamParser(UpstreamStreamParser[_UpstreamEvent]):
    """Reads one answer of a Responses API.

    origin: who makes the reasoning that is sealed.
    """

    def __init__(
        self,
        errors: UpstreamErrorFactory,
        origin: ReasoningOrigin,
        *,
        make_id: Callable[[str], str] = new_id,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        super().__init__(errors, _event_decoder, max_line_bytes=max_line_bytes, max_bytes=max_bytes)
        self._origin = origin
        self._make_id = make_id
        self._open_items: set[_ItemKey] = set()  # items that have begun
        self._items_with_content: set[_ItemKey] = (
            set()
        )  # those of which something was told since their last part began
        self._open_calls: dict[_ItemKey, _OpenCall] = {}  # those that are open
        self._call_ids: set[str] = set()
        self._has_items = False

    @property
    def _is_turn_complete(self) -> bool:
        return False  # a response says how it ended, or it was cut off

    def _handle_event(self, event: _UpstreamEvent, payload: bytes, events: list[AnyModelEvent]) -> bool:  # noqa: ARG002
        self._has_event = True
        handler = _HANDLERS.get(event.type)
        try:
            if handler is not None:
                handler(self, event, events)
            elif self._is_document or event.error != _NULL or event.object == "error":
                self._finish_response(event, events)
        except (_MalformedOutput, msgspec.DecodeError, RecursionError) as error:
            self.failure = self._errors.invalid_response(str(error))
        return False

    def _is_ignorable(self, payload: bytes) -> bool:
        """Events that nobody here asked for may look as they like."""
        try:
            kind = msgspec.json.decode(payload, type=_Tag).type
        except (ValueError, RecursionError):
            return False
        return bool(kind) and kind not in _HANDLERS

    # ---- deltas -----------------------------------------------------------------------------------------------

    def _on_text_delta(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        if event.delta:
            self._items_with_content.add(_get_item_key(event))
            events.append(_make_text(event, event.delta) if event.logprobs else ModelTextDelta(event.delta))

    def _on_arguments_delta(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        call = self._open_calls.get(_get_item_key(event))
        if call is not None and event.delta:
            _append_arguments(call, event.delta, events)

    def _on_arguments_done(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        call = self._open_calls.get(_get_item_key(event))
        whole = arguments_to_json(event.arguments) or event.input
        if call is not None and not call.has_arguments and whole:
            _append_arguments(call, whole, events)

    def _on_other_delta(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        if event.delta:
            self._items_with_content.add(_get_item_key(event))
            events.append(_make_delta(event, event.delta))

    # ---- parts, of which some servers tell the whole only -----------------------------------------------------

    def _on_part_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:  # noqa: ARG002
        self._items_with_content.discard(_get_item_key(event))

    def _on_part_done(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        whole = event.refusal or event.text
        if isinstance(whole, str) and whole and _get_item_key(event) not in self._items_with_content:
            self._items_with_content.add(_get_item_key(event))
            events.append(_make_delta(event, whole))

    def _on_annotation_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        events += _decode_citations([event.annotation])

    # ---- items ------------------------------------------------------------------------------------------------

    def _on_item_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        item = _item_decoder.decode(event.item)
        self._begin_item(_get_item_key(event, item), item, events)

    def _on_item_done(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        self._finish_item(event, event.item, events)

    def _begin_item(self, key: _ItemKey, item: _Item, events: list[AnyModelEvent]) -> None:
        if key in self._open_items:
            return
        self._open_items.add(key)
        self._items_with_content.discard(key)
        if item.type == "message":
            events.append(ModelMessageStarted(_PHASES.get(item.phase)))
        elif item.type == "reasoning":
            events.append(ModelReasoningStarted())
        elif item.is_plain_call:
            self._begin_call(key, item, events)

    def _finish_item(self, event: _UpstreamEvent, raw: Raw, events: list[AnyModelEvent]) -> None:
        """An item that is whole: what was not told of it before is told now."""
        item = _item_decoder.decode(raw)
        place = _get_item_key(event, item)
        self._begin_item(place, item, events)
        self._open_items.discard(place)
        self._has_items = True
        if item.type == "message":
            if place not in self._items_with_content:
                _emit_message(item.content, events)
        elif item.type == "reasoning":
            if place not in self._items_with_content:
                _emit_reasoning(item, events)
            content = item.encrypted_content
            events.append(ModelReasoningEnded(self._origin.wrap(item.id, content) if content else None))
        elif item.is_plain_call:
            whole = item.input if item.type == "custom_tool_call" else arguments_to_json(item.arguments)
            self._finish_call(place, whole or "", events)
        elif _ITEM_TYPE.fullmatch(item.type) and item.type != COMPACTION_TYPE:
            events.append(ModelPassthroughItem(self._replace_item_id(raw), item.awaits_client))

    def _replace_item_id(self, raw: Raw) -> Raw:
        """The item under an id of ours, of the same kind as the server's."""
        fields = _object_decoder.decode(raw)
        theirs = msgspec.json.decode(fields.get("id", _NULL))
        found = _ID_PREFIX.match(theirs) if isinstance(theirs, str) else None
        fields["id"] = Raw(msgspec.json.encode(self._make_id(found[1] if found else "item")))
        return _ensure_utf8(Raw(msgspec.json.encode(fields)))

    # ---- calls ------------------------------------------------------------------------------------------------

    def _begin_call(self, key: _ItemKey, item: _Item, events: list[AnyModelEvent]) -> None:
        if not item.name:
            raise _MalformedOutput("it called a function without naming it")
        if len(self._call_ids) >= _MAX_CALLS:
            raise _MalformedOutput(f"it made more than {_MAX_CALLS} calls in one turn")
        call_id = item.call_id
        if not call_id or len(call_id) > MAX_ID_LENGTH or call_id in self._call_ids:
            call_id = self._make_id("call")
        call = self._open_calls[key] = _OpenCall(len(self._call_ids), item.type == "custom_tool_call")
        self._call_ids.add(call_id)
        events.append(ModelCallStarted(call.key, call_id, item.name))

    def _finish_call(self, key: _ItemKey, full_arguments: str, events: list[AnyModelEvent]) -> None:
        """No more of it will come; `whole` is what it says, if nothing of it was heard."""
        call = self._open_calls.pop(key, None)
        if call is None:
            return
        if not call.has_arguments:
            _append_arguments(call, full_arguments if full_arguments or call.is_custom else "{}", events)
        if call.is_custom:
            events.append(ModelCallArgumentsDelta(call.key, '"}'))

    # ---- the end ----------------------------------------------------------------------------------------------

    def _on_response_ended(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        whole = event.response if event.response != _NULL else Raw(b"{}")
        response = _response_decoder.decode(whole)
        response.status = response.status or event.type.rpartition(".")[2]
        self._finish_response(response, events)

    def _finish_response(self, response: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        """How a response ended; also for an error instead of one, which is a field of it or all there is."""
        if response.status not in ("completed", "incomplete"):
            self.failure = self._create_failure(response)
            return
        if not self._has_items:
            for place, raw in enumerate(response.output or ()):
                self._finish_item(_UpstreamEvent(output_index=place), raw, events)
        reason: TurnEndReason | None = None
        if response.status == "incomplete":
            why = response.incomplete_details
            reason = "content_filter" if why is not None and why.reason == "content_filter" else "length"
        self._finish_turn(events, reason, _convert_usage(response.usage))

    def _create_failure(self, response: _UpstreamEvent) -> ModelError:
        if response.error != _NULL:
            return self._errors.from_event(bytes(response.error))
        if response.message or response.code:
            error = {"message": response.message, "code": response.code}
            return self._errors.from_event(msgspec.json.encode(error))
        if response.status is None:
            return self._errors.invalid_response("its answer is not an answer to this")
        return self._errors.invalid_response(f"its response ended as {response.status}")

    def _finish_turn(
        self, events: list[AnyModelEvent], reason: TurnEndReason | None = None, usage: Usage | None = None
    ) -> None:
        for place in list(self._open_calls):
            self._finish_call(place, "", events)
        events.append(ModelTurnEnded(reason or ("calls" if self._call_ids else "stop"), usage))
        self.has_ended = True

    handlers: ClassVar[Mapping[str, "_Handler"]] = {  # pyright: ignore[reportAssignmentType]
        "response.output_text.delta": _on_text_delta,
        "response.function_call_arguments.delta": _on_arguments_delta,
        "response.custom_tool_call_input.delta": _on_arguments_delta,
        "response.function_call_arguments.done": _on_arguments_done,
        "response.custom_tool_call_input.done": _on_arguments_done,
        "response.reasoning_text.delta": _on_other_delta,
        "response.reasoning_summary_text.delta": _on_other_delta,
        "response.refusal.delta": _on_other_delta,
        "response.content_part.added": _on_part_added,
        "response.reasoning_summary_part.added": _on_part_added,
        "response.output_text.done": _on_part_done,
        "response.reasoning_text.done": _on_part_done,
        "response.reasoning_summary_text.done": _on_part_done,
        "response.refusal.done": _on_part_done,
        "response.output_text.annotation.added": _on_annotation_added,
        "response.output_item.added": _on_item_added,
        "response.output_item.done": _on_item_done,
        "response.completed": _on_response_ended,
        "response.incomplete": _on_response_ended,
        "response.failed": _on_response_ended,
        "response.cancelled": _on_response_ended,
        "error": _finish_response,
    }


type _Handler = Callable[[ResponsesStreamParser, _UpstreamEvent, list[AnyModelEvent]], None]
_HANDLERS = ResponsesStreamParser.handlers


def _get_item_key(event: _UpstreamEvent, item: _Item | None = None) -> _ItemKey:
    """What tells an item from others: its place, which every server should tell, or else its id."""
    if event.output_index is not None:
        return event.output_index
    return event.item_id if item is None else item.id


def _make_text(source: _UpstreamEvent | _Part, text: str) -> ModelTextDelta:
    return ModelTextDelta(text, [*map(_ensure_utf8, source.logprobs or ())])


def _ensure_utf8(raw: Raw) -> Raw:
    """What is passed on without being looked at is UTF-8 at least."""
    written = bytes(raw)
    return raw if written.isascii() else Raw(written.decode(errors="replace").encode())


def _make_delta(event: _UpstreamEvent, text: str) -> AnyModelEvent:
    """What an event of a part says, by the kind of the part."""
    kind = event.type
    if kind.startswith("response.output_text"):
        return _make_text(event, text)
    if kind.startswith("response.refusal"):
        return ModelRefusalDelta(text)
    if kind.startswith("response.reasoning_summary"):
        return ModelReasoningSummaryDelta(event.summary_index or 0, text)
    return ModelReasoningDelta(text)


def _append_arguments(call: _OpenCall, text: str, events: list[AnyModelEvent]) -> None:
    """A custom tool's input is plain text; told as a field, it is as if the tool were a function."""
    if call.is_custom:
        text = ("" if call.has_arguments else _INPUT_PREFIX) + msgspec.json.encode(text).decode()[1:-1]
    call.has_arguments = True
    if text:
        events.append(ModelCallArgumentsDelta(call.key, text))


def _emit_message(content: str | list[_Part] | None, events: list[AnyModelEvent]) -> None:
    """A whole message."""
    if isinstance(content, str):
        content = [_Part(type="output_text", text=content)]
    for part in content or ():
        if part.text:
            events.append(_make_text(part, part.text))
        if part.refusal:
            events.append(ModelRefusalDelta(part.refusal))
        events += _decode_citations(part.annotations or ())


def _emit_reasoning(item: _Item, events: list[AnyModelEvent]) -> None:
    """A whole reasoning."""
    for number, part in enumerate(item.summary or ()):
        if part.text:
            events.append(ModelReasoningSummaryDelta(number, part.text))
    content = item.content if isinstance(item.content, list) else ()
    events += [ModelReasoningDelta(part.text) for part in content if part.text]


def _decode_citations(annotations: Iterable[Raw]) -> list[AnyModelEvent]:
    """Addresses only: files of the server's own are nothing that a client could get from here."""
    found: list[AnyModelEvent] = []
    for annotation in annotations:
        try:
            found.append(ModelCitation(_citation_decoder.decode(annotation)))
        except msgspec.DecodeError:
            continue
    return found


def _convert_usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    read, written = clamp_token_count(usage.input_tokens), clamp_token_count(usage.output_tokens)
    input_details = usage.input_tokens_details or _InputDetails()
    output_details = usage.output_tokens_details or _OutputDetails()
    return Usage(
        input_tokens=read,
        input_tokens_details=InputTokensDetails(
            cached_tokens=clamp_token_count(input_details.cached_tokens),
            cache_write_tokens=clamp_token_count(input_details.cache_write_tokens),
        ),
        output_tokens=written,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=clamp_token_count(output_details.reasoning_tokens)
        ),
        total_tokens=max(clamp_token_count(usage.total_tokens), read + written),
    )
