"""Events of an evaluation (a prompt is sent, a tool has run, a prompt is answered), and the buses that publish them."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from fumehood.client.budget import TokenUsage

if TYPE_CHECKING:
    from fumehood.client.prompt.prompt import ToolChoice
    from fumehood.client.prompt.tool import ToolResult


def _now() -> datetime:
    return datetime.now(UTC)


def new_id() -> str:
    """Return 128 random bits in hexadecimal."""
    return os.urandom(16).hex()


@dataclass(frozen=True, kw_only=True)
class PromptRendered:
    """A prompt is about to be sent."""

    prompt_name: str
    adapter: str
    session_id: str | None
    rendered_prompt: str
    tool_choice: "ToolChoice"
    created_at: datetime = field(default_factory=_now)
    event_id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class ToolInvoked:
    """A tool has run, in this process or at the provider.

    For a provider's tool without a `Tool` in the prompt, the name is the native type, the parameters are the call as
    the provider reports it, and `call_id` falls back to the item's id.
    """

    prompt_name: str
    adapter: str
    name: str
    params: Any
    result: "ToolResult[Any]"
    session_id: str | None
    call_id: str | None = None
    usage: TokenUsage | None = None
    rendered_output: str = ""
    created_at: datetime = field(default_factory=_now)
    event_id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class PromptExecuted:
    """A prompt has been answered; `result` is the PromptResponse."""

    prompt_name: str
    adapter: str
    session_id: str | None
    result: Any
    usage: TokenUsage | None = None
    created_at: datetime = field(default_factory=_now)
    event_id: str = field(default_factory=new_id)


EVENT_TYPES = (PromptRendered, ToolInvoked, PromptExecuted)


# --- buses --------------------------------------------------------------------------------------------


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
        self.subscribe = bus.subscribe
        self.unsubscribe = bus.unsubscribe
        self._publishers: list[Publisher] = [bus]
        for other in others:
            if other is not None and not any(other is known for known in self._publishers):
                self._publishers.append(other)

    def publish(self, event: object) -> None:
        for each in self._publishers:
            each.publish(event)
