"""Event buses: publish the events of evaluations to subscribers."""

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Publisher(Protocol):
    def publish(self, event: object, /) -> None: ...


class EventBus(Publisher, Protocol):
    """Publishes events to subscribers."""

    def subscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        """Call the handler with every event of exactly this type, in the publishing thread."""
        ...

    def unsubscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None: ...


class InProcessDispatcher:
    """Calls subscribers in order. A handler that raises is logged, and the next one is called."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], tuple[Callable[[Any], object], ...]] = {}
        self._lock = threading.Lock()

    def subscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        with self._lock:
            self._handlers[event_type] = (*self._handlers.get(event_type, ()), handler)

    def unsubscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        with self._lock:
            known = self._handlers.get(event_type, ())
            self._handlers[event_type] = tuple(one for one in known if one != handler)

    def publish(self, event: object) -> None:
        for handler in self._handlers.get(type(event), ()):
            try:
                handler(event)
            except Exception:
                import logging

                logging.getLogger(__name__).exception("A handler of %s failed.", type(event).__name__)


InProcessEventBus = InProcessDispatcher


class NullEventBus:
    """Publishes nothing."""

    def subscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        """Do nothing."""

    def unsubscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        """Do nothing."""

    def publish(self, event: object) -> None:
        """Do nothing."""


class FanOutEventBus:
    """Publishes to several buses, to each once even if it is given repeatedly."""

    def __init__(self, bus: EventBus, *others: Publisher | None) -> None:
        self._bus = bus
        self._publishers: list[Publisher] = [bus]
        for other in others:
            if other is not None and not any(other is known for known in self._publishers):
                self._publishers.append(other)

    def subscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        self._bus.subscribe(event_type, handler)

    def unsubscribe[E](self, event_type: type[E], handler: Callable[[E], object]) -> None:
        self._bus.unsubscribe(event_type, handler)

    def publish(self, event: object) -> None:
        for each in self._publishers:
            each.publish(event)
