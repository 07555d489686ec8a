"""Everything that the client raises, as one tree.

FumehoodError (= WinkError)
├── PromptEvaluationError        a prompt could not be evaluated: `phase` says where, `prompt_name` which one
│   ├── PromptValidationError    it, a section, a tool or a setting is malformed; nothing was sent
│   ├── OutputParseError         the model's answer does not fit the type that was asked for
│   ├── FilteredOutputError      the provider withheld an answer that was needed; an AssertionError, too
│   ├── DeadlineExceededError    time was up before the next request or tool
│   ├── BudgetExceededError      the tokens were used up before the next request or tool
│   └── ThrottleError            the provider stayed busy for longer than the policy waits
├── ContractError                a promise of this library itself does not hold; an AssertionError, too
├── ContainerExpiredError        a container is gone and cannot be made again
├── CompactionError              a conversation could not be compacted; it is as it was
├── ResourceError                a tool asked for a resource that nobody has registered
├── WorkspaceSecurityError       a mount reaches where it must not
└── WorkspaceBudgetError         a mount is larger than it may be
"""

from typing import Any, Literal

type Phase = Literal["configuration", "render", "request", "response", "tool", "deadline", "budget"]


class FumehoodError(Exception):
    """The root of all errors of the client."""


WinkError = FumehoodError


class PromptEvaluationError(FumehoodError):
    """A prompt could not be evaluated. `provider_payload` is what the provider said, if it was asked at all."""

    def __init__(
        self,
        message: str,
        *,
        prompt_name: str = "",
        phase: Phase = "configuration",
        provider_payload: object = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.prompt_name = prompt_name
        self.phase: Phase = phase
        self.provider_payload = provider_payload

    def __str__(self) -> str:
        return f"{self.prompt_name}: {self.message}" if self.prompt_name else self.message


class PromptValidationError(PromptEvaluationError):
    """Something is malformed, and was found so before anything was sent."""


class OutputParseError(PromptEvaluationError):
    """The answer is not what the prompt's output type wants."""


class FilteredOutputError(PromptEvaluationError, AssertionError):
    """A required answer was filtered or refused."""


class DeadlineExceededError(PromptEvaluationError):
    """Time is up."""


class BudgetExceededError(PromptEvaluationError):
    """The tokens are used up."""


class ThrottleError(PromptEvaluationError):
    """The provider was asked as often as the policy allows, and was busy each time."""


class ContractError(FumehoodError, AssertionError):
    """What this library promises does not hold: a mistake in it, not in what it was given."""


class ContainerExpiredError(FumehoodError):
    """The container is gone, and could not (or, not being ours, must not) be made again."""

    def __init__(self, container_id: str, original_error: Exception, message: str | None = None) -> None:
        super().__init__(
            message
            or f"The container {container_id!r} has expired and could not be made again: {original_error}"
        )
        self.container_id = container_id
        self.original_error = original_error

    def __reduce__(self) -> tuple[Any, ...]:  # so that it can come out of another process
        return type(self), (self.container_id, self.original_error, str(self))


class CompactionError(FumehoodError):
    """The conversation could not be compacted, and was left as it was.

    response: what `evaluate` was about to return, if that was already known.
    """

    def __init__(self, token_count: int, original_error: Exception) -> None:
        super().__init__(f"A conversation of {token_count} tokens could not be compacted: {original_error}")
        self.token_count = token_count
        self.original_error = original_error
        self.response: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.token_count, self.original_error), {"response": self.response}


class ResourceError(FumehoodError, LookupError):
    """Nobody has registered this resource, or its factory failed."""


class WorkspaceSecurityError(FumehoodError):
    """A mount is outside the allowed roots, or would end up outside its workspace."""


class WorkspaceBudgetError(FumehoodError):
    """A mount holds more bytes than its `max_bytes`."""
