"""Retry policy for a busy provider."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import ThrottleError
from fumehood.client.type_validation import require_field_types

if TYPE_CHECKING:
    from fumehood.client.runtime.operations import Steps


@dataclass(frozen=True)
class ThrottlePolicy:
    """Exponential backoff with jitter, from `base_delay` to `max_delay` seconds.

    max_attempts: number of requests, including the first. max_total_delay: limit for the sum of all delays.
    """

    max_attempts: int = 5
    base_delay: float = 0.5
    max_delay: float = 30.0
    max_total_delay: float = 120.0

    def __post_init__(self) -> None:
        require_field_types(self)
        require(
            self.max_attempts >= 1,
            f"max_attempts is {self.max_attempts!r}; the first request is an attempt, too.",
        )
        for name in ("base_delay", "max_delay", "max_total_delay"):
            delay: float = getattr(self, name)
            require(
                delay >= 0,
                f"{name} is {delay!r}; a delay is seconds, 0 or more.",
            )

    def delay(self, attempt: int, retry_after: float | None, jitter: float) -> float:
        """Return the seconds to wait after an attempt, at least what the provider asked for."""
        backoff = min(self.max_delay, self.base_delay * 2 ** (attempt - 1))
        return max(backoff * (0.5 + jitter / 2), retry_after or 0.0)


class TransientFailure:
    """A failure that may be retried. retry_after: delay that the provider asked for, in seconds."""

    def __init__(
        self, error: Exception, retry_after: float | None = None, message: str | None = None
    ) -> None:
        self.error = error
        self.retry_after = retry_after
        self.message = message or str(error)


def retry_steps[T](
    attempt: "Callable[[], Steps[T | TransientFailure]]",
    policy: ThrottlePolicy,
    *,
    deadline: Deadline | None = None,
    prompt_name: str = "",
    random_fraction: Callable[[], float] | None = None,
) -> "Steps[T]":
    """Repeat an attempt until its result is not a TransientFailure.

    Raises ThrottleError, from the last failure, when the policy is exhausted or the deadline would pass while waiting.
    """
    from fumehood.client.runtime.operations import Sleep, perform

    if random_fraction is None:
        import random

        random_fraction = random.random
    total_delay = 0.0
    for number in range(1, policy.max_attempts + 1):
        result = yield from attempt()
        if not isinstance(result, TransientFailure):
            return result
        delay = policy.delay(number, result.retry_after, random_fraction())
        reason = None
        if number == policy.max_attempts:
            reason = f"{number} attempts"
        elif total_delay + delay > policy.max_total_delay:
            reason = f"{number} attempts; the next may come in {delay:.1f} s, longer than the policy waits"
        elif deadline is not None and delay >= deadline.remaining().total_seconds():
            reason = f"{number} attempts; the deadline comes before the next one, in {delay:.1f} s"
        if reason is not None:
            status = getattr(result.error, "status_code", None)
            outcome = "could not be reached" if status is None else f"answered {status}"
            raise ThrottleError(
                f"The provider {outcome} in {reason}: {result.message}",
                prompt_name=prompt_name,
                phase="request",
                provider_payload=getattr(result.error, "body", None),
            ) from result.error
        total_delay += delay
        yield from perform(Sleep(delay))
    raise AssertionError("unreachable: the last attempt returns or raises")


def retry[T](
    call: Callable[[], T | TransientFailure],
    policy: ThrottlePolicy,
    *,
    deadline: Deadline | None = None,
    prompt_name: str = "",
    sleep: Callable[[float], object] = time.sleep,
    random_fraction: Callable[[], float] | None = None,
) -> T:
    """As `retry_steps`, for a blocking call."""
    from fumehood.client.runtime.blocking_shell import BlockingShell
    from fumehood.client.runtime.operations import CallFunction, perform

    steps = retry_steps(
        lambda: perform(CallFunction(call)),
        policy,
        deadline=deadline,
        prompt_name=prompt_name,
        random_fraction=random_fraction,
    )
    return BlockingShell(sleep=sleep).run(steps)
