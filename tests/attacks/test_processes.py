"""Attacks on other processes, and attempts to gain privileges."""

from textwrap import dedent
from typing import Any

import pytest

from tests.attacks.conftest import Host, children_of
from tests.support.driver_client import SandboxClient
from tests.support.host_census import find_processes_by_role
from tests.support.waiting import becomes_true

SETUID = ["su", "mount", "umount", "passwd", "chsh", "chfn", "newgrp", "gpasswd", "sudo", "pkexec"]


def test_only_its_own_processes_are_seen(host: Host, box: SandboxClient) -> None:
    answer: list[int] = box.ask("report([int(name) for name in os.listdir('/proc') if name.isdigit()])")
    assert sorted(answer) == [1, 2]
    assert box.ask("report([os.getpid(), os.getppid(), os.getuid(), os.geteuid()])") == [2, 0, 1000, 1000]


def test_signals_reach_nobody_else(host: Host, box: SandboxClient) -> None:
    """By the numbers that the host uses, and by every small one."""
    pids = sorted({host.driver.started["supervisor"], host.zygote, *children_of({host.zygote})})
    program = f"""
        import signal
        answers = {{}}
        own = [int(name) for name in os.listdir("/proc/self/task")]
        for pid in sorted({{*{pids!r}, *range(3, 4000)}} - {{*own}}):
            answers[attempt(os.kill, pid, signal.SIGKILL)] = pid
            answers[attempt(os.pidfd_open, pid)] = pid
        report(answers)
    """
    assert set(box.ask(dedent(program))) == {"ESRCH"}


def test_init_shrugs_off_signals(box: SandboxClient) -> None:
    program = """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # init passes this one on, to us
        answers = {name_: attempt(os.kill, 1, getattr(signal, name_)) for name_ in
                   ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV", "SIGUSR1", "SIGHUP", "SIGQUIT", "SIGINT", "SIGCHLD")}
        time.sleep(0.2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report([answers, open("/proc/1/stat").read().split()[2]])
    """
    answers, state = box.ask(dedent(program))
    assert state in ("S", "R")
    assert set(answers.values()) <= {"returned None", "EPERM"}  # Landlock's scope forbids, or init ignores
    assert box.run("1 + 1").result == "2"


def test_kill_everybody_ends_only_itself(host: Host, box: SandboxClient) -> None:
    program = """
        import signal, subprocess
        child = subprocess.Popen(["sleep", "600"])
        answer = attempt(os.kill, -1, signal.SIGKILL)
        report([answer, child.wait(10)])
    """
    answer, code = box.ask(dedent(program))
    assert answer == "returned None"
    assert code == -9
    host.neighbour.check()


def test_priorities_and_limits_of_others(host: Host, box: SandboxClient) -> None:
    program = f"""
        import resource
        pids = [{host.zygote}, {host.driver.started["supervisor"]}]
        report([attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1)) for pid in pids]
               + [attempt(os.setpriority, os.PRIO_PROCESS, pid, 19) for pid in pids]
               + [attempt(os.sched_setaffinity, pid, {{0}}) for pid in pids]
               + [attempt(os.setpriority, os.PRIO_PROCESS, 0, -5)])
    """
    answers = box.ask(dedent(program))
    assert set(answers[:-1]) == {"ESRCH"}
    assert answers[-1] in ("EACCES", "EPERM")


def test_starving_init_ends_only_itself(host: Host, box: SandboxClient) -> None:
    """Code may lower the limits of its own init; the worst that follows is its own end."""
    program = """
        import resource, time
        answer = attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0))
        attempt(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
        for _ in range(60):
            if os.fork() == 0: os._exit(0)
        time.sleep(0.2)
        report(answer)
    """
    outcome = box.run(dedent(program))
    if outcome.end.status != "ok":
        assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("lost", -1, False)
    host.check()


def test_another_process_of_the_sandbox_is_not_traced(box: SandboxClient) -> None:
    """ptrace and its kin are refused altogether, also against one's own children."""
    program = """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        buffer = ctypes.create_string_buffer(64)
        class iovec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        local = iovec(ctypes.addressof(buffer), 64)
        remote = iovec(id(buffer), 64)
        at, there = ctypes.addressof(local), ctypes.addressof(remote)
        answers = {}
        for pid in (1, child.pid):
            answers[f"attach {pid}"] = call(101, 16, pid, 0, 0)
            answers[f"seize {pid}"] = call(101, 0x4206, pid, 0, 0)
            answers[f"readv {pid}"] = call(310, pid, at, 1, there, 1, 0)
            answers[f"writev {pid}"] = call(311, pid, at, 1, there, 1, 0)
            answers[f"getfd {pid}"] = call(438, int(os.pidfd_open(pid)), 0, 0)
            answers[f"madvise {pid}"] = call(440, int(os.pidfd_open(pid)), at, 1, 21, 0)
            answers[f"kcmp {pid}"] = call(312, os.getpid(), pid, 0, 0, 0)
        answers["traceme"] = call(101, 0, 0, 0, 0)
        child.kill(); child.wait()
        report(answers)
    """
    answers: dict[str, str] = box.ask(dedent(program))
    for name, answer in answers.items():
        assert answer == ("ENOSYS" if name.startswith(("getfd", "madvise", "kcmp")) else "EPERM"), name


def test_no_capabilities_and_no_new_privileges(box: SandboxClient) -> None:
    program = """
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        report({key: status[key].strip() for key in status if key.startswith(("Cap", "NoNew", "Seccomp", "Groups"))})
    """
    status = box.ask(dedent(program))
    for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[key], 16) == 0, key
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def test_init_has_given_up_its_rights_before_code_comes(host: Host) -> None:
    """They start beside each other, so the very first call of several sandboxes looks."""
    program = """
        import json
        status = dict(line.split(":", 1) for line in open("/proc/1/status").read().splitlines())
        names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
        print(json.dumps([int(status[name], 16) for name in names]))
    """
    for _ in range(20):
        box = host.driver.create()
        host.boxes.append(box)
        assert box.ask(dedent(program)) == [0, 0, 0, 0, 0, 1, 2]


def test_children_have_the_same_walls(box: SandboxClient) -> None:
    program = """
        import subprocess
        text = subprocess.run(["grep", "-E", "Cap(Eff|Bnd)|NoNewPrivs|Seccomp:", "/proc/self/status"],
                              capture_output=True, text=True).stdout
        report([line.split()[1].lstrip("0") for line in text.splitlines()])
    """
    assert box.ask(dedent(program)) == ["", "", "1", "2"]


def test_setuid_programs_give_nothing(box: SandboxClient) -> None:
    program = f"""
        import shutil, subprocess
        answers = {{}}
        for name in {SETUID!r}:
            path = shutil.which(name)
            if path is None: continue
            answers[name] = [subprocess.run([path, "--help"], capture_output=True).returncode]
        probe = "import os; print(os.getuid(), os.geteuid(), os.getgid(), os.getegid())"
        ids = subprocess.run(["python3", "-c", probe], capture_output=True, text=True).stdout.split()
        su = subprocess.run(["su", "-c", "id -u"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        suid = [str(path) for path in __import__("glob").glob("/usr/bin/*")
                if not os.path.islink(path) and os.stat(path).st_mode & 0o6000]
        flags = [line.split()[5] for line in open("/proc/self/mountinfo") if line.split()[4] == "/usr"]
        report([ids, su.stdout, suid, flags])
    """
    ids, su, found, flags = box.ask(dedent(program), timeout=60)
    assert ids == ["1000"] * 4
    assert "0" not in su.split()
    assert found, "nothing was tried: no program here has the bit"
    assert all("nosuid" in flag.split(",") for flag in flags)


def test_a_setuid_program_of_its_own_gives_nothing(box: SandboxClient) -> None:
    program = """
        import shutil, subprocess
        shutil.copy("/usr/bin/id", "/mnt/data/id")
        answers = [attempt(os.chmod, "/mnt/data/id", 0o6755), attempt(os.chown, "/mnt/data/id", 0, 0)]
        report([answers, subprocess.run(["/mnt/data/id", "-u"], capture_output=True, text=True).stdout.strip()])
    """
    (_, owned), uid = box.ask(dedent(program))
    assert owned in ("EPERM", "EINVAL")
    assert uid == "1000"


@pytest.mark.parametrize("function", ["setuid", "setgid", "seteuid", "setegid"])
def test_identity_cannot_change(box: SandboxClient, function: str) -> None:
    assert box.ask(f"report([attempt(os.{function}, n) for n in (0, 1, 65534)])") == ["EINVAL"] * 3


def test_device_nodes_cannot_be_made(box: SandboxClient) -> None:
    program = """
        import stat
        report([attempt(os.mknod, f"/mnt/data/{kind}{major}", kind | 0o666, os.makedev(major, minor))
                for kind in (stat.S_IFCHR, stat.S_IFBLK) for major, minor in ((1, 1), (8, 0), (10, 229), (0, 0))])
    """
    assert set(box.ask(dedent(program))) <= {"EPERM", "EACCES"}


def test_core_dumps_are_off(box: SandboxClient) -> None:
    program = """
        import resource, subprocess
        try: resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)); higher = "raised"
        except (OSError, ValueError): higher = "refused"
        limit = [line.split()[4:6] for line in open("/proc/self/limits") if line.startswith("Max core")]
        died = subprocess.run(["python3", "-c", "import os; os.abort()"], capture_output=True).returncode
        report([higher, limit, died, os.listdir("/mnt/data")])
    """
    higher, ((soft, hard),), died, files = box.ask(dedent(program))
    assert higher == "refused"
    # 0 still pipes the dump to a handler of the host; 1 does neither.
    assert {soft, hard} <= {"0", "1"}
    assert (died, files) == (-6, [])


DAEMON = """
    import time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            while True:
                try: os.write(1, b"from the daemon\\n")
                except OSError: pass
                time.sleep(0.02)
        os._exit(0)
    time.sleep(0.3)
"""


def test_daemons_belong_to_no_later_call_and_die_with_the_sandbox(host: Host) -> None:
    box = host.create()
    assert "from the daemon" in box.run(dedent(DAEMON)).stdout
    later: Any = box.run("import time\nx = 5\nx")
    assert later.result == "5"
    before = box.members()
    box.destroy()
    host.boxes.remove(box)
    if host.limited:
        assert len(before) == 2  # the interpreter, the daemon
        assert becomes_true(lambda: not set(before) & children_of({host.zygote}))
    # The first process is in no cgroup of the sandbox, and goes as well: each that is left has an interpreter.
    assert becomes_true(lambda: _alone(host) == 0)


def _alone(host: Host) -> int:
    found = find_processes_by_role(host.driver.started["supervisor"])
    return len(found["init"]) - len(found["interpreter"])


def test_zombies_are_reaped(host: Host, box: SandboxClient) -> None:
    program = """
        import time
        for _ in range(50):
            if os.fork() == 0:
                if os.fork() == 0: os._exit(0)
                os._exit(0)
        for _ in range(50): os.wait()
        for _ in range(100):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            if len(pids) == 2: break
            time.sleep(0.05)
        report(sorted(pids))
    """
    assert box.ask(dedent(program)) == [1, 2]


def test_typing_into_a_terminal(box: SandboxClient) -> None:
    program = """
        import fcntl, pty, termios
        report([attempt(fcntl.ioctl, 0, termios.TIOCSTI, b"x"), attempt(fcntl.ioctl, 1, 0x541C, b"\\2"),
                attempt(fcntl.ioctl, 2, 0x5423, b"\\0\\0\\0\\0"), attempt(pty.openpty)[:8],
                attempt(os.open, "/dev/tty", 2), call(16, 0, 0x5412 | 1 << 32, 0)])
    """
    *typed, opened, terminal, wide = box.ask(dedent(program))
    assert [*typed, wide] == ["EPERM"] * 4
    assert not opened.startswith("returned")
    assert terminal == "ENOENT"


def test_it_cannot_hide_from_the_supervisor(host: Host, box: SandboxClient) -> None:
    """PR_SET_DUMPABLE is refused; even so files are read by descriptors that were sent before."""
    program = """
        refused = call(157, 4, 0, 0, 0, 0)
        open("/mnt/data/here", "w").write("still read")
        report(refused)
    """
    assert box.ask(dedent(program)) == "EPERM"
    assert box.read_file("here") == b"still read"
    hidden = """
        import shutil
        # A program without the read bit makes its process not dumpable, whatever prctl says.
        shutil.copy("/usr/bin/sleep", "/tmp/hidden"); os.chmod("/tmp/hidden", 0o111)
        import subprocess; child = subprocess.Popen(["/tmp/hidden", "600"])
        report(child.pid)
    """
    box.ask(dedent(hidden))
    assert box.read_file("here") == b"still read"
    outcome = box.run("while True: pass", timeout=1)
    assert outcome.end.status == "timeout"
    assert outcome.end.state_kept
