"""PID 1 of a sandbox with namespaces: builds the jail, lets the interpreter in, reaps; imports only siblings."""

import os
import socket

from fumehood.sandboxd.inside import jail, layout, wire

MAX_PLAN = 64 * 1024
OOM_SCORE = 800  # so that the kernel chooses sandboxes before anything of the host's


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


def offer_font_list() -> None:
    """Spare new Python processes the search for fonts: matplotlib looks for its list where it may write."""
    os.makedirs(layout.MATPLOTLIB)
    for name in os.listdir(layout.CACHE):
        os.symlink(f"{layout.CACHE}/{name}", f"{layout.MATPLOTLIB}/{name}")
