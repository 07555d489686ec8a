"""The egress proxy itself: one for all sandboxes, with a door for each; imports siblings and `serving`.

It parses what hostile programs send, and runs in a process of its own: see `worker` and `control`.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import traceback
from collections.abc import Callable

import msgspec

from fumehood.sandboxd.egress import orders
from fumehood.sandboxd.egress.certificates import SandboxAuthority
from fumehood.sandboxd.egress.connecting import Connector
from fumehood.sandboxd.egress.placeholders import Placeholders
from fumehood.sandboxd.egress.policy import Policy
from fumehood.sandboxd.egress.session import Gate, Session
from fumehood.sandboxd.egress.streams import SocketStream
from fumehood.serving.addresses import Addresses, networks
from fumehood.serving.resolver import Resolver

logger = logging.getLogger(__name__)

_PAUSE = 0.2  # after a failure to accept, mostly for want of descriptors
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class Proxy:
    """The connections of all sandboxes.

    upstream_tls: see `verifying_context`.
    on_event: hears what was done for a sandbox; on_change: that `connections` or the bytes of a door have changed.
    """

    def __init__(
        self,
        configuration: orders.Configuration,
        upstream_tls: ssl.SSLContext,
        *,
        on_event: Callable[[orders.Event], None],
        on_change: Callable[[], None],
    ) -> None:
        bounds = configuration.bounds
        self.connector = Connector(
            Resolver(configuration.hosts, timeout=bounds.resolve_seconds),
            Addresses(networks(configuration.private)),
            bounds,
        )
        self.on_event = on_event
        self.on_change = on_change
        self.upstream_tls = upstream_tls
        self.connections = 0
        self._most = configuration.connections_total
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, session: asyncio.Task[None]) -> None:
        """Remember it until it has ended."""
        self._tasks.add(session)
        session.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Every door has been closed before; wait until nothing is left."""
        for task in [*self._tasks]:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # of tasks that were done already, the loop has to hear as well
        self.connector.resolver.close()

    @property
    def full(self) -> bool:
        return self.connections >= self._most


class Access:
    """One sandbox's door to the network; takes the listener over, and begins to accept. Raises ValueError."""

    def __init__(self, proxy: Proxy, number: int, door: orders.Door, listener: socket.socket) -> None:
        self._proxy = proxy
        self._number = number
        self._most = door.connections
        self._budget = door.budget
        self.spent = door.spent
        self._sessions: set[asyncio.Task[None]] = set()
        self._fresh: set[socket.socket] = set()  # accepted, and its task has not begun
        keys = door.authority
        self._gate = Gate(
            policy=Policy(frozenset(door.domains), frozenset(door.ports), door.secrets),
            bounds=door.bounds,
            connector=proxy.connector,
            report=self._report,
            spend=self._spend,
            authority=None if keys is None else SandboxAuthority.load(keys.private, keys.certificate),
            upstream_tls=proxy.upstream_tls,
            placeholders={domain: Placeholders(values) for domain, values in door.secrets.items()},
        )
        self._listener: socket.socket | None = listener
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """The sandbox is gone, or on its way: so are its connections."""
        if self._listener is not None:
            self._pause()
            self._listener.close()
            self._listener = None
        for task in [*self._sessions]:
            task.cancel()
        for sock in self._fresh:  # cancelled before it began
            sock.close()
        self._fresh.clear()

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept, self._listener)

    def _pause(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        """As many at a time as are allowed; the others wait in the kernel's queue, at the sandbox's expense."""
        while len(self._sessions) < self._most:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("The proxy could not accept a connection: %s.", error.strerror)
                self._pause()
                asyncio.get_running_loop().call_later(_PAUSE, self._resume)
                return
            self._fresh.add(sock)
            task = asyncio.ensure_future(self._serve(sock))
            self._sessions.add(task)
            task.add_done_callback(self._ended)
            self._proxy.watch(task)
        self._pause()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sessions.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its place and kind only: the text might tell what passed through.
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("The proxy failed: %s in %s:%s.", type(error).__name__, place.name, place.lineno)
        self._resume()

    async def _serve(self, sock: socket.socket) -> None:
        self._fresh.discard(sock)
        sock.setblocking(False)
        if self._proxy.full:
            with sock, contextlib.suppress(OSError):
                sock.send(_BUSY)
            return
        self._proxy.connections += 1
        self._proxy.on_change()
        try:
            await Session(await _stream(sock), self._gate).run()
        finally:
            self._proxy.connections -= 1
            self._proxy.on_change()

    def _spend(self, count: int) -> bool:
        if count:
            self.spent += count
            self._proxy.on_change()
        return self._budget is None or self.spent <= self._budget

    def _report(self, event: orders.Event) -> None:
        self._proxy.on_event(msgspec.structs.replace(event, number=self._number))


async def _stream(sock: socket.socket) -> SocketStream:
    try:
        return await SocketStream.of(sock)
    except BaseException:
        sock.close()
        raise


def verifying_context(further: str) -> ssl.SSLContext:
    """For connections to servers: certificates and names are checked."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if further:
        context.load_verify_locations(cadata=further)
    return context
