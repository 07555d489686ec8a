"""Conformance tests of `Filesystem` of the client."""

import pytest

from fumehood.client import Filesystem, WorkspaceSecurityError


class FilesystemKit:
    """Needs a fixture `files`, an empty file system."""

    def test_it_is_a_filesystem(self, files: Filesystem) -> None:
        assert isinstance(files, Filesystem)

    def test_what_is_written_is_read(self, files: Filesystem) -> None:
        files.write("a.bin", bytes(range(256)))
        files.write_text("sub/deep/b.txt", "grün\r\n")
        assert files.read("a.bin") == bytes(range(256))
        assert files.read_text("sub/deep/b.txt") == "grün\r\n"
        files.write_text("./sub//deep/b.txt", "ü", encoding="latin-1")
        assert files.read("sub/deep/b.txt") == b"\xfc"
        assert files.read_text("sub/deep/b.txt", encoding="latin-1") == "ü"
        files.write("a.bin", b"")
        assert files.read("a.bin") == b""

    def test_files_and_directories_are_told_apart(self, files: Filesystem) -> None:
        files.write("sub/a.txt", b"x")
        found = {
            path: (files.exists(path), files.is_file(path), files.is_dir(path))
            for path in (".", "sub", "sub/a.txt", "no")
        }
        assert found == {
            ".": (True, False, True),
            "sub": (True, False, True),
            "sub/a.txt": (True, True, False),
            "no": (False, False, False),
        }
        assert files.is_dir("")

    def test_listings_are_sorted_names(self, files: Filesystem) -> None:
        assert files.list_dir(".") == []
        for path in ("b.txt", "a/2.txt", "a/1.txt", "a/x/3.txt", "ab.txt"):
            files.write(path, b"x")
        assert files.list_dir(".") == ["a", "ab.txt", "b.txt"]
        assert files.list_dir("a") == files.list_dir("./a/") == ["1.txt", "2.txt", "x"]

    def test_patterns_find_files_by_their_whole_path(self, files: Filesystem) -> None:
        for path in ("top.py", "a/one.py", "a/b/two.py", "a/b/c/three.py", "a/b.txt", "[x].txt"):
            files.write(path, b"x")
        assert files.glob("*.py") == ["top.py"]
        assert files.glob("**/*.py") == ["a/b/c/three.py", "a/b/two.py", "a/one.py", "top.py"]
        assert files.glob("a/*") == ["a/b.txt", "a/one.py"]
        assert files.glob("a/**/two.py") == ["a/b/two.py"]
        assert files.glob("a/**") == ["a/b.txt", "a/b/c/three.py", "a/b/two.py", "a/one.py"]
        assert files.glob("[[]x].txt") == ["[x].txt"]
        assert files.glob("nothing") == []

    def test_what_is_deleted_is_gone(self, files: Filesystem) -> None:
        files.write("sub/a.txt", b"x")
        files.write("sub/b.txt", b"x")
        files.delete("sub/a.txt")
        assert files.glob("**") == ["sub/b.txt"]
        with pytest.raises(FileNotFoundError):
            files.read("sub/a.txt")

    def test_mistakes_are_told_as_python_does(self, files: Filesystem) -> None:
        files.write("sub/a.txt", b"x")
        for act in (files.read, files.read_text, files.delete, files.list_dir):
            with pytest.raises(FileNotFoundError):
                act("missing")
        with pytest.raises(IsADirectoryError):
            files.read("sub")
        with pytest.raises(IsADirectoryError):
            files.delete("sub")
        with pytest.raises(IsADirectoryError):
            files.write("sub", b"")
        with pytest.raises(NotADirectoryError):
            files.list_dir("sub/a.txt")
        with pytest.raises(NotADirectoryError):
            files.write("sub/a.txt/b", b"")
        assert files.glob("**") == ["sub/a.txt"]

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a/..", "nul\0"])
    def test_nothing_leads_out(self, files: Filesystem, path: str) -> None:
        for act in (files.read, files.exists, files.is_file, files.is_dir, files.list_dir, files.delete):
            with pytest.raises(WorkspaceSecurityError):
                act(path)
        with pytest.raises(WorkspaceSecurityError):
            files.write(path, b"")

    def test_odd_names_are_names(self, files: Filesystem) -> None:
        for name in ("with space", "$x", "${x}", "back\\slash", "ünï", "-rf", "..."):
            files.write(f"d/{name}", name.encode())
        assert files.list_dir("d") == sorted(("with space", "$x", "${x}", "back\\slash", "ünï", "-rf", "..."))
        assert files.read("d/${x}") == b"${x}"
