"""Conformance tests of `BlobStore` and `GarbageCollectedBlobStore`.

`BlobStoreKit` needs a fixture `blobs`. `ReferencedBlobsKit` needs fixtures `blobs`, and the `primitive` blob store and
the `store` of records that it uses.
"""

import asyncio
import hashlib
from collections.abc import Sequence

import pytest

from fumehood.interfaces import BlobStore, GarbageCollectedBlobStore, Store
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.testing.conformance_kits.payloads import SourceError, fail_midway, stream_chunks


async def read_blob(
    blobs: BlobStore | GarbageCollectedBlobStore, name: str, start: int = 0, end: int | None = None
) -> bytes:
    return b"".join([chunk async for chunk in blobs.read(name, start, end)])


async def _list_all_names(blobs: BlobStore, older_than: float) -> set[str]:
    return {name async for names in blobs.list_names(older_than) for name in names}


class BlobStoreKit:
    async def test_content_is_read_as_written(self, blobs: BlobStore) -> None:
        for content in (b"", b"x", bytes(range(256)) * 20_000):
            name = await blobs.put(content)
            assert name == hashlib.sha256(content).hexdigest()
            assert await read_blob(blobs, name) == content

    async def test_chunks_are_one_blob(self, blobs: BlobStore) -> None:
        chunks = [b"a" * 700_000, b"", b"b" * 700_000, b"c"]
        name = await blobs.put(stream_chunks(*chunks))
        assert name == await blobs.put(b"".join(chunks))
        assert await read_blob(blobs, name) == b"".join(chunks)
        assert await blobs.put(stream_chunks()) == await blobs.put(b"")

    async def test_a_deleted_blob_is_gone(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"gone")
        kept = await blobs.put(b"kept")
        await blobs.delete(name)
        await blobs.delete(name)
        with pytest.raises(KeyError):
            await anext(blobs.read(name))
        assert await read_blob(blobs, kept) == b"kept"
        assert await blobs.put(b"gone") == name
        assert await read_blob(blobs, name) == b"gone"

    async def test_invalid_names_are_unknown(self, blobs: BlobStore) -> None:
        real = await blobs.put(b"real")
        for name in (
            "",
            "..",
            "../secret",
            "/etc/passwd",
            real.upper(),
            real + "\n",
            real[:-1],
            "\0",
            "\udcff",
        ):
            with pytest.raises(KeyError):
                await anext(blobs.read(name))
            await blobs.delete(name)
        assert await read_blob(blobs, real) == b"real"

    async def test_a_broken_upload_leaves_nothing(self, blobs: BlobStore) -> None:
        with pytest.raises(SourceError):
            await blobs.put(fail_midway(b"x" * 2_000_000))
        with pytest.raises(KeyError):
            await anext(blobs.read(hashlib.sha256(b"x" * 2_000_000).hexdigest()))

    async def test_many_at_once(self, blobs: BlobStore) -> None:
        contents = [bytes([number % 10]) * 50_000 for number in range(40)]
        names = await asyncio.gather(*(blobs.put(stream_chunks(content)) for content in contents))
        assert len(set(names)) == 10
        found = await asyncio.gather(*(read_blob(blobs, name) for name in names))
        assert found == contents

    @pytest.mark.parametrize("number", [0, 1, 5, 300])
    async def test_many_together(self, blobs: BlobStore, number: int) -> None:
        contents = [b"%d" % (index % 200) * (index % 50) for index in range(number)]
        notified: list[str] = []

        async def before_commit(names: Sequence[str]) -> None:
            assert not any(await blobs.read_many(names))
            notified.extend(names)

        names = await blobs.put_many(contents, before_commit)
        assert names == notified == [hashlib.sha256(content).hexdigest() for content in contents]
        assert await blobs.read_many([*names, "ab" * 32, "../secret"]) == [*contents, None, None]
        assert await blobs.put_many(contents) == names
        assert await _list_all_names(blobs, -60) == {*names}
        await blobs.delete(*names, "..")
        assert await _list_all_names(blobs, -60) == set()

    async def test_many_that_are_refused_are_not_there(self, blobs: BlobStore) -> None:
        async def refuse(names: Sequence[str]) -> None:
            raise RuntimeError(f"not these {len(names)}")

        with pytest.raises(RuntimeError, match="not these 20"):
            await blobs.put_many([bytes([number]) for number in range(20)], refuse)
        assert await _list_all_names(blobs, -60) == set()

    async def test_reading_can_be_left(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"y" * 3_000_000)
        reading = blobs.read(name)
        assert (await anext(reading)).startswith(b"y")
        await reading.aclose()
        assert len(await read_blob(blobs, name)) == 3_000_000

    async def test_a_part_is_read_alone(self, blobs: BlobStore) -> None:
        content = bytes(range(256)) * 4000
        name = await blobs.put(content)
        assert await blobs.get_size(name) == len(content)
        for start, end in ((0, 1), (5, 5), (7, 700_001), (len(content) - 1, None), (3, len(content) + 9)):
            assert await read_blob(blobs, name, start, end) == content[start:end]
        assert await read_blob(blobs, name, len(content)) == b""
        for absent in ("ab" * 32, "../secret", ""):
            with pytest.raises(KeyError):
                await blobs.get_size(absent)

    async def test_names(self, blobs: BlobStore) -> None:
        assert await _list_all_names(blobs, -60) == set()
        names = {await blobs.put(bytes([number])) for number in range(20)}
        assert await _list_all_names(blobs, -60) == names
        assert await _list_all_names(blobs, 3600) == set()
        gone = names.pop()
        await blobs.delete(gone)
        assert await _list_all_names(blobs, -60) == names

    async def test_before_commit_precedes_the_blob(self, blobs: BlobStore) -> None:
        notified: list[str] = []

        async def before_commit(names: Sequence[str]) -> None:
            with pytest.raises(KeyError):
                await blobs.get_size(names[0])
            notified.extend(names)

        assert [await blobs.put(stream_chunks(b"con", b"tent"), before_commit)] == notified

        async def refuse(names: Sequence[str]) -> None:
            notified.extend(names)
            raise RuntimeError("not this one")

        with pytest.raises(RuntimeError, match="not this one"):
            await blobs.put(b"refused", refuse)
        assert await _list_all_names(blobs, -60) == {notified[0]}


def _make_record(file_id: str, blob: str) -> UploadedFileRecord:
    return UploadedFileRecord(
        id=file_id, tenant="t", filename="f", bytes=1, purpose="user_data", created_at=1.0, blob=blob
    )


class ReferencedBlobsKit:
    async def test_what_a_record_refers_to_stays(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        async with blobs.put_pinned(stream_chunks(b"con", b"tent")) as ref:
            assert ref.bytes == 7
            await blobs.delete_unreferenced([ref.name])
            assert await read_blob(blobs, ref.name) == b"content"
            await store.add_upload(_make_record("file-1", ref.name))
        assert await read_blob(blobs, ref.name) == b"content"
        await blobs.delete_unreferenced([ref.name, ""])
        assert await primitive.get_size(ref.name) == 7
        await store.delete_upload("t", "file-1")
        await blobs.delete_unreferenced([ref.name])
        with pytest.raises(KeyError):
            await primitive.get_size(ref.name)

    async def test_what_went_wrong_leaves_nothing(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore
    ) -> None:
        with pytest.raises(RuntimeError, match="no room"):
            async with blobs.put_pinned(b"content"):
                raise RuntimeError("no room")
        assert await _list_all_names(primitive, -60) == set()

    async def test_many_are_put_together(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        contents = [b"%d" % (number % 30) for number in range(40)]
        async with blobs.put_many_pinned(contents) as refs:
            assert [ref.bytes for ref in refs] == [*map(len, contents)]
            await blobs.delete_unreferenced([ref.name for ref in refs])
            assert await blobs.read_many([ref.name for ref in refs]) == contents
            for number in range(10):
                await store.add_upload(_make_record(f"file-{number}", refs[number].name))
        assert await _list_all_names(primitive, -60) == {ref.name for ref in refs[:10]}
        with pytest.raises(RuntimeError, match="no room"):
            async with blobs.put_many_pinned(contents):
                raise RuntimeError("no room")
        assert await _list_all_names(primitive, -60) == {ref.name for ref in refs[:10]}

    async def test_who_fails_takes_nothing_from_others(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        async with blobs.put_pinned(b"content") as ref:
            with pytest.raises(RuntimeError, match="no room"):
                async with blobs.put_pinned(b"content"):
                    raise RuntimeError("no room")
            assert await primitive.get_size(ref.name) == 7
            await store.add_upload(_make_record("file-1", ref.name))
        assert await primitive.get_size(ref.name) == 7

    async def test_a_blob_that_is_there_can_be_held(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        name = await primitive.put(b"content")
        async with blobs.pin(name):
            await blobs.delete_unreferenced([name])
            await store.add_upload(_make_record("file-1", name))
        assert await read_blob(blobs, name) == b"content"
        async with blobs.pin(name):
            await store.delete_upload("t", "file-1")
            await blobs.delete_unreferenced([name])
            assert await primitive.get_size(name) == 7
        with pytest.raises(KeyError):
            await primitive.get_size(name)
        with pytest.raises(KeyError):
            async with blobs.pin(name):
                pass

    async def test_many_come_and_go_at_once(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        """The blob exists while any of several short-lived records refers to it."""

        async def visit(number: int) -> None:
            for round_number in range(5):
                file_id = f"file-{number}-{round_number}"
                async with blobs.put_pinned(b"shared") as ref:
                    await store.add_upload(_make_record(file_id, ref.name))
                assert await read_blob(blobs, ref.name) == b"shared"
                await store.delete_upload("t", file_id)
                await blobs.delete_unreferenced([ref.name])

        await asyncio.gather(*(visit(number) for number in range(8)))
        assert await _list_all_names(primitive, -60) == set()

    async def test_orphans_are_swept_when_they_are_old(
        self, blobs: GarbageCollectedBlobStore, primitive: BlobStore, store: Store
    ) -> None:
        used = await primitive.put(b"used")
        await store.add_upload(_make_record("file-1", used))
        orphans = {await primitive.put(bytes([number])) for number in range(3)}
        assert await blobs.collect_garbage() == 0
        assert await _list_all_names(primitive, -60) == {used, *orphans}
        await self.age_blobs(blobs, 7200)
        assert await blobs.collect_garbage() == 3
        assert await _list_all_names(primitive, -60) == {used}

    async def age_blobs(self, blobs: GarbageCollectedBlobStore, seconds: float) -> None:
        """Make all blobs older. Implement it in the subclass."""
        raise NotImplementedError
