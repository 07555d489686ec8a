"""Short-lived helper processes, forked by a zygote into a sandbox's uid and cgroup."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from fumehood.sandbox_server.host.cgroups import Cgroup, open_join_fds
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

_EXIT_WAIT = 2.0
_MAX_QUEUED_MESSAGES = 16


class HelperProcess:
    """One running helper; it ends after its answer, or when stopped.

    It reads untrusted files, so it is trusted no more than code: a flood of messages or an invalid one ends it.
    """

    def __init__(self, sock: socket.socket, kill: Callable[[], None], *, accepts_fds: bool) -> None:
        self.kill = kill
        self._inbox: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._sock = sock
        self.has_answered = False
        self._channel = PacketChannel(
            sock, on_packet=self._on_packet, on_close=self._on_close, accept_fds=accepts_fds
        )

    def _on_packet(self, body: bytes, fds: list[int]) -> None:
        self._inbox.put_nowait((body, fds))
        if self._inbox.qsize() > _MAX_QUEUED_MESSAGES:  # it waits for each answer
            self.kill()
            self.close()

    def _on_close(self) -> None:
        self._inbox.put_nowait((b"", []))
        self._ended.set()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self._channel.send(json.dumps(message).encode(), fds)

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """A question, or the answer with its descriptors; raises EOFError if it ended without one."""
        body, fds = await self._inbox.get()
        if not body:
            self._inbox.put_nowait((b"", []))  # for the next call
            raise EOFError
        try:
            message: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:
            for fd in fds:
                os.close(fd)
            raise EOFError from None
        if "permit" not in message:
            self.has_answered = True
        return message, fds

    async def stop(self) -> None:
        """Let it clean up and exit; kill it if it does not. Returns once it has ended."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        for last_try in (False, True):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _EXIT_WAIT)
                break
            if not last_try:
                self.kill()
        self.close()

    def close(self) -> None:
        self._channel.close()
        while not self._inbox.empty():
            body, fds = self._inbox.get_nowait()
            if body and b'"permit"' not in body:
                self.has_answered = True
            for fd in fds:
                os.close(fd)
        self._on_close()


class FileHelperSpawner:
    """Starts the helpers of one sandbox."""

    def __init__(
        self, zygote: ZygoteConnection, uid: int, cgroup: Cgroup | None, next_number: Callable[[], int]
    ) -> None:
        self._zygote = zygote
        self._uid = uid
        self._cgroup = cgroup
        self._next_number = next_number
        self._running: set[HelperProcess] = set()

    @contextlib.asynccontextmanager
    async def spawn(
        self, data_fd: int, task: dict[str, Any], extra_fds: Sequence[int] = ()
    ) -> AsyncGenerator[HelperProcess]:
        """A helper that has received its task; raises OSError if there are no descriptors for one.

        A helper that gets extra descriptors may send none back.
        """
        helper = self._fork(data_fd, opens_files=not extra_fds)
        self._running.add(helper)
        try:
            helper.send(task, list(extra_fds))
            yield helper
        finally:
            self._running.discard(helper)
            if helper.has_answered:
                helper.close()
            else:
                # Shielded: also a caller that is cancelled twice must not leave it running.
                await asyncio.shield(asyncio.ensure_future(helper.stop()))

    def _fork(self, data: int, *, opens_files: bool) -> HelperProcess:
        number = self._next_number()
        request = {"op": "files", "number": number, "uid": self._uid}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, open_join_fds(self._cgroup) as join:
                self._zygote.send_request(request, [theirs.fileno(), data, *join])
        except BaseException:
            mine.close()
            raise
        kill = {"op": "signal", "number": number, "signal": int(signal.SIGKILL)}
        return HelperProcess(mine, lambda: self._zygote.send_request(kill), accepts_fds=opens_files)

    def kill_all(self) -> None:
        for helper in self._running:
            helper.kill()
