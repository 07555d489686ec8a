"""The supervisor's egress proxy: one for all, with a door for each sandbox; imports the protocol and siblings."""

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import socket
import ssl
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fumehood.protocol.sandbox import NetworkPolicy
from fumehood.protocol.sandbox_errors import SandboxStartFailed
from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.connecting import Connector
from fumehood.sandboxd.egress.names import normalised
from fumehood.sandboxd.egress.placeholders import Placeholders
from fumehood.sandboxd.egress.policy import TRUST_ENVIRONMENT, Policy, allowed
from fumehood.sandboxd.egress.session import Event, Gate, Session
from fumehood.sandboxd.egress.streams import SocketStream
from fumehood.sandboxd.settings import Settings
from fumehood.serving.addresses import Addresses, networks
from fumehood.serving.resolver import Resolver

if TYPE_CHECKING:
    from fumehood.sandboxd.egress.certificates import SandboxAuthority

logger = logging.getLogger(__name__)

_PAUSE = 0.2  # after a failure to accept, mostly for want of descriptors
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Grant:
    """What was allowed: `environment` and `trust`, certificates, are for inside."""

    policy: Policy
    environment: dict[str, str]
    trust: str
    authority: "SandboxAuthority | None" = field(repr=False)


class Egress:
    """Of one supervisor; `on_event` hears what is also logged.

    A setting that makes no sense is a ValueError here, before anything starts.
    """

    def __init__(self, settings: Settings, bounds: Bounds | None = None) -> None:
        self._settings = settings
        self.bounds = bounds or Bounds(idle_seconds=settings.egress_idle_seconds)
        hosts = {
            normalised(name): str(ipaddress.ip_address(address))
            for name, address in settings.egress_hosts.items()
        }
        self.connector = Connector(
            Resolver(hosts, timeout=self.bounds.resolve_seconds),
            Addresses(networks(settings.egress_private)),
            self.bounds,
        )
        for domain in settings.egress_domains or ():
            normalised(domain)
        self.on_event: Callable[[Event], None] | None = None
        self.connections = 0  # at present, of all sandboxes
        self._tasks: set[asyncio.Task[None]] = set()
        self._upstream_tls: ssl.SSLContext | None = None

    async def grant(self, network: NetworkPolicy) -> Grant | None:
        """What a sandbox with this policy needs, or None for no network.

        RequestRefused for more than the operator allows, SandboxStartFailed if it cannot be had.
        """
        policy = allowed(network, self._settings)
        if policy is None:
            return None
        try:
            return await self._grant(policy)
        except (OSError, ValueError) as error:
            file = self._settings.egress_ca_file
            raise SandboxStartFailed(
                f"The certificates of egress_ca_file ({file}) are not usable: {error}."
            ) from error

    async def _grant(self, policy: Policy) -> Grant:
        trust = ""
        authority: SandboxAuthority | None = None
        if self._settings.egress_ca_file is not None:
            trust = await asyncio.to_thread(self._settings.egress_ca_file.read_text, "utf-8", "replace")
        if policy.secrets:
            certificates = await asyncio.to_thread(_certificates)
            made: SandboxAuthority = await certificates.SandboxAuthority.make(policy.secrets)
            authority = made
            if self._upstream_tls is None:
                self._upstream_tls = await asyncio.to_thread(_verifying, self._settings.egress_ca_file)
            trust = f"{trust}\n{made.pem}"
        environment = policy.environment() | (TRUST_ENVIRONMENT if trust else {})
        return Grant(policy, environment, trust, authority)

    def access(self, grant: Grant) -> "Access":
        """A door for one sandbox."""
        return Access(self, self._settings, grant)

    @property
    def upstream_tls(self) -> ssl.SSLContext | None:
        return self._upstream_tls

    def watch(self, session: asyncio.Task[None]) -> None:
        """Remember it until it has ended."""
        self._tasks.add(session)
        session.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Every sandbox has been closed before; wait until nothing of it is left."""
        for task in [*self._tasks]:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # of tasks that were done already, the loop has to hear as well
        self.connector.resolver.close()

    @property
    def full(self) -> bool:
        return self.connections >= self._settings.egress_connections_total


class Access:
    """One sandbox's door to the network: `environment` and `trust` are for inside."""

    def __init__(self, egress: Egress, settings: Settings, grant: Grant) -> None:
        self.environment = grant.environment
        self.trust = grant.trust
        self._egress = egress
        self._most = settings.egress_connections
        self._budget = settings.egress_bytes
        self._spent = 0
        self._sandbox = ""
        self._listener: socket.socket | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._fresh: set[socket.socket] = set()  # accepted, and its task has not begun
        secrets = grant.policy.secrets
        self._gate = Gate(
            policy=grant.policy,
            bounds=egress.bounds,
            connector=egress.connector,
            report=self._report,
            spend=self._spend,
            authority=grant.authority,
            upstream_tls=egress.upstream_tls,
            placeholders={domain: Placeholders(values) for domain, values in secrets.items()},
        )

    def open(self, listener: int, sandbox: str) -> None:
        """Begin to accept; takes the descriptor over."""
        self._sandbox = sandbox
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
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
            self._egress.watch(task)
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
        if self._egress.full:
            with sock, contextlib.suppress(OSError):
                sock.send(_BUSY)
            return
        self._egress.connections += 1
        try:
            await Session(await _stream(sock), self._gate).run()
        finally:
            self._egress.connections -= 1

    def _spend(self, count: int) -> bool:
        self._spent += count
        return self._budget is None or self._spent <= self._budget

    def _report(self, event: Event) -> None:
        event = replace(event, sandbox=self._sandbox)
        logger.info(
            "egress %s: %s:%d %s",
            event.verdict,
            event.domain,
            event.port,
            event.reason,
            extra={"egress": asdict(event)},
        )
        if self._egress.on_event is not None:
            self._egress.on_event(event)


def admit(access: Access | None, listeners: list[int], sandbox: str) -> Access | None:
    """Let the proxy accept at a sandbox's first listener; without access nobody ever does."""
    if not listeners:
        if access is not None:
            raise SandboxStartFailed("The sandbox has no way to the proxy.")
    elif access is None:
        os.close(listeners.pop(0))
    else:
        access.open(listeners.pop(0), sandbox)
    return access


async def _stream(sock: socket.socket) -> SocketStream:
    try:
        return await SocketStream.of(sock)
    except BaseException:
        sock.close()
        raise


def _certificates() -> ModuleType:
    """Imported when first needed, and not on the event loop: it takes a while, and most servers never need it."""
    return importlib.import_module("fumehood.sandboxd.egress.certificates")


def _verifying(further: Path | None) -> ssl.SSLContext:
    """For connections to servers: certificates and names are checked."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if further is not None:
        context.load_verify_locations(further)
    return context
