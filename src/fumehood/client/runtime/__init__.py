"""Events, sessions and observers."""

from fumehood.client.runtime.events import (
    EventBus,
    InProcessDispatcher,
    InProcessEventBus,
    NullEventBus,
    PromptExecuted,
    PromptRendered,
    ToolInvoked,
)
from fumehood.client.runtime.session import Session, SessionProtocol, Slice, Snapshot

__all__ = [
    "EventBus",
    "InProcessDispatcher",
    "InProcessEventBus",
    "NullEventBus",
    "PromptExecuted",
    "PromptRendered",
    "Session",
    "SessionProtocol",
    "Slice",
    "Snapshot",
    "ToolInvoked",
]
