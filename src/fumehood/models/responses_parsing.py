"""Reads the answer of a server that speaks the Responses API; imports msgspec, siblings and `protocol`.

Items are told apart by their place in the output, since some servers change an item's id from event to event. None of
the server's ids is passed on but those of calls, by which results are matched.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import Raw

from fumehood.models.answers import LONGEST_ANSWER, LONGEST_LINE, AnswerParser, arguments_of, tokens
from fumehood.models.sealed import Origin
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.conversation import COMPACTION
from fumehood.protocol.errors import ModelError
from fumehood.protocol.ids import LONGEST_ID, new_id
from fumehood.protocol.items import Phase, UrlCitation
from fumehood.protocol.models import (
    AnyModelEvent,
    CallArguments,
    CallStarted,
    Cited,
    ItemPassed,
    MessageStarted,
    ReasoningEnded,
    ReasoningStarted,
    Refused,
    Summary,
    Text,
    Thought,
    TurnEnd,
    TurnEnded,
)
from fumehood.protocol.responses import InputTokensDetails, OutputTokensDetails, Usage

_MOST_CALLS = 128
_PREFIX = re.compile(r"([a-z]{1,8})_")
_TYPE = re.compile(r"[a-z][a-z_:.-]{0,63}")
_PHASES: Mapping[str | None, Phase] = {"commentary": "commentary", "final_answer": "final_answer"}
# What a client has to answer although it is none of its functions and custom tools.
_FOR_CLIENTS = frozenset({"apply_patch_call", "local_shell_call", "computer_call", "mcp_approval_request"})
_INPUT = '{"input":"'
_NOTHING = Raw(b"null")


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
                return self.type in _FOR_CLIENTS


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


class _Why(msgspec.Struct):
    reason: str | None = None


class _Told(msgspec.Struct):
    """An event of any type, a whole response, or an error."""

    type: str = ""
    status: str | None = None
    output: list[Raw] | None = None
    usage: _Usage | None = None
    incomplete_details: _Why | None = None
    error: Raw = _NOTHING
    delta: str | None = None
    output_index: int | None = None
    item_id: str | None = None
    summary_index: int | None = None
    logprobs: list[Raw] | None = None
    text: str | dict[str, Raw] | None = None  # of a response, what was asked of its text
    refusal: str | None = None
    arguments: str | dict[str, object] | None = None
    input: str | None = None
    annotation: Raw = _NOTHING
    item: Raw = _NOTHING
    response: Raw = _NOTHING
    object: str | None = None
    message: str | None = None
    code: str | int | None = None


_events = msgspec.json.Decoder(_Told)
_items = msgspec.json.Decoder(_Item, strict=False)
_responses = msgspec.json.Decoder(_Told, strict=False)
_objects = msgspec.json.Decoder(dict[str, Raw])
_sources = msgspec.json.Decoder(UrlCitation)

type _Place = int | str | None


@dataclass(slots=True, eq=False)
class _Call:
    key: int
    is_custom: bool
    written: bool = False


class _Strange(ValueError):
    """What cannot be made sense of."""


class ResponsesParser(AnswerParser[_Told]):
    """Reads one answer of a Responses API.

    origin: who makes the reasoning that is sealed.
    """

    def __init__(
        self,
        errors: UpstreamErrors,
        origin: Origin,
        *,
        make_id: Callable[[str], str] = new_id,
        longest: int = LONGEST_LINE,
        most: int = LONGEST_ANSWER,
    ) -> None:
        super().__init__(errors, _events, longest=longest, most=most)
        self._origin = origin
        self._make_id = make_id
        self._open: set[_Place] = set()  # items that have begun
        self._said: set[_Place] = set()  # those of which something was told since their last part began
        self._calls: dict[_Place, _Call] = {}  # those that are open
        self._call_ids: set[str] = set()
        self._made_items = False

    @property
    def _may_end(self) -> bool:
        return False  # a response says how it ended, or it was cut off

    def _take(self, told: _Told, payload: bytes, events: list[AnyModelEvent]) -> bool:  # noqa: ARG002
        self._heard = True
        handler = _HANDLERS.get(told.type)
        try:
            if handler is not None:
                handler(self, told, events)
            elif self._is_document or told.error != _NOTHING or told.object == "error":
                self._conclude(told, events)
        except (_Strange, msgspec.DecodeError, RecursionError) as error:
            self.failure = self._errors.unreadable(str(error))
        return False

    def _is_irrelevant(self, payload: bytes) -> bool:
        """Events that nobody here asked for may look as they like."""
        try:
            kind = msgspec.json.decode(payload, type=_Tag).type
        except (ValueError, RecursionError):
            return False
        return bool(kind) and kind not in _HANDLERS

    # ---- deltas -----------------------------------------------------------------------------------------------

    def _text_delta(self, told: _Told, events: list[AnyModelEvent]) -> None:
        if told.delta:
            self._said.add(_place(told))
            events.append(_text(told, told.delta) if told.logprobs else Text(told.delta))

    def _arguments_delta(self, told: _Told, events: list[AnyModelEvent]) -> None:
        call = self._calls.get(_place(told))
        if call is not None and told.delta:
            _write(call, told.delta, events)

    def _arguments_said(self, told: _Told, events: list[AnyModelEvent]) -> None:
        call = self._calls.get(_place(told))
        whole = arguments_of(told.arguments) or told.input
        if call is not None and not call.written and whole:
            _write(call, whole, events)

    def _rarer_delta(self, told: _Told, events: list[AnyModelEvent]) -> None:
        if told.delta:
            self._said.add(_place(told))
            events.append(_piece(told, told.delta))

    # ---- parts, of which some servers tell the whole only -----------------------------------------------------

    def _part_added(self, told: _Told, events: list[AnyModelEvent]) -> None:  # noqa: ARG002
        self._said.discard(_place(told))

    def _part_said(self, told: _Told, events: list[AnyModelEvent]) -> None:
        whole = told.refusal or told.text
        if isinstance(whole, str) and whole and _place(told) not in self._said:
            self._said.add(_place(told))
            events.append(_piece(told, whole))

    def _annotated(self, told: _Told, events: list[AnyModelEvent]) -> None:
        events += _citations([told.annotation])

    # ---- items ------------------------------------------------------------------------------------------------

    def _item_added(self, told: _Told, events: list[AnyModelEvent]) -> None:
        item = _items.decode(told.item)
        self._begin_item(_place(told, item), item, events)

    def _item_done(self, told: _Told, events: list[AnyModelEvent]) -> None:
        self._finish_item(told, told.item, events)

    def _begin_item(self, place: _Place, item: _Item, events: list[AnyModelEvent]) -> None:
        if place in self._open:
            return
        self._open.add(place)
        self._said.discard(place)
        if item.type == "message":
            events.append(MessageStarted(_PHASES.get(item.phase)))
        elif item.type == "reasoning":
            events.append(ReasoningStarted())
        elif item.is_plain_call:
            self._begin_call(place, item, events)

    def _finish_item(self, told: _Told, raw: Raw, events: list[AnyModelEvent]) -> None:
        """An item that is whole: what was not told of it before is told now."""
        item = _items.decode(raw)
        place = _place(told, item)
        self._begin_item(place, item, events)
        self._open.discard(place)
        self._made_items = True
        if item.type == "message":
            if place not in self._said:
                _say(item.content, events)
        elif item.type == "reasoning":
            if place not in self._said:
                _think(item, events)
            content = item.encrypted_content
            events.append(ReasoningEnded(self._origin.seal(item.id, content) if content else None))
        elif item.is_plain_call:
            whole = item.input if item.type == "custom_tool_call" else arguments_of(item.arguments)
            self._end_call(place, whole or "", events)
        elif _TYPE.fullmatch(item.type) and item.type != COMPACTION:
            events.append(ItemPassed(self._renamed(raw), item.awaits_client))

    def _renamed(self, raw: Raw) -> Raw:
        """The item under an id of ours, of the same kind as the server's."""
        fields = _objects.decode(raw)
        theirs = msgspec.json.decode(fields.get("id", _NOTHING))
        found = _PREFIX.match(theirs) if isinstance(theirs, str) else None
        fields["id"] = Raw(msgspec.json.encode(self._make_id(found[1] if found else "item")))
        return _readable(Raw(msgspec.json.encode(fields)))

    # ---- calls ------------------------------------------------------------------------------------------------

    def _begin_call(self, place: _Place, item: _Item, events: list[AnyModelEvent]) -> None:
        if not item.name:
            raise _Strange("it called a function without naming it")
        if len(self._call_ids) >= _MOST_CALLS:
            raise _Strange(f"it made more than {_MOST_CALLS} calls in one turn")
        call_id = item.call_id
        if not call_id or len(call_id) > LONGEST_ID or call_id in self._call_ids:
            call_id = self._make_id("call")
        call = self._calls[place] = _Call(len(self._call_ids), item.type == "custom_tool_call")
        self._call_ids.add(call_id)
        events.append(CallStarted(call.key, call_id, item.name))

    def _end_call(self, place: _Place, whole: str, events: list[AnyModelEvent]) -> None:
        """No more of it will come; `whole` is what it says, if nothing of it was heard."""
        call = self._calls.pop(place, None)
        if call is None:
            return
        if not call.written:
            _write(call, whole if whole or call.is_custom else "{}", events)
        if call.is_custom:
            events.append(CallArguments(call.key, '"}'))

    # ---- the end ----------------------------------------------------------------------------------------------

    def _ended_response(self, told: _Told, events: list[AnyModelEvent]) -> None:
        whole = told.response if told.response != _NOTHING else Raw(b"{}")
        response = _responses.decode(whole)
        response.status = response.status or told.type.rpartition(".")[2]
        self._conclude(response, events)

    def _conclude(self, response: _Told, events: list[AnyModelEvent]) -> None:
        """How a response ended; also for an error instead of one, which is a field of it or all there is."""
        if response.status not in ("completed", "incomplete"):
            self.failure = self._why_failed(response)
            return
        if not self._made_items:
            for place, raw in enumerate(response.output or ()):
                self._finish_item(_Told(output_index=place), raw, events)
        reason: TurnEnd | None = None
        if response.status == "incomplete":
            why = response.incomplete_details
            reason = "content_filter" if why is not None and why.reason == "content_filter" else "length"
        self._end(events, reason, _usage_of(response.usage))

    def _why_failed(self, response: _Told) -> ModelError:
        if response.error != _NOTHING:
            return self._errors.from_event(bytes(response.error))
        if response.message or response.code:
            error = {"message": response.message, "code": response.code}
            return self._errors.from_event(msgspec.json.encode(error))
        if response.status is None:
            return self._errors.unreadable("its answer is not an answer to this")
        return self._errors.unreadable(f"its response ended as {response.status}")

    def _end(
        self, events: list[AnyModelEvent], reason: TurnEnd | None = None, usage: Usage | None = None
    ) -> None:
        for place in list(self._calls):
            self._end_call(place, "", events)
        events.append(TurnEnded(reason or ("calls" if self._call_ids else "stop"), usage))
        self.ended = True

    handlers: ClassVar[Mapping[str, "_Handler"]] = {  # pyright: ignore[reportAssignmentType]
        "response.output_text.delta": _text_delta,
        "response.function_call_arguments.delta": _arguments_delta,
        "response.custom_tool_call_input.delta": _arguments_delta,
        "response.function_call_arguments.done": _arguments_said,
        "response.custom_tool_call_input.done": _arguments_said,
        "response.reasoning_text.delta": _rarer_delta,
        "response.reasoning_summary_text.delta": _rarer_delta,
        "response.refusal.delta": _rarer_delta,
        "response.content_part.added": _part_added,
        "response.reasoning_summary_part.added": _part_added,
        "response.output_text.done": _part_said,
        "response.reasoning_text.done": _part_said,
        "response.reasoning_summary_text.done": _part_said,
        "response.refusal.done": _part_said,
        "response.output_text.annotation.added": _annotated,
        "response.output_item.added": _item_added,
        "response.output_item.done": _item_done,
        "response.completed": _ended_response,
        "response.incomplete": _ended_response,
        "response.failed": _ended_response,
        "response.cancelled": _ended_response,
        "error": _conclude,
    }


type _Handler = Callable[[ResponsesParser, _Told, list[AnyModelEvent]], None]
_HANDLERS = ResponsesParser.handlers


def _place(told: _Told, item: _Item | None = None) -> _Place:
    """What tells an item from others: its place, which every server should tell, or else its id."""
    if told.output_index is not None:
        return told.output_index
    return told.item_id if item is None else item.id


def _text(told: _Told | _Part, text: str) -> Text:
    return Text(text, [*map(_readable, told.logprobs or ())])


def _readable(raw: Raw) -> Raw:
    """What is passed on without being looked at is UTF-8 at least."""
    written = bytes(raw)
    return raw if written.isascii() else Raw(written.decode(errors="replace").encode())


def _piece(told: _Told, text: str) -> AnyModelEvent:
    """What an event of a part says, by the kind of the part."""
    kind = told.type
    if kind.startswith("response.output_text"):
        return _text(told, text)
    if kind.startswith("response.refusal"):
        return Refused(text)
    if kind.startswith("response.reasoning_summary"):
        return Summary(told.summary_index or 0, text)
    return Thought(text)


def _write(call: _Call, text: str, events: list[AnyModelEvent]) -> None:
    """A custom tool's input is plain text; told as a field, it is as if the tool were a function."""
    if call.is_custom:
        text = ("" if call.written else _INPUT) + msgspec.json.encode(text).decode()[1:-1]
    call.written = True
    if text:
        events.append(CallArguments(call.key, text))


def _say(content: str | list[_Part] | None, events: list[AnyModelEvent]) -> None:
    """A whole message."""
    if isinstance(content, str):
        content = [_Part(type="output_text", text=content)]
    for part in content or ():
        if part.text:
            events.append(_text(part, part.text))
        if part.refusal:
            events.append(Refused(part.refusal))
        events += _citations(part.annotations or ())


def _think(item: _Item, events: list[AnyModelEvent]) -> None:
    """A whole reasoning."""
    for number, part in enumerate(item.summary or ()):
        if part.text:
            events.append(Summary(number, part.text))
    content = item.content if isinstance(item.content, list) else ()
    events += [Thought(part.text) for part in content if part.text]


def _citations(annotations: Iterable[Raw]) -> list[AnyModelEvent]:
    """Addresses only: files of the server's own are nothing that a client could get from here."""
    found: list[AnyModelEvent] = []
    for annotation in annotations:
        try:
            found.append(Cited(_sources.decode(annotation)))
        except msgspec.DecodeError:
            continue
    return found


def _usage_of(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    read, written = tokens(usage.input_tokens), tokens(usage.output_tokens)
    input_details = usage.input_tokens_details or _InputDetails()
    output_details = usage.output_tokens_details or _OutputDetails()
    return Usage(
        input_tokens=read,
        input_tokens_details=InputTokensDetails(
            cached_tokens=tokens(input_details.cached_tokens),
            cache_write_tokens=tokens(input_details.cache_write_tokens),
        ),
        output_tokens=written,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=tokens(output_details.reasoning_tokens)),
        total_tokens=max(tokens(usage.total_tokens), read + written),
    )
