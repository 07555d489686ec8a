"""A gateway on an event loop in a thread of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager


@contextmanager
def run_in_thread[T](opening: AbstractAsyncContextManager[T]) -> Generator[T]:
    """What the context manager yields, until the block is left."""
    opened: list[T] = []
    loops: list[asyncio.AbstractEventLoop] = []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with opening as gateway:
            opened.append(gateway)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await done.wait()

    def run() -> None:
        with asyncio.Runner() as runner:  # ends what is left on the loop before it closes it
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield opened[0]
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join(60)
