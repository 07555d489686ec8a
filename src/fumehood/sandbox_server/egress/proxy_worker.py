"""The process of the egress proxy: drops its privileges, then follows the supervisor's orders.

proxy_control.py starts it with a control socket, its configuration on standard input and an empty environment. It
parses nothing of a sandbox or a server before its privileges are dropped.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
import sys
from pathlib import Path
from typing import override

import msgspec
import uvloop

from fumehood.sandbox_server.egress import control_messages
from fumehood.sandbox_server.egress.certificate_authority import warm_up
from fumehood.sandbox_server.egress.proxy import EgressProxy, SandboxListener, client_tls_context
from fumehood.sandbox_server.host import linux_capabilities
from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.jail import landlock
from fumehood.sandbox_server.packet_channel import PacketChannel

_STATUS_SECONDS = 0.05
_MAX_FILE_BYTES = 1 << 20  # memory files: certificates and standard error
# For name resolution by the C library, and OpenSSL's certificates.
_READABLE_PATHS = (
    *("/usr", "/lib", "/lib64", "/etc", "/var/lib/ca-certificates", "/proc/self"),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/nscd"),
)


class ProxyWorker:
    """Runs the proxy and follows the supervisor's orders until `control` is closed."""

    def __init__(
        self,
        control: socket.socket,
        configuration: control_messages.ProxyConfiguration,
        upstream_tls: ssl.SSLContext,
    ) -> None:
        self.proxy = EgressProxy(
            configuration, upstream_tls, on_event=self._send_report, on_change=self._schedule_status
        )
        self._listeners: dict[int, SandboxListener] = {}
        self._control_closed = asyncio.Event()
        self._is_status_scheduled = False
        self._reported_bytes: dict[int, int] = {}
        self._packets = PacketChannel(
            control, on_packet=self._handle_order, on_close=self._control_closed.set, accept_fds=True
        )
        self._send_report(control_messages.ProxyReady())

    async def run(self) -> None:
        await self._control_closed.wait()
        for listener in self._listeners.values():
            listener.close()
        await self.proxy.close()

    def send_log_message(self, level: int, text: str) -> None:
        self._send_report(control_messages.ProxyLogMessage(level, text[:2000]))

    def _send_report(self, report: control_messages.ProxyReport) -> None:
        self._packets.send(control_messages.encode(report))

    def _handle_order(self, body: bytes, fds: list[int]) -> None:
        with contextlib.ExitStack() as unused:
            for fd in fds:
                unused.callback(os.close, fd)
            order = control_messages.decode_order(body)
            if isinstance(order, control_messages.OpenAccessOrder):
                content, listener_fd = fds
                access = read_message(content, control_messages.SandboxEgressConfig)
                unused.pop_all()
                os.close(content)
                self._open_listener(order.number, access, socket.socket(fileno=listener_fd))
            elif (listener := self._listeners.pop(order.number, None)) is not None:
                listener.close()
                self._reported_bytes.pop(order.number, None)

    def _open_listener(
        self, number: int, access: control_messages.SandboxEgressConfig, listener: socket.socket
    ) -> None:
        try:
            self._listeners[number] = SandboxListener(self.proxy, number, access, listener)
        except BaseException:
            listener.close()
            raise

    def _schedule_status(self) -> None:
        if not self._is_status_scheduled:
            self._is_status_scheduled = True
            asyncio.get_running_loop().call_later(_STATUS_SECONDS, self._send_status)

    def _send_status(self) -> None:
        self._is_status_scheduled = False
        changed = {
            number: listener.bytes_used
            for number, listener in self._listeners.items()
            if self._reported_bytes.get(number) != listener.bytes_used
        }
        self._reported_bytes |= changed
        self._send_report(
            control_messages.ProxyStatus(connections=self.proxy.connections, bytes_used=changed)
        )


class _SupervisorLogHandler(logging.Handler):
    """Sends log records to the supervisor's log."""

    def __init__(self, worker: ProxyWorker) -> None:
        super().__init__(logging.WARNING)
        self._worker = worker

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._worker.send_log_message(record.levelno, record.getMessage())


def read_message[T](descriptor: int, kind: type[T]) -> T:
    """Decode the message in a memory file. Raises ValueError."""
    return msgspec.json.decode(os.pread(descriptor, control_messages.MAX_ORDER_BYTES, 0), type=kind)


def drop_privileges(uid: int | None) -> None:
    """Drop all privileges: no capability, no file to write, few to read. Raises OSError.

    uid: as root, the user to switch to.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    _restrict_files()
    if uid is not None:
        linux_capabilities.switch_user(uid)
    else:
        syscalls.drop_all_privileges()
    if os.geteuid() == 0 or linux_capabilities.read_capabilities()["CapEff"]:
        raise OSError("the egress proxy could not drop its privileges")
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # processes of the same user cannot read its memory


def _restrict_files() -> None:
    """Apply Landlock, if the kernel has it; before switching the user, who could not open all these paths."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    readable = {*_READABLE_PATHS, *_module_directories(), sys.prefix, sys.base_prefix}
    readable |= {str(Path("/etc/resolv.conf").resolve().parent)}
    readable |= {os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    landlock.restrict(read_only=readable, read_write=(), devices=("/dev/null", "/dev/urandom"))


def _module_directories() -> set[str]:
    """Return the directories of sys.path that modules came from.

    Not all of sys.path: `python -m` puts the working directory there, which may be a home or `/`.
    """
    found: set[str] = set()
    for name, module in sys.modules.items():
        if isinstance(file := getattr(module, "__file__", None), str):
            levels = name.count(".") + hasattr(module, "__path__")
            found.add(str(Path(file).parent.joinpath(*[".."] * levels)))
    return {os.path.normpath(path) for path in found} & set(sys.path)


async def _run_worker(
    control: socket.socket, configuration: control_messages.ProxyConfiguration, upstream_tls: ssl.SSLContext
) -> None:
    worker = ProxyWorker(control, configuration, upstream_tls)
    logging.getLogger("fumehood").addHandler(_SupervisorLogHandler(worker))
    await worker.run()


def main() -> None:
    """Run the proxy; the argument is the number of the control socket's descriptor."""
    control = socket.socket(fileno=int(sys.argv[1]))
    configuration = read_message(0, control_messages.ProxyConfiguration)
    upstream_tls = client_tls_context(configuration.ca_certificates)
    warm_up()
    drop_privileges(configuration.user)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_worker(control, configuration, upstream_tls))
