"""Attacks on the supervisor and helpers that list, read and write a sandbox's files."""

import os
import threading
import time
from collections.abc import Callable
from textwrap import dedent

import pytest

from fumehood.sandbox_server.inside.files.untrusted_files import MAX_ENTRIES
from tests.attacks.conftest import Host
from tests.support.driver_client import DriverError, SandboxClient

PLANTED = {
    "link to the host": "os.symlink('/etc/passwd', '/mnt/data/x')",
    "link to root": "os.symlink('/', '/mnt/data/d'); os.symlink('/etc/passwd', '/mnt/data/x')",
    "relative link": "os.symlink('../../../../etc/passwd', '/mnt/data/x')",
    "link to itself": "os.symlink('x', '/mnt/data/x')",
    "link to a file of its own": "open('/mnt/data/real', 'w').write('r'); os.symlink('real', '/mnt/data/x')",
    "magic link": "os.symlink('/proc/self/root/etc/passwd', '/mnt/data/x')",
    "fifo": "os.mkfifo('/mnt/data/x')",
    "socket": "socket.socket(socket.AF_UNIX).bind('/mnt/data/x')",
    "directory": "os.mkdir('/mnt/data/x')",
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_only_regular_files_are_read(host: Host, box: SandboxClient, plant: str) -> None:
    assert box.run(plant).end.status == "ok"
    began = time.monotonic()
    with pytest.raises(DriverError) as refusal:
        box.read_file("x")
    assert refusal.value.kind == "FileRefused"
    assert time.monotonic() - began < 20, "a special file held the reader up"
    files, _ = box.list_files()
    assert "x" not in files
    assert not any(path.startswith("d/") for path in files)


NAMES = [
    "../etc/passwd",
    "/etc/passwd",
    "a/../../etc/passwd",
    "..",
    ".",
    "",
    "a//b",
    "./a",
    "a/",
    "a\0b",
    "a/./b",
    "x" * 256,
    "/".join("d" * 40),
    "x" * 5000,
    "\udcff\ud800",
]


@pytest.mark.parametrize("do", ["read", "write", "delete"])
def test_names_that_mean_something_else(box: SandboxClient, do: str) -> None:
    actions: dict[str, Callable[[str], object]] = {
        "read": box.read_file,
        "write": lambda path: box.write_file(path, b"x"),
        "delete": box.delete_file,
    }
    for path in NAMES:
        with pytest.raises(DriverError) as refusal:
            actions[do](path)
        assert refusal.value.kind == "FileRefused", path
        assert "\0" not in refusal.value.text
        assert len(refusal.value.text) < 1000
    assert box.ask("report(os.listdir('/mnt/data'))") == []


def test_a_name_longer_than_a_message(host: Host, box: SandboxClient) -> None:
    """It is refused at once, and does not cost everybody the zygote."""
    for length in (100_000, 300_000):
        with pytest.raises(DriverError) as refusal:
            box.driver.ask("write_file", sandbox=box.name, path="x" * length, content="", wait_seconds=20)
        assert refusal.value.kind == "FileRefused"
    host.check()


def test_writing_through_a_link(box: SandboxClient) -> None:
    """The parents may be links: refused; the name itself may be one: replaced, not followed."""
    plant = """
        os.mkdir("/tmp/elsewhere"); open("/tmp/elsewhere/kept", "w").write("kept")
        os.symlink("/tmp/elsewhere", "/mnt/data/d"); os.symlink("/tmp/elsewhere/kept", "/mnt/data/x")
        report(1)
    """
    box.ask(dedent(plant))
    for path in ("d/new", "d/kept", "d/deeper/new"):
        with pytest.raises(DriverError, match="FileRefused"):
            box.write_file(path, b"changed")
        with pytest.raises(DriverError, match="FileRefused"):
            box.delete_file(path)
    box.write_file("x", b"replaced")
    assert box.read_file("x") == b"replaced"
    look = "report([open('/tmp/elsewhere/kept').read(), os.listdir('/tmp/elsewhere'), os.path.islink('/mnt/data/x')])"
    assert box.ask(look) == ["kept", ["kept"], False]


def test_writing_over_a_fifo_and_into_a_directory(box: SandboxClient) -> None:
    box.run("os.mkfifo('/mnt/data/fifo'); os.mkdir('/mnt/data/dir'); os.mkdir('/mnt/data/closed', 0o500)")
    box.write_file("fifo", b"a file now")
    assert box.read_file("fifo") == b"a file now"
    for path in ("dir", "closed/x", "fifo/x"):
        with pytest.raises(DriverError, match="FileRefused"):
            box.write_file(path, b"x")
    assert [name for name in box.ask("report(os.listdir('/mnt/data'))") if name.startswith(".")] == []


def read_until_too_large(box: SandboxClient) -> None:
    for _ in range(1000):
        box.read_file("growing", limit=5 << 20)


def test_sparse_and_growing_files(host: Host, box: SandboxClient) -> None:
    """The bound on a read counts bytes that come, not what the file says of itself."""
    grow = """
        import threading
        os.truncate(os.open("/mnt/data/sparse", os.O_CREAT | os.O_WRONLY), 1 << 45)
        def grow():
            with open("/mnt/data/growing", "wb", 0) as file:
                while file.tell() < 100 << 20: file.write(b"x" * 65536)
        open("/mnt/data/growing", "wb").close()
        threading.Thread(target=grow, daemon=True).start()
        report(1)
    """
    box.ask(dedent(grow))
    with pytest.raises(DriverError, match="SandboxPayloadTooLarge: sparse: larger than"):
        box.read_file("sparse", limit=1000)
    files, _ = box.list_files()
    assert files["sparse"] == 1 << 45
    with pytest.raises(DriverError, match="larger than"):
        read_until_too_large(box)


def test_leases_and_locks_do_not_hold_a_reader_up(box: SandboxClient) -> None:
    program = """
        import fcntl
        file = open("/mnt/data/leased", "w+"); file.write("x"); file.flush()
        lease = attempt(fcntl.fcntl, file, 1024, fcntl.F_WRLCK)
        fcntl.lockf(file, fcntl.LOCK_EX); fcntl.flock(file, fcntl.LOCK_EX)
        report(lease)
    """
    assert box.ask(dedent(program)) == "EINVAL"
    began = time.monotonic()
    assert box.read_file("leased") == b"x"
    assert time.monotonic() - began < 20  # a lease would hold a plain open for 45 s


RACES = {
    "file and link": """
        os.symlink("/etc/passwd", "link"); open("plain", "w").write("mine")
        libc.renameat2(-100, b"link", -100, b"x", 0); open("y", "w").write("mine")
        while True: libc.renameat2(-100, b"x", -100, b"y", 2)
    """,
    "directory and link": """
        os.mkdir("x.d"); open("x.d/passwd", "w").write("mine"); os.symlink("/etc", "y.d")
        while True: libc.renameat2(-100, b"x.d", -100, b"y.d", 2)
    """,
    "directory moved up": """
        os.makedirs("a/b/c"); open("a/b/c/passwd", "w").write("mine")
        while True:
            os.rename("a/b", "b"); os.rename("b", "a/b")
    """,
    "fifo and file": """
        os.mkfifo("x"); open("y", "w").write("mine")
        while True: libc.renameat2(-100, b"x", -100, b"y", 2)
    """,
}


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_swaps_during_reads_and_walks(host: Host, box: SandboxClient, race: str) -> None:
    """Each look-up sees either of the two, and never what lies outside."""
    running = box.start("os.chdir('/mnt/data')\nprint('on', flush=True)" + dedent(race), timeout=60)
    running.until_stdout("on")
    time.sleep(0.1)
    seen: set[bytes] = set()
    refusals: set[str] = set()
    for number in range(120):
        for path in ("x", "y", "x.d/passwd", "y.d/passwd", "a/b/c/passwd"):
            try:
                seen.add(box.read_file(path))
            except DriverError as error:
                refusals.add(error.kind)
        if number % 10 == 0:
            box.list_files()
            for action in (
                lambda: box.write_file("y.d/written", b"mine"),
                lambda: box.delete_file("y.d/written"),
            ):
                try:
                    action()
                except DriverError as error:
                    refusals.add(error.kind)
    assert seen <= {b"mine", b""}
    assert refusals <= {"FileRefused", "SandboxFileNotFound"}
    box.interrupt()
    assert running.outcome().end.status == "interrupted"
    assert box.ask("report([name for name in os.listdir('/') if 'written' in name])") == []


def test_hostile_names_in_a_listing(box: SandboxClient) -> None:
    program = r"""
        names = [b"new\nline", b"\x1b[31mred", b"\xff\xfe", b"\xe2\x80\xaetxt.exe", b"a" * 255, b"t\xc3\xbcck"]
        names += [b"tab\t", b"-rf", b"\\", b"%00"]
        for name in names: open(b"/mnt/data/" + name, "w").write("x")
        report([name.decode() for name in names if name != b"\xff\xfe"])
    """
    names = box.ask(dedent(program))
    files, cut = box.list_files()
    assert set(files) == set(names)
    assert cut  # one cannot be told in UTF-8
    for path in files:
        assert box.read_file(path) == b"x"
        box.delete_file(path)
    assert box.list_files() == ({}, True)


def test_refusals_are_fit_for_a_log(box: SandboxClient) -> None:
    for name in ("a\nb", "\x1b[31m", "\u202egpj.exe", "x" * 250):
        with pytest.raises(DriverError) as refusal:
            box.read_file(name)
        assert refusal.value.text.isprintable()
        assert len(refusal.value.text) < 400


def test_deep_and_wide_trees(host: Host, box: SandboxClient) -> None:
    program = """
        os.makedirs("/mnt/data/wide")
        for number in range(25000): os.close(os.open(f"/mnt/data/wide/{number}", os.O_CREAT | os.O_WRONLY))
        os.makedirs("/mnt/data/deep"); os.chdir("/mnt/data/deep")
        for _ in range(3000):
            os.mkdir("d"); os.chdir("d")
        open("bottom", "w").write("x"); os.chdir("/mnt/data")
        report(1)
    """
    box.ask(dedent(program), timeout=60)
    files, cut = box.list_files()
    assert cut
    assert len(files) <= MAX_ENTRIES
    assert max(path.count("/") for path in files) < 40


def test_hard_links_count_once_for_the_quota_and_each_for_the_list(box: SandboxClient) -> None:
    box.run("open('/mnt/data/one', 'w').write('x'); os.link('/mnt/data/one', '/mnt/data/two')")
    assert box.list_files()[0] == {"one": 1, "two": 1}
    box.delete_file("one")
    assert box.read_file("two") == b"x"


def test_a_vanishing_file_does_not_hide_the_others(box: SandboxClient) -> None:
    """Files come and go in the same directory while it is listed; the lasting ones are always there."""
    program = """
        for number in range(300): open(f"/mnt/data/lasting{number}", "w").write("x")
        print("on", flush=True)
        while True:
            for number in range(300): os.close(os.open(f"/mnt/data/brief{number}", os.O_CREAT | os.O_WRONLY))
            for number in range(300): os.unlink(f"/mnt/data/brief{number}")
    """
    running = box.start(dedent(program), timeout=60)
    running.until_stdout("on")
    for _ in range(100):
        files, cut = box.list_files()
        assert cut or sum(path.startswith("lasting") for path in files) == 300
    box.interrupt()
    running.outcome()


def test_uploads_cannot_exceed_the_sandboxes_quota(host: Host, box: SandboxClient) -> None:
    program = """
        with open("/tmp/full", "wb", 0) as file:
            try:
                while True: file.write(b"x" * (1 << 20))
            except OSError: pass
    """
    box.run(dedent(program), timeout=60)
    with pytest.raises(DriverError) as refusal:
        box.write_file("late", b"x" * (4 << 20))
    assert "quota" in refusal.value.text or "memory" in refusal.value.text
    assert box.ask("os.unlink('/tmp/full'); report(os.listdir('/mnt/data'))") == []
    box.write_file("late", b"fits")
    assert box.read_file("late") == b"fits"


def test_uploads_belong_to_the_sandbox(box: SandboxClient) -> None:
    box.write_file("sub/dir/file", b"x")
    stat = "s = os.stat('/mnt/data/sub/dir/file'); report([s.st_uid, s.st_gid, oct(s.st_mode & 0o7777)])"
    assert box.ask(stat) == [1000, 1000, "0o644"]
    assert (
        box.ask(
            "open('/mnt/data/sub/dir/file', 'a').write('y'); os.rmdir('/mnt/data/sub') if 0 else report(1)"
        )
        == 1
    )


def test_files_while_the_code_fights_them(host: Host, box: SandboxClient) -> None:
    """A frozen, forking sandbox at its process limit still has readable and writable files."""
    program = """
        import time
        open("/mnt/data/x", "w").write("mine")
        children = []
        try:
            while True:
                child = os.fork()
                if child == 0: time.sleep(600); os._exit(0)
                children.append(child)
        except OSError: pass
        report(len(children))
    """
    assert box.ask(dedent(program)) > 100
    assert box.read_file("x") == b"mine"
    box.write_file("y", b"theirs")
    assert set(box.list_files()[0]) == {"x", "y"}


def test_many_requests_at_once(host: Host, box: SandboxClient) -> None:
    box.write_file("x", os.urandom(1000))
    threads = [threading.Thread(target=lambda: [box.list_files() for _ in range(10)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    host.neighbour.check()
    for thread in threads:
        thread.join()


def test_files_of_a_sandbox_that_is_gone(box: SandboxClient) -> None:
    box.run("os._exit(0)")
    for action in (
        box.list_files,
        lambda: box.read_file("x"),
        lambda: box.write_file("x", b""),
        lambda: box.delete_file("x"),
    ):
        with pytest.raises(DriverError, match="SandboxGone"):
            action()
