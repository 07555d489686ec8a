"""The base of fakes that follow a script."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Self


class ScriptedFake[Step]:
    """Expects calls in the order of its steps.

    repeatable: steps that match any number of times, when the next step in order does not.

    An unexpected call raises AssertionError, and so does `assert_consumed` afterwards. `async with` closes the fake and
    calls `assert_consumed`, unless an exception is raised.
    """

    def __init__(self, steps: Iterable[Step], repeatable: Iterable[Step] = ()) -> None:
        self._steps = deque(steps)
        self._repeatable = tuple(repeatable)
        self._failures: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close()
        if kind is None:
            self.assert_consumed()

    async def close(self) -> None:
        pass

    def expect(self, *steps: Step) -> None:
        """Add steps to the script."""
        self._steps.extend(steps)

    def assert_consumed(self) -> None:
        """Raise AssertionError if steps are left, or a call was unexpected."""
        if problems := [*self._failures, *(f"Not used: {step}." for step in self._steps)]:
            raise AssertionError("\n".join(problems))

    def record_failure(self, problem: str) -> None:
        """Let `assert_consumed` report a failure that the caller may have ignored."""
        self._failures.append(problem)

    def take_step(self, call: str, matches: Callable[[Step], bool]) -> Step:
        """Consume the next step, or find a repeatable one. call: what was asked, for the message."""
        if self._steps and matches(self._steps[0]):
            return self._steps.popleft()
        for step in self._repeatable:
            if matches(step):
                return step
        expected = self._steps[0] if self._steps else "nothing more"
        failure = f"{call}; expected {expected}."
        self.record_failure(failure)
        raise AssertionError(failure)
