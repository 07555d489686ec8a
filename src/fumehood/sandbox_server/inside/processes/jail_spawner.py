"""The spawner: a small process that forks the zygote, the inits of sandboxes and the helpers.

Forking the zygote is expensive because it is large, so everything that needs no warm interpreter is forked here. The
spawner is PID 1 of the outer jail: when it or the zygote ends, everything in the jail ends. It holds no secret, no path
of the host, and nothing about a sandbox but its number.
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
from fumehood.sandbox_server.inside.jail import jail_builder, seccomp_installer
from fumehood.sandbox_server.inside.processes import fork_server, helper_entrypoints
from fumehood.sandbox_server.inside.warm_start import immortal_objects

_ZYGOTE_NUMBER = 0  # the zygote's number among the children; sandboxes count from 1


class JailSpawner(fork_server.ForkServer):
    """Serves the supervisor's requests.

    `spawn` is answered with the pidfd of the sandbox's first process; the event `exited` follows when it has ended.

    seccomp_programs: for code and for helpers.
    layers_namespace: a mount namespace with the package layers, which sandboxes do not have; -1 for none.
    """

    def __init__(
        self, control: socket.socket, seccomp_programs: tuple[bytes, bytes], layers_namespace: int = -1
    ) -> None:
        super().__init__(control)
        self.seccomp_program, self._helper_program = seccomp_programs
        self._layers_namespace = layers_namespace
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
        """Start a sandbox; `fds` are its channel and its cgroups."""

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
        """Fork a helper that works on a sandbox's files as its user and in its cgroup, which pays for what it writes.

        The helper receives its task, and file names with it, over its own socket after the fork.
        """
        if self._fork_helper(number, fds):
            helper_entrypoints.run_file_helper(
                uid, self._helper_program, socket.socket(fileno=fds[0]), fds[1], fds[2:]
            )

    def _start_package_helper(self, number: int, fds: list[int]) -> None:
        """Fork a helper that attaches package layers to a sandbox; it receives their names after the fork."""
        fds = [*fds, *([self._layers_namespace] if self._layers_namespace >= 0 else [])]
        if self._fork_helper(number, fds):
            helper_entrypoints.run_package_helper(socket.socket(fileno=fds[0]), fds[1:])

    def _fork_helper(self, number: int, fds: list[int]) -> bool:
        """Return True in the child, which holds only these descriptors.

        If the fork fails, the supervisor sees its reply socket closed.
        """
        try:
            if self.fork_child(number, fds).is_child:
                return True
            self._helpers.add(number)
        except OSError:  # the fork failed, or the child has ended already
            pass
        return False


class NamespaceSpawner(JailSpawner):
    """Mode `namespaces`: starts an init in new namespaces for each sandbox; the zygote forks the interpreter into them.

    Init only sleeps. It is a program of some hundred bytes (tools/init.x86_64.s, decision 0014). A fork of this process
    in its place takes 1.09 to 1.21 times the CPU time per sandbox and 1.3 to 1.4 times the memory; it is the fallback,
    `_run_sleeping_init`, where there is no program for the architecture.

    Init and this process ignore SIGCHLD, so the kernel reaps their children. The exit status of an init carries no
    information: it can only have been killed.
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
            os._exit(1)  # the zygote has ended; this process ends with it
        except ProcessLookupError:
            self.send_event({"event": "refused", "number": number, "error": "its init process was killed"})
        except OSError as error:
            self.send_event(
                {"event": "refused", "number": number, "error": fork_server.describe_fork_error(error)}
            )

    def _spawn(self, number: int, fds: list[int]) -> None:
        ready_reader, ready_writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid, pidfd = self._start_init(ready_writer)
            self.watch_pidfd(number, pid, pidfd)
            fork_server.send_message(
                self._zygote_socket, {"number": number}, [fds[0], pidfd, ready_reader, *fds[1:]]
            )
            self.send_event({"event": "spawned", "number": number}, [pidfd])
        except OSError:
            self.send_signal(number, signal.SIGKILL)  # if it was started, nobody else knows of it
            raise
        finally:
            os.close(ready_reader)
            os.close(ready_writer)

    def _start_init(self, ready_pipe: int) -> tuple[int, int]:
        """Start an init in new namespaces, then return to this process's own; returns pid and pidfd.

        Init closes `ready_pipe` once it has dropped its privileges.
        """
        namespaces = jail_builder.NAMESPACE_FLAGS | os.CLONE_NEWPID
        os.unshare(namespaces)
        pid = -1
        try:
            if self._has_init_program:
                # The program expects the pipe as descriptor 3.
                actions = [(os.POSIX_SPAWN_DUP2, ready_pipe, 3)]
                pid = os.posix_spawn(layout.INIT_PROGRAM, ["init"], {}, file_actions=actions)
            else:
                pid = os.fork()
        finally:
            if pid != 0:
                self._return_to_own_namespaces(namespaces)
        if pid == 0:
            _run_sleeping_init(self.seccomp_program, ready_pipe)
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
            os._exit(1)  # the zygote has ended; this process ends with it

    def collect_exit_code(self, pid: int) -> int:
        del pid
        return -signal.SIGKILL

    def on_child_exit(self, number: int, code: int) -> None:
        if number == _ZYGOTE_NUMBER:
            os._exit(1)
        super().on_child_exit(number, code)


def _run_sleeping_init(seccomp_program: bytes, ready_pipe: int) -> NoReturn:
    """Run PID 1 of a sandbox where there is no init program for this architecture: drop all privileges, sleep.

    ready_pipe: closed once the privileges are dropped.
    """
    try:
        fork_server.close_other_fds([ready_pipe])
        os.closerange(0, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from inside, PID 1 gets no signal without a handler
        syscalls.drop_all_privileges()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        seccomp_installer.install(seccomp_program)
        os.close(ready_pipe)
        while True:
            signal.pause()
    finally:
        os._exit(125)


def _detach_layers() -> int:
    """Unmount the package layers, so that later forks never have them.

    Returns a descriptor of the mount namespace that still has them, or -1.
    """
    if not os.path.ismount(layout.PACKAGE_LAYERS):
        return -1
    with_layers = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWNS)
    syscalls.unmount(layout.PACKAGE_LAYERS, syscalls.MNT_DETACH)
    return with_layers


def _drop_groups() -> None:
    """Drop supplementary groups; an unprivileged user without a uid range may not, and nothing here belongs to them."""
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "deny":
            return
    os.setgroups([])


def _skip_pid() -> None:
    """Use up PID 2: every interpreter is PID 2 of its jail, so the zygote must have another one.

    OpenSSL, `tempfile` and others reseed when they find a new PID. With the same one, all sandboxes would share the
    zygote's random state.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def decode_seccomp_programs(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the seccomp programs for code and for helpers."""
    return base64.b64decode(request["program"]), base64.b64decode(request["helper_program"])


def main(control_fd: int) -> NoReturn:
    """Fork the zygote, send the supervisor a socket to it, and serve."""
    fork_server.replace_stdin()
    _drop_groups()
    control = socket.socket(fileno=control_fd)
    request, _ = fork_server.receive_request(control)
    programs = decode_seccomp_programs(request)
    layers_namespace = _detach_layers()
    zygote_socket, spawner_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _skip_pid()
    pid = os.fork()
    if pid == 0:
        fork_server.close_other_fds([zygote_end.fileno(), spawner_socket.fileno()])
        # Imported here only: this process must stay small.
        from fumehood.sandbox_server.inside.processes import zygote

        zygote.run_zygote(zygote_end, spawner_socket, programs[0], request)
    with supervisor_end:
        fork_server.send_message(control, {"event": "zygote"}, [supervisor_end.fileno()])
    zygote_end.close()
    spawner_socket.close()
    gc.disable()  # a collection in a fork would copy the pages of every object
    immortal_objects.make_objects_immortal()
    gc.freeze()
    NamespaceSpawner(control, programs, layers_namespace, zygote_socket, (pid, os.pidfd_open(pid))).serve()
