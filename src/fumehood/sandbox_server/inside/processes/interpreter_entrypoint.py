"""The interpreter process of a sandbox, from its fork to the first request."""

import os
import socket
import sys
from typing import NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import jail_builder
from fumehood.sandbox_server.inside.processes import startup_messages
from fumehood.sandbox_server.inside.runner import code_runner

_START_RUNNER = (
    "import sys; sys.path.insert(0, {guest!r}); "
    "from fumehood.sandbox_server.inside.runner import code_runner; code_runner.main(['{fd}'])"
)


def enter_jail(
    seccomp_program: bytes,
    channel: socket.socket,
    init_handles: tuple[int, int],
    cgroups: list[int],
    warm_runner: code_runner.CodeRunner,
) -> NoReturn:
    """Build the jail around a fresh fork of the zygote, then run the interpreter (mode `namespaces`).

    Copied pages are the cost of a start, so this does little.

    init_handles: a pidfd of the sandbox's init, and a pipe that init closes once it has dropped its privileges.
    cgroups: descriptors of the `cgroup.procs` to join.
    """
    init_pidfd, ready_pipe = init_handles
    try:
        jail_builder.join_cgroups(cgroups)
        jail_builder.raise_oom_score(startup_messages.OOM_SCORE)
        body, disks, _, _ = socket.recv_fds(
            channel, startup_messages.MAX_PLAN_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        plan = jail_builder.JailPlan.decode(body)
        jail_builder.build_jail(plan, init_pidfd, disks)
        os.close(init_pidfd)
        startup_messages.link_font_cache()
        listeners = [
            jail_builder.listen_on_loopback(layout.EGRESS_PORT),
            jail_builder.listen_on_loopback(layout.PIP_PORT),
        ]
        startup_messages.send_handles(channel, plan, listeners)
        jail_builder.set_resource_limits(plan)
        syscalls.drop_all_privileges()
        os.read(ready_pipe, 1)  # returns when init has no privilege left
        os.close(ready_pipe)
        run_interpreter(plan, seccomp_program, channel, warm_runner, fresh_process=plan.fresh_interpreter)
    except BaseException as error:
        startup_messages.fail(channel, error)


def run_interpreter(
    plan: jail_builder.JailPlan,
    seccomp_program: bytes,
    channel: socket.socket,
    warm_runner: code_runner.CodeRunner,
    *,
    fresh_process: bool,
) -> NoReturn:
    """Apply the last restrictions and serve requests.

    fresh_process: execute a new Python instead of the warm runner.
    """
    try:
        os.setsid()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        os.chdir(plan.work_directory)
        jail_builder.apply_restrictions(plan, seccomp_program)
        if fresh_process:
            _exec_fresh_interpreter(channel)
    except BaseException as error:
        startup_messages.fail(channel, error)
    warm_runner.serve(channel)
    os._exit(0)


def _exec_fresh_interpreter(channel: socket.socket) -> NoReturn:
    channel.set_inheritable(True)
    source = _START_RUNNER.format(guest=layout.IMPORT_ROOT, fd=channel.fileno())
    os.execv(sys.executable, [sys.executable, "-c", source])
