"""Unix sockets between the containers of a pod, which start in any order."""

import asyncio
from pathlib import Path

_POLL_SECONDS = 0.02


async def wait_for_sockets(paths: list[Path], timeout: float) -> None:
    """Wait until other containers have created these sockets, or for `timeout` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while any(not path.exists() for path in paths) and loop.time() < deadline:  # noqa: ASYNC110 - a file
        await asyncio.sleep(_POLL_SECONDS)
