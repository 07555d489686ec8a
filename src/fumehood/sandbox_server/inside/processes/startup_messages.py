"""What a sandbox's first process does and sends to the supervisor before untrusted code runs."""

import os
import socket
from typing import NoReturn

from fumehood.sandbox_server.inside import framing, layout
from fumehood.sandbox_server.inside.jail import jail_builder

MAX_PLAN_BYTES = 64 * 1024
_CONFIG_DIRECTORY = os.path.dirname(layout.MATPLOTLIB_CONFIG)
OOM_SCORE = 800  # the OOM killer prefers sandboxes to the host's processes


def send_handles(channel: socket.socket, plan: jail_builder.JailPlan, listeners: list[int]) -> None:
    """Send JAILED with the descriptors that the supervisor needs, before untrusted code runs; closes `listeners`."""
    handles = [os.open(plan.work_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    if plan.isolation == "namespaces":  # for the helper that attaches packages
        handles.append(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
    handles += listeners
    (packet,) = framing.encode_packets(
        framing.ChannelMessage(framing.MessageKind.JAILED, framing.NO_CALL, b"")
    )
    socket.send_fds(channel, [packet], handles)
    for handle in handles:
        os.close(handle)


def fail(channel: socket.socket, error: BaseException) -> NoReturn:
    """Send FAILED, since the jail could not be built, and exit."""
    try:
        body = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")[: framing.MAX_BODY]
        for packet in framing.encode_packets(
            framing.ChannelMessage(framing.MessageKind.FAILED, framing.NO_CALL, body)
        ):
            channel.send(packet)
    finally:
        os._exit(125)


def link_font_cache() -> None:
    """Link the zygote's font list into matplotlib's directory, so that new processes need not search for fonts."""
    os.mkdir(_CONFIG_DIRECTORY)
    os.mkdir(layout.MATPLOTLIB_CONFIG)
    for name in os.listdir(layout.ZYGOTE_CACHE):
        os.symlink(f"{layout.ZYGOTE_CACHE}/{name}", f"{layout.MATPLOTLIB_CONFIG}/{name}")
