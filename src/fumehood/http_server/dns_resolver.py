"""Looks names up, bounded and only as they are written."""

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8  # of its own: a name server that hangs must not take the threads that files need


class DnsResolutionFailed(Exception):
    """There is no address, or none came in time."""


class DnsResolver:
    """Looks up names beside the event loop, each once however many ask.

    hosts: addresses of names that are not looked up.
    """

    def __init__(self, hosts: Mapping[str, str], *, timeout: float) -> None:
        self._hosts = dict(hosts)
        self._timeout = timeout
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, name: str) -> list[str]:
        """All addresses of a normalised name, as text; ResolveFailed if there are none in time."""
        if name in self._hosts:
            return [self._hosts[name]]
        asked = self._pending.get(name)
        if asked is None:  # one question at a time for each name, however many wait
            asked = asyncio.ensure_future(self._resolve_in_thread(name))
            self._pending[name] = asked
            asked.add_done_callback(lambda done: self._on_resolved(name, done))
        try:
            return await asyncio.wait_for(asyncio.shield(asked), self._timeout)
        except (TimeoutError, OSError, UnicodeError) as error:
            raise DnsResolutionFailed from error

    def _on_resolved(self, name: str, done: asyncio.Future[list[str]]) -> None:
        self._pending.pop(name, None)
        if not done.cancelled():
            done.exception()  # everybody who waited may have given up

    async def _resolve_in_thread(self, name: str) -> list[str]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, "fumehood-resolver")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, look_up, name)

    def close(self) -> None:
        for asked in self._pending.values():
            asked.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def look_up(name: str) -> list[str]:
    """With the dot at its end a name is whole: no search domain of this host is put behind it."""
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
