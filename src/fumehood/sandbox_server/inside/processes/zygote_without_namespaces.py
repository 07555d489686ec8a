"""The zygote of the modes without mount and PID namespaces (`pod`, `degraded`): warm interpreter and spawner in one."""

import base64
import errno
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import jail_builder, own_network, seccomp_installer
from fumehood.sandbox_server.inside.processes import (
    fork_server,
    interpreter_entrypoint,
    pod_container,
    startup_messages,
    zygote,
)
from fumehood.sandbox_server.inside.processes.jail_spawner import JailSpawner, decode_seccomp_programs
from fumehood.sandbox_server.inside.runner import code_runner, shell_commands
from fumehood.sandbox_server.inside.warm_start import preload


class NamespacelessZygote(JailSpawner):
    """Forks a subreaper for each sandbox, which starts the interpreter, adopts orphans and forwards signals.

    network_program: the seccomp program of code that has a network namespace of its own; None if it cannot have one.
    single_use: exit after the first sandbox.
    """

    def __init__(
        self,
        control: socket.socket,
        seccomp_programs: tuple[bytes, bytes],
        *,
        network_program: bytes | None,
        single_use: bool,
    ) -> None:
        super().__init__(control, seccomp_programs)
        self._network_program = network_program
        self._single_use = single_use
        self._runner = code_runner.CodeRunner()

    def spawn(self, number: int, fds: list[int]) -> None:
        try:
            child = self.fork_child(number, fds)
        except OSError as error:
            self.send_event({"event": "refused", "number": number, "error": f"fork: {error}"})
            return
        if child.is_child:
            _reset_signals()
            Subreaper(
                self.seccomp_program,
                self._network_program,
                socket.socket(fileno=fds[0]),
                child.alive_fd,
                self._runner,
                is_pod=self._single_use,
            ).run(fds[1:])
        self.send_event(
            {"event": "spawned", "number": number, "has_pidfd": child.pidfd >= 0},
            [child.pidfd] if child.pidfd >= 0 else None,
        )
        zygote.reseed_generators()

    def on_child_exit(self, number: int, code: int) -> None:
        if number in self._helpers:
            self._helpers.discard(number)
            return
        ooms = pod_container.count_oom_kills() if self._single_use else 0
        self.send_event({"event": "exited", "number": number, "code": code, "oom_kills": ooms})
        if self._single_use:
            os._exit(0)  # a pod runs one sandbox: its container ends with it


def main(control_fd: int) -> NoReturn:
    """Preload and serve the supervisor on this socket."""
    fork_server.replace_stdin()
    control = socket.socket(fileno=control_fd)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # code of the same user can see this process
    request: dict[str, Any]
    request, _ = fork_server.receive_request(control)
    problems = preload.preload(request["preload"])
    zygote.remove_guest_from_path()
    single_use: bool = request.get("single_use", False)
    has_network = single_use and own_network.is_possible()
    server = NamespacelessZygote(
        control,
        decode_seccomp_programs(request),
        network_program=base64.b64decode(request["network_program"]) if has_network else None,
        single_use=single_use,
    )
    preload.freeze_objects(many_forks=not single_use)
    memory = pod_container.read_memory_limit() if single_use else None
    server.send_event(
        {**zygote.describe_zygote(problems), "has_network": has_network, "memory_limit": memory}
    )
    server.serve()


class Subreaper:
    """The first process of a sandbox: sets limits, starts the interpreter, then reaps until it ends.

    network_program: the seccomp program for code in a network namespace of its own, or None.
    alive_fd: kept open until this process ends, see `ForkServer.fork_child`; or -1.
    """

    def __init__(
        self,
        seccomp_program: bytes,
        network_program: bytes | None,
        channel: socket.socket,
        alive_fd: int,
        warm_runner: code_runner.CodeRunner,
        *,
        is_pod: bool,
    ) -> None:
        self._seccomp_program = seccomp_program
        self._network_program = network_program
        self._channel = channel
        self._alive_fd = alive_fd
        self._runner = warm_runner
        self._is_pod = is_pod

    def run(self, cgroups: list[int]) -> NoReturn:
        """Run in a fresh fork of the zygote."""
        try:
            os.dup2(0, 1)  # /dev/null: the zygote's stderr is the operator's
            os.dup2(0, 2)
            jail_builder.join_cgroups(cgroups)
            jail_builder.raise_oom_score(startup_messages.OOM_SCORE)
            plan = jail_builder.JailPlan.decode(self._channel.recv(startup_messages.MAX_PLAN_BYTES))
            if self._network_program is not None:
                own_network.enter()
                self._seccomp_program = self._network_program
            _become_subreaper(is_pod=self._is_pod)
            # Without a PID namespace nothing else ends it with the zygote.
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
            startup_messages.send_handles(self._channel, plan, self._listeners())
            jail_builder.set_resource_limits(plan)
            syscalls.drop_all_privileges()
            self._start_interpreter(plan)
        except BaseException as error:
            startup_messages.fail(self._channel, error)

    def _listeners(self) -> list[int]:
        """Return listening sockets: for the egress proxy if the network is the sandbox's own, and for pip in a pod."""
        found: list[int] = []
        if self._network_program is not None:
            found.append(jail_builder.listen_on_loopback(layout.EGRESS_PORT))
        if self._is_pod:
            found.append(jail_builder.listen_on_path(layout.PIP_SOCKET))
        return found

    def _start_interpreter(self, plan: jail_builder.JailPlan) -> NoReturn:
        watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        # The code has the same user and must not open this memory.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            if self._alive_fd >= 0:
                os.close(self._alive_fd)
            runner = [layout.IMPORT_ROOT] if plan.fresh_interpreter else []
            plan = plan._replace(read_only=[*plan.read_only, *_python_paths(), *runner])
            interpreter_entrypoint.run_interpreter(
                plan,
                self._seccomp_program,
                self._channel,
                self._runner,
                fresh_process=plan.fresh_interpreter,
            )
        self._channel.close()
        seccomp_installer.install(self._seccomp_program)
        _reap_until_exit(pid, watched)


def _become_subreaper(*, is_pod: bool) -> None:
    try:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        # gVisor before 2023 has no subreapers: orphans go to PID 1 and end with the container.
        if not (is_pod and error.errno == errno.EINVAL):
            raise


def _reset_signals() -> None:
    """Undo what the entry point of a container set, for PID 1 only."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _reap_until_exit(interpreter_pid: int, watched: set[signal.Signals]) -> NoReturn:
    """Reap children until the interpreter has ended, then exit like it."""
    while True:
        received = signal.sigwait(watched)
        if received == signal.SIGINT:
            fork_server.signal_process_group(interpreter_pid, signal.SIGINT)
            continue
        if received == signal.SIGTERM:
            _kill_orphans()  # SIGKILL would end this process only
            os._exit(128 + signal.SIGKILL)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(125)
            if pid == 0:
                break
            if pid == interpreter_pid:
                _exit_with(status)


def _exit_with(status: int) -> NoReturn:
    """Kill what the interpreter left, then exit with its status."""
    _kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _kill_orphans() -> None:
    """Kill the remaining children until there are none; grandchildren become children of this process."""
    while True:
        children = shell_commands.child_pids(os.getpid())
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _python_paths() -> list[str]:
    """Return where the interpreter and the packages are: without mounts they are at the host's paths."""
    environment = [f"{sys.prefix}/{name}" for name in ("pyvenv.cfg", "bin")]
    return [sys.base_prefix, *environment, *(entry for entry in sys.path if os.path.isdir(entry))]
