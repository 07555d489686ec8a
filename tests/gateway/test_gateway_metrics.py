"""Metrics of the gateway, with and without its sandbox server."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from fumehood.gateway import gateway_metrics
from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.gateway.gateway_metrics import EventLoopLagMonitor, GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway_stats import BucketHistogram
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import RateLimited, ServiceUnavailable
from fumehood.protocol.openai.items import CodeInterpreterCall, CompactionItem, OutputItem
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import ResponseCompleted
from fumehood.protocol.sandbox.sandbox_errors import SandboxServerUnreachable
from fumehood.sandbox_client.local_server_provider import LocalServerProvider, LocalServerSettings
from fumehood.testing import FakeClock, MemoryStore
from tests.support.prometheus_page import MetricsPage
from tests.support.sandbox_runs import has_cgroups
from tests.support.scripted_gateway import ScriptedGateway, number_events, run_gateway, text_events
from tests.support.two_tenant_gateway import TenantClient, put_key
from tests.support.waiting import wait_until
from tests.support.websocket_client import open_socket


async def page(gateway: ScriptedGateway) -> MetricsPage:
    return MetricsPage.parse((await gateway.request("GET", "/metrics")).body.decode())


async def test_everything_that_can_be_counted_is_there_from_the_beginning() -> None:
    """So that a rate sees the first one, too. What has a route or a model for a label cannot be."""
    async with run_gateway() as gateway:
        shown = await page(gateway)
    counters = {name for name, kind in shown.kinds.items() if kind == "counter"}
    without = counters - {name for name, _ in shown.samples}
    assert without == {
        "fumehood_requests_total",
        "fumehood_tool_calls_total",
        "fumehood_model_turns_total",
        "fumehood_model_turn_retries_total",
        "fumehood_model_errors_total",
    }


def test_calls_of_every_hosted_tool_are_counted() -> None:
    """Also of one whose items are plain JSON, as in docs/adding-a-tool.md; not those of others."""
    metrics = GatewayMetrics()
    metrics.hosted_item_types = frozenset(
        {"code_interpreter_call", "shell_call", "shell_call_output", "fumehood:dice_call"}
    )
    items: list[dict[str, object]] = [
        {"type": "fumehood:dice_call", "id": "fh_1", "status": "completed"},
        {"type": "fumehood:dice_call", "id": "fh_2", "status": "failed"},
        {"type": "fumehood:dice_call", "id": "fh_3"},
        {"type": "fumehood:dice_call", "id": "fh_4", "status": 7},
        {"type": "shell_call", "id": "sh_1", "status": "completed", "environment": None},
        {"type": "shell_call_output", "id": "sho_1", "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    output: list[OutputItem] = [msgspec.Raw(msgspec.json.encode(item)) for item in items]
    output.append(CodeInterpreterCall(id="ci_1", container_id="cntr_1", status="completed"))
    metrics.record_response(Response(id="r", created_at=1, model="m", status="completed", output=output))
    family = next(each for each in metrics.collect() if each.name == "fumehood_tool_calls")
    counted = {
        (each.labels["type"], each.labels["status"]): each.value
        for each in family.samples
        if each.name == "fumehood_tool_calls_total"
    }
    assert counted == {
        ("fumehood:dice", "completed"): 2,
        ("fumehood:dice", "failed"): 1,
        ("code_interpreter", "completed"): 1,
    }


async def test_limits_are_counted_by_name() -> None:
    store = MemoryStore()
    ann = await put_key(store, "ann", ApiKeyLimits(concurrent=1))
    ben, scraper = (
        await put_key(store, "ben", ApiKeyLimits(requests_per_minute=1)),
        await put_key(store, scopes=["metrics"]),
    )
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders, limits=RequestLimiter(max_concurrent=1)) as gateway,
    ):
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        waits = asyncio.ensure_future(TenantClient(gateway, ann).create())
        await gateway.runs.started.wait()
        answers = [await TenantClient(gateway, who).create() for who in (ann, ben, ben)]
        assert [answer.status for answer in answers] == [429, 429, 429]
        gateway.runs.runs[0].cancel("enough")
        await waits
        shown = MetricsPage.parse((await TenantClient(gateway, scraper).ask("GET", "/metrics")).body.decode())
    limits = ("key_concurrency", "server_concurrency", "rate", "key_memory", "server_memory")
    assert [shown.value("fumehood_limit_rejections_total", limit=limit) for limit in limits] == [
        1,
        1,
        1,
        0,
        0,
    ]


async def test_large_bodies_beyond_a_limit() -> None:
    limits = RequestLimiter(ApiKeyLimits(body_bytes=100), max_memory_bytes=1000)
    ann, ben, somebody = Caller("a", "ann"), Caller("b", "ben"), Caller()
    with limits.memory_budget(ann) as one, limits.memory_budget(ben) as other:
        one.reserve(400)
        other.reserve(400)
        with limits.memory_budget(ann) as more, pytest.raises(RateLimited):
            more.reserve(200)
        with limits.memory_budget(somebody) as more, pytest.raises(ServiceUnavailable):
            more.reserve(201)
    async with run_gateway(limits=limits) as gateway:
        shown = await page(gateway)
    assert shown.value("fumehood_limit_rejections_total", limit="key_memory") == 1
    assert shown.value("fumehood_limit_rejections_total", limit="server_memory") == 1


async def test_those_who_may_not_ask() -> None:
    store = MemoryStore()
    scraper = await put_key(store, scopes=["metrics"])
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders) as gateway,
    ):
        assert (await gateway.create_response()).status == 401
        assert (await TenantClient(gateway, "fh-wrong").create()).status == 401
        assert (await TenantClient(gateway, "fh-wrong").create()).status == 401
        assert (await TenantClient(gateway, scraper).create()).status == 403
        shown = MetricsPage.parse((await TenantClient(gateway, scraper).ask("GET", "/metrics")).body.decode())
    reasons = ("missing_key", "unknown_key", "scope", "host")
    assert [shown.value("fumehood_auth_rejections_total", reason=reason) for reason in reasons] == [
        1,
        2,
        1,
        0,
    ]
    async with run_gateway() as gateway:
        assert (await gateway.create_response(headers={"host": "evil.example"})).status == 403
        assert (await page(gateway)).value("fumehood_auth_rejections_total", reason="host") == 1


async def test_sockets_that_are_open() -> None:
    async with run_gateway() as gateway:
        async with open_socket(gateway) as one, open_socket(gateway) as other:
            await one.create_and_read()
            await other.create_and_read()
            assert (await page(gateway)).value("fumehood_open_websockets") == 2
        async with asyncio.timeout(30):
            while (await page(gateway)).value("fumehood_open_websockets"):
                await asyncio.sleep(0.01)


async def test_compactions_within_a_response() -> None:
    def compacts(response: Response) -> list[list[ResponseCompleted]]:
        item = CompactionItem(id="cmp_1", encrypted_content="sealed")
        ended = msgspec.structs.replace(response, status="completed", output=[item])
        return [
            [event]
            for event in number_events([ResponseCompleted(response=ended)])
            if isinstance(event, ResponseCompleted)
        ]

    async with run_gateway() as gateway:
        gateway.runs.script = compacts
        await gateway.create_response()
        assert (await page(gateway)).value("fumehood_compactions_total", kind="automatic") == 1


async def test_a_blocked_loop_is_seen() -> None:
    lag = BucketHistogram()
    with EventLoopLagMonitor(lag, interval=0.001):
        while not lag.count:
            await asyncio.sleep(0.001)
        time.sleep(0.25)
        await wait_until(lambda: lag.sum >= 0.2)
    seen = lag.count
    await asyncio.sleep(0.01)
    assert lag.count == seen


async def test_a_disk_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    shown = MetricsPage.parse(
        (await GatewayMetrics(disk_paths={"here": tmp_path, "gone": tmp_path / "gone"}).render()).decode()
    )
    assert shown.value("fumehood_disk_size_bytes", volume="here") > 0
    assert ("fumehood_disk_free_bytes", (("volume", "gone"),)) not in shown.samples


# --- the sandbox server of the gateway's own -----------------------------------------------------------


async def test_its_figures_are_on_the_page_unless_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LocalServerSettings(
        limits="enforced" if has_cgroups() else "best-effort", pool=0, options=("--preload", "")
    )
    async with (
        LocalServerProvider(settings) as local,
        run_gateway(metrics=GatewayMetrics(fetch_sandbox_metrics=local.metrics)) as gateway,
    ):
        shown = await page(gateway)
        assert (
            shown.value("fumehood_local_sandbox_server_up"),
            shown.value("fumehood_sandbox_instances"),
        ) == (1, 0)
        pid = local.server_pid
        assert pid is not None
        monkeypatch.setattr(gateway_metrics, "_SANDBOX_METRICS_TIMEOUT", 0.2)
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(pid, blow)
            shown = await page(gateway)
            assert shown.value("fumehood_local_sandbox_server_up") == 0
            assert "fumehood_sandbox_instances" not in shown.kinds
            assert shown.value("fumehood_requests_total", route="/metrics", status="200") >= 1
        await wait_until(lambda: local.server_pid is None)
        with pytest.raises(SandboxServerUnreachable):
            await local.metrics()
        assert local.server_pid is None, "none is started for its figures"


async def test_without_one_nothing_is_said_of_it() -> None:
    async with run_gateway() as gateway:
        assert not [
            name
            for name, _ in (await page(gateway)).samples
            if name.startswith(("fumehood_sandbox", "fumehood_local_sandbox"))
        ]
