"""Which model servers cannot serve, and why: dead ones, wrong URLs, wrong keys."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.models.upstream import upstream_probe
from fumehood.models.upstream_health import UpstreamHealth
from fumehood.testing.fakes.fake_clock import FakeClock
from tests.support.raw_model_server import (
    UPSTREAM_KEY,
    ReceivedRequest,
    Responder,
    disconnect,
    document,
    error,
    open_raw_model_server,
    stream,
)
from tests.support.waiting import wait_until

LISTED = error("200 OK", {"data": [{"id": "a"}]})
NOT_FOUND = error("404 Not Found", {"detail": "Not Found"})


def settings(**options: Any) -> ModelSettings:
    return msgspec.convert({"api_key_env": "KEY", **options}, ModelSettings)


@asynccontextmanager
async def open_health(
    *entries: ModelSettings, clock: FakeClock | None = None
) -> AsyncGenerator[UpstreamHealth]:
    registry = open_model_registry(entries, clock or FakeClock(), {"KEY": UPSTREAM_KEY})
    async with registry.open_health() as health:
        await health.wait_until_checked(30)
        yield health
    await registry.close()


async def find_reason(*answers: Responder, path: str = "/v1", **options: Any) -> str | None:
    """Why the server that answers so is degraded."""
    async with open_raw_model_server(*answers) as server:
        url = server.url.removesuffix("/v1") + path
        async with open_health(settings(base_url=url, **options)) as health:
            degraded = health.find_degraded()
    assert all(url not in upstream.reason for upstream in degraded), "an address"
    assert all(UPSTREAM_KEY not in upstream.reason for upstream in degraded)
    return degraded[0].reason if degraded else None


@pytest.mark.parametrize(
    "answers",
    [
        (LISTED,),
        (error("200 OK", {"object": "list", "data": []}),),
        (NOT_FOUND, error("405 Method Not Allowed", {"detail": "Method Not Allowed"})),
        (error("429 Busy", {}),),
    ],
    ids=["models", "no models", "no list", "busy"],
)
async def test_a_server_that_can_serve_is_not_degraded(answers: tuple[Responder, ...]) -> None:
    assert await find_reason(*answers) is None


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((error("401 No", {"error": {"message": f"bad {UPSTREAM_KEY}"}}),), "api_key_env"),
        ((error("503 Loading", {"error": {"message": "Loading model"}}),), "Loading model"),
        ((document(b"<html>"),), "list of models cannot be decoded"),
        ((document(b"", "302 Found"),), "has moved"),
        ((disconnect(),), "broke"),
        ((NOT_FOUND, NOT_FOUND), "has no /chat/completions endpoint (HTTP 404)"),
    ],
)
async def test_a_server_that_cannot_serve_is_degraded_with_the_reason(
    answers: tuple[Responder, ...], words: str
) -> None:
    reason = await find_reason(*answers)
    assert reason is not None
    assert words in reason
    assert "/v1" not in reason.replace("/v1/models", "")


@pytest.mark.parametrize(
    "answers",
    [
        (NOT_FOUND, NOT_FOUND),
        (document(b"404 page not found", "404 Not Found"), document(b"", "404 Not Found")),
        (error("200 OK", {"error": "Unexpected endpoint or method. (GET /models)"}),) * 2,
    ],
    ids=["JSON", "text", "LM Studio"],
)
async def test_a_url_without_v1_is_told(answers: tuple[Responder, ...]) -> None:
    reason = await find_reason(*answers, path="")
    assert reason is not None
    assert "base_url, which most servers expect to end in /v1" in reason


async def test_a_dead_server_is_degraded() -> None:
    async with open_raw_model_server() as server:
        url = server.url
    async with open_health(settings(base_url=url, match="chat*")) as health:
        (degraded,) = health.find_degraded()
    assert degraded.models == ("chat*",)
    assert degraded.reason == "The server of the model 'chat*' cannot be reached: Connection refused."


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_probe, "PROBE_SECONDS", 0.05)
    assert await find_reason(stream(asyncio.Event())) == (
        "The server of the model '*' did not answer within 0.05 seconds."
    )


async def test_routes_to_one_server_share_a_probe() -> None:
    async def answer(request: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        return await (NOT_FOUND if "authorization" in request.headers else LISTED)(request, writer)

    async with open_raw_model_server(answer, answer, answer) as server:
        entries = [
            settings(match="a", base_url=server.url),
            settings(match="direct", backend="direct", api_key_env=None),
            settings(match="b", base_url=server.url),
            settings(match="c", base_url=server.url, api_key_env=None),
        ]
        async with open_health(*entries) as health:
            degraded = health.find_degraded()
    assert sorted(request.path for request in server.requests) == [
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models",
    ]
    assert [upstream.models for upstream in degraded] == [("a", "b")]


async def test_nobody_waits_for_a_probe_and_results_are_cached(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    goes_on = asyncio.Event()

    async def wait_then_list(request: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        await goes_on.wait()
        return await LISTED(request, writer)

    down = error("503 Down", {})
    async with (
        open_raw_model_server(down, wait_then_list) as server,
        open_health(settings(base_url=server.url), clock=clock) as health,
    ):
        assert len(health.find_degraded()) == len(health.find_degraded()) == 1
        assert len(server.requests) == 1, "a cached result was probed again"
        clock.advance(3)
        assert len(health.find_degraded()) == 1, "it waited"
        await wait_until(lambda: len(server.requests) == 2)
        assert len(health.find_degraded()) == 1
        goes_on.set()
        assert len(await health.wait_until_checked(30)) == 0
        assert len(server.requests) == 2, "two probes at once"
    events = [record.getMessage() for record in caplog.records]
    assert events == ["model_server_degraded", "model_server_recovered"]
    fields: dict[str, str] = vars(caplog.records[0])["fields"]
    assert fields["base_url"] == server.url
    assert fields["models"] == "*"
