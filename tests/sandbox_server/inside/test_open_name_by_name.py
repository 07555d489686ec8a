"""Where the kernel has no openat2, as in gVisor, paths are opened with the same outcome."""

import errno
import os
from pathlib import Path

import pytest

from fumehood.sandbox_server.inside import syscalls


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "data/d/e").mkdir(parents=True)
    (tmp_path / "data/d/e/f").write_text("f")
    (tmp_path / "outside").write_text("outside")
    for name, target in (
        ("link", "d/e/f"),
        ("away", "../outside"),
        ("dir", "d"),
        ("d/up", ".."),
        ("self", "self"),
    ):
        (tmp_path / "data" / name).symlink_to(target)
    os.mkfifo(tmp_path / "data/fifo")
    return tmp_path / "data"


_PATHS = [
    *("d/e/f", "d", "d/e", ".", "d/./e/f", "missing", "d/missing/f", "d/e/f/g", "fifo"),
    *("link", "away", "dir/e/f", "dir", "d/up/d", "self", "../outside", "/etc/passwd", ".."),
]


@pytest.mark.parametrize(
    "flags", [os.O_RDONLY | os.O_NONBLOCK, os.O_RDONLY | os.O_DIRECTORY, os.O_PATH], ids=hex
)
@pytest.mark.parametrize("path", _PATHS)
def test_the_outcome_is_that_of_openat2(tree: Path, path: str, flags: int) -> None:
    def outcome(how: str) -> str | tuple[int, int]:
        try:
            if how == "openat2":
                resolve = syscalls.RESOLVE_STRICTLY
                found = syscalls.openat2(directory, path.encode(), flags, resolve=resolve)
            else:
                found = syscalls.open_name_by_name(directory, path.encode(), flags)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        with syscalls.closing_fd(found) as fd:
            assert not os.get_inheritable(fd)
            return os.fstat(fd).st_dev, os.fstat(fd).st_ino

    before = len(os.listdir("/proc/self/fd"))
    with syscalls.closing_fd(os.open(tree, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        assert outcome("by name") == outcome("openat2")
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_way_leads_up_not_even_within(tree: Path) -> None:
    """The kernel would allow this one; callers refuse such names before."""
    with syscalls.closing_fd(os.open(tree, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        with pytest.raises(OSError, match="leads out") as caught:
            syscalls.open_name_by_name(directory, b"d/../d", os.O_RDONLY)
        assert caught.value.errno == errno.EXDEV


def test_another_file_system_is_not_entered() -> None:
    with syscalls.closing_fd(os.open("/", os.O_RDONLY | os.O_DIRECTORY)) as root:
        with pytest.raises(OSError, match="mount") as caught:
            syscalls.open_name_by_name(root, b"proc/version", os.O_RDONLY)
        assert caught.value.errno == errno.EXDEV


def test_a_new_file_is_created_below_only(tree: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with syscalls.closing_fd(os.open(tree, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        os.close(syscalls.open_name_by_name(directory, b"d/new", flags, 0o640))
        assert (tree / "d/new").stat().st_mode & 0o777 == 0o640
        for path in (b"away", b"dir/new2", b"../new3"):
            with pytest.raises(OSError):
                syscalls.open_name_by_name(directory, path, flags, 0o640)
    assert not (tree / "d/new2").exists()
