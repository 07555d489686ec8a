"""Events of an evaluation: a prompt is sent, a tool has run, a prompt is answered."""

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fumehood.client.budget import TokenUsage
from fumehood.client.runtime.event_bus import InProcessEventBus

if TYPE_CHECKING:
    from fumehood.client.prompt.prompt import ToolChoice
    from fumehood.client.prompt.tool import ToolResult

# Specification 001 imports the bus from here.
__all__ = ["EVENT_TYPES", "InProcessEventBus", "PromptExecuted", "PromptRendered", "ToolInvoked", "new_id"]


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
