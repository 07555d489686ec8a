"""PID 1 of a sandbox with namespaces: builds the jail, lets the interpreter in, reaps; imports only siblings."""

import contextlib
import os
import signal
import socket
from typing import NoReturn

from fumehood.sandboxd.inside import filters, jail, layout, wire

MAX_PLAN = 64 * 1024
FORKED, FRESH = b"0", b"1"  # what the interpreter is to be
FINISHED = b"."  # this process has no right left, so code may come
OOM_SCORE = 800  # so that the kernel chooses sandboxes before anything of the host's


def run_jail(program: bytes, channel: socket.socket, door: socket.socket, cgroups: list[int]) -> NoReturn:
    """PID 1 of a sandbox with namespaces: build them, let the interpreter in through `door`, then only reap."""
    try:
        silence()
        # Python's handler would end this process; a signal without one cannot come from inside.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(OOM_SCORE)
        body, disks, _, _ = socket.recv_fds(channel, MAX_PLAN, 1)
        plan = jail.Plan.decode(body.decode())
        jail.build_namespaces(plan, disks)
        _offer_font_list()
        send_handles(channel, plan)
        if not _open(door, FRESH if plan.fresh_interpreter else FORKED):
            os._exit(125)  # there is no interpreter; the zygote has told why
        jail.limit(plan)
        jail.renounce()
        filters.install(program)
        door.send(FINISHED)
        channel.close()
        door.close()
        _reap()
    except BaseException as error:
        report(channel, f"{type(error).__name__}: {error}")
    os._exit(125)


def _open(door: socket.socket, kind: bytes) -> bool:
    """Let the interpreter in; False if nobody stands there."""
    try:
        door.send(kind)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _reap() -> NoReturn:
    """Whatever loses its parent in here becomes a child of this process; the interpreter itself is the zygote's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait((signal.SIGCHLD,))


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


def _offer_font_list() -> None:
    """Spare new Python processes the search for fonts: matplotlib looks for its list where it may write."""
    os.makedirs(layout.MATPLOTLIB)
    for name in os.listdir(layout.CACHE):
        os.symlink(f"{layout.CACHE}/{name}", f"{layout.MATPLOTLIB}/{name}")
