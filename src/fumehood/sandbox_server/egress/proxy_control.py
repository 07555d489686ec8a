"""The supervisor's side of the egress proxy: grants network access to sandboxes and runs the proxy process.

The proxy process (proxy_worker.py) parses untrusted input; this module does not. See decision 0050.
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
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.egress import control_messages
from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_parsing import parse_domain_name
from fumehood.sandbox_server.egress.egress_policy import CA_ENVIRONMENT, EgressPolicy, build_policy
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.restart_backoff import RestartBackoff
from fumehood.sandbox_server.settings import SandboxServerSettings

if TYPE_CHECKING:
    from fumehood.sandbox_server.egress.certificate_authority import SandboxCertificateAuthority

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_STDERR_TAIL_BYTES = 4096
_MAX_UNREAD_ORDERS = 256
_PASSED_ENVIRONMENT = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# It imports from the same paths as this process, whatever the environment says.
_START_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from fumehood.sandbox_server.egress.proxy_worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class SandboxNetworkConfig:
    """What a sandbox is allowed; `environment` and `ca_certificates` are for the sandbox."""

    policy: EgressPolicy
    environment: dict[str, str]
    ca_certificates: str
    authority: "SandboxCertificateAuthority | None" = field(repr=False)


class ProxyProcess:
    """A running proxy process, and the supervisor's end of its control socket."""

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
        """Kill the process, and with it all its connections; wait until it has ended."""
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
        """Return the last line that it wrote to standard error, or ""."""
        if self._stderr is None or self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return _escape(lines[-1]) if lines else ""


async def start_process(configuration: control_messages.ProxyConfiguration) -> ProxyProcess:
    """Start a proxy process: a new interpreter with an empty environment. Raises OSError."""
    control, proxy_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stderr = os.fdopen(os.memfd_create("stderr", os.MFD_CLOEXEC), "r+b", buffering=0)
    with proxy_end, open_memory_file(control_messages.encode(configuration)) as content:
        try:
            process = spawn_proxy(content, proxy_end.fileno(), stderr)
        except BaseException:
            control.close()
            stderr.close()
            raise
    return ProxyProcess(control, process, stderr)


def spawn_proxy(configuration: int, control: int, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a proxy process that reads its configuration, and is controlled, by these descriptors. Raises OSError.

    stderr: None for that of this process.
    """
    command = [sys.executable, "-I", "-S", "-c", _START_PROGRAM, str(control), json.dumps(_module_paths())]
    return subprocess.Popen(  # it takes a millisecond
        command,
        env={name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ},
        cwd="/",
        pass_fds=(control,),
        stdin=configuration,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


class EgressController:
    """Runs the proxy of one supervisor, restarts it when it ends, and tells it what sandboxes may reach.

    `on_event` is called with each event, which is also logged. Raises ValueError for invalid settings.
    """

    def __init__(
        self,
        settings: SandboxServerSettings,
        limits: ProxyLimits | None = None,
        start_proxy: Callable[[control_messages.ProxyConfiguration], Awaitable[ProxyProcess]] = start_process,
    ) -> None:
        self._settings = settings
        self.start_proxy = start_proxy
        self.limits = limits or ProxyLimits(idle_seconds=settings.egress_idle_seconds)
        self._hosts = {
            parse_domain_name(name): str(ipaddress.ip_address(address))
            for name, address in settings.egress_hosts.items()
        }
        parse_networks(settings.egress_private_networks)
        for domain in settings.egress_domains or ():
            parse_domain_name(domain)
        self.proxy_uid: int | None = None
        self.on_event: Callable[[control_messages.EgressEvent], None] | None = None
        self.connections = 0  # open now, of all sandboxes
        self.restarts = RestartBackoff()
        self._process: ProxyProcess | None = None
        self._packets: PacketChannel | None = None
        self._ready_future: asyncio.Future[None] | None = None  # done when the process accepts orders
        self._start_task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._numbers = itertools.count(1)
        self._accesses: dict[int, SandboxNetworkAccess] = {}

    # ---- grants -----------------------------------------------------------------------------------------------

    async def grant(self, network: NetworkPolicy) -> SandboxNetworkConfig | None:
        """Return what a sandbox with this policy needs, or None for no network.

        Raises InvalidSandboxRequest for more than the operator allows, SandboxStartFailed if the proxy does not run.
        """
        policy = build_policy(network, self._settings)
        if policy is None:
            return None
        ca_certificates = await self._read_ca_file()
        authority: SandboxCertificateAuthority | None = None
        if policy.secrets:
            module = await asyncio.to_thread(_import_certificates)
            created: SandboxCertificateAuthority = await module.SandboxCertificateAuthority.create(
                policy.secrets
            )
            authority = created
            ca_certificates = f"{ca_certificates}\n{created.pem}"
        await self._wait_until_ready()
        environment = policy.environment() | (CA_ENVIRONMENT if ca_certificates else {})
        return SandboxNetworkConfig(policy, environment, ca_certificates, authority)

    async def _read_ca_file(self) -> str:
        """Return the operator's certificates. Raises SandboxStartFailed if they are not usable."""
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

    def create_access(self, grant: SandboxNetworkConfig) -> "SandboxNetworkAccess":
        """Return the network access of one sandbox; `SandboxNetworkAccess.open` starts it."""
        return SandboxNetworkAccess(self, self._settings, grant, next(self._numbers))

    # ---- the process ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The pid of the proxy, None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, proxy_uid: int | None) -> None:
        """Start the proxy in the background if the settings allow egress.

        proxy_uid: as root, the user that it switches to.
        """
        self.proxy_uid = proxy_uid
        has_proxy = self._settings.mode == "namespaces" or self._settings.egress_socket is not None
        if self._settings.egress != "off" and has_proxy:
            self._ensure_starting()

    @property
    def _is_ready(self) -> bool:
        ready = self._ready_future  # cancelled if the start timed out
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def _wait_until_ready(self) -> None:
        """Wait for the proxy. Raises SandboxStartFailed."""
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
        if self._accesses and not self._is_closing:  # sandboxes need it
            self._ensure_starting()

    async def _start(self) -> None:
        """Start the proxy, after a backoff. Raises OSError, SandboxStartFailed."""
        await asyncio.sleep(self.restarts.delay())
        if os.geteuid() == 0 and self.proxy_uid is None:
            raise OSError("there is no unprivileged user to run it as")
        ca_certificates = (await self._read_ca_file()).encode("ascii", "replace").decode()
        await self._stop_proxy()
        process = self._process = await self.start_proxy(
            control_messages.ProxyConfiguration(
                user=self.proxy_uid,
                hosts=self._hosts,
                private=list(self._settings.egress_private_networks),
                connections_total=self._settings.egress_connections_total,
                limits=self.limits,
                ca_certificates=ca_certificates,
            )
        )
        ready = self._ready_future = asyncio.get_running_loop().create_future()
        self._packets = PacketChannel(
            process.control, on_packet=self._handle_packet, on_close=lambda: self._on_proxy_exit(process)
        )
        async with asyncio.timeout(_START_SECONDS):
            await ready

    def _handle_packet(self, body: bytes, fds: list[int]) -> None:
        del fds  # the channel accepts none
        try:
            report = control_messages.decode_report(body)
        except msgspec.MsgspecError:
            logger.error("The egress proxy sent an invalid message and is killed.")
            if self._process is not None:
                self._process.kill()
            return
        match report:
            case control_messages.EgressEvent():
                self._log_event(report)
            case control_messages.ProxyStatus():
                self.connections = report.connections
                for number, bytes_used in report.bytes_used.items():
                    if (access := self._accesses.get(number)) is not None:
                        access.bytes_used = max(access.bytes_used, bytes_used)
            case control_messages.ProxyLogMessage():
                logger.log(report.level, "%s", _escape(report.text))
            case control_messages.ProxyReady():
                if self._ready_future is None or self._ready_future.done():
                    return  # only once: each time, all accesses would be sent and held until it reads them
                self._ready_future.set_result(None)
                for access in self._accesses.values():
                    self._send_access(access)

    def _on_proxy_exit(self, process: ProxyProcess) -> None:
        """Restart the proxy. Its connections are lost; the supervisor also holds the listeners, so new ones wait."""
        if process is not self._process or self._is_closing:
            return
        self.connections = 0
        if self._ready_future is not None and not self._ready_future.done():
            stderr = process.last_stderr_line()
            self._ready_future.set_exception(OSError(f"it ended during its start{stderr and f' ({stderr})'}"))
            return
        self._ready_future = None
        stderr = process.last_stderr_line()
        logger.error(
            "The egress proxy ended; connections of %d sandboxes were lost. It is restarted.%s",
            len(self._accesses),
            stderr and f" Last line of its stderr: {stderr}",
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
        """Stop the proxy; close all sandboxes before."""
        self._is_closing = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        self._ready_future = None
        await self._stop_proxy()
        self.connections = 0

    # ---- accesses of sandboxes --------------------------------------------------------------------------------

    def add_access(self, access: "SandboxNetworkAccess") -> None:
        """Let the proxy accept for this access, now or when it is ready."""
        self._accesses[access.number] = access
        if self._is_ready:
            self._send_access(access)

    def remove_access(self, access: "SandboxNetworkAccess") -> None:
        """Let the proxy close its listener and connections."""
        if self._accesses.pop(access.number, None) is not None and self._packets is not None:
            self._packets.send(control_messages.encode(control_messages.CloseAccessOrder(access.number)))

    def _send_access(self, access: "SandboxNetworkAccess") -> None:
        if self._packets is not None and access.listener is not None:
            with open_memory_file(control_messages.encode(access.to_message())) as content:
                self._packets.send(
                    control_messages.encode(control_messages.OpenAccessOrder(access.number)),
                    [content, access.listener],
                )
            self._kill_if_stalled(self._packets)

    def _kill_if_stalled(self, packets: PacketChannel) -> None:
        """Kill a proxy that does not read its orders: queued orders hold descriptors and secrets."""
        if packets.queued_packets > _MAX_UNREAD_ORDERS and self._process is not None:
            logger.error("The egress proxy does not read its orders and is killed.")
            self._process.kill()

    def _log_event(self, event: control_messages.EgressEvent) -> None:
        access = self._accesses.get(event.number)
        sandbox = "" if access is None else access.sandbox_id
        event = msgspec.structs.replace(
            event, sandbox=sandbox, domain=_escape(event.domain), reason=_escape(event.reason)
        )
        structured_logging.log_event(
            "egress_request",
            instance=sandbox,  # as in `sandbox_created`
            domain=event.domain,
            port=event.port,
            verdict=event.verdict,
            reason=event.reason,
            sent=event.sent,
            received=event.received,
        )
        if self.on_event is not None:
            self.on_event(event)


class SandboxNetworkAccess:
    """One sandbox's access to the network."""

    def __init__(
        self,
        egress: EgressController,
        settings: SandboxServerSettings,
        grant: SandboxNetworkConfig,
        number: int,
    ) -> None:
        self.grant = grant
        self.number = number
        self.sandbox_id = ""
        self.bytes_used = 0
        self.listener: int | None = None
        self._egress = egress
        self._settings = settings

    def open(self, listener: int, sandbox_id: str) -> None:
        """Let the proxy accept on this listening descriptor, which this object owns from now on."""
        self.sandbox_id = sandbox_id
        self.listener = listener
        self._egress.add_access(self)

    def close(self) -> None:
        """Close the listener and all connections of the sandbox."""
        self._egress.remove_access(self)
        if self.listener is not None:
            os.close(self.listener)
            self.listener = None

    def to_message(self) -> control_messages.SandboxEgressConfig:
        """Return what the proxy must know of this access."""
        policy, authority = self.grant.policy, self.grant.authority
        return control_messages.SandboxEgressConfig(
            domains=sorted(policy.domains),
            ports=sorted(policy.ports),
            limits=self._egress.limits,
            connections=self._settings.egress_connections,
            secrets=policy.secrets,
            authority=None
            if authority is None
            else control_messages.AuthorityKeyPair(private=authority.private_pem, certificate=authority.pem),
            budget=self._settings.egress_bytes,
            bytes_used=self.bytes_used,
        )


def open_access(
    access: SandboxNetworkAccess | None, listener: int | None, sandbox_id: str
) -> SandboxNetworkAccess | None:
    """Open the access on a sandbox's listener; without an access, close the listener.

    Raises SandboxStartFailed if there is no listener.
    """
    if listener is None:
        if access is not None:
            raise SandboxStartFailed("The sandbox has no listener for the egress proxy.")
    elif access is None:
        os.close(listener)
    else:
        access.open(listener, sandbox_id)
    return access


@contextlib.contextmanager
def open_memory_file(content: bytes) -> Generator[int]:
    """Yield the descriptor of a memory file with this content, for large messages and secrets."""
    descriptor = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        yield descriptor
    finally:
        os.close(descriptor)


def _module_paths() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path if entry]


def _import_certificates() -> ModuleType:
    """Import on first use, in a thread: it is slow, and most servers never need it."""
    return importlib.import_module("fumehood.sandbox_server.egress.certificate_authority")


def _check_certificates(text: str) -> None:
    """Raise ssl.SSLError (an OSError) or ValueError for invalid certificates."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
        cadata=text.encode("ascii", "replace").decode("ascii")
    )


def _escape(text: str) -> str:
    return text if text.isprintable() else ascii(text)
