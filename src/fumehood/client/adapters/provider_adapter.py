"""The interface of all adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fumehood.client.budget import Budget, BudgetTracker, TokenUsage
from fumehood.client.deadlines import Deadline
from fumehood.client.prompt._types import OutputT_co, SupportsDataclass
from fumehood.client.prompt.prompt import Prompt, ToolChoice
from fumehood.client.resources import Resources
from fumehood.client.runtime.events import EventBus
from fumehood.client.runtime.session import SessionProtocol

if TYPE_CHECKING:
    from fumehood.client.adapters.evaluation_stream import AsyncEvaluationStream, EvaluationStream

__all__ = ["CitedFile", "PromptResponse", "ProviderAdapter", "ToolChoice"]

Out = TypeVar("Out")


@dataclass(frozen=True)
class CitedFile:
    """A file that the model produced and cited; the container's files endpoint serves it."""

    container_id: str
    file_id: str
    filename: str
    start_index: int = 0
    end_index: int = 0


@dataclass(frozen=True)
class PromptResponse(Generic[OutputT_co]):  # noqa: UP046 - its TypeVar has a default
    """The answer to a prompt.

    text: the last message. output: the same as the prompt's output type, if it has one.
    annotations: of the last response, as the provider sent them. files: produced and cited files of all turns.
    usage: of all turns. transcript: every item of this evaluation in order, as on the wire.
    """

    prompt_name: str
    text: str | None
    output: OutputT_co | None
    annotations: tuple[Mapping[str, Any], ...] = ()
    files: tuple[CitedFile, ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    transcript: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


class ProviderAdapter(Protocol):
    """Evaluates prompts with one provider."""

    @property
    def provider(self) -> str:
        """The name that provider tools must have to be used here."""
        ...

    def evaluate(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> PromptResponse[Out]: ...

    async def aevaluate(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> PromptResponse[Out]:
        """As `evaluate`, without blocking the event loop."""
        ...

    def stream(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> "EvaluationStream[Out]":
        """As `evaluate`, with events while it goes on."""
        ...

    def astream(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> "AsyncEvaluationStream[Out]":
        """As `stream`, without blocking the event loop."""
        ...
