"""Conformance tests of `Sandbox`: files and archives."""

import io
import tarfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import batched
from typing import Any, Protocol

import pytest

from fumehood.interfaces import Sandbox
from fumehood.protocol.sandbox.bundle_encoding import MAX_BUNDLED_FILE_BYTES, BundleContent, BundledFile
from fumehood.protocol.sandbox.sandbox_errors import FileRefused, SandboxFileNotFound, SandboxPayloadTooLarge
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat, ExecutionEvent
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.payloads import SourceError, build_archive, fail_midway

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
ARCHIVE_FORMATS: list[ArchiveFormat] = ["zip", "tar", "tar.gz", "tar.zst"]


class _SandboxFilesSubject(Protocol):
    """What these tests need of `SandboxSubject`."""

    def create_sandbox(self, name: str | None = None) -> AbstractAsyncContextManager[Sandbox]: ...

    async def run(
        self, sandbox: Sandbox, program: Any, execution_id: str | None = None
    ) -> list[ExecutionEvent]: ...


async def read_content(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([chunk async for chunk in sandbox.read_file(path)])


async def list_paths(sandbox: Sandbox) -> list[str]:
    return [file.path for file in (await sandbox.list_files()).files]


async def read_contents(sandbox: Sandbox, paths: Sequence[str]) -> list[BundleContent]:
    return [content async for batch in sandbox.read_files(paths) for content in batch]


async def batch_files(files: Mapping[str, bytes], size: int = 100) -> AsyncGenerator[Sequence[BundledFile]]:
    for batch in batched(files.items(), size):
        yield batch


async def stream_split(content: bytes, size: int = 1000) -> AsyncGenerator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


class SandboxFilesKit:
    """Files are written and read whole, under every valid path and no other."""

    async def test_write_list_read_delete(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            entry = await sandbox.write_file("b/data.bin", bytes(range(256)))
            assert (entry.path, entry.size) == ("b/data.bin", 256)
            await sandbox.write_file("a.txt", b"")
            listing = await sandbox.list_files()
            assert [(file.path, file.size) for file in listing.files] == [("a.txt", 0), ("b/data.bin", 256)]
            assert entry in listing.files
            assert listing.complete
            assert not listing.truncated
            assert await read_content(sandbox, "b/data.bin") == bytes(range(256))
            assert await read_content(sandbox, "a.txt") == b""
            await sandbox.delete_file("b/data.bin")
            assert await list_paths(sandbox) == ["a.txt"]

    async def test_large_files_pass_in_chunks(self, subject: _SandboxFilesSubject) -> None:
        content = b"0123456789abcdef" * (3 << 16)
        async with subject.create_sandbox() as sandbox:
            entry = await sandbox.write_file("large.bin", stream_split(content, 100_000))
            assert entry.size == len(content)
            chunks = [chunk async for chunk in sandbox.read_file("large.bin")]
            assert len(chunks) > 1
            assert b"".join(chunks) == content
            await sandbox.write_file("again.bin", content)
            assert await read_content(sandbox, "again.bin") == content

    async def test_leaving_a_file_half_read(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("large.bin", b"x" * (3 << 20))
            reading = sandbox.read_file("large.bin")
            assert await anext(reading)
            await reading.aclose()
            assert len(await read_content(sandbox, "large.bin")) == 3 << 20

    async def test_code_and_caller_see_the_same_files(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await subject.run(sandbox, "writes out.txt")
            assert await read_content(sandbox, "out.txt") == b"made"

    async def test_odd_names(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            for number, name in enumerate(ODD_NAMES):
                entry = await sandbox.write_file(name, str(number).encode())
                assert entry.path == name
            assert await list_paths(sandbox) == sorted(ODD_NAMES)
            for number, name in enumerate(ODD_NAMES):
                assert await read_content(sandbox, name) == str(number).encode()
                await sandbox.delete_file(name)
            assert await list_paths(sandbox) == []

    async def test_bad_names_are_refused(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            for name in BAD_NAMES:
                await assert_each_raises(
                    FileRefused,
                    sandbox.write_file(name, b"x"),
                    read_content(sandbox, name),
                    sandbox.delete_file(name),
                )
            assert await list_paths(sandbox) == []

    async def test_files_that_are_not_there(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await assert_each_raises(
                SandboxFileNotFound,
                read_content(sandbox, "none.txt"),
                sandbox.delete_file("none.txt"),
                read_content(sandbox, "no/such/directory.txt"),
            )

    async def test_directories_are_not_files(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("folder/file.txt", b"x")
            await assert_each_raises(
                FileRefused,
                read_content(sandbox, "folder"),
                sandbox.write_file("folder", b"x"),
                sandbox.write_file("folder/file.txt/below", b"x"),
            )
            assert await list_paths(sandbox) == ["folder/file.txt"]

    async def test_a_file_is_replaced_whole_or_not_at_all(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("kept.txt", b"first version")
            await sandbox.write_file("kept.txt", b"second")
            await assert_each_raises(
                SourceError,
                sandbox.write_file("kept.txt", fail_midway()),
                sandbox.write_file("new.txt", fail_midway()),
            )
            assert await read_content(sandbox, "kept.txt") == b"second"
            assert await list_paths(sandbox) == ["kept.txt"]

    async def test_what_changed_since(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("old.txt", b"old")
            await sandbox.write_file("doomed.txt", b"x")
            await subject.run(sandbox, "writes out.txt")
            before = await sandbox.list_files()
            unchanged = await sandbox.list_files(before.mark)
            assert (unchanged.files, unchanged.deleted, unchanged.complete) == ([], [], False)
            await sandbox.write_file("new.txt", b"new")
            await sandbox.write_file("old.txt", b"changed")
            await sandbox.delete_file("doomed.txt")
            await subject.run(sandbox, "deletes out.txt")
            changes = await sandbox.list_files(unchanged.mark)
            assert [file.path for file in changes.files] == ["new.txt", "old.txt"]
            assert sorted(changes.deleted) == ["doomed.txt", "out.txt"]
            assert not changes.complete
            again = await sandbox.list_files(before.mark)
            assert (again.files, sorted(again.deleted)) == (changes.files, ["doomed.txt", "out.txt"])
            assert (await sandbox.list_files(changes.mark)).files == []

    async def test_an_unknown_mark_lists_everything(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("here.txt", b"x")
            listing = await sandbox.list_files("not-a-mark")
            assert ([file.path for file in listing.files], listing.complete) == (["here.txt"], True)

    async def test_many_files_go_in_and_out_at_once(self, subject: _SandboxFilesSubject) -> None:
        files = {f"d{number % 7}/{number}.txt": b"%d" % number * (number % 50) for number in range(300)}
        files |= {name: name.encode() for name in ODD_NAMES}
        files["large.bin"] = bytes(MAX_BUNDLED_FILE_BYTES)
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("d1/1.txt", b"replaced")
            written = await sandbox.write_files(lambda: batch_files(files))
            size = sum(map(len, files.values()))
            assert (written.files, written.bytes, written.refused, written.reasons) == (
                len(files),
                size,
                0,
                [],
            )
            listing = await sandbox.list_files()
            assert {file.path: file.size for file in listing.files} == {
                path: len(content) for path, content in files.items()
            }
            assert max(file.modified_ns for file in listing.files) == written.modified_ns
            assert 0 < max(file.changed_ns for file in listing.files) <= written.changed_ns
            assert await read_contents(sandbox, [*files]) == [*files.values()]
            await subject.run(sandbox, "writes out.txt")
            await sandbox.write_file("d1/1.txt", b"newer")
            now = (await sandbox.list_files()).files
            for newer in (
                {file.path for file in now if file.modified_ns > written.modified_ns},
                {file.path for file in now if file.changed_ns > written.changed_ns},
            ):
                assert newer == {"out.txt", "d1/1.txt"}

    async def test_each_refused_file_of_many_is_reported(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("folder/file.txt", b"x")
            bad = [*BAD_NAMES, "folder", "folder/file.txt/below"]
            files = {"a": b"a", **dict.fromkeys(bad, b"bad"), "b": b"b"}
            written = await sandbox.write_files(lambda: batch_files(files))
            assert (written.files, written.bytes, written.refused) == (2, 2, len(bad))
            assert len(written.reasons) == len(bad)
            assert any(reason.startswith("folder/file.txt") for reason in written.reasons)
            assert await list_paths(sandbox) == ["a", "b", "folder/file.txt"]
            assert await read_content(sandbox, "folder/file.txt") == b"x"

    async def test_many_files_of_which_some_cannot_be_read(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("folder/a", b"a")
            await sandbox.write_file("large.bin", bytes(MAX_BUNDLED_FILE_BYTES + 1))
            asked = ["none", "folder", "folder/a", "large.bin", "folder/a/below", *BAD_NAMES, "folder/a"]
            found = await read_contents(sandbox, asked)
            kinds = [content if isinstance(content, bytes) else type(content) for content in found]
            assert kinds == [
                SandboxFileNotFound,
                FileRefused,
                b"a",
                SandboxPayloadTooLarge,
                SandboxFileNotFound,
                *(FileRefused for _ in BAD_NAMES),
                b"a",
            ]
            assert await read_contents(sandbox, []) == []

    async def test_many_files_that_do_not_all_come_leave_nothing(self, subject: _SandboxFilesSubject) -> None:
        async def breaking() -> AsyncGenerator[Sequence[BundledFile]]:
            yield [(f"new/{number}", b"x" * 1000) for number in range(500)]
            raise SourceError

        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("new/1", b"old")
            with pytest.raises(SourceError):
                await sandbox.write_files(breaking)
            assert await read_contents(sandbox, ["new/1"]) == [b"old"]
            assert await list_paths(sandbox) == ["new/1"]
            assert (await sandbox.write_files(lambda: batch_files({}))).files == 0

    async def test_leaving_many_files_half_read(self, subject: _SandboxFilesSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            files = {f"{number}.bin": bytes(MAX_BUNDLED_FILE_BYTES) for number in range(4)}
            await sandbox.write_files(lambda: batch_files(files))
            paths = [f"{number % 4}.bin" for number in range(40)]
            reading = sandbox.read_files(paths)
            assert len(await anext(reading)) < 40
            await reading.aclose()
            assert await read_contents(sandbox, paths[:2]) == [bytes(MAX_BUNDLED_FILE_BYTES)] * 2

    @pytest.mark.parametrize("kind", ARCHIVE_FORMATS)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_archives(self, subject: _SandboxFilesSubject, kind: ArchiveFormat, streamed: bool) -> None:
        content = build_archive(kind, {"top.txt": b"top", "a/b/deep.txt": b"deep" * 1000})
        async with subject.create_sandbox() as sandbox:
            for into, prefix in (("", ""), ("in/side", "in/side/")):
                unpacked = await sandbox.unpack_archive(
                    stream_split(content) if streamed else content, kind=kind, into=into
                )
                assert (unpacked.files, unpacked.bytes, unpacked.skipped) == (2, 4003, 0)
                changed_ns = [file.changed_ns for file in (await sandbox.list_files()).files]
                assert 0 < max(changed_ns) <= unpacked.changed_ns
                assert await read_content(sandbox, f"{prefix}a/b/deep.txt") == b"deep" * 1000
                assert await read_content(sandbox, f"{prefix}top.txt") == b"top"

    @pytest.mark.parametrize("kind", ARCHIVE_FORMATS)
    @pytest.mark.parametrize("name", ["../up.txt", "/etc/absolute.txt", "a/../../up.txt"])
    async def test_archives_that_reach_out_are_refused_whole(
        self, subject: _SandboxFilesSubject, kind: ArchiveFormat, name: str
    ) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("kept.txt", b"kept")
            hostile = build_archive(kind, {"good.txt": b"good", name: b"bad", "after.txt": b"x"})
            with pytest.raises(FileRefused):
                await sandbox.unpack_archive(hostile, kind=kind)
            assert await list_paths(sandbox) == ["kept.txt"]

    @pytest.mark.parametrize("kind", ARCHIVE_FORMATS)
    @pytest.mark.parametrize("damage", ["garbage", "nothing", "cut"])
    async def test_archives_that_cannot_be_read_are_refused_whole(
        self, subject: _SandboxFilesSubject, kind: ArchiveFormat, damage: str
    ) -> None:
        whole = build_archive(kind, {"one.txt": bytes(range(256)) * 20, "two.txt": bytes(range(256)) * 20})
        content = {"garbage": b"\x07garbage" * 300, "nothing": b"", "cut": whole[: len(whole) * 2 // 5]}[
            damage
        ]
        async with subject.create_sandbox() as sandbox:
            with pytest.raises(FileRefused):
                await sandbox.unpack_archive(content, kind=kind)
            assert await list_paths(sandbox) == []

    async def test_links_and_devices_in_archives_are_left_out(self, subject: _SandboxFilesSubject) -> None:
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
        async with subject.create_sandbox() as sandbox:
            unpacked = await sandbox.unpack_archive(buffer.getvalue(), kind="tar")
            assert (unpacked.files, unpacked.skipped) == (1, 3)
            assert await list_paths(sandbox) == ["plain.txt"]

    @pytest.mark.parametrize("into", ["..", "/etc", "a/../..", "a//b", "nul\0"])
    async def test_archives_go_below_the_data_directory(
        self, subject: _SandboxFilesSubject, into: str
    ) -> None:
        async with subject.create_sandbox() as sandbox:
            with pytest.raises(FileRefused):
                await sandbox.unpack_archive(build_archive("tar", {"x.txt": b"x"}), kind="tar", into=into)
            assert await list_paths(sandbox) == []
