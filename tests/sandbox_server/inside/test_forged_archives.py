"""Forged archives: names, headers, central directories."""

import contextlib
import gzip
import os
from collections.abc import Callable

import pytest
from backports import zstd

from fumehood.sandbox_server.inside.files.archive_unpacker import UnpackLimits
from tests.support.archives import (
    END_OF_TAR,
    ForgedZip,
    forge_zip,
    make_tar,
    make_zip,
    pad_block,
    pax_header,
    tar_header,
)
from tests.support.unpack_target import UnpackTarget, expect_refusal

MEMBERS = (("a.txt", b"a"), ("d/e/b.bin", bytes(range(256)) * 999), ("x" * 200, b"long"))


# ---- names ------------------------------------------------------------------------------------------------------

BAD_NAMES = {
    "/etc/passwd": "absolute",
    "../x": "relative",
    "a/../../x": "relative",
    "a/..": "relative",
    "C:/x": "absolute",
    "c:x": "absolute",
    "a\\b": "backslash",
    "..\\x": "backslash",
    "y" * 256: "255 bytes",
    "/".join("d" * 40): "32 parts",
    ".fumehood-x": "server's own",
    ".fumehood-token/0": "server's own",
}


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES.items())
@pytest.mark.parametrize("make", [make_tar, make_zip], ids=["tar", "zip"])
def test_bad_names(unpack_target: UnpackTarget, name: str, reason: str, make: Callable[..., bytes]) -> None:
    kind = "tar" if make is make_tar else "zip"
    expect_refusal(unpack_target, make(("before", b"x"), (name, b"x")), kind, reason)


def test_names_that_are_no_text(unpack_target: UnpackTarget) -> None:
    expect_refusal(unpack_target, tar_header(b"\xff\xfe", 0) + END_OF_TAR, "tar", "UTF-8")
    expect_refusal(
        unpack_target, forge_zip(lambda archive: archive.add(b"\xff", b"", flags=0x800)), "zip", "UTF-8"
    )
    expect_refusal(unpack_target, forge_zip(lambda archive: archive.add(b"a\0b", b"")), "zip", "NUL")
    long_name = (
        tar_header(b"././@LongLink", 4, b"L") + pad_block(b"a\0b\0") + tar_header(b"x", 0) + END_OF_TAR
    )
    expect_refusal(unpack_target, long_name, "tar", "relative")


def test_a_file_without_a_name(unpack_target: UnpackTarget) -> None:
    expect_refusal(unpack_target, tar_header(b"./.", 0) + END_OF_TAR, "tar", "has no name")
    expect_refusal(unpack_target, tar_header(b"", 0) + END_OF_TAR, "tar", "has no name")


@pytest.mark.parametrize("make", [make_tar, make_zip], ids=["tar", "zip"])
def test_names_that_contradict_each_other(unpack_target: UnpackTarget, make: Callable[..., bytes]) -> None:
    kind = "tar" if make is make_tar else "zip"
    with pytest.warns(UserWarning, match="Duplicate name") if make is make_zip else contextlib.nullcontext():
        twice = make(("f", b"1"), ("f", b"2"))
    expect_refusal(unpack_target, twice, kind, "twice")
    expect_refusal(unpack_target, make(("f", b"1"), ("f/g", b"2")), kind, "both a file and a directory")
    expect_refusal(unpack_target, make(("f/g", b"1"), ("f", b"2")), kind, "twice")


# ---- forgeries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.zst"])
def test_cut_short_anywhere(unpack_target: UnpackTarget, kind: str) -> None:
    body = {
        "zip": make_zip(*MEMBERS),
        "tar": make_tar(*MEMBERS).rstrip(b"\0") + END_OF_TAR[:512],
        "tar.gz": gzip.compress(make_tar(*MEMBERS)),
        "tar.zst": zstd.compress(make_tar(*MEMBERS)),
    }[kind]
    lengths = {0, 1, 100, 511, 512, 513, len(body) // 2, len(body) - 513, len(body) - 1}
    for length in sorted(length for length in lengths if 0 <= length < len(body)):
        expect_refusal(unpack_target, body[:length], kind, "cut short|not a|damaged|follows")


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.zst"])
def test_nothing_may_follow(unpack_target: UnpackTarget, kind: str) -> None:
    body = {
        "zip": make_zip(*MEMBERS),
        "tar": make_tar(*MEMBERS),
        "tar.gz": gzip.compress(make_tar(*MEMBERS)),
        "tar.zst": zstd.compress(make_tar(*MEMBERS)),
    }[kind]
    for rest in (b"garbage" * 100, bytes(5) + b"garbage", body):
        expect_refusal(unpack_target, body + rest, kind, "follows|damaged|not where it says|overlap")


def test_something_else_altogether(unpack_target: UnpackTarget) -> None:
    for body in (b"", b"hello", b"x" * 2000, make_zip(("a", b"b")), os.urandom(5000)):
        expect_refusal(unpack_target, body, "tar", "not a tar|cut short")
        expect_refusal(unpack_target, body, "tar.gz", "damaged|cut short")
        expect_refusal(unpack_target, body, "tar.zst", "damaged|cut short")
    for body in (b"", b"hello", make_tar(("a", b"b"))):
        expect_refusal(unpack_target, body, "zip", "not a zip")


def test_forged_tars(unpack_target: UnpackTarget) -> None:
    member = tar_header(b"f", 1) + pad_block(b"x") + END_OF_TAR
    cases = {
        "sparse members": tar_header(b"s", 0, b"S") + END_OF_TAR,
        "has sparse": pax_header(("GNU.sparse.major", "1")) + member,
        "header of": tar_header(b"p", 1 << 30, b"x") + member,
        "header of 8589934591": tar_header(b"L", 8589934591, b"L") + member,
        "same path": pax_header(("path", "x"), kind=b"g") + member,
        "same size": pax_header(("size", "9"), kind=b"g") + member,
        "extended header": tar_header(b"p", 10, b"x") + pad_block(b"99 path=x\n") + member,
        "extended header is": tar_header(b"p", 10, b"x") + pad_block(b"0000000000") + member,
        "header is unreadable": pax_header(("size", "-1")) + member,
        "unreadable": tar_header(b"f", 0, raw_size=b"\xff" * 12) + END_OF_TAR,
        "size is": tar_header(b"f", 0, raw_size=b"zzz\0zzz\0zzz\0") + END_OF_TAR,
        "cut short": tar_header(b"f", 0, raw_size=b"\x80" + b"\xff" * 11) + END_OF_TAR,
        "checksum": member[:1024] + b"x" * 512 + END_OF_TAR,
        "end mark in its middle": member[:1024] + bytes(512) + member,
        "belongs to a member": pax_header(("path", "x")) + END_OF_TAR,
    }
    for reason, body in cases.items():
        expect_refusal(unpack_target, body, "tar", reason)


def test_a_path_of_its_own_in_pax(unpack_target: UnpackTarget) -> None:
    body = (
        pax_header(("path", "deep/ü"), ("size", "2"), ("comment", "c"))
        + tar_header(b"f", 0)
        + pad_block(b"xy")
    )
    unpack_target.unpack(pax_header(("comment", "git"), kind=b"g") + body + END_OF_TAR, "tar")
    assert unpack_target.tree() == {"deep": None, "deep/ü": b"xy"}
    expect_refusal(
        unpack_target, pax_header(("path", "../up")) + tar_header(b"f", 0) + END_OF_TAR, "tar", "relative"
    )


def test_endless_headers(unpack_target: UnpackTarget) -> None:
    body = pax_header(("path", "x")) * 100 + END_OF_TAR
    error = expect_refusal(
        unpack_target, body, "tar", "too many headers", limits=UnpackLimits(members=10, size=1000)
    )
    assert error.kind == "too_large"


def test_forged_zips(unpack_target: UnpackTarget) -> None:
    def lying(**lies: int) -> Callable[[ForgedZip], None]:
        def make(archive: ForgedZip) -> None:
            archive.entry(b"f", b"content", archive.local(b"f", b"content"), **lies)

        return make

    def local_lying(name: bytes = b"f", **lies: int) -> Callable[[ForgedZip], None]:
        def make(archive: ForgedZip) -> None:
            archive.entry(b"f", b"content", archive.local(name, b"content", **lies))

        return make

    cases: list[tuple[str, Callable[[ForgedZip], None]]] = [
        ("disagree", lying(size=3)),
        ("disagree", lying(crc=1)),
        ("disagree|beyond", lying(packed=3)),
        ("disagree", local_lying(b"g")),
        ("disagree", local_lying(size=8)),
        ("disagree", local_lying(method=0)),
        ("encrypted", lambda archive: archive.add(b"f", b"x", flags=1)),
        ("bzip2", lambda archive: archive.add(b"f", b"x", method=12)),
        ("method 77", lambda archive: archive.add(b"f", b"x", method=77)),
        ("two sizes", lambda archive: archive.entry(b"f", b"x", 0, method=0, size=2)),
        ("directory with content", lambda archive: archive.add(b"d/", b"x")),
        ("not where", lambda archive: archive.entry(b"f", b"x", 0)),
        ("not where", lambda archive: archive.entry(b"f", b"x", 0xFFFFFFF0)),
        ("sizes are missing", lambda archive: archive.entry(b"f", b"x", 0xFFFFFFFF)),
    ]
    for reason, step in cases:
        expect_refusal(unpack_target, forge_zip(step), "zip", reason)


def test_zips_that_lie_in_both_places(unpack_target: UnpackTarget) -> None:
    """The two headers agree, and the content does not."""
    for lies, reason in (
        ({"size": 3}, "larger than it says"),
        ({"size": 30}, "size or checksum"),
        ({"crc": 5}, "size or checksum"),
    ):
        archive = ForgedZip()
        archive.entry(b"f", b"content", archive.local(b"f", b"content", **lies), **lies)
        expect_refusal(unpack_target, archive.finish(), "zip", reason)
    archive = ForgedZip()
    archive.local(b"f", b"content", packed=8)
    archive.body += b"y"
    archive.entry(b"f", b"content", 0, packed=8)
    expect_refusal(unpack_target, archive.finish(), "zip", "disagree|before or after|beyond")


def test_overlapping_members(unpack_target: UnpackTarget) -> None:
    """A small archive that unpacks to much, since all members share the same bytes."""
    archive = ForgedZip()
    content = bytes(1 << 20)
    at = archive.local(b"f", content)
    for _ in range(50):
        archive.entry(b"f", content, at)
    expect_refusal(unpack_target, archive.finish(), "zip", "overlap")


def test_tables_of_contents_that_lie(unpack_target: UnpackTarget) -> None:
    archive = ForgedZip()
    archive.add(b"f", b"x")
    for count, reason in ((0, "hidden data"), (2, "unreadable"), (0xFFFF, "missing")):
        expect_refusal(unpack_target, archive.finish(count=count), "zip", reason)
    expect_refusal(unpack_target, b"prefix" + archive.finish(), "zip", "precedes")
    parts = bytearray(archive.finish())
    parts[-18] = 1
    expect_refusal(unpack_target, bytes(parts), "zip", "several parts")
