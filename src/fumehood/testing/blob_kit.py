"""What every implementation of `BlobStore` and of `Blobs` must pass; imports pytest, `interfaces` and siblings.

Give a test class the fixture `blobs` and inherit from `BlobKit`; or the fixtures `blobs`, `primitive` and `store`,
which belong together, and inherit from `ReferencesKit`.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from fumehood.interfaces import Blobs, BlobStore, Store
from fumehood.protocol.files import FileRecord


async def whole(blobs: BlobStore | Blobs, name: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([piece async for piece in blobs.read(name, start, end)])


async def _all_names(blobs: BlobStore, older_than: float) -> set[str]:
    return {name async for names in blobs.names(older_than) for name in names}


async def _pieces(*pieces: bytes) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


class BlobKit:
    async def test_what_went_in_comes_out(self, blobs: BlobStore) -> None:
        for content in (b"", b"x", bytes(range(256)) * 20_000):
            name = await blobs.put(content)
            assert name == hashlib.sha256(content).hexdigest()
            assert await whole(blobs, name) == content

    async def test_pieces_are_one_blob(self, blobs: BlobStore) -> None:
        pieces = [b"a" * 700_000, b"", b"b" * 700_000, b"c"]
        name = await blobs.put(_pieces(*pieces))
        assert name == await blobs.put(b"".join(pieces))
        assert await whole(blobs, name) == b"".join(pieces)
        assert await blobs.put(_pieces()) == await blobs.put(b"")

    async def test_a_deleted_blob_is_gone(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"gone")
        kept = await blobs.put(b"kept")
        await blobs.delete(name)
        await blobs.delete(name)
        with pytest.raises(KeyError):
            await anext(blobs.read(name))
        assert await whole(blobs, kept) == b"kept"
        assert await blobs.put(b"gone") == name
        assert await whole(blobs, name) == b"gone"

    async def test_other_names_are_nobodys(self, blobs: BlobStore) -> None:
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
        assert await whole(blobs, real) == b"real"

    async def test_a_broken_upload_leaves_nothing(self, blobs: BlobStore) -> None:
        async def broken() -> AsyncGenerator[bytes]:
            yield b"x" * 2_000_000
            raise RuntimeError("the client is gone")

        with pytest.raises(RuntimeError, match="gone"):
            await blobs.put(broken())
        with pytest.raises(KeyError):
            await anext(blobs.read(hashlib.sha256(b"x" * 2_000_000).hexdigest()))

    async def test_many_at_once(self, blobs: BlobStore) -> None:
        contents = [bytes([number % 10]) * 50_000 for number in range(40)]
        names = await asyncio.gather(*(blobs.put(_pieces(content)) for content in contents))
        assert len(set(names)) == 10
        found = await asyncio.gather(*(whole(blobs, name) for name in names))
        assert found == contents

    @pytest.mark.parametrize("number", [0, 1, 5, 300])
    async def test_many_together(self, blobs: BlobStore, number: int) -> None:
        contents = [b"%d" % (one % 200) * (one % 50) for one in range(number)]
        told: list[str] = []

        async def named(names: Sequence[str]) -> None:
            assert not any(await blobs.read_all(names))
            told.extend(names)

        names = await blobs.put_all(contents, named)
        assert names == told == [hashlib.sha256(content).hexdigest() for content in contents]
        assert await blobs.read_all([*names, "ab" * 32, "../secret"]) == [*contents, None, None]
        assert await blobs.put_all(contents) == names
        assert await _all_names(blobs, -60) == {*names}
        await blobs.delete(*names, "..")
        assert await _all_names(blobs, -60) == set()

    async def test_many_that_are_refused_are_not_there(self, blobs: BlobStore) -> None:
        async def refuse(names: Sequence[str]) -> None:
            raise RuntimeError(f"not these {len(names)}")

        with pytest.raises(RuntimeError, match="not these 20"):
            await blobs.put_all([bytes([number]) for number in range(20)], refuse)
        assert await _all_names(blobs, -60) == set()

    async def test_reading_can_be_left(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"y" * 3_000_000)
        reading = blobs.read(name)
        assert (await anext(reading)).startswith(b"y")
        await reading.aclose()
        assert len(await whole(blobs, name)) == 3_000_000

    async def test_a_part_is_read_alone(self, blobs: BlobStore) -> None:
        content = bytes(range(256)) * 4000
        name = await blobs.put(content)
        assert await blobs.size(name) == len(content)
        for start, end in ((0, 1), (5, 5), (7, 700_001), (len(content) - 1, None), (3, len(content) + 9)):
            assert await whole(blobs, name, start, end) == content[start:end]
        assert await whole(blobs, name, len(content)) == b""
        for absent in ("ab" * 32, "../secret", ""):
            with pytest.raises(KeyError):
                await blobs.size(absent)

    async def test_names(self, blobs: BlobStore) -> None:
        assert await _all_names(blobs, -60) == set()
        names = {await blobs.put(bytes([number])) for number in range(20)}
        assert await _all_names(blobs, -60) == names
        assert await _all_names(blobs, 3600) == set()
        gone = names.pop()
        await blobs.delete(gone)
        assert await _all_names(blobs, -60) == names

    async def test_a_name_is_told_before_the_blob_has_it(self, blobs: BlobStore) -> None:
        told: list[str] = []

        async def named(name: str) -> None:
            with pytest.raises(KeyError):
                await blobs.size(name)
            told.append(name)

        assert [await blobs.put(_pieces(b"con", b"tent"), named)] == told

        async def refuse(name: str) -> None:
            told.append(name)
            raise RuntimeError("not this one")

        with pytest.raises(RuntimeError, match="not this one"):
            await blobs.put(b"refused", refuse)
        assert await _all_names(blobs, -60) == {told[0]}


def _record(file_id: str, blob: str) -> FileRecord:
    return FileRecord(
        id=file_id, tenant="t", filename="f", bytes=1, purpose="user_data", created_at=1.0, blob=blob
    )


class ReferencesKit:
    async def test_what_a_record_refers_to_stays(
        self, blobs: Blobs, primitive: BlobStore, store: Store
    ) -> None:
        async with blobs.keep(_pieces(b"con", b"tent")) as kept:
            assert kept.bytes == 7
            await blobs.drop([kept.name])
            assert await whole(blobs, kept.name) == b"content"
            await store.add_upload(_record("file-1", kept.name))
        assert await whole(blobs, kept.name) == b"content"
        await blobs.drop([kept.name, ""])
        assert await primitive.size(kept.name) == 7
        await store.delete_upload("t", "file-1")
        await blobs.drop([kept.name])
        with pytest.raises(KeyError):
            await primitive.size(kept.name)

    async def test_what_went_wrong_leaves_nothing(self, blobs: Blobs, primitive: BlobStore) -> None:
        with pytest.raises(RuntimeError, match="no room"):
            async with blobs.keep(b"content"):
                raise RuntimeError("no room")
        assert await _all_names(primitive, -60) == set()

    async def test_many_are_kept_together(self, blobs: Blobs, primitive: BlobStore, store: Store) -> None:
        contents = [b"%d" % (number % 30) for number in range(40)]
        async with blobs.keep_all(contents) as kept:
            assert [one.bytes for one in kept] == [*map(len, contents)]
            await blobs.drop([one.name for one in kept])
            assert await blobs.read_all([one.name for one in kept]) == contents
            for number in range(10):
                await store.add_upload(_record(f"file-{number}", kept[number].name))
        assert await _all_names(primitive, -60) == {one.name for one in kept[:10]}
        with pytest.raises(RuntimeError, match="no room"):
            async with blobs.keep_all(contents):
                raise RuntimeError("no room")
        assert await _all_names(primitive, -60) == {one.name for one in kept[:10]}

    async def test_who_fails_takes_nothing_from_others(
        self, blobs: Blobs, primitive: BlobStore, store: Store
    ) -> None:
        async with blobs.keep(b"content") as kept:
            with pytest.raises(RuntimeError, match="no room"):
                async with blobs.keep(b"content"):
                    raise RuntimeError("no room")
            assert await primitive.size(kept.name) == 7
            await store.add_upload(_record("file-1", kept.name))
        assert await primitive.size(kept.name) == 7

    async def test_a_blob_that_is_there_can_be_held(
        self, blobs: Blobs, primitive: BlobStore, store: Store
    ) -> None:
        name = await primitive.put(b"content")
        async with blobs.hold(name):
            await blobs.drop([name])
            await store.add_upload(_record("file-1", name))
        assert await whole(blobs, name) == b"content"
        async with blobs.hold(name):
            await store.delete_upload("t", "file-1")
            await blobs.drop([name])
            assert await primitive.size(name) == 7
        with pytest.raises(KeyError):
            await primitive.size(name)
        with pytest.raises(KeyError):
            async with blobs.hold(name):
                pass

    async def test_many_come_and_go_at_once(self, blobs: Blobs, primitive: BlobStore, store: Store) -> None:
        """Equal contents, each with a record for a moment: while there is one, there is the blob."""

        async def visit(number: int) -> None:
            for round_number in range(5):
                file_id = f"file-{number}-{round_number}"
                async with blobs.keep(b"shared") as kept:
                    await store.add_upload(_record(file_id, kept.name))
                assert await whole(blobs, kept.name) == b"shared"
                await store.delete_upload("t", file_id)
                await blobs.drop([kept.name])

        await asyncio.gather(*(visit(number) for number in range(8)))
        assert await _all_names(primitive, -60) == set()

    async def test_orphans_are_swept_when_they_are_old(
        self, blobs: Blobs, primitive: BlobStore, store: Store
    ) -> None:
        used = await primitive.put(b"used")
        await store.add_upload(_record("file-1", used))
        orphans = {await primitive.put(bytes([number])) for number in range(3)}
        assert await blobs.sweep() == 0
        assert await _all_names(primitive, -60) == {used, *orphans}
        await self.let_pass(blobs, 7200)
        assert await blobs.sweep() == 3
        assert await _all_names(primitive, -60) == {used}

    async def let_pass(self, blobs: Blobs, seconds: float) -> None:
        """Make all blobs so much older."""
        raise NotImplementedError
