"""What the gateway counts, and shows where its sandbox server does not answer; imports the gateway's support."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from fumehood.figures import Distribution
from fumehood.gateway import metrics
from fumehood.gateway.auth import Everybody, KeyHolders
from fumehood.gateway.lag import LoopLag
from fumehood.gateway.limits import Limits
from fumehood.gateway.metrics import Metrics
from fumehood.interfaces import Caller
from fumehood.protocol.errors import RateLimited, Unavailable
from fumehood.protocol.events import Completed
from fumehood.protocol.items import Compaction
from fumehood.protocol.keys import KeyLimits
from fumehood.protocol.responses import Response
from fumehood.protocol.sandbox_errors import Unreachable
from fumehood.sandbox.local import LocalSandboxes, LocalSettings
from fumehood.testing import FakeClock, MemoryStore
from tests.support.exported import Exported
from tests.support.gateway import Served, numbered, serving_gateway, text_events
from tests.support.sandboxes import has_cgroups
from tests.support.tenants import Party, put_key
from tests.support.websocket import opened


async def page(served: Served) -> Exported:
    return Exported.of((await served.ask("GET", "/metrics")).body.decode())


async def test_everything_that_can_be_counted_is_there_from_the_beginning() -> None:
    """So that a rate sees the first one, too. What has a route or a model for a label cannot be."""
    async with serving_gateway() as served:
        shown = await page(served)
    counters = {name for name, kind in shown.kinds.items() if kind == "counter"}
    without = counters - {name for name, _ in shown.samples}
    assert without == {
        "fumehood_requests_total",
        "fumehood_tool_calls_total",
        "fumehood_turns_total",
        "fumehood_turn_retries_total",
        "fumehood_model_errors_total",
    }


async def test_limits_are_counted_by_name() -> None:
    store = MemoryStore()
    ann = await put_key(store, "ann", KeyLimits(concurrent=1))
    ben, scraper = (
        await put_key(store, "ben", KeyLimits(requests_per_minute=1)),
        await put_key(store, scopes=["metrics"]),
    )
    async with (
        KeyHolders(store, FakeClock(), Everybody()) as holders,
        serving_gateway(callers=holders, limits=Limits(total=1)) as served,
    ):
        served.runs.script = lambda response: [text_events(response)[:2]]
        waits = asyncio.ensure_future(Party(served, ann).create())
        await served.runs.started.wait()
        answers = [await Party(served, who).create() for who in (ann, ben, ben)]
        assert [answer.status for answer in answers] == [429, 429, 429]
        served.runs.runs[0].cancel("enough")
        await waits
        shown = Exported.of((await Party(served, scraper).ask("GET", "/metrics")).body.decode())
    limits = ("key", "total", "rate", "key_bytes", "total_bytes")
    assert [shown.value("fumehood_limited_total", limit=limit) for limit in limits] == [1, 1, 1, 0, 0]


async def test_large_bodies_beyond_a_limit() -> None:
    limits = Limits(KeyLimits(body_bytes=100), body_bytes_total=1000)
    ann, ben, somebody = Caller("a", "ann"), Caller("b", "ben"), Caller()
    with limits.room(ann) as one, limits.room(ben) as other:
        one.take(400)
        other.take(400)
        with limits.room(ann) as more, pytest.raises(RateLimited):
            more.take(200)
        with limits.room(somebody) as more, pytest.raises(Unavailable):
            more.take(201)
    async with serving_gateway(limits=limits) as served:
        shown = await page(served)
    assert shown.value("fumehood_limited_total", limit="key_bytes") == 1
    assert shown.value("fumehood_limited_total", limit="total_bytes") == 1


async def test_those_who_may_not_ask() -> None:
    store = MemoryStore()
    scraper = await put_key(store, scopes=["metrics"])
    async with (
        KeyHolders(store, FakeClock(), Everybody()) as holders,
        serving_gateway(callers=holders) as served,
    ):
        assert (await served.create()).status == 401
        assert (await Party(served, "fh-wrong").create()).status == 401
        assert (await Party(served, "fh-wrong").create()).status == 401
        assert (await Party(served, scraper).create()).status == 403
        shown = Exported.of((await Party(served, scraper).ask("GET", "/metrics")).body.decode())
    reasons = ("no_key", "wrong_key", "scope", "host")
    assert [shown.value("fumehood_not_allowed_total", reason=reason) for reason in reasons] == [1, 2, 1, 0]
    async with serving_gateway() as served:
        assert (await served.create(headers={"host": "evil.example"})).status == 403
        assert (await page(served)).value("fumehood_not_allowed_total", reason="host") == 1


async def test_sockets_that_are_open() -> None:
    async with serving_gateway() as served:
        async with opened(served) as one, opened(served) as other:
            await one.turn()
            await other.turn()
            assert (await page(served)).value("fumehood_websockets") == 2
        async with asyncio.timeout(30):
            while (await page(served)).value("fumehood_websockets"):
                await asyncio.sleep(0.01)


async def test_compactions_within_a_response() -> None:
    def compacts(response: Response) -> list[list[Completed]]:
        item = Compaction(id="cmp_1", encrypted_content="sealed")
        ended = msgspec.structs.replace(response, status="completed", output=[item])
        return [[event] for event in numbered([Completed(response=ended)]) if isinstance(event, Completed)]

    async with serving_gateway() as served:
        served.runs.script = compacts
        await served.create()
        assert (await page(served)).value("fumehood_compactions_total", kind="automatic") == 1


async def test_a_blocked_loop_is_seen() -> None:
    lag = Distribution()
    with LoopLag(lag, every=0.001):
        while not lag.number:
            await asyncio.sleep(0.001)
        time.sleep(0.25)
        async with asyncio.timeout(30):
            while lag.total < 0.2:
                await asyncio.sleep(0.001)
    seen = lag.number
    await asyncio.sleep(0.01)
    assert lag.number == seen


async def test_a_disk_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    shown = Exported.of((await Metrics(disks={"here": tmp_path, "gone": tmp_path / "gone"}).page()).decode())
    assert shown.value("fumehood_disk_size_bytes", place="here") > 0
    assert ("fumehood_disk_free_bytes", (("place", "gone"),)) not in shown.samples


# --- the sandbox server of the gateway's own -----------------------------------------------------------


async def test_its_figures_are_on_the_page_unless_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LocalSettings(
        limits="enforced" if has_cgroups() else "best-effort", pool=0, options=("--preload", "")
    )
    async with (
        LocalSandboxes(settings) as local,
        serving_gateway(metrics=Metrics(sandboxes=local.metrics)) as served,
    ):
        shown = await page(served)
        assert (shown.value("fumehood_sandboxd_up"), shown.value("fumehood_sandbox_live")) == (1, 0)
        pid = local.pid
        assert pid is not None
        monkeypatch.setattr(metrics, "_SANDBOXES_SECONDS", 0.2)
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(pid, blow)
            shown = await page(served)
            assert shown.value("fumehood_sandboxd_up") == 0
            assert "fumehood_sandbox_live" not in shown.kinds
            assert shown.value("fumehood_requests_total", route="/metrics", status="200") >= 1
        async with asyncio.timeout(30):
            while local.pid is not None:
                await asyncio.sleep(0.01)
        with pytest.raises(Unreachable):
            await local.metrics()
        assert local.pid is None, "none is started for its figures"


async def test_without_one_nothing_is_said_of_it() -> None:
    async with serving_gateway() as served:
        assert not [name for name, _ in (await page(served)).samples if "sandbox" in name]
