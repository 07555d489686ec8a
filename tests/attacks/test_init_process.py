"""Attacks on init, which is outside the sandbox's user namespace and cgroup."""

import os
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient
from tests.support.host_census import find_processes_by_role
from tests.support.waiting import becomes_true

SIGNALS = """
    import fcntl, signal, struct, time
    first = os.pidfd_open(1)
    info = ctypes.create_string_buffer(128)
    answers = set()
    for number in range(1, 65):
        struct.pack_into("iii", info, 0, number, 0, -1)
        answers |= {
            attempt(os.kill, 1, number), attempt(signal.pidfd_send_signal, first, number),
            call(200, 1, number), call(234, 1, 1, number),  # tkill, tgkill
            call(129, 1, number, ctypes.addressof(info)), call(297, 1, 1, number, ctypes.addressof(info)),
        }
    event = ctypes.create_string_buffer(64)
    struct.pack_into("qiii", event, 0, 0, signal.SIGTERM, 4, 1)  # SIGEV_THREAD_ID: a timer that signals process 1
    timer = call(222, 1, ctypes.addressof(event), ctypes.addressof(info))
    reader, writer = os.pipe()
    owner = attempt(fcntl.fcntl, reader, fcntl.F_SETOWN, 1)
    time.sleep(0.1)
    report([sorted(answers), timer, owner, open("/proc/1/stat").read().split()[2]])
"""


def test_no_signal_moves_it(box: SandboxClient) -> None:
    """Another kernel user's, or out of Landlock's scope, or ignored by a process 1 without handlers."""
    answers, timer, owner, state = box.ask(dedent(SIGNALS))
    assert set(answers) <= {"EPERM", "returned None", "0"}
    assert (timer, owner, state) == ("EINVAL", "EINVAL", "S")
    assert box.run("1 + 1").result == "2"


HANDLES = """
    import resource
    first = os.pidfd_open(1)
    buffer = ctypes.create_string_buffer(4096)
    at = ctypes.addressof(buffer)
    answers = {
        "setns all": call(308, first, 0x7e020000), "setns mnt": call(308, first, 0x00020000),
        "setns pid": call(308, first, 0x20000000), "setns user": call(308, first, 0x10000000),
        "getfd": call(438, first, 0, 0), "mrelease": call(448, first, 0), "madvise": call(440, first, at, 1, 21, 0),
        "migrate_pages": call(256, 1, 64, at, at), "move_pages": call(279, 1, 1, at, 0, at, 0),
        "get_robust_list": call(274, 1, at, at + 8), "setpgid": attempt(os.setpgid, 1, os.getpgrp()),
        "into its group": attempt(os.setpgid, 0, 1), "waitid": attempt(os.waitid, os.P_PIDFD, first, os.WEXITED),
        "sched_setattr": call(314, 1, at, 0), "ioprio_set": call(251, 1, 1, 0), "capset": call(126, at, at),
    }
    links = [*(f"ns/{name}" for name in ("mnt", "net", "pid", "pid_for_children", "user", "cgroup", "ipc", "uts")),
             "root", "cwd", "exe", "fd/3", "task/1/root", "task/1/cwd", "task/1/exe", "task/1/ns/mnt"]
    opened = {name: attempt(os.open, f"/proc/1/{name}", os.O_RDONLY if "ns/" in name else os.O_PATH)
              for name in links}
    memory = ("mem", "maps", "smaps", "auxv", "environ", "pagemap", "syscall", "stack", "io", "map_files", "clear_refs",
              "task/1/mem", "task/1/environ", "personality", "timers")
    for name in memory:
        opened[name] = attempt(os.listdir if name == "map_files" else lambda path: open(path, "rb").read(1),
                               f"/proc/1/{name}")
    writes = {name: attempt(os.open, f"/proc/1/{name}", os.O_WRONLY) for name in
              ("mem", "oom_score_adj", "comm", "coredump_filter", "timerslack_ns", "autogroup", "clear_refs", "uid_map",
               "gid_map", "setgroups", "sched", "attr/current", "loginuid", "task/1/comm")}
    report([answers, opened, writes])
"""


def test_no_handle_on_it_leads_anywhere(box: SandboxClient) -> None:
    answers, opened, writes = box.ask(dedent(HANDLES))
    refused = {"EPERM", "EACCES", "ENOSYS", "ESRCH", "ECHILD", "EINVAL"}
    assert set(answers.values()) <= refused, answers
    assert set(opened.values()) <= {"EACCES", "EPERM", "ENOENT"}, opened
    assert set(writes.values()) <= {"EACCES", "EPERM", "EROFS", "ENOENT"}, writes


SCHEDULING = """
    import resource
    answers = {
        "nice": attempt(os.setpriority, os.PRIO_PROCESS, 1, 19),
        "idle": attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),
        "param": attempt(os.sched_setparam, 1, os.sched_param(0)),
        "affinity": attempt(os.sched_setaffinity, 1, {0}),
        "cpu": attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1)),
        "memory": attempt(resource.prlimit, 1, resource.RLIMIT_AS, (0, 0)),
        "pending": attempt(resource.prlimit, 1, resource.RLIMIT_SIGPENDING, (0, 0)),
    }
    for _ in range(4):
        if os.fork() == 0:
            while True: pass
    report(answers)
"""


def test_slowed_down_it_still_takes_the_sandbox_along(host: Host, box: SandboxClient) -> None:
    """Where one kernel user is both, code may hinder its own first process: it is killed all the same."""
    answers = box.ask(dedent(SCHEDULING))
    if host.who == "root":
        assert set(answers.values()) <= {"EPERM"}, answers
    members = set(box.members())
    began = time.monotonic()
    box.destroy()
    host.boxes.remove(box)
    assert time.monotonic() - began < 5
    assert becomes_true(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in members))


ORPHANS = """
    import signal, threading, time
    def orphan(flags, work):
        # A parent that ends leaves a child with this exit signal, running or dead already.
        if os.fork() == 0:
            for _ in range(3):
                if libc.syscall(ctypes.c_long(56), ctypes.c_ulong(flags), 0, 0, 0, 0) == 0:
                    work()
                    os._exit(0)
            time.sleep(0.05)
            os._exit(0)
    def late(): time.sleep(0.1)
    def ignorant(): signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    def leaderless():
        threading.Thread(target=time.sleep, args=(0.1,)).start()
        libc.syscall(ctypes.c_long(60), 0)  # the leader ends before its thread
    def reaper():
        libc.prctl(36, 1, 0, 0, 0)
        if os.fork() == 0: late()
    for exit_signal in (signal.SIGCHLD, 0, signal.SIGUSR1, signal.SIGKILL):
        for work in (lambda: None, late, ignorant, leaderless, reaper):
            orphan(exit_signal, work)
    try:
        while True: os.waitpid(-1, 0x40000000)  # __WALL
    except ChildProcessError:
        pass
    deadline = time.monotonic() + 10
    while (left := sorted(name for name in os.listdir("/proc") if name.isdigit())) != ["1", "2"]:
        if time.monotonic() > deadline: break
        time.sleep(0.02)
    report(left)
"""


def test_orphans_of_every_kind_are_reaped(host: Host, box: SandboxClient) -> None:
    """Nothing but the kernel does it: the first process cannot even ask for them."""
    assert box.ask(dedent(ORPHANS), timeout=60) == ["1", "2"]
    if host.limited:
        assert len(box.members()) == 1


def test_it_costs_nobody_anything_that_code_could_multiply(host: Host, box: SandboxClient) -> None:
    """It is outside the sandbox's cgroup, so nothing that code does may make it grow."""
    first = set(find_processes_by_role(host.driver.started["supervisor"])["init"])
    before = {pid: _size(pid) for pid in first}
    program = """
        import signal
        for number in range(1, 65):
            for _ in range(50): attempt(os.kill, 1, number)
        for _ in range(60):
            if os.fork() == 0:
                if os.fork() == 0: os._exit(0)
                os._exit(0)
            os.wait()
        report(open("/proc/1/status").read())
    """
    status = dict(line.split(":", 1) for line in box.ask(dedent(program), timeout=60).splitlines())
    assert int(status["ShdPnd"], 16) == int(status["SigPnd"], 16) == 0
    assert {pid: _size(pid) for pid in first} == before
    if status["Name"].strip() == "first":  # else it shares what its size shows
        assert all(size <= 64 for size in before.values()), before


def _size(pid: int) -> int:
    """KiB that are this process's alone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmPTE:")))


def test_it_shows_no_more_of_the_host_than_its_own_namespaces(box: SandboxClient) -> None:
    program = """
        files = ("mountinfo", "mounts", "cgroup", "cmdline", "comm", "status", "limits")
        report({name: [open(f"/proc/{who}/{name}").read() for who in (1, "self")] for name in files})
    """
    shown: dict[str, Any] = box.ask(dedent(program))
    assert _places(shown["mountinfo"][0]) == _places(shown["mountinfo"][1])
    groups = {line.rpartition(":")[2] for line in shown["cgroup"][0].splitlines()}
    assert groups <= {"/", "/../zygote"}
    for name, (text, _) in shown.items():
        assert "fumehood-" not in text, name


def _places(mountinfo: str) -> list[tuple[str, ...]]:
    """What is mounted where, without the numbers."""
    lines = [line.split() for line in mountinfo.splitlines()]
    return sorted((line[3], line[4], *line[7:]) for line in lines)
