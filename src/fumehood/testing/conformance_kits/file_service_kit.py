"""Conformance tests of `FileService`.

`FileServiceKit` needs a fixture `subject` of type `FileServiceSubject`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import pytest

from fumehood.interfaces import Caller, FileService
from fumehood.protocol.openai.api_errors import BodyTooLarge, InvalidRequest, NotFound
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord, UploadPurpose
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.payloads import SourceError, fail_midway, stream_chunks
from fumehood.testing.fakes.fake_clock import FakeClock

ANN = Caller("ann")
BEN = Caller("ben")
MAX_FILE_BYTES = 100_000
MAX_TENANT_FILES = 20
MAX_TENANT_BYTES = 250_000


@dataclass(frozen=True, slots=True)
class FileServiceSubject:
    """The implementation under test, with the limits MAX_FILE_BYTES, MAX_TENANT_FILES and MAX_TENANT_BYTES.

    count_blobs: returns the number of stored contents.
    """

    files: FileService
    clock: FakeClock
    count_blobs: Callable[[], int]

    async def upload(
        self,
        content: bytes = b"content",
        name: str = "a.txt",
        *,
        caller: Caller = ANN,
        purpose: UploadPurpose = "user_data",
        expires_after: int | None = None,
    ) -> UploadedFileRecord:
        metadata = FileUploadMetadata(filename=name, purpose=purpose, expires_after=expires_after)
        return await self.files.create_file(caller, metadata, stream_chunks(content))

    async def read_content(self, record: UploadedFileRecord, start: int = 0, end: int | None = None) -> bytes:
        chunks = self.files.read_file(Caller(record.tenant), record.id, start, end)
        return b"".join([chunk async for chunk in chunks])


def list_ids(records: Sequence[UploadedFileRecord]) -> list[str]:
    return [record.id for record in records]


async def _record_end(read: list[str]) -> AsyncGenerator[bytes]:
    """Stream a content, and record that it was read to its end."""
    yield b"content"
    read.append("all")


class FileServiceKit:
    async def test_what_was_uploaded_is_there(self, subject: FileServiceSubject) -> None:
        record = await subject.upload(b"x" * 70_000 + b"end", "dir/naïve\u202e\n.txt", purpose="vision")
        assert await subject.files.get_file(ANN, record.id) == record
        assert (record.bytes, record.purpose, record.expires_at) == (70_003, "vision", None)
        assert record.filename == "naïve\ufffd\ufffd.txt"
        assert record.id.startswith("file-")
        assert len(record.id) <= 64
        assert await subject.read_content(record) == b"x" * 70_000 + b"end"
        assert await subject.read_content(record, 69_999, 70_001) == b"xe"
        assert await subject.read_content(record, 70_003) == b""

    async def test_for_others_it_is_not_there(self, subject: FileServiceSubject) -> None:
        record = await subject.upload()
        for file_id in (record.id, "file-unknown", "\udcff", ""):
            await assert_each_raises(
                NotFound,
                subject.files.get_file(BEN, file_id),
                anext(subject.files.read_file(BEN, file_id)),
                subject.files.delete_file(BEN, file_id),
            )
        assert list(await subject.files.list_files(BEN, PageQuery())) == []
        assert await subject.read_content(record) == b"content"

    async def test_lists(self, subject: FileServiceSubject) -> None:
        records: list[UploadedFileRecord] = []
        for number in range(7):
            records.append(await subject.upload(b"%d" % number, purpose="batch" if number % 2 else "vision"))
            subject.clock.advance(0.5)
        assert list_ids(await subject.files.list_files(ANN, PageQuery(limit=3))) == list_ids(records[:2:-1])
        after = PageQuery(limit=2, after=records[1].id, newest_first=False)
        assert list_ids(await subject.files.list_files(ANN, after)) == list_ids(records[2:5])
        assert list_ids(await subject.files.list_files(ANN, PageQuery(), "batch")) == list_ids(records[5::-2])
        with pytest.raises(InvalidRequest):
            await subject.files.list_files(ANN, PageQuery(after="file-unknown"))

    async def test_what_was_deleted_is_gone(self, subject: FileServiceSubject) -> None:
        record = await subject.upload()
        await subject.files.delete_file(ANN, record.id)
        await assert_each_raises(
            NotFound,
            subject.files.delete_file(ANN, record.id),
            subject.files.get_file(ANN, record.id),
        )
        assert subject.count_blobs() == 0

    async def test_equal_contents_are_deleted_one_by_one(self, subject: FileServiceSubject) -> None:
        records = [
            await subject.upload(),
            await subject.upload(name="b.txt"),
            await subject.upload(caller=BEN),
        ]
        assert len({record.id for record in records}) == 3
        for record in records:
            assert subject.count_blobs() == 1
            assert await subject.read_content(record) == b"content"
            await subject.files.delete_file(Caller(record.tenant), record.id)
        assert subject.count_blobs() == 0

    async def test_deletions_at_once(self, subject: FileServiceSubject) -> None:
        record = await subject.upload()
        results = await asyncio.gather(
            *(subject.files.delete_file(ANN, record.id) for _ in range(5)), return_exceptions=True
        )
        assert sum(result is None for result in results) == 1
        assert all(result is None or isinstance(result, NotFound) for result in results)

    async def test_a_file_expires(self, subject: FileServiceSubject) -> None:
        hour = await subject.upload(b"hour", expires_after=3600)
        batch = await subject.upload(b"batch", purpose="batch")
        kept = await subject.upload(b"kept")
        assert hour.expires_at == hour.created_at + 3600
        assert batch.expires_at == batch.created_at + 30 * 86_400
        subject.clock.advance(3599)
        assert await subject.read_content(hour) == b"hour"
        subject.clock.advance(1)
        await assert_each_raises(
            NotFound,
            subject.files.get_file(ANN, hour.id),
            subject.files.delete_file(ANN, hour.id),
        )
        assert set(list_ids(await subject.files.list_files(ANN, PageQuery()))) == {batch.id, kept.id}

    @pytest.mark.parametrize("seconds", [-1, 0, 3599, 30 * 86_400 + 1])
    async def test_lives_that_are_not_granted(self, subject: FileServiceSubject, seconds: int) -> None:
        with pytest.raises(InvalidRequest) as refused:
            await subject.upload(expires_after=seconds)
        assert refused.value.param == "expires_after.seconds"
        assert subject.count_blobs() == 0

    async def test_too_large(self, subject: FileServiceSubject) -> None:
        assert (await subject.upload(b"x" * MAX_FILE_BYTES)).bytes == MAX_FILE_BYTES
        came = 0

        async def endless() -> AsyncGenerator[bytes]:
            nonlocal came
            while True:
                came += 1000
                yield b"y" * 1000

        with pytest.raises(BodyTooLarge):
            await subject.files.create_file(
                ANN, FileUploadMetadata(filename="a.txt", purpose="user_data"), endless()
            )
        assert came == MAX_FILE_BYTES + 1000
        assert subject.count_blobs() == 1

    async def test_bytes_of_a_tenant(self, subject: FileServiceSubject) -> None:
        fifth = b"x" * (MAX_TENANT_BYTES // 5)
        records = [await subject.upload(fifth[:-1] + b"%d" % number) for number in range(5)]
        with pytest.raises(InvalidRequest) as refused:
            await subject.upload(b"x")
        assert refused.value.wire_code == "storage_quota_exceeded"
        assert (await subject.upload(fifth, caller=BEN)).bytes == len(fifth)
        assert subject.count_blobs() == 6
        await subject.files.delete_file(ANN, records[0].id)
        assert (await subject.upload(fifth)).bytes == len(fifth)

    async def test_files_of_a_tenant(self, subject: FileServiceSubject) -> None:
        records = [await subject.upload(b"%d" % number) for number in range(MAX_TENANT_FILES)]
        with pytest.raises(InvalidRequest) as refused:
            await subject.upload(b"more")
        assert refused.value.wire_code == "storage_quota_exceeded"
        await subject.files.delete_file(ANN, records[0].id)
        await subject.upload(b"more")
        assert len(await subject.files.list_files(ANN, PageQuery(limit=100))) == MAX_TENANT_FILES

    async def test_uploads_at_once_share_the_room(self, subject: FileServiceSubject) -> None:
        """Concurrent uploads never exceed the quota, and refused ones leave nothing."""
        content = [bytes([65 + number]) * (MAX_TENANT_BYTES // 5) for number in range(8)]
        results = await asyncio.gather(*map(subject.upload, content), return_exceptions=True)
        kept = [result for result in results if isinstance(result, UploadedFileRecord)]
        refused = [result for result in results if isinstance(result, InvalidRequest)]
        assert (1 <= len(kept) <= 5, len(kept) + len(refused)) == (True, 8)
        assert subject.count_blobs() == len(kept)
        assert sum(record.bytes for record in kept) <= MAX_TENANT_BYTES

    async def test_failed_uploads_leave_nothing(self, subject: FileServiceSubject) -> None:
        metadata = FileUploadMetadata(filename="a.txt", purpose="user_data")
        with pytest.raises(SourceError):
            await subject.files.create_file(ANN, metadata, fail_midway(b"x" * 5000))
        read: list[str] = []

        def refuse() -> FileUploadMetadata | None:
            if read:
                raise InvalidRequest("No purpose.", param="purpose")
            return None

        with pytest.raises(InvalidRequest, match="No purpose"):
            await subject.files.create_file(ANN, refuse, _record_end(read))
        assert subject.count_blobs() == 0
        assert list(await subject.files.list_files(ANN, PageQuery())) == []

    async def test_metadata_that_comes_after_the_content(self, subject: FileServiceSubject) -> None:
        read: list[str] = []

        def metadata() -> FileUploadMetadata | None:
            return FileUploadMetadata(filename="late.md", purpose="evals") if read else None

        record = await subject.files.create_file(ANN, metadata, _record_end(read))
        assert (record.filename, record.purpose) == ("late.md", "evals")

        def more() -> FileUploadMetadata:
            return FileUploadMetadata(filename="a.md", purpose="evals", expires_after=3600 * len(read))

        record = await subject.files.create_file(ANN, more, _record_end(read))
        assert record.expires_at == record.created_at + 7200
        with pytest.raises(InvalidRequest):
            await subject.files.create_file(ANN, lambda: None, _record_end(read))

    async def test_who_is_cancelled_leaves_nothing(self, subject: FileServiceSubject) -> None:
        waiting = asyncio.Event()

        async def stuck() -> AsyncGenerator[bytes]:
            yield b"x" * 5000
            waiting.set()
            await asyncio.Event().wait()

        new = FileUploadMetadata(filename="a.txt", purpose="user_data")
        upload = asyncio.create_task(subject.files.create_file(ANN, new, stuck()))
        await waiting.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert subject.count_blobs() == 0
        await asyncio.gather(*(subject.upload(b"%d" % number) for number in range(3)))

    async def test_content_is_what_its_name_says(self, subject: FileServiceSubject) -> None:
        png = b"\x89PNG\r\n\x1a\n" + bytes(100)
        assert (await subject.upload(png, "a.PNG")).filename == "a.PNG"
        for name, content in (
            ("a.txt", png),
            ("a.png", b"text"),
            ("a.exe", b"MZ\0"),
            ("a", b"\x7fELF\2\1\1\0"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await subject.upload(content, name)
            assert (refused.value.wire_code, refused.value.param) == ("unsupported_file", "file")
        assert subject.count_blobs() == 1
