"""Assembles the tool calls of a turn from their deltas."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from fumehood.models.upstream.stream_parser import (
    MAX_CALLS,
    MalformedOutput,
    arguments_to_json,
    choose_call_id,
)
from fumehood.protocol.model_turns import AnyModelEvent, ModelCallArgumentsDelta, ModelCallStarted


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


class ToolCallDeltaParser:
    """Turns tool call deltas into events, with any numbering. Keys follow the order of first appearance.

    A name may be split over deltas. A call starts as soon as its name is one of `names` and the prefix of no other, or
    else with its first arguments.
    """

    def __init__(self, names: Iterable[str], make_id: Callable[[str], str]) -> None:
        offered = self._offered_names = set(names)
        self._unambiguous_names = {
            name for name in offered if not any(other != name and other.startswith(name) for other in offered)
        }
        self._make_id = make_id
        self._calls: list[_ToolCall] = []
        self._by_index: dict[int, _ToolCall] = {}
        self._used_ids: set[str] = set()

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def add(self, delta: ToolCallDelta, events: list[AnyModelEvent]) -> None:
        """Process one delta. Raises MalformedOutput."""
        function = delta.function or FunctionDelta()
        known = len(self._calls)
        call = self._find_call(delta, function.name or "")
        if len(self._calls) > known:
            self._start_named_calls(events)
        text = arguments_to_json(function.arguments)
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

    def _find_call(self, delta: ToolCallDelta, name: str) -> _ToolCall:
        index, server_id = delta.index, delta.id
        if index is not None:
            call = self._by_index.get(index)
            # Some servers use the index 0 for every call.
            if call is not None and not (
                name and server_id and call.server_id and server_id != call.server_id
            ):
                return call
            call = self._by_index[index] = self._add_call(server_id)
            return call
        last = self._calls[-1] if self._calls else None
        if server_id:
            known = next((call for call in self._calls if call.server_id == server_id), None)
            if known is not None:
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
        call_id = choose_call_id(call.server_id, self._used_ids, self._make_id)
        call.is_started = True
        events.append(ModelCallStarted(call.key, call_id, call.name))
        if call.buffered:
            call.has_arguments = True
            events.extend(ModelCallArgumentsDelta(call.key, text) for text in call.buffered)
            call.buffered.clear()
