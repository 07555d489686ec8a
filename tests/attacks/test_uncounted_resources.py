"""Attacks with kernel objects that no cgroup counts."""

from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient

LOCK = """
    import fcntl, struct, time
    def lock(fd, at): fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 2 * at, 1, 0))
"""
LOCKS = {
    "of the host's /dev/null": """
        fd = os.open("/dev/null", os.O_RDONLY)
        for at in range(3000): lock(fd, at)
    """,
    "of a shared library": """
        fd = os.open(os.__file__, os.O_RDONLY)
        for at in range(3000): lock(fd, at)
    """,
    "of many files": """
        fds = [os.open(f"/tmp/{n}", os.O_RDWR | os.O_CREAT) for n in range(300)]
        for fd in fds:
            for at in range(10): lock(fd, at)
    """,
    "of many processes": """
        fd = os.open("/dev/null", os.O_RDONLY)
        for _ in range(10):
            if not os.fork():
                for at in range(300): lock(fd, at)
                time.sleep(60)
    """,
    "of open files": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3000)]
        for fd in fds: fcntl.flock(fd, fcntl.LOCK_SH)
    """,
}


@pytest.mark.parametrize("take", LOCKS.values(), ids=LOCKS)
def test_file_locks(host: Host, box: SandboxClient, limited: None, take: str) -> None:
    """No cgroup counts them, and everybody who closes a shared file walks along its list."""
    outcome = box.run(dedent(LOCK) + dedent(take) + "time.sleep(60)", timeout=60)
    assert (outcome.end.status, outcome.end.state_kept) == ("lost", False), outcome
    assert "file locks" in outcome.end.reason


def test_ordinary_locks_are_left_alone(host: Host, box: SandboxClient) -> None:
    """Also while a neighbour is ended for too many."""
    other = host.create()
    box.run(
        dedent(LOCK) + "fd = os.open('/tmp/own', os.O_RDWR | os.O_CREAT)\nfor at in range(500): lock(fd, at)"
    )
    ended = other.run(dedent(LOCK) + dedent(LOCKS["of the host's /dev/null"]) + "time.sleep(60)", timeout=60)
    if host.limited:
        assert "file locks" in ended.end.reason
    assert box.run("1 + 1").result == "2"


def test_locks_that_belong_to_nobody(box: SandboxClient) -> None:
    """Locks of an open file, or of descriptors that two processes share, outlive the process that the kernel names."""
    program = """
        import fcntl, struct
        fd = os.open("/tmp/x", os.O_RDWR | os.O_CREAT)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)
        answers = [attempt(fcntl.fcntl, fd, command, wanted) for command in (37, 38)]
        clone, CLONE_FILES = 56 if os.uname().machine == "x86_64" else 220, 0x400
        answers += [call(clone, flags | 17, 0, 0, 0, 0) for flags in (CLONE_FILES, CLONE_FILES | 1 << 40)]
        report(answers)
    """
    assert box.ask(dedent(program)) == ["EINVAL", "EINVAL", "EPERM", "EPERM"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_that_nobody_accepts(host: Host, box: SandboxClient, address: str) -> None:
    """The other end exists already, with what was sent to it; no cgroup counts it before it is accepted."""
    program = f"""
        import time
        family, listeners = socket.AF_INET6 if ":" in {address!r} else socket.AF_INET, []
        for _ in range(4):
            listeners.append(socket.create_server(({address!r}, 0), family=family, backlog=4096))
            for _ in range(2000):
                there = socket.create_connection(listeners[-1].getsockname()[:2], timeout=5)
                there.setblocking(False)
                try: there.send(bytes(1500)), there.send(bytes(1500)), there.send(bytes(1500))
                except BlockingIOError: pass
                there.close()
        time.sleep(60)
    """
    outcome = box.run(dedent(program), timeout=60)
    assert (outcome.end.status, outcome.end.state_kept) == ("lost", False), outcome
    assert "TCP sockets" in outcome.end.reason
