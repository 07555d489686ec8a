"""Serves requests with descriptors and watches the processes it forks.

It knows its children by the supervisor's numbers, never by a name: what this process knows, every later fork
could read.
"""

import abc
import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from fumehood.sandbox_server.inside.warm_start import fork_hooks

_MAX_REQUEST = 256 * 1024
_MAX_FDS = 16

type RequestHandler = Callable[[dict[str, Any], list[int]], None]


class ForkServer(abc.ABC):
    """One process that forks on request; `control` is the supervisor's, and its end is this process's."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._children: dict[int, tuple[int, int]] = {}  # number -> pid, pidfd
        self._selector = selectors.DefaultSelector()

    def add_source(self, source: socket.socket, handler: RequestHandler) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, int):
                    self._reap_child(key.data)
                else:
                    self._dispatch(key.fileobj, key.data)

    def _dispatch(self, source: Any, handler: RequestHandler) -> None:
        request, fds = receive_request(source)
        try:
            handler(request, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def send_event(self, event: dict[str, Any], fds: list[int] | None = None) -> None:
        send_message(self.control, event, fds)

    def watch_child(self, number: int, pid: int) -> int:
        """Take note of a child; the pidfd stays ours."""
        pidfd = os.pidfd_open(pid)
        self.watch_pidfd(number, pid, pidfd)
        return pidfd

    def watch_pidfd(self, number: int, pid: int, pidfd: int) -> None:
        self._children[number] = (pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, number)

    def send_signal(self, number: int, which: int) -> None:
        if number in self._children:
            with contextlib.suppress(ProcessLookupError):  # it has ended, of which we are about to hear
                signal.pidfd_send_signal(self._children[number][1], which)

    def signal_group(self, number: int, which: int) -> None:
        """To the process group that this child leads; it is not reaped yet, so its number is still its own."""
        if number in self._children:
            try:
                os.killpg(self._children[number][0], which)
            except (ProcessLookupError, PermissionError):
                return  # it has not become a leader yet, or has just ended

    def _reap_child(self, number: int) -> None:
        pid, pidfd = self._children.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self.on_child_exit(number, self.collect_exit_code(pid))

    def collect_exit_code(self, pid: int) -> int:
        """How a child has ended; negative codes are signals."""
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    @abc.abstractmethod
    def on_child_exit(self, number: int, code: int) -> None:
        """A child has ended and is reaped."""


def receive_request(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    body, fds, _, _ = socket.recv_fds(source, _MAX_REQUEST, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not body:
        os._exit(0)  # the other end is gone, and with this process every sandbox
    return json.loads(body), fds


def send_message(target: socket.socket, event: dict[str, Any], fds: list[int] | None = None) -> None:
    body = json.dumps(event).encode()
    if fds:
        socket.send_fds(target, [body], fds)
    else:
        target.send(body)


def replace_stdin() -> None:
    """Descriptor 0 as the jail's own /dev/null: on the one inherited, code could move the times of the host's."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


class NamespaceForker:
    """Forks children into the PID namespaces of others; the process itself stays in its own."""

    def __init__(self) -> None:
        self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self, init_pidfd: int) -> int:
        """As os.fork, into the PID namespace of the process of this pidfd."""
        os.setns(init_pidfd, os.CLONE_NEWPID)
        pid = -1
        try:
            pid = fork_hooks.plain_fork()
        finally:
            if pid != 0:
                os.setns(self._own_namespace, os.CLONE_NEWPID)
        return pid


def describe_fork_error(error: OSError) -> str:
    """What the supervisor is told of a fork that failed."""
    return (
        f"no process could be forked for it ({os.strerror(error.errno or 0)}): this host has too few processes or too "
        "little memory left; end sandboxes, or raise the limits of the server's cgroup and user"
    )


def close_other_fds(fds: list[int]) -> None:
    """In a fresh fork: close everything else."""
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 1 << 20)
