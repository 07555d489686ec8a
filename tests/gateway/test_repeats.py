"""Requests with an Idempotency-Key run once, however often they come; imports the support."""

import asyncio
import gc
import json
import sqlite3
import weakref
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
import pytest_asyncio

from fumehood.gateway import repeats
from fumehood.interfaces import IdempotencyClaim
from fumehood.protocol.errors import InvalidRequest, ModelUnreachable, ServerFault
from fumehood.protocol.events import TextDelta
from tests.support.gateway import Answer, Served, serving_gateway, text_events
from tests.support.tenants import INTERPRETER, House, two_tenants

module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with two_tenants(tmp_path_factory.mktemp("repeats")) as house:
        yield house


def keyed(name: str) -> dict[str, str]:
    return {"idempotency-key": name}


def ended(answer: Answer) -> dict[str, Any]:
    """The response in the last event of a stream."""
    lines = answer.body.decode().strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return json.loads(lines[-2].partition("data: ")[2])["response"]


def replayed(answer: Answer) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


# --- responses that have ended ------------------------------------------------------------------------


@module
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_the_same_request_gives_the_same_response(house: House, stream: bool, store: bool) -> None:
    key = keyed(f"same {stream} {store}")
    asked, rows = len(house.model.requests), house.rows()
    body: dict[str, Any] = {"tools": [INTERPRETER], "stream": stream, "store": store, "input": "make"}
    first, second = await house.ann.create(key, **body), await house.ann.create(key, **body)
    assert (first.status, second.status) == (200, 200)
    assert (replayed(first), replayed(second)) == (False, True)
    if stream:
        assert ended(first) == ended(second)
        assert ended(first)["status"] == "completed"
    else:
        assert first.body == second.body
    assert len(house.model.requests) == asked + 2  # a turn that calls, and one that answers
    if not store:
        written = {name for name, number in house.rows().items() if number != rows[name]}
        assert written <= {"containers", "files"}


@module
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_response_after_a_restart(house: House, stream: bool) -> None:
    key = keyed(f"restart {stream}")
    first = await house.ann.create(key, stream=stream)
    asked = len(house.model.requests)
    async with house.restarted() as ann:
        second = await ann.create(key, stream=stream)
        other = await ann.create(key, stream=stream, input="another")
    assert replayed(second)
    assert (ended(first) == ended(second)) if stream else (first.body == second.body)
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert len(house.model.requests) == asked


@module
@pytest.mark.parametrize("store", [False, True])
async def test_the_same_key_for_another_request(house: House, store: bool) -> None:
    key = keyed(f"other {store}")
    assert (await house.ann.create(key, store=store)).status == 200
    refused = await house.ann.create(key, store=store, input="something else")
    assert refused.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert refused.headers["x-should-retry"] == "false"


@module
@pytest.mark.parametrize("store", [False, True])
async def test_a_key_stands_for_one_request_whether_it_is_stored_or_not(house: House, store: bool) -> None:
    key = keyed(f"changed {store}")
    assert (await house.ann.create(key, store=store)).status == 200
    asked = len(house.model.requests)
    for text in ("hi", "something else"):
        refused = await house.ann.create(key, store=not store, input=text)
        assert refused.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert len(house.model.requests) == asked


@module
async def test_a_request_that_is_refused_does_not_use_up_its_key(house: House) -> None:
    key, rows = keyed("refused"), house.rows()
    for _ in range(2):
        refused = await house.ann.create(key, previous_response_id="resp_none")
        assert refused.error == (400, "previous_response_not_found", "previous_response_id")
    assert house.rows() == rows
    assert (await house.ann.create(key)).status == 200


@module
async def test_a_response_that_was_deleted_is_not_told_again(house: House) -> None:
    key = keyed("deleted")
    made = await house.ann.create(key)
    assert (await house.ann.ask("DELETE", f"/v1/responses/{made.json['id']}")).status == 200
    refused = await house.ann.create(key)
    assert refused.error == (409, "idempotency_response_gone", "Idempotency-Key")
    assert refused.headers["x-should-retry"] == "false"


@module
async def test_what_was_cut_off_by_a_crash_is_not_run_again(house: House) -> None:
    body = json.dumps({"model": "scripted", "input": "hi"}).encode()
    claim = IdempotencyClaim(repeats.body_digest(body), "resp_lost")
    assert await house.store.claim("ann", "crash", claim, 60) is None
    asked = len(house.model.requests)
    refused = await house.ann.ask("POST", "/v1/responses", body, **keyed("crash"))
    assert refused.error == (409, "idempotency_response_gone", "Idempotency-Key")
    assert len(house.model.requests) == asked


@module
async def test_a_key_is_free_after_a_day(house: House) -> None:
    key = keyed("day")
    first = await house.ann.create(key)
    with closing(sqlite3.connect(house.database)) as connection, connection:
        connection.execute("UPDATE claims SET expires = expires - 0.999 WHERE key = 'day'")
    assert (await house.ann.create(key)).json["id"] == first.json["id"]
    with closing(sqlite3.connect(house.database)) as connection, connection:
        connection.execute("UPDATE claims SET expires = expires - 0.001 WHERE key = 'day'")
    assert (await house.ann.create(key, input="other")).json["id"] != first.json["id"]


@module
@pytest.mark.parametrize("key", [" ", "x" * 256, "ä".encode().decode("latin-1")])
async def test_keys_that_are_none(house: House, key: str) -> None:
    refused = await house.ann.create(keyed(key))
    assert refused.error == (400, "invalid_value", "Idempotency-Key")


@module
async def test_other_headers_do_not_count(house: House) -> None:
    ids = {
        (await house.ann.create({"x-stainless-retry-count": "1", "x-client-request-id": "a"})).json["id"]
        for _ in range(2)
    }
    assert len(ids) == 2


# --- responses in the making --------------------------------------------------------------------------


def first_events(served: Served) -> None:
    """Runs begin, and go on when they are told to."""
    served.runs.script = lambda response: [text_events(response)[:4]]


def go_on(served: Served) -> None:
    (run,) = served.runs.runs
    run.say(*text_events(run.response)[4:])


async def followed(served: Served, number: int) -> None:
    """Until so many see the only run."""
    async with asyncio.timeout(30):
        while followers(served) != number:
            await asyncio.sleep(0.001)


def followers(served: Served) -> int:
    return sum(len(joint._followers) for joint in repeats_of(served)._running.values())


def repeats_of(served: Served) -> Any:
    app: Any = served.app
    return app.responses._repeats


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_repeats_a_request_that_is_served_joins_it(stream: bool) -> None:
    async with serving_gateway() as served:
        first_events(served)
        ask = [asyncio.ensure_future(served.create(stream=stream, headers=keyed("joined"))) for _ in range(3)]
        await followed(served, 3)
        other = await served.create(stream=stream, input="other", headers=keyed("joined"))
        go_on(served)
        answers = await asyncio.gather(*ask)
        assert len(served.runs.runs) == 1
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert sorted(replayed(answer) for answer in answers) == [False, True, True]
    if stream:
        assert ended(answers[0])["status"] == "completed"


async def test_who_comes_late_sees_everything() -> None:
    async with serving_gateway() as served:
        first_events(served)
        async with served.posted(stream=True, headers=keyed("late")) as (reader, _):
            await reader.readuntil(b"response.content_part.added")
            late = asyncio.ensure_future(served.create(stream=True, headers=keyed("late")))
            await followed(served, 2)
            go_on(served)
            first = await reader.readuntil(b"data: [DONE]\n\n")
        answer = await late
    assert answer.body.count(b"event: response.created") == 1
    assert first.endswith(answer.body[-100:])
    assert ended(answer)["status"] == "completed"


async def test_a_client_that_comes_back_finds_its_run() -> None:
    async with serving_gateway() as served:
        first_events(served)
        async with served.posted(stream=True, headers=keyed("back")) as (reader, writer):
            await reader.readuntil(b"response.content_part.added")
            writer.transport.abort()
        await followed(served, 0)
        second = asyncio.ensure_future(served.create(stream=True, headers=keyed("back")))
        await followed(served, 1)
        go_on(served)
        answer = await second
        assert served.runs.runs[0].cancelled is None
    assert ended(answer)["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stays_away_takes_its_run_with_it(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "GRACE", 0.05)
    async with serving_gateway() as served:
        first_events(served)
        async with served.posted(stream=stream, headers=keyed("away")) as (_, writer):
            await followed(served, 1)
            writer.transport.abort()
        async with asyncio.timeout(30):
            await served.runs.runs[0].ended.wait()
        assert served.runs.runs[0].cancelled == "the client has gone"


async def test_a_model_that_fails_before_anything_was_made_does_not_use_up_the_key() -> None:
    async with serving_gateway() as served:
        served.runs.refusal = ModelUnreachable("nobody there")
        refused = await served.create(headers=keyed("retry"))
        assert refused.status == 502
        served.runs.refusal = None
        assert (await served.create(headers=keyed("retry"))).status == 200


async def test_all_who_wait_for_a_request_hear_that_it_is_refused() -> None:
    async with serving_gateway() as served:
        served.runs.refusal = InvalidRequest("no", param="input")
        answers = await asyncio.gather(*(served.create(headers=keyed("no")) for _ in range(3)))
    assert {answer.error for answer in answers} == {(400, None, "input")}


async def test_what_is_too_long_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_LARGEST_TAPE", 1000)
    async with serving_gateway() as served:
        first_events(served)
        async with served.posted(stream=True, headers=keyed("long")) as (reader, _):
            await reader.readuntil(b"response.content_part.added")
            refused = await served.create(stream=True, headers=keyed("long"))
            go_on(served)
            last = await reader.readuntil(b"data: [DONE]\n\n")
        assert len(served.runs.runs) == 1
    assert refused.error == (409, "idempotency_response_too_long", "Idempotency-Key")
    assert b"response.completed" in last


# --- responses that are in no store -------------------------------------------------------------------

GONE = (409, "idempotency_response_gone", "Idempotency-Key")


async def test_what_had_to_make_room_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_TAPE_ITSELF", 100_000)
    monkeypatch.setattr(repeats, "_REMEMBERED_BYTES", 250_000)
    async with serving_gateway() as served:
        for name in ("a", "b", "c"):
            await served.create(store=False, headers=keyed(name))
        assert replayed(await served.create(store=False, headers=keyed("c")))
        assert replayed(await served.create(store=False, headers=keyed("b")))
        refused = await served.create(store=False, headers=keyed("a"))
        other = await served.create(store=False, input="other", headers=keyed("a"))
        assert len(served.runs.runs) == 3
        assert served.runs.runs[0].id in refused.json["error"]["message"]
    assert refused.error == GONE
    assert refused.headers["x-should-retry"] == "false"
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")


async def test_only_so_many_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(repeats, "_MOST_TRACES", 2)
    async with serving_gateway() as served:
        for name in ("a", "b", "c"):
            await served.create(store=False, headers=keyed(name))
        again = [await served.create(store=False, headers=keyed(name)) for name in ("c", "b", "a")]
    assert [answer.status for answer in again] == [409, 409, 200]


@module
async def test_what_one_tenant_does_makes_no_room_in_what_is_remembered_of_another(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "_REMEMBERED_BYTES", 24_000)  # three of them
    quiet, busy = await house.another(), await house.another()
    first = await quiet.create(keyed("quiet"), store=False)
    for number in range(6):
        assert (await busy.create(keyed(f"busy {number}"), store=False)).status == 200
    again = await quiet.create(keyed("quiet"), store=False)
    assert replayed(again)
    assert again.body == first.body
    assert (await busy.create(keyed("busy 0"), store=False)).error == GONE


async def test_what_was_too_long_to_be_remembered_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_LARGEST_TAPE", 100)
    async with serving_gateway() as served:
        assert (await served.create(store=False, headers=keyed("long"))).status == 200
        assert (await served.create(store=False, headers=keyed("long"))).error == GONE
        assert len(served.runs.runs) == 1


@pytest.mark.parametrize("fault", [ServerFault("it broke"), RuntimeError("a mistake")])
async def test_a_stream_that_broke_off_is_not_run_again(fault: Exception) -> None:
    async with serving_gateway() as served:
        first_events(served)
        first = asyncio.ensure_future(served.create(stream=True, store=False, headers=keyed("broken")))
        await followed(served, 1)
        served.runs.runs[0].break_off(fault)
        assert b"event: error" in (await first).body
        assert (await served.create(stream=True, store=False, headers=keyed("broken"))).error == GONE
        assert len(served.runs.runs) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_remembered_does_not_hold_its_run(stream: bool) -> None:
    async with serving_gateway() as served:
        await served.create(stream=stream, store=False, headers=keyed("light"))
        run = weakref.ref(served.runs.runs.pop())
        gc.collect()
        assert run() is None
        assert replayed(await served.create(stream=stream, store=False, headers=keyed("light")))


@pytest.mark.parametrize("store", [False, True])
async def test_a_mistake_before_anything_has_begun_does_not_use_up_the_key(store: bool) -> None:
    async with serving_gateway() as served:
        served.runs.refusal = RuntimeError("a mistake")
        assert (await served.create(store=store, headers=keyed("mistake"))).status == 500
        served.runs.refusal = None
        assert (await served.create(store=store, headers=keyed("mistake"))).status == 200


# --- slow readers -------------------------------------------------------------------------------------


def say_much(served: Served, number: int) -> bytes:
    """What the piece ends with."""
    mark = f"<{number}>"
    place: Any = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    delta = "x" * (256 << 10) + mark
    served.runs.runs[0].say(TextDelta(delta=delta, sequence_number=4 + number, **place))
    return mark.encode()


async def test_who_reads_too_slowly_is_left_behind_by_those_who_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeats, "_LARGEST_TAPE", 1 << 20)
    async with serving_gateway() as served:
        first_events(served)
        request: dict[str, Any] = {"stream": True, "headers": keyed("slow")}
        async with served.posted(**request) as (slow, writer), served.posted(**request) as (fast, _):
            await slow.readuntil(b"response.content_part.added")
            await fast.readuntil(b"response.content_part.added")
            transport: Any = writer.transport
            transport.pause_reading()
            number = 0
            while followers(served) == 2:
                number += 1
                await fast.readuntil(say_much(served, number))
            (joint,) = repeats_of(served)._running.values()
            assert sum(map(len, joint._pieces)) < 1 << 20
            transport.resume_reading()
            left = await slow.readuntil(b"data: [DONE]\n\n")
            go_on(served)
            stayed = await fast.readuntil(b"data: [DONE]\n\n")
        assert served.runs.runs[0].cancelled is None
    assert b"event: error" in left
    assert b"not read fast enough" in left
    assert b"response.completed" in stayed


async def test_a_run_whose_only_reader_is_too_slow_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_LARGEST_TAPE", 1 << 20)
    monkeypatch.setattr(repeats, "GRACE", 0.05)
    async with serving_gateway() as served:
        first_events(served)
        request: dict[str, Any] = {"stream": True, "store": False, "headers": keyed("slow")}
        async with served.posted(**request) as (slow, writer):
            await slow.readuntil(b"response.content_part.added")
            transport: Any = writer.transport
            transport.pause_reading()
            number = 0
            while followers(served):
                number += 1
                say_much(served, number)
                await asyncio.sleep(0.001)
            await served.runs.runs[0].ended.wait()
            transport.resume_reading()
            assert b"not read fast enough" in await slow.readuntil(b"data: [DONE]\n\n")
        assert served.runs.runs[0].cancelled == "the client has gone"
        assert (await served.create(**request)).error == GONE
        assert len(served.runs.runs) == 1


# --- limits -------------------------------------------------------------------------------------------


async def test_a_retry_of_the_only_response_that_a_key_may_have_is_not_refused() -> None:
    async with serving_gateway(total=1) as served:
        first_events(served)
        ask = [asyncio.ensure_future(served.create(headers=keyed("one"))) for _ in range(2)]
        await followed(served, 2)
        assert (await served.create()).status == 429
        go_on(served)
        assert {(await answer).status for answer in ask} == {200}
        served.runs.script = lambda response: [text_events(response)]
        assert (await served.create()).status == 200
