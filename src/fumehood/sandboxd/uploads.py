"""Passes an upload on to a helper piece by piece, with limits on size and patience; imports siblings and the protocol.

Nothing is gathered here: the next piece is asked for when the helper has taken the last one.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from fumehood.protocol.sandbox_errors import FileRefused, TooLarge
from fumehood.sandboxd.helpers import Helper
from fumehood.sandboxd.settings import Settings

_PIECE = 256 * 1024


class _Question(msgspec.Struct, frozen=True):
    """What `inside.leave` asks."""

    ask: Literal["room", "whole"]
    size: int


class SourceFailed(Exception):
    """What was to be sent could not be had; `error` is whatever its iterator raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Upload:
    """One content on its way through a socket; close it in the end.

    theirs: the helper's end, to be handed over before `run`.
    subject: its name in messages.
    room: what the sandbox may still take, None for no bound.
    """

    def __init__(
        self,
        subject: str,
        content: bytes | AsyncIterable[bytes],
        limit: int,
        room: Callable[[], int | None],
        settings: Settings,
    ) -> None:
        self._subject = subject
        self._content = content
        self._limit = limit
        self._room = room
        self._settings = settings
        self._sent = 0
        self._mine, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._mine.setblocking(False)

    def close(self) -> None:
        self._mine.close()
        self.theirs.close()

    async def run(self, helper: Helper) -> dict[str, Any]:
        """Send everything and answer what the helper asks; its answer. EOFError if it ended without one."""
        self.theirs.close()  # it has been handed over, or waits as a copy
        pump = asyncio.ensure_future(self._pump(self._mine))
        try:
            async with asyncio.timeout(self._settings.transfer_seconds):
                return await self._converse(helper, pump)
        except TimeoutError:
            raise self._refused(
                f"the transfer took longer than {self._settings.transfer_seconds:g} s"
            ) from None
        finally:
            pump.cancel()
            self._mine.close()  # what the helper still reads ends here
            await asyncio.gather(pump, return_exceptions=True)

    async def _converse(self, helper: Helper, pump: asyncio.Future[None]) -> dict[str, Any]:
        while True:
            hearing = asyncio.ensure_future(helper.hear())
            try:
                if not pump.done():
                    await asyncio.wait({hearing, pump}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
                    # From now on it only has to work: it says something every few seconds if it gets on.
                    await asyncio.wait({hearing}, timeout=self._settings.transfer_patience)
                if not hearing.done():
                    if pump.done():
                        raise self._stalled()
                    continue
                message, opened = hearing.result()
            finally:
                hearing.cancel()
            for fd in opened:
                os.close(fd)
            if "ask" not in message:
                return message
            try:
                question = msgspec.convert(message, _Question)
            except msgspec.ValidationError:
                raise EOFError from None
            helper.say(self._reply(question, finished=pump.done()))

    def _reply(self, question: _Question, *, finished: bool) -> dict[str, Any]:
        if question.ask == "whole":
            if finished and question.size == self._sent:
                return {"granted": True}
            return {"granted": False, "kind": "refused", "reason": "it did not arrive whole"}
        room = self._room()
        if room is None or question.size <= room:
            return {"granted": True}
        reason = "it does not fit into the sandbox's memory, of which files are a part"
        return {"granted": False, "kind": "refused", "reason": reason}

    async def _pump(self, sock: socket.socket) -> None:
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    self._sent += len(piece)
                    if self._sent > self._limit:
                        raise TooLarge(f"{self._subject}: larger than {self._limit} bytes")
                    await self._send(sock, piece)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the helper has had enough, and says why

    async def _send(self, sock: socket.socket, piece: bytes) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(piece)
        while view:
            try:
                async with asyncio.timeout(self._settings.transfer_patience):
                    await loop.sock_sendall(sock, view[:_PIECE])
            except TimeoutError:
                raise self._stalled() from None
            view = view[_PIECE:]

    async def _pieces(self) -> AsyncGenerator[bytes]:
        if isinstance(self._content, bytes):
            yield self._content
            return
        source: AsyncIterator[bytes] = aiter(self._content)
        while True:
            patience = asyncio.timeout(self._settings.transfer_patience)
            try:
                async with patience:
                    piece = await anext(source)
            except StopAsyncIteration:
                return
            except Exception as error:
                if not patience.expired():
                    raise SourceFailed(error) from error
                raise self._refused(
                    f"nothing of it arrived for {self._settings.transfer_patience:g} s"
                ) from None
            yield piece

    def _stalled(self) -> FileRefused:
        return self._refused(f"the sandbox took nothing of it for {self._settings.transfer_patience:g} s")

    def _refused(self, reason: str) -> FileRefused:
        return FileRefused(f"{self._subject}: {reason}")
