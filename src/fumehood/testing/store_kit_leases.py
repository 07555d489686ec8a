"""The part of the store kit about leases and several processes; imports pytest, `interfaces`, `protocol`."""

import asyncio
import itertools

import pytest

from fumehood.interfaces import Fenced, Lease
from fumehood.testing.turns import StoreSubject, kept, said, same, stored, texts, turn


class LeasesKit:
    """Only who holds the lease writes."""

    async def test_a_lost_response_fails_clearly(self, subject: StoreSubject) -> None:
        store = subject.store
        before = await stored(store, "before")
        one = turn(store, "lost", after=before)
        one.response.output = []
        lease = await one.begin()
        assert await store.recover() == 0
        await subject.lapse()
        assert await store.recover() == 1
        assert await store.recover() == 0
        found = await store.response("tenant", one.response.id)
        assert found is not None
        assert found.error is not None
        assert (found.status, found.error.code, found.output) == ("failed", "server_error", [])
        assert "stopped" in found.error.message
        assert texts(await store.conversation("tenant", one.response.id)) == ["before"]
        with pytest.raises(Fenced):
            await one.end(lease)
        assert await kept(store, one.entries) == []
        again = await store.response("tenant", one.response.id)
        assert again is not None
        assert again.status == "failed"
        after = await stored(store, "after", after=one.response)
        assert texts(await store.conversation("tenant", after.id)) == ["before", "after"]

    async def test_a_lease_can_be_renewed(self, subject: StoreSubject) -> None:
        store = subject.store
        kept, lost, done = turn(store, "kept"), turn(store, "lost"), turn(store, "done")
        leases = [await one.begin() for one in (kept, lost, done)]
        await done.end(leases[2])
        assert list(await store.renew([])) == []
        await subject.lapse()
        unknown = Lease("resp_unknown", 1)
        assert list(await store.renew([leases[0], leases[2], unknown])) == [leases[0]]
        assert await store.recover() == 1
        assert list(await store.renew(leases)) == [leases[0]]
        await kept.end(leases[0])
        with pytest.raises(Fenced):
            await lost.end(leases[1])

    async def test_another_epoch_is_not_ours(self, subject: StoreSubject) -> None:
        one = turn(subject.store)
        lease = await one.begin()
        wrong = Lease(lease.response_id, lease.epoch + 1)
        assert list(await subject.store.renew([wrong])) == []
        with pytest.raises(Fenced):
            await one.end(wrong)
        await subject.store.renew([lease])
        with pytest.raises(Fenced):
            await one.end(wrong)
        await one.end(lease)

    async def test_an_ended_response_stays_as_it_is(self, subject: StoreSubject) -> None:
        store = subject.store
        one = turn(store, "once")
        lease = await one.begin()
        response = await one.end(lease)
        one.entries.append(said("twice"))
        with pytest.raises(Fenced):
            await one.end(lease)
        await subject.lapse()
        assert await store.recover() == 0
        same(await store.response("tenant", response.id), response)
        assert await kept(store, one.entries) == one.entries[:-1]

    async def test_one_that_was_never_begun(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        one = turn(store, "one", after=first)
        one.response.status = "completed"
        await store.commit(None, "tenant", one.response, one.entries)
        same(await store.response("tenant", one.response.id), one.response)
        assert texts(await store.conversation("tenant", one.response.id)) == ["first", "one"]
        with pytest.raises(Fenced):
            await store.commit(None, "tenant", one.response, one.entries)
        assert texts(await store.conversation("tenant", one.response.id)) == ["first", "one"]

    async def test_a_cancelled_commit_is_whole_or_nothing(self, subject: StoreSubject) -> None:
        store = subject.store
        for steps in range(6):
            one = turn(store, "cancelled")
            task = asyncio.create_task(one.end(await one.begin()))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await store.renew([])  # behind it in the queue, if there is one
            found = await store.response("tenant", one.response.id)
            assert found is not None
            if found.status == "completed":
                assert await kept(store, one.entries) == one.entries
                assert found.output == one.response.output
            else:
                assert await kept(store, one.entries) == []


class SharedKit:
    """For stores that several processes may use at once."""

    async def test_another_process_takes_over(self, subject: StoreSubject) -> None:
        assert subject.another
        store, another = subject.store, subject.another
        one, alive = turn(store, "one"), turn(another, "alive")
        lease = await one.begin()
        await store.renew([lease])  # written by now
        await subject.lapse()
        held = await alive.begin()
        assert await another.recover() == 1
        found = await store.response("tenant", one.response.id)
        assert found is not None
        assert found.status == "failed"
        assert list(await store.renew([lease])) == []
        with pytest.raises(Fenced):
            await one.end(lease)
        assert await kept(another, one.entries) == []
        response = await alive.end(held)
        after = await stored(store, "after", after=response)
        assert texts(await another.conversation("tenant", after.id)) == ["alive", "after"]
        assert await another.delete_response("tenant", after.id)
        assert await store.conversation("tenant", after.id) is None

    async def test_two_processes_continue_one_conversation(self, subject: StoreSubject) -> None:
        assert subject.another
        first = await stored(subject.store, "first")
        stores = itertools.cycle((subject.store, subject.another))
        turns = [turn(next(stores), str(number), after=first) for number in range(20)]
        leases = [await one.begin() for one in turns]
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.end(lease) for one, lease in zip(turns, leases, strict=True)))
        for number, one in enumerate(turns):
            said = texts(await next(stores).conversation("tenant", one.response.id))
            assert said == ["first", str(number)]
