"""Requests with an Idempotency-Key run once, however often they are sent."""

import asyncio
import gc
import json
import sqlite3
import weakref
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fumehood.engine.run_event_log import ReaderLagLimits
from fumehood.gateway import idempotency
from fumehood.interfaces import IdempotencyClaim
from fumehood.protocol.openai.api_errors import InternalServerError, InvalidRequest, ModelUnreachable
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    StreamEvent,
)
from tests.support.scripted_gateway import (
    HttpResponse,
    ScriptedGateway,
    number_events,
    run_gateway,
    text_events,
)
from tests.support.two_tenant_gateway import INTERPRETER, TenantGateway, two_tenants
from tests.support.waiting import wait_until

module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenant_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantGateway]:
    async with two_tenants(tmp_path_factory.mktemp("repeats")) as tenant_gateway:
        yield tenant_gateway


def idempotency_header(name: str) -> dict[str, str]:
    return {"idempotency-key": name}


def terminal_response(answer: HttpResponse) -> dict[str, Any]:
    """The response in the last event of a stream."""
    lines = answer.body.decode().strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return json.loads(lines[-2].partition("data: ")[2])["response"]


def is_replayed(answer: HttpResponse) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


# --- responses that have ended ------------------------------------------------------------------------


@module
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_the_same_request_gives_the_same_response(
    tenant_gateway: TenantGateway, stream: bool, store: bool
) -> None:
    key = idempotency_header(f"same {stream} {store}")
    asked, rows = len(tenant_gateway.model.requests), tenant_gateway.table_rows()
    body: dict[str, Any] = {"tools": [INTERPRETER], "stream": stream, "store": store, "input": "make"}
    first, second = await tenant_gateway.ann.create(key, **body), await tenant_gateway.ann.create(key, **body)
    assert (first.status, second.status) == (200, 200)
    assert (is_replayed(first), is_replayed(second)) == (False, True)
    if stream:
        assert terminal_response(first) == terminal_response(second)
        assert terminal_response(first)["status"] == "completed"
    else:
        assert first.body == second.body
    assert len(tenant_gateway.model.requests) == asked + 2  # a turn that calls, and one that answers
    if not store:
        written = {name for name, number in tenant_gateway.table_rows().items() if number != rows[name]}
        assert written <= {"containers", "files"}


@module
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_response_after_a_restart(tenant_gateway: TenantGateway, stream: bool) -> None:
    key = idempotency_header(f"restart {stream}")
    first = await tenant_gateway.ann.create(key, stream=stream)
    asked = len(tenant_gateway.model.requests)
    async with tenant_gateway.restart() as ann:
        second = await ann.create(key, stream=stream)
        other = await ann.create(key, stream=stream, input="another")
    assert is_replayed(second)
    assert (terminal_response(first) == terminal_response(second)) if stream else (first.body == second.body)
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert len(tenant_gateway.model.requests) == asked


@module
@pytest.mark.parametrize("store", [False, True])
async def test_the_same_key_for_another_request(tenant_gateway: TenantGateway, store: bool) -> None:
    key = idempotency_header(f"other {store}")
    assert (await tenant_gateway.ann.create(key, store=store)).status == 200
    refused = await tenant_gateway.ann.create(key, store=store, input="something else")
    assert refused.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert refused.headers["x-should-retry"] == "false"


@module
@pytest.mark.parametrize("store", [False, True])
async def test_a_key_stands_for_one_request_whether_it_is_stored_or_not(
    tenant_gateway: TenantGateway, store: bool
) -> None:
    key = idempotency_header(f"changed {store}")
    assert (await tenant_gateway.ann.create(key, store=store)).status == 200
    asked = len(tenant_gateway.model.requests)
    for text in ("hi", "something else"):
        refused = await tenant_gateway.ann.create(key, store=not store, input=text)
        assert refused.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert len(tenant_gateway.model.requests) == asked


@module
async def test_a_request_that_is_refused_does_not_use_up_its_key(tenant_gateway: TenantGateway) -> None:
    key, rows = idempotency_header("refused"), tenant_gateway.table_rows()
    for _ in range(2):
        refused = await tenant_gateway.ann.create(key, previous_response_id="resp_none")
        assert refused.error == (400, "previous_response_not_found", "previous_response_id")
    assert tenant_gateway.table_rows() == rows
    assert (await tenant_gateway.ann.create(key)).status == 200


@module
async def test_a_response_that_was_deleted_is_not_told_again(tenant_gateway: TenantGateway) -> None:
    key = idempotency_header("deleted")
    made = await tenant_gateway.ann.create(key)
    assert (await tenant_gateway.ann.ask("DELETE", f"/v1/responses/{made.json['id']}")).status == 200
    refused = await tenant_gateway.ann.create(key)
    assert refused.error == (409, "idempotency_response_gone", "Idempotency-Key")
    assert refused.headers["x-should-retry"] == "false"


@module
async def test_what_was_cut_off_by_a_crash_is_not_run_again(tenant_gateway: TenantGateway) -> None:
    body = json.dumps({"model": "scripted", "input": "hi"}).encode()
    claim = IdempotencyClaim(idempotency.digest_body(body), "resp_lost")
    assert await tenant_gateway.store.claim_idempotency_key("ann", "crash", claim, 60) is None
    asked = len(tenant_gateway.model.requests)
    refused = await tenant_gateway.ann.ask("POST", "/v1/responses", body, **idempotency_header("crash"))
    assert refused.error == (409, "idempotency_response_gone", "Idempotency-Key")
    assert len(tenant_gateway.model.requests) == asked


@module
async def test_a_key_is_free_after_a_day(tenant_gateway: TenantGateway) -> None:
    key = idempotency_header("day")
    first = await tenant_gateway.ann.create(key)
    with closing(sqlite3.connect(tenant_gateway.database)) as connection, connection:
        connection.execute("UPDATE claims SET expires = expires - 0.999 WHERE key = 'day'")
    assert (await tenant_gateway.ann.create(key)).json["id"] == first.json["id"]
    with closing(sqlite3.connect(tenant_gateway.database)) as connection, connection:
        connection.execute("UPDATE claims SET expires = expires - 0.001 WHERE key = 'day'")
    assert (await tenant_gateway.ann.create(key, input="other")).json["id"] != first.json["id"]


@module
@pytest.mark.parametrize("key", [" ", "x" * 256, "ä".encode().decode("latin-1")])
async def test_keys_that_are_none(tenant_gateway: TenantGateway, key: str) -> None:
    refused = await tenant_gateway.ann.create(idempotency_header(key))
    assert refused.error == (400, "invalid_value", "Idempotency-Key")


@module
async def test_other_headers_do_not_count(tenant_gateway: TenantGateway) -> None:
    ids = {
        (await tenant_gateway.ann.create({"x-stainless-retry-count": "1", "x-client-request-id": "a"})).json[
            "id"
        ]
        for _ in range(2)
    }
    assert len(ids) == 2


# --- responses in the making --------------------------------------------------------------------------


def first_events(gateway: ScriptedGateway) -> None:
    """Runs begin, and go on when they are told to."""
    gateway.runs.script = lambda response: [text_events(response)[:4]]


def finish_run(gateway: ScriptedGateway) -> None:
    (run,) = gateway.runs.runs
    run.emit(*text_events(run.response)[4:])


async def wait_for_subscribers(gateway: ScriptedGateway, number: int) -> None:
    """Until so many see the only run."""
    await wait_until(lambda: subscriber_count(gateway) == number)


def subscriber_count(gateway: ScriptedGateway) -> int:
    return sum(
        shared_run.joined_count for shared_run in idempotent_requests_of(gateway)._shared_runs.values()
    )


def idempotent_requests_of(gateway: ScriptedGateway) -> Any:
    app: Any = gateway.app
    return app.responses._idempotent_requests


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_repeats_a_request_that_is_served_joins_it(stream: bool) -> None:
    async with run_gateway() as gateway:
        first_events(gateway)
        ask = [
            asyncio.ensure_future(
                gateway.create_response(stream=stream, headers=idempotency_header("joined"))
            )
            for _ in range(3)
        ]
        await wait_for_subscribers(gateway, 3)
        other = await gateway.create_response(
            stream=stream, input="other", headers=idempotency_header("joined")
        )
        finish_run(gateway)
        answers = await asyncio.gather(*ask)
        assert len(gateway.runs.runs) == 1
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert sorted(is_replayed(answer) for answer in answers) == [False, True, True]
    if stream:
        assert terminal_response(answers[0])["status"] == "completed"


async def test_who_comes_late_sees_everything() -> None:
    async with run_gateway() as gateway:
        first_events(gateway)
        async with gateway.post_response(stream=True, headers=idempotency_header("late")) as (reader, _):
            await reader.readuntil(b"response.content_part.added")
            late = asyncio.ensure_future(
                gateway.create_response(stream=True, headers=idempotency_header("late"))
            )
            await wait_for_subscribers(gateway, 2)
            finish_run(gateway)
            first = await reader.readuntil(b"data: [DONE]\n\n")
        answer = await late
    assert answer.body.count(b"event: response.created") == 1
    assert first.endswith(answer.body[-100:])
    assert terminal_response(answer)["status"] == "completed"


async def test_a_client_that_comes_back_finds_its_run() -> None:
    async with run_gateway() as gateway:
        first_events(gateway)
        async with gateway.post_response(stream=True, headers=idempotency_header("back")) as (reader, writer):
            await reader.readuntil(b"response.content_part.added")
            writer.transport.abort()
        await wait_for_subscribers(gateway, 0)
        second = asyncio.ensure_future(
            gateway.create_response(stream=True, headers=idempotency_header("back"))
        )
        await wait_for_subscribers(gateway, 1)
        finish_run(gateway)
        answer = await second
        assert gateway.runs.runs[0].cancelled is None
    assert terminal_response(answer)["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stays_away_takes_its_run_with_it(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "DISCONNECT_GRACE_SECONDS", 0.05)
    async with run_gateway() as gateway:
        first_events(gateway)
        async with gateway.post_response(stream=stream, headers=idempotency_header("away")) as (_, writer):
            await wait_for_subscribers(gateway, 1)
            writer.transport.abort()
        async with asyncio.timeout(30):
            await gateway.runs.runs[0].ended.wait()
        assert gateway.runs.runs[0].cancelled == "client disconnected"


async def test_a_model_that_fails_before_anything_was_made_does_not_use_up_the_key() -> None:
    async with run_gateway() as gateway:
        gateway.runs.rejection = ModelUnreachable("nobody there")
        refused = await gateway.create_response(headers=idempotency_header("retry"))
        assert refused.status == 502
        gateway.runs.rejection = None
        assert (await gateway.create_response(headers=idempotency_header("retry"))).status == 200


async def test_all_who_wait_for_a_request_hear_that_it_is_refused() -> None:
    async with run_gateway() as gateway:
        gateway.runs.rejection = InvalidRequest("no", param="input")
        answers = await asyncio.gather(
            *(gateway.create_response(headers=idempotency_header("no")) for _ in range(3))
        )
    assert {answer.error for answer in answers} == {(400, None, "input")}


async def test_what_is_too_long_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_MAX_REPLAY_BYTES", 1000)
    async with run_gateway() as gateway:
        first_events(gateway)
        async with gateway.post_response(stream=True, headers=idempotency_header("long")) as (reader, _):
            await reader.readuntil(b"response.content_part.added")
            refused = await gateway.create_response(stream=True, headers=idempotency_header("long"))
            finish_run(gateway)
            last = await reader.readuntil(b"data: [DONE]\n\n")
        assert len(gateway.runs.runs) == 1
    assert refused.error == (409, "idempotency_response_too_long", "Idempotency-Key")
    assert b"response.completed" in last


# --- responses that are in no store -------------------------------------------------------------------

GONE = (409, "idempotency_response_gone", "Idempotency-Key")


async def test_what_had_to_make_room_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_CACHE_OVERHEAD_BYTES", 100_000)
    monkeypatch.setattr(idempotency, "_MAX_CACHE_BYTES", 250_000)
    async with run_gateway() as gateway:
        for name in ("a", "b", "c"):
            await gateway.create_response(store=False, headers=idempotency_header(name))
        assert is_replayed(await gateway.create_response(store=False, headers=idempotency_header("c")))
        assert is_replayed(await gateway.create_response(store=False, headers=idempotency_header("b")))
        refused = await gateway.create_response(store=False, headers=idempotency_header("a"))
        other = await gateway.create_response(store=False, input="other", headers=idempotency_header("a"))
        assert len(gateway.runs.runs) == 3
        assert gateway.runs.runs[0].id in refused.json["error"]["message"]
    assert refused.error == GONE
    assert refused.headers["x-should-retry"] == "false"
    assert other.error == (409, "idempotency_key_reused", "Idempotency-Key")


async def test_only_so_many_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_MAX_CACHE_BYTES", 0)
    monkeypatch.setattr(idempotency, "_MAX_UNSTORED_KEYS", 2)
    async with run_gateway() as gateway:
        for name in ("a", "b", "c"):
            await gateway.create_response(store=False, headers=idempotency_header(name))
        again = [
            await gateway.create_response(store=False, headers=idempotency_header(name))
            for name in ("c", "b", "a")
        ]
    assert [answer.status for answer in again] == [409, 409, 200]


@module
async def test_what_one_tenant_does_makes_no_room_in_what_is_remembered_of_another(
    tenant_gateway: TenantGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = idempotent_requests_of(tenant_gateway.gateway)._unstored._responses
    monkeypatch.setattr(cache, "max_bytes", 24_000)  # three of them
    quiet, busy = await tenant_gateway.add_tenant(), await tenant_gateway.add_tenant()
    first = await quiet.create(idempotency_header("quiet"), store=False)
    for number in range(6):
        assert (await busy.create(idempotency_header(f"busy {number}"), store=False)).status == 200
    again = await quiet.create(idempotency_header("quiet"), store=False)
    assert is_replayed(again)
    assert again.body == first.body
    assert (await busy.create(idempotency_header("busy 0"), store=False)).error == GONE


async def test_what_was_too_long_to_be_remembered_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_MAX_REPLAY_BYTES", 100)
    async with run_gateway() as gateway:
        assert (await gateway.create_response(store=False, headers=idempotency_header("long"))).status == 200
        assert (await gateway.create_response(store=False, headers=idempotency_header("long"))).error == GONE
        assert len(gateway.runs.runs) == 1


@pytest.mark.parametrize("fault", [InternalServerError("it broke"), RuntimeError("a mistake")])
async def test_a_stream_that_broke_off_is_not_run_again(fault: Exception) -> None:
    async with run_gateway() as gateway:
        first_events(gateway)
        first = asyncio.ensure_future(
            gateway.create_response(stream=True, store=False, headers=idempotency_header("broken"))
        )
        await wait_for_subscribers(gateway, 1)
        gateway.runs.runs[0].fail(fault)
        assert b"event: error" in (await first).body
        assert (
            await gateway.create_response(stream=True, store=False, headers=idempotency_header("broken"))
        ).error == GONE
        assert len(gateway.runs.runs) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_a_model_server_are_remembered_as_they_came(stream: bool) -> None:
    item = {"type": "shell_call", "id": "sh_1", "call_id": "c", "action": {"commands": ["ls"]}, "future": 1}
    made = msgspec.Raw(json.dumps(item).encode())

    def script(response: Response) -> list[list[StreamEvent]]:
        ended = msgspec.structs.replace(response, status="completed", output=[made])
        events: list[StreamEvent] = [
            ResponseCreated(response=response),
            OutputItemAdded(output_index=0, item=made),
            OutputItemDone(output_index=0, item=made),
            ResponseCompleted(response=ended),
        ]
        return [number_events(events)]

    async with run_gateway() as gateway:
        gateway.runs.script = script
        request: dict[str, Any] = {"stream": stream, "store": False, "headers": idempotency_header("passed")}
        first, second = [await gateway.create_response(**request) for _ in range(2)]
    assert is_replayed(second)
    outputs = [(terminal_response(answer) if stream else answer.json)["output"] for answer in (first, second)]
    assert outputs == [[item], [item]]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_remembered_does_not_hold_its_run(stream: bool) -> None:
    async with run_gateway() as gateway:
        await gateway.create_response(stream=stream, store=False, headers=idempotency_header("light"))
        run = weakref.ref(gateway.runs.runs.pop())
        gc.collect()
        assert run() is None
        assert is_replayed(
            await gateway.create_response(stream=stream, store=False, headers=idempotency_header("light"))
        )


@pytest.mark.parametrize("store", [False, True])
async def test_a_mistake_before_anything_has_begun_does_not_use_up_the_key(store: bool) -> None:
    async with run_gateway() as gateway:
        gateway.runs.rejection = RuntimeError("a mistake")
        assert (
            await gateway.create_response(store=store, headers=idempotency_header("mistake"))
        ).status == 500
        gateway.runs.rejection = None
        assert (
            await gateway.create_response(store=store, headers=idempotency_header("mistake"))
        ).status == 200


# --- slow readers -------------------------------------------------------------------------------------


def emit_large_delta(gateway: ScriptedGateway, number: int) -> bytes:
    """What the piece ends with."""
    mark = f"<{number}>"
    place: Any = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    delta = "x" * (256 << 10) + mark
    gateway.runs.runs[0].emit(OutputTextDelta(delta=delta, sequence_number=4 + number, **place))
    return mark.encode()


async def test_a_slow_reader_is_dropped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_MAX_REPLAY_BYTES", 1 << 20)
    async with run_gateway() as gateway:
        first_events(gateway)
        gateway.runs.lag_limits = ReaderLagLimits(events=4, hard_events=8)
        request: dict[str, Any] = {"stream": True, "headers": idempotency_header("slow")}
        async with (
            gateway.post_response(**request) as (slow, writer),
            gateway.post_response(**request) as (fast, _),
        ):
            await slow.readuntil(b"response.content_part.added")
            await fast.readuntil(b"response.content_part.added")
            transport: Any = writer.transport
            transport.pause_reading()
            log: Any = gateway.runs.runs[0].log
            number = 0
            while len(log._readers) == 2:
                number += 1
                await fast.readuntil(emit_large_delta(gateway, number))
            await fast.readuntil(emit_large_delta(gateway, number + 1))
            assert log._events == []
            transport.resume_reading()
            dropped = await slow.readuntil(b"data: [DONE]\n\n")
            finish_run(gateway)
            finished = await fast.readuntil(b"data: [DONE]\n\n")
        assert gateway.runs.runs[0].cancelled is None
    assert b"event: error" in dropped
    assert b"not read fast enough" in dropped
    assert b"response.failed" in dropped
    assert b"response.completed" in finished


async def test_a_run_whose_only_reader_is_too_slow_ends() -> None:
    async with run_gateway() as gateway:
        first_events(gateway)
        gateway.runs.lag_limits = ReaderLagLimits(events=4, hard_events=8)
        request: dict[str, Any] = {"stream": True, "store": False, "headers": idempotency_header("slow")}
        async with gateway.post_response(**request) as (slow, writer):
            await slow.readuntil(b"response.content_part.added")
            transport: Any = writer.transport
            transport.pause_reading()
            run = gateway.runs.runs[0]
            number = 0
            while not run.ended.is_set():
                number += 1
                emit_large_delta(gateway, number)
                await asyncio.sleep(0.001)
            transport.resume_reading()
            assert b"not read fast enough" in await slow.readuntil(b"data: [DONE]\n\n")
        assert run.cancelled == "its events were not read"
        again = await gateway.create_response(**request)
        assert is_replayed(again)
        assert terminal_response(again)["status"] == "cancelled"
        assert len(gateway.runs.runs) == 1


# --- limits -------------------------------------------------------------------------------------------


async def test_a_retry_of_the_only_response_that_a_key_may_have_is_not_refused() -> None:
    async with run_gateway(max_concurrent=1) as gateway:
        first_events(gateway)
        ask = [
            asyncio.ensure_future(gateway.create_response(headers=idempotency_header("one")))
            for _ in range(2)
        ]
        await wait_for_subscribers(gateway, 2)
        assert (await gateway.create_response()).status == 429
        finish_run(gateway)
        assert {(await answer).status for answer in ask} == {200}
        gateway.runs.script = lambda response: [text_events(response)]
        assert (await gateway.create_response()).status == 200
