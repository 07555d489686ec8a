"""Looks names up, bounded and only as they are written; imports only the standard library."""

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8  # of its own: a name server that hangs must not take the threads that files need


class ResolveFailed(Exception):
    """There is no address, or none came in time."""


class Resolver:
    """Looks up names beside the event loop, each once however many ask.

    hosts: addresses of names that are not looked up.
    """

    def __init__(self, hosts: Mapping[str, str], *, timeout: float) -> None:
        self._hosts = dict(hosts)
        self._timeout = timeout
        self._threads: ThreadPoolExecutor | None = None
        self._asked: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, name: str) -> list[str]:
        """All addresses of a normalised name, as text; ResolveFailed if there are none in time."""
        if name in self._hosts:
            return [self._hosts[name]]
        asked = self._asked.get(name)
        if asked is None:  # one question at a time for each name, however many wait
            asked = asyncio.ensure_future(self._ask(name))
            self._asked[name] = asked
            asked.add_done_callback(lambda done: self._answered(name, done))
        try:
            return await asyncio.wait_for(asyncio.shield(asked), self._timeout)
        except (TimeoutError, OSError, UnicodeError) as error:
            raise ResolveFailed from error

    def _answered(self, name: str, done: asyncio.Future[list[str]]) -> None:
        self._asked.pop(name, None)
        if not done.cancelled():
            done.exception()  # everybody who waited may have given up

    async def _ask(self, name: str) -> list[str]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "fumehood-resolver")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, look_up, name)

    def close(self) -> None:
        for asked in self._asked.values():
            asked.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def look_up(name: str) -> list[str]:
    """With the dot at its end a name is whole: no search domain of this host is put behind it."""
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
