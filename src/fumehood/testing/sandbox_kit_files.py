"""The part of the conformance kit that is about files and archives; imports pytest, `interfaces`, `protocol`."""

import io
import tarfile
import zipfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from itertools import batched
from typing import Any, Protocol

import pytest

from fumehood.interfaces import Sandbox
from fumehood.protocol.sandbox import AnyOutput, ArchiveFormat
from fumehood.protocol.sandbox_bundles import SMALL, Content, WholeFile
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, TooLarge

ODD_NAMES = [
    "with space.txt",
    "\u00e4/\u00fc/\u4e2d.txt",
    "100%.txt",
    "%2e%2e",
    "a?b#c&d=e+f",
    "semi;colon:at@",
    "line\nbreak",
    "-rf",
    "...",
    ".hidden",
    "back\\slash",
    "quote\"'",
    "x" * 255,
    "/".join(["d"] * 31 + ["f"]),
]
BAD_NAMES = [
    "",
    "/etc/passwd",
    "../up",
    "a/../b",
    "a//b",
    "a/",
    "./a",
    ".",
    "..",
    "nul\0",
    "\udcff",
    "y" * 256,
]
KINDS: list[ArchiveFormat] = ["zip", "tar", "tar.gz", "tar.zst"]


class _Subject(Protocol):
    """What these tests need of the kit's `Subject`."""

    def sandbox(self, name: str | None = None) -> AbstractAsyncContextManager[Sandbox]: ...

    async def run(
        self, sandbox: Sandbox, program: Any, execution_id: str | None = None
    ) -> list[AnyOutput]: ...


async def content_of(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([piece async for piece in sandbox.read(path)])


async def paths_of(sandbox: Sandbox) -> list[str]:
    return [file.path for file in (await sandbox.list()).files]


async def contents_of(sandbox: Sandbox, paths: Sequence[str]) -> list[Content]:
    return [content async for some in sandbox.read_all(paths) for content in some]


async def batches(files: Mapping[str, bytes], size: int = 100) -> AsyncGenerator[Sequence[WholeFile]]:
    for some in batched(files.items(), size):
        yield some


async def in_pieces(content: bytes, size: int = 1000) -> AsyncGenerator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


class SourceBroke(Exception):
    """What a caller's own stream raises; it comes back to the caller as it is."""


async def _breaking() -> AsyncGenerator[bytes]:
    yield b"half"
    raise SourceBroke


def archive(kind: ArchiveFormat, members: dict[str, bytes]) -> bytes:
    """An archive with files of these names, whatever they are."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, content in members.items():
                zipped.writestr(zipfile.ZipInfo(name), content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz" if kind == "tar.gz" else "w:") as tarred:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tarred.addfile(info, io.BytesIO(content))
    return _zstd()(buffer.getvalue()) if kind == "tar.zst" else buffer.getvalue()


def _zstd() -> Callable[[bytes], bytes]:
    for module in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(module).compress
        except ModuleNotFoundError:
            continue
    pytest.skip("tar.zst needs Python 3.14 or backports.zstd")


class FilesKit:
    """Files go in and out whole, under any name that is a plain path, and nowhere else."""

    async def test_write_list_read_delete(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            entry = await sandbox.write("b/data.bin", bytes(range(256)))
            assert (entry.path, entry.size) == ("b/data.bin", 256)
            await sandbox.write("a.txt", b"")
            listing = await sandbox.list()
            assert [(file.path, file.size) for file in listing.files] == [("a.txt", 0), ("b/data.bin", 256)]
            assert entry in listing.files
            assert listing.complete
            assert not listing.truncated
            assert await content_of(sandbox, "b/data.bin") == bytes(range(256))
            assert await content_of(sandbox, "a.txt") == b""
            await sandbox.delete("b/data.bin")
            assert await paths_of(sandbox) == ["a.txt"]

    async def test_large_files_pass_in_pieces(self, subject: _Subject) -> None:
        content = b"0123456789abcdef" * (3 << 16)
        async with subject.sandbox() as sandbox:
            entry = await sandbox.write("large.bin", in_pieces(content, 100_000))
            assert entry.size == len(content)
            pieces = [piece async for piece in sandbox.read("large.bin")]
            assert len(pieces) > 1
            assert b"".join(pieces) == content
            await sandbox.write("again.bin", content)
            assert await content_of(sandbox, "again.bin") == content

    async def test_leaving_a_file_half_read(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("large.bin", b"x" * (3 << 20))
            reading = sandbox.read("large.bin")
            assert await anext(reading)
            await reading.aclose()
            assert len(await content_of(sandbox, "large.bin")) == 3 << 20

    async def test_code_and_caller_see_the_same_files(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await subject.run(sandbox, "writes out.txt")
            assert await content_of(sandbox, "out.txt") == b"made"

    async def test_odd_names(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            for number, name in enumerate(ODD_NAMES):
                entry = await sandbox.write(name, str(number).encode())
                assert entry.path == name
            assert await paths_of(sandbox) == sorted(ODD_NAMES)
            for number, name in enumerate(ODD_NAMES):
                assert await content_of(sandbox, name) == str(number).encode()
                await sandbox.delete(name)
            assert await paths_of(sandbox) == []

    async def test_bad_names_are_refused(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            for name in BAD_NAMES:
                with pytest.raises(FileRefused):
                    await sandbox.write(name, b"x")
                with pytest.raises(FileRefused):
                    await content_of(sandbox, name)
                with pytest.raises(FileRefused):
                    await sandbox.delete(name)
            assert await paths_of(sandbox) == []

    async def test_files_that_are_not_there(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            with pytest.raises(FileNotFound):
                await content_of(sandbox, "none.txt")
            with pytest.raises(FileNotFound):
                await sandbox.delete("none.txt")
            with pytest.raises(FileNotFound):
                await content_of(sandbox, "no/such/directory.txt")

    async def test_directories_are_not_files(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("folder/file.txt", b"x")
            with pytest.raises(FileRefused):
                await content_of(sandbox, "folder")
            with pytest.raises(FileRefused):
                await sandbox.write("folder", b"x")
            with pytest.raises(FileRefused):
                await sandbox.write("folder/file.txt/below", b"x")
            assert await paths_of(sandbox) == ["folder/file.txt"]

    async def test_a_file_is_replaced_whole_or_not_at_all(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("kept.txt", b"first version")
            await sandbox.write("kept.txt", b"second")
            with pytest.raises(SourceBroke):
                await sandbox.write("kept.txt", _breaking())
            with pytest.raises(SourceBroke):
                await sandbox.write("new.txt", _breaking())
            assert await content_of(sandbox, "kept.txt") == b"second"
            assert await paths_of(sandbox) == ["kept.txt"]

    async def test_what_changed_since(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("old.txt", b"old")
            await sandbox.write("doomed.txt", b"x")
            await subject.run(sandbox, "writes out.txt")
            before = await sandbox.list()
            unchanged = await sandbox.list(before.mark)
            assert (unchanged.files, unchanged.deleted, unchanged.complete) == ([], [], False)
            await sandbox.write("new.txt", b"new")
            await sandbox.write("old.txt", b"changed")
            await sandbox.delete("doomed.txt")
            await subject.run(sandbox, "deletes out.txt")
            changes = await sandbox.list(unchanged.mark)
            assert [file.path for file in changes.files] == ["new.txt", "old.txt"]
            assert sorted(changes.deleted) == ["doomed.txt", "out.txt"]
            assert not changes.complete
            again = await sandbox.list(before.mark)
            assert (again.files, sorted(again.deleted)) == (changes.files, ["doomed.txt", "out.txt"])
            assert (await sandbox.list(changes.mark)).files == []

    async def test_a_mark_of_nobody_gives_everything(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("here.txt", b"x")
            listing = await sandbox.list("not-a-mark")
            assert ([file.path for file in listing.files], listing.complete) == (["here.txt"], True)

    async def test_many_files_go_in_and_out_at_once(self, subject: _Subject) -> None:
        files = {f"d{number % 7}/{number}.txt": b"%d" % number * (number % 50) for number in range(300)}
        files |= {name: name.encode() for name in ODD_NAMES}
        files["large.bin"] = bytes(SMALL)
        async with subject.sandbox() as sandbox:
            await sandbox.write("d1/1.txt", b"replaced")
            written = await sandbox.write_all(batches(files))
            size = sum(map(len, files.values()))
            assert (written.files, written.bytes, written.refused, written.reasons) == (
                len(files),
                size,
                0,
                [],
            )
            listing = await sandbox.list()
            assert {file.path: file.size for file in listing.files} == {
                path: len(content) for path, content in files.items()
            }
            assert max(file.modified_ns for file in listing.files) == written.modified_ns
            assert 0 < max(file.changed_ns for file in listing.files) <= written.changed_ns
            assert await contents_of(sandbox, [*files]) == [*files.values()]
            await subject.run(sandbox, "writes out.txt")
            await sandbox.write("d1/1.txt", b"newer")
            now = (await sandbox.list()).files
            for newer in (
                {file.path for file in now if file.modified_ns > written.modified_ns},
                {file.path for file in now if file.changed_ns > written.changed_ns},
            ):
                assert newer == {"out.txt", "d1/1.txt"}

    async def test_what_one_of_many_files_cannot_be_is_told_for_itself(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("folder/file.txt", b"x")
            bad = [*BAD_NAMES, "folder", "folder/file.txt/below"]
            written = await sandbox.write_all(batches({"a": b"a", **dict.fromkeys(bad, b"bad"), "b": b"b"}))
            assert (written.files, written.bytes, written.refused) == (2, 2, len(bad))
            assert len(written.reasons) == len(bad)
            assert any(reason.startswith("folder/file.txt") for reason in written.reasons)
            assert await paths_of(sandbox) == ["a", "b", "folder/file.txt"]
            assert await content_of(sandbox, "folder/file.txt") == b"x"

    async def test_many_files_of_which_some_cannot_be_read(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("folder/a", b"a")
            await sandbox.write("large.bin", bytes(SMALL + 1))
            asked = ["none", "folder", "folder/a", "large.bin", "folder/a/below", *BAD_NAMES, "folder/a"]
            found = await contents_of(sandbox, asked)
            kinds = [one if isinstance(one, bytes) else type(one) for one in found]
            assert kinds == [
                FileNotFound,
                FileRefused,
                b"a",
                TooLarge,
                FileNotFound,
                *(FileRefused for _ in BAD_NAMES),
                b"a",
            ]
            assert await contents_of(sandbox, []) == []

    async def test_many_files_that_do_not_all_come_leave_nothing(self, subject: _Subject) -> None:
        async def breaking() -> AsyncGenerator[Sequence[WholeFile]]:
            yield [(f"new/{number}", b"x" * 1000) for number in range(500)]
            raise SourceBroke

        async with subject.sandbox() as sandbox:
            await sandbox.write("new/1", b"old")
            with pytest.raises(SourceBroke):
                await sandbox.write_all(breaking())
            assert await contents_of(sandbox, ["new/1"]) == [b"old"]
            assert await paths_of(sandbox) == ["new/1"]
            assert (await sandbox.write_all(batches({}))).files == 0

    async def test_leaving_many_files_half_read(self, subject: _Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write_all(batches({f"{number}.bin": bytes(SMALL) for number in range(4)}))
            paths = [f"{number % 4}.bin" for number in range(40)]
            reading = sandbox.read_all(paths)
            assert len(await anext(reading)) < 40
            await reading.aclose()
            assert await contents_of(sandbox, paths[:2]) == [bytes(SMALL)] * 2

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_archives(self, subject: _Subject, kind: ArchiveFormat, streamed: bool) -> None:
        content = archive(kind, {"top.txt": b"top", "a/b/deep.txt": b"deep" * 1000})
        async with subject.sandbox() as sandbox:
            for into, prefix in (("", ""), ("in/side", "in/side/")):
                unpacked = await sandbox.unpack(
                    in_pieces(content) if streamed else content, kind=kind, into=into
                )
                assert (unpacked.files, unpacked.bytes, unpacked.skipped) == (2, 4003, 0)
                changed_ns = [file.changed_ns for file in (await sandbox.list()).files]
                assert 0 < max(changed_ns) <= unpacked.changed_ns
                assert await content_of(sandbox, f"{prefix}a/b/deep.txt") == b"deep" * 1000
                assert await content_of(sandbox, f"{prefix}top.txt") == b"top"

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["../up.txt", "/etc/absolute.txt", "a/../../up.txt"])
    async def test_archives_that_reach_out_are_refused_whole(
        self, subject: _Subject, kind: ArchiveFormat, name: str
    ) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("kept.txt", b"kept")
            hostile = archive(kind, {"good.txt": b"good", name: b"bad", "after.txt": b"x"})
            with pytest.raises(FileRefused):
                await sandbox.unpack(hostile, kind=kind)
            assert await paths_of(sandbox) == ["kept.txt"]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("damage", ["garbage", "nothing", "cut"])
    async def test_archives_that_cannot_be_read_are_refused_whole(
        self, subject: _Subject, kind: ArchiveFormat, damage: str
    ) -> None:
        whole = archive(kind, {"one.txt": bytes(range(256)) * 20, "two.txt": bytes(range(256)) * 20})
        content = {"garbage": b"\x07garbage" * 300, "nothing": b"", "cut": whole[: len(whole) * 2 // 5]}[
            damage
        ]
        async with subject.sandbox() as sandbox:
            with pytest.raises(FileRefused):
                await sandbox.unpack(content, kind=kind)
            assert await paths_of(sandbox) == []

    async def test_links_and_devices_in_archives_are_left_out(self, subject: _Subject) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:") as tarred:
            for name, kind in (
                ("link", tarfile.SYMTYPE),
                ("hard", tarfile.LNKTYPE),
                ("device", tarfile.CHRTYPE),
            ):
                info = tarfile.TarInfo(name)
                info.type = kind
                info.linkname = "/etc/passwd"
                tarred.addfile(info)
            tarred.addfile(tarfile.TarInfo("plain.txt"))
        async with subject.sandbox() as sandbox:
            unpacked = await sandbox.unpack(buffer.getvalue(), kind="tar")
            assert (unpacked.files, unpacked.skipped) == (1, 3)
            assert await paths_of(sandbox) == ["plain.txt"]

    @pytest.mark.parametrize("into", ["..", "/etc", "a/../..", "a//b", "nul\0"])
    async def test_archives_go_below_the_data_directory(self, subject: _Subject, into: str) -> None:
        async with subject.sandbox() as sandbox:
            with pytest.raises(FileRefused):
                await sandbox.unpack(archive("tar", {"x.txt": b"x"}), kind="tar", into=into)
            assert await paths_of(sandbox) == []
