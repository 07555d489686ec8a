"""The supervisor's side of the egress proxy: what a sandbox is granted, and the process that proxies; imports siblings.

The process parses what hostile programs and servers send; this module does not. See `worker`, and decision 0050.
"""

import asyncio
import contextlib
import importlib
import ipaddress
import itertools
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from types import ModuleType
from typing import IO, TYPE_CHECKING

import msgspec

from fumehood.protocol.sandbox import NetworkPolicy
from fumehood.protocol.sandbox_errors import SandboxStartFailed
from fumehood.sandboxd.egress import orders
from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.names import normalised
from fumehood.sandboxd.egress.policy import TRUST_ENVIRONMENT, Policy, allowed
from fumehood.sandboxd.packets import Packets
from fumehood.sandboxd.restarts import Restarts
from fumehood.sandboxd.settings import Settings
from fumehood.serving.addresses import networks

if TYPE_CHECKING:
    from fumehood.sandboxd.egress.certificates import SandboxAuthority

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_LAST_WORDS = 4096  # bytes
_MOST_WAITING = 256  # orders that the proxy has not read
_PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# Its modules come from where ours do, whatever the environment says.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from fumehood.sandboxd.egress.worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class Grant:
    """What was allowed: `environment` and `trust`, certificates, are for inside."""

    policy: Policy
    environment: dict[str, str]
    trust: str
    authority: "SandboxAuthority | None" = field(repr=False)


class ProxyProcess:
    """A running proxy, and our end of its control socket."""

    def __init__(
        self,
        control: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.control = control
        self._process = process
        self._stderr = stderr

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def end(self) -> None:
        """Kill it, and with it all its connections; wait until it is gone."""
        if self._process is not None:
            self.kill()
            await asyncio.to_thread(self._process.wait)
        if self._stderr is not None:
            self._stderr.close()

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    def last_words(self) -> str:
        """The last line that it said on standard error."""
        if self._stderr is None or self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        said = os.pread(self._stderr.fileno(), _LAST_WORDS, max(0, size - _LAST_WORDS))
        lines = said.decode(errors="replace").strip().splitlines()
        return _printable(lines[-1]) if lines else ""


async def start_process(configuration: orders.Configuration) -> ProxyProcess:
    """Start a proxy, by executing a new interpreter with nothing of this one's environment; raises OSError."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(theirs.fileno()), json.dumps(_module_paths())]
    stderr = os.fdopen(os.memfd_create("stderr", os.MFD_CLOEXEC), "r+b", buffering=0)
    with theirs, memory_file(orders.encode(configuration)) as described:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
                command,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                stdin=described,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            stderr.close()
            raise
    return ProxyProcess(mine, process, stderr)


class Egress:
    """The proxy of one supervisor; `on_event` hears what is also logged.

    A setting that makes no sense is a ValueError here, before anything starts.
    """

    def __init__(
        self,
        settings: Settings,
        bounds: Bounds | None = None,
        start: Callable[[orders.Configuration], Awaitable[ProxyProcess]] = start_process,
    ) -> None:
        self._settings = settings
        self._start_process = start
        self.bounds = bounds or Bounds(idle_seconds=settings.egress_idle_seconds)
        self._hosts = {
            normalised(name): str(ipaddress.ip_address(address))
            for name, address in settings.egress_hosts.items()
        }
        networks(settings.egress_private)
        for domain in settings.egress_domains or ():
            normalised(domain)
        self.user: int | None = None  # whom the proxy becomes
        self.on_event: Callable[[orders.Event], None] | None = None
        self.connections = 0  # at present, of all sandboxes
        self.restarts = Restarts()
        self._process: ProxyProcess | None = None
        self._packets: Packets | None = None
        self._ready: asyncio.Future[None] | None = None  # of the process; done when it may be told of doors
        self._starting: asyncio.Task[None] | None = None
        self._closing = False
        self._numbers = itertools.count(1)
        self._doors: dict[int, Access] = {}

    # ---- what a sandbox is granted ----------------------------------------------------------------------------

    async def grant(self, network: NetworkPolicy) -> Grant | None:
        """What a sandbox with this policy needs, or None for no network.

        RequestRefused for more than the operator allows, SandboxStartFailed if it cannot be had.
        """
        policy = allowed(network, self._settings)
        if policy is None:
            return None
        trust = await self._read_trust()
        authority: SandboxAuthority | None = None
        if policy.secrets:
            certificates = await asyncio.to_thread(_certificates)
            made: SandboxAuthority = await certificates.SandboxAuthority.make(policy.secrets)
            authority = made
            trust = f"{trust}\n{made.pem}"
        await self._wait_until_ready()
        environment = policy.environment() | (TRUST_ENVIRONMENT if trust else {})
        return Grant(policy, environment, trust, authority)

    async def _read_trust(self) -> str:
        """The operator's certificates; SandboxStartFailed if they are not usable."""
        file = self._settings.egress_ca_file
        if file is None:
            return ""
        try:
            text = await asyncio.to_thread(file.read_text, "utf-8", "replace")
            await asyncio.to_thread(_check_certificates, text)
        except (OSError, ValueError) as error:
            raise SandboxStartFailed(
                f"The certificates of egress_ca_file ({file}) are not usable: {error}."
            ) from error
        return text

    def access(self, grant: Grant) -> "Access":
        """A door for one sandbox."""
        return Access(self, self._settings, grant, next(self._numbers))

    # ---- the process ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Of the proxy, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, user: int | None) -> None:
        """Begin to start the proxy, where sandboxes may ask for it; as root it becomes `user`."""
        self.user = user
        if self._settings.egress != "off" and self._settings.mode == "namespaces":
            self._begin()

    @property
    def _is_ready(self) -> bool:
        ready = self._ready  # cancelled where the start took too long
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def _wait_until_ready(self) -> None:
        """Raises SandboxStartFailed."""
        if self._is_ready:
            return
        starting = self._begin()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(starting)
        except (TimeoutError, OSError) as error:
            raise SandboxStartFailed(
                f"The egress proxy does not run: {str(error) or 'it took too long to start'}."
            ) from error

    def _begin(self) -> asyncio.Task[None]:
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(self._started)
        return self._starting

    def _started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() or (error := starting.exception()) is None:
            return
        logger.error("The egress proxy could not be started: %s", error)
        self.restarts.died()
        if self._doors and not self._closing:  # sandboxes wait for it
            self._begin()

    async def _start(self) -> None:
        """Raises OSError, SandboxStartFailed."""
        await asyncio.sleep(self.restarts.pause())
        if os.geteuid() == 0 and self.user is None:
            raise OSError("there is no unprivileged user for it")
        trust = (await self._read_trust()).encode("ascii", "replace").decode()
        await self._end_process()
        process = self._process = await self._start_process(
            orders.Configuration(
                user=self.user,
                hosts=self._hosts,
                private=list(self._settings.egress_private),
                connections_total=self._settings.egress_connections_total,
                bounds=self.bounds,
                trust=trust,
            )
        )
        ready = self._ready = asyncio.get_running_loop().create_future()
        self._packets = Packets(process.control, on_packet=self._heard, on_close=lambda: self._died(process))
        async with asyncio.timeout(_START_SECONDS):
            await ready

    def _heard(self, body: bytes, fds: list[int]) -> None:
        del fds  # the kernel has thrown them away
        try:
            report = orders.decode_report(body)
        except msgspec.MsgspecError:
            logger.error("The egress proxy sent what it never should; it is ended.")
            if self._process is not None:
                self._process.kill()
            return
        match report:
            case orders.Event():
                self._report(report)
            case orders.Status():
                self.connections = report.connections
                for number, spent in report.spent.items():
                    if (access := self._doors.get(number)) is not None:
                        access.spent = max(access.spent, spent)
            case orders.Problem():
                logger.log(report.level, "%s", _printable(report.text))
            case orders.Ready():
                if self._ready is None or self._ready.done():
                    return  # it says so once: each time all doors would be sent, and held until it reads them
                self._ready.set_result(None)
                for access in self._doors.values():
                    self._open(access)

    def _died(self, process: ProxyProcess) -> None:
        """Its connections broke with it. Sandboxes' listeners are ours as well: who connects waits for the next one."""
        if process is not self._process or self._closing:
            return
        self.connections = 0
        if self._ready is not None and not self._ready.done():
            said = process.last_words()
            self._ready.set_exception(OSError(f"it ended while it started{said and f' ({said})'}"))
            return
        self._ready = None
        said = process.last_words()
        logger.error(
            "The egress proxy ended; connections of %d sandboxes broke. It is started again.%s",
            len(self._doors),
            said and f" It said: {said}",
        )
        self.restarts.died()
        self._begin()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if self._packets is not None:
            self._packets.close()
            self._packets = None
        if process is not None:
            await process.end()

    async def close(self) -> None:
        """Every sandbox has been closed before; end the proxy, and what is left in it."""
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._ready = None
        await self._end_process()
        self.connections = 0

    # ---- doors ------------------------------------------------------------------------------------------------

    def add(self, access: "Access") -> None:
        self._doors[access.number] = access
        if self._is_ready:
            self._open(access)

    def remove(self, access: "Access") -> None:
        if self._doors.pop(access.number, None) is not None and self._packets is not None:
            self._packets.send(orders.encode(orders.Close(access.number)))

    def _open(self, access: "Access") -> None:
        if self._packets is not None and access.listener is not None:
            with memory_file(orders.encode(access.describe())) as described:
                self._packets.send(orders.encode(orders.Open(access.number)), [described, access.listener])
            self._check_reading(self._packets)

    def _check_reading(self, packets: Packets) -> None:
        """End a proxy that does not read its orders: those that wait hold descriptors and secrets."""
        if packets.waiting > _MOST_WAITING and self._process is not None:
            logger.error("The egress proxy has stopped reading, and is ended.")
            self._process.kill()

    def _report(self, event: orders.Event) -> None:
        access = self._doors.get(event.number)
        sandbox = "" if access is None else access.sandbox
        event = msgspec.structs.replace(
            event, sandbox=sandbox, domain=_printable(event.domain), reason=_printable(event.reason)
        )
        fields = msgspec.structs.asdict(event)
        del fields["number"]
        logger.info(
            "egress %s: %s:%d %s",
            event.verdict,
            event.domain,
            event.port,
            event.reason,
            extra={"egress": fields},
        )
        if self.on_event is not None:
            self.on_event(event)


class Access:
    """One sandbox's door to the network: `environment` and `trust` are for inside."""

    def __init__(self, egress: Egress, settings: Settings, grant: Grant, number: int) -> None:
        self.environment = grant.environment
        self.trust = grant.trust
        self.number = number
        self.sandbox = ""
        self.spent = 0
        self.listener: int | None = None
        self._egress = egress
        self._settings = settings
        self._grant = grant
        self._bounds = egress.bounds

    def open(self, listener: int, sandbox: str) -> None:
        """Have the proxy accept; takes the descriptor over."""
        self.sandbox = sandbox
        self.listener = listener
        self._egress.add(self)

    def close(self) -> None:
        """The sandbox is gone, or on its way: so are its connections."""
        self._egress.remove(self)
        if self.listener is not None:
            os.close(self.listener)
            self.listener = None

    def describe(self) -> orders.Door:
        policy, authority = self._grant.policy, self._grant.authority
        return orders.Door(
            domains=sorted(policy.domains),
            ports=sorted(policy.ports),
            bounds=self._bounds,
            connections=self._settings.egress_connections,
            secrets=policy.secrets,
            authority=None
            if authority is None
            else orders.AuthorityKeys(private=authority.private_pem, certificate=authority.pem),
            budget=self._settings.egress_bytes,
            spent=self.spent,
        )


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


@contextlib.contextmanager
def memory_file(content: bytes) -> Generator[int]:
    """The descriptor of a file in memory that holds this: secrets in it are on no disk, and it may be large."""
    descriptor = os.memfd_create("order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        yield descriptor
    finally:
        os.close(descriptor)


def _module_paths() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path if entry]


def _certificates() -> ModuleType:
    """Imported when first needed, and not on the event loop: it takes a while, and most servers never need it."""
    return importlib.import_module("fumehood.sandboxd.egress.certificates")


def _check_certificates(text: str) -> None:
    """Raises ssl.SSLError, which is an OSError, and ValueError."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
        cadata=text.encode("ascii", "replace").decode("ascii")
    )


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
