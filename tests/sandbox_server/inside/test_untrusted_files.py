"""Untrusted files in the data directory: names, types, links, races, limits."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.inside.files import atomic_writes, untrusted_files
from tests.support.unpack_target import GrantedPermit


@pytest.fixture
def data(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    (tmp_path / "data").mkdir()
    fd = os.open(tmp_path / "data", os.O_RDONLY | os.O_DIRECTORY)
    yield tmp_path / "data", fd
    os.close(fd)


def write(data: int, path: str, source: int) -> int:
    return atomic_writes.write_file(data, path, source, "token", GrantedPermit()).size


def content(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../x",
        "a/../b",
        "a//b",
        ".",
        "./a",
        "a/.",
        "a\0b",
        "x" * 256,
        "d/" * 40 + "f",
        "\ud800",
    ],
)
def test_unsafe_names_are_refused(path: str) -> None:
    with pytest.raises(untrusted_files.UnsafePath):
        untrusted_files.check_path(path)


@given(st.text())
def test_a_checked_name_stays_below(path: str) -> None:
    try:
        raw = untrusted_files.check_path(path)
    except untrusted_files.UnsafePath:
        return
    assert not raw.startswith(b"/")
    assert b".." not in raw.split(b"/")
    assert os.path.normpath(b"/base/" + raw) == b"/base/" + raw


def test_reads_regular_files_only(data: tuple[Path, int], tmp_path: Path) -> None:
    here, fd = data
    (here / "f").write_bytes(b"x")
    (here / "d").mkdir()
    os.mkfifo(here / "fifo")
    (tmp_path / "secret").write_text("secret")
    (here / "link").symlink_to(tmp_path / "secret")
    (here / "out").symlink_to(tmp_path)
    assert content(untrusted_files.open_regular_file(fd, "f")) == b"x"
    for name, number in (
        ("d", errno.EINVAL),
        ("fifo", errno.EINVAL),
        ("link", errno.ELOOP),
        ("out/secret", errno.ELOOP),
    ):
        with pytest.raises(OSError) as refused:
            untrusted_files.open_regular_file(fd, name)
        assert refused.value.errno == number


def test_writes_replace_whole_and_make_parents(data: tuple[Path, int], tmp_path: Path) -> None:
    here, fd = data
    source = tmp_path / "source"
    source.write_bytes(b"new")
    (here / "a").mkdir()
    (here / "a" / "f").write_bytes(b"an older and longer text")
    for path in ("a/f", "b/c/f"):
        with source.open("rb") as file:
            assert write(fd, path, file.fileno()) == 3
        assert (here / path).read_bytes() == b"new"
    assert sorted(os.listdir(here / "a")) == ["f"]


def test_a_failed_write_leaves_what_was_there(data: tuple[Path, int], tmp_path: Path) -> None:
    here, fd = data
    (here / "f").write_bytes(b"old")
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError):  # a directory cannot be read as a source
        write(fd, "f", directory)
    os.close(directory)
    assert (here / "f").read_bytes() == b"old"
    assert os.listdir(here) == ["f"]


def test_deletes_one_name(data: tuple[Path, int], tmp_path: Path) -> None:
    here, fd = data
    (tmp_path / "target").write_text("kept")
    (here / "link").symlink_to(tmp_path / "target")
    untrusted_files.delete_file(fd, "link")
    assert os.listdir(here) == []
    assert (tmp_path / "target").exists()
    with pytest.raises(FileNotFoundError):
        untrusted_files.delete_file(fd, "link")


def test_walks_are_bounded(data: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    here, fd = data
    for number in range(30):
        (here / f"f{number:02}").touch()
    assert len(untrusted_files.list_files(fd).files) == 30
    monkeypatch.setattr(untrusted_files, "MAX_ENTRIES", 20)
    found, cut, _ = untrusted_files.list_files(fd)
    assert (len(found), cut) == (20, True)


def test_links_are_listed_and_not_followed(data: tuple[Path, int], tmp_path: Path) -> None:
    here, fd = data
    (here / "d").mkdir()
    (here / "d" / "f").write_text("x")
    for name, target in (("alias", "d"), ("d/up", "../d/f"), ("out", str(tmp_path)), ("dangling", "nowhere")):
        (here / name).symlink_to(target)
    os.symlink(b"\xff", os.fsencode(here / "binary"))
    found, cut, links = untrusted_files.list_files(fd)
    assert [item.path for item in found] == ["d/f"]
    assert links == [("alias", "d"), ("d/up", "../d/f"), ("dangling", "nowhere"), ("out", str(tmp_path))]
    assert cut, "the target that is not text"


def test_names_of_the_server_count_for_the_bound(
    data: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links cost nothing code could make millions of them, which nobody would ever be done with."""
    folder, fd = data
    (folder / "a").touch()
    for number in range(21):
        (folder / f".fumehood-{number}").hardlink_to(folder / "a")
    found, cut, _ = untrusted_files.list_files(fd)
    assert ([item.path for item in found], cut) == (["a"], False)
    monkeypatch.setattr(untrusted_files, "MAX_ENTRIES", 20)
    assert untrusted_files.list_files(fd).is_truncated


def test_walks_stop_at_a_depth(data: tuple[Path, int]) -> None:
    here, fd = data
    deep = here.joinpath(*["d"] * (untrusted_files.MAX_DEPTH + 5))
    deep.mkdir(parents=True)
    (deep / "f").touch()
    (here / "top").touch()
    found, cut, _ = untrusted_files.list_files(fd)
    assert ([item.path for item in found], cut) == (["top"], True)
