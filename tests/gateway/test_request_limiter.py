"""Limits per key: rate, concurrency and memory."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import DEFAULT_KEY_LIMITS, ApiKeyLimits
from fumehood.protocol.openai.api_errors import BodyTooLarge, RateLimited, ServiceUnavailable
from fumehood.testing import FakeClock, MemoryStore
from tests.support.scripted_gateway import HttpResponse, ScriptedGateway, run_gateway, text_events
from tests.support.two_tenant_gateway import TenantClient, put_key, two_tenants


@dataclass
class LimitedGateway:
    gateway: ScriptedGateway
    clock: FakeClock
    ann: TenantClient
    ben: TenantClient


@asynccontextmanager
async def run_limited_gateway(
    usual: ApiKeyLimits = DEFAULT_KEY_LIMITS, *, ann: ApiKeyLimits = DEFAULT_KEY_LIMITS, total: int = 512
) -> AsyncGenerator[LimitedGateway]:
    store, clock = MemoryStore(), FakeClock()
    secrets = [await put_key(store, None, ann), await put_key(store)]
    limits = RequestLimiter(usual, max_concurrent=total, monotonic=clock.monotonic)
    async with (
        ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders, limits=limits) as gateway,
    ):
        yield LimitedGateway(gateway, clock, *(TenantClient(gateway, secret) for secret in secrets))


def rate_limit_headers(answer: HttpResponse) -> tuple[str, str, str]:
    """Limit, remaining, reset."""
    names = ("limit", "remaining", "reset")
    found = [answer.headers[f"x-ratelimit-{name}-requests"] for name in names]
    return found[0], found[1], found[2]


async def test_requests_in_a_minute() -> None:
    async with run_limited_gateway(ApiKeyLimits(requests_per_minute=2)) as tenant_gateway:
        assert rate_limit_headers(await tenant_gateway.ann.create()) == ("2", "1", "30s")
        assert rate_limit_headers(await tenant_gateway.ann.create()) == ("2", "0", "1m0s")
        refused = await tenant_gateway.ann.create()
        assert refused.error == (429, "rate_limit_exceeded", None)
        assert refused.headers["retry-after"] == "30"
        assert rate_limit_headers(refused) == ("2", "0", "1m0s")
        assert rate_limit_headers(await tenant_gateway.ben.create()) == ("2", "1", "30s")
        tenant_gateway.clock.advance(29.9)
        assert (await tenant_gateway.ann.create()).headers["retry-after"] == "1"
        tenant_gateway.clock.advance(0.2)
        assert rate_limit_headers(await tenant_gateway.ann.create()) == ("2", "0", "1m0s")
        assert len(tenant_gateway.gateway.runs.requests) == 4


async def test_what_asks_no_model_is_not_counted() -> None:
    async with run_limited_gateway(ApiKeyLimits(requests_per_minute=1)) as tenant_gateway:
        for _ in range(3):
            answer = await tenant_gateway.ann.ask("GET", "/v1/models")
            assert answer.status == 200
            assert "x-ratelimit-limit-requests" not in answer.headers


async def test_a_request_that_is_refused_has_counted() -> None:
    async with run_limited_gateway(ApiKeyLimits(requests_per_minute=2)) as tenant_gateway:
        refused = await tenant_gateway.ann.ask("POST", "/v1/responses", b"{")
        assert refused.status == 400
        assert rate_limit_headers(refused) == ("2", "1", "30s")


async def test_a_key_has_limits_of_its_own() -> None:
    usual = ApiKeyLimits(requests_per_minute=5, body_bytes=1000)
    async with run_limited_gateway(
        usual, ann=ApiKeyLimits(requests_per_minute=60, body_bytes=100)
    ) as tenant_gateway:
        assert rate_limit_headers(await tenant_gateway.ann.create()) == ("60", "59", "1s")
        assert rate_limit_headers(await tenant_gateway.ben.create()) == ("5", "4", "12s")
        assert (await tenant_gateway.ann.create(input="x" * 100)).error == (413, "request_too_large", None)
        assert (await tenant_gateway.ben.create(input="x" * 100)).status == 200
        assert (await tenant_gateway.ben.create(input="x" * 1000)).error == (413, "request_too_large", None)


async def test_responses_at_once_of_one_key() -> None:
    async with run_limited_gateway(ApiKeyLimits(concurrent=1)) as tenant_gateway:
        runs = tenant_gateway.gateway.runs
        runs.script = lambda response: [text_events(response)[:2]]
        async with tenant_gateway.gateway.session.post(
            tenant_gateway.gateway.url("/v1/responses"),
            json={"model": "small", "input": "hi", "stream": True},
            headers={"authorization": f"Bearer {tenant_gateway.ann.secret}"},
        ) as running:
            runs.script = lambda response: [text_events(response)]
            refused = await tenant_gateway.ann.create()
            assert refused.error == (429, "rate_limit_exceeded", None)
            assert refused.headers["retry-after"] == "1"
            for path in ("input_tokens", "compact"):
                body = {"model": "small", "input": "hi"}
                refused = await tenant_gateway.ann.ask("POST", f"/v1/responses/{path}", body)
                assert refused.error == (429, "rate_limit_exceeded", None)
            assert (await tenant_gateway.ben.create()).status == 200
            runs.runs[0].finish()
            assert b"[DONE]" in await running.read()
        assert (await tenant_gateway.ann.create()).status == 200


def test_all_keys_together() -> None:
    limits = RequestLimiter(ApiKeyLimits(concurrent=2), max_concurrent=3)
    ann, ben = Caller("a", "key_a"), Caller("b", "key_b")
    with limits.concurrency_slot(ann), limits.concurrency_slot(ann), limits.concurrency_slot(ben):
        with pytest.raises(RateLimited, match=r"of this key reached \(2 "), limits.concurrency_slot(ann):
            pass
        with pytest.raises(RateLimited, match=r"of this server reached \(3 "), limits.concurrency_slot(ben):
            pass
    with limits.concurrency_slot(ben), limits.concurrency_slot(ben), limits.concurrency_slot(ann):
        pass


def test_without_keys_only_all_together_counts() -> None:
    limits = RequestLimiter(ApiKeyLimits(concurrent=1), max_concurrent=2)
    with (
        limits.concurrency_slot(Caller()),
        limits.concurrency_slot(Caller()),
        pytest.raises(RateLimited, match="server"),
        limits.concurrency_slot(Caller()),
    ):
        pass


def test_no_key_takes_the_room_of_all_for_large_bodies() -> None:
    limits = RequestLimiter(ApiKeyLimits(body_bytes=100), max_memory_bytes=1000)
    ann, ben = Caller("a", "ann"), Caller("b", "ben")
    with (
        limits.memory_budget(ann) as ann_budget,
        limits.memory_budget(ann) as second_budget,
        limits.memory_budget(ben) as ben_budget,
    ):
        ann_budget.reserve(400)
        with pytest.raises(RateLimited, match="of this key"):
            second_budget.reserve(101)
        second_budget.reserve(100)
        ben_budget.reserve(400)
        with limits.memory_budget(Caller()) as budget:
            budget.reserve(100)
            with pytest.raises(ServiceUnavailable, match="of this server"):
                budget.reserve(1)
    with limits.memory_budget(Caller()) as budget:
        budget.reserve(1000)


def test_one_body_always_has_room() -> None:
    with RequestLimiter(ApiKeyLimits(body_bytes=800), max_memory_bytes=1000).memory_budget(
        Caller("a", "ann")
    ) as room:
        room.reserve(800)
        with pytest.raises(BodyTooLarge):  # however long one waits
            room.reserve(1)


def test_whoever_is_refused_takes_no_place() -> None:
    limits = RequestLimiter(ApiKeyLimits(concurrent=1))
    caller = Caller("a", "key_a")
    with limits.concurrency_slot(caller), pytest.raises(RateLimited), limits.concurrency_slot(caller):
        pass
    for _ in range(3):
        with limits.concurrency_slot(caller):
            pass


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=20),
)
def test_no_more_pass_than_the_rate_allows(rate: int, bursts: list[tuple[float, int]]) -> None:
    clock = FakeClock()
    limits = RequestLimiter(ApiKeyLimits(requests_per_minute=rate), monotonic=clock.monotonic)
    caller, passed = Caller("a", "key_a"), 0
    waits: list[float] = []
    for seconds, requests in bursts:
        clock.advance(seconds)
        for _ in range(requests):
            headers: list[tuple[bytes, bytes]] = []
            try:
                limits.count_request(caller, headers)
            except RateLimited as refused:
                waits.append(refused.retry_after or 0)
            else:
                passed += 1
            assert len(headers) == 3
        assert passed <= rate + clock.monotonic() * rate / 60 + 1e-6
    assert all(0 < wait <= 60 / rate + 1e-6 for wait in waits)
    clock.advance(61)
    for _ in range(rate):  # a minute of silence gives everything back
        limits.count_request(caller, [])
    with pytest.raises(RateLimited):
        limits.count_request(caller, [])


async def test_containers_of_a_tenant(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as tenant_gateway:
        few = await tenant_gateway.add_tenant("few", ApiKeyLimits(containers=1))
        tools = [{"type": "code_interpreter"}]
        answers = [await few.create(tools=tools), await few.create(tools=tools)]
        made = await few.ask("POST", "/v1/containers", {"name": "asked for"})
        refused = await few.ask("POST", "/v1/containers", {"name": "one second_budget"})
        answers += [await few.create(tools=tools), await tenant_gateway.ben.create(tools=tools)]
    statuses = [
        [item["status"] for item in answer.json["output"] if item["type"] == "code_interpreter_call"]
        for answer in answers
    ]
    assert statuses[:2] == [["completed"], ["completed"]]  # an idle one that nobody asked for makes room
    assert (made.status, refused.status) == (200, 429)
    assert refused.json["error"]["code"] == "container_limit_exceeded"
    assert statuses[2][0] == "failed"
    assert statuses[3] == ["completed"]
