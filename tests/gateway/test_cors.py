"""CORS: which web pages may use the gateway."""

import pytest

from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.gateway.cors import CorsPolicy
from fumehood.testing import FakeClock, MemoryStore
from tests.support.scripted_gateway import HttpResponse, run_gateway
from tests.support.two_tenant_gateway import TenantClient, put_key

PAGE = "https://app.example"
QUESTION = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type,x-stainless-lang",
}


def told(answer: HttpResponse) -> dict[str, str]:
    kept = ("access-control-", "vary")
    return {name: value for name, value in answer.headers.items() if name.startswith(kept)}


async def test_nothing_is_told_unless_origins_were_named() -> None:
    async with run_gateway() as gateway:
        answer = await gateway.request("GET", "/v1/models", headers={"origin": PAGE})
        question = await gateway.request("OPTIONS", "/v1/responses", headers=QUESTION)
    assert told(answer) == {}
    assert question.error[:2] == (405, "method_not_allowed")
    assert told(question) == {}


async def test_a_browser_asks_without_a_key() -> None:
    store = MemoryStore()
    secret = await put_key(store)
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders, cors=CorsPolicy((PAGE,))) as gateway,
    ):
        question = await gateway.request("OPTIONS", "/v1/responses", headers=QUESTION)
        assert question.status == 204
        assert told(question)["access-control-allow-origin"] == PAGE
        assert told(question)["access-control-allow-methods"] == "GET, HEAD, POST"
        assert told(question)["access-control-allow-headers"] == QUESTION["access-control-request-headers"]
        assert told(question)["vary"] == "origin"
        assert "access-control-allow-credentials" not in question.headers
        refused = await gateway.request("GET", "/v1/models", headers={"origin": PAGE})
        assert refused.status == 401  # and the page can read why
        assert told(refused)["access-control-allow-origin"] == PAGE
        answer = await TenantClient(gateway, secret).ask("GET", "/v1/models", origin=PAGE)
        assert answer.status == 200
        assert "x-request-id" in told(answer)["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "https://app.example.evil.example", "http://app.example", ""]
)
async def test_other_pages_are_told_nothing(origin: str) -> None:
    async with run_gateway(cors=CorsPolicy((PAGE,))) as gateway:
        question = await gateway.request("OPTIONS", "/v1/responses", headers={**QUESTION, "origin": origin})
        answer = await gateway.request("GET", "/v1/models", headers={"origin": origin})
    assert told(question) == {"vary": "origin"}
    assert told(answer) == {"vary": "origin"}


async def test_every_page() -> None:
    async with run_gateway(cors=CorsPolicy(("*",))) as gateway:
        question = await gateway.request("OPTIONS", "/v1/nowhere", headers=QUESTION)
        answer = await gateway.create_response(headers={"origin": PAGE}, stream=True)
    assert told(question)["access-control-allow-origin"] == "*"
    assert told(question)["access-control-allow-methods"] == ""
    assert told(answer)["access-control-allow-origin"] == "*"
    assert "vary" not in told(answer)


async def test_what_is_no_question_is_answered_as_ever() -> None:
    async with run_gateway(cors=CorsPolicy((PAGE,))) as gateway:
        plain = await gateway.request("OPTIONS", "/v1/responses", headers={"origin": PAGE})
        strange = await gateway.request(
            "OPTIONS", "/v1/responses", headers={**QUESTION, "access-control-request-headers": "a b;c"}
        )
    assert plain.status == 405
    assert strange.status == 204
    assert "access-control-allow-headers" not in told(strange)


def test_who_may_open_a_socket() -> None:
    assert CorsPolicy().allows(None)
    assert not CorsPolicy().allows(PAGE.encode())
    assert CorsPolicy((PAGE,)).allows(PAGE.encode())
    assert not CorsPolicy((PAGE,)).allows(b"https://evil.example")
    assert CorsPolicy(("*",)).allows(b"https://evil.example")


async def test_a_form_of_another_page_is_refused() -> None:
    """A browser sends one without asking first, and without a key it would be everybody's."""
    async with run_gateway(cors=CorsPolicy((PAGE,))) as gateway:
        for origin in ("https://evil.example", "null", ""):
            refused = await gateway.upload("a.txt", b"x", headers={"origin": origin})
            assert refused.error[:2] == (403, "forbidden")
        assert (await gateway.request("GET", "/v1/files")).json["data"] == []
        for origin in (PAGE, gateway.base):
            assert (await gateway.upload("a.txt", b"x", headers={"origin": origin})).status == 200


async def test_an_empty_post_of_another_page_is_refused() -> None:
    """A browser sends one without asking first."""
    form = {"content-type": "text/plain"}
    async with run_gateway(cors=CorsPolicy((PAGE,))) as gateway:
        for path in ("/v1/responses/resp_1/cancel", "/v1/responses/compact", "/v1/containers"):
            refused = await gateway.request("POST", path, headers={"origin": "https://evil.example", **form})
            assert refused.error[:2] == (403, "forbidden"), path
        for headers in ({"origin": PAGE}, {"origin": gateway.base}, {}):
            answer = await gateway.request("POST", "/v1/responses/resp_1/cancel", headers={**headers, **form})
            assert answer.status == 404
