"""Token budgets of evaluations."""

import threading
from dataclasses import dataclass
from typing import Self

from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import BudgetExceededError
from fumehood.client.type_validation import check_arguments, require_field_types


@dataclass(frozen=True)
class TokenUsage:
    """Tokens used by one response, or by several together."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0

    def __add__(self, other: Self) -> "TokenUsage":
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.total_tokens + other.total_tokens,
        )


@dataclass(frozen=True)
class Budget:
    """Limits; None for no limit. A deadline here works like the one passed to `evaluate`."""

    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        require_field_types(self)
        for name in ("max_total_tokens", "max_input_tokens", "max_output_tokens"):
            limit: int | None = getattr(self, name)
            require(
                limit is None or limit > 0,
                f"{name} is {limit!r}; a budget is a positive number of tokens.",
            )


class BudgetTracker:
    """Sums the usage of all turns. Share one tracker between evaluations to share the budget."""

    @check_arguments
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.usage = TokenUsage()
        self._lock = threading.Lock()

    def record(self, usage: TokenUsage) -> None:
        with self._lock:
            self.usage += usage

    def check(self, next_step: str, *, prompt_name: str = "") -> None:
        """Raise BudgetExceededError if a limit is reached. next_step: what would have started, for the message."""
        used = self.usage
        for name, spent, limit in (
            ("total", used.total_tokens, self.budget.max_total_tokens),
            ("input", used.input_tokens, self.budget.max_input_tokens),
            ("output", used.output_tokens, self.budget.max_output_tokens),
        ):
            if limit is not None and spent >= limit:
                raise BudgetExceededError(
                    f"{spent} of {limit} {name} tokens were used before {next_step}.",
                    prompt_name=prompt_name,
                    phase="budget",
                )
