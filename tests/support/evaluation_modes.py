"""The four ways to evaluate a prompt, behind one method, so that the same tests run in all of them."""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, override

from fumehood.client import Prompt, PromptResponse
from fumehood.client.adapters.openai import OpenAIAdapter
from fumehood.client.adapters.stream_events import EvaluationEvent, EvaluationFinished

MODES = ("evaluate", "aevaluate", "stream", "astream")


@dataclass(frozen=True)
class EventLoopThread:
    """An event loop that runs in a thread of its own."""

    loop: asyncio.AbstractEventLoop

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, in a copy of the caller's context, and wait for it here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextmanager
def run_event_loop_thread() -> Generator[EventLoopThread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="event loop of tests", daemon=True)
    thread.start()
    try:
        yield EventLoopThread(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class ModalAdapter(OpenAIAdapter):
    """An adapter whose `evaluate` evaluates in one of the four ways. events: those of its streams."""

    def __init__(self, *, mode: str, loop: EventLoopThread, **settings: Any) -> None:
        super().__init__(**settings)
        self._mode = mode
        self._loop = loop
        self.events: list[EvaluationEvent[Any]] = []

    @override
    def evaluate(self, prompt: Prompt[Any], *params: Any, **options: Any) -> PromptResponse[Any]:
        match self._mode:
            case "aevaluate":
                return self._loop.run(self.aevaluate(prompt, *params, **options))
            case "stream":
                return self._evaluate_by_stream(prompt, *params, **options)
            case "astream":
                return self._loop.run(self._evaluate_by_astream(prompt, *params, **options))
            case _:
                return super().evaluate(prompt, *params, **options)

    def _evaluate_by_stream(self, prompt: Prompt[Any], *params: Any, **options: Any) -> PromptResponse[Any]:
        with self.stream(prompt, *params, **options) as events:
            seen = [*events]
        return self._check_end(seen, events.response)

    async def _evaluate_by_astream(
        self, prompt: Prompt[Any], *params: Any, **options: Any
    ) -> PromptResponse[Any]:
        async with self.astream(prompt, *params, **options) as events:
            seen = [event async for event in events]
        return self._check_end(seen, events.response)

    def _check_end(
        self, seen: list[EvaluationEvent[Any]], response: PromptResponse[Any]
    ) -> PromptResponse[Any]:
        self.events += seen
        assert seen[-1] == EvaluationFinished(response)
        return response
