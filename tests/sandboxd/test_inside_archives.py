"""Archives of untrusted authors: formats, forgeries, bounds, all or nothing; imports `fumehood.sandboxd.inside`."""

import contextlib
import gzip
import io
import os
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandboxd.inside import files
from fumehood.sandboxd.inside.archives import Bounds, Done
from fumehood.sandboxd.inside.leave import Refused
from tests.support.archives import (
    END_OF_TAR,
    ForgedZip,
    padded,
    special,
    tar,
    tar_header,
    tar_of,
    zipped,
)
from tests.support.unpacking import Granted, Place, refused

# ---- what is unpacked -------------------------------------------------------------------------------------------

MEMBERS = (("a.txt", b"a"), ("d/e/b.bin", bytes(range(256)) * 999), ("d/ü.txt", b""), ("x" * 200, b"long"))
HONEST: dict[str, tuple[str, bytes]] = {
    "pax": ("tar", tar(*MEMBERS)),
    "gnu": ("tar", tar(*MEMBERS, form=tarfile.GNU_FORMAT)),
    "gnu, very long": ("tar", tar(*MEMBERS[:3], ("x" * 200, b"long"), form=tarfile.GNU_FORMAT)),
    "gzip": ("tar.gz", gzip.compress(tar(*MEMBERS))),
    "gzip in parts": (
        "tar.gz",
        b"".join(gzip.compress(tar(*MEMBERS)[at : at + 5000]) for at in range(0, len(tar(*MEMBERS)), 5000))
        + bytes(100),
    ),
    "zstd": ("tar.zst", zstd.compress(tar(*MEMBERS))),
    "zstd in parts": ("tar.zst", zstd.compress(tar(*MEMBERS)[:777]) + zstd.compress(tar(*MEMBERS)[777:])),
    "zip": ("zip", zipped(*MEMBERS)),
    "zip, stored": ("zip", zipped(*MEMBERS, method=zipfile.ZIP_STORED)),
}


@pytest.mark.parametrize(("kind", "body"), HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("into", ["", "new/place"])
def test_honest_archives(place: Place, kind: str, body: bytes, into: str) -> None:
    leave = Granted()
    done = place.unpack(body, kind, into, leave=leave)
    assert done == Done(files=4, size=sum(len(content) for _, content in MEMBERS), skipped=0)
    assert leave.received == len(body)
    written = {name: content for name, content in place.tree().items() if content is not None}
    prefix = f"{into}/" if into else ""
    assert written == {prefix + name: content for name, content in MEMBERS}


def test_directories_and_dots(place: Place) -> None:
    directory = special("./empty/", tarfile.DIRTYPE)
    place.unpack(tar_of(special("./", tarfile.DIRTYPE), directory, directory), "tar")
    place.unpack(tar(("./d/./f", b"x")), "tar")
    archive = ForgedZip()
    archive.add(b"other/", b"")
    place.unpack(archive.done(), "zip")
    assert place.tree() == {"d": None, "d/f": b"x", "empty": None, "other": None}


def test_old_directories_and_contiguous_files(place: Place) -> None:
    body = tar_header(b"d/", 0, b"\0") + tar_header(b"d/f", 1, b"7") + padded(b"x") + END_OF_TAR
    place.unpack(body, "tar")
    assert place.tree() == {"d": None, "d/f": b"x"}


def test_modes_owners_and_times_are_ours(place: Place) -> None:
    members = [special("plain", tarfile.REGTYPE), special("program", tarfile.REGTYPE)]
    members[0].mode, members[1].mode = 0o6666, 0o7777
    for about in members:
        about.uid = about.gid = 12345
        about.uname = about.gname = "root"
        about.mtime = 1
    place.unpack(tar_of(*members), "tar")
    modes = {path.name: path.stat() for path in place.data.iterdir()}
    assert {name: oct(about.st_mode & 0o7777) for name, about in modes.items()} == {
        "plain": "0o644",
        "program": "0o755",
    }
    assert all(about.st_uid == os.geteuid() and about.st_mtime > 1e9 for about in modes.values())


def test_links_devices_and_pipes_are_skipped(place: Place) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    body = tar_of(*(special(f"m{number}", kind, "/etc/passwd") for number, kind in enumerate(kinds)))
    assert place.unpack(body, "tar") == Done(files=0, size=0, skipped=5)
    unknown = tar_header(b"v", 3, b"Z") + padded(b"abc") + END_OF_TAR
    assert place.unpack(unknown, "tar").skipped == 1
    link = ForgedZip()
    link.add(b"link", b"/etc/passwd", mode=0o120777)
    link.add(b"fifo", b"", mode=0o010644)
    assert place.unpack(link.done(), "zip").skipped == 2
    assert place.tree() == {}


def test_a_link_in_the_archive_is_not_followed(place: Place) -> None:
    """The link is skipped, so what is below its name goes into a directory of that name."""
    first = tar_of(special("d", tarfile.SYMTYPE, "/tmp"))[:512]
    body = first + tar_header(b"d/f", 1) + padded(b"x") + END_OF_TAR
    place.unpack(body, "tar")
    assert place.tree() == {"d": None, "d/f": b"x"}


def test_names_of_old_zips(place: Place) -> None:
    archive = ForgedZip()
    archive.add("ü-utf8-unsaid".encode(), b"1")
    archive.add("é-cp437".encode("cp437"), b"2")
    archive.add("日-said".encode(), b"3", flags=0x800)
    place.unpack(archive.done(comment=b"PK\5\6 and so on"), "zip")
    assert set(place.tree()) == {"ü-utf8-unsaid", "é-cp437", "日-said"}


def test_zip64(place: Place) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("big", "w", force_zip64=True) as file:
        file.write(b"x" * 1000)
    place.unpack(buffer.getvalue(), "zip")
    place.unpack(long_zip(b"far", b"y"), "zip")
    assert place.tree() == {"big": b"x" * 1000, "far": b"y"}


def long_zip(name: bytes, content: bytes) -> bytes:
    """Everything in its long form."""
    archive = ForgedZip()
    at = archive.local(name, content, method=0, packed=0xFFFFFFFF, size=0xFFFFFFFF)
    archive.entry(name, content, 0xFFFFFFFF, method=0, packed=0xFFFFFFFF, size=0xFFFFFFFF)
    extra = struct.pack("<2H3Q", 1, 24, len(content), len(content), at)
    table = archive.table[:30] + struct.pack("<H", len(extra)) + archive.table[32:] + extra
    start = len(archive.body)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(table), start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(table), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return archive.body + table + end64 + locator + end


def test_an_archive_in_an_archive_stays_packed(place: Place) -> None:
    inner = zipped(("x", b"y"))
    place.unpack(tar(("inner.zip", inner)), "tar")
    assert place.tree() == {"inner.zip": inner}


def test_empty_archives(place: Place) -> None:
    for body, kind in (
        (END_OF_TAR, "tar"),
        (gzip.compress(END_OF_TAR), "tar.gz"),
        (ForgedZip().done(), "zip"),
    ):
        assert place.unpack(body, kind, "new") == Done(0, 0, 0)
    assert place.tree() == {}


# ---- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.zst"])
def test_bombs(place: Place, kind: str) -> None:
    zeros = bytes(8 << 20)
    body = {
        "zip": zipped(("f", zeros)),
        "tar": tar(("f", zeros)),
        "tar.gz": gzip.compress(tar(("f", zeros))),
        "tar.zst": zstd.compress(tar(("f", zeros))),
    }[kind]
    error = refused(place, body, kind, "more than 1000000 bytes", bounds=Bounds(members=10, size=1_000_000))
    assert error.kind == "too_large"


def test_a_bomb_behind_the_end(place: Place) -> None:
    body = gzip.compress(END_OF_TAR + bytes(80 << 20))
    assert refused(place, body, "tar.gz", "more than", bounds=Bounds(10, 1000)).kind == "too_large"


@pytest.mark.parametrize("make", [tar, zipped], ids=["tar", "zip"])
def test_too_many_members(place: Place, make: Callable[..., bytes]) -> None:
    body = make(*((str(number), b"") for number in range(11)))
    kind = "tar" if make is tar else "zip"
    assert refused(place, body, kind, "more than 10 members", bounds=Bounds(10, 100)).kind == "too_large"
    links = tar_of(*(special(str(number), tarfile.SYMTYPE, "x") for number in range(11)))
    assert refused(place, links, "tar", "more than 10 members", bounds=Bounds(10, 100)).kind == "too_large"


def test_too_many_names(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_NAME_BYTES", 100)
    refused(place, tar(*((f"{number}" * 60, b"") for number in range(3))), "tar", "too long together")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_no_leave(place: Place, kind: str) -> None:
    """The sandbox's memory is used up while it is unpacked."""
    body = zipped(("a", bytes(1000)), ("b", bytes(1 << 20))) if kind == "zip" else tar(("b", bytes(1 << 20)))
    with pytest.raises(Refused, match="no room"):
        place.unpack(body, kind, leave=Granted(room=100_000))
    assert place.tree() == {}


def test_zstd_windows_are_bounded(place: Place) -> None:
    options = {
        int(zstd.CompressionParameter.window_log): 27,
        int(zstd.CompressionParameter.compression_level): 1,
    }
    body = zstd.compress(tar(("f", os.urandom(40 << 20))), options=options)
    refused(place, body, "tar.zst", "damaged")


def test_without_zstd(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.sandboxd.inside.decoding._ZSTD_MODULES", ("no_such_module",))
    refused(place, zstd.compress(END_OF_TAR), "tar.zst", "has no zstd; use tar.gz or zip")


# ---- all or nothing ---------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_on_success(place: Place) -> None:
    (place.data / "f").write_bytes(b"old")
    (place.data / "link").symlink_to("/etc/passwd")
    os.mkfifo(place.data / "fifo")
    inode = (place.data / "f").stat().st_ino
    place.unpack(tar(("f", b"new"), ("link", b"a file now"), ("fifo", b"too")), "tar")
    assert place.tree() == {"f": b"new", "link": b"a file now", "fifo": b"too"}
    assert (place.data / "f").stat().st_ino != inode


def test_what_is_there_is_kept_on_failure(place: Place) -> None:
    """The last member cannot be placed: all others, placed already, go back."""
    (place.data / "f").write_bytes(b"old")
    (place.data / "link").symlink_to("/nowhere")
    (place.data / "d").mkdir()
    (place.data / "d" / "kept").write_bytes(b"kept")
    (place.data / "z").mkdir()
    inode = (place.data / "f").stat().st_ino
    body = tar(("f", b"new"), ("link", b"new"), ("d/x/y/new", b"new"), ("d/kept", b"new"), ("z", b"x"))
    refused(place, body, "tar", "z: a directory is there already")
    assert (place.data / "f").stat().st_ino == inode
    assert os.readlink(place.data / "link") == "/nowhere"


def test_a_file_or_a_link_where_a_directory_would_be(place: Place, tmp_path: Path) -> None:
    (place.data / "file").write_bytes(b"old")
    (place.data / "link").symlink_to(tmp_path)
    for name in ("file/x", "link/x"):
        refused(place, tar(("a", b"new"), (name, b"x")), "tar", "Not a directory|symbolic links")
    refused(place, tar_of(special("file", tarfile.DIRTYPE)), "tar", "Not a directory")
    with pytest.raises(Refused):
        place.unpack(tar(("x", b"x")), "tar", "link")


def test_into_must_be_safe(place: Place) -> None:
    for into in ("..", "/tmp", "a/../b", ".fumehood-x"):
        with pytest.raises(files.UnsafePath):
            place.unpack(END_OF_TAR, "tar", into)
    assert place.tree() == {}


def test_directories_swapped_for_links_lead_nowhere(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    stop = threading.Event()
    (place.data / "d").mkdir()

    def swap() -> None:
        while not stop.is_set():
            for step in (
                lambda: os.rename(place.data / "d", place.data / "kept"),
                lambda: os.symlink(outside, place.data / "d"),
                lambda: os.unlink(place.data / "d"),
                lambda: os.rename(place.data / "kept", place.data / "d"),
            ):
                with contextlib.suppress(OSError):
                    step()

    body = tar(*((f"d/{number}", b"x") for number in range(20)))
    thread = threading.Thread(target=swap)
    thread.start()
    outcomes: set[str] = set()
    try:
        for _ in range(30):
            try:
                place.unpack(body, "tar")
                outcomes.add("done")
            except Refused:
                outcomes.add("refused")
    finally:
        stop.set()
        thread.join()
    assert outcomes
    assert list(outside.iterdir()) == []


# ---- whatever it is ---------------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["..", ".", "", "a", "b", "c:", "\\", "\0", "ü"]), max_size=6).map("/".join),
)


@dataclass
class Jail:
    """A directory within a directory, for examples that share one test."""

    outer: Path
    place: Place


@pytest.fixture(scope="module")
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    outer = tmp_path_factory.mktemp("outer")
    (outer / "data").mkdir()
    fd = os.open(outer / "data", os.O_RDONLY | os.O_DIRECTORY)
    yield Jail(outer, Place(outer / "data", fd))
    os.close(fd)


def attempt(jail: Jail, body: bytes, kind: str) -> None:
    before = set(jail.place.tree())
    try:
        jail.place.unpack(body, kind)
    except Refused:
        assert set(jail.place.tree()) == before
    assert os.listdir(jail.outer) == ["data"]
    assert not [name for name in os.listdir(jail.place.data) if name.startswith(files.RESERVED)]
    assert not any(path.is_symlink() for path in jail.place.data.rglob("*"))


@given(
    members=st.lists(
        st.tuples(NAMES, st.sampled_from(b"0123567LKxgSZ\0"), NAMES, st.binary(max_size=50)), max_size=5
    )
)
def test_any_tar_stays_inside(jail: Jail, members: list[tuple[str, int, str, bytes]]) -> None:
    body = b""
    for name, kind, target, content in members:
        raw = name.encode()[:99]
        block = bytearray(tar_header(raw, len(content), bytes([kind])))
        block[157 : 157 + len(target.encode()[:99])] = target.encode()[:99]
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
        body += bytes(block) + padded(content)
    attempt(jail, body + END_OF_TAR, "tar")


@given(
    members=st.lists(
        st.tuples(NAMES, st.binary(max_size=50), st.sampled_from([0, 0o644, 0o120777, 0o040755, 0o010644])),
        max_size=5,
    )
)
def test_any_zip_stays_inside(jail: Jail, members: list[tuple[str, bytes, int]]) -> None:
    archive = ForgedZip()
    for name, content, mode in members:
        archive.add(name.encode(errors="surrogatepass"), content, mode=mode, flags=0x800)
    attempt(jail, archive.done(), "zip")


@given(data=st.data(), kind=st.sampled_from(["zip", "tar", "tar.gz", "tar.zst"]))
def test_a_damaged_archive_leaves_all_or_nothing(jail: Jail, data: st.DataObject, kind: str) -> None:
    body = bytearray(
        {
            "zip": zipped(("a", b"x" * 100), ("d/b", b"y")),
            "tar": tar(("a", b"x" * 100), ("d/b", b"y")),
            "tar.gz": gzip.compress(tar(("a", b"x" * 100))),
            "tar.zst": zstd.compress(tar(("a", b"x" * 100))),
        }[kind]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    attempt(jail, bytes(body), kind)
