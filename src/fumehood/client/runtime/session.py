"""Sessions: typed values that outlive one evaluation."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, overload

from fumehood.client.dbc import require
from fumehood.client.runtime.events import EVENT_TYPES, EventBus, InProcessDispatcher, new_id
from fumehood.client.type_validation import check_arguments

# Computes the new values of a slice from the old ones and an event.
type Reducer[T, E] = Callable[[tuple[T, ...], E], tuple[T, ...]]


class Snapshot:
    """All values of a session at one time."""

    def __init__(self, slices: Mapping[type[Any], tuple[Any, ...]]) -> None:
        self.slices = slices


class ConversationState:
    """A base for values that record the conversation. Undoing the changes of a tool keeps them."""


class Slice[T]:
    """The values of one type in a session, oldest first."""

    def __init__(self, session: "Session", kind: type[T]) -> None:
        self._session = session
        self._kind = kind

    def all(self) -> tuple[T, ...]:
        return self._session.values(self._kind)

    def latest(self) -> T | None:
        values = self.all()
        return values[-1] if values else None

    def where(self, holds: Callable[[T], bool]) -> tuple[T, ...]:
        return tuple(value for value in self.all() if holds(value))

    def append(self, value: T) -> None:
        """Append a value, or pass it to the reducer that is registered for this type."""
        self._session.dispatch(value)

    def seed(self, *values: T) -> None:
        """Replace all values."""
        self._session.replace(self._kind, values)

    def clear(self) -> None:
        self.seed()

    @overload
    def register(self, reducer: Reducer[T, T]) -> None: ...
    @overload
    def register[E](self, reducer: Reducer[T, E], *, on: type[E]) -> None: ...
    def register(self, reducer: Reducer[T, Any], *, on: type[Any] | None = None) -> None:
        """Apply `reducer` to this slice whenever a value of type `on` is appended anywhere, or such an event is
        published on the session's bus. Without `on`, the reducer replaces appending to this slice.
        """
        self._session.register(self._kind, on or self._kind, reducer)


class SessionProtocol(Protocol):
    """The part of a session that adapters and tools use."""

    @property
    def session_id(self) -> str: ...
    @property
    def bus(self) -> EventBus: ...
    def __getitem__[T](self, kind: type[T]) -> Slice[T]: ...
    def snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...


def undo_changes(session: SessionProtocol, snapshot: Snapshot) -> None:
    """Undo what a tool that failed or was cancelled has changed in the session."""
    if isinstance(session, Session):
        session.roll_back(snapshot)
    else:
        session.restore(snapshot)


class Session:
    """Typed values in slices: `session[Plan].latest()`. Threads may share a session; undoing the changes of a failing
    tool also undoes concurrent changes, but no turn of the conversation.

    bus (or dispatcher): where events of evaluations in this session are published.
    """

    @check_arguments
    def __init__(self, bus: EventBus | None = None, *, dispatcher: EventBus | None = None) -> None:
        require(
            bus is None or dispatcher is None or bus is dispatcher,
            "bus and dispatcher are two names for one thing; give one of them.",
        )
        self.bus: EventBus = bus or dispatcher or InProcessDispatcher()
        self.dispatcher = self.bus
        self.session_id = new_id()
        self._slices: dict[type[Any], tuple[Any, ...]] = {}
        self._reducers: dict[type[Any], list[tuple[type[Any], Reducer[Any, Any]]]] = {}
        self._lock = threading.RLock()

    def __getitem__[T](self, kind: type[T]) -> Slice[T]:
        return Slice(self, kind)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(dict(self._slices))

    def restore(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._slices = dict(snapshot.slices)

    def roll_back(self, snapshot: Snapshot) -> None:
        """Undo all changes since the snapshot, except to the conversation, which others may have continued."""
        with self._lock:
            conversation = {
                kind: self._slices[kind] for kind in self._slices if issubclass(kind, ConversationState)
            }
            earlier = {
                kind: values
                for kind, values in snapshot.slices.items()
                if not issubclass(kind, ConversationState)
            }
            self._slices = {**earlier, **conversation}

    # ---- for slices ---------------------------------------------------------------------------------------

    def values[T](self, kind: type[T]) -> tuple[T, ...]:
        with self._lock:
            return self._slices.get(kind, ())

    def replace[T](self, kind: type[T], values: tuple[T, ...]) -> None:
        with self._lock:
            self._slices[kind] = values

    def dispatch(self, value: object) -> None:
        """Pass a value to the reducers of its type; without one, append it to the slice of its type."""
        kind = type(value)
        with self._lock:
            reducers = self._reducers.get(kind, ())
            for target, reducer in reducers:
                self._slices[target] = tuple(reducer(self._slices.get(target, ()), value))
            if kind not in EVENT_TYPES and not any(target is kind for target, _ in reducers):
                self._slices[kind] = (*self._slices.get(kind, ()), value)

    def register(self, target: type[Any], on: type[Any], reducer: Reducer[Any, Any]) -> None:
        with self._lock:
            if on in EVENT_TYPES and on not in self._reducers:
                self.bus.subscribe(on, self.dispatch)
            self._reducers.setdefault(on, []).append((target, reducer))
