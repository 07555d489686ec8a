"""What every `Store` must do about uploads; imports pytest, `interfaces` and siblings."""

import asyncio

import msgspec
import pytest

from fumehood.interfaces import Amount
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.files import FilePurpose, FileRecord
from fumehood.protocol.listing import Window
from fumehood.testing.turns import StoreSubject


def _upload(number: int, tenant: str = "a", purpose: FilePurpose = "user_data") -> FileRecord:
    """Ten in one second, so that ids decide."""
    return FileRecord(
        id=f"file-{number:04}",
        tenant=tenant,
        filename=f"náme \u202e{number}",
        bytes=number,
        purpose=purpose,
        created_at=100.5 + number // 10,
        blob=f"{number % 3:064x}",
    )


class UploadsKit:
    async def test_an_upload_is_its_tenants(self, subject: StoreSubject) -> None:
        store, record = subject.store, _upload(1)
        assert await store.add_upload(record)
        assert await store.upload("a", record.id) == record
        assert await store.upload("b", record.id) is None
        assert await store.upload("a", "\udcff") is None
        assert await store.delete_upload("b", record.id) is None
        assert list(await store.uploads("b", Window(), now=0)) == []
        assert await store.uploaded("b") == Amount(0, 0)
        assert await store.delete_upload("a", record.id) == record
        assert await store.delete_upload("a", record.id) is None
        assert await store.upload("a", record.id) is None

    async def test_uploads_in_windows(self, subject: StoreSubject) -> None:
        store = subject.store
        records = [_upload(number, purpose="vision" if number % 4 == 0 else "batch") for number in range(25)]
        for record in (*records[::2], *records[1::2], _upload(99, "b")):
            await store.add_upload(record)
        for newest_first in (True, False):
            ordered = records[::-1] if newest_first else records
            for purpose in (None, "vision", "batch"):
                wanted = [record for record in ordered if purpose in (None, record.purpose)]
                found: list[FileRecord] = []
                after: str | None = None
                while True:
                    window = Window(limit=3, after=after, newest_first=newest_first)
                    page = await store.uploads("a", window, purpose=purpose, now=0)
                    assert len(page) <= 4
                    found += page[:3]
                    if len(page) <= 3:
                        break
                    after = found[-1].id
                assert found == wanted
            between = Window(after=ordered[3].id, before=ordered[9].id, newest_first=newest_first)
            assert list(await store.uploads("a", between, now=0)) == ordered[4:9]
        assert list(await store.uploads("a", Window(), purpose="\udcff", now=0)) == []

    @pytest.mark.parametrize("param", ["after", "before"])
    async def test_a_place_that_is_not_in_the_list(self, subject: StoreSubject, param: str) -> None:
        store = subject.store
        await store.add_upload(_upload(1))
        await store.add_upload(_upload(2, "b"))
        for cursor in ("file-unknown", "file-0002", "\udcff"):
            with pytest.raises(InvalidRequest) as refused:
                await store.uploads("a", msgspec.convert({param: cursor}, Window), now=0)
            assert refused.value.param == param
        window = msgspec.convert({param: "file-0001"}, Window)
        with pytest.raises(InvalidRequest):
            await store.uploads("a", window, purpose="vision", now=0)

    async def test_uploads_expire(self, subject: StoreSubject) -> None:
        store = subject.store
        records = [
            msgspec.structs.replace(_upload(number), expires_at=None if number == 0 else 1000.0 - number)
            for number in range(4)
        ]
        for record in records:
            await store.add_upload(record)
        assert list(await store.uploads("a", Window(newest_first=False), now=998.0)) == records[:2]
        assert list(await store.expired_uploads(996.9, 10)) == []
        assert list(await store.expired_uploads(998.0, 10)) == [records[3], records[2]]
        assert list(await store.expired_uploads(2000.0, 2)) == [records[3], records[2]]

    async def test_nobody_gets_more_than_there_is_room_for(self, subject: StoreSubject) -> None:
        store = subject.store
        most = Amount(3, 100)
        assert await store.add_upload(_upload(60), most)
        assert not await store.add_upload(_upload(41), most)
        assert await store.upload("a", "file-0041") is None
        assert await store.add_upload(_upload(40), most)
        assert await store.uploaded("a") == Amount(2, 100)
        assert await store.add_upload(_upload(0), most)
        assert not await store.add_upload(_upload(0, "a"), most)
        assert await store.add_upload(_upload(80, "b"), most)

    async def test_of_many_at_once_only_those_that_fit(self, subject: StoreSubject) -> None:
        records = [msgspec.structs.replace(_upload(number), bytes=10) for number in range(20)]
        added = await asyncio.gather(
            *(subject.store.add_upload(record, Amount(100, 55)) for record in records)
        )
        assert sum(added) == 5
        assert await subject.store.uploaded("a") == Amount(5, 50)

    async def test_an_upload_uses_its_blob(self, subject: StoreSubject) -> None:
        store, blob = subject.store, _upload(1).blob
        await store.add_upload(_upload(1))
        await store.add_upload(_upload(4))
        assert list(await store.unused_blobs([blob, "cd" * 32])) == ["cd" * 32]
        await store.delete_upload("a", "file-0001")
        assert list(await store.unused_blobs([blob])) == []
        await store.delete_upload("a", "file-0004")
        assert list(await store.unused_blobs([blob])) == [blob]
