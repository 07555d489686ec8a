"""Tells whoever listens how long the phases of a piece of work took.

Work is done deep below those who want to know of it, and for many of them side by side: who listens is a variable of
the task. Where nobody does, a phase is one object that does nothing, the same for all.
"""

from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter_ns, time_ns
from typing import Self, override


class Timing:
    """From when it is made until its block is left, or `end` is called.

    began_at: nanoseconds since 1970. took: nanoseconds.
    facts: what is known of it. error: the type of what ended it, empty if nothing did.
    """

    __slots__ = ("_emit", "_started_ns", "attributes", "duration_ns", "error", "name", "started_at_ns")

    def __init__(self, name: str, emit: "TimingListener | None") -> None:
        self.name = name
        self.attributes: dict[str, str] = {}
        self.error: str = ""
        self.duration_ns: int = 0
        self.started_at_ns: int = time_ns()
        self._started_ns: int = perf_counter_ns()
        self._emit: TimingListener | None = emit

    def set_attribute(self, name: str, value: str) -> None:
        self.attributes[name] = value

    def split_off_start(self, name: str, nanoseconds: int) -> None:
        """What it began with was another phase, which took so long: somebody else has measured it, and tells only now.
        It begins where that ended.
        """
        tell, nanoseconds = self._emit, min(nanoseconds, perf_counter_ns() - self._started_ns)
        if tell is not None and nanoseconds > 0:
            other = Timing(name, tell)
            other.started_at_ns, other.duration_ns = self.started_at_ns, nanoseconds
            self.started_at_ns += nanoseconds
            self._started_ns += nanoseconds
            tell(other)

    def end(self) -> None:
        tell, self._emit = self._emit, None
        if tell is not None:
            self.duration_ns = perf_counter_ns() - self._started_ns
            tell(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.error = "" if kind is None else kind.__name__
        self.end()


class _NoopTiming(Timing):
    __slots__ = ()

    @override
    def set_attribute(self, name: str, value: str) -> None:
        pass

    @override
    def __exit__(self, *_: object) -> None:
        pass


# Is given every phase once, when it is over. Must be quick, and must not raise.
type TimingListener = Callable[[Timing], None]

_NOOP_TIMING = _NoopTiming("", None)
_listeners: ContextVar[tuple[TimingListener, ...]] = ContextVar("fumehood_timings", default=())


def start_timing(name: str) -> Timing:
    """One that begins now."""
    listeners = _listeners.get()
    if not listeners:
        return _NOOP_TIMING

    def tell(over: Timing) -> None:
        for listener in listeners:
            listener(over)

    return Timing(name, tell)


class listen_to_timings:  # noqa: N801 - it reads like a function
    """Phases of this task that begin in the block are told to the listener, and to those who listen already."""

    __slots__ = ("_listener", "_token")

    def __init__(self, listener: TimingListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._token = _listeners.set((*_listeners.get(), self._listener))

    def __exit__(self, *_: object) -> None:
        _listeners.reset(self._token)
