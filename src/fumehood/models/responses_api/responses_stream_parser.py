"""Parses responses of servers with the Responses API.

Items are identified by their output index, since some servers change an item's id between events. Of the server's ids,
only call ids are passed on: results refer to them.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import Raw

from fumehood.models.responses_api.reasoning_origin import ReasoningOrigin
from fumehood.models.upstream.stream_parser import (
    MAX_CALLS,
    MAX_LINE_BYTES,
    MAX_RESPONSE_BYTES,
    CallIdChooser,
    InputTokenDetails,
    MalformedOutput,
    OutputTokenDetails,
    UpstreamStreamParser,
    arguments_to_json,
    decode_short_text,
    make_usage,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.conversation import COMPACTION_TYPE
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughDelta,
    ModelPassthroughItem,
    ModelPassthroughStarted,
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
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import MessagePhase, UrlCitationAnnotation
from fumehood.protocol.openai.responses import Usage
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
    PassthroughItemEvent,
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallCommandDone,
)

_ID_PREFIX = re.compile(r"([a-z]{1,8})_")
_ITEM_TYPE = re.compile(r"[a-z][a-z_:.-]{0,63}")
_PHASES: Mapping[str | None, MessagePhase] = {"commentary": "commentary", "final_answer": "final_answer"}
# Calls, besides functions and custom tools, that the client must answer.
_CLIENT_CALL_TYPES = frozenset(
    {"apply_patch_call", "local_shell_call", "computer_call", "mcp_approval_request"}
)
# Items whose parts the client gets while the server writes them.
_STREAMED_ITEM_TYPES = frozenset({"shell_call", "apply_patch_call"})
_INPUT_PREFIX = '{"input":"'
_NULL = Raw(b"null")


# --- wire types ---------------------------------------------------------------------------------------


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
        """Whether the call is only a name and arguments. Others have fields that the server wants back."""
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


class _Usage(msgspec.Struct):
    input_tokens: float | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None
    input_tokens_details: InputTokenDetails | None = None
    output_tokens_details: OutputTokenDetails | None = None


class _IncompleteDetails(msgspec.Struct):
    reason: str | None = None


class _UpstreamEvent(msgspec.Struct):
    """An event of any type, a whole response, or an error."""

    type: str = ""
    id: Raw = _NULL
    model: Raw = _NULL
    status: str | None = None
    output: list[Raw] | None = None
    usage: _Usage | None = None
    incomplete_details: _IncompleteDetails | None = None
    error: Raw = _NULL
    delta: str | None = None
    output_index: int | None = None
    item_id: str | None = None
    summary_index: int | None = None
    command_index: int | None = None
    command: str | None = None
    diff: str | None = None
    logprobs: list[Raw] | None = None
    text: str | dict[str, Raw] | None = None  # in a response: the requested text format
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


class ResponsesStreamParser(UpstreamStreamParser[_UpstreamEvent]):
    """Parses one turn of the Responses API.

    origin: the server and model, recorded with encrypted reasoning.
    used_call_ids: as in the request.
    """

    def __init__(
        self,
        errors: UpstreamErrorFactory,
        origin: ReasoningOrigin,
        used_call_ids: Container[str] = frozenset[str](),
        *,
        make_id: Callable[[str], str] = new_id,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        super().__init__(errors, _event_decoder, max_line_bytes=max_line_bytes, max_bytes=max_bytes)
        self._origin = origin
        self._make_id = make_id
        self._open_items: set[_ItemKey] = set()
        self._items_with_content: set[_ItemKey] = set()  # emitted since their current part began
        self._open_calls: dict[_ItemKey, _OpenCall] = {}
        self._call_ids = CallIdChooser(used_call_ids, make_id)
        self._started_items: dict[_ItemKey, tuple[int, str]] = {}  # passed through: their keys and our ids
        self._started_count = 0
        self._has_items = False
        self._response_id = self._response_model = _NULL

    @property
    def _is_turn_complete(self) -> bool:
        return False  # only a response event ends the turn

    def _handle_event(self, event: _UpstreamEvent, payload: bytes, events: list[AnyModelEvent]) -> bool:  # noqa: ARG002
        self._has_event = True
        handler = _HANDLERS.get(event.type)
        if handler is not None:
            handler(self, event, events)
        elif self._is_document or event.error != _NULL or event.object == "error":
            self._finish_response(event, events)
        return False

    def _is_ignorable(self, payload: bytes) -> bool:
        """Skip events of unknown types."""
        try:
            event_type = msgspec.json.decode(payload, type=_Tag).type
        except (ValueError, RecursionError):
            return False
        return bool(event_type) and event_type not in _HANDLERS

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
        full_text = arguments_to_json(event.arguments) or event.input
        if call is not None and not call.has_arguments and full_text:
            _append_arguments(call, full_text, events)

    def _on_other_delta(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        if event.delta:
            self._items_with_content.add(_get_item_key(event))
            events.append(_make_delta(event, event.delta))

    # ---- parts: some servers send them without deltas ---------------------------------------------------------

    def _on_part_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:  # noqa: ARG002
        self._items_with_content.discard(_get_item_key(event))

    def _on_part_done(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        full_text = event.refusal or event.text
        if isinstance(full_text, str) and full_text and _get_item_key(event) not in self._items_with_content:
            self._items_with_content.add(_get_item_key(event))
            events.append(_make_delta(event, full_text))

    def _on_annotation_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        events += _decode_citations([event.annotation])

    # ---- items ------------------------------------------------------------------------------------------------

    def _on_item_added(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        item = _item_decoder.decode(event.item)
        key = _get_item_key(event, item)
        is_new = key not in self._open_items
        self._begin_item(key, item, events)
        if is_new and item.type in _STREAMED_ITEM_TYPES:
            item_id = self._make_item_id(item.id)
            started = ModelPassthroughStarted(self._started_count, _replace_item_id(event.item, item_id))
            self._started_count += 1
            self._started_items[key] = (started.key, item_id)
            events.append(started)

    def _on_item_part(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        """Pass on a part of a command or patch."""
        key, item_id = self._started_items.get(_get_item_key(event), (None, ""))
        part = _make_item_event(event, item_id)
        if key is not None and part is not None:
            events.append(ModelPassthroughDelta(key, part))

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
        """Emit what the deltas of a complete item have not contained."""
        item = _item_decoder.decode(raw)
        key = _get_item_key(event, item)
        self._begin_item(key, item, events)
        self._open_items.discard(key)
        self._has_items = True
        if item.type == "message":
            if key not in self._items_with_content:
                _emit_message(item.content, events)
        elif item.type == "reasoning":
            if key not in self._items_with_content:
                _emit_reasoning(item, events)
            content = item.encrypted_content
            events.append(ModelReasoningEnded(self._origin.wrap(item.id, content) if content else None))
        elif item.is_plain_call:
            full_text = item.input if item.type == "custom_tool_call" else arguments_to_json(item.arguments)
            self._finish_call(key, full_text or "", events)
        elif _ITEM_TYPE.fullmatch(item.type) and item.type != COMPACTION_TYPE:
            started, item_id = self._started_items.pop(key, (None, ""))
            replaced = _replace_item_id(raw, item_id or self._make_item_id(item.id))
            events.append(ModelPassthroughItem(replaced, item.awaits_client, started))

    def _make_item_id(self, server_id: str | None) -> str:
        """An id of ours with the prefix of the server's."""
        found = _ID_PREFIX.match(server_id or "")
        return self._make_id(found[1] if found else "item")

    # ---- calls ------------------------------------------------------------------------------------------------

    def _begin_call(self, key: _ItemKey, item: _Item, events: list[AnyModelEvent]) -> None:
        if not item.name:
            raise MalformedOutput("it called a function without naming it")
        if self._call_ids.count >= MAX_CALLS:
            raise MalformedOutput(f"it made more than {MAX_CALLS} calls in one turn")
        call = self._open_calls[key] = _OpenCall(self._call_ids.count, item.type == "custom_tool_call")
        events.append(ModelCallStarted(call.key, self._call_ids.choose(item.call_id), item.name))

    def _finish_call(self, key: _ItemKey, full_arguments: str, events: list[AnyModelEvent]) -> None:
        """End a call; `full_arguments` are used if there were no deltas."""
        call = self._open_calls.pop(key, None)
        if call is None:
            return
        if not call.has_arguments:
            _append_arguments(call, full_arguments if full_arguments or call.is_custom else "{}", events)
        if call.is_custom:
            events.append(ModelCallArgumentsDelta(call.key, '"}'))

    # ---- end of the response ----------------------------------------------------------------------------------

    def _on_response_ended(self, event: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        full_text = event.response if event.response != _NULL else Raw(b"{}")
        response = _response_decoder.decode(full_text)
        response.status = response.status or event.type.rpartition(".")[2]
        self._finish_response(response, events)

    def _finish_response(self, response: _UpstreamEvent, events: list[AnyModelEvent]) -> None:
        """End the turn as the response says. An error in place of a response is accepted, too."""
        if response.status not in ("completed", "incomplete"):
            self.failure = self._create_failure(response)
            return
        if not self._has_items:
            for index, raw in enumerate(response.output or ()):
                self._finish_item(_UpstreamEvent(output_index=index), raw, events)
        reason: TurnEndReason | None = None
        if response.status == "incomplete":
            details = response.incomplete_details
            reason = (
                "content_filter" if details is not None and details.reason == "content_filter" else "length"
            )
        self._response_id, self._response_model = response.id, response.model
        self._finish_turn(events, reason, _convert_usage(response.usage))

    def _create_failure(self, response: _UpstreamEvent) -> ModelError:
        if response.error != _NULL:
            return self._errors.from_event(bytes(response.error))
        if response.message or response.code:
            error = {"message": response.message, "code": response.code}
            return self._errors.from_event(msgspec.json.encode(error))
        if response.status is None:
            return self._errors.invalid_response("its response is of another kind")
        return self._errors.invalid_response(f"its response has the status {response.status}")

    def _finish_turn(
        self, events: list[AnyModelEvent], reason: TurnEndReason | None = None, usage: Usage | None = None
    ) -> None:
        for key in list(self._open_calls):
            self._finish_call(key, "", events)
        events.append(
            ModelTurnEnded(
                reason or ("calls" if self._call_ids.count else "stop"),
                usage,
                decode_short_text(self._response_id),
                decode_short_text(self._response_model),
            )
        )
        self.has_ended = True

    handlers: ClassVar[Mapping[str, "_Handler"]] = {  # pyright: ignore[reportAssignmentType]
        "response.output_text.delta": _on_text_delta,
        "response.function_call_arguments.delta": _on_arguments_delta,
        "response.custom_tool_call_input.delta": _on_arguments_delta,
        "response.function_call_arguments.done": _on_arguments_done,
        "response.custom_tool_call_input.done": _on_arguments_done,
        "response.shell_call_command.added": _on_item_part,
        "response.shell_call_command.delta": _on_item_part,
        "response.shell_call_command.done": _on_item_part,
        "response.apply_patch_call_operation_diff.delta": _on_item_part,
        "response.apply_patch_call_operation_diff.done": _on_item_part,
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
    """The output index of an item, or its id if the server sends none."""
    if event.output_index is not None:
        return event.output_index
    return event.item_id if item is None else item.id


def _replace_item_id(raw: Raw, item_id: str) -> Raw:
    fields = _object_decoder.decode(raw)
    fields["id"] = Raw(msgspec.json.encode(item_id))
    return _ensure_utf8(Raw(msgspec.json.encode(fields)))


def _make_item_event(event: _UpstreamEvent, item_id: str) -> PassthroughItemEvent | None:
    """The client's event for a part of a command or patch; None if it lacks something."""
    number = event.command_index or 0
    match event:
        case _UpstreamEvent(type="response.shell_call_command.added"):
            return ShellCallCommandAdded(output_index=-1, command_index=number, command=event.command or "")
        case _UpstreamEvent(type="response.shell_call_command.delta", delta=str() as delta):
            return ShellCallCommandDelta(output_index=-1, command_index=number, delta=delta)
        case _UpstreamEvent(type="response.shell_call_command.done", command=str() as command):
            return ShellCallCommandDone(output_index=-1, command_index=number, command=command)
        case _UpstreamEvent(type="response.apply_patch_call_operation_diff.delta", delta=str() as delta):
            return ApplyPatchDiffDelta(item_id=item_id, output_index=-1, delta=delta)
        case _UpstreamEvent(type="response.apply_patch_call_operation_diff.done", diff=str() as diff):
            return ApplyPatchDiffDone(item_id=item_id, output_index=-1, diff=diff)
        case _:
            return None


def _make_text(source: _UpstreamEvent | _Part, text: str) -> ModelTextDelta:
    return ModelTextDelta(text, [*map(_ensure_utf8, source.logprobs or ())])


def _ensure_utf8(raw: Raw) -> Raw:
    """Replace invalid UTF-8 in JSON that is passed on unparsed."""
    encoded = bytes(raw)
    return raw if encoded.isascii() else Raw(encoded.decode(errors="replace").encode())


def _make_delta(event: _UpstreamEvent, text: str) -> AnyModelEvent:
    """The delta of an event, by its type."""
    event_type = event.type
    if event_type.startswith("response.output_text"):
        return _make_text(event, text)
    if event_type.startswith("response.refusal"):
        return ModelRefusalDelta(text)
    if event_type.startswith("response.reasoning_summary"):
        return ModelReasoningSummaryDelta(event.summary_index or 0, text)
    return ModelReasoningDelta(text)


def _append_arguments(call: _OpenCall, text: str, events: list[AnyModelEvent]) -> None:
    """Emit arguments. The input of a custom tool is plain text; it becomes the field `input` of a function."""
    if call.is_custom:
        text = ("" if call.has_arguments else _INPUT_PREFIX) + msgspec.json.encode(text).decode()[1:-1]
    call.has_arguments = True
    if text:
        events.append(ModelCallArgumentsDelta(call.key, text))


def _emit_message(content: str | list[_Part] | None, events: list[AnyModelEvent]) -> None:
    """Emit a complete message."""
    if isinstance(content, str):
        content = [_Part(type="output_text", text=content)]
    for part in content or ():
        if part.text:
            events.append(_make_text(part, part.text))
        if part.refusal:
            events.append(ModelRefusalDelta(part.refusal))
        events += _decode_citations(part.annotations or ())


def _emit_reasoning(item: _Item, events: list[AnyModelEvent]) -> None:
    """Emit a complete reasoning item."""
    for number, part in enumerate(item.summary or ()):
        if part.text:
            events.append(ModelReasoningSummaryDelta(number, part.text))
    content = item.content if isinstance(item.content, list) else ()
    events += [ModelReasoningDelta(part.text) for part in content if part.text]


def _decode_citations(annotations: Iterable[Raw]) -> list[AnyModelEvent]:
    """URL citations only: clients cannot fetch the server's own files."""
    found: list[AnyModelEvent] = []
    for annotation in annotations:
        try:
            found.append(ModelCitation(_citation_decoder.decode(annotation)))
        except msgspec.DecodeError:
            continue
    return found


def _convert_usage(usage: _Usage | None) -> Usage | None:
    return usage and make_usage(
        usage.input_tokens,
        usage.output_tokens,
        usage.total_tokens,
        usage.input_tokens_details,
        usage.output_tokens_details,
    )
