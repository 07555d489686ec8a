"""A gateway on an event loop in a thread of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager


@contextmanager
def run_in_thread[T](opening: AbstractAsyncContextManager[T]) -> Generator[T]:
    """What the context manager yields, until the block is left."""
    opened: list[T] = []
    ready, loop, done = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with opening as gateway:
            opened.append(gateway)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield opened[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()
