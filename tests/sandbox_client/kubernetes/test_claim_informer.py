"""The copy of the claims stays current: through cuts, old versions, pages and outages."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fumehood.gateway_stats import ClaimStats
from fumehood.sandbox_client.kubernetes import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_informer import ClaimInformer
from fumehood.sandbox_client.kubernetes.claim_objects import SandboxClaim
from fumehood.sandbox_client.kubernetes.credentials import ClusterCredentials, StaticToken
from tests.support.kubernetes.api_server import TOKEN, KubernetesApiServer, run_api_server
from tests.support.kubernetes.object_store import CLAIMS, Object
from tests.support.waiting import wait_until

NAMESPACE = "fumehood"
SELECTOR = "app=mine"


class Watched:
    """An informer, and what it has said is gone."""

    def __init__(self, server: KubernetesApiServer, **settings: Any) -> None:
        credentials = ClusterCredentials(
            server=server.url, namespace=NAMESPACE, token_source=StaticToken(TOKEN)
        )
        self.api = KubernetesApi(credentials)
        self.stats = ClaimStats()
        self.deleted: list[str] = []
        self.informer = ClaimInformer(
            self.api,
            NAMESPACE,
            SELECTOR,
            self.stats,
            lambda claim: self.deleted.append(claim.name),
            **settings,
        )

    @property
    def names(self) -> list[str]:
        return sorted(claim.name for claim in self.informer.claims)

    async def wait_for(self, *names: str) -> None:
        await wait_until(lambda: self.names == sorted(names))


@asynccontextmanager
async def watch(server: KubernetesApiServer, **settings: Any) -> AsyncGenerator[Watched]:
    watched = Watched(server, **settings)
    await watched.informer.start()
    try:
        yield watched
    finally:
        await watched.informer.close()
        await watched.api.close()


@pytest.fixture
async def server() -> AsyncGenerator[KubernetesApiServer]:
    async with run_api_server() as running:
        yield running


def put(server: KubernetesApiServer, name: str, app: str = "mine") -> Object:
    metadata = {
        "name": name,
        "labels": {"app": app},
        "annotations": {"fumehood/sandbox": f"sandbox-{name}"},
    }
    return server.store.create(
        CLAIMS, NAMESPACE, {"metadata": metadata, "spec": {"warmPoolRef": {"name": "pool"}}}
    )


def drop(server: KubernetesApiServer, name: str) -> None:
    server.store.delete(CLAIMS, NAMESPACE, name)


def mark_ready(server: KubernetesApiServer, name: str, address: str = "10.0.0.1") -> None:
    ready = {"type": "Ready", "status": "True", "reason": "DependenciesReady"}
    server.store.set_status(
        CLAIMS, NAMESPACE, name, {"conditions": [ready], "sandbox": {"name": "s", "podIPs": [address]}}
    )


async def test_what_is_there_and_what_comes(server: KubernetesApiServer) -> None:
    put(server, "first")
    put(server, "foreign", app="theirs")
    async with watch(server) as watched:
        assert watched.names == ["first"]
        put(server, "second")
        put(server, "strange", app="theirs")
        await watched.wait_for("first", "second")
        drop(server, "first")
        await watched.wait_for("second")
        assert watched.deleted == ["first"]
        assert watched.informer.find_by_sandbox("sandbox-first") == []
        (found,) = watched.informer.find_by_sandbox("sandbox-second")
        assert found.name == "second"
        assert watched.stats.open_claims == 1
        assert watched.informer.is_connected


async def test_a_claim_that_is_made_anew_under_its_name(server: KubernetesApiServer) -> None:
    first = put(server, "one")
    async with watch(server) as watched:
        server.cut_watches()
        drop(server, "one")
        second = put(server, "one")
        await wait_until(
            lambda: [claim.uid for claim in watched.informer.claims] == [second["metadata"]["uid"]]
        )
        assert watched.deleted == ["one"]
        watched.informer.forget("one", first["metadata"]["uid"])  # said late
        assert watched.names == ["one"]


async def test_whoever_waits_is_told_at_once(server: KubernetesApiServer) -> None:
    put(server, "one")
    put(server, "two")
    async with watch(server) as watched:

        async def wait(name: str) -> SandboxClaim | None:
            return await watched.informer.wait_until(
                name, lambda claim: claim is None or claim.pod_ip is not None, 60
            )

        waiting = [asyncio.ensure_future(wait(name)) for name in ("one", "one", "two")]
        await asyncio.sleep(0)
        waiting.pop(0).cancel()  # one that gives up does not end the wait of another
        mark_ready(server, "one")
        drop(server, "two")
        one, two = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert one is not None
        assert one.pod_ip == "10.0.0.1"
        assert two is None


async def test_an_older_version_does_not_replace_a_newer_one(server: KubernetesApiServer) -> None:
    put(server, "one")
    async with watch(server) as watched:
        old = watched.informer.get("one")
        assert old is not None
        mark_ready(server, "one")
        await wait_until(lambda: (known := watched.informer.get("one")) and known.pod_ip)
        watched.informer.observe(old)
        known = watched.informer.get("one")
        assert known is not None
        assert known.pod_ip == "10.0.0.1"


async def test_a_watch_that_is_cut_resumes(server: KubernetesApiServer) -> None:
    async with watch(server) as watched:
        await wait_until(lambda: server.open_watches == 1)
        for number in range(3):
            server.cut_watches()
            put(server, f"claim-{number}")
            await watched.wait_for(*(f"claim-{earlier}" for earlier in range(number + 1)))
        assert server.count("GET", "watch=true") >= 4
        assert server.count("GET", "limit=") == 1  # nothing was listed again
        assert watched.stats.watch_failures == 3


async def test_a_watch_that_ends_in_the_ordinary_way(server: KubernetesApiServer) -> None:
    async with watch(server, watch_seconds=0.5) as watched:
        await wait_until(lambda: server.count("GET", "watch=true") >= 2)
        put(server, "one")
        await watched.wait_for("one")
        assert server.count("GET", "limit=") == 1
        assert watched.stats.watch_failures == 0


async def test_bookmarks_move_the_version_on(server: KubernetesApiServer) -> None:
    """Changes of others would otherwise make the version too old to resume from."""
    server.faults.bookmark_seconds = 0.02
    async with watch(server) as watched:
        await wait_until(lambda: server.open_watches == 1)
        for number in range(5):
            put(server, f"foreign-{number}", app="theirs")
        latest = server.store.version
        await wait_until(lambda: server.bookmarked_version == latest)
        server.cut_watches()
        await wait_until(lambda: server.count("GET", "watch=true") == 2)
        assert f"resourceVersion={latest}&" in server.requests[-1]
        assert server.count("GET", "limit=") == 1
        assert watched.names == []


@pytest.mark.parametrize("while_watching", [True, False])
async def test_a_version_that_is_too_old_is_listed_again(
    server: KubernetesApiServer, while_watching: bool
) -> None:
    put(server, "stays")
    put(server, "goes")
    async with watch(server) as watched:
        await wait_until(lambda: server.open_watches == 1)
        if not while_watching:
            server.cut_watches()
        drop(server, "goes")
        put(server, "comes")
        server.store.compact()
        await watched.wait_for("stays", "comes")
        assert "goes" in watched.deleted
        assert server.count("GET", "limit=") == 2
        put(server, "later")
        await watched.wait_for("stays", "comes", "later")


async def test_lists_have_pages(server: KubernetesApiServer) -> None:
    server.max_page = 2
    names = [f"claim-{number}" for number in range(5)]
    for name in names:
        put(server, name)
    async with watch(server) as watched:
        assert watched.names == names
        assert server.count("GET", "continue=") == 2


async def test_an_outage_of_the_api_server(server: KubernetesApiServer) -> None:
    put(server, "one")
    async with watch(server) as watched:
        await server.stop()
        await wait_until(lambda: not watched.informer.is_connected)
        assert watched.names == ["one"]  # the copy stays as it was
        drop(server, "one")
        put(server, "two")
        await server.start()
        await watched.wait_for("two")
        assert watched.informer.is_connected


async def test_errors_are_tried_again_ever_more_slowly(
    server: KubernetesApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with watch(server) as watched:
        await wait_until(lambda: server.open_watches == 1)
        server.faults.failing["GET"] = [500, 403]
        server.cut_watches()
        put(server, "one")
        await watched.wait_for("one")
        assert watched.stats.watch_failures == 3
        assert caplog.text.count("Watching sandbox claims fails") == 1  # once for an outage


async def test_a_silent_watch_is_asked_after(server: KubernetesApiServer) -> None:
    """Whoever hears nothing asks for its claim, so that a dead connection costs seconds."""
    put(server, "one")
    async with watch(server) as watched:
        await wait_until(lambda: server.open_watches == 1)
        server.mute_watches()
        mark_ready(server, "one")
        claim = await asyncio.wait_for(
            watched.informer.wait_until(
                "one", lambda claim: claim is not None and claim.pod_ip is not None, 0.05
            ),
            5,
        )
        assert claim is not None
        drop(server, "one")
        assert await watched.informer.wait_until("one", lambda claim: claim is None, 0.05) is None


async def test_claims_that_may_not_be_listed(server: KubernetesApiServer) -> None:
    server.faults.denied.add("list")
    watched = Watched(server)
    with pytest.raises(KubernetesApiError, match="forbidden") as raised:
        await watched.informer.start()
    assert raised.value.status == 403
    await watched.informer.close()
    await watched.api.close()
