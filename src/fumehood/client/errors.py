"""The errors of the client, as one tree.

FumehoodError (= WinkError)
├── PromptEvaluationError        evaluation failed: `phase` says where, `prompt_name` of which prompt
│   ├── PromptValidationError    the prompt, a section, a tool or a setting is malformed; nothing was sent
│   ├── OutputParseError         the answer does not match the output type
│   ├── FilteredOutputError      the provider withheld a required answer; also an AssertionError
│   ├── DeadlineExceededError    the deadline passed before the next request or tool
│   ├── BudgetExceededError      the token budget was used up before the next request or tool
│   ├── ThrottleError            the provider stayed busy beyond the retry policy
│   ├── ContainerExpiredError    a container has expired and cannot be recreated
│   └── ContainerNotFoundError   a named container is unknown to the provider
├── InvariantError                a bug in this library; also an AssertionError
├── CompactionError              a conversation could not be compacted; it is unchanged
├── ResourceError                a resource is not registered, or its factory failed
├── WorkspaceSecurityError       a path outside the allowed roots or outside the workspace
└── WorkspaceBudgetError         a mount exceeds its `max_bytes`
"""

from typing import Any, Literal

type Phase = Literal["configuration", "render", "request", "response", "tool", "deadline", "budget"]


class FumehoodError(Exception):
    """The root of all errors of the client."""


WinkError = FumehoodError


class PromptEvaluationError(FumehoodError):
    """A prompt could not be evaluated. provider_payload: the provider's response or error, if a request was sent."""

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
    """A malformed prompt or setting, found before anything was sent."""


class OutputParseError(PromptEvaluationError):
    """The answer does not match the prompt's output type."""


class FilteredOutputError(PromptEvaluationError, AssertionError):
    """A required answer was filtered or refused."""


class DeadlineExceededError(PromptEvaluationError):
    """The deadline has passed."""


class BudgetExceededError(PromptEvaluationError):
    """The token budget is used up."""


class ThrottleError(PromptEvaluationError):
    """The provider was busy for all attempts that the policy allows."""


class _ContainerError(PromptEvaluationError):
    """A container cannot be used. original_error: what the provider said, with its body in `provider_payload`."""

    def __init__(self, container_id: str, original_error: Exception, message: str) -> None:
        super().__init__(message, provider_payload=_find_payload(original_error))
        self.container_id = container_id
        self.original_error = original_error

    def __reduce__(self) -> tuple[Any, ...]:  # for pickling
        return type(self), (self.container_id, self.original_error, self.message), vars(self)


class ContainerExpiredError(_ContainerError):
    """The container has expired, and could not be recreated, or was not created here."""

    def __init__(self, container_id: str, original_error: Exception, message: str | None = None) -> None:
        super().__init__(
            container_id,
            original_error,
            message
            or f"The container {container_id!r} has expired and could not be made again: {original_error}",
        )


class ContainerNotFoundError(_ContainerError):
    """The provider does not know the container that was named."""


def _find_payload(error: Exception) -> object:
    return getattr(error, "provider_payload", None) or getattr(error, "body", None)


class InvariantError(FumehoodError, AssertionError):
    """An invariant of this library does not hold: a bug in it, not in its input."""


class CompactionError(FumehoodError):
    """The conversation could not be compacted and is unchanged.

    response: what `evaluate` was about to return, if it was known already.
    """

    def __init__(self, token_count: int, original_error: Exception) -> None:
        super().__init__(f"A conversation of {token_count} tokens could not be compacted: {original_error}")
        self.token_count = token_count
        self.original_error = original_error
        self.response: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.token_count, self.original_error), {"response": self.response}


class ResourceError(FumehoodError, LookupError):
    """The resource is not registered, or its factory failed."""


class WorkspaceSecurityError(FumehoodError):
    """A path is outside the allowed roots, or would leave its workspace."""


class WorkspaceBudgetError(FumehoodError):
    """A mount holds more bytes than its `max_bytes`."""
