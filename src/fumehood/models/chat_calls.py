"""Puts the fragments of a turn's calls together, however they are numbered; imports siblings and `protocol`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from fumehood.models.answers import arguments_of
from fumehood.protocol.ids import LONGEST_ID
from fumehood.protocol.models import AnyModelEvent, CallArguments, CallStarted

_MOST_CALLS = 128


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, object] | None = None


class CallDelta(msgspec.Struct):
    """A fragment of a call, or the whole of it."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class StrangeCall(ValueError):
    """A call that cannot be made sense of."""


@dataclass(slots=True, eq=False)
class _Call:
    key: int
    theirs: str | None  # the server's id
    name: str = ""
    started: bool = False
    written: bool = False
    held: list[str] = field(default_factory=list[str])


class CallReader:
    """Turns fragments into events; the order of first appearance gives the keys.

    A name may come in pieces. A call is told as soon as its name is one of `names` and begins no longer one, and
    otherwise with its first arguments.
    """

    def __init__(self, names: Iterable[str], new_call_id: Callable[[], str]) -> None:
        offered = self._offered = set(names)
        self._certain = {
            name for name in offered if not any(other != name and other.startswith(name) for other in offered)
        }
        self._new_call_id = new_call_id
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._ids: set[str] = set()

    @property
    def any(self) -> bool:
        return bool(self._calls)

    def add(self, fragment: CallDelta, events: list[AnyModelEvent]) -> None:
        """Raises StrangeCall."""
        function = fragment.function or FunctionDelta()
        known = len(self._calls)
        call = self._find(fragment, function.name or "")
        if len(self._calls) > known:
            self._start_named(events)
        text = arguments_of(function.arguments)
        if call.started:
            if text:
                call.written = True
                events.append(CallArguments(call.key, text))
            return
        call.theirs = call.theirs or fragment.id
        said_again = function.name == call.name and call.name in self._offered
        if not said_again:
            call.name += function.name or ""
        if text:
            call.held.append(text)
        if call.name and (text or call.name in self._certain):
            self._start(call, events)

    def end(self, events: list[AnyModelEvent]) -> None:
        """Tell what was held back; a call without arguments has empty ones. Raises StrangeCall."""
        for call in self._calls:
            if not call.started:
                if not call.name:
                    raise StrangeCall("it called a function without naming it")
                self._start(call, events)
            if not call.written:
                call.written = True
                events.append(CallArguments(call.key, "{}"))

    def _start_named(self, events: list[AnyModelEvent]) -> None:
        """Another call begins: the names before it are whole, if they are names at all."""
        for call in self._calls[:-1]:
            if not call.started and call.name in self._offered:
                self._start(call, events)

    def _find(self, fragment: CallDelta, name: str) -> _Call:
        index, theirs = fragment.index, fragment.id
        if index is not None:
            call = self._by_index.get(index)
            # Some servers give every call the index 0.
            if call is not None and not (name and theirs and call.theirs and theirs != call.theirs):
                return call
            call = self._by_index[index] = self._begin(theirs)
            return call
        last = self._calls[-1] if self._calls else None
        if theirs:
            known = next((call for call in self._calls if call.theirs == theirs), None)
            if known is not None:
                return known
            return last if last is not None and not name else self._begin(theirs)
        # Without index and id, a name after arguments begins the next call.
        if last is None or (name and (last.written or last.held)):
            return self._begin(None)
        return last

    def _begin(self, theirs: str | None) -> _Call:
        if len(self._calls) >= _MOST_CALLS:
            raise StrangeCall(f"it made more than {_MOST_CALLS} calls in one turn")
        call = _Call(len(self._calls), theirs or None)
        self._calls.append(call)
        return call

    def _start(self, call: _Call, events: list[AnyModelEvent]) -> None:
        call_id = call.theirs
        if not call_id or len(call_id) > LONGEST_ID or call_id in self._ids:
            call_id = self._new_call_id()
        self._ids.add(call_id)
        call.started = True
        events.append(CallStarted(call.key, call_id, call.name))
        if call.held:
            call.written = True
            events.extend(CallArguments(call.key, text) for text in call.held)
            call.held.clear()
