"""The supervisor's side of the egress proxy: what a sandbox is granted, and the process that proxies.

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

from fumehood.http_server.address_policy import parse_networks
from fumehood.protocol.sandbox.sandbox_errors import SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import NetworkPolicy
from fumehood.sandbox_server.egress import control_messages
from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_names import normalise_domain
from fumehood.sandbox_server.egress.egress_policy import CA_ENVIRONMENT, EgressPolicy, build_policy
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.restart_backoff import RestartBackoff
from fumehood.sandbox_server.settings import Settings

if TYPE_CHECKING:
    from fumehood.sandbox_server.egress.certificate_authority import SandboxCertificateAuthority

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_STDERR_TAIL_BYTES = 4096  # bytes
_MAX_UNREAD_ORDERS = 256  # orders that the proxy has not read
_PASSED_ENVIRONMENT = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# Its modules come from where ours do, whatever the environment says.
_START_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from fumehood.sandbox_server.egress.proxy_worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class NetworkGrant:
    """What was allowed: `environment` and `trust`, certificates, are for inside."""

    policy: EgressPolicy
    environment: dict[str, str]
    ca_certificates: str
    authority: "SandboxCertificateAuthority | None" = field(repr=False)


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

    async def stop(self) -> None:
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

    def last_stderr_line(self) -> str:
        """The last line that it said on standard error."""
        if self._stderr is None or self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        said = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        lines = said.decode(errors="replace").strip().splitlines()
        return _escape(lines[-1]) if lines else ""


async def start_process(configuration: control_messages.ProxyConfiguration) -> ProxyProcess:
    """Start a proxy, by executing a new interpreter with nothing of this one's environment; raises OSError."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _START_PROGRAM,
        str(theirs.fileno()),
        json.dumps(_module_paths()),
    ]
    stderr = os.fdopen(os.memfd_create("stderr", os.MFD_CLOEXEC), "r+b", buffering=0)
    with theirs, open_memory_file(control_messages.encode(configuration)) as described:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
                command,
                env={name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ},
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


class EgressController:
    """The proxy of one supervisor; `on_event` hears what is also logged.

    A setting that makes no sense is a ValueError here, before anything starts.
    """

    def __init__(
        self,
        settings: Settings,
        limits: ProxyLimits | None = None,
        start_proxy: Callable[[control_messages.ProxyConfiguration], Awaitable[ProxyProcess]] = start_process,
    ) -> None:
        self._settings = settings
        self._start_proxy = start_proxy
        self.limits = limits or ProxyLimits(idle_seconds=settings.egress_idle_seconds)
        self._hosts = {
            normalise_domain(name): str(ipaddress.ip_address(address))
            for name, address in settings.egress_hosts.items()
        }
        parse_networks(settings.egress_private_networks)
        for domain in settings.egress_domains or ():
            normalise_domain(domain)
        self.proxy_uid: int | None = None  # whom the proxy becomes
        self.on_event: Callable[[control_messages.EgressEvent], None] | None = None
        self.connections = 0  # at present, of all sandboxes
        self.restarts = RestartBackoff()
        self._process: ProxyProcess | None = None
        self._packets: PacketChannel | None = None
        self._ready_future: asyncio.Future[None] | None = (
            None  # of the process; done when it may be told of doors
        )
        self._start_task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._numbers = itertools.count(1)
        self._accesses: dict[int, NetworkAccess] = {}

    # ---- what a sandbox is granted ----------------------------------------------------------------------------

    async def grant(self, network: NetworkPolicy) -> NetworkGrant | None:
        """What a sandbox with this policy needs, or None for no network.

        RequestRefused for more than the operator allows, SandboxStartFailed if it cannot be had.
        """
        policy = build_policy(network, self._settings)
        if policy is None:
            return None
        trust = await self._read_trust()
        authority: SandboxCertificateAuthority | None = None
        if policy.secrets:
            certificates = await asyncio.to_thread(_import_certificates)
            made: SandboxCertificateAuthority = await certificates.SandboxCertificateAuthority.create(
                policy.secrets
            )
            authority = made
            trust = f"{trust}\n{made.pem}"
        await self._wait_until_ready()
        environment = policy.environment() | (CA_ENVIRONMENT if trust else {})
        return NetworkGrant(policy, environment, trust, authority)

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

    def create_access(self, grant: NetworkGrant) -> "NetworkAccess":
        """A door for one sandbox."""
        return NetworkAccess(self, self._settings, grant, next(self._numbers))

    # ---- the process ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Of the proxy, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, proxy_uid: int | None) -> None:
        """Begin to start the proxy, where sandboxes may ask for it; as root it becomes `user`."""
        self.proxy_uid = proxy_uid
        if self._settings.egress != "off" and self._settings.mode == "namespaces":
            self._ensure_starting()

    @property
    def _is_ready(self) -> bool:
        ready = self._ready_future  # cancelled where the start took too long
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def _wait_until_ready(self) -> None:
        """Raises SandboxStartFailed."""
        if self._is_ready:
            return
        starting = self._ensure_starting()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(starting)
        except (TimeoutError, OSError) as error:
            raise SandboxStartFailed(
                f"The egress proxy does not run: {str(error) or 'it took too long to start'}."
            ) from error

    def _ensure_starting(self) -> asyncio.Task[None]:
        if self._start_task is None or self._start_task.done():
            self._start_task = asyncio.ensure_future(self._start())
            self._start_task.add_done_callback(self._on_start_done)
        return self._start_task

    def _on_start_done(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() or (error := starting.exception()) is None:
            return
        logger.error("The egress proxy could not be started: %s", error)
        self.restarts.record_failure()
        if self._accesses and not self._is_closing:  # sandboxes wait for it
            self._ensure_starting()

    async def _start(self) -> None:
        """Raises OSError, SandboxStartFailed."""
        await asyncio.sleep(self.restarts.delay())
        if os.geteuid() == 0 and self.proxy_uid is None:
            raise OSError("there is no unprivileged user for it")
        trust = (await self._read_trust()).encode("ascii", "replace").decode()
        await self._stop_proxy()
        process = self._process = await self._start_proxy(
            control_messages.ProxyConfiguration(
                user=self.proxy_uid,
                hosts=self._hosts,
                private=list(self._settings.egress_private_networks),
                connections_total=self._settings.egress_connections_total,
                limits=self.limits,
                trust=trust,
            )
        )
        ready = self._ready_future = asyncio.get_running_loop().create_future()
        self._packets = PacketChannel(
            process.control, on_packet=self._handle_packet, on_close=lambda: self._on_proxy_exit(process)
        )
        async with asyncio.timeout(_START_SECONDS):
            await ready

    def _handle_packet(self, body: bytes, fds: list[int]) -> None:
        del fds  # the kernel has thrown them away
        try:
            report = control_messages.decode_report(body)
        except msgspec.MsgspecError:
            logger.error("The egress proxy sent what it never should; it is ended.")
            if self._process is not None:
                self._process.kill()
            return
        match report:
            case control_messages.EgressEvent():
                self._log_event(report)
            case control_messages.ProxyStatus():
                self.connections = report.connections
                for number, spent in report.spent.items():
                    if (access := self._accesses.get(number)) is not None:
                        access.bytes_used = max(access.bytes_used, spent)
            case control_messages.ProxyLogMessage():
                logger.log(report.level, "%s", _escape(report.text))
            case control_messages.ProxyReady():
                if self._ready_future is None or self._ready_future.done():
                    return  # it says so once: each time all doors would be sent, and held until it reads them
                self._ready_future.set_result(None)
                for access in self._accesses.values():
                    self._send_access(access)

    def _on_proxy_exit(self, process: ProxyProcess) -> None:
        """Its connections broke with it. Sandboxes' listeners are ours as well: who connects waits for the next one."""
        if process is not self._process or self._is_closing:
            return
        self.connections = 0
        if self._ready_future is not None and not self._ready_future.done():
            said = process.last_stderr_line()
            self._ready_future.set_exception(OSError(f"it ended while it started{said and f' ({said})'}"))
            return
        self._ready_future = None
        said = process.last_stderr_line()
        logger.error(
            "The egress proxy ended; connections of %d sandboxes broke. It is started again.%s",
            len(self._accesses),
            said and f" It said: {said}",
        )
        self.restarts.record_failure()
        self._ensure_starting()

    async def _stop_proxy(self) -> None:
        process, self._process = self._process, None
        if self._packets is not None:
            self._packets.close()
            self._packets = None
        if process is not None:
            await process.stop()

    async def close(self) -> None:
        """Every sandbox has been closed before; end the proxy, and what is left in it."""
        self._is_closing = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        self._ready_future = None
        await self._stop_proxy()
        self.connections = 0

    # ---- doors ------------------------------------------------------------------------------------------------

    def add_access(self, access: "NetworkAccess") -> None:
        self._accesses[access.number] = access
        if self._is_ready:
            self._send_access(access)

    def remove_access(self, access: "NetworkAccess") -> None:
        if self._accesses.pop(access.number, None) is not None and self._packets is not None:
            self._packets.send(control_messages.encode(control_messages.CloseAccess(access.number)))

    def _send_access(self, access: "NetworkAccess") -> None:
        if self._packets is not None and access.listener is not None:
            with open_memory_file(control_messages.encode(access.to_message())) as described:
                self._packets.send(
                    control_messages.encode(control_messages.OpenAccess(access.number)),
                    [described, access.listener],
                )
            self._kill_if_stalled(self._packets)

    def _kill_if_stalled(self, packets: PacketChannel) -> None:
        """End a proxy that does not read its orders: those that wait hold descriptors and secrets."""
        if packets.queued_packets > _MAX_UNREAD_ORDERS and self._process is not None:
            logger.error("The egress proxy has stopped reading, and is ended.")
            self._process.kill()

    def _log_event(self, event: control_messages.EgressEvent) -> None:
        access = self._accesses.get(event.number)
        sandbox = "" if access is None else access.sandbox_id
        event = msgspec.structs.replace(
            event, sandbox=sandbox, domain=_escape(event.domain), reason=_escape(event.reason)
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


class NetworkAccess:
    """One sandbox's door to the network: `environment` and `trust` are for inside."""

    def __init__(
        self, egress: EgressController, settings: Settings, grant: NetworkGrant, number: int
    ) -> None:
        self.environment = grant.environment
        self.ca_certificates = grant.ca_certificates
        self.number = number
        self.sandbox_id = ""
        self.bytes_used = 0
        self.listener: int | None = None
        self._egress = egress
        self._settings = settings
        self._grant = grant
        self._limits = egress.limits

    def open(self, listener: int, sandbox_id: str) -> None:
        """Have the proxy accept; takes the descriptor over."""
        self.sandbox_id = sandbox_id
        self.listener = listener
        self._egress.add_access(self)

    def close(self) -> None:
        """The sandbox is gone, or on its way: so are its connections."""
        self._egress.remove_access(self)
        if self.listener is not None:
            os.close(self.listener)
            self.listener = None

    def to_message(self) -> control_messages.SandboxAccess:
        policy, authority = self._grant.policy, self._grant.authority
        return control_messages.SandboxAccess(
            domains=sorted(policy.domains),
            ports=sorted(policy.ports),
            limits=self._limits,
            connections=self._settings.egress_connections,
            secrets=policy.secrets,
            authority=None
            if authority is None
            else control_messages.AuthorityKeyPair(private=authority.private_pem, certificate=authority.pem),
            budget=self._settings.egress_bytes,
            spent=self.bytes_used,
        )


def open_access(access: NetworkAccess | None, listeners: list[int], sandbox_id: str) -> NetworkAccess | None:
    """Let the proxy accept at a sandbox's first listener; without access nobody ever does."""
    if not listeners:
        if access is not None:
            raise SandboxStartFailed("The sandbox has no way to the proxy.")
    elif access is None:
        os.close(listeners.pop(0))
    else:
        access.open(listeners.pop(0), sandbox_id)
    return access


@contextlib.contextmanager
def open_memory_file(content: bytes) -> Generator[int]:
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


def _import_certificates() -> ModuleType:
    """Imported when first needed, and not on the event loop: it takes a while, and most servers never need it."""
    return importlib.import_module("fumehood.sandbox_server.egress.certificate_authority")


def _check_certificates(text: str) -> None:
    """Raises ssl.SSLError, which is an OSError, and ValueError."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
        cadata=text.encode("ascii", "replace").decode("ascii")
    )


def _escape(text: str) -> str:
    return text if text.isprintable() else ascii(text)
