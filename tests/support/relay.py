"""A TCP relay that cuts connections where it is told to."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_PIECE = 1 << 16


@dataclass
class Relay:
    """`cuts` are the bytes of answers that the next connections may still pass; after those nothing is cut.

    reset: cut with a reset instead of an ordinary end.
    """

    target: int
    cuts: list[int]
    reset: bool = False
    port: int = 0
    connections: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = self.cuts.pop(0) if self.cuts else None
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        try:
            upstream, onwards = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(onwards)
            asking = asyncio.ensure_future(_pump(reader, onwards))
            try:
                await self._answers(upstream, writer, left)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self._open.discard(onwards)
                await _close(onwards)
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            if self.reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await _close(writer)

    async def _answers(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None
    ) -> None:
        while left is None or left > 0:
            piece = await upstream.read(_PIECE if left is None else min(left, _PIECE))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()
            left = None if left is None else left - len(piece)

    def drop(self) -> None:
        """Cut all that are open now."""
        for writer in self._open:
            writer.transport.abort()

    async def stop(self) -> None:
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def relay(target: int, cuts: Iterable[int] = (), *, reset: bool = False) -> AsyncGenerator[Relay]:
    made = Relay(target, list(cuts), reset)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.stop()
