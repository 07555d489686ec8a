"""Makes the jails of sandboxes and works on their files, in a process that stays small; imports only siblings.

The zygote is large, and every fork of it pays for that: so all that does not need a warm interpreter is forked
from here. Started first, this process is PID 1 of the outer jail: when it ends, or the zygote does, everything in
there ends. It holds no secret, no path of the host and nothing about a sandbox but its number.
"""

import abc
import base64
import contextlib
import gc
import os
import signal
import socket
from typing import Any, NoReturn

from fumehood.sandboxd.inside import attach, children, forks, helper, immortal, init, jail, layout, syscalls

_ZYGOTE = 0  # the number of the zygote among the children; sandboxes count from 1


class Warden(children.Parent):
    """`spawn` answers with the pidfd of the sandbox's first process; `exited` follows when all of it has ended."""

    def __init__(self, control: socket.socket, programs: tuple[bytes, bytes], layers: int = -1) -> None:
        super().__init__(control)
        self.program, self._helper_program = programs
        self._layers = layers  # a mount namespace that has the store of packages; no sandbox has
        self._helpers: set[int] = set()
        self.listen(control, self._request)

    def _request(self, request: dict[str, Any], fds: list[int]) -> None:
        number: int = request["number"]
        match request["op"]:
            case "spawn":
                self.spawn(number, fds)
            case "signal":
                self.signal(number, request["signal"])
            case "resize":
                self._resize(request, fds)
            case "files":
                self._help(number, request["uid"], fds)
            case "attach":
                self._attach(number, fds)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    @abc.abstractmethod
    def spawn(self, number: int, fds: list[int]) -> None:
        """Start a sandbox; the first descriptor is its channel, the others are its cgroups."""

    def ended(self, number: int, code: int) -> None:
        if number in self._helpers:
            self._helpers.discard(number)
        else:
            self.report({"event": "exited", "number": number, "code": code})

    def _resize(self, request: dict[str, Any], fds: list[int]) -> None:
        error = None
        try:
            syscalls.resize_tmpfs(fds[0], size=request["size"], inodes=request["inodes"])
        except OSError as problem:
            error = str(problem)
        self.report({"event": "resized", "number": request["number"], "error": error})

    def _help(self, number: int, uid: int, fds: list[int]) -> None:
        """Work on a sandbox's files as its user and in its cgroup: what is written counts there.

        What is to be done, names above all, the helper hears over its own socket after the fork.
        """
        if self._fork_helper(number, fds):
            helper.run(uid, self._helper_program, socket.socket(fileno=fds[0]), fds[1], fds[2:])

    def _attach(self, number: int, fds: list[int]) -> None:
        """Put layers of packages into a sandbox; which ones, the helper hears after the fork."""
        held = [*fds, *([self._layers] if self._layers >= 0 else [])]
        if self._fork_helper(number, held):
            attach.help_with(socket.socket(fileno=held[0]), held[1:])

    def _fork_helper(self, number: int, held: list[int]) -> bool:
        """True in a child that holds these descriptors alone; if there is none, the closed reply socket tells."""
        try:
            pid = os.fork()
        except OSError:
            return False
        if pid == 0:
            children.only_these_fds(held)
            return True
        with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody waits for it
            self.watch(number, pid)
            self._helpers.add(number)
        return False


class NamespaceWarden(Warden):
    """Mode `namespaces`: a jail of nested namespaces for each sandbox, into which the zygote forks its interpreter.

    Its first process only sleeps. The kernel reaps for it and for this process, as both ignore SIGCHLD: how a first
    process ended says nothing anyway, for it can only have been killed.
    """

    def __init__(
        self,
        control: socket.socket,
        programs: tuple[bytes, bytes],
        layers: int,
        link: socket.socket,
        zygote: tuple[int, int],
    ) -> None:
        super().__init__(control, programs, layers)
        self._link = link
        self._has_program = os.path.exists(layout.FIRST)
        self._zygote = zygote[1]
        self.watch_pidfd(_ZYGOTE, *zygote)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def spawn(self, number: int, fds: list[int]) -> None:
        try:
            self._spawn(number, fds)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the zygote has ended, and this process ends with it
        except ProcessLookupError:
            self.report({"event": "refused", "number": number, "error": "its first process was killed"})
        except OSError as error:
            self.report({"event": "refused", "number": number, "error": children.no_room(error)})

    def _spawn(self, number: int, fds: list[int]) -> None:
        done, undone = os.pipe2(os.O_CLOEXEC)
        try:
            pid, pidfd = self._start_first(undone)
            self.watch_pidfd(number, pid, pidfd)
            children.send(self._link, {"number": number}, [fds[0], pidfd, done, *fds[1:]])
            self.report({"event": "spawned", "number": number}, [pidfd])
        except OSError:
            self.signal(number, signal.SIGKILL)  # if there is one, nobody else knows of it
            raise
        finally:
            os.close(done)
            os.close(undone)

    def _start_first(self, undone: int) -> tuple[int, int]:
        """In new namespaces, from which this process returns to those of the zygote, its own.

        The first process closes `undone` when it has given up its rights.
        """
        namespaces = jail.NAMESPACES | os.CLONE_NEWPID
        os.unshare(namespaces)
        pid = -1
        try:
            if self._has_program:
                pid = os.posix_spawn(layout.FIRST, ["init"], {}, file_actions=[_third(undone)])
            else:
                pid = forks.plain_fork()
        finally:
            if pid != 0:
                self._return(namespaces)
        if pid == 0:
            init.sleep(self.program, undone)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise

    def _return(self, namespaces: int) -> None:
        try:
            os.setns(self._zygote, namespaces)
        except OSError:
            os._exit(1)  # the zygote has ended, and this process ends with it

    def reap(self, pid: int) -> int:
        del pid
        return -signal.SIGKILL

    def ended(self, number: int, code: int) -> None:
        if number == _ZYGOTE:
            os._exit(1)
        super().ended(number, code)


def _third(fd: int) -> tuple[int, int, int]:
    """Where the first process expects it."""
    return os.POSIX_SPAWN_DUP2, fd, 3


def _withdraw_layers() -> int:
    """Keep the store of packages in a mount namespace of its own: those forked from here on never had it."""
    if not os.path.ismount(layout.LAYERS):
        return -1
    with_layers = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWNS)
    syscalls.unmount(layout.LAYERS, syscalls.MNT_DETACH)
    return with_layers


def _drop_groups() -> None:
    """An ordinary user without a range may not, and keeps its groups; nothing in the jail belongs to them."""
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "deny":
            return
    os.setgroups([])


def _skip_a_number() -> None:
    """Every interpreter is process 2 of its jail, so the zygote must not be process 2 here.

    OpenSSL, `tempfile` and others notice by another number that they were forked and have to seed themselves anew:
    with the same one, what the zygote's generators held would be every sandbox's.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def decoded_programs(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """The filters of the code and of helpers."""
    return base64.b64decode(request["program"]), base64.b64decode(request["helper_program"])


def main(control_fd: int) -> NoReturn:
    """Start the zygote beside, hand its own socket to the supervisor, serve."""
    children.no_stdin()
    _drop_groups()
    control = socket.socket(fileno=control_fd)
    request, _ = children.receive(control)
    programs = decoded_programs(request)
    layers = _withdraw_layers()
    link, zygote_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisors, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _skip_a_number()
    pid = os.fork()
    if pid == 0:
        children.only_these_fds([zygotes.fileno(), zygote_link.fileno()])
        forks.withhold_hooks()
        # Not sooner: what the zygote needs makes its forks expensive, and this process is to stay small.
        from fumehood.sandboxd.inside import zygote

        zygote.run(zygotes, zygote_link, programs[0], request)
    with supervisors:
        children.send(control, {"event": "zygote"}, [supervisors.fileno()])
    zygotes.close()
    zygote_link.close()
    gc.disable()  # a collection in a fork would touch, and so copy, every object there is
    immortal.make_immortal()
    gc.freeze()
    NamespaceWarden(control, programs, layers, link, (pid, os.pidfd_open(pid))).serve()
