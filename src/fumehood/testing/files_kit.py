"""What every implementation of `Files` must pass; imports pytest, `interfaces` and siblings.

Give a test class the fixture `subject` and inherit from `FilesKit`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import pytest

from fumehood.interfaces import Caller, Files
from fumehood.protocol.errors import BodyTooLarge, InvalidRequest, NotFound
from fumehood.protocol.files import FileRecord, NewFile, UploadPurpose
from fumehood.protocol.listing import Window
from fumehood.testing.clock import FakeClock

ANN = Caller("ann")
BEN = Caller("ben")
FILE_BYTES = 100_000
TENANT_FILES = 20
TENANT_BYTES = 250_000


@dataclass(frozen=True, slots=True)
class Subject:
    """Files of at most FILE_BYTES, of which a tenant may have TENANT_FILES with TENANT_BYTES.

    left: how many contents are kept, wherever that is.
    """

    files: Files
    clock: FakeClock
    left: Callable[[], int]

    async def add(
        self,
        content: bytes = b"content",
        name: str = "a.txt",
        *,
        caller: Caller = ANN,
        purpose: UploadPurpose = "user_data",
        expires_after: int | None = None,
    ) -> FileRecord:
        new = NewFile(filename=name, purpose=purpose, expires_after=expires_after)
        return await self.files.create(caller, new, pieces(content))

    async def read(self, record: FileRecord, start: int = 0, end: int | None = None) -> bytes:
        found = self.files.read(Caller(record.tenant), record.id, start, end)
        return b"".join([piece async for piece in found])


async def pieces(*contents: bytes) -> AsyncGenerator[bytes]:
    for content in contents:
        yield content


def ids(records: Sequence[FileRecord]) -> list[str]:
    return [record.id for record in records]


class FilesKit:
    async def test_what_was_uploaded_is_there(self, subject: Subject) -> None:
        record = await subject.add(b"x" * 70_000 + b"end", "dir/naïve\u202e\n.txt", purpose="vision")
        assert await subject.files.file(ANN, record.id) == record
        assert (record.bytes, record.purpose, record.expires_at) == (70_003, "vision", None)
        assert record.filename == "naïve\ufffd\ufffd.txt"
        assert record.id.startswith("file-")
        assert len(record.id) <= 64
        assert await subject.read(record) == b"x" * 70_000 + b"end"
        assert await subject.read(record, 69_999, 70_001) == b"xe"
        assert await subject.read(record, 70_003) == b""

    async def test_for_others_it_is_not_there(self, subject: Subject) -> None:
        record = await subject.add()
        for file_id in (record.id, "file-unknown", "\udcff", ""):
            with pytest.raises(NotFound):
                await subject.files.file(BEN, file_id)
            with pytest.raises(NotFound):
                await anext(subject.files.read(BEN, file_id))
            with pytest.raises(NotFound):
                await subject.files.delete(BEN, file_id)
        assert list(await subject.files.files(BEN, Window())) == []
        assert await subject.read(record) == b"content"

    async def test_lists(self, subject: Subject) -> None:
        records: list[FileRecord] = []
        for number in range(7):
            records.append(await subject.add(b"%d" % number, purpose="batch" if number % 2 else "vision"))
            subject.clock.advance(0.5)
        assert ids(await subject.files.files(ANN, Window(limit=3))) == ids(records[:2:-1])
        after = Window(limit=2, after=records[1].id, newest_first=False)
        assert ids(await subject.files.files(ANN, after)) == ids(records[2:5])
        assert ids(await subject.files.files(ANN, Window(), "batch")) == ids(records[5::-2])
        with pytest.raises(InvalidRequest):
            await subject.files.files(ANN, Window(after="file-unknown"))

    async def test_what_was_deleted_is_gone(self, subject: Subject) -> None:
        record = await subject.add()
        await subject.files.delete(ANN, record.id)
        with pytest.raises(NotFound):
            await subject.files.delete(ANN, record.id)
        with pytest.raises(NotFound):
            await subject.files.file(ANN, record.id)
        assert subject.left() == 0

    async def test_equal_contents_are_deleted_one_by_one(self, subject: Subject) -> None:
        records = [await subject.add(), await subject.add(name="b.txt"), await subject.add(caller=BEN)]
        assert len({record.id for record in records}) == 3
        for record in records:
            assert subject.left() == 1
            assert await subject.read(record) == b"content"
            await subject.files.delete(Caller(record.tenant), record.id)
        assert subject.left() == 0

    async def test_deletions_at_once(self, subject: Subject) -> None:
        record = await subject.add()
        results = await asyncio.gather(
            *(subject.files.delete(ANN, record.id) for _ in range(5)), return_exceptions=True
        )
        assert sum(result is None for result in results) == 1
        assert all(result is None or isinstance(result, NotFound) for result in results)

    async def test_a_file_expires(self, subject: Subject) -> None:
        hour = await subject.add(b"hour", expires_after=3600)
        batch = await subject.add(b"batch", purpose="batch")
        kept = await subject.add(b"kept")
        assert hour.expires_at == hour.created_at + 3600
        assert batch.expires_at == batch.created_at + 30 * 86_400
        subject.clock.advance(3599)
        assert await subject.read(hour) == b"hour"
        subject.clock.advance(1)
        with pytest.raises(NotFound):
            await subject.files.file(ANN, hour.id)
        with pytest.raises(NotFound):
            await subject.files.delete(ANN, hour.id)
        assert set(ids(await subject.files.files(ANN, Window()))) == {batch.id, kept.id}

    @pytest.mark.parametrize("seconds", [-1, 0, 3599, 30 * 86_400 + 1])
    async def test_lives_that_are_not_granted(self, subject: Subject, seconds: int) -> None:
        with pytest.raises(InvalidRequest) as refused:
            await subject.add(expires_after=seconds)
        assert refused.value.param == "expires_after.seconds"
        assert subject.left() == 0

    async def test_too_large(self, subject: Subject) -> None:
        assert (await subject.add(b"x" * FILE_BYTES)).bytes == FILE_BYTES
        came = 0

        async def endless() -> AsyncGenerator[bytes]:
            nonlocal came
            while True:
                came += 1000
                yield b"y" * 1000

        with pytest.raises(BodyTooLarge):
            await subject.files.create(ANN, NewFile(filename="a.txt", purpose="user_data"), endless())
        assert came == FILE_BYTES + 1000
        assert subject.left() == 1

    async def test_bytes_of_a_tenant(self, subject: Subject) -> None:
        fifth = b"x" * (TENANT_BYTES // 5)
        records = [await subject.add(fifth[:-1] + b"%d" % number) for number in range(5)]
        with pytest.raises(InvalidRequest) as refused:
            await subject.add(b"x")
        assert refused.value.wire_code == "storage_quota_exceeded"
        assert (await subject.add(fifth, caller=BEN)).bytes == len(fifth)
        assert subject.left() == 6
        await subject.files.delete(ANN, records[0].id)
        assert (await subject.add(fifth)).bytes == len(fifth)

    async def test_files_of_a_tenant(self, subject: Subject) -> None:
        records = [await subject.add(b"%d" % number) for number in range(TENANT_FILES)]
        with pytest.raises(InvalidRequest, match="at most"):
            await subject.add(b"more")
        await subject.files.delete(ANN, records[0].id)
        await subject.add(b"more")
        assert len(await subject.files.files(ANN, Window(limit=100))) == TENANT_FILES

    async def test_uploads_at_once_share_the_room(self, subject: Subject) -> None:
        """None is one too many, and nothing stays of those that are refused."""
        content = [bytes([65 + number]) * (TENANT_BYTES // 5) for number in range(8)]
        results = await asyncio.gather(*map(subject.add, content), return_exceptions=True)
        kept = [result for result in results if isinstance(result, FileRecord)]
        refused = [result for result in results if isinstance(result, InvalidRequest)]
        assert (1 <= len(kept) <= 5, len(kept) + len(refused)) == (True, 8)
        assert subject.left() == len(kept)
        assert sum(record.bytes for record in kept) <= TENANT_BYTES

    async def test_what_goes_wrong_leaves_nothing(self, subject: Subject) -> None:
        async def broken() -> AsyncGenerator[bytes]:
            yield b"x" * 5000
            raise ConnectionResetError("the client is gone")

        with pytest.raises(ConnectionResetError):
            await subject.files.create(ANN, NewFile(filename="a.txt", purpose="user_data"), broken())

        read: list[str] = []

        async def content() -> AsyncGenerator[bytes]:
            yield b"content"
            read.append("all")

        def refuse() -> NewFile | None:
            if read:
                raise InvalidRequest("No purpose.", param="purpose")
            return None

        with pytest.raises(InvalidRequest, match="No purpose"):
            await subject.files.create(ANN, refuse, content())
        assert subject.left() == 0
        assert list(await subject.files.files(ANN, Window())) == []

    async def test_what_is_told_afterwards(self, subject: Subject) -> None:
        read: list[str] = []

        async def content() -> AsyncGenerator[bytes]:
            yield b"content"
            read.append("all")

        def told() -> NewFile | None:
            return NewFile(filename="late.md", purpose="evals") if read else None

        record = await subject.files.create(ANN, told, content())
        assert (record.filename, record.purpose) == ("late.md", "evals")

        def more() -> NewFile:
            return NewFile(filename="a.md", purpose="evals", expires_after=3600 * len(read))

        record = await subject.files.create(ANN, more, content())
        assert record.expires_at == record.created_at + 7200
        with pytest.raises(InvalidRequest):
            await subject.files.create(ANN, lambda: None, content())

    async def test_who_is_cancelled_leaves_nothing(self, subject: Subject) -> None:
        waiting = asyncio.Event()

        async def stuck() -> AsyncGenerator[bytes]:
            yield b"x" * 5000
            waiting.set()
            await asyncio.Event().wait()

        new = NewFile(filename="a.txt", purpose="user_data")
        upload = asyncio.create_task(subject.files.create(ANN, new, stuck()))
        await waiting.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert subject.left() == 0
        await asyncio.gather(*(subject.add(b"%d" % number) for number in range(3)))

    async def test_content_is_what_its_name_says(self, subject: Subject) -> None:
        png = b"\x89PNG\r\n\x1a\n" + bytes(100)
        assert (await subject.add(png, "a.PNG")).filename == "a.PNG"
        for name, content in (
            ("a.txt", png),
            ("a.png", b"text"),
            ("a.exe", b"MZ\0"),
            ("a", b"\x7fELF\2\1\1\0"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await subject.add(content, name)
            assert (refused.value.wire_code, refused.value.param) == ("unsupported_file", "file")
        assert subject.left() == 1
