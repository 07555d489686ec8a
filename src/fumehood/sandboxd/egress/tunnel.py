"""Bytes both ways between two sockets until both have ended; imports only the standard library and siblings."""

import asyncio
from collections.abc import Callable

from fumehood.sandboxd.egress.streams import SocketStream


async def join(client: SocketStream, server: SocketStream, moved: Callable[[int, int], None]) -> None:
    """Each direction ends by itself, as with one connection; an error in one ends both."""
    ways = [
        asyncio.ensure_future(_copy(client, server, lambda count: moved(count, 0))),
        asyncio.ensure_future(_copy(server, client, lambda count: moved(0, count))),
    ]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: SocketStream, target: SocketStream, moved: Callable[[int], None]) -> None:
    while data := await source.read():
        moved(len(data))
        await target.send(data)
    await target.finish()
