"""Contracts: what callers must hold, and what we promise; imports `errors`."""

from fumehood.client.errors import ContractError, Phase, PromptValidationError


def require(
    condition: object,
    message: str,
    *,
    prompt_name: str = "",
    phase: Phase = "configuration",
    payload: object = None,
) -> None:
    """Raise PromptValidationError unless the caller has done its part. Never call it after a request was sent."""
    if not condition:
        raise PromptValidationError(message, prompt_name=prompt_name, phase=phase, provider_payload=payload)


def ensure(condition: object, message: str) -> None:
    """Raise ContractError unless we have done ours."""
    if not condition:
        raise ContractError(message)
