"""Attacks by uploaded archives, and by code on the helper that unpacks them."""

import gzip
import tarfile
import time
from textwrap import dedent

import pytest

from fumehood.sandbox_server.settings import SandboxServerSettings
from tests.attacks.conftest import Host
from tests.support.archives import (
    END_OF_TAR,
    ForgedZip,
    make_tar,
    make_tar_of,
    make_zip,
    pad_block,
    special_member,
    tar_header,
)
from tests.support.driver_client import DriverError, SandboxClient

# What is in all the places that code can write, and what the helper left of itself there.
EVERYTHING = """
import stat
found = {}
for top in ("/mnt/data", "/tmp", "/home/user", "/dev/shm"):
    for here, below, names in os.walk(top):
        for name in names + below:
            path = os.path.join(here, name)
            if ".config" not in path: found[path] = oct(os.lstat(path).st_mode)
report(found)
"""

SLIPS = [
    "../slipped",
    "a/../../slipped",
    "/tmp/slipped",
    "//tmp/slipped",
    "/mnt/data/slipped",
    "..\\slipped",
    "C:\\slipped",
    "c:slipped",
    "a/" * 40 + "slipped",
    "x" * 300,
    "../../../../../../../../tmp/slipped",
    ".fumehood-slipped/0",
]


def test_archive_slip(box: SandboxClient) -> None:
    for name in SLIPS:
        for kind, body in (
            ("tar", make_tar(("first", b"x"), (name, b"slipped"))),
            ("tar.gz", gzip.compress(make_tar(("first", b"x"), (name, b"slipped")))),
            ("zip", make_zip(("first", b"x"), (name, b"slipped"))),
        ):
            with pytest.raises(DriverError) as refusal:
                box.unpack(body, kind)
            assert refusal.value.kind == "FileRefused", name
            assert refusal.value.text.isprintable()
    for into in ("..", "/tmp", "a/../../tmp", "a/../b", ".fumehood-x"):
        with pytest.raises(DriverError, match="FileRefused"):
            box.unpack(END_OF_TAR, "tar", into)
    assert box.ask(EVERYTHING) == {}


def test_slip_through_a_link(box: SandboxClient) -> None:
    """A link of the archive's own is skipped; one of the code's is refused."""
    chain = make_tar_of(
        special_member("d", tarfile.SYMTYPE, "/tmp"), special_member("h", tarfile.LNKTYPE, "/etc/passwd")
    )[:1024]
    chain += tar_header(b"d/f", 1) + pad_block(b"x") + END_OF_TAR
    unpacked = box.unpack(chain, "tar")
    assert (unpacked["files"], unpacked["bytes"], unpacked["skipped"]) == (1, 1, 2)
    link = ForgedZip()
    link.add(b"e", b"/tmp", mode=0o120777)
    link.add(b"e/f", b"x")
    assert box.unpack(link.finish(), "zip")["skipped"] == 1
    box.run("os.symlink('/tmp', '/mnt/data/mine')")
    for into, name in (("", "mine/f"), ("mine", "f")):
        with pytest.raises(DriverError, match="FileRefused"):
            box.unpack(make_tar((name, b"x")), "tar", into)
    found = box.ask(EVERYTHING)
    assert sorted(found) == [f"/mnt/data/{path}" for path in ("d", "d/f", "e", "e/f", "mine")]


def test_rights_of_what_is_unpacked(box: SandboxClient) -> None:
    program = special_member("s", tarfile.REGTYPE)
    program.mode, program.uid, program.gid = 0o7777, 0, 0
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    devices = [special_member(f"dev{number}", kind) for number, kind in enumerate(kinds)]
    assert box.unpack(make_tar_of(program, *devices), "tar")["skipped"] == 3
    about = box.ask(
        "s = os.stat('/mnt/data/s'); report([s.st_uid, s.st_gid, oct(s.st_mode), len(os.listdir('/mnt/data'))])"
    )
    assert about == [1000, 1000, "0o100755", 1]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_bombs_end_at_the_quota(host: Host, box: SandboxClient, kind: str) -> None:
    """A thousandth of what comes out goes in; the code's variables stay, and so does what was there."""
    fill = "file = os.open('/dev/shm/fill', os.O_CREAT | os.O_RDWR); os.posix_fallocate(file, 0, 470 << 20)"
    assert box.run(f"kept = 'kept'; open('/mnt/data/f', 'w').write('old'); {fill}").end.status == "ok"
    zeros = bytes(64 << 20)
    body = (
        gzip.compress(make_tar(("g", b"x"), ("f", zeros)), 1) if kind == "tar.gz" else make_zip(("f", zeros))
    )
    with pytest.raises(DriverError) as refusal:
        box.unpack(body, kind)
    assert refusal.value.kind == "FileRefused"
    assert "quota" in refusal.value.text or "memory" in refusal.value.text
    assert box.ask("report([kept, open('/mnt/data/f').read()])") == ["kept", "old"]
    assert list(box.ask(EVERYTHING)) == ["/mnt/data/f", "/dev/shm/fill"]


def test_an_archive_of_many_files(host: Host, box: SandboxClient) -> None:
    body = make_tar(*((f"d{number % 50}/{number}", b"") for number in range(3_000)))
    assert box.unpack(body, "tar")["files"] == 3_000
    with pytest.raises(DriverError, match="SandboxPayloadTooLarge"):
        box.unpack(
            make_tar(*((str(number), b"") for number in range(SandboxServerSettings().unpacked_members + 1))),
            "tar",
        )
    assert len(box.list_files()[0]) == 3_000


FIGHTS = {
    "directories and links": """
        os.makedirs("/tmp/elsewhere"); os.mkdir("/mnt/data/d")
        def step():
            os.rename("/mnt/data/d", "/mnt/data/e"); os.symlink("/tmp/elsewhere", "/mnt/data/d")
            os.unlink("/mnt/data/d"); os.rename("/mnt/data/e", "/mnt/data/d")
    """,
    "what is aside": """
        os.makedirs("/tmp/elsewhere")
        def step():
            for name in os.listdir("/mnt/data"):
                if name.startswith(".fumehood"):
                    os.rename(f"/mnt/data/{name}", "/mnt/data/stolen")
                    os.symlink("/tmp/elsewhere", f"/mnt/data/{name}")
    """,
    "members aside": """
        os.makedirs("/tmp/elsewhere")
        def step():
            for name in os.listdir("/mnt/data"):
                if name.startswith(".fumehood"):
                    for number in range(40):
                        try: os.symlink("/tmp/elsewhere/x", f"/mnt/data/{name}/{number}")
                        except FileExistsError: pass
                    for member in os.listdir(f"/mnt/data/{name}"):
                        os.unlink(f"/mnt/data/{name}/{member}")
                        os.symlink("/tmp/elsewhere/x", f"/mnt/data/{name}/{member}")
    """,
}


@pytest.mark.parametrize("fight", FIGHTS.values(), ids=FIGHTS)
def test_code_that_fights_the_unpacking(host: Host, box: SandboxClient, fight: str) -> None:
    """It can spoil what it owns; it cannot make the helper write elsewhere, and it holds nobody up."""
    loop = """
        print("on", flush=True)
        while True:
            try: step()
            except OSError: pass
    """
    running = box.start(dedent(fight) + dedent(loop), timeout=60)
    running.until_stdout("on")
    body = make_tar(*((f"d/{number}", b"x" * 5000) for number in range(40)))
    began = time.monotonic()
    refusals: set[str] = set()
    for number in range(12):
        try:
            box.unpack(body, "tar")
            box.write_file(f"d/w{number}", b"x")
        except DriverError as error:
            refusals.add(error.kind)
    assert refusals <= {"FileRefused"}
    assert time.monotonic() - began < 60
    box.interrupt()
    assert running.outcome().end.status == "interrupted"
    assert box.ask("report(os.listdir('/tmp/elsewhere'))") == []


def test_unpacking_for_a_sandbox_at_its_process_limit(host: Host, box: SandboxClient) -> None:
    program = """
        import time
        children = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(600); os._exit(0)
                children += 1
        except OSError: pass
        report(children)
    """
    assert box.ask(dedent(program)) > 100
    assert box.unpack(make_zip(("a", b"x")), "zip")["files"] == 1
