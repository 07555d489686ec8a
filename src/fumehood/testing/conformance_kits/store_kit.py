"""Conformance tests of `Store`, one kit for each of its parts.

`StoreKit` needs a fixture `subject` of type `StoreSubject`. `SegmentCacheKit` and `lease_kit.SharedStoreKit` test
optional features.
"""

import asyncio

import msgspec
import pytest

from fumehood.interfaces import IdempotencyClaim, ResponseLeaseLost, Store
from fumehood.protocol.api_keys import ApiKeyLimits, ApiKeyRecord
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry, ToolExchange
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    AuthoredItem,
    CodeInterpreterCall,
    CodeInterpreterLogs,
    CustomToolCall,
    FunctionCall,
    OutputMessage,
    ReasoningItem,
    ReasoningText,
)
from fumehood.protocol.openai.response_projection import INCLUDE_CODE_OUTPUTS, project_response
from fumehood.protocol.openai.responses import Response, Usage
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.container_store_kit import ContainerStoreKit
from fumehood.testing.conformance_kits.lease_kit import LeaseKit
from fumehood.testing.conformance_kits.store_fixtures import (
    StoreFixture,
    assert_same_response,
    find_stored_items,
    list_user_texts,
    load_response,
    load_segments,
    make_assistant_message,
    make_model_item,
    make_response,
    make_user_item,
    store_response,
)
from fumehood.testing.conformance_kits.uploaded_file_record_store_kit import UploadedFileRecordStoreKit

_SECONDS = 60


class ResponseStoreKit(StoreFixture):
    """Responses are read as they were written."""

    async def test_a_response_is_read_as_written(self, store: Store) -> None:
        response = await store_response(store, "whole")
        response.usage = Usage(input_tokens=1)  # the store has a copy
        found = await store.get_response("tenant", response.id)
        response.usage = None
        assert_same_response(found, response)
        assert found is not None
        assert found.output == response.output

    async def test_returned_responses_are_copies(self, store: Store) -> None:
        response = await store_response(store)
        found = await load_response(store, response.id)
        found.output.clear()
        found.metadata["changed"] = "yes"
        assert_same_response(await store.get_response("tenant", response.id), response)

    async def test_our_items_come_back_as_our_types(self, store: Store) -> None:
        call = CodeInterpreterCall(
            id=new_id("ci"),
            status="completed",
            code="1+1",
            container_id="cntr_1",
            outputs=[CodeInterpreterLogs(logs="2")],
        )
        items: list[AuthoredItem] = [
            ReasoningItem(id=new_id("rs"), content=[ReasoningText(text="hm")], encrypted_content="sealed"),
            call,
            FunctionCall(id=new_id("fc"), call_id="call_1", name="f", arguments="{}", status="completed"),
            CustomToolCall(id=new_id("ctc"), call_id="call_2", name="g", input="x", status="completed"),
            make_assistant_message("2"),
        ]
        response = await store_response(store, output=items)
        found = await load_response(store, response.id)
        assert found.output == items
        projected = project_response(found, ()).output[1]
        assert isinstance(projected, CodeInterpreterCall)
        assert projected.outputs is None
        assert project_response(found, (INCLUDE_CODE_OUTPUTS,)).output[1] == call

    async def test_items_of_others_stay_their_bytes(self, store: Store) -> None:
        theirs = [
            msgspec.Raw(
                b'{"id":"ws_1", "type":"web_search_call","action":{"query":"\\u00e9"},"future":1.50}'
            ),
            msgspec.Raw(
                b'{"id":"msg_1","type":"message","role":"assistant","status":"completed","future":{}}'
            ),
        ]
        response = await store_response(
            store, output=[theirs[0], make_assistant_message("between"), theirs[1]]
        )
        found = await load_response(store, response.id)
        first, second, third = found.output
        assert isinstance(second, OutputMessage)
        assert [bytes(item) for item in (first, third) if isinstance(item, msgspec.Raw)] == [
            bytes(item) for item in theirs
        ]

    async def test_entries_come_back_as_they_were(self, store: Store) -> None:
        exchange = ToolExchange(
            call_id="call_1",
            name="code_interpreter",
            arguments='{"code":"é"}',
            output="2\n",
            images=("data:,x",),
        )
        call = CodeInterpreterCall(id=new_id("ci"), container_id="cntr_1", status="completed", code="é")
        one = make_response(store, output=[call, make_assistant_message("2")])
        odd = ConversationEntry(
            type="message", id=None, turn=0, raw=b'{"role":"user", "content" : "\xf0\x9f\xa7\xaa \\u0000"}'
        )
        attached = (Attachment(name="é.csv", kind="text", file_id="file-1", text="a\n"), Attachment())
        parts = b'{"role":"user","content":[{"type":"input_file","file_id":"file-1"},{"type":"input_image"}]}'
        files = ConversationEntry(type="message", id="msg_1", turn=0, raw=parts, attachments=attached)
        one.entries = [
            odd,
            files,
            make_model_item(call, 1, exchange),
            make_model_item(one.response.output[1], 2),
        ]
        await one.complete(await one.begin())
        (segment,) = await load_segments(store, one.response)
        assert list(segment.entries) == one.entries
        assert segment.entries[1].attachments == attached
        assert segment.entries[2].exchange == exchange
        assert (await store.find_items("tenant", ["msg_1"]))["msg_1"] == files

    async def test_many_and_large_entries(self, store: Store) -> None:
        large = make_user_item("x" * (5 << 20))
        one = make_response(store)
        one.entries = [
            large,
            *(make_user_item(str(number)) for number in range(500)),
            make_model_item(one.response.output[0]),
        ]
        await one.complete(await one.begin())
        after = await store_response(store, "after", after=one.response)
        first, second = await load_segments(store, after)
        assert list(first.entries) == one.entries
        assert len(second.entries) == 2
        assert (await store.find_items("tenant", [large.id or ""]))[large.id or ""] == large

    async def test_what_runs_is_readable_and_has_no_end_yet(self, store: Store) -> None:
        before = await store_response(store, "before")
        one = make_response(store, after=before)
        one.response.output = []
        lease = await one.begin()
        found = await load_response(store, one.response.id)
        assert (found.status, found.output) == ("in_progress", [])
        assert await store.get_conversation("tenant", one.response.id) is None
        so_far = await store.list_input_items("tenant", one.response.id)
        assert so_far is not None
        assert [entry.turn for entry in so_far] == [0, 1]
        await one.complete(lease)
        found = await load_response(store, one.response.id)
        assert found.status == "completed"

    async def test_what_was_never_there(self, store: Store) -> None:
        for name in ("resp_unknown", "", "\udcff", "\0", "x" * 100_000, "'; DROP TABLE responses; --"):
            assert await store.get_response("tenant", name) is None
            assert await store.get_conversation("tenant", name) is None
            assert await store.list_input_items("tenant", name) is None
            assert await store.find_items("tenant", [name]) == {}
            assert await store.delete_response("tenant", name) is False
            assert await store.get_container(name) is None

    async def test_another_tenant_sees_nothing(self, store: Store) -> None:
        response = await store_response(store, tenant="one")
        item_id = response.output[0].id if isinstance(response.output[0], OutputMessage) else ""
        for _ in range(2):  # also after the owner has read it
            assert await store.get_response("other", response.id) is None
            assert await store.get_conversation("other", response.id) is None
            assert await store.list_input_items("other", response.id) is None
            assert await store.find_items("other", [item_id]) == {}
            assert await store.delete_response("other", response.id) is False
            assert await store.get_conversation("one", response.id) is not None
        stranger = await store_response(store, "mine", after=response, tenant="other")
        assert list_user_texts(await store.get_conversation("other", stranger.id)) == ["mine"]
        assert await store.get_conversation("one", stranger.id) is None
        running = make_response(store, tenant="one")
        lease = await running.begin()
        assert await store.get_response("other", running.response.id) is None
        assert await store.delete_response("other", running.response.id) is False
        with pytest.raises(ResponseLeaseLost):
            await store.commit_response(lease, "other", running.response, running.entries)
        await running.complete(lease)

    async def test_items_are_found_by_their_ids(self, store: Store) -> None:
        one, forged = make_response(store), make_response(store, "forged")
        user, model = one.entries
        assert user.id
        assert model.id
        forged.entries.insert(0, msgspec.structs.replace(model, turn=0, raw=b'{"forged":1}', exchange=None))
        await forged.complete(await forged.begin())
        await one.complete(await one.begin())
        found = await store.find_items("tenant", [user.id, "msg_unknown", model.id, model.id])
        assert found == {user.id: user, model.id: model}

    async def test_ids_that_others_use_too_hide_nothing(self, store: Store) -> None:
        one = make_response(store)
        mine = one.entries[0]
        assert mine.id
        for tenant in ("earlier", "later"):
            crowd = make_response(store, tenant, tenant=tenant)
            crowd.entries += [msgspec.structs.replace(mine, raw=b"{}")] * 100
            await crowd.complete(await crowd.begin())
            if tenant == "earlier":
                await one.complete(await one.begin())
        assert await store.find_items("tenant", [mine.id]) == {mine.id: mine}

    async def test_a_closed_store_is_unavailable(self, store: Store) -> None:
        response = await store_response(store)
        await store.close()
        await store.close()
        await assert_each_raises(
            ServiceUnavailable,
            store.get_response("tenant", response.id),
            store.begin_response("tenant", response),
            store.delete_response("tenant", response.id),
            store.find_containers(),
        )


class ConversationStoreKit(StoreFixture):
    """Conversations are continued, forked and deleted."""

    async def test_a_conversation_is_continued(self, store: Store) -> None:
        tip: Response | None = None
        for number in range(30):
            tip = await store_response(store, str(number), after=tip)
            assert list_user_texts(await store.get_conversation("tenant", tip.id)) == [
                str(n) for n in range(number + 1)
            ]

    async def test_what_stood_before_the_output(self, store: Store) -> None:
        first = make_response(store, "1")
        await first.complete(await first.begin())
        second = make_response(store, "2", after=first.response)
        await second.complete(await second.begin())
        assert await store.list_input_items("tenant", first.response.id) == first.entries[:1]
        assert await store.list_input_items("tenant", second.response.id) == [
            *first.entries,
            second.entries[0],
        ]

    async def test_of_two_continuations_both_live(self, store: Store) -> None:
        first = await store_response(store, "first")
        one, other = make_response(store, "one", after=first), make_response(store, "other", after=first)
        leases = [await one.begin(), await other.begin()]
        await asyncio.gather(one.complete(leases[0]), other.complete(leases[1]))
        for end in ("one", "other"):
            tip = one if end == "one" else other
            assert list_user_texts(await store.get_conversation("tenant", tip.response.id)) == ["first", end]
            more = await store_response(store, "more", after=tip.response)
            assert list_user_texts(await store.get_conversation("tenant", more.id)) == ["first", end, "more"]
        late = await store_response(store, "late", after=first)
        assert list_user_texts(await store.get_conversation("tenant", late.id)) == ["first", "late"]

    async def test_forks_of_forks(self, store: Store) -> None:
        tip = await store_response(store, "0")
        expected = ["0"]
        others: list[tuple[Response, list[str]]] = []
        for number in range(1, 40):
            other = await store_response(store, f"other {number}", after=tip)
            others.append((other, [*expected, f"other {number}"]))
            tip = await store_response(store, str(number), after=tip)
            expected.append(str(number))
            assert list_user_texts(await store.get_conversation("tenant", tip.id)) == expected
        for other, their in others:
            assert list_user_texts(await store.get_conversation("tenant", other.id)) == their
            assert await store.delete_response("tenant", other.id)
        assert list_user_texts(await store.get_conversation("tenant", tip.id)) == expected
        found = await store.list_input_items("tenant", tip.id)
        assert found is not None
        assert len(found) == 2 * 40 - 1

    async def test_many_at_once(self, store: Store) -> None:

        async def talk(name: int) -> None:
            tip: Response | None = None
            for number in range(10):
                tip = await store_response(store, f"{name} {number}", after=tip)
                texts = list_user_texts(await store.get_conversation("tenant", tip.id))
                assert texts == [f"{name} {n}" for n in range(number + 1)]

        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*(talk(name) for name in range(30)))

    async def test_a_response_without_entries(self, store: Store) -> None:
        first = await store_response(store, "first")
        empty = make_response(store, after=first, output=[])
        empty.entries = []
        await empty.complete(await empty.begin())
        assert list_user_texts(await store.get_conversation("tenant", empty.response.id)) == ["first"]
        after = await store_response(store, "after", after=empty.response)
        assert list_user_texts(await store.get_conversation("tenant", after.id)) == ["first", "after"]
        alone = make_response(store, output=[])
        alone.entries = []
        await alone.complete(await alone.begin())
        assert list_user_texts(await store.get_conversation("tenant", alone.response.id)) == []
        assert await store.list_input_items("tenant", alone.response.id) == []


class ResponseDeletionKit(StoreFixture):
    """A response is deleted at once, its items with the last response that refers to them."""

    async def test_a_deleted_response_is_gone(self, store: Store) -> None:
        one = make_response(store)
        response = await one.complete(await one.begin())
        assert await store.get_conversation("tenant", response.id) is not None
        assert await store.delete_response("tenant", response.id) is True
        assert await store.delete_response("tenant", response.id) is False
        assert await store.get_response("tenant", response.id) is None
        assert await store.get_conversation("tenant", response.id) is None
        assert await store.list_input_items("tenant", response.id) is None
        assert await find_stored_items(store, one.entries) == []

    async def test_items_stay_while_a_response_refers_to_them(self, store: Store) -> None:
        first, tip = make_response(store, "first"), make_response(store, "tip")
        tip.response.previous_response_id = (await first.complete(await first.begin())).id
        await tip.complete(await tip.begin())
        assert await store.delete_response("tenant", first.response.id)
        assert await store.get_response("tenant", first.response.id) is None
        assert list_user_texts(await store.get_conversation("tenant", tip.response.id)) == ["first", "tip"]
        assert await find_stored_items(store, first.entries) == first.entries
        more = await store_response(store, "more", after=tip.response)
        assert list_user_texts(await store.get_conversation("tenant", more.id)) == ["first", "tip", "more"]
        assert await store.delete_response("tenant", tip.response.id)
        assert await store.delete_response("tenant", more.id)
        assert await find_stored_items(store, [*first.entries, *tip.entries]) == []

    async def test_deleting_the_last_response_keeps_the_rest(self, store: Store) -> None:
        first = await store_response(store, "first")
        last = make_response(store, "last", after=first)
        await last.complete(await last.begin())
        assert await store.delete_response("tenant", last.response.id)
        assert await find_stored_items(store, last.entries) == []
        assert list_user_texts(await store.get_conversation("tenant", first.id)) == ["first"]
        again = await store_response(store, "again", after=first)
        assert list_user_texts(await store.get_conversation("tenant", again.id)) == ["first", "again"]

    async def test_forks_hold_what_they_share(self, store: Store) -> None:
        first, middle = make_response(store, "first"), make_response(store, "middle")
        middle.response.previous_response_id = (await first.complete(await first.begin())).id
        await middle.complete(await middle.begin())
        end = await store_response(store, "end", after=middle.response)
        fork = await store_response(store, "fork", after=middle.response)
        twig = await store_response(store, "twig", after=fork)
        for gone in (end, middle.response, first.response, fork):
            assert await store.delete_response("tenant", gone.id)
            assert list_user_texts(await store.get_conversation("tenant", twig.id)) == [
                "first",
                "middle",
                "fork",
                "twig",
            ]
            assert await find_stored_items(store, [*first.entries, *middle.entries]) == [
                *first.entries,
                *middle.entries,
            ]
        assert await store.delete_response("tenant", twig.id)
        assert await find_stored_items(store, [*first.entries, *middle.entries]) == []

    async def test_a_running_response_protects_what_it_continues(self, store: Store) -> None:
        first = await store_response(store, "first")
        one = make_response(store, "one", after=first)
        lease = await one.begin()
        assert await store.delete_response("tenant", first.id)
        await one.complete(lease)
        assert list_user_texts(await store.get_conversation("tenant", one.response.id)) == ["first", "one"]

    async def test_what_was_deleted_is_not_continued(self, store: Store) -> None:
        first = await store_response(store, "first")
        assert await store.delete_response("tenant", first.id)
        after = await store_response(store, "after", after=first)
        assert list_user_texts(await store.get_conversation("tenant", after.id)) == ["after"]

    async def test_a_running_response_can_be_deleted(self, store: Store) -> None:
        first = make_response(store, "first")
        one = make_response(store, "one", after=await first.complete(await first.begin()))
        lease = await one.begin()
        assert await store.delete_response("tenant", one.response.id)
        assert await store.get_response("tenant", one.response.id) is None
        with pytest.raises(ResponseLeaseLost):
            await one.complete(lease)
        assert await store.get_response("tenant", one.response.id) is None
        assert await store.delete_response("tenant", first.response.id)
        assert await find_stored_items(store, [*first.entries, *one.entries]) == []


class IdempotencyStoreKit(StoreFixture):
    """A key stands for one request, until it is released or expires."""

    async def test_a_claim_lasts_until_it_is_released_or_expires(self, store: Store) -> None:
        first, second = (IdempotencyClaim(bytes([number]) * 32, f"resp_{number}") for number in (1, 2))
        assert await store.get_idempotency_claim("a", "key") is None
        assert await store.claim_idempotency_key("a", "key", first, 3600) is None
        assert await store.get_idempotency_claim("a", "key") == first
        assert await store.claim_idempotency_key("a", "key", second, 3600) == first
        assert await store.claim_idempotency_key("b", "key", second, 3600) is None
        assert await store.claim_idempotency_key("a", "other", second, 3600) is None
        await store.release_idempotency_key("a", "key", "resp_2")
        assert await store.claim_idempotency_key("a", "key", second, 3600) == first
        await store.release_idempotency_key("a", "key", "resp_1")
        assert await store.claim_idempotency_key("a", "key", second, 3600) is None
        assert await store.claim_idempotency_key("b", "key", first, 3600) == second
        assert await store.claim_idempotency_key("c", "key", first, 0) is None
        assert await store.get_idempotency_claim("c", "key") is None
        assert await store.claim_idempotency_key("c", "key", second, 3600) is None
        assert await store.claim_idempotency_key("c", "key", first, 3600) == second

    async def test_of_many_claims_at_once_one_is_first(self, store: Store) -> None:
        claims = [IdempotencyClaim(b"", f"resp_{number}") for number in range(10)]
        found = await asyncio.gather(
            *(store.claim_idempotency_key("a", "key", claim, 60) for claim in claims)
        )
        (winner,) = [claim for claim, before in zip(claims, found, strict=True) if before is None]
        assert all(before in (None, winner) for before in found)


class ApiKeyStoreKit(StoreFixture):
    """Keys are added, listed and revoked."""

    async def test_keys(self, store: Store) -> None:
        assert list(await store.list_api_keys()) == []
        revisions = [await store.get_api_keys_revision()]
        keys = [
            ApiKeyRecord(
                id=f"key_{number}",
                tenant="tenant",
                digest=bytes([number]) * 32,
                hint="abcd",
                created_at=100.5 - number,
                name="náme",
                limits=ApiKeyLimits(requests_per_minute=number or None),
            )
            for number in range(3)
        ]
        for key in keys:
            await store.add_api_key(key)
            revisions.append(await store.get_api_keys_revision())
        assert list(await store.list_api_keys()) == keys[::-1]
        assert await store.revoke_api_key("key_1", 200.25)
        revisions.append(await store.get_api_keys_revision())
        assert not await store.revoke_api_key("key_1", 300.0)
        assert not await store.revoke_api_key("key_unknown", 300.0)
        revoked = msgspec.structs.replace(keys[1], revoked_at=200.25)
        assert list(await store.list_api_keys()) == [keys[2], revoked, keys[0]]
        assert len(set(revisions)) == len(revisions)
        assert await store.get_api_keys_revision() == revisions[-1]


class SegmentCacheKit(StoreFixture):
    """For stores that cache segments: segments stay the same objects, because renderings are attached to them."""

    async def test_segments_stay_the_same_objects(self, store: Store) -> None:
        first = await store_response(store, "1")
        (one,) = await load_segments(store, first)
        one.renderings["dialect"] = (b"1", b"")
        second = await store_response(store, "2", after=first)
        fork = await store_response(store, "3", after=first)
        for tip in (second, fork):
            found = await load_segments(store, tip)
            assert found[0] is one
        assert await store.delete_response("tenant", first.id)
        found = await load_segments(store, second)
        assert found[0] is one


class StoreKit(
    ResponseStoreKit,
    ConversationStoreKit,
    ResponseDeletionKit,
    LeaseKit,
    IdempotencyStoreKit,
    ApiKeyStoreKit,
    ContainerStoreKit,
    UploadedFileRecordStoreKit,
):
    """All tests of the seam."""
