"""Every file system of the client passes its kit."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.client import Filesystem, HostFilesystem, InMemoryFilesystem
from fumehood.client.filesystem import matches_glob
from tests.contracts.filesystem_kit import FilesystemKit


class TestInMemory(FilesystemKit):
    @pytest.fixture
    def files(self) -> Filesystem:
        return InMemoryFilesystem()


class TestHost(FilesystemKit):
    @pytest.fixture
    def files(self, tmp_path: Path) -> Filesystem:
        return HostFilesystem(tmp_path)


def test_links_that_lead_out_do_not_exist(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "away").symlink_to(tmp_path)
    (root / "sub" / "in").symlink_to(root / "fine")
    (root / "fine").write_text("fine")
    files = HostFilesystem(root)
    assert files.list_dir(".") == ["fine", "sub"]
    assert files.glob("**") == ["fine", "sub/in"]
    assert not files.exists("link")
    assert not files.is_dir("away")
    assert files.read_text("sub/in") == "fine"
    for path in ("link", "away/secret"):
        with pytest.raises(FileNotFoundError):
            files.read(path)
        with pytest.raises(FileNotFoundError):
            files.write(path, b"overwritten")
    assert (tmp_path / "secret").read_text() == "secret"
    files.delete("sub/in")
    assert (os.path.lexists(root / "sub" / "in"), (root / "fine").exists()) == (False, True)


parts = st.sampled_from(["a", "b", ".git", "x.py"])
paths = st.lists(parts, min_size=1, max_size=5).map("/".join)


@given(paths, paths)
def test_a_pattern_without_wildcards_is_a_path(path: str, pattern: str) -> None:
    assert matches_glob(path, pattern) == (path == pattern)


@given(paths, paths)
def test_two_stars_stand_for_any_number_of_directories(path: str, rest: str) -> None:
    assert matches_glob(f"{path}/{rest}", f"**/{rest}")
    assert matches_glob(rest, f"**/{rest}")
    assert matches_glob(f"{path}/{rest}", f"{path}/**")
    assert not matches_glob(path, f"{path}/*")


def test_many_stars_take_no_time() -> None:
    assert not matches_glob("/".join("a" * 300), "/".join(["**", "a"] * 100) + "/b")
