"""Assembles the tool calls of a turn from their deltas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.models.upstream.stream_parser import (
    MAX_CALLS,
    CallIdChooser,
    MalformedOutput,
    arguments_to_json,
)
from fumehood.protocol.model_turns import AnyModelEvent, ModelCallArgumentsDelta, ModelCallStarted

_MAX_CHECKED_CHARS = 1 << 16  # of arguments; they are decoded once more for each delta that repeats the name


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, object] | None = None


class ToolCallDelta(msgspec.Struct):
    """A part of a tool call, or a whole one."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


@dataclass(slots=True, eq=False)
class _ToolCall:
    key: int
    server_id: str | None
    name: str = ""
    is_started: bool = False
    has_arguments: bool = False
    buffered: list[str] = field(default_factory=list[str])
    fragments: list[str] = field(default_factory=list[str])  # all arguments so far

    def is_complete(self) -> bool:
        """Whether the arguments are a JSON object, after which nothing can follow; False if they are long."""
        if not self.fragments or not self.fragments[-1].rstrip().endswith("}"):
            return False
        arguments = "".join(self.fragments)
        try:
            return len(arguments) <= _MAX_CHECKED_CHARS and isinstance(msgspec.json.decode(arguments), dict)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False


class ToolCallDeltaParser:
    """Turns tool call deltas into events, with any numbering. Keys follow the order of first appearance.

    A name may be split over deltas. A call starts as soon as its name is one of `names` and the prefix of no other, or
    else with its first arguments.

    call_ids: chooses the ids of the calls.
    """

    def __init__(self, names: Iterable[str], call_ids: CallIdChooser) -> None:
        offered = self._offered_names = set(names)
        self._unambiguous_names = {
            name for name in offered if not any(other != name and other.startswith(name) for other in offered)
        }
        self._call_ids = call_ids
        self._calls: list[_ToolCall] = []
        self._by_index: dict[int, _ToolCall] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def add(self, delta: ToolCallDelta, events: list[AnyModelEvent]) -> None:
        """Process one delta. Raises MalformedOutput."""
        function = delta.function or FunctionDelta()
        known = len(self._calls)
        text = arguments_to_json(function.arguments)
        call = self._find_call(delta, function.name or "", text)
        if len(self._calls) > known:
            self._start_named_calls(events)
        if text:
            call.fragments.append(text)
        if call.is_started:
            if text:
                call.has_arguments = True
                events.append(ModelCallArgumentsDelta(call.key, text))
            return
        call.server_id = call.server_id or delta.id
        is_repeated = function.name == call.name and call.name in self._offered_names
        if not is_repeated:
            call.name += function.name or ""
        if text:
            call.buffered.append(text)
        if call.name and (text or call.name in self._unambiguous_names):
            self._emit_start(call, events)

    def note_arguments(self, key: int, fragments: Sequence[str]) -> None:
        """Note arguments that the fast path has emitted."""
        self._calls[key].fragments += fragments

    def finish(self, events: list[AnyModelEvent]) -> None:
        """Emit what is buffered; a call without arguments gets `{}`. Raises MalformedOutput."""
        for call in self._calls:
            if not call.is_started:
                if not call.name:
                    raise MalformedOutput("it called a function without naming it")
                self._emit_start(call, events)
            if not call.has_arguments:
                call.has_arguments = True
                events.append(ModelCallArgumentsDelta(call.key, "{}"))

    def _start_named_calls(self, events: list[AnyModelEvent]) -> None:
        """Start the calls before the last one whose names are known: their names are complete."""
        for call in self._calls[:-1]:
            if not call.is_started and call.name in self._offered_names:
                self._emit_start(call, events)

    def _find_call(self, delta: ToolCallDelta, name: str, text: str) -> _ToolCall:
        index, server_id = delta.index, delta.id
        if index is not None:
            call = self._by_index.get(index)
            # Some servers use the index 0 for every call.
            if (
                call is not None
                and not (name and server_id and call.server_id and server_id != call.server_id)
                and not _begins_another_call(call, name, text)
            ):
                return call
            call = self._by_index[index] = self._add_call(server_id)
            return call
        last = self._calls[-1] if self._calls else None
        if server_id:
            known = next((call for call in reversed(self._calls) if call.server_id == server_id), None)
            if known is not None and not _begins_another_call(known, name, text):
                return known
            return last if last is not None and not name else self._add_call(server_id)
        # Without index and id, a name after arguments starts the next call.
        if last is None or (name and (last.has_arguments or last.buffered)):
            return self._add_call(None)
        return last

    def _add_call(self, server_id: str | None) -> _ToolCall:
        if len(self._calls) >= MAX_CALLS:
            raise MalformedOutput(f"it made more than {MAX_CALLS} calls in one turn")
        call = _ToolCall(len(self._calls), server_id or None)
        self._calls.append(call)
        return call

    def _emit_start(self, call: _ToolCall, events: list[AnyModelEvent]) -> None:
        call.is_started = True
        events.append(ModelCallStarted(call.key, self._call_ids.choose(call.server_id), call.name))
        if call.buffered:
            call.has_arguments = True
            events.extend(ModelCallArgumentsDelta(call.key, text) for text in call.buffered)
            call.buffered.clear()


def _begins_another_call(call: _ToolCall, name: str, text: str) -> bool:
    """Whether a delta with the index or id of a call begins the next one: some servers repeat both in every call.

    Others repeat the name in every delta of one call, perhaps in a last one without arguments.
    """
    return bool(name) and (name != call.name or bool(text)) and call.is_complete()
