"""The process in which a sandbox's code runs, from its fork to its first request; imports only siblings."""

import functools
import os
import socket
import sys
from typing import NoReturn

from fumehood.sandboxd.inside import forks, init, jail, layout, runner, syscalls

_GUEST = os.path.dirname(__file__).removesuffix("/fumehood/sandboxd/inside")
_START_RUNNER = (
    "import sys; sys.path.insert(0, {guest!r}); "
    "from fumehood.sandboxd.inside import runner; runner.main(['{fd}'])"
)


def enter_jail(
    common: jail.Plan,
    program: bytes,
    channel: socket.socket,
    first_process: tuple[int, int],
    cgroups: list[int],
    prepared: runner.Runner,
) -> NoReturn:
    """The interpreter of a sandbox with namespaces, in a fresh fork of the zygote: builds the jail around itself.

    Every page that is touched here is copied, and that is what a start costs: so it does little, and what can be
    done for all is done in the zygote. `common` is what all plans of this zygote have in common,
    `first_process` a pidfd, and a pipe that ends when it is done.
    """
    first, done = first_process
    try:
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(init.OOM_SCORE)
        forks.after_fork()
        body, disks, _, _ = socket.recv_fds(channel, init.MAX_PLAN, 1, socket.MSG_CMSG_CLOEXEC)
        plan = common.with_particulars(body)
        jail.build(plan, first, disks)
        os.close(first)
        init.offer_font_list(cached())
        init.send_handles(channel, plan)
        jail.limit(plan)
        jail.renounce()
        os.read(done, 1)  # ends when the first process has no right left, so that code may come
        os.close(done)
        interpret(plan, program, channel, prepared, fresh=plan.fresh_interpreter)
    except BaseException as error:
        init.report(channel, f"{type(error).__name__}: {error}")
    os._exit(125)


@functools.cache
def cached() -> list[str]:
    """What the zygote has prepared by the time it first asks."""
    return os.listdir(layout.CACHE)


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
