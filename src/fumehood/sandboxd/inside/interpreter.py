"""The process in which a sandbox's code runs, from its fork to its first request; imports only siblings."""

import os
import socket
import sys
from typing import NoReturn

from fumehood.sandboxd.inside import forks, init, jail, runner, syscalls

_GUEST = os.path.dirname(__file__).removesuffix("/fumehood/sandboxd/inside")
_START_RUNNER = (
    "import sys; sys.path.insert(0, {guest!r}); "
    "from fumehood.sandboxd.inside import runner; runner.main(['{fd}'])"
)


def enter_jail(
    common: jail.Plan,
    program: bytes,
    channel: socket.socket,
    door: socket.socket,
    first: int,
    cgroups: list[int],
    prepared: runner.Runner,
) -> NoReturn:
    """The interpreter of a sandbox with namespaces: forked from the zygote while the jail is being built.

    Every page that is touched here is copied, and that is what a start costs: so it does little, and what can be
    done for all is done in the zygote. `common` is what all plans of this zygote have in common.
    """
    try:
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(init.OOM_SCORE)
        kind = door.recv(1)
        if not kind:
            os._exit(125)  # there is no jail; its builder has told why
        forks.after_fork()
        jail.enter_namespaces(first)
        os.close(first)
        jail.limit(common)
        jail.renounce()
        if door.recv(1) != init.FINISHED:
            os._exit(125)  # its builder could not give up its rights, and has told so
        door.close()
        interpret(common, program, channel, prepared, fresh=kind == init.FRESH)
    except BaseException as error:
        init.report(channel, f"{type(error).__name__}: {error}")
    os._exit(125)


def interpret(
    plan: jail.Plan, program: bytes, channel: socket.socket, prepared: runner.Runner, *, fresh: bool
) -> NoReturn:
    try:
        os.setsid()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        os.chdir(plan.work_directory)
        jail.seal(plan, program)
        if fresh:
            _become_fresh(channel)
    except BaseException as error:
        init.report(channel, f"{type(error).__name__}: {error}")
        os._exit(125)
    prepared.serve(channel)
    os._exit(0)


def _become_fresh(channel: socket.socket) -> NoReturn:
    channel.set_inheritable(True)
    source = _START_RUNNER.format(guest=_GUEST, fd=channel.fileno())
    os.execv(sys.executable, [sys.executable, "-c", source])
