"""Authentication by API key, and its error responses."""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.gateway.authentication import (
    KEY_REFRESH_SECONDS,
    AnonymousAuthenticator,
    ApiKeyAuthenticator,
    PermissionDenied,
    authenticate_or_refresh,
)
from fumehood.gateway.request_log import LogValue
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ALL_SCOPES, ApiKeyLimits
from fumehood.protocol.openai.api_errors import NotAuthenticated, ServiceUnavailable
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from tests.support.scripted_gateway import run_gateway
from tests.support.two_tenant_gateway import TenantClient, put_key


class Failing(MemoryStore):
    """A store that cannot be read while it is `down`. `looks`: how often it was asked whether keys have changed."""

    down = False
    looks = 0

    async def get_api_keys_revision(self) -> int:
        self.looks += 1
        if self.down:
            raise ServiceUnavailable("down")
        return await super().get_api_keys_revision()


def bearer(secret: str) -> bytes:
    return f"Bearer {secret}".encode()


async def settle() -> None:
    """Until the looking task has gone back to sleep."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_key_says_who_it_is() -> None:
    store, clock = MemoryStore(), FakeClock()
    limits = ApiKeyLimits(concurrent=3)
    secret = await put_key(store, "ann", limits)
    async with ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders:
        (key,) = await store.list_api_keys()
        assert not holders.allows_anonymous
        for written in (bearer(secret), f"bearer  {secret} ".encode()):
            assert holders.authenticate(written, b"anywhere.example") == Caller("ann", key.id, limits)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer fh-",
        b"Basic Zm9v",
        b"Bearer \xff\xfe",
        b"Bearer fh-" + b"a" * 60_000,
    ],
)
async def test_what_is_no_key(header: bytes | None) -> None:
    store = MemoryStore()
    await put_key(store)
    async with ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders:
        with pytest.raises(NotAuthenticated) as refused:
            holders.authenticate(header, b"localhost")
    assert "aaaa" not in refused.value.message


async def test_the_digest_of_a_key_is_no_key() -> None:
    store = MemoryStore()
    await put_key(store)
    (key,) = await store.list_api_keys()
    async with ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders:
        for guess in (key.digest, key.digest.hex().encode(), key.hint.encode(), key.id.encode()):
            with pytest.raises(NotAuthenticated):
                holders.authenticate(b"Bearer " + guess, b"localhost")


async def test_without_keys_everybody_comes_in_who_calls_it_by_its_name() -> None:
    async with ApiKeyAuthenticator(MemoryStore(), FakeClock(), AnonymousAuthenticator()) as holders:
        assert holders.allows_anonymous
        assert holders.authenticate(b"Bearer whatever", b"localhost") == Caller(scopes=frozenset(ALL_SCOPES))
        with pytest.raises(PermissionDenied):
            holders.authenticate(None, b"evil.example")


async def test_changes_are_seen_within_the_time() -> None:
    store, clock = Failing(), FakeClock()
    async with ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders:
        secret = await put_key(store)
        await settle()
        clock.advance(KEY_REFRESH_SECONDS)
        await settle()
        assert not holders.allows_anonymous
        assert holders.authenticate(bearer(secret), b"").key_id
        (key,) = await store.list_api_keys()
        await store.revoke_api_key(key.id, clock.now())
        clock.advance(KEY_REFRESH_SECONDS)
        await settle()
        with pytest.raises(NotAuthenticated):
            holders.authenticate(bearer(secret), b"")
        assert not holders.allows_anonymous  # the last key is gone, and nobody comes in


async def test_a_damaged_key_neither_opens_the_server_nor_keeps_others_from_being_revoked(
    tmp_path: Path,
) -> None:
    store, clock = await SqliteStore.open(tmp_path / "store.db"), FakeClock()
    await put_key(store)
    (damaged,) = await store.list_api_keys()
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("UPDATE keys SET record = x'7b22ff' WHERE id = ?", (damaged.id,))
    async with ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders:
        assert not holders.allows_anonymous
        secret = await put_key(store)
        assert await holders.refresh()
        assert holders.authenticate(bearer(secret), b"").key_id
        (other,) = await store.list_api_keys()
        await store.revoke_api_key(other.id, clock.now())
        assert await holders.refresh()
        with pytest.raises(NotAuthenticated):
            holders.authenticate(bearer(secret), b"")
    await store.close()


async def test_a_new_key_is_good_at_once_and_strangers_do_not_ask_the_database() -> None:
    store, clock = Failing(), FakeClock()
    await put_key(store)
    async with ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders:
        secret = await put_key(store)
        clock.advance(1.0)
        assert (await authenticate_or_refresh(holders, bearer(secret), b"")).key_id
        looks = store.looks
        for number in range(100):
            with pytest.raises(NotAuthenticated):
                await authenticate_or_refresh(holders, bearer(f"fh-{number}"), b"")
        assert store.looks == looks


async def test_a_store_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = Failing(), FakeClock()
    secret = await put_key(store)
    async with ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as holders:
        await settle()
        store.down = True
        clock.advance(KEY_REFRESH_SECONDS)
        with caplog.at_level(logging.WARNING):
            await settle()
        assert "cannot load the API keys: down" in caplog.text
        assert holders.authenticate(bearer(secret), b"").key_id
        store.down = False
        await store.revoke_api_key(holders.authenticate(bearer(secret), b"").key_id, 1.0)
        clock.advance(KEY_REFRESH_SECONDS)
        await settle()
        assert holders.key_count == 0


async def test_refusals_are_openais_and_hold_no_key() -> None:
    store = MemoryStore()
    secret, scraper = await put_key(store, "ann"), await put_key(store, scopes=["metrics"])
    lines: list[str] = []

    def log(_: int, fields: Mapping[str, LogValue]) -> None:
        lines.append(repr(fields))

    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as holders,
        run_gateway(authenticator=holders, request_log=log) as gateway,
    ):
        for party in (TenantClient(gateway, "fh-wrong"), TenantClient(gateway, secret + "x")):
            answer = await party.create()
            assert answer.error == (401, "invalid_api_key", None)
            assert answer.json["error"]["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert party.secret not in answer.body.decode()
        assert gateway.runs.requests == []
        answer = await TenantClient(gateway, secret).ask(
            "GET", "/v1/models", **{"OpenAI-Organization": "org-x", "OpenAI-Project": "proj_x"}
        )
        assert answer.status == 200
        refused = await TenantClient(gateway, secret).ask("GET", "/metrics")
        figures = await TenantClient(gateway, scraper).ask("GET", "/metrics")
    assert refused.error == (403, "missing_scope", None)
    assert b"fumehood_requests" in figures.body
    for told in (figures.body.decode(), repr(lines)):
        assert secret not in told
        assert "fh-" not in told
    assert (await store.list_api_keys())[0].id in repr(lines)
