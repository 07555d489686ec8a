"""How much a key may ask for, and that nobody pays for another; imports hypothesis and the support."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.gateway.auth import Everybody, KeyHolders
from fumehood.gateway.limits import Limits
from fumehood.interfaces import Caller
from fumehood.protocol.errors import BodyTooLarge, RateLimited, Unavailable
from fumehood.protocol.keys import USUAL, KeyLimits
from fumehood.testing import FakeClock, MemoryStore
from tests.support.gateway import Answer, Served, serving_gateway, text_events
from tests.support.tenants import Party, put_key, two_tenants


@dataclass
class Parties:
    served: Served
    clock: FakeClock
    ann: Party
    ben: Party


@asynccontextmanager
async def parties(
    usual: KeyLimits = USUAL, *, ann: KeyLimits = USUAL, total: int = 512
) -> AsyncGenerator[Parties]:
    store, clock = MemoryStore(), FakeClock()
    secrets = [await put_key(store, None, ann), await put_key(store)]
    limits = Limits(usual, total=total, monotonic=clock.monotonic)
    async with (
        KeyHolders(store, clock, Everybody()) as holders,
        serving_gateway(callers=holders, limits=limits) as served,
    ):
        yield Parties(served, clock, *(Party(served, secret) for secret in secrets))


def told(answer: Answer) -> tuple[str, str, str]:
    """Limit, remaining, reset."""
    names = ("limit", "remaining", "reset")
    found = [answer.headers[f"x-ratelimit-{name}-requests"] for name in names]
    return found[0], found[1], found[2]


async def test_requests_in_a_minute() -> None:
    async with parties(KeyLimits(requests_per_minute=2)) as house:
        assert told(await house.ann.create()) == ("2", "1", "30s")
        assert told(await house.ann.create()) == ("2", "0", "1m0s")
        refused = await house.ann.create()
        assert refused.error == (429, "rate_limit_exceeded", None)
        assert refused.headers["retry-after"] == "30"
        assert told(refused) == ("2", "0", "1m0s")
        assert told(await house.ben.create()) == ("2", "1", "30s")
        house.clock.advance(29.9)
        assert (await house.ann.create()).headers["retry-after"] == "1"
        house.clock.advance(0.2)
        assert told(await house.ann.create()) == ("2", "0", "1m0s")
        assert len(house.served.runs.requests) == 4


async def test_what_asks_no_model_is_not_counted() -> None:
    async with parties(KeyLimits(requests_per_minute=1)) as house:
        for _ in range(3):
            answer = await house.ann.ask("GET", "/v1/models")
            assert answer.status == 200
            assert "x-ratelimit-limit-requests" not in answer.headers


async def test_a_request_that_is_refused_has_counted() -> None:
    async with parties(KeyLimits(requests_per_minute=2)) as house:
        refused = await house.ann.ask("POST", "/v1/responses", b"{")
        assert refused.status == 400
        assert told(refused) == ("2", "1", "30s")


async def test_a_key_has_limits_of_its_own() -> None:
    usual = KeyLimits(requests_per_minute=5, body_bytes=1000)
    async with parties(usual, ann=KeyLimits(requests_per_minute=60, body_bytes=100)) as house:
        assert told(await house.ann.create()) == ("60", "59", "1s")
        assert told(await house.ben.create()) == ("5", "4", "12s")
        assert (await house.ann.create(input="x" * 100)).error == (413, "request_too_large", None)
        assert (await house.ben.create(input="x" * 100)).status == 200
        assert (await house.ben.create(input="x" * 1000)).error == (413, "request_too_large", None)


async def test_responses_at_once_of_one_key() -> None:
    async with parties(KeyLimits(concurrent=1)) as house:
        runs = house.served.runs
        runs.script = lambda response: [text_events(response)[:2]]
        async with house.served.session.post(
            house.served.url("/v1/responses"),
            json={"model": "small", "input": "hi", "stream": True},
            headers={"authorization": f"Bearer {house.ann.secret}"},
        ) as running:
            runs.script = lambda response: [text_events(response)]
            refused = await house.ann.create()
            assert refused.error == (429, "rate_limit_exceeded", None)
            assert refused.headers["retry-after"] == "1"
            for path in ("input_tokens", "compact"):
                body = {"model": "small", "input": "hi"}
                refused = await house.ann.ask("POST", f"/v1/responses/{path}", body)
                assert refused.error == (429, "rate_limit_exceeded", None)
            assert (await house.ben.create()).status == 200
            run = runs.runs[0]
            run.say(*text_events(run.response)[2:])
            assert b"[DONE]" in await running.read()
        assert (await house.ann.create()).status == 200


def test_all_keys_together() -> None:
    limits = Limits(KeyLimits(concurrent=2), total=3)
    ann, ben = Caller("a", "key_a"), Caller("b", "key_b")
    with limits.running(ann), limits.running(ann), limits.running(ben):
        with pytest.raises(RateLimited, match="This key may have 2"):
            limits.running(ann)
        with pytest.raises(RateLimited, match="This server makes 3"):
            limits.running(ben)
    with limits.running(ben), limits.running(ben), limits.running(ann):
        pass


def test_without_keys_only_all_together_counts() -> None:
    limits = Limits(KeyLimits(concurrent=1), total=2)
    with limits.running(Caller()), limits.running(Caller()), pytest.raises(RateLimited, match="server"):
        limits.running(Caller())


def test_no_key_takes_the_room_of_all_for_large_bodies() -> None:
    limits = Limits(KeyLimits(body_bytes=100), body_bytes_total=1000)
    ann, ben = Caller("a", "ann"), Caller("b", "ben")
    with limits.room(ann) as hers, limits.room(ann) as more, limits.room(ben) as his:
        hers.take(400)
        with pytest.raises(RateLimited, match="This key"):
            more.take(101)
        more.take(100)
        his.take(400)
        with limits.room(Caller()) as anybodys:
            anybodys.take(100)
            with pytest.raises(Unavailable, match="This server"):
                anybodys.take(1)
    with limits.room(Caller()) as anybodys:
        anybodys.take(1000)


def test_one_body_always_has_room() -> None:
    with Limits(KeyLimits(body_bytes=800), body_bytes_total=1000).room(Caller("a", "ann")) as room:
        room.take(800)
        with pytest.raises(BodyTooLarge):  # however long one waits
            room.take(1)


def test_whoever_is_refused_takes_no_place() -> None:
    limits = Limits(KeyLimits(concurrent=1))
    caller = Caller("a", "key_a")
    with limits.running(caller), pytest.raises(RateLimited):
        limits.running(caller)
    for _ in range(3):
        with limits.running(caller):
            pass


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=20),
)
def test_no_more_pass_than_the_rate_allows(rate: int, bursts: list[tuple[float, int]]) -> None:
    clock = FakeClock()
    limits = Limits(KeyLimits(requests_per_minute=rate), monotonic=clock.monotonic)
    caller, passed = Caller("a", "key_a"), 0
    waits: list[float] = []
    for seconds, requests in bursts:
        clock.advance(seconds)
        for _ in range(requests):
            headers: list[tuple[bytes, bytes]] = []
            try:
                limits.count(caller, headers)
            except RateLimited as refused:
                waits.append(refused.retry_after or 0)
            else:
                passed += 1
            assert len(headers) == 3
        assert passed <= rate + clock.monotonic() * rate / 60 + 1e-6
    assert all(0 < wait <= 60 / rate + 1e-6 for wait in waits)
    clock.advance(61)
    for _ in range(rate):  # a minute of silence gives everything back
        limits.count(caller, [])
    with pytest.raises(RateLimited):
        limits.count(caller, [])


async def test_containers_of_a_tenant(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as house:
        few = await house.another("few", KeyLimits(containers=1))
        tools = [{"type": "code_interpreter"}]
        answers = [await few.create(tools=tools), await few.create(tools=tools)]
        made = await few.ask("POST", "/v1/containers", {"name": "asked for"})
        refused = await few.ask("POST", "/v1/containers", {"name": "one more"})
        answers += [await few.create(tools=tools), await house.ben.create(tools=tools)]
    statuses = [
        [item["status"] for item in answer.json["output"] if item["type"] == "code_interpreter_call"]
        for answer in answers
    ]
    assert statuses[:2] == [["completed"], ["completed"]]  # an idle one that nobody asked for makes room
    assert (made.status, refused.status) == (200, 429)
    assert refused.json["error"]["code"] == "container_limit_exceeded"
    assert statuses[2][0] == "failed"
    assert statuses[3] == ["completed"]
