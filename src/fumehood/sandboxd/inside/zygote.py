"""Forks sandboxes out of a warm interpreter on the supervisor's request; imports only the standard library.

It holds no secret, no path of the host, no channel to any sandbox and nothing about one but its number: what
it knows, every later fork could read. Requests come from the supervisor alone, and what it reports (started,
ended and how) it has seen itself through the kernel.
"""

import base64
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandboxd.inside import attach, helper, init, layout, preload, syscalls

_MAX_REQUEST = 256 * 1024
_MAX_FDS = 16


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        # By the supervisor's number, never by a name: what this process knows, every later fork can read.
        self._children: dict[int, tuple[int, int]] = {}  # number -> pid, pidfd
        self._helpers: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._program = b""
        self._own_pids = -1
        self._layers = -1  # a mount namespace that has the store of packages; no sandbox has
        self._nested = True
        self._single = False

    def configure(self) -> None:
        request, _ = self._receive()
        self._program = base64.b64decode(request["program"])
        self._nested = request["nested"]
        self._single = request["single"]
        if not self._nested:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # code of the same user may see this process
        else:
            self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        problems = preload.preload(request["preload"])
        if self._nested:
            _make_root_read_only()
            self._layers = _withdraw_layers()
        self._send(
            {
                "event": "started",
                "python": sys.version.split()[0],
                "problems": problems,
                "threads": preload.threads(),
                "landlock": syscalls.landlock_abi(),
                "neutral": os.environ.pop("FUMEHOOD_NEUTRAL_PATHS", "1") == "1",
            }
        )

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._handle(*self._receive())
                else:
                    self._bury(key.data)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        body, fds, _, _ = socket.recv_fds(self._control, _MAX_REQUEST, _MAX_FDS)
        if not body:
            os._exit(0)  # the supervisor is gone, and with this process every sandbox
        return json.loads(body), fds

    def _send(self, event: dict[str, Any], fds: list[int] | None = None) -> None:
        body = json.dumps(event).encode()
        if fds:
            socket.send_fds(self._control, [body], fds)
        else:
            self._control.send(body)

    def _handle(self, request: dict[str, Any], fds: list[int]) -> None:
        try:
            match request["op"]:
                case "spawn":
                    self._spawn(request["number"], fds)
                case "signal":
                    self._signal(request["number"], request["signal"])
                case "resize":
                    self._resize(request, fds)
                case "files":
                    self._help(request, fds)
                case "attach":
                    self._attach(request["number"], fds)
                case unknown:
                    raise ValueError(f"unknown request {unknown!r}")
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, number: int, fds: list[int]) -> None:
        try:
            pid = self._fork_into_new_pids() if self._nested else os.fork()
        except OSError as error:
            self._send({"event": "refused", "number": number, "error": f"fork: {error}"})
            return
        if pid == 0:
            channel, cgroups = _only_these_fds(fds)
            init.run(self._program, channel, cgroups)
        self._send({"event": "spawned", "number": number}, [self._watch(number, pid)])

    def _watch(self, number: int, pid: int) -> int:
        pidfd = os.pidfd_open(pid)
        self._children[number] = (pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, number)
        return pidfd

    def _fork_into_new_pids(self) -> int:
        os.unshare(os.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                os.setns(self._own_pids, os.CLONE_NEWPID)
        return pid

    def _signal(self, number: int, which: int) -> None:
        if number in self._children:
            signal.pidfd_send_signal(self._children[number][1], which)

    def _bury(self, number: int) -> None:
        pid, pidfd = self._children.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if number in self._helpers:
            self._helpers.discard(number)
            return
        self._send({"event": "exited", "number": number, "code": os.waitstatus_to_exitcode(status)})
        if self._single:
            os._exit(0)  # a pod is never used twice: its container ends with its one sandbox

    def _resize(self, request: dict[str, Any], fds: list[int]) -> None:
        error = None
        try:
            syscalls.resize_tmpfs(fds[0], size=request["size"], inodes=request["inodes"])
        except OSError as problem:
            error = str(problem)
        self._send({"event": "resized", "number": request["number"], "error": error})

    def _help(self, request: dict[str, Any], fds: list[int]) -> None:
        """Work on a sandbox's files as its user and in its cgroup: what is written counts there.

        What is to be done, names above all, the helper hears over its own socket after the fork.
        """
        try:
            pid = os.fork()
        except OSError:
            return  # the closed reply socket tells
        if pid == 0:
            reply, rest = _only_these_fds(fds)
            helper.run(request["uid"], self._program, reply, rest[0], rest[1:])
        self._helpers.add(request["number"])
        self._watch(request["number"], pid)

    def _attach(self, number: int, fds: list[int]) -> None:
        """Put layers of packages into a sandbox; which ones, the helper hears after the fork."""
        try:
            pid = os.fork()
        except OSError:
            return  # the closed reply socket tells
        if pid == 0:
            reply, rest = _only_these_fds([*fds, *([self._layers] if self._layers >= 0 else [])])
            attach.help_with(reply, rest)
        self._helpers.add(number)
        self._watch(number, pid)


def _only_these_fds(fds: list[int]) -> tuple[socket.socket, list[int]]:
    """In a fresh fork: close everything else; the first is a socket to the supervisor."""
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 1 << 20)
    return socket.socket(fileno=fds[0]), fds[1:]


def _make_root_read_only() -> None:
    """From here on nothing outside a sandbox's own tmpfs can be written, by anybody."""
    flags = (
        syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    )
    syscalls.mount("sandbox", "/", None, flags)


def _withdraw_layers() -> int:
    """Keep the store of packages in a mount namespace of its own: those forked from here on never had it."""
    if not os.path.ismount(layout.LAYERS):
        return -1
    with_layers = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWNS)
    syscalls.unmount(layout.LAYERS, syscalls.MNT_DETACH)
    return with_layers


def main(control_fd: int) -> NoReturn:
    zygote = Zygote(socket.socket(fileno=control_fd))
    zygote.configure()
    zygote.serve()
