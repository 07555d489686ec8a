"""Short-lived helpers that a zygote forks into one sandbox's user and cgroup; imports msgspec and siblings."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from fumehood.sandboxd.cgroups import Cgroup, joining
from fumehood.sandboxd.packets import Packets
from fumehood.sandboxd.zygotes import Zygote

_END_WAIT = 2.0
_MOST_WAITING = 16


class Helper:
    """One helper at work; it ends with its answer, or when it is told to.

    It reads what strangers wrote, so it is not believed more than code is: a flood or nonsense counts as its end.
    """

    def __init__(self, sock: socket.socket, kill: Callable[[], None], *, opens_files: bool) -> None:
        self._kill = kill
        self._arrived: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._sock = sock
        self.answered = False
        self._packets = Packets(sock, on_packet=self._packet, on_close=self._closed, accept_fds=opens_files)

    def _packet(self, body: bytes, fds: list[int]) -> None:
        self._arrived.put_nowait((body, fds))
        if self._arrived.qsize() > _MOST_WAITING:  # it asks one thing at a time
            self._kill()
            self.close()

    def _closed(self) -> None:
        self._arrived.put_nowait((b"", []))
        self._ended.set()

    def say(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self._packets.send(json.dumps(message).encode(), fds)

    async def hear(self) -> tuple[dict[str, Any], list[int]]:
        """A question, or the answer with its descriptors; EOFError when it ended without one."""
        body, fds = await self._arrived.get()
        if not body:
            self._arrived.put_nowait((b"", []))  # for whoever asks again
            raise EOFError
        try:
            message: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:
            for fd in fds:
                os.close(fd)
            raise EOFError from None
        if "ask" not in message:
            self.answered = True
        return message, fds

    async def end(self) -> None:
        """Let it give up by itself, for it cleans up then; if it cannot, kill it. Returns once it is dead."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        for last_try in (False, True):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _END_WAIT)
                break
            if not last_try:
                self._kill()
        self.close()

    def close(self) -> None:
        self._packets.close()
        while not self._arrived.empty():
            body, fds = self._arrived.get_nowait()
            if body and b'"ask"' not in body:
                self.answered = True
            for fd in fds:
                os.close(fd)
        self._closed()

    def kill(self) -> None:
        """The sandbox is gone, or must not wait."""
        self._kill()


class Helpers:
    """Starts helpers for one sandbox and knows those that run."""

    def __init__(
        self, zygote: Zygote, uid: int, cgroup: Cgroup | None, next_number: Callable[[], int]
    ) -> None:
        self._zygote = zygote
        self._uid = uid
        self._cgroup = cgroup
        self._next_number = next_number
        self._running: set[Helper] = set()

    @contextlib.asynccontextmanager
    async def at_work(
        self, data: int, task: dict[str, Any], extra: Sequence[int] = ()
    ) -> AsyncGenerator[Helper]:
        """A helper that has heard its task; OSError when there are no descriptors for one.

        One that is given a descriptor to read from gives none back.
        """
        helper = self._start(data, opens_files=not extra)
        self._running.add(helper)
        try:
            helper.say(task, list(extra))
            yield helper
        finally:
            self._running.discard(helper)
            if helper.answered:
                helper.close()
            else:
                # Also when whoever asked is cancelled again: it must not go on behind everybody's back.
                await asyncio.shield(asyncio.ensure_future(helper.end()))

    def _start(self, data: int, *, opens_files: bool) -> Helper:
        number = self._next_number()
        request = {"op": "files", "number": number, "uid": self._uid}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, joining(self._cgroup) as join:
                self._zygote.request(request, [theirs.fileno(), data, *join])
        except BaseException:
            mine.close()
            raise
        end = {"op": "signal", "number": number, "signal": int(signal.SIGKILL)}
        return Helper(mine, lambda: self._zygote.request(end), opens_files=opens_files)

    def kill(self) -> None:
        """All that run: the sandbox is gone."""
        for helper in self._running:
            helper.kill()
