"""Measures steps of a task and reports them to its listeners.

Listeners are a context variable, because the measured code is far below the code that listens and runs for many tasks
in parallel.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter_ns, time_ns
from typing import Self


class TimedStep:
    """The duration of one step, from construction until its block is left or `end` is called.

    started_at_ns: nanoseconds since 1970. duration_ns: set at the end.
    error: type name of the exception that ended the step, or how it failed; empty if it did not.
    """

    __slots__ = ("_emit", "_started_ns", "attributes", "duration_ns", "error", "name", "started_at_ns")

    def __init__(self, name: str, emit: "TimingListener | None") -> None:
        self.name = name
        self.attributes: dict[str, str | int] = {}
        self.error: str = ""
        self.duration_ns: int = 0
        self.started_at_ns: int = time_ns()
        self._started_ns: int = perf_counter_ns()
        self._emit: TimingListener | None = emit

    def set_attribute(self, name: str, value: str | int) -> None:
        self.attributes[name] = value

    def split_off_start(self, name: str, nanoseconds: int, error: str = "") -> None:
        """Report the first `nanoseconds` as a timing of their own, and let this one start after it.

        For a step that another process measured and reports only at its end. error: how it failed, if it did.
        """
        emit, nanoseconds = self._emit, min(nanoseconds, perf_counter_ns() - self._started_ns)
        if emit is not None and nanoseconds > 0:
            first = TimedStep(name, emit)
            first.started_at_ns, first.duration_ns, first.error = self.started_at_ns, nanoseconds, error
            self.started_at_ns += nanoseconds
            self._started_ns += nanoseconds
            emit(first)

    def end(self) -> None:
        emit, self._emit = self._emit, None
        if emit is not None:
            self.duration_ns = perf_counter_ns() - self._started_ns
            emit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.error = self.error if kind is None else kind.__name__
        self.end()


# Receives every timing once, when it ends. Must be fast and must not raise.
type TimingListener = Callable[[TimedStep], None]

_listeners: ContextVar[tuple[TimingListener, ...]] = ContextVar("fumehood_timings", default=())


def start_timing(name: str) -> TimedStep:
    """Start a timing for the listeners of the current task."""
    listeners = _listeners.get()

    def emit(timing: TimedStep) -> None:
        for listener in listeners:
            listener(timing)

    return TimedStep(name, emit if listeners else None)


@contextmanager
def listen_to_timings(listener: TimingListener) -> Generator[None]:
    """Also report to `listener` the timings that this task starts in the block."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)
