"""The process of the egress proxy: it gives up its rights, then obeys the supervisor; imports uvloop and siblings.

Started by `control`, with a control socket, its configuration on standard input and no environment. It parses nothing
that a sandbox or a server sends before its rights are gone.
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

from fumehood.sandboxd import capabilities
from fumehood.sandboxd.egress import orders
from fumehood.sandboxd.egress.certificates import rehearse
from fumehood.sandboxd.egress.proxy import Access, Proxy, verifying_context
from fumehood.sandboxd.inside import landlock, syscalls
from fumehood.sandboxd.packets import Packets

_STATUS_SECONDS = 0.05
_LARGEST_FILE = 1 << 20  # all of them in memory: certificates, and what it says on standard error
# What the C library needs to look names up, and OpenSSL to find certificates.
_READABLE = (
    *("/usr", "/lib", "/lib64", "/etc", "/var/lib/ca-certificates", "/proc/self"),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/nscd"),
)


class Worker:
    """Does what the supervisor says on `control`, until that is closed."""

    def __init__(
        self, control: socket.socket, configuration: orders.Configuration, upstream_tls: ssl.SSLContext
    ) -> None:
        self.proxy = Proxy(configuration, upstream_tls, on_event=self._tell, on_change=self._tell_status_soon)
        self._doors: dict[int, Access] = {}
        self._ended = asyncio.Event()
        self._status_planned = False
        self._told_spent: dict[int, int] = {}
        self._packets = Packets(control, on_packet=self._obey, on_close=self._ended.set, accept_fds=True)
        self._tell(orders.Ready())

    async def run(self) -> None:
        await self._ended.wait()
        for door in self._doors.values():
            door.close()
        await self.proxy.close()

    def tell_problem(self, level: int, text: str) -> None:
        self._tell(orders.Problem(level, text[:2000]))

    def _tell(self, report: orders.Report) -> None:
        self._packets.send(orders.encode(report))

    def _obey(self, body: bytes, fds: list[int]) -> None:
        with contextlib.ExitStack() as unused:
            for fd in fds:
                unused.callback(os.close, fd)
            order = orders.decode_order(body)
            if isinstance(order, orders.Open):
                described, listener = fds
                door = read_order(described, orders.Door)
                unused.pop_all()
                os.close(described)
                self._open(order.number, door, socket.socket(fileno=listener))
            elif (access := self._doors.pop(order.number, None)) is not None:
                access.close()
                self._told_spent.pop(order.number, None)

    def _open(self, number: int, door: orders.Door, listener: socket.socket) -> None:
        try:
            self._doors[number] = Access(self.proxy, number, door, listener)
        except BaseException:
            listener.close()
            raise

    def _tell_status_soon(self) -> None:
        if not self._status_planned:
            self._status_planned = True
            asyncio.get_running_loop().call_later(_STATUS_SECONDS, self._tell_status)

    def _tell_status(self) -> None:
        self._status_planned = False
        spent = {
            number: door.spent
            for number, door in self._doors.items()
            if self._told_spent.get(number) != door.spent
        }
        self._told_spent |= spent
        self._tell(orders.Status(connections=self.proxy.connections, spent=spent))


class _ToSupervisor(logging.Handler):
    """What is logged here belongs into the supervisor's log."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.WARNING)
        self._worker = worker

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._worker.tell_problem(record.levelno, record.getMessage())


def read_order[T](descriptor: int, kind: type[T]) -> T:
    """A file in memory from its beginning; raises ValueError."""
    return msgspec.json.decode(os.pread(descriptor, orders.LONGEST_ORDER, 0), type=kind)


def confine(user: int | None) -> None:
    """Give up all rights but those of a user: no capability, nothing to write, little to read; raises OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    _restrict_files()
    if user is not None:
        capabilities.become(user)
    else:
        capabilities.keep_nothing()
    if os.geteuid() == 0 or capabilities.read_capabilities()["CapEff"]:
        raise OSError("the egress proxy would keep rights that it must not have")
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # nobody else of that user reads its memory


def _restrict_files() -> None:
    """By Landlock, where the kernel has it. Before the user is another one, who could not open all these places."""
    syscalls.prctl(capabilities.PR_SET_NO_NEW_PRIVS, 1)
    readable = {*_READABLE, *_used_paths(), sys.prefix, sys.base_prefix}
    readable |= {str(Path("/etc/resolv.conf").resolve().parent)}
    readable |= {os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    landlock.restrict(read_only=readable, read_write=(), devices=("/dev/null", "/dev/urandom"))


def _used_paths() -> set[str]:
    """Where modules came from. `python -m` puts the working directory on the path, which may be a home, or `/`."""
    found: set[str] = set()
    for name, module in sys.modules.items():
        if isinstance(file := getattr(module, "__file__", None), str):
            levels = name.count(".") + hasattr(module, "__path__")
            found.add(str(Path(file).parent.joinpath(*[".."] * levels)))
    return {os.path.normpath(path) for path in found} & set(sys.path)


async def _work(
    control: socket.socket, configuration: orders.Configuration, upstream_tls: ssl.SSLContext
) -> None:
    worker = Worker(control, configuration, upstream_tls)
    logging.getLogger("fumehood").addHandler(_ToSupervisor(worker))
    await worker.run()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    configuration = read_order(0, orders.Configuration)
    upstream_tls = verifying_context(configuration.trust)
    rehearse()
    confine(configuration.user)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(control, configuration, upstream_tls))
