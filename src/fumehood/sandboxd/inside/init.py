"""What the first process of a sandbox does, or says, before any code of others; imports only siblings."""

import os
import signal
import socket
from typing import NoReturn

from fumehood.sandboxd.inside import children, filters, jail, layout, syscalls, wire

MAX_PLAN = 64 * 1024
_CONFIGURATION = os.path.dirname(layout.MATPLOTLIB)
OOM_SCORE = 800  # so that the kernel chooses sandboxes before anything of the host's


def sleep(program: bytes, undone: int) -> NoReturn:
    """PID 1 of a sandbox with namespaces, where there is no smaller program for it: give up every right, and sleep."""
    try:
        children.only_these_fds([undone])
        os.closerange(0, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a signal without a handler cannot come from inside
        jail.renounce()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        filters.install(program)
        os.close(undone)
        while True:
            signal.pause()
    finally:
        os._exit(125)


def silence() -> None:
    """The warden's standard error belongs to the operator, not to the sandbox."""
    os.dup2(0, 1)
    os.dup2(0, 2)


def send_handles(channel: socket.socket, plan: jail.Plan) -> None:
    """Hand the supervisor what it needs later, while nobody untrusted can be in between."""
    handles = [
        os.open(plan.work_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC),
    ]
    if plan.walls == "namespaces":  # elsewhere the loopback interface is not the sandbox's own
        handles += [jail.listen(layout.EGRESS_PORT), jail.listen(layout.PIP_PORT)]
    (packet,) = wire.packets(wire.Message(wire.Kind.JAILED, wire.NO_CALL, b""))
    socket.send_fds(channel, [packet], handles)
    for handle in handles:
        os.close(handle)


def report(channel: socket.socket, text: str) -> None:
    body = text.encode(errors="backslashreplace")[: wire.MAX_BODY]
    for packet in wire.packets(wire.Message(wire.Kind.FAILED, wire.NO_CALL, body)):
        channel.send(packet)


def offer_font_list(names: list[str]) -> None:
    """Spare new Python processes the search for fonts: matplotlib looks for its list where it may write."""
    os.mkdir(_CONFIGURATION)
    os.mkdir(layout.MATPLOTLIB)
    for name in names:
        os.symlink(f"{layout.CACHE}/{name}", f"{layout.MATPLOTLIB}/{name}")
