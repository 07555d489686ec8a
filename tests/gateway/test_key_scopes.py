"""What keys with few scopes can do: nothing else.

The cases are made from the gateway's own table of routes: a new route without a scope fails here.
"""

import re
from typing import Any, cast

import pytest
from websockets.exceptions import InvalidStatus

from fumehood.gateway.app import Gateway
from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.gateway.openapi import PUBLIC_PATHS
from fumehood.protocol.api_keys import ALL_SCOPES, TENANT_SCOPES, ApiKeyScope
from fumehood.testing import FakeClock, MemoryStore
from tests.support.scripted_gateway import run_gateway
from tests.support.two_tenant_gateway import TenantClient, put_key
from tests.support.websocket_client import open_socket

_nothing = cast("Any", None)
ROUTES = Gateway(
    runs=_nothing, store=_nothing, models=_nothing, passthrough=_nothing, containers=_nothing, files=_nothing
).scopes
PASSED_THROUGH = ("/v1/chat/completions", "/v1/embeddings")  # who may ask a model may ask it there, too
MISSING = (403, "missing_scope", None)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_has_a_scope_or_is_public(method: str, path: str) -> None:
    scope = ROUTES[method, path]
    assert (scope is None) == (path in PUBLIC_PATHS)
    if scope is not None:
        assert scope in ALL_SCOPES
        named = "responses" if path in PASSED_THROUGH else path.removeprefix("/v1")[1:].partition("/")[0]
        assert scope == named, "a scope is named after its routes"


@pytest.mark.parametrize(("method", "path"), [route for route, scope in ROUTES.items() if scope is not None])
async def test_a_key_without_the_scope_of_a_route_is_refused(method: str, path: str) -> None:
    scope = cast("ApiKeyScope", ROUTES[method, path])
    store = MemoryStore()
    others = await put_key(store, "ann", scopes=set(ALL_SCOPES) - {scope})
    only = await put_key(store, "ann", scopes=[scope])
    place = re.sub(r"\{.*?\}", "none", path)
    body = None if method != "POST" else {"model": "scripted", "input": "hi"}
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders) as gateway,
    ):
        refused = await TenantClient(gateway, others).ask(method, place, body)
        assert refused.error == MISSING
        assert refused.json["error"]["type"] == "invalid_request_error"
        assert f"Missing scopes: {scope}." in refused.json["error"]["message"]
        assert gateway.runs.requests == []
        answer = await TenantClient(gateway, only).ask(method, place, body)
        assert answer.status not in (401, 403)


async def test_a_metrics_key_reads_metrics_and_runs_no_code() -> None:
    store = MemoryStore()
    scraper = await put_key(store, scopes=["metrics"])
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders) as gateway,
    ):
        client = TenantClient(gateway, scraper)
        assert (await client.ask("GET", "/metrics")).status == 200
        for (method, path), scope in ROUTES.items():
            if scope in TENANT_SCOPES:
                answer = await client.ask(method, re.sub(r"\{.*?\}", "none", path), {})
                assert answer.error == MISSING, (method, path)
        with pytest.raises(InvalidStatus) as rejection:
            async with open_socket(gateway, additional_headers=client.headers):
                pass
        assert rejection.value.response.status_code == 403
        assert b"missing_scope" in (rejection.value.response.body or b"")
        assert gateway.runs.requests == []


async def test_a_key_for_which_no_scopes_were_named_is_for_everything_but_metrics() -> None:
    store = MemoryStore()
    secret = await put_key(store)
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders) as gateway,
    ):
        client = TenantClient(gateway, secret)
        assert (await client.create()).status == 200
        for path in ("/v1/models", "/v1/containers", "/v1/files"):
            assert (await client.ask("GET", path)).status == 200
        assert (await client.ask("GET", "/metrics")).error == MISSING
        async with open_socket(gateway, additional_headers=client.headers):
            pass


async def test_where_no_keys_are_needed_everything_is_allowed() -> None:
    async with run_gateway() as gateway:
        assert (await gateway.request("GET", "/metrics")).status == 200
        assert (await gateway.create_response()).status == 200
