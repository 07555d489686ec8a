"""The first process of a sandbox without namespaces: starts the interpreter, watches, reaps; imports only siblings."""

import os
import signal
import socket
import sys
from typing import NoReturn

from fumehood.sandboxd.inside import filters, init, interpreter, jail, runner, syscalls


def run(program: bytes, channel: socket.socket, cgroups: list[int], prepared: runner.Runner) -> NoReturn:
    """The first process of a sandbox without namespaces: limits, then the interpreter, then watch and reap."""
    try:
        init.silence()
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(init.OOM_SCORE)
        plan = jail.Plan.decode(channel.recv(init.MAX_PLAN).decode())
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)  # no namespace ends with the zygote
        init.send_handles(channel, plan)
        jail.limit(plan)
        jail.renounce()
        _start(plan, program, channel, prepared)
    except BaseException as error:
        init.report(channel, f"{type(error).__name__}: {error}")
    os._exit(125)


def _start(plan: jail.Plan, program: bytes, channel: socket.socket, prepared: runner.Runner) -> None:
    watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # same user as the code: it must not open our memory
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        plan = plan._replace(read_only=[*plan.read_only, *_own_trees()])
        interpreter.interpret(plan, program, channel, prepared, fresh=plan.fresh_interpreter)
    channel.close()
    filters.install(program)
    _watch(pid, watched)


def _watch(interpreter: int, watched: set[signal.Signals]) -> NoReturn:
    """Reap whatever ends up here until the interpreter itself is gone; its end is the sandbox's."""
    while True:
        received = signal.sigwait(watched)
        if received == signal.SIGINT:
            _signal_group(interpreter, signal.SIGINT)
            continue
        if received == signal.SIGTERM:
            _kill_adopted()  # SIGKILL would end this process alone and leave the others running
            os._exit(128 + signal.SIGKILL)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(125)
            if pid == 0:
                break
            if pid == interpreter:
                _end_with(status)


def _end_with(status: int) -> NoReturn:
    """Leave with the interpreter's status, and with everything that it left."""
    _kill_adopted()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _kill_adopted() -> None:
    """End what the interpreter left, generation by generation."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return


def _own_trees() -> list[str]:
    """Without mounts of its own, a sandbox finds interpreter and packages where the zygote found them."""
    return [sys.base_prefix, *(entry for entry in sys.path if os.path.isdir(entry))]
