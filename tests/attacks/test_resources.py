"""Attacks that exhaust a resource: only the sandbox itself is affected."""

from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient

GIB = 1 << 30


def test_fork_bomb(host: Host, box: SandboxClient, limited: None) -> None:
    """The neighbour answers while it goes on, new sandboxes can be made, and the bomb ends with its time."""
    running = box.start(
        "print('lit', flush=True)\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout=2
    )
    running.until_stdout("lit")
    host.neighbour.check()
    assert host.create().run("1 + 1").result == "2"
    assert len(box.members()) <= 256
    outcome = running.outcome()
    assert outcome.end.status == "timeout"
    host.neighbour.check()


def test_thread_bomb(host: Host, box: SandboxClient, limited: None) -> None:
    program = """
        import threading, time
        made = 0
        stop = threading.Event()
        # Small stacks: the number is to be met, not the memory. (Without any, CPython can wait for ever for a
        # thread that could not start.)
        threading.stack_size(64 << 10)
        try:
            while made < 100000:
                threading.Thread(target=stop.wait, daemon=True).start(); made += 1
        except RuntimeError as error:
            problem = str(error)
        stop.set()
        report([made, problem])
    """
    made, problem = box.ask(dedent(program))
    assert made <= 256
    assert "can't start new thread" in problem


def test_memory_bomb_raises(box: SandboxClient) -> None:
    """An ordinary one is the code's own MemoryError, and variables survive it."""
    box.run("kept = 41")
    outcome = box.run("blocks = []\nwhile True: blocks.append(bytearray(16 << 20))", timeout=60)
    assert (outcome.error, outcome.end.status, outcome.end.state_kept) == ("MemoryError", "error", True)
    assert box.run("del blocks\nkept + 1").result == "42"


def test_memory_bomb_in_children(host: Host, box: SandboxClient, limited: None) -> None:
    """Together they pass the tier: the kernel kills some of them, nobody else."""
    program = """
        import subprocess
        code = "import time; x = bytearray(700 << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(2)"
        children = [subprocess.Popen(["python3", "-S", "-c", code]) for _ in range(3)]
        print([child.wait() for child in children])
    """
    outcome = box.run(dedent(program), timeout=60)
    if outcome.end.state_kept:
        assert "-9" in outcome.stdout
        assert any("out of memory" in note for note in outcome.notes)
    else:
        assert outcome.end.status == "out_of_memory"


FILLS = {
    "memfd": "fd = os.memfd_create('x')\nwhile True: os.write(fd, block)",
    "shared mapping": dedent("""
        import mmap
        kept = []
        while True:
            kept.append(mmap.mmap(-1, 64 << 20)); kept[-1].write(bytes(64 << 20))
    """),
    "SysV segments": dedent("""
        libc.shmat.restype = ctypes.c_void_p
        while True:
            number = libc.shmget(0, 64 << 20, 0o1600)
            if number < 0: break
            address = libc.shmat(number, None, 0)
            ctypes.memset(address, 1, 64 << 20)
    """),
    "pipes": dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        kept = []
        while True:
            a, b = os.pipe(); os.set_blocking(b, False); kept.append((a, b))
            os.write(b, block[:65536])
    """),
    "socket buffers": dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        kept = []
        while True:
            pair = socket.socketpair(); kept.append(pair); pair[0].setblocking(False)
            pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
            try:
                while True: pair[0].send(block)
            except BlockingIOError: pass
    """),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_memory_by_other_names(host: Host, box: SandboxClient, limited: None, fill: str) -> None:
    """Whatever rlimits do not count, the cgroup does: the sandbox ends or gets an errno, the host keeps its memory."""
    outcome = box.run("block = b'x' * (1 << 20)\n" + fill, timeout=40)
    if outcome.end.state_kept:
        assert outcome.end.status in ("ok", "error")
        if outcome.error is not None:
            assert outcome.error in ("OSError", "MemoryError", "BlockingIOError")
    else:
        assert outcome.end.status == "out_of_memory", outcome.end
        assert "1g" in outcome.end.reason
    host.neighbour.check()


def test_disk_fill(host: Host, box: SandboxClient) -> None:
    """One quota for all four places; afterwards there is room again."""
    program = """
        block, answers = b"x" * (1 << 20), []
        for place in ("/mnt/data/big", "/tmp/big", "/home/user/big", "/dev/shm/big"):
            try:
                with open(place, "wb", 0) as file:
                    while True: file.write(block)
            except OSError as error: answers.append(name_of(error.errno))
        total = sum(os.stat(place + "/big").st_size for place in ("/mnt/data", "/tmp", "/home/user", "/dev/shm"))
        for place in ("/mnt/data", "/tmp", "/home/user", "/dev/shm"): os.unlink(place + "/big")
        open("/tmp/again", "w").write("fits")
        report([answers, total])
    """
    answers, total = box.ask(dedent(program), timeout=60)
    assert set(answers) == {"ENOSPC"}
    assert total <= GIB // 2
    assert box.run("1 + 1").result == "2"


def test_sparse_and_preallocated_files(box: SandboxClient) -> None:
    program = """
        fd = os.open("/mnt/data/f", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 1 << 50)
        report([attempt(os.posix_fallocate, fd, 0, 8 << 30), os.statvfs("/mnt/data").f_blocks * 4096])
    """
    answer, size = box.ask(dedent(program))
    assert answer in ("ENOSPC", "ENOMEM")
    assert size <= GIB // 2


def test_inode_fill(host: Host, box: SandboxClient) -> None:
    program = """
        os.mkdir("/tmp/many"); os.chdir("/tmp/many")
        made = 0
        try:
            while made < 300000:
                os.close(os.open(str(made), os.O_CREAT | os.O_WRONLY)); made += 1
        except OSError as error: problem = name_of(error.errno)
        os.chdir("/mnt/data")
        report([made, problem, attempt(os.mkdir, "/dev/shm/one")])
    """
    made, problem, other = box.ask(dedent(program), timeout=90)
    assert (problem, other) == ("ENOSPC", "ENOSPC")
    assert 90_000 < made <= 100_000


def test_no_attribute_can_be_set(box: SandboxClient) -> None:
    """An access control list is 64 KiB of kernel memory that no cgroup counts, on any file and any memfd."""
    program = """
        import shutil, struct, subprocess
        entry = struct.Struct("<HHI").pack
        whole = [entry(1, 6, 0xffffffff), *[entry(2, 6, os.getuid())] * 8000]
        whole += [entry(tag, 6, 0xffffffff) for tag in (4, 16, 32)]
        access = struct.pack("<I", 2) + b"".join(whole)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY)); os.mkdir("directory"); os.symlink("file", "link")
        answers = set()
        for target in ("file", "directory", os.memfd_create("memory"), os.open("file", os.O_RDWR)):
            for kind, value in {"system.posix_acl_access": access, "system.posix_acl_default": access,
                                "user.mine": b"x"}.items():
                answers.add(attempt(os.setxattr, target, kind, value))
        answers.add(attempt(os.setxattr, "link", "user.mine", b"x", follow_symlinks=False))
        answers.add(call(463, -100, b"file", 0, b"user.mine", bytes(16), 16))
        shutil.copy2("file", "copied")  # what programs make of it
        copied = subprocess.run(["cp", "-a", "file", "again"]).returncode
        report([sorted(answers), os.listxattr("file"), copied])
    """
    answers, there, copied = box.ask(dedent(program))
    assert set(answers) <= {"ENOTSUP", "EOPNOTSUPP"}
    assert (there, copied) == ([], 0)


def test_descriptor_fill(host: Host, box: SandboxClient) -> None:
    program = """
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        kept = []
        try:
            while True: kept.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error: problem = name_of(error.errno)
        for fd in kept: os.close(fd)
        report([hard, len(kept), problem])
    """
    hard, count, problem = box.ask(dedent(program))
    assert problem == "EMFILE"
    assert count < hard == 4096
    higher = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))"
    assert box.run(higher).error in ("ValueError", "PermissionError")


def test_every_limit_stays_lowered(box: SandboxClient) -> None:
    program = """
        import resource
        names = "NPROC NOFILE DATA MEMLOCK MSGQUEUE SIGPENDING RTPRIO NICE".split()
        kinds = {name: getattr(resource, "RLIMIT_" + name) for name in names}
        answers = {}
        for name, kind in kinds.items():
            _, hard = resource.getrlimit(kind)
            try: resource.setrlimit(kind, (hard, hard + 1)); answers[name] = "raised"
            except (ValueError, OSError) as error: answers[name] = "refused"
            if hard == resource.RLIM_INFINITY: answers[name] = "unlimited"
        report(answers)
    """
    assert set(box.ask(dedent(program)).values()) == {"refused"}


IN_FLIGHT = """
    import array, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    kept, sent = [], 0
    null = os.open("/dev/null", os.O_RDONLY)
    load = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 200))]
    try:
        while sent < 40000:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            kept.append(pair)
            for _ in range(8):
                pair[0].sendmsg([b"x"], load, socket.MSG_DONTWAIT); sent += 200
    except OSError as error: problem = name_of(error.errno)
    report([sent, problem])
"""


def test_descriptors_in_flight_are_not_shared(host: Host, box: SandboxClient) -> None:
    """The kernel counts them by user: with one user for all, one sandbox could stop the making of others."""
    sent, problem = box.ask(dedent(IN_FLIGHT), timeout=60)
    assert problem in ("ETOOMANYREFS", "EMFILE", "EAGAIN")
    assert sent >= 1000
    host.neighbour.check()
    pass_one = """
        import array
        a, b = socket.socketpair()
        report(attempt(socket.send_fds, a, [b"x"], [0]))
    """
    others = [host.create(), host.create()]
    answers = [other.ask(dedent(pass_one)) for other in others]
    if not host.driver.info()["user_each"] and "ETOOMANYREFS" in answers:
        pytest.skip("one kernel user for all sandboxes here: they share its quotas (docs/security.md)")
    assert answers == ["returned 1", "returned 1"]


PIPES = """
    import fcntl, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    kept, problem = [], ""
    try:
        while len(kept) < 2000:
            pipe = os.pipe(); kept.append(pipe); fcntl.fcntl(pipe[1], 1031, 1 << 20)
    except OSError as error: problem = name_of(error.errno)
    report([len(kept), problem])
"""


def test_pipe_quota_is_not_shared(host: Host, box: SandboxClient) -> None:
    """Past the user's quota new pipes shrink to a page and then cannot be made."""
    count, problem = box.ask(dedent(PIPES), timeout=60)
    assert problem in ("EPERM", "EMFILE", "ENFILE")
    assert count >= 1
    grow = "import fcntl\na, b = os.pipe()\nreport([fcntl.fcntl(b, 1032), attempt(fcntl.fcntl, b, 1031, 1 << 19)])"
    other = host.create()
    size, grown = other.ask(grow)
    if not host.driver.info()["user_each"] and (size < 65536 or grown == "EPERM"):
        pytest.skip("one kernel user for all sandboxes here: they share its quotas (docs/security.md)")
    assert (size, grown) == (65536, "returned 524288")


INOTIFY = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    kept = []
    while True:
        answer = libc.inotify_init1(0)
        if answer < 0: break
        kept.append(answer)
    report([len(kept), name_of(ctypes.get_errno())])
"""


def test_inotify_quota_is_not_shared(host: Host, box: SandboxClient) -> None:
    """Instances are counted for the user who made the outermost user namespace, so for all sandboxes together."""
    count, problem = box.ask(dedent(INOTIFY))
    assert (count == 0 and problem in ("ENOSYS", "EPERM")) or problem == "EMFILE"
    other_count, other_problem = host.create().ask(dedent(INOTIFY))
    assert (other_count, other_problem) == (count, problem), "one sandbox took the watches of another"


def test_cpu_is_shared(host: Host, box: SandboxClient) -> None:
    """Many busy processes in one sandbox: the neighbour still answers."""
    program = "print('busy', flush=True)\nfor _ in range(8):\n    if os.fork() == 0: break\nwhile True: pass"
    running = box.start(program, timeout=2)
    running.until_stdout("busy")
    for _ in range(3):
        host.neighbour.check()
    assert running.outcome().end.status == "timeout"


def test_timers_and_pending_signals(box: SandboxClient) -> None:
    program = """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
        made = 0
        event = (ctypes.c_char * 64)()
        ctypes.memmove(event, b"\\0" * 8 + int(signal.SIGRTMIN).to_bytes(4, "little"), 12)
        number = ctypes.c_int()
        while made < 100000 and libc.timer_create(1, event, ctypes.byref(number)) == 0: made += 1
        report([made, name_of(ctypes.get_errno())])
    """
    made, problem = box.ask(dedent(program))
    assert made <= 1024
    assert problem == "EAGAIN"
