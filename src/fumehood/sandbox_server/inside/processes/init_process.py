"""What the first process of a sandbox does, or says, before any code of others."""

import os
import signal
import socket
from typing import NoReturn

from fumehood.sandbox_server.inside import framing, layout, syscalls
from fumehood.sandbox_server.inside.jail import jail_builder, seccomp_filter
from fumehood.sandbox_server.inside.processes import fork_server

MAX_PLAN_BYTES = 64 * 1024
_CONFIG_DIRECTORY = os.path.dirname(layout.MATPLOTLIB_CONFIG)
OOM_SCORE = 800  # so that the kernel chooses sandboxes before anything of the host's


def run_sleeping_init(seccomp_program: bytes, ready_pipe: int) -> NoReturn:
    """PID 1 of a sandbox with namespaces, where there is no smaller program for it: give up every right, and sleep."""
    try:
        fork_server.close_other_fds([ready_pipe])
        os.closerange(0, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a signal without a handler cannot come from inside
        jail_builder.drop_privileges()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        seccomp_filter.install(seccomp_program)
        os.close(ready_pipe)
        while True:
            signal.pause()
    finally:
        os._exit(125)


def discard_output() -> None:
    """The spawner's standard error belongs to the operator, not to the sandbox."""
    os.dup2(0, 1)
    os.dup2(0, 2)


def send_handles(channel: socket.socket, plan: jail_builder.JailPlan) -> None:
    """Hand the supervisor what it needs later, while nobody untrusted can be in between."""
    handles = [
        os.open(plan.work_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC),
    ]
    if plan.isolation == "namespaces":  # elsewhere the loopback interface is not the sandbox's own
        handles += [
            jail_builder.listen_on_loopback(layout.EGRESS_PORT),
            jail_builder.listen_on_loopback(layout.PIP_PORT),
        ]
    (packet,) = framing.encode_packets(
        framing.RunnerMessage(framing.MessageKind.JAILED, framing.NO_CALL, b"")
    )
    socket.send_fds(channel, [packet], handles)
    for handle in handles:
        os.close(handle)


def report_failure(channel: socket.socket, text: str) -> None:
    body = text.encode(errors="backslashreplace")[: framing.MAX_BODY]
    for packet in framing.encode_packets(
        framing.RunnerMessage(framing.MessageKind.FAILED, framing.NO_CALL, body)
    ):
        channel.send(packet)


def link_font_cache(names: list[str]) -> None:
    """Spare new Python processes the search for fonts: matplotlib looks for its list where it may write."""
    os.mkdir(_CONFIG_DIRECTORY)
    os.mkdir(layout.MATPLOTLIB_CONFIG)
    for name in names:
        os.symlink(f"{layout.ZYGOTE_CACHE}/{name}", f"{layout.MATPLOTLIB_CONFIG}/{name}")
