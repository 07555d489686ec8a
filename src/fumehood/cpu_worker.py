"""Runs long computations in a worker thread, so that the event loop keeps serving other streams.

The GIL is shared, so the work itself does not get faster; the event loop runs again every few milliseconds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

WORKER_THRESHOLD_BYTES = 256 << 10  # smaller work runs inline: it takes less than a millisecond or two
ITEM_COST_BYTES = 2 << 10  # cost of parsing one more item, expressed in bytes

# One thread: with several, the event loop would compete with all of them for the GIL.
_executor = ThreadPoolExecutor(1, thread_name_prefix="worker")


async def run_in_worker[**P, T](
    cost_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `function` in the worker thread, or inline if `cost_bytes` is below the threshold; return its result."""
    if cost_bytes < WORKER_THRESHOLD_BYTES:
        return function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor, lambda: function(*args, **kwargs))
