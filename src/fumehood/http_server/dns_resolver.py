"""Resolves host names with a timeout, without search domains."""

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8  # a pool of its own: a hanging name server must not block threads that files need


class DnsResolutionFailed(Exception):
    """The name has no address, or the lookup timed out."""


class DnsResolver:
    """Resolves names in threads; concurrent lookups of one name share a query.

    hosts: fixed addresses by name.
    timeout: seconds for one lookup.
    """

    def __init__(self, hosts: Mapping[str, str], *, timeout: float) -> None:
        self._hosts = dict(hosts)
        self._timeout = timeout
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, name: str) -> list[str]:
        """All addresses of a normalised name. Raises DnsResolutionFailed."""
        if name in self._hosts:
            return [self._hosts[name]]
        query = self._pending.get(name)
        if query is None:
            query = asyncio.ensure_future(self._resolve_in_thread(name))
            self._pending[name] = query
            query.add_done_callback(lambda done: self._on_resolved(name, done))
        try:
            return await asyncio.wait_for(asyncio.shield(query), self._timeout)
        except (TimeoutError, OSError, UnicodeError) as error:
            raise DnsResolutionFailed from error

    def _on_resolved(self, name: str, done: asyncio.Future[list[str]]) -> None:
        self._pending.pop(name, None)
        if not done.cancelled():
            done.exception()  # retrieved: every waiter may have timed out

    async def _resolve_in_thread(self, name: str) -> list[str]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, "fumehood-resolver")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, look_up, name)

    def close(self) -> None:
        for query in self._pending.values():
            query.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def look_up(name: str) -> list[str]:
    """Resolve a name. The trailing dot makes it absolute, so that no search domain is appended."""
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
