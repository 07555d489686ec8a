"""A point in time by which an evaluation has to be over; imports `errors` and the standard library."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

from fumehood.client.errors import DeadlineExceededError


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Deadline:
    """`expires_at` must know its time zone; `clock` tells the time, for tests."""

    expires_at: datetime
    clock: Callable[[], datetime] = field(default=_utc_now, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.expires_at.tzinfo is None:
            raise ValueError("expires_at has no time zone; write datetime.now(UTC) + timedelta(…)")

    @classmethod
    def after(cls, seconds: float) -> Self:
        return cls(_utc_now() + timedelta(seconds=seconds))

    def remaining(self) -> timedelta:
        """What is left, never less than nothing."""
        return max(self.expires_at - self.clock(), timedelta())

    def check(self, doing: str, *, prompt_name: str = "") -> None:
        """Raise DeadlineExceededError if it is too late to begin with this."""
        if not self.remaining():
            raise DeadlineExceededError(
                f"The deadline passed before {doing}.", prompt_name=prompt_name, phase="deadline"
            )
