"""Long work beside the event loop, so that others' streams go on.

Python runs one thread at a time, so nothing gets done sooner. But the event loop has its turn every few milliseconds,
and after every call that takes longer.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

WORKER_THRESHOLD_BYTES = 256 << 10  # bytes; what is smaller takes less than it takes to notice
ITEM_COST_BYTES = 2 << 10  # what one more thing to look at costs, in bytes of one large thing

# One, or the event loop would have to wait for the turns of all of them.
_executor = ThreadPoolExecutor(1, thread_name_prefix="worker")


async def run_in_worker[**P, T](
    cost_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What the work returns or raises; it is done here and now if there is little of it, by its size in bytes."""
    if cost_bytes < WORKER_THRESHOLD_BYTES:
        return function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor, lambda: function(*args, **kwargs))
