"""PID 1 of a sandbox: builds the jail, starts the interpreter, reaps; imports only the standard library."""

import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from fumehood.sandboxd.inside import filters, jail, layout, runner, syscalls, wire

_GUEST = os.path.dirname(__file__).removesuffix("/fumehood/sandboxd/inside")
_PYTHON = f"{layout.ENVIRONMENT}/bin/python"
_START_RUNNER = (
    "import sys; sys.path.insert(0, {guest!r}); "
    "from fumehood.sandboxd.inside import runner; runner.main(['{fd}'])"
)
_MAX_PLAN = 64 * 1024
_OOM_SCORE = 800  # so that the kernel chooses sandboxes before anything of the host's


def run(program: bytes, channel: socket.socket, cgroups: list[int]) -> NoReturn:
    """Become the sandbox; never returns. The caller has just forked, into a new PID namespace or not."""
    try:
        _silence()
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(_OOM_SCORE)
        body, disks, _, _ = socket.recv_fds(channel, _MAX_PLAN, 1)
        plan = jail.Plan.decode(body.decode())
        if plan.walls == "namespaces":
            jail.build_namespaces(plan, disks)
        else:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)  # no namespace ends with the zygote
        _send_handles(channel, plan.work_directory)
        jail.limit(plan)
        jail.renounce()
        _start(plan, program, channel)
    except BaseException as error:
        _report(channel, f"{type(error).__name__}: {error}")
    os._exit(125)


def _silence() -> None:
    """The zygote's standard streams belong to the operator, not to the sandbox."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _send_handles(channel: socket.socket, work_directory: str) -> None:
    """Hand the supervisor what it needs later, while nobody untrusted can be in between."""
    data = os.open(work_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    (packet,) = wire.packets(wire.Message(wire.Kind.JAILED, wire.NO_CALL, b""))
    socket.send_fds(channel, [packet], [data, namespace])
    os.close(data)
    os.close(namespace)


def _report(channel: socket.socket, text: str) -> None:
    body = text.encode(errors="backslashreplace")[: wire.MAX_BODY]
    for packet in wire.packets(wire.Message(wire.Kind.FAILED, wire.NO_CALL, body)):
        channel.send(packet)


def _start(plan: jail.Plan, program: bytes, channel: socket.socket) -> None:
    watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # same user as the code: it must not open our memory
    interpreter = os.fork()
    if interpreter == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        _interpret(plan, program, channel)
    channel.close()
    filters.install(program)
    _watch(interpreter, watched)


def _watch(interpreter: int, watched: set[signal.Signals]) -> NoReturn:
    """Reap whatever ends up here until the interpreter itself is gone; its end is the sandbox's."""
    while True:
        received = signal.sigwait(watched)
        if received == signal.SIGINT:
            _signal_group(interpreter, signal.SIGINT)
            continue
        if received == signal.SIGTERM and os.getpid() != 1:
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
    """Leave with the interpreter's status; in a PID namespace that takes every other process along."""
    if os.getpid() != 1:
        _kill_adopted()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _kill_adopted() -> None:
    """Without a PID namespace: end what the interpreter left, generation by generation."""
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


def _interpret(plan: jail.Plan, program: bytes, channel: socket.socket) -> NoReturn:
    try:
        os.setsid()
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        os.chdir(plan.work_directory)
        if plan.walls == "process":
            plan = replace(plan, read_only=[*plan.read_only, *_own_trees()])
        else:
            sys.executable = _PYTHON
            _offer_font_list()
        jail.seal(plan, program)
        if plan.fresh_interpreter:
            _become_fresh(channel)
        _forget_the_zygote()
    except BaseException as error:
        _report(channel, f"{type(error).__name__}: {error}")
        os._exit(125)
    runner.serve(channel)
    os._exit(0)


def _offer_font_list() -> None:
    """Spare new Python processes the search for fonts: matplotlib looks for its list where it may write."""
    os.makedirs(layout.MATPLOTLIB)
    for name in os.listdir(layout.CACHE):
        os.symlink(f"{layout.CACHE}/{name}", f"{layout.MATPLOTLIB}/{name}")
    os.environ["MPLCONFIGDIR"] = layout.MATPLOTLIB


def _own_trees() -> list[str]:
    """Without mounts of its own, a sandbox finds interpreter and packages where the zygote found them."""
    return [sys.base_prefix, *(entry for entry in sys.path if os.path.isdir(entry))]


def _become_fresh(channel: socket.socket) -> NoReturn:
    channel.set_inheritable(True)
    source = _START_RUNNER.format(guest=_GUEST, fd=channel.fileno())
    os.execv(sys.executable, [sys.executable, "-c", source])


def _forget_the_zygote() -> None:
    """Undo what all forks would share: random state, the guest's place on the path."""
    random.seed()
    numpy_random: Callable[[], None] | None = getattr(sys.modules.get("numpy.random"), "seed", None)
    if numpy_random is not None:
        numpy_random()
    sys.path[:] = [entry for entry in dict.fromkeys(sys.path) if entry != _GUEST]
