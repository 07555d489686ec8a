"""Unpacking untrusted archives: formats, limits, all or nothing."""

import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.inside.files import untrusted_files
from fumehood.sandbox_server.inside.files.archive_unpacker import UnpackLimits, UnpackOutcome
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused
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
from tests.support.unpack_target import GrantedPermit, UnpackTarget, expect_refusal

# ---- what is unpacked -------------------------------------------------------------------------------------------

MEMBERS = (("a.txt", b"a"), ("d/e/b.bin", bytes(range(256)) * 999), ("d/ü.txt", b""), ("x" * 200, b"long"))
HONEST: dict[str, tuple[str, bytes]] = {
    "pax": ("tar", make_tar(*MEMBERS)),
    "gnu": ("tar", make_tar(*MEMBERS, form=tarfile.GNU_FORMAT)),
    "gnu, very long": ("tar", make_tar(*MEMBERS[:3], ("x" * 200, b"long"), form=tarfile.GNU_FORMAT)),
    "gzip": ("tar.gz", gzip.compress(make_tar(*MEMBERS))),
    "gzip in parts": (
        "tar.gz",
        b"".join(
            gzip.compress(make_tar(*MEMBERS)[at : at + 5000])
            for at in range(0, len(make_tar(*MEMBERS)), 5000)
        )
        + bytes(100),
    ),
    "zstd": ("tar.zst", zstd.compress(make_tar(*MEMBERS))),
    "zstd in parts": (
        "tar.zst",
        zstd.compress(make_tar(*MEMBERS)[:777]) + zstd.compress(make_tar(*MEMBERS)[777:]),
    ),
    "zip": ("zip", make_zip(*MEMBERS)),
    "zip, stored": ("zip", make_zip(*MEMBERS, method=zipfile.ZIP_STORED)),
}


@pytest.mark.parametrize(("kind", "body"), HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("into", ["", "new/place"])
def test_honest_archives(unpack_target: UnpackTarget, kind: str, body: bytes, into: str) -> None:
    permit = GrantedPermit()
    done = unpack_target.unpack(body, kind, into, permit=permit)
    assert done == UnpackOutcome(files=4, size=sum(len(content) for _, content in MEMBERS), skipped=0)
    assert permit.received == len(body)
    written = {name: content for name, content in unpack_target.tree().items() if content is not None}
    prefix = f"{into}/" if into else ""
    assert written == {prefix + name: content for name, content in MEMBERS}


def test_directories_and_dots(unpack_target: UnpackTarget) -> None:
    directory = special_member("./empty/", tarfile.DIRTYPE)
    unpack_target.unpack(make_tar_of(special_member("./", tarfile.DIRTYPE), directory, directory), "tar")
    unpack_target.unpack(make_tar(("./d/./f", b"x")), "tar")
    archive = ForgedZip()
    archive.add(b"other/", b"")
    unpack_target.unpack(archive.finish(), "zip")
    assert unpack_target.tree() == {"d": None, "d/f": b"x", "empty": None, "other": None}


def test_old_directories_and_contiguous_files(unpack_target: UnpackTarget) -> None:
    body = tar_header(b"d/", 0, b"\0") + tar_header(b"d/f", 1, b"7") + pad_block(b"x") + END_OF_TAR
    unpack_target.unpack(body, "tar")
    assert unpack_target.tree() == {"d": None, "d/f": b"x"}


def test_modes_owners_and_times_are_ours(unpack_target: UnpackTarget) -> None:
    members = [special_member("plain", tarfile.REGTYPE), special_member("program", tarfile.REGTYPE)]
    members[0].mode, members[1].mode = 0o6666, 0o7777
    for about in members:
        about.uid = about.gid = 12345
        about.uname = about.gname = "root"
        about.mtime = 1
    unpack_target.unpack(make_tar_of(*members), "tar")
    modes = {path.name: path.stat() for path in unpack_target.data.iterdir()}
    assert {name: oct(about.st_mode & 0o7777) for name, about in modes.items()} == {
        "plain": "0o644",
        "program": "0o755",
    }
    assert all(about.st_uid == os.geteuid() and about.st_mtime > 1e9 for about in modes.values())


def test_links_devices_and_pipes_are_skipped(unpack_target: UnpackTarget) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    body = make_tar_of(
        *(special_member(f"m{number}", kind, "/etc/passwd") for number, kind in enumerate(kinds))
    )
    assert unpack_target.unpack(body, "tar") == UnpackOutcome(files=0, size=0, skipped=5)
    unknown = tar_header(b"v", 3, b"Z") + pad_block(b"abc") + END_OF_TAR
    assert unpack_target.unpack(unknown, "tar").skipped == 1
    link = ForgedZip()
    link.add(b"link", b"/etc/passwd", mode=0o120777)
    link.add(b"fifo", b"", mode=0o010644)
    assert unpack_target.unpack(link.finish(), "zip").skipped == 2
    assert unpack_target.tree() == {}


def test_names_of_old_zips(unpack_target: UnpackTarget) -> None:
    archive = ForgedZip()
    archive.add("ü-utf8-unsaid".encode(), b"1")
    archive.add("é-cp437".encode("cp437"), b"2")
    archive.add("日-said".encode(), b"3", flags=0x800)
    unpack_target.unpack(archive.finish(comment=b"PK\5\6 and so on"), "zip")
    assert set(unpack_target.tree()) == {"ü-utf8-unsaid", "é-cp437", "日-said"}


def test_zip64(unpack_target: UnpackTarget) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("big", "w", force_zip64=True) as file:
        file.write(b"x" * 1000)
    unpack_target.unpack(buffer.getvalue(), "zip")
    unpack_target.unpack(long_zip(b"far", b"y"), "zip")
    assert unpack_target.tree() == {"big": b"x" * 1000, "far": b"y"}


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


def test_an_archive_in_an_archive_stays_packed(unpack_target: UnpackTarget) -> None:
    inner = make_zip(("x", b"y"))
    unpack_target.unpack(make_tar(("inner.zip", inner)), "tar")
    assert unpack_target.tree() == {"inner.zip": inner}


def test_empty_archives(unpack_target: UnpackTarget) -> None:
    for body, kind in (
        (END_OF_TAR, "tar"),
        (gzip.compress(END_OF_TAR), "tar.gz"),
        (ForgedZip().finish(), "zip"),
    ):
        assert unpack_target.unpack(body, kind, "new") == UnpackOutcome(0, 0, 0)
    assert unpack_target.tree() == {}


# ---- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.zst"])
def test_bombs(unpack_target: UnpackTarget, kind: str) -> None:
    zeros = bytes(8 << 20)
    body = {
        "zip": make_zip(("f", zeros)),
        "tar": make_tar(("f", zeros)),
        "tar.gz": gzip.compress(make_tar(("f", zeros))),
        "tar.zst": zstd.compress(make_tar(("f", zeros))),
    }[kind]
    error = expect_refusal(
        unpack_target, body, kind, "more than 1000000 bytes", limits=UnpackLimits(members=10, size=1_000_000)
    )
    assert error.kind == "too_large"


def test_a_bomb_behind_the_end(unpack_target: UnpackTarget) -> None:
    body = gzip.compress(END_OF_TAR + bytes(80 << 20))
    assert (
        expect_refusal(unpack_target, body, "tar.gz", "more than", limits=UnpackLimits(10, 1000)).kind
        == "too_large"
    )


@pytest.mark.parametrize("make", [make_tar, make_zip], ids=["tar", "zip"])
def test_too_many_members(unpack_target: UnpackTarget, make: Callable[..., bytes]) -> None:
    body = make(*((str(number), b"") for number in range(11)))
    kind = "tar" if make is make_tar else "zip"
    assert (
        expect_refusal(unpack_target, body, kind, "more than 10 members", limits=UnpackLimits(10, 100)).kind
        == "too_large"
    )
    links = make_tar_of(*(special_member(str(number), tarfile.SYMTYPE, "x") for number in range(11)))
    assert (
        expect_refusal(unpack_target, links, "tar", "more than 10 members", limits=UnpackLimits(10, 100)).kind
        == "too_large"
    )


def test_too_many_names(unpack_target: UnpackTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted_files, "MAX_NAME_BYTES", 100)
    expect_refusal(
        unpack_target, make_tar(*((f"{number}" * 60, b"") for number in range(3))), "tar", "too long in total"
    )


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_no_quota(unpack_target: UnpackTarget, kind: str) -> None:
    """The sandbox's memory is used up while it is unpacked."""
    body = (
        make_zip(("a", bytes(1000)), ("b", bytes(1 << 20)))
        if kind == "zip"
        else make_tar(("b", bytes(1 << 20)))
    )
    with pytest.raises(FileTaskRefused, match="no quota left"):
        unpack_target.unpack(body, kind, permit=GrantedPermit(quota=100_000))
    assert unpack_target.tree() == {}


def test_zstd_windows_are_bounded(unpack_target: UnpackTarget) -> None:
    options = {
        int(zstd.CompressionParameter.window_log): 27,
        int(zstd.CompressionParameter.compression_level): 1,
    }
    body = zstd.compress(make_tar(("f", os.urandom(40 << 20))), options=options)
    expect_refusal(unpack_target, body, "tar.zst", "damaged")


def test_without_zstd(unpack_target: UnpackTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fumehood.sandbox_server.inside.files.decompression._ZSTD_MODULES", ("no_such_module",)
    )
    expect_refusal(unpack_target, zstd.compress(END_OF_TAR), "tar.zst", "has no zstd; use tar.gz or zip")


# ---- all or nothing ---------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_on_success(unpack_target: UnpackTarget) -> None:
    (unpack_target.data / "f").write_bytes(b"old")
    (unpack_target.data / "link").symlink_to("/etc/passwd")
    os.mkfifo(unpack_target.data / "fifo")
    inode = (unpack_target.data / "f").stat().st_ino
    unpack_target.unpack(make_tar(("f", b"new"), ("link", b"a file now"), ("fifo", b"too")), "tar")
    assert unpack_target.tree() == {"f": b"new", "link": b"a file now", "fifo": b"too"}
    assert (unpack_target.data / "f").stat().st_ino != inode


def test_what_is_there_is_kept_on_failure(unpack_target: UnpackTarget) -> None:
    """The last member cannot be placed: all others, placed already, go back."""
    (unpack_target.data / "f").write_bytes(b"old")
    (unpack_target.data / "link").symlink_to("/nowhere")
    (unpack_target.data / "d").mkdir()
    (unpack_target.data / "d" / "kept").write_bytes(b"kept")
    (unpack_target.data / "z").mkdir()
    inode = (unpack_target.data / "f").stat().st_ino
    body = make_tar(("f", b"new"), ("link", b"new"), ("d/x/y/new", b"new"), ("d/kept", b"new"), ("z", b"x"))
    expect_refusal(unpack_target, body, "tar", "z: a directory of that name exists")
    assert (unpack_target.data / "f").stat().st_ino == inode
    assert os.readlink(unpack_target.data / "link") == "/nowhere"


def test_a_file_or_a_link_where_a_directory_would_be(unpack_target: UnpackTarget, tmp_path: Path) -> None:
    (unpack_target.data / "file").write_bytes(b"old")
    (unpack_target.data / "link").symlink_to(tmp_path)
    for name in ("file/x", "link/x"):
        expect_refusal(
            unpack_target, make_tar(("a", b"new"), (name, b"x")), "tar", "Not a directory|symbolic links"
        )
    expect_refusal(
        unpack_target, make_tar_of(special_member("file", tarfile.DIRTYPE)), "tar", "Not a directory"
    )
    with pytest.raises(FileTaskRefused):
        unpack_target.unpack(make_tar(("x", b"x")), "tar", "link")


# ---- whatever it is ---------------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["..", ".", "", "a", "b", "c:", "\\", "\0", "ü"]), max_size=6).map("/".join),
)


@dataclass
class Jail:
    """A directory within a directory, for examples that share one test."""

    outer: Path
    unpack_target: UnpackTarget


@pytest.fixture(scope="module")
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    outer = tmp_path_factory.mktemp("outer")
    (outer / "data").mkdir()
    fd = os.open(outer / "data", os.O_RDONLY | os.O_DIRECTORY)
    yield Jail(outer, UnpackTarget(outer / "data", fd))
    os.close(fd)


def attempt(jail: Jail, body: bytes, kind: str) -> None:
    before = set(jail.unpack_target.tree())
    try:
        jail.unpack_target.unpack(body, kind)
    except FileTaskRefused:
        assert set(jail.unpack_target.tree()) == before
    assert os.listdir(jail.outer) == ["data"]
    assert not [
        name
        for name in os.listdir(jail.unpack_target.data)
        if name.startswith(untrusted_files.RESERVED_PREFIX)
    ]
    assert not any(path.is_symlink() for path in jail.unpack_target.data.rglob("*"))


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
        body += bytes(block) + pad_block(content)
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
    attempt(jail, archive.finish(), "zip")


@given(data=st.data(), kind=st.sampled_from(["zip", "tar", "tar.gz", "tar.zst"]))
def test_a_damaged_archive_leaves_all_or_nothing(jail: Jail, data: st.DataObject, kind: str) -> None:
    body = bytearray(
        {
            "zip": make_zip(("a", b"x" * 100), ("d/b", b"y")),
            "tar": make_tar(("a", b"x" * 100), ("d/b", b"y")),
            "tar.gz": gzip.compress(make_tar(("a", b"x" * 100))),
            "tar.zst": zstd.compress(make_tar(("a", b"x" * 100))),
        }[kind]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    attempt(jail, bytes(body), kind)
