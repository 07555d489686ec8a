"""Conformance tests of `UploadedFileRecordStore`."""

import asyncio
from functools import partial

import msgspec
import pytest

from fumehood.interfaces import FileTotals, Store
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.file_objects import FilePurpose, UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.testing.conformance_kits.store_fixtures import StoreFixture, load_pages


def _make_upload(number: int, tenant: str = "a", purpose: FilePurpose = "user_data") -> UploadedFileRecord:
    """Ten have the same time, so that ids decide their order."""
    return UploadedFileRecord(
        id=f"file-{number:04}",
        tenant=tenant,
        filename=f"náme \u202e{number}",
        bytes=number,
        purpose=purpose,
        created_at=100.5 + number // 10,
        blob=f"{number % 3:064x}",
    )


class UploadedFileRecordStoreKit(StoreFixture):
    async def test_an_upload_is_its_tenants(self, store: Store) -> None:
        record = _make_upload(1)
        assert await store.add_upload(record)
        assert await store.get_upload("a", record.id) == record
        assert await store.get_upload("b", record.id) is None
        assert await store.get_upload("a", "\udcff") is None
        assert await store.delete_upload("b", record.id) is None
        assert list(await store.list_uploads("b", PageQuery(), now=0)) == []
        assert await store.get_upload_totals("b") == FileTotals(0, 0)
        assert await store.delete_upload("a", record.id) == record
        assert await store.delete_upload("a", record.id) is None
        assert await store.get_upload("a", record.id) is None

    async def test_uploads_in_windows(self, store: Store) -> None:
        records = [
            _make_upload(number, purpose="vision" if number % 4 == 0 else "batch") for number in range(25)
        ]
        for record in (*records[::2], *records[1::2], _make_upload(99, "b")):
            await store.add_upload(record)
        for newest_first in (True, False):
            ordered = records[::-1] if newest_first else records
            for purpose in (None, "vision", "batch"):
                wanted = [record for record in ordered if purpose in (None, record.purpose)]
                load_page = partial(store.list_uploads, "a", purpose=purpose, now=0)
                assert await load_pages(load_page, newest_first=newest_first) == wanted
            between = PageQuery(after=ordered[3].id, before=ordered[9].id, newest_first=newest_first)
            assert list(await store.list_uploads("a", between, now=0)) == ordered[4:9]
        assert list(await store.list_uploads("a", PageQuery(), purpose="\udcff", now=0)) == []

    @pytest.mark.parametrize("param", ["after", "before"])
    async def test_a_place_that_is_not_in_the_list(self, store: Store, param: str) -> None:
        await store.add_upload(_make_upload(1))
        await store.add_upload(_make_upload(2, "b"))
        for cursor in ("file-unknown", "file-0002", "\udcff"):
            with pytest.raises(InvalidRequest) as refused:
                await store.list_uploads("a", msgspec.convert({param: cursor}, PageQuery), now=0)
            assert refused.value.param == param
        window = msgspec.convert({param: "file-0001"}, PageQuery)
        with pytest.raises(InvalidRequest):
            await store.list_uploads("a", window, purpose="vision", now=0)

    async def test_uploads_expire(self, store: Store) -> None:
        records = [
            msgspec.structs.replace(_make_upload(number), expires_at=None if number == 0 else 1000.0 - number)
            for number in range(4)
        ]
        for record in records:
            await store.add_upload(record)
        assert list(await store.list_uploads("a", PageQuery(newest_first=False), now=998.0)) == records[:2]
        assert list(await store.list_expired_uploads(996.9, 10)) == []
        assert list(await store.list_expired_uploads(998.0, 10)) == [records[3], records[2]]
        assert list(await store.list_expired_uploads(2000.0, 2)) == [records[3], records[2]]

    async def test_nobody_gets_more_than_there_is_room_for(self, store: Store) -> None:
        most = FileTotals(3, 100)
        assert await store.add_upload(_make_upload(60), most)
        assert not await store.add_upload(_make_upload(41), most)
        assert await store.get_upload("a", "file-0041") is None
        assert await store.add_upload(_make_upload(40), most)
        assert await store.get_upload_totals("a") == FileTotals(2, 100)
        assert await store.add_upload(_make_upload(0), most)
        assert not await store.add_upload(_make_upload(0, "a"), most)
        assert await store.add_upload(_make_upload(80, "b"), most)

    async def test_of_many_at_once_only_those_that_fit(self, store: Store) -> None:
        records = [msgspec.structs.replace(_make_upload(number), bytes=10) for number in range(20)]
        added = await asyncio.gather(*(store.add_upload(record, FileTotals(100, 55)) for record in records))
        assert sum(added) == 5
        assert await store.get_upload_totals("a") == FileTotals(5, 50)

    async def test_an_upload_uses_its_blob(self, store: Store) -> None:
        blob = _make_upload(1).blob
        await store.add_upload(_make_upload(1))
        await store.add_upload(_make_upload(4))
        assert list(await store.find_unreferenced_blobs([blob, "cd" * 32])) == ["cd" * 32]
        await store.delete_upload("a", "file-0001")
        assert list(await store.find_unreferenced_blobs([blob])) == []
        await store.delete_upload("a", "file-0004")
        assert list(await store.find_unreferenced_blobs([blob])) == [blob]
