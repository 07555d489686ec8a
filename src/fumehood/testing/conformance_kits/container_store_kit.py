"""Conformance tests of `ContainerStore` and `ContainerFileRecordStore`."""

import asyncio
import itertools
from functools import partial

import msgspec
import pytest

from fumehood.interfaces import Store
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import (
    ContainerFileRecord,
    ContainerRecord,
    ContainerSpec,
    ContainerStatus,
)
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_messages import NetworkDisabled
from fumehood.testing.conformance_kits.store_fixtures import StoreFixture, StoreSubject, load_pages

_BLOB = "ab" * 32


def _make_container(number: int, tenant: str = "a", name: str = "náme") -> ContainerRecord:
    """Five have the same time, so that ids decide their order."""
    return ContainerRecord(
        id=f"cntr_{number:03}",
        tenant=tenant,
        spec=ContainerSpec(name=name, memory="4g", network=NetworkDisabled(), idle_minutes=20),
        created_at=100.25 + number // 5,
        last_active_at=101.5,
    )


def _make_file(number: int, container: ContainerRecord) -> ContainerFileRecord:
    return ContainerFileRecord(
        id=f"cfile_{number:03}",
        container_id=container.id,
        path=f"dir/\u202e{number}.txt",
        bytes=number,
        created_at=50.0 + number // 5,
        modified_ns=1_700_000_000_123_456_789,
        source="assistant",
        blob=_BLOB,
    )


def _with_status(status: ContainerStatus, record: ContainerRecord, at: float = 200.0) -> ContainerRecord:
    return msgspec.structs.replace(record, status=status, ended_at=at)


class ContainerStoreKit(StoreFixture):
    """Containers change while they run, end once, and are deleted with their files."""

    async def test_containers(self, store: Store) -> None:
        records = [_make_container(number, tenant=f"tenant {number % 2}") for number in range(4)]
        for record in records[::-1]:
            await store.put_container(record)
        assert await store.get_container("cntr_002") == records[2]
        assert await store.get_container("cntr_unknown") is None
        assert list(await store.find_containers()) == records
        assert list(await store.find_containers("tenant 1")) == [records[1], records[3]]
        assert list(await store.find_containers("nobody")) == []
        expired = _with_status("expired", records[2])
        assert await store.update_container(expired)
        assert await store.get_container("cntr_002") == expired
        assert len(await store.find_containers()) == 4
        assert list(await store.find_containers(running=True)) == [records[0], records[1], records[3]]
        assert list(await store.find_containers("tenant 0", running=True)) == [records[0]]

    async def test_a_container_beside_others_that_are_known(self, store: Store) -> None:
        one, two, three = (_make_container(number) for number in range(3))
        theirs, ended = _make_container(3, tenant="b"), _make_container(4)
        for record in (theirs, ended):
            assert await store.put_container(record)
        assert await store.update_container(_with_status("expired", ended))
        assert await store.put_container(one, known_running=[])
        assert not await store.put_container(two, known_running=[])
        assert not await store.put_container(two, known_running=[two.id, theirs.id, ended.id])
        assert await store.get_container(two.id) is None
        assert await store.put_container(two, known_running=["cntr_unknown", one.id])
        assert not await store.put_container(three, known_running=[two.id])
        assert await store.put_container(two, known_running=[one.id])  # it does not count itself
        assert await store.put_container(three)
        assert len(await store.find_containers("a", running=True)) == 3

    async def test_of_many_concurrent_containers_one_is_added(
        self, subject: StoreSubject, store: Store
    ) -> None:
        stores = itertools.cycle((store, subject.second_store or store))
        put = [next(stores).put_container(_make_container(number), known_running=[]) for number in range(20)]
        async with asyncio.timeout(60):
            assert (await asyncio.gather(*put)).count(True) == 1
        assert len(await store.find_containers()) == 1

    async def test_a_container_that_has_ended_stays_so(self, store: Store) -> None:
        running = _make_container(1)
        expired, deleted = _with_status("expired", running), _with_status("deleted", running, 300)
        assert not await store.update_container(running)
        assert await store.get_container(running.id) is None
        await store.put_container(running)
        bound = msgspec.structs.replace(running, sandbox="sb", address="here", mark="m", incarnation=1)
        assert await store.update_container(bound)
        assert await store.get_container(running.id) == bound
        assert await store.update_container(expired)
        assert not await store.update_container(bound)
        assert await store.get_container(running.id) == expired
        assert await store.update_container(deleted)
        assert not await store.update_container(expired)
        assert not await store.update_container(bound)
        assert await store.get_container(running.id) == deleted

    async def test_containers_in_windows(self, store: Store) -> None:
        records = [_make_container(number, name="odd" if number % 3 else "even") for number in range(17)]
        for record in (*records[::2], *records[1::2], _make_container(99, "b")):
            await store.put_container(record)
        gone = records.pop(7)
        assert await store.update_container(_with_status("deleted", gone))
        records[3] = _with_status("expired", records[3])
        assert await store.update_container(records[3])
        for newest_first in (True, False):
            ordered = records[::-1] if newest_first else records
            for name in (None, "odd", "even", "neither"):
                wanted = [record for record in ordered if name in (None, record.spec.name)]
                load_page = partial(store.list_containers, "a", name=name)
                assert await load_pages(load_page, newest_first=newest_first) == wanted
        assert list(await store.list_containers("b", PageQuery())) == [_make_container(99, "b")]
        before = PageQuery(before=records[2].id, newest_first=False)
        assert list(await store.list_containers("a", before)) == records[:2]
        for cursor in (gone.id, "cntr_099", "cntr_unknown"):  # deleted, another tenant's, unknown
            with pytest.raises(InvalidRequest) as refused:
                await store.list_containers("a", PageQuery(after=cursor))
            assert refused.value.param == "after"
        assert list(await store.list_containers("a", PageQuery(), "\udcff")) == []

    async def test_files_of_a_container(self, store: Store) -> None:
        one, other = _make_container(1), _make_container(2)
        await store.put_container(one)
        await store.put_container(other)
        files = [_make_file(number, one if number % 2 else other) for number in range(4)]
        assert await store.put_container_files(files[::-1])
        assert list(await store.find_unreferenced_blobs([_BLOB, "cd" * 32])) == ["cd" * 32]
        assert list(await store.list_container_files(other.id)) == [files[0], files[2]]
        assert await store.get_container_file(one.id, files[1].id) == files[1]
        assert await store.get_container_file(other.id, files[1].id) is None
        assert await store.get_container_file(one.id, "\udcff") is None
        changed = msgspec.structs.replace(files[0], bytes=99, blob="")
        assert await store.put_container_files([changed], deleted=[files[2].id, "cfile_unknown"])
        assert list(await store.list_container_files(other.id)) == [changed]
        assert list(await store.list_container_files(one.id)) == [files[1], files[3]]
        assert list(await store.list_container_files("cntr_unknown")) == []
        assert list(await store.find_unreferenced_blobs([_BLOB])) == []
        assert await store.put_container_files([], [file.id for file in files])
        assert list(await store.list_container_files(other.id)) == []
        assert list(await store.find_unreferenced_blobs([_BLOB])) == [_BLOB]

    async def test_files_in_windows(self, store: Store) -> None:
        container = _make_container(1)
        await store.put_container(container)
        files = [_make_file(number, container) for number in range(12)]
        await store.put_container_files(files[::-1])
        assert (
            list(await store.list_container_files(container.id, PageQuery(limit=5, newest_first=False)))
            == files[:6]
        )
        window = PageQuery(limit=5, after=files[7].id)
        assert list(await store.list_container_files(container.id, window)) == files[1:7][::-1]
        with pytest.raises(InvalidRequest):
            await store.list_container_files("cntr_unknown", window)

    async def test_what_has_ended_takes_no_more_files(self, store: Store) -> None:
        container, other = _make_container(1), _make_container(2)
        first, second = _make_file(1, container), _make_file(2, container)
        assert not await store.put_container_files([first])
        await store.put_container(container)
        await store.put_container(other)
        assert await store.put_container_files([first, second])
        assert await store.update_container(_with_status("expired", container), [second.id])
        assert list(await store.list_container_files(container.id)) == [first]
        assert not await store.put_container_files(
            [_make_file(3, other), _make_file(4, container)], [first.id]
        )
        assert list(await store.list_container_files(container.id)) == [first]
        assert list(await store.list_container_files(other.id)) == []
        # A refused update deletes no files.
        assert not await store.update_container(container, [first.id])
        assert list(await store.list_container_files(container.id)) == [first]

    async def test_what_was_used_since_it_was_seen_does_not_change(self, store: Store) -> None:
        original = _make_container(1)
        file = _make_file(1, original)
        await store.put_container(original)
        await store.put_container_files([file])
        used = msgspec.structs.replace(original, last_active_at=original.last_active_at + 1e-6)
        assert await store.update_container(used)
        assert not await store.update_container(_with_status("expired", used), [file.id], expected=original)
        assert (
            await store.get_container(original.id),
            list(await store.list_container_files(original.id)),
        ) == (
            used,
            [file],
        )
        assert await store.update_container(_with_status("expired", used), [file.id], expected=used)
        assert list(await store.list_container_files(original.id)) == []
        assert not await store.update_container(_make_container(2), expected=_make_container(2))

    @pytest.mark.parametrize(
        "changes",
        [{"sandbox": "sb"}, {"address": "here"}, {"incarnation": 1}, {"mark": "m"}, {"last_active_at": 1e9}],
        ids=lambda changes: next(iter(changes)),
    )
    async def test_what_has_changed_since_it_was_seen_stays(
        self, subject: StoreSubject, store: Store, changes: dict[str, object]
    ) -> None:
        stores = itertools.cycle((store, subject.second_store or store))
        original = _make_container(1)
        theirs = msgspec.structs.replace(original, **changes)
        ours = msgspec.structs.replace(original, sandbox="ours", last_active_at=500.25, incarnation=7)
        await next(stores).put_container(original)
        assert await next(stores).update_container(theirs, expected=original)
        assert not await next(stores).update_container(ours, expected=original)
        assert await next(stores).get_container(original.id) == theirs
        assert await next(stores).update_container(ours, expected=theirs)
        assert await next(stores).get_container(original.id) == ours

    async def test_those_that_ended_long_ago(self, store: Store) -> None:
        statuses: list[ContainerStatus] = ["running", "expired", "deleted", "expired", "deleted"]
        records = [_make_container(number) for number in range(5)]
        for number, (status, record) in enumerate(zip(statuses, records, strict=True)):
            await store.put_container(record)
            if status != "running":
                assert await store.update_container(_with_status(status, record, 500.0 - 100 * number))
        for expired_before, deleted_before, numbers in (
            (0, 0, []),
            (250, 0, [3]),
            (0, 1000, [4, 2]),
            (1000, 1000, [4, 3, 2, 1]),
        ):
            found = await store.list_ended_containers(
                expired_before=expired_before, deleted_before=deleted_before
            )
            assert [record.id for record in found] == [records[number].id for number in numbers]

    async def test_what_outlives_a_container(self, store: Store) -> None:
        for number, retained in enumerate((5, 0, 7)):
            await store.put_container(_make_container(number))
            ended = msgspec.structs.replace(
                _with_status("expired", _make_container(number), 300.0 - number), retained=retained
            )
            assert await store.update_container(ended)
        retaining = await store.list_retaining_containers("a")
        assert [record.retained for record in retaining] == [7, 5]
        assert list(await store.list_retaining_containers("b")) == []
        assert await store.update_container(msgspec.structs.replace(retaining[0], retained=0))
        assert len(await store.list_retaining_containers("a")) == 1

    async def test_a_container_that_is_forgotten(self, store: Store) -> None:
        container, other = _make_container(1), _make_container(2)
        for record in (container, other):
            await store.put_container(record)
        await store.put_container_files([_make_file(1, container), _make_file(2, other)])
        await store.delete_container(container.id)
        await store.delete_container("cntr_unknown")
        assert await store.get_container(container.id) is None
        assert list(await store.list_container_files(container.id)) == []
        assert list(await store.list_container_files(other.id)) == [_make_file(2, other)]
