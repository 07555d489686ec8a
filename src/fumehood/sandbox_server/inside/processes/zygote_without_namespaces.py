"""The zygote of the modes without namespaces (`pod`, `degraded`): warm interpreter and spawner in one."""

import os
import signal
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.jail import jail_builder, seccomp_installer
from fumehood.sandbox_server.inside.processes import (
    fork_server,
    interpreter_entrypoint,
    startup_messages,
    zygote,
)
from fumehood.sandbox_server.inside.processes.jail_spawner import JailSpawner, decode_seccomp_programs
from fumehood.sandbox_server.inside.runner import code_runner, shell_commands
from fumehood.sandbox_server.inside.warm_start import preload


class NamespacelessZygote(JailSpawner):
    """Forks a subreaper for each sandbox, which starts the interpreter, adopts orphans and forwards signals.

    single_use: exit after the first sandbox.
    """

    def __init__(
        self, control: socket.socket, seccomp_programs: tuple[bytes, bytes], *, single_use: bool
    ) -> None:
        super().__init__(control, seccomp_programs)
        self._single_use = single_use
        self._runner = code_runner.CodeRunner()

    def spawn(self, number: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self.send_event({"event": "refused", "number": number, "error": f"fork: {error}"})
            return
        if pid == 0:
            fork_server.close_other_fds(fds)
            run_subreaper(self.seccomp_program, socket.socket(fileno=fds[0]), fds[1:], self._runner)
        self.send_event({"event": "spawned", "number": number}, [self.watch_child(number, pid)])
        zygote.reseed_generators()

    def on_child_exit(self, number: int, code: int) -> None:
        is_helper = number in self._helpers
        super().on_child_exit(number, code)
        if self._single_use and not is_helper:
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
    server = NamespacelessZygote(control, decode_seccomp_programs(request), single_use=single_use)
    preload.freeze_objects(many_forks=not single_use)
    server.send_event(zygote.describe_zygote(problems))
    server.serve()


def run_subreaper(
    seccomp_program: bytes, channel: socket.socket, cgroups: list[int], warm_runner: code_runner.CodeRunner
) -> NoReturn:
    """Run the first process of a sandbox: set limits, start the interpreter, then reap until it ends."""
    try:
        os.dup2(0, 1)  # /dev/null: the zygote's stderr is the operator's
        os.dup2(0, 2)
        jail_builder.join_cgroups(cgroups)
        jail_builder.raise_oom_score(startup_messages.OOM_SCORE)
        plan = jail_builder.JailPlan.decode(channel.recv(startup_messages.MAX_PLAN_BYTES))
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        syscalls.prctl(
            syscalls.PR_SET_PDEATHSIG, signal.SIGTERM
        )  # without a PID namespace nothing else ends it with the zygote
        startup_messages.send_handles(channel, plan)
        jail_builder.set_resource_limits(plan)
        syscalls.drop_all_privileges()
        _start_interpreter(plan, seccomp_program, channel, warm_runner)
    except BaseException as error:
        startup_messages.fail(channel, error)


def _start_interpreter(
    plan: jail_builder.JailPlan,
    seccomp_program: bytes,
    channel: socket.socket,
    warm_runner: code_runner.CodeRunner,
) -> NoReturn:
    watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # the code has the same user and must not open this memory
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        plan = plan._replace(read_only=[*plan.read_only, *_python_paths()])
        interpreter_entrypoint.run_interpreter(
            plan, seccomp_program, channel, warm_runner, fresh_process=plan.fresh_interpreter
        )
    channel.close()
    seccomp_installer.install(seccomp_program)
    _reap_until_exit(pid, watched)


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
    return [sys.base_prefix, *(entry for entry in sys.path if os.path.isdir(entry))]
