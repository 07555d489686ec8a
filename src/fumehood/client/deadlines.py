"""Deadlines of evaluations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

from fumehood.client.dbc import require
from fumehood.client.errors import DeadlineExceededError
from fumehood.client.type_validation import require_field_types, require_type


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Deadline:
    """expires_at: must be timezone-aware. clock: returns the current time; for tests."""

    expires_at: datetime
    clock: Callable[[], datetime] = field(default=_utc_now, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_field_types(self)
        require(
            self.expires_at.utcoffset() is not None,
            f"expires_at is {self.expires_at!r}, which has no zone; write datetime.now(UTC) + timedelta(…).",
        )

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Raises PromptValidationError for what is no number of seconds, or too many."""
        require_type(seconds, float, "seconds")
        try:
            return cls(_utc_now() + timedelta(seconds=seconds))
        except (OverflowError, ValueError):
            require(False, f"seconds is {seconds!r}; such a time does not exist.")
            raise

    def remaining(self) -> timedelta:
        """Return the remaining time, at least zero."""
        return max(self.expires_at - self.clock(), timedelta())

    def check(self, next_step: str, *, prompt_name: str = "") -> None:
        """Raise DeadlineExceededError if the deadline has passed. next_step: what would start now, for the message."""
        if not self.remaining():
            raise DeadlineExceededError(
                f"The deadline passed before {next_step}.", prompt_name=prompt_name, phase="deadline"
            )
