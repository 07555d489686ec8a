"""Bundles of many untrusted files, received and sent."""

import asyncio
import errno
import os
import struct
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.sandbox import bundle_encoding
from fumehood.protocol.sandbox.bundle_encoding import (
    MAX_BUNDLED_FILE_BYTES,
    BundledFile,
    BundleReadStatus,
    InvalidBundle,
    ReadFilesResponseDecoder,
    encode_bundle,
)
from fumehood.protocol.sandbox.sandbox_errors import FileRefused, SandboxFileNotFound, SandboxPayloadTooLarge
from fumehood.sandbox_server.inside.files import file_bundles, untrusted_files
from fumehood.sandbox_server.inside.files.archive_unpacker import UnpackLimits, UnpackOutcome
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused
from tests.support.unpack_target import GrantedPermit, UnpackTarget

END = bytes(7)


def body(*wanted: tuple[str | bytes, bytes]) -> bytes:
    named = [(path if isinstance(path, bytes) else path.encode(), content) for path, content in wanted]
    packed = (struct.pack("!BHI", 1, len(path), len(content)) + path + content for path, content in named)
    return b"".join(packed) + END


async def _gathered(*batches: Sequence[BundledFile]) -> bytes:
    async def given() -> AsyncGenerator[Sequence[BundledFile]]:
        for batch in batches:
            yield batch

    return b"".join([piece async for piece in encode_bundle(given())])


# ---- in ---------------------------------------------------------------------------------------------------------


def test_the_jail_has_the_numbers_of_the_protocol() -> None:
    inside = (
        file_bundles.MAX_FILE_BYTES,
        file_bundles.FILE_HEADER.format,
        file_bundles.CONTENT_HEADER.format,
    )
    assert inside == (
        MAX_BUNDLED_FILE_BYTES,
        bundle_encoding.FILE_HEADER.format,
        bundle_encoding.ANSWER_HEADER.format,
    )
    assert (file_bundles.PLAIN, file_bundles.EXECUTABLE) == (
        bundle_encoding.PLAIN_FILE,
        bundle_encoding.EXECUTABLE_FILE,
    )
    assert {name: getattr(file_bundles, name) for name in BundleReadStatus.__members__} == {
        one.name: one.value for one in BundleReadStatus
    }


def test_the_two_ends_agree(unpack_target: UnpackTarget) -> None:
    wanted = [("a", b"a"), ("d/e/ü", b""), ("d/f", bytes(100_000))]
    sent = asyncio.run(_gathered(wanted[:1], [], wanted[1:]))
    assert sent == body(*wanted)
    permit = GrantedPermit()
    assert unpack_target.receive(sent, permit=permit) == UnpackOutcome(3, 100_001)
    assert permit.received == len(sent)
    assert unpack_target.tree() == {"a": b"a", "d": None, "d/e": None, "d/e/ü": b"", "d/f": bytes(100_000)}
    assert (unpack_target.data / "a").stat().st_mode & 0o777 == 0o644
    assert unpack_target.receive(body(("a", b"new"))) == UnpackOutcome(1, 3)
    assert (unpack_target.data / "a").read_bytes() == b"new"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../up",
        "a/../../up",
        "/etc/passwd",
        "a//b",
        "./a",
        "nul\0",
        b"\xff",
        b"\xed\xb3\xbf",
        "x" * 300,
        "/".join("d" * 33),
        "y" * 5000,
        ".fumehood-token",
        ".fumehood-token/0",
    ],
)
def test_names_that_are_none_are_refused_and_the_rest_is_there(
    unpack_target: UnpackTarget, name: str | bytes
) -> None:
    done = unpack_target.receive(body(("before", b"1"), (name, b"bad" * 50_000), ("after", b"2")))
    assert (done.files, done.size, done.refused, len(done.reasons)) == (2, 2, 1, 1)
    assert unpack_target.tree() == {"after": b"2", "before": b"1"}


def test_what_is_in_the_way(unpack_target: UnpackTarget) -> None:
    """A directory, a file, a link out of the tree: none is followed, and none is replaced but what is no directory."""
    (unpack_target.data / "directory").mkdir()
    (unpack_target.data / "tree/below").mkdir(parents=True)
    (unpack_target.data / "file").write_bytes(b"kept")
    (unpack_target.data / "out").symlink_to("/")
    (unpack_target.data / "link").symlink_to("/etc/passwd")
    os.mkfifo(unpack_target.data / "pipe")
    done = unpack_target.receive(
        body(
            ("directory", b"x"),
            ("file/below", b"x"),
            ("out/tmp/x", b"x"),
            ("out/y", b"x"),
            ("link", b"instead"),
            ("pipe", b"instead"),
            ("tree/below/new", b"n"),
        )
    )
    assert (done.files, done.size, done.refused) == (3, 15, 4)
    assert [reason.partition(":")[0] for reason in done.reasons] == ["directory", "file", "out"]
    assert (unpack_target.data / "out").is_symlink()
    assert not (unpack_target.data / "link").is_symlink()
    assert unpack_target.tree() == {
        "directory": None,
        "file": b"kept",
        "link": b"instead",
        "out": None,
        "pipe": b"instead",
        "tree": None,
        "tree/below": None,
        "tree/below/new": b"n",
    }


def test_names_that_disagree(unpack_target: UnpackTarget) -> None:
    done = unpack_target.receive(body(("a", b"1"), ("a", b"2"), ("a/b", b"3"), ("d/e", b"4"), ("d", b"5")))
    assert (done.files, done.refused) == (2, 3)
    assert unpack_target.tree() == {"a": b"1", "d": None, "d/e": b"4"}


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "cut short"),
        (body(("a", b"abc"))[:-8], "cut short"),
        (body(("a", b"abc"))[:-7], "cut short"),
        (body(("a", b"abc"))[:-1], "cut short"),
        (body(("a", b"abc")) + b"\0", "no valid end"),
        (body(("a", b"abc")) + body(("b", b"")), "no valid end"),
        (body(("a", b"abc"))[:-7] + b"\3" + bytes(6), "no valid end"),
        (struct.pack("!BHI", 0, 1, 0) + b"a", "no valid end"),
        (struct.pack("!BHI", 1, 1, (1 << 32) - 1) + b"a", "cut short"),
    ],
)
def test_streams_that_are_not_sound_leave_nothing(
    unpack_target: UnpackTarget, stream: bytes, reason: str
) -> None:
    (unpack_target.data / "a").write_bytes(b"old")
    with pytest.raises(FileTaskRefused, match=reason):
        unpack_target.receive(stream)
    assert unpack_target.tree() == {"a": b"old"}


@given(st.binary(max_size=200))
def test_no_stream_writes_what_it_may_not(tmp_path_factory: pytest.TempPathFactory, stream: bytes) -> None:
    data = tmp_path_factory.mktemp("data")
    fd = os.open(data, os.O_RDONLY)
    here = UnpackTarget(data, fd)
    try:
        here.receive(body(("f", b"f"))[:-7] + stream)
    except FileTaskRefused:
        assert here.tree() == {}
    else:
        assert "f" in here.tree()
    finally:
        os.close(fd)


def test_too_much_leaves_nothing(unpack_target: UnpackTarget) -> None:
    many = body(*((f"{number}", b"x") for number in range(100_000)))
    with pytest.raises(FileTaskRefused, match="more than 500 members") as caught:
        unpack_target.receive(many, UnpackLimits(500, 1 << 20))
    assert caught.value.kind == "too_large"
    with pytest.raises(FileTaskRefused, match="more than 10 bytes"):
        unpack_target.receive(body(("a", b"123456"), ("b", b"78901")), UnpackLimits(500, 10))
    long = body(
        *(
            (f"{number:04}/{'n' * 200}/{'m' * 200}", b"")
            for number in range(untrusted_files.MAX_NAME_BYTES // 400)
        )
    )
    with pytest.raises(FileTaskRefused, match="too long in total"):
        unpack_target.receive(long, UnpackLimits(20_000, 10))
    assert unpack_target.tree() == {}


def test_what_does_not_fit_is_left_out_and_told(
    unpack_target: UnpackTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = unpack_target.receive(
        body(("d/a", bytes(10)), ("e/b", bytes(1000)), ("d/c", bytes(10))), permit=GrantedPermit(quota=100)
    )
    assert (done.files, done.size, done.refused) == (2, 20, 1)
    assert done.reasons == ["e/b: no quota left"]
    written = os.write

    def full(fd: int, content: bytes) -> int:
        if len(content) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(fd, content)

    monkeypatch.setattr(os, "write", full)
    done = unpack_target.receive(body(("d/f", bytes(1000)), ("d/g", b"g")))
    assert done.reasons == ["d/f: No space left on device"]
    assert unpack_target.tree() == {"d": None, "d/a": bytes(10), "d/c": bytes(10), "d/g": b"g"}


def test_reasons_are_bounded(unpack_target: UnpackTarget) -> None:
    done = unpack_target.receive(body(*((f"../{number}" + "x" * 4000, b"") for number in range(300))))
    assert (done.refused, len(done.reasons)) == (300, 20)
    assert max(map(len, done.reasons)) < 400


class AbandoningPermit(GrantedPermit):
    """Whoever sent it goes away when so much has come, or is being put in place."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def reserve(self, size: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise FileTaskRefused("the client went away", "abandoned")


@pytest.mark.parametrize("after", range(0, 130, 7))
def test_who_leaves_in_the_middle_leaves_nothing(unpack_target: UnpackTarget, after: int) -> None:
    (unpack_target.data / "d3").mkdir()
    (unpack_target.data / "d3/3").write_bytes(b"old")
    before = unpack_target.tree()
    with pytest.raises(FileTaskRefused, match="went away"):
        unpack_target.receive(
            body(*((f"d{number % 10}/{number}", b"new") for number in range(60))),
            permit=AbandoningPermit(after),
        )
    assert unpack_target.tree() == before


# ---- out --------------------------------------------------------------------------------------------------------


def read(unpack_target: UnpackTarget, paths: Sequence[str], piece: int = 1 << 20) -> list[object]:
    answers = ReadFilesResponseDecoder(paths)
    whole = b"".join(file_bundles.stream_contents(unpack_target.fd, paths))
    found = [one for at in range(0, len(whole), piece) for one in answers.feed(whole[at : at + piece])]
    answers.finish()
    return [one if isinstance(one, bytes) else type(one) for one in found]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_only_regular_files_below_are_read(unpack_target: UnpackTarget, piece: int) -> None:
    (unpack_target.data / "d").mkdir()
    (unpack_target.data / "d/a").write_bytes(b"a")
    (unpack_target.data / "empty").touch()
    (unpack_target.data / "out").symlink_to("/etc")
    (unpack_target.data / "link").symlink_to("d/a")
    (unpack_target.data / "most").write_bytes(bytes(MAX_BUNDLED_FILE_BYTES if piece > 7 else 10))
    with (unpack_target.data / "more").open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(unpack_target.data / "pipe")
    paths = [
        "d/a",
        "out/passwd",
        "link",
        "d",
        "pipe",
        "../x",
        "/etc/passwd",
        "none",
        "empty",
        "more",
        "most",
        "d/a",
    ]
    found = read(unpack_target, paths, piece)
    assert found[:-2] == [
        b"a",
        *[FileRefused] * 6,
        SandboxFileNotFound,
        b"",
        SandboxPayloadTooLarge,
    ]
    assert found[-2:] == [(unpack_target.data / "most").read_bytes(), b"a"]


@pytest.mark.parametrize(
    "answer",
    [b"\4\0\0\0\0", b"\0\0\x10\0\1", b"\1\0\0\0\1x", b"\0\0\0\0\1x" * 3, b"\xff" * 5],
)
def test_answers_that_nobody_would_give(answer: bytes) -> None:
    with pytest.raises(InvalidBundle):
        ReadFilesResponseDecoder(["a", "b"]).feed(answer)


def test_answers_that_end_too_soon() -> None:
    for said in (b"", b"\0\0\0\0\1x", b"\0\0\0\0\1x\0\0\0\0\5abc"):
        answers = ReadFilesResponseDecoder(["a", "b"])
        answers.feed(said)
        with pytest.raises(InvalidBundle, match="the body ended"):
            answers.finish()


@given(st.binary(max_size=60), st.integers(1, 9))
def test_no_answer_holds_more_than_was_asked_for(said: bytes, piece: int) -> None:
    answers = ReadFilesResponseDecoder(["a", "b", "c"])
    found = 0
    try:
        for at in range(0, len(said), piece):
            found += len(answers.feed(said[at : at + piece]))
        answers.finish()
    except InvalidBundle:
        assert found <= 3
    else:
        assert found == 3
