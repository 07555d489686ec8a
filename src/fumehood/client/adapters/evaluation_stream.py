"""Streams of events of one evaluation, blocking and asynchronous."""

import contextvars
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fumehood.client.adapters.provider_adapter import PromptResponse
from fumehood.client.adapters.stream_events import EvaluationEvent
from fumehood.client.errors import PromptEvaluationError
from fumehood.client.runtime.blocking_shell import BlockingShell
from fumehood.client.runtime.operations import Steps, StepsRunner

if TYPE_CHECKING:
    from fumehood.client.runtime.async_shell import AsyncShell


class _StreamState[Out]:
    """What both kinds of streams have in common: the steps, and the answer at their end."""

    def __init__(self, steps: Steps[PromptResponse[Out]]) -> None:
        self._runner = StepsRunner(steps)
        # Of its own, so that spans and other context variables of the evaluation do not leak into the consumer.
        self._context = contextvars.copy_context()
        self._is_entered = False
        self._is_closed = False
        self._response: PromptResponse[Out] | None = None

    @property
    def response(self) -> PromptResponse[Out]:
        """The answer, as `evaluate` returns it. Raises PromptEvaluationError before the end of the stream."""
        if self._response is None:
            raise PromptEvaluationError(
                "The stream has no response: it was closed or failed before its end, or was not read to its end yet.",
                phase="response",
            )
        return self._response

    def _check_entered(self, statement: str) -> None:
        if not self._is_entered:
            raise PromptEvaluationError(f"The stream is not open; write `{statement} as events:`.")


class EvaluationStream[Out](_StreamState[Out]):
    """The events of an evaluation, and its answer: `with adapter.stream(…) as events: for event in events: …`.

    The evaluation goes on when the next event is asked for, and raises what `evaluate` would raise. Leaving the `with`
    block early cancels the request.
    """

    def __init__(self, steps: Steps[PromptResponse[Out]], shell: BlockingShell) -> None:
        super().__init__(steps)
        self._shell = shell

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EvaluationEvent[Out]:
        self._check_entered("with adapter.stream(…)")
        if self._is_closed:
            raise StopIteration
        try:
            emitted = self._context.run(self._shell.advance, self._runner)
        except BaseException:
            self.close()
            raise
        if emitted is None:
            self._response = self._runner.result
            self.close()
            raise StopIteration
        return emitted.event

    def __del__(self) -> None:
        """Close a dropped stream in its own context, not in that of whoever runs when it is collected."""
        self.close()

    def get_final_response(self) -> PromptResponse[Out]:
        """Read the stream to its end, and return the answer."""
        for _ in self:
            pass
        return self.response

    def close(self) -> None:
        """End the evaluation; a request that is under way is cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._context.run(self._runner.close)
        finally:
            self._shell.close()


class AsyncEvaluationStream[Out](_StreamState[Out]):
    """As EvaluationStream: `async with adapter.astream(…) as events: async for event in events: …`."""

    def __init__(self, steps: Steps[PromptResponse[Out]], shell: "AsyncShell") -> None:
        super().__init__(steps)
        self._shell = shell

    async def __aenter__(self) -> Self:
        self._is_entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EvaluationEvent[Out]:
        self._check_entered("async with adapter.astream(…)")
        if self._is_closed:
            raise StopAsyncIteration
        try:
            emitted = await self._shell.advance(self._runner, self._context)
        except BaseException:
            await self.aclose()
            raise
        if emitted is None:
            self._response = self._runner.result
            await self.aclose()
            raise StopAsyncIteration
        return emitted.event

    def __del__(self) -> None:
        """As of EvaluationStream; but connections of the request are left to the garbage collector."""
        if not self._is_closed:
            self._context.run(self._runner.close)

    async def get_final_response(self) -> PromptResponse[Out]:
        """Read the stream to its end, and return the answer."""
        async for _ in self:
            pass
        return self.response

    async def aclose(self) -> None:
        """End the evaluation; a request that is under way is cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._context.run(self._runner.close)
        finally:
            await self._shell.aclose()
