"""Deadlines, budgets, retries, resources and contracts."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.client import Budget, BudgetTracker, Deadline, ResourceRegistry, ThrottlePolicy, TokenUsage
from fumehood.client.dbc import ensure, require
from fumehood.client.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    InvariantError,
    PromptEvaluationError,
    PromptValidationError,
    ResourceError,
    ThrottleError,
)
from fumehood.client.throttle import TransientFailure, retry

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_deadline_is_checked_by_its_clock() -> None:
    time = [NOW]
    deadline = Deadline(NOW + timedelta(seconds=5), clock=lambda: time[0])
    deadline.check("anything")
    assert deadline.remaining() == timedelta(seconds=5)
    time[0] += timedelta(seconds=9)
    assert deadline.remaining() == timedelta()
    with pytest.raises(DeadlineExceededError, match="before the next request") as late:
        deadline.check("the next request", prompt_name="p")
    assert (late.value.phase, late.value.prompt_name) == ("deadline", "p")
    for wrong in (datetime(2026, 1, 1), "soon", None):  # noqa: DTZ001 - that is the mistake
        with pytest.raises(PromptValidationError, match="expires_at"):
            Deadline(cast("datetime", wrong))
    assert timedelta(seconds=50) < Deadline.after(60).remaining() <= timedelta(seconds=60)


def test_a_budget_is_for_all_turns_together() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100, max_output_tokens=30))
    tracker.record(TokenUsage(20, 10, 0, 30))
    tracker.check("a request")
    tracker.record(TokenUsage(20, 20, 5, 40))
    assert tracker.usage == TokenUsage(40, 30, 5, 70)
    with pytest.raises(BudgetExceededError, match="30 of 30 output tokens"):
        tracker.check("a request")
    for wrong in (0, -1, 1.5, "many", True):
        with pytest.raises(PromptValidationError, match=f"max_input_tokens is {wrong!r}"):
            Budget(max_input_tokens=cast("int", wrong))


class FlakyCall:
    """A provider that is busy so many times."""

    def __init__(self, busy: int, retry_after: float | None = None) -> None:
        self.busy = busy
        self.retry_after = retry_after
        self.waits: list[float] = []

    def ask(self) -> str | TransientFailure:
        self.busy -= 1
        return TransientFailure(OSError("busy"), self.retry_after) if self.busy >= 0 else "there"

    def retry(self, policy: ThrottlePolicy, deadline: Deadline | None = None, chance: float = 1.0) -> str:
        return retry(
            self.ask, policy, deadline=deadline, sleep=self.waits.append, random_fraction=lambda: chance
        )


def test_delays_double_and_respect_retry_after() -> None:
    line = FlakyCall(4)
    assert line.retry(ThrottlePolicy(base_delay=1, max_delay=3)) == "there"
    assert line.waits == [1, 2, 3, 3]
    polite = FlakyCall(2, retry_after=7)
    assert polite.retry(ThrottlePolicy(base_delay=1)) == "there"
    assert polite.waits == [7, 7]


@pytest.mark.parametrize(
    ("policy", "deadline", "waits", "expected_error"),
    [
        (ThrottlePolicy(max_attempts=3, base_delay=1), None, [1, 2], "3 attempts: busy"),
        (
            ThrottlePolicy(max_attempts=9, base_delay=4, max_total_delay=5),
            None,
            [4],
            "longer than the policy waits",
        ),
        (
            ThrottlePolicy(base_delay=9),
            Deadline(NOW + timedelta(seconds=5), clock=lambda: NOW),
            [],
            "the deadline comes before",
        ),
    ],
)
def test_retries_end(
    policy: ThrottlePolicy, deadline: Deadline | None, waits: list[float], expected_error: str
) -> None:
    line = FlakyCall(99)
    with pytest.raises(ThrottleError, match=expected_error) as gave_up:
        line.retry(policy, deadline)
    assert line.waits == waits
    assert isinstance(gave_up.value.__cause__, OSError)
    assert gave_up.value.phase == "request"


@given(st.integers(1, 30), st.floats(0, 1), st.none() | st.floats(0, 100))
def test_a_delay_is_bounded(attempt: int, chance: float, asked: float | None) -> None:
    policy = ThrottlePolicy(base_delay=0.5, max_delay=10)
    assert max(0.25, asked or 0) <= policy.delay(attempt, asked, chance) <= max(10, asked or 0)


def test_policies_are_checked() -> None:
    for wrong in (0, 1.5, True, None):
        with pytest.raises(PromptValidationError, match="max_attempts"):
            ThrottlePolicy(max_attempts=cast("int", wrong))
    for wrong in (-1, math.nan, "1", None):
        for name in ("base_delay", "max_delay", "max_total_delay"):
            with pytest.raises(PromptValidationError, match=f"{name} is"):
                ThrottlePolicy(**{name: cast("int", wrong)})


class Database:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Cache:
    pass


def test_resources_are_created_once_and_closed_by_their_creator() -> None:
    given_one, made = Database(), list[Database]()

    def make() -> Database:
        made.append(Database())
        return made[-1]

    with ResourceRegistry.build({Database: make, Cache: Cache()}) as registry:
        assert Database in registry
        assert not made
        assert registry.get(Database) is registry.get(Database) is made[0]
    assert made[0].closed == 1
    with ResourceRegistry.build({Database: given_one}) as registry:
        assert registry.get(Database) is given_one
    assert given_one.closed == 0


def test_a_missing_resource_is_named() -> None:
    registry = ResourceRegistry.build({Cache: Cache})
    with pytest.raises(ResourceError, match=r"no resource of type Database \(there is: Cache\)"):
        registry.get(Database)


def test_joined_registries_are_closed_by_their_owners() -> None:
    owners = ResourceRegistry.build({Database: Database})
    maker: Callable[[], Cache] = Cache
    with ResourceRegistry.combine([owners, {Cache: maker}]) as joined:
        mine = joined.get(Database)
        assert isinstance(joined.get(Cache), Cache)
        assert owners.get(Database) is mine
    assert mine.closed == 0
    owners.close()
    assert mine.closed == 1
    scoped = Database()
    with ResourceRegistry.combine([owners, {Database: lambda: scoped}]) as joined:
        assert joined.get(Database) is scoped
    assert scoped.closed == 1


def test_contracts() -> None:
    require(1, "fine")
    ensure(True, "fine")
    with pytest.raises(PromptEvaluationError, match="p: tier") as refused:
        require(0, "tier", prompt_name="p", payload={"x": 1})
    assert (refused.value.phase, refused.value.provider_payload) == ("configuration", {"x": 1})
    with pytest.raises(InvariantError):
        ensure(False, "ours")
    assert issubclass(InvariantError, AssertionError)
