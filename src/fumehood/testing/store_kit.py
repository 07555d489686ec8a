"""What every implementation of `Store` must pass; imports pytest, msgspec, `interfaces`, `protocol`.

Give a test class the fixture `subject` and inherit from `StoreKit`; docs/testing.md has an example. `CachingKit` and
`SharedKit` (in `store_kit_leases`) are for stores that do more.
"""

import asyncio

import msgspec
import pytest

from fumehood.interfaces import Fenced, IdempotencyClaim
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import Entry, ToolExchange
from fumehood.protocol.errors import Unavailable
from fumehood.protocol.folding import OUTPUTS, project_response
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import (
    AuthoredItem,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    Logs,
    Message,
    Reasoning,
    ReasoningText,
)
from fumehood.protocol.keys import ApiKey, KeyLimits
from fumehood.protocol.responses import Response, Usage
from fumehood.testing.store_kit_containers import ContainersKit
from fumehood.testing.store_kit_leases import LeasesKit
from fumehood.testing.store_kit_uploads import UploadsKit
from fumehood.testing.turns import (
    StoreSubject,
    answered,
    kept,
    made,
    said,
    same,
    segments,
    stored,
    texts,
    turn,
)

_SECONDS = 60


class ResponsesKit:
    """Responses come back as they went in."""

    async def test_a_response_comes_back_whole(self, subject: StoreSubject) -> None:
        response = await stored(subject.store, "whole")
        response.usage = Usage(input_tokens=1)  # ours to change: the store has its own
        found = await subject.store.response("tenant", response.id)
        response.usage = None
        same(found, response)
        assert found is not None
        assert found.output == response.output

    async def test_what_is_given_out_can_be_changed(self, subject: StoreSubject) -> None:
        response = await stored(subject.store)
        found = await subject.store.response("tenant", response.id)
        assert found is not None
        found.output.clear()
        found.metadata["changed"] = "yes"
        same(await subject.store.response("tenant", response.id), response)

    async def test_our_items_come_back_as_our_types(self, subject: StoreSubject) -> None:
        call = CodeInterpreterCall(
            id=new_id("ci"),
            status="completed",
            code="1+1",
            container_id="cntr_1",
            outputs=[Logs(logs="2")],
        )
        items: list[AuthoredItem] = [
            Reasoning(id=new_id("rs"), content=[ReasoningText(text="hm")], encrypted_content="sealed"),
            call,
            FunctionCall(id=new_id("fc"), call_id="call_1", name="f", arguments="{}", status="completed"),
            CustomToolCall(id=new_id("ctc"), call_id="call_2", name="g", input="x", status="completed"),
            answered("2"),
        ]
        response = await stored(subject.store, output=items)
        found = await subject.store.response("tenant", response.id)
        assert found is not None
        assert found.output == items
        shown = project_response(found, ()).output[1]
        assert isinstance(shown, CodeInterpreterCall)
        assert shown.outputs is None
        assert project_response(found, (OUTPUTS,)).output[1] == call

    async def test_items_of_others_stay_their_bytes(self, subject: StoreSubject) -> None:
        theirs = [
            msgspec.Raw(
                b'{"id":"ws_1", "type":"web_search_call","action":{"query":"\\u00e9"},"future":1.50}'
            ),
            msgspec.Raw(
                b'{"id":"msg_1","type":"message","role":"assistant","status":"completed","future":{}}'
            ),
        ]
        response = await stored(subject.store, output=[theirs[0], answered("between"), theirs[1]])
        found = await subject.store.response("tenant", response.id)
        assert found is not None
        first, second, third = found.output
        assert isinstance(second, Message)
        assert [bytes(item) for item in (first, third) if isinstance(item, msgspec.Raw)] == [
            bytes(item) for item in theirs
        ]

    async def test_entries_come_back_as_they_were(self, subject: StoreSubject) -> None:
        exchange = ToolExchange(
            call_id="call_1",
            name="code_interpreter",
            arguments='{"code":"é"}',
            output="2\n",
            images=("data:,x",),
        )
        call = CodeInterpreterCall(id=new_id("ci"), container_id="cntr_1", status="completed", code="é")
        one = turn(subject.store, output=[call, answered("2")])
        odd = Entry(
            type="message", id=None, turn=0, raw=b'{"role":"user", "content" : "\xf0\x9f\xa7\xaa \\u0000"}'
        )
        attached = (Attachment(name="é.csv", kind="text", file_id="file-1", text="a\n"), Attachment())
        parts = b'{"role":"user","content":[{"type":"input_file","file_id":"file-1"},{"type":"input_image"}]}'
        files = Entry(type="message", id="msg_1", turn=0, raw=parts, attachments=attached)
        one.entries = [odd, files, made(call, 1, exchange), made(one.response.output[1], 2)]
        await one.end(await one.begin())
        (segment,) = await segments(subject.store, one.response)
        assert list(segment.entries) == one.entries
        assert segment.entries[1].attachments == attached
        assert segment.entries[2].exchange == exchange
        assert (await subject.store.entries("tenant", ["msg_1"]))["msg_1"] == files

    async def test_many_and_large_entries(self, subject: StoreSubject) -> None:
        large = said("x" * (5 << 20))
        one = turn(subject.store)
        one.entries = [large, *(said(str(number)) for number in range(500)), made(one.response.output[0])]
        await one.end(await one.begin())
        after = await stored(subject.store, "after", after=one.response)
        first, second = await segments(subject.store, after)
        assert list(first.entries) == one.entries
        assert len(second.entries) == 2
        assert (await subject.store.entries("tenant", [large.id or ""]))[large.id or ""] == large

    async def test_what_runs_is_readable_and_has_no_end_yet(self, subject: StoreSubject) -> None:
        before = await stored(subject.store, "before")
        one = turn(subject.store, after=before)
        one.response.output = []
        lease = await one.begin()
        found = await subject.store.response("tenant", one.response.id)
        assert found is not None
        assert (found.status, found.output) == ("in_progress", [])
        assert await subject.store.conversation("tenant", one.response.id) is None
        so_far = await subject.store.input_entries("tenant", one.response.id)
        assert so_far is not None
        assert [entry.turn for entry in so_far] == [0, 1]
        await one.end(lease)
        found = await subject.store.response("tenant", one.response.id)
        assert found is not None
        assert found.status == "completed"

    async def test_what_was_never_there(self, subject: StoreSubject) -> None:
        for name in ("resp_unknown", "", "\udcff", "\0", "x" * 100_000, "'; DROP TABLE responses; --"):
            assert await subject.store.response("tenant", name) is None
            assert await subject.store.conversation("tenant", name) is None
            assert await subject.store.input_entries("tenant", name) is None
            assert await subject.store.entries("tenant", [name]) == {}
            assert await subject.store.delete_response("tenant", name) is False
            assert await subject.store.container(name) is None

    async def test_another_tenant_sees_nothing(self, subject: StoreSubject) -> None:
        store = subject.store
        response = await stored(store, tenant="one")
        item_id = response.output[0].id if isinstance(response.output[0], Message) else ""
        for _ in range(2):  # also after its owner has looked
            assert await store.response("other", response.id) is None
            assert await store.conversation("other", response.id) is None
            assert await store.input_entries("other", response.id) is None
            assert await store.entries("other", [item_id]) == {}
            assert await store.delete_response("other", response.id) is False
            assert await store.conversation("one", response.id) is not None
        stranger = await stored(store, "mine", after=response, tenant="other")
        assert texts(await store.conversation("other", stranger.id)) == ["mine"]
        assert await store.conversation("one", stranger.id) is None
        running = turn(store, tenant="one")
        lease = await running.begin()
        assert await store.response("other", running.response.id) is None
        assert await store.delete_response("other", running.response.id) is False
        with pytest.raises(Fenced):
            await store.commit(lease, "other", running.response, running.entries)
        await running.end(lease)

    async def test_items_are_found_by_their_ids(self, subject: StoreSubject) -> None:
        store = subject.store
        one, forged = turn(store), turn(store, "forged")
        user, model = one.entries
        assert user.id
        assert model.id
        forged.entries.insert(0, msgspec.structs.replace(model, turn=0, raw=b'{"forged":1}', exchange=None))
        await forged.end(await forged.begin())
        await one.end(await one.begin())
        found = await store.entries("tenant", [user.id, "msg_unknown", model.id, model.id])
        assert found == {user.id: user, model.id: model}

    async def test_ids_that_others_use_too_hide_nothing(self, subject: StoreSubject) -> None:
        store = subject.store
        one = turn(store)
        mine = one.entries[0]
        assert mine.id
        for tenant in ("earlier", "later"):
            crowd = turn(store, tenant, tenant=tenant)
            crowd.entries += [msgspec.structs.replace(mine, raw=b"{}")] * 100
            await crowd.end(await crowd.begin())
            if tenant == "earlier":
                await one.end(await one.begin())
        assert await store.entries("tenant", [mine.id]) == {mine.id: mine}

    async def test_a_closed_store_is_unavailable(self, subject: StoreSubject) -> None:
        response = await stored(subject.store)
        await subject.store.close()
        await subject.store.close()
        with pytest.raises(Unavailable):
            await subject.store.response("tenant", response.id)
        with pytest.raises(Unavailable):
            await subject.store.begin("tenant", response)
        with pytest.raises(Unavailable):
            await subject.store.delete_response("tenant", response.id)
        with pytest.raises(Unavailable):
            await subject.store.containers()


class ConversationsKit:
    """Conversations go on, fork, and go."""

    async def test_a_conversation_goes_on(self, subject: StoreSubject) -> None:
        store = subject.store
        tip: Response | None = None
        for number in range(30):
            tip = await stored(store, str(number), after=tip)
            assert texts(await store.conversation("tenant", tip.id)) == [str(n) for n in range(number + 1)]

    async def test_what_stood_before_the_output(self, subject: StoreSubject) -> None:
        store = subject.store
        first = turn(store, "1")
        await first.end(await first.begin())
        second = turn(store, "2", after=first.response)
        await second.end(await second.begin())
        assert await store.input_entries("tenant", first.response.id) == first.entries[:1]
        assert await store.input_entries("tenant", second.response.id) == [*first.entries, second.entries[0]]

    async def test_of_two_continuations_both_live(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        one, other = turn(store, "one", after=first), turn(store, "other", after=first)
        leases = [await one.begin(), await other.begin()]
        await asyncio.gather(one.end(leases[0]), other.end(leases[1]))
        for end in ("one", "other"):
            tip = one if end == "one" else other
            assert texts(await store.conversation("tenant", tip.response.id)) == ["first", end]
            more = await stored(store, "more", after=tip.response)
            assert texts(await store.conversation("tenant", more.id)) == ["first", end, "more"]
        late = await stored(store, "late", after=first)
        assert texts(await store.conversation("tenant", late.id)) == ["first", "late"]

    async def test_forks_of_forks(self, subject: StoreSubject) -> None:
        store = subject.store
        tip = await stored(store, "0")
        expected = ["0"]
        others: list[tuple[Response, list[str]]] = []
        for number in range(1, 40):
            other = await stored(store, f"other {number}", after=tip)
            others.append((other, [*expected, f"other {number}"]))
            tip = await stored(store, str(number), after=tip)
            expected.append(str(number))
            assert texts(await store.conversation("tenant", tip.id)) == expected
        for other, their in others:
            assert texts(await store.conversation("tenant", other.id)) == their
            assert await store.delete_response("tenant", other.id)
        assert texts(await store.conversation("tenant", tip.id)) == expected
        found = await store.input_entries("tenant", tip.id)
        assert found is not None
        assert len(found) == 2 * 40 - 1

    async def test_many_at_once(self, subject: StoreSubject) -> None:
        store = subject.store

        async def talk(name: int) -> None:
            tip: Response | None = None
            for number in range(10):
                tip = await stored(store, f"{name} {number}", after=tip)
                said = texts(await store.conversation("tenant", tip.id))
                assert said == [f"{name} {n}" for n in range(number + 1)]

        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*(talk(name) for name in range(30)))

    async def test_a_response_without_entries(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        empty = turn(store, after=first, output=[])
        empty.entries = []
        await empty.end(await empty.begin())
        assert texts(await store.conversation("tenant", empty.response.id)) == ["first"]
        after = await stored(store, "after", after=empty.response)
        assert texts(await store.conversation("tenant", after.id)) == ["first", "after"]
        alone = turn(store, output=[])
        alone.entries = []
        await alone.end(await alone.begin())
        assert texts(await store.conversation("tenant", alone.response.id)) == []
        assert await store.input_entries("tenant", alone.response.id) == []


class DeletionKit:
    """A response is gone at once; its items as soon as nobody stands on them."""

    async def test_a_deleted_response_is_gone(self, subject: StoreSubject) -> None:
        store = subject.store
        one = turn(store)
        response = await one.end(await one.begin())
        assert await store.conversation("tenant", response.id) is not None
        assert await store.delete_response("tenant", response.id) is True
        assert await store.delete_response("tenant", response.id) is False
        assert await store.response("tenant", response.id) is None
        assert await store.conversation("tenant", response.id) is None
        assert await store.input_entries("tenant", response.id) is None
        assert await kept(store, one.entries) == []

    async def test_items_stay_while_somebody_stands_on_them(self, subject: StoreSubject) -> None:
        store = subject.store
        first, tip = turn(store, "first"), turn(store, "tip")
        tip.response.previous_response_id = (await first.end(await first.begin())).id
        await tip.end(await tip.begin())
        assert await store.delete_response("tenant", first.response.id)
        assert await store.response("tenant", first.response.id) is None
        assert texts(await store.conversation("tenant", tip.response.id)) == ["first", "tip"]
        assert await kept(store, first.entries) == first.entries
        more = await stored(store, "more", after=tip.response)
        assert texts(await store.conversation("tenant", more.id)) == ["first", "tip", "more"]
        assert await store.delete_response("tenant", tip.response.id)
        assert await store.delete_response("tenant", more.id)
        assert await kept(store, [*first.entries, *tip.entries]) == []

    async def test_the_end_of_a_conversation_goes_alone(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        last = turn(store, "last", after=first)
        await last.end(await last.begin())
        assert await store.delete_response("tenant", last.response.id)
        assert await kept(store, last.entries) == []
        assert texts(await store.conversation("tenant", first.id)) == ["first"]
        again = await stored(store, "again", after=first)
        assert texts(await store.conversation("tenant", again.id)) == ["first", "again"]

    async def test_forks_hold_what_they_share(self, subject: StoreSubject) -> None:
        store = subject.store
        first, middle = turn(store, "first"), turn(store, "middle")
        middle.response.previous_response_id = (await first.end(await first.begin())).id
        await middle.end(await middle.begin())
        end = await stored(store, "end", after=middle.response)
        fork = await stored(store, "fork", after=middle.response)
        twig = await stored(store, "twig", after=fork)
        for gone in (end, middle.response, first.response, fork):
            assert await store.delete_response("tenant", gone.id)
            assert texts(await store.conversation("tenant", twig.id)) == ["first", "middle", "fork", "twig"]
            assert await kept(store, [*first.entries, *middle.entries]) == [*first.entries, *middle.entries]
        assert await store.delete_response("tenant", twig.id)
        assert await kept(store, [*first.entries, *middle.entries]) == []

    async def test_what_runs_stands_on_what_it_continues(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        one = turn(store, "one", after=first)
        lease = await one.begin()
        assert await store.delete_response("tenant", first.id)
        await one.end(lease)
        assert texts(await store.conversation("tenant", one.response.id)) == ["first", "one"]

    async def test_what_was_deleted_is_not_continued(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "first")
        assert await store.delete_response("tenant", first.id)
        after = await stored(store, "after", after=first)
        assert texts(await store.conversation("tenant", after.id)) == ["after"]

    async def test_a_running_response_can_be_deleted(self, subject: StoreSubject) -> None:
        store = subject.store
        first = turn(store, "first")
        one = turn(store, "one", after=await first.end(await first.begin()))
        lease = await one.begin()
        assert await store.delete_response("tenant", one.response.id)
        assert await store.response("tenant", one.response.id) is None
        with pytest.raises(Fenced):
            await one.end(lease)
        assert await store.response("tenant", one.response.id) is None
        assert await store.delete_response("tenant", first.response.id)
        assert await kept(store, [*first.entries, *one.entries]) == []


class RecordsKit:
    """Claims and keys."""

    async def test_a_claim_stands_until_it_is_released_or_expires(self, subject: StoreSubject) -> None:
        store = subject.store
        first, second = (IdempotencyClaim(bytes([number]) * 32, f"resp_{number}") for number in (1, 2))
        assert await store.claimed("a", "key") is None
        assert await store.claim("a", "key", first, 3600) is None
        assert await store.claimed("a", "key") == first
        assert await store.claim("a", "key", second, 3600) == first
        assert await store.claim("b", "key", second, 3600) is None
        assert await store.claim("a", "other", second, 3600) is None
        await store.release("a", "key", "resp_2")
        assert await store.claim("a", "key", second, 3600) == first
        await store.release("a", "key", "resp_1")
        assert await store.claim("a", "key", second, 3600) is None
        assert await store.claim("b", "key", first, 3600) == second
        assert await store.claim("c", "key", first, 0) is None
        assert await store.claimed("c", "key") is None
        assert await store.claim("c", "key", second, 3600) is None
        assert await store.claim("c", "key", first, 3600) == second

    async def test_of_many_claims_at_once_one_is_first(self, subject: StoreSubject) -> None:
        claims = [IdempotencyClaim(b"", f"resp_{number}") for number in range(10)]
        found = await asyncio.gather(*(subject.store.claim("a", "key", claim, 60) for claim in claims))
        (winner,) = [claim for claim, before in zip(claims, found, strict=True) if before is None]
        assert all(before in (None, winner) for before in found)

    async def test_keys(self, subject: StoreSubject) -> None:
        store = subject.store
        assert list(await store.keys()) == []
        revisions = [await store.keys_revision()]
        keys = [
            ApiKey(
                id=f"key_{number}",
                tenant="tenant",
                digest=bytes([number]) * 32,
                hint="abcd",
                created_at=100.5 - number,
                name="náme",
                limits=KeyLimits(requests_per_minute=number or None),
            )
            for number in range(3)
        ]
        for key in keys:
            await store.put_key(key)
            revisions.append(await store.keys_revision())
        assert list(await store.keys()) == keys[::-1]
        assert await store.revoke_key("key_1", 200.25)
        revisions.append(await store.keys_revision())
        assert not await store.revoke_key("key_1", 300.0)
        assert not await store.revoke_key("key_unknown", 300.0)
        revoked = msgspec.structs.replace(keys[1], revoked_at=200.25)
        assert list(await store.keys()) == [keys[2], revoked, keys[0]]
        assert len(set(revisions)) == len(revisions)
        assert await store.keys_revision() == revisions[-1]


class CachingKit:
    """For stores that keep segments in memory: renderings are kept on them, so they stay the same objects."""

    async def test_segments_stay_the_same_objects(self, subject: StoreSubject) -> None:
        store = subject.store
        first = await stored(store, "1")
        (one,) = await segments(subject.store, first)
        one.renderings["dialect"] = b"1"
        second = await stored(store, "2", after=first)
        fork = await stored(store, "3", after=first)
        for tip in (second, fork):
            found = await segments(subject.store, tip)
            assert found[0] is one
        assert await store.delete_response("tenant", first.id)
        found = await segments(subject.store, second)
        assert found[0] is one


class StoreKit(ResponsesKit, ConversationsKit, DeletionKit, LeasesKit, RecordsKit, ContainersKit, UploadsKit):
    """All that holds for every store."""
