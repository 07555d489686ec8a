"""Base of the processes that fork on request: receives requests with descriptors, watches the children.

Children are known by the supervisor's numbers only: whatever is in this process, every later fork can read.
"""

import abc
import contextlib
import errno
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

_MAX_REQUEST = 256 * 1024
_MAX_FDS = 16

type RequestHandler = Callable[[dict[str, Any], list[int]], None]


class ForkedChild(NamedTuple):
    """is_child: this process is the child. pidfd: of the child, or -1. alive_fd: in the child, see `fork_child`."""

    is_child: bool
    pidfd: int
    alive_fd: int


class ForkServer(abc.ABC):
    """A process that forks on request; it exits when the supervisor closes `control`."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._children: dict[
            int, tuple[int, int]
        ] = {}  # number -> pid, descriptor that is readable at its end
        self._selector = selectors.DefaultSelector()
        self.has_pidfds = _has_pidfds()

    def add_source(self, source: socket.socket, handler: RequestHandler) -> None:
        """Call `handler` for each request that arrives on `source`."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def serve(self) -> NoReturn:
        """Handle requests and ended children for ever."""
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

    def fork_child(self, number: int, fds: list[int]) -> ForkedChild:
        """Fork, and watch the child, which holds only these descriptors. Raises OSError.

        Without pidfds, which gVisor does not have, the child also holds the end of a pipe that nobody else has.
        """
        ended, alive = (-1, -1) if self.has_pidfds else os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            for fd in {ended, alive} - {-1}:
                os.close(fd)
            raise
        if pid == 0:
            close_other_fds(fds if alive < 0 else [*fds, alive])
            return ForkedChild(True, -1, alive)
        if alive >= 0:
            os.close(alive)
            self.watch_pidfd(number, pid, ended)
            return ForkedChild(False, -1, -1)
        return ForkedChild(False, self.watch_child(number, pid), -1)

    def watch_child(self, number: int, pid: int) -> int:
        """Watch a child; returns its pidfd, which this object owns."""
        pidfd = os.pidfd_open(pid)
        self.watch_pidfd(number, pid, pidfd)
        return pidfd

    def watch_pidfd(self, number: int, pid: int, pidfd: int) -> None:
        self._children[number] = (pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, number)

    def send_signal(self, number: int, which: int) -> None:
        if number in self._children:
            pid, pidfd = self._children[number]
            with contextlib.suppress(ProcessLookupError):  # it has ended; its exit is handled next
                if self.has_pidfds:
                    signal.pidfd_send_signal(pidfd, which)
                else:
                    os.kill(pid, which)  # not reaped yet, so the pid is still its own

    def signal_group(self, number: int, which: int) -> None:
        """Signal the process group of a child; the child is not reaped yet, so its pid is still its own."""
        if number in self._children:
            signal_process_group(self._children[number][0], which)

    def _reap_child(self, number: int) -> None:
        pid, pidfd = self._children.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self.on_child_exit(number, self.collect_exit_code(pid))

    def collect_exit_code(self, pid: int) -> int:
        """Reap a child and return its exit code; negative codes are signals."""
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    @abc.abstractmethod
    def on_child_exit(self, number: int, code: int) -> None:
        """Handle the exit of a child, which is reaped."""


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
    return True


def receive_request(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read one request and its descriptors; exits when the other end is closed."""
    body, fds, _, _ = socket.recv_fds(source, _MAX_REQUEST, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not body:
        os._exit(0)  # the supervisor is gone: all sandboxes end with this process
    return json.loads(body), fds


def send_message(target: socket.socket, event: dict[str, Any], fds: list[int] | None = None) -> None:
    body = json.dumps(event).encode()
    if fds:
        socket.send_fds(target, [body], fds)
    else:
        target.send(body)


def signal_process_group(leader: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # not a leader yet, or just ended
        os.killpg(leader, which)


def replace_stdin() -> None:
    """Open the jail's /dev/null as descriptor 0: code could change the times of an inherited one."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


class PidNamespaceForker:
    """Forks children into other PID namespaces; this process stays in its own."""

    def __init__(self) -> None:
        self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self, init_pidfd: int) -> int:
        """Fork into the PID namespace of this process; returns as os.fork does."""
        os.setns(init_pidfd, os.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                os.setns(self._own_namespace, os.CLONE_NEWPID)
        return pid


def describe_fork_error(error: OSError) -> str:
    """Return the message to the supervisor about a failed fork."""
    return (
        f"no process could be forked for it ({os.strerror(error.errno or 0)}): this host has too few processes or too "
        "little memory left; end sandboxes, or raise the limits of the server's cgroup and user"
    )


def close_other_fds(fds: list[int]) -> None:
    """Close all descriptors except 0 to 2 and these, in a fresh fork."""
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 1 << 20)
