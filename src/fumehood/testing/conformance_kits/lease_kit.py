"""Conformance tests of `ResponseStore`: leases, and stores shared by processes."""

import asyncio
import itertools

import pytest

from fumehood.interfaces import ResponseLease, ResponseLeaseLost, Store
from fumehood.testing.conformance_kits.store_fixtures import (
    StoreFixture,
    StoreSubject,
    assert_same_response,
    find_stored_items,
    list_user_texts,
    load_response,
    make_response,
    make_user_item,
    store_response,
)


class LeaseKit(StoreFixture):
    """Only the holder of a lease commits."""

    async def test_a_lost_response_fails_clearly(self, subject: StoreSubject, store: Store) -> None:
        before = await store_response(store, "before")
        one = make_response(store, "lost", after=before)
        one.response.output = []
        lease = await one.begin()
        assert await store.fail_orphaned_responses() == 0
        await subject.expire_leases()
        assert await store.fail_orphaned_responses() == 1
        assert await store.fail_orphaned_responses() == 0
        found = await load_response(store, one.response.id)
        assert found.error is not None
        assert (found.status, found.error.code, found.output) == ("failed", "server_error", [])
        assert "stopped" in found.error.message
        assert list_user_texts(await store.get_conversation("tenant", one.response.id)) == ["before"]
        with pytest.raises(ResponseLeaseLost):
            await one.complete(lease)
        assert await find_stored_items(store, one.entries) == []
        again = await load_response(store, one.response.id)
        assert again.status == "failed"
        after = await store_response(store, "after", after=one.response)
        assert list_user_texts(await store.get_conversation("tenant", after.id)) == ["before", "after"]

    async def test_a_lease_can_be_renewed(self, subject: StoreSubject, store: Store) -> None:
        kept, lost, done = (
            make_response(store, "kept"),
            make_response(store, "lost"),
            make_response(store, "done"),
        )
        leases = [await one.begin() for one in (kept, lost, done)]
        await done.complete(leases[2])
        assert list(await store.renew_leases([])) == []
        await subject.expire_leases()
        unknown = ResponseLease("resp_unknown", 1)
        assert list(await store.renew_leases([leases[0], leases[2], unknown])) == [leases[0]]
        assert await store.fail_orphaned_responses() == 1
        assert list(await store.renew_leases(leases)) == [leases[0]]
        await kept.complete(leases[0])
        with pytest.raises(ResponseLeaseLost):
            await lost.complete(leases[1])

    async def test_another_epoch_is_not_ours(self, store: Store) -> None:
        one = make_response(store)
        lease = await one.begin()
        wrong = ResponseLease(lease.response_id, lease.epoch + 1)
        assert list(await store.renew_leases([wrong])) == []
        with pytest.raises(ResponseLeaseLost):
            await one.complete(wrong)
        await store.renew_leases([lease])
        with pytest.raises(ResponseLeaseLost):
            await one.complete(wrong)
        await one.complete(lease)

    async def test_an_ended_response_stays_as_it_is(self, subject: StoreSubject, store: Store) -> None:
        one = make_response(store, "once")
        lease = await one.begin()
        response = await one.complete(lease)
        one.entries.append(make_user_item("twice"))
        with pytest.raises(ResponseLeaseLost):
            await one.complete(lease)
        await subject.expire_leases()
        assert await store.fail_orphaned_responses() == 0
        assert_same_response(await store.get_response("tenant", response.id), response)
        assert await find_stored_items(store, one.entries) == one.entries[:-1]

    async def test_one_that_was_never_begun(self, store: Store) -> None:
        first = await store_response(store, "first")
        one = make_response(store, "one", after=first)
        one.response.status = "completed"
        await store.commit_response(None, "tenant", one.response, one.entries)
        assert_same_response(await store.get_response("tenant", one.response.id), one.response)
        assert list_user_texts(await store.get_conversation("tenant", one.response.id)) == ["first", "one"]
        with pytest.raises(ResponseLeaseLost):
            await store.commit_response(None, "tenant", one.response, one.entries)
        assert list_user_texts(await store.get_conversation("tenant", one.response.id)) == ["first", "one"]

    async def test_a_cancelled_commit_is_whole_or_nothing(self, store: Store) -> None:
        for steps in range(6):
            one = make_response(store, "cancelled")
            task = asyncio.create_task(one.complete(await one.begin()))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await store.renew_leases([])  # after the commit, if there is a queue
            found = await load_response(store, one.response.id)
            if found.status == "completed":
                assert await find_stored_items(store, one.entries) == one.entries
                assert found.output == one.response.output
            else:
                assert await find_stored_items(store, one.entries) == []


class SharedStoreKit(StoreFixture):
    """For stores that several processes share."""

    async def test_another_process_takes_over(self, subject: StoreSubject, store: Store) -> None:
        assert subject.second_store
        second = subject.second_store
        one, alive = make_response(store, "one"), make_response(second, "alive")
        lease = await one.begin()
        await store.renew_leases([lease])  # the beginning is written now
        await subject.expire_leases()
        held = await alive.begin()
        assert await second.fail_orphaned_responses() == 1
        found = await load_response(store, one.response.id)
        assert found.status == "failed"
        assert list(await store.renew_leases([lease])) == []
        with pytest.raises(ResponseLeaseLost):
            await one.complete(lease)
        assert await find_stored_items(second, one.entries) == []
        response = await alive.complete(held)
        after = await store_response(store, "after", after=response)
        assert list_user_texts(await second.get_conversation("tenant", after.id)) == ["alive", "after"]
        assert await second.delete_response("tenant", after.id)
        assert await store.get_conversation("tenant", after.id) is None

    async def test_two_processes_continue_one_conversation(self, subject: StoreSubject, store: Store) -> None:
        assert subject.second_store
        first = await store_response(store, "first")
        stores = itertools.cycle((store, subject.second_store))
        turns = [make_response(next(stores), str(number), after=first) for number in range(20)]
        leases = [await one.begin() for one in turns]
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.complete(lease) for one, lease in zip(turns, leases, strict=True)))
        for number, one in enumerate(turns):
            texts = list_user_texts(await next(stores).get_conversation("tenant", one.response.id))
            assert texts == ["first", str(number)]
