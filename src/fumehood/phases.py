"""Tells whoever listens how long the phases of a piece of work took; imports the standard library.

Work is done deep below those who want to know of it, and for many of them side by side: who listens is a variable of
the task. Where nobody does, a phase is one object that does nothing, the same for all.
"""

from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter_ns, time_ns
from typing import Self, override


class Phase:
    """From when it is made until its block is left, or `end` is called.

    began_at: nanoseconds since 1970. took: nanoseconds.
    facts: what is known of it. error: the type of what ended it, empty if nothing did.
    """

    __slots__ = ("_since", "_tell", "began_at", "error", "facts", "name", "took")

    def __init__(self, name: str, tell: "Listener | None") -> None:
        self.name = name
        self.facts: dict[str, str] = {}
        self.error: str = ""
        self.took: int = 0
        self.began_at: int = time_ns()
        self._since: int = perf_counter_ns()
        self._tell: Listener | None = tell

    def note(self, fact: str, value: str) -> None:
        self.facts[fact] = value

    def began_with(self, name: str, nanoseconds: int) -> None:
        """What it began with was another phase, which took so long: somebody else has measured it, and tells only now.
        It begins where that ended.
        """
        tell, nanoseconds = self._tell, min(nanoseconds, perf_counter_ns() - self._since)
        if tell is not None and nanoseconds > 0:
            other = Phase(name, tell)
            other.began_at, other.took = self.began_at, nanoseconds
            self.began_at += nanoseconds
            self._since += nanoseconds
            tell(other)

    def end(self) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            self.took = perf_counter_ns() - self._since
            tell(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.error = "" if kind is None else kind.__name__
        self.end()


class _Unheard(Phase):
    __slots__ = ()

    @override
    def note(self, fact: str, value: str) -> None:
        pass

    @override
    def __exit__(self, *_: object) -> None:
        pass


# Is given every phase once, when it is over. Must be quick, and must not raise.
type Listener = Callable[[Phase], None]

_UNHEARD = _Unheard("", None)
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("fumehood_phases", default=())


def phase(name: str) -> Phase:
    """One that begins now."""
    listeners = _listeners.get()
    if not listeners:
        return _UNHEARD

    def tell(over: Phase) -> None:
        for listener in listeners:
            listener(over)

    return Phase(name, tell)


class heard_by:  # noqa: N801 - it reads like a function
    """Phases of this task that begin in the block are told to the listener, and to those who listen already."""

    __slots__ = ("_listener", "_token")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._token = _listeners.set((*_listeners.get(), self._listener))

    def __exit__(self, *_: object) -> None:
        _listeners.reset(self._token)
