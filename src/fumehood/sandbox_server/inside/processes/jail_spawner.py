"""Makes the jails of sandboxes and works on their files, in a process that stays small.

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

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import jail_builder
from fumehood.sandbox_server.inside.processes import fork_server, init_process
from fumehood.sandbox_server.inside.processes import helpers as attach
from fumehood.sandbox_server.inside.processes import helpers as helper
from fumehood.sandbox_server.inside.warm_start import fork_hooks, immortal_objects

_ZYGOTE_NUMBER = 0  # the number of the zygote among the children; sandboxes count from 1


class JailSpawner(fork_server.ForkServer):
    """`spawn` answers with the pidfd of the sandbox's first process; `exited` follows when all of it has ended."""

    def __init__(
        self, control: socket.socket, seccomp_programs: tuple[bytes, bytes], layers_namespace: int = -1
    ) -> None:
        super().__init__(control)
        self.seccomp_program, self._helper_program = seccomp_programs
        self._layers_namespace = (
            layers_namespace  # a mount namespace that has the store of packages; no sandbox has
        )
        self._helpers: set[int] = set()
        self.add_source(control, self._handle_request)

    def _handle_request(self, request: dict[str, Any], fds: list[int]) -> None:
        number: int = request["number"]
        match request["op"]:
            case "spawn":
                self.spawn(number, fds)
            case "signal":
                self.send_signal(number, request["signal"])
            case "resize":
                self._resize(request, fds)
            case "files":
                self._start_file_helper(number, request["uid"], fds)
            case "attach":
                self._start_package_helper(number, fds)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    @abc.abstractmethod
    def spawn(self, number: int, fds: list[int]) -> None:
        """Start a sandbox; the first descriptor is its channel, the others are its cgroups."""

    def on_child_exit(self, number: int, code: int) -> None:
        if number in self._helpers:
            self._helpers.discard(number)
        else:
            self.send_event({"event": "exited", "number": number, "code": code})

    def _resize(self, request: dict[str, Any], fds: list[int]) -> None:
        error = None
        try:
            syscalls.resize_tmpfs(fds[0], size=request["size"], inodes=request["inodes"])
        except OSError as problem:
            error = str(problem)
        self.send_event({"event": "resized", "number": request["number"], "error": error})

    def _start_file_helper(self, number: int, uid: int, fds: list[int]) -> None:
        """Work on a sandbox's files as its user and in its cgroup: what is written counts there.

        What is to be done, names above all, the helper hears over its own socket after the fork.
        """
        if self._fork_helper(number, fds):
            helper.run_file_helper(uid, self._helper_program, socket.socket(fileno=fds[0]), fds[1], fds[2:])

    def _start_package_helper(self, number: int, fds: list[int]) -> None:
        """Put layers of packages into a sandbox; which ones, the helper hears after the fork."""
        held = [*fds, *([self._layers_namespace] if self._layers_namespace >= 0 else [])]
        if self._fork_helper(number, held):
            attach.run_package_helper(socket.socket(fileno=held[0]), held[1:])

    def _fork_helper(self, number: int, fds: list[int]) -> bool:
        """True in a child that holds these descriptors alone; if there is none, the closed reply socket tells."""
        try:
            pid = os.fork()
        except OSError:
            return False
        if pid == 0:
            fork_server.close_other_fds(fds)
            return True
        with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody waits for it
            self.watch_child(number, pid)
            self._helpers.add(number)
        return False


class NamespaceSpawner(JailSpawner):
    """Mode `namespaces`: a jail of nested namespaces for each sandbox, into which the zygote forks its interpreter.

    Its first process only sleeps. The kernel reaps for it and for this process, as both ignore SIGCHLD: how a first
    process ended says nothing anyway, for it can only have been killed.
    """

    def __init__(
        self,
        control: socket.socket,
        seccomp_programs: tuple[bytes, bytes],
        layers_namespace: int,
        zygote_socket: socket.socket,
        zygote: tuple[int, int],
    ) -> None:
        super().__init__(control, seccomp_programs, layers_namespace)
        self._zygote_socket = zygote_socket
        self._has_init_program = os.path.exists(layout.INIT_PROGRAM)
        self._zygote_pidfd = zygote[1]
        self.watch_pidfd(_ZYGOTE_NUMBER, *zygote)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def spawn(self, number: int, fds: list[int]) -> None:
        try:
            self._spawn(number, fds)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the zygote has ended, and this process ends with it
        except ProcessLookupError:
            self.send_event({"event": "refused", "number": number, "error": "its first process was killed"})
        except OSError as error:
            self.send_event(
                {"event": "refused", "number": number, "error": fork_server.describe_fork_error(error)}
            )

    def _spawn(self, number: int, fds: list[int]) -> None:
        done, undone = os.pipe2(os.O_CLOEXEC)
        try:
            pid, pidfd = self._start_init(undone)
            self.watch_pidfd(number, pid, pidfd)
            fork_server.send_message(self._zygote_socket, {"number": number}, [fds[0], pidfd, done, *fds[1:]])
            self.send_event({"event": "spawned", "number": number}, [pidfd])
        except OSError:
            self.send_signal(number, signal.SIGKILL)  # if there is one, nobody else knows of it
            raise
        finally:
            os.close(done)
            os.close(undone)

    def _start_init(self, ready_pipe: int) -> tuple[int, int]:
        """In new namespaces, from which this process returns to those of the zygote, its own.

        The first process closes `undone` when it has given up its rights.
        """
        namespaces = jail_builder.NAMESPACE_FLAGS | os.CLONE_NEWPID
        os.unshare(namespaces)
        pid = -1
        try:
            if self._has_init_program:
                pid = os.posix_spawn(
                    layout.INIT_PROGRAM, ["init"], {}, file_actions=[_dup_to_fd_3(ready_pipe)]
                )
            else:
                pid = fork_hooks.plain_fork()
        finally:
            if pid != 0:
                self._return_to_own_namespaces(namespaces)
        if pid == 0:
            init_process.run_sleeping_init(self.seccomp_program, ready_pipe)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise

    def _return_to_own_namespaces(self, namespaces: int) -> None:
        try:
            os.setns(self._zygote_pidfd, namespaces)
        except OSError:
            os._exit(1)  # the zygote has ended, and this process ends with it

    def collect_exit_code(self, pid: int) -> int:
        del pid
        return -signal.SIGKILL

    def on_child_exit(self, number: int, code: int) -> None:
        if number == _ZYGOTE_NUMBER:
            os._exit(1)
        super().on_child_exit(number, code)


def _dup_to_fd_3(fd: int) -> tuple[int, int, int]:
    """Where the first process expects it."""
    return os.POSIX_SPAWN_DUP2, fd, 3


def _detach_layers() -> int:
    """Keep the store of packages in a mount namespace of its own: those forked from here on never had it."""
    if not os.path.ismount(layout.PACKAGE_LAYERS):
        return -1
    with_layers = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWNS)
    syscalls.unmount(layout.PACKAGE_LAYERS, syscalls.MNT_DETACH)
    return with_layers


def _drop_groups() -> None:
    """An ordinary user without a range may not, and keeps its groups; nothing in the jail belongs to them."""
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "deny":
            return
    os.setgroups([])


def _skip_pid() -> None:
    """Every interpreter is process 2 of its jail, so the zygote must not be process 2 here.

    OpenSSL, `tempfile` and others notice by another number that they were forked and have to seed themselves anew:
    with the same one, what the zygote's generators held would be every sandbox's.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def decode_seccomp_programs(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """The filters of the code and of helpers."""
    return base64.b64decode(request["program"]), base64.b64decode(request["helper_program"])


def main(control_fd: int) -> NoReturn:
    """Start the zygote beside, hand its own socket to the supervisor, serve."""
    fork_server.replace_stdin()
    _drop_groups()
    control = socket.socket(fileno=control_fd)
    request, _ = fork_server.receive_request(control)
    programs = decode_seccomp_programs(request)
    layers = _detach_layers()
    link, zygote_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisors, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _skip_pid()
    pid = os.fork()
    if pid == 0:
        fork_server.close_other_fds([zygotes.fileno(), zygote_link.fileno()])
        fork_hooks.defer_hooks()
        # Not sooner: what the zygote needs makes its forks expensive, and this process is to stay small.
        from fumehood.sandbox_server.inside.processes import zygote

        zygote.run_zygote(zygotes, zygote_link, programs[0], request)
    with supervisors:
        fork_server.send_message(control, {"event": "zygote"}, [supervisors.fileno()])
    zygotes.close()
    zygote_link.close()
    gc.disable()  # a collection in a fork would touch, and so copy, every object there is
    immortal_objects.make_objects_immortal()
    gc.freeze()
    NamespaceSpawner(control, programs, layers, link, (pid, os.pidfd_open(pid))).serve()
