"""Contracts: preconditions of callers, and invariants of this library."""

from collections.abc import Collection
from typing import Any, cast

from fumehood.client.errors import InvariantError, Phase, PromptValidationError


def require(
    condition: object,
    message: str,
    *,
    prompt_name: str = "",
    phase: Phase = "configuration",
    payload: object = None,
) -> None:
    """Raise PromptValidationError unless the caller's precondition holds. Never call it after a request was sent."""
    if not condition:
        raise PromptValidationError(message, prompt_name=prompt_name, phase=phase, provider_payload=payload)


def require_strings(values: object, name: str) -> None:
    """Raise PromptValidationError unless these are non-empty strings. A single string is not accepted."""
    several = isinstance(values, Collection) and not isinstance(values, str | bytes)
    require(
        several and all(isinstance(one, str) and one.strip() for one in cast(Collection[Any], values)),
        f"{name} is {values!r}; it has to be several texts, and none of them empty.",
    )


def ensure(condition: object, message: str) -> None:
    """Raise InvariantError unless our invariant holds."""
    if not condition:
        raise InvariantError(message)
