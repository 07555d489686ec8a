"""Claims: one for each sandbox, with an end of its own, and none that is left behind."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from fumehood.gateway_stats import ClaimStats
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    SandboxConflict,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_objects import SandboxClaim, parse_time
from fumehood.sandbox_client.kubernetes.sandbox_claims import ClaimSettings, SandboxClaims
from tests.support.kubernetes.cluster import NAMESPACE, POOL, TIER_POOLS, Cluster, run_cluster
from tests.support.kubernetes.object_store import CLAIMS, POOLS, SANDBOXES, TEMPLATES, ApiFailure
from tests.support.kubernetes.pods import run_idle_pods
from tests.support.waiting import wait_until

SPEC = SandboxSpec()


@asynccontextmanager
async def open_claims(
    cluster: Cluster, replica: str = "replica-1", **settings: Any
) -> AsyncGenerator[SandboxClaims]:
    api = cluster.connect()
    chosen: dict[str, Any] = {
        "namespace": NAMESPACE,
        "pools": TIER_POOLS,
        "gateway": "gateway-1",
        "replica": replica,
    }
    claims = SandboxClaims(api, ClaimSettings(**chosen | settings), ClaimStats(), lambda _: None)
    await claims.start()
    try:
        yield claims
    finally:
        await claims.close()
        await api.close()


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with run_cluster(run_idle_pods()) as running:
        yield running


@pytest.fixture
async def claims(cluster: Cluster) -> AsyncGenerator[SandboxClaims]:
    await wait_until(lambda: cluster.controller.count_warm(POOL) == 2)
    async with open_claims(cluster) as opened:
        yield opened


async def test_what_a_claim_says(cluster: Cluster, claims: SandboxClaims) -> None:
    before = time.time()
    ready, is_new = await claims.claim("cntr_1-1", SPEC)
    (found,) = cluster.claims
    assert (ready.uid, is_new) == (found["metadata"]["uid"], True)
    assert uuid.UUID(ready.name).version == 5
    assert found["spec"]["warmPoolRef"] == {"name": POOL}
    assert found["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "fumehood",
        "fumehood/gateway": "gateway-1",
        "fumehood/replica": "replica-1",
        "fumehood/memory": "1g",
    }
    assert found["metadata"]["annotations"] == {"fumehood/sandbox": "cntr_1-1"}
    lifecycle = found["spec"]["lifecycle"]
    assert lifecycle["shutdownPolicy"] == "Delete"
    assert abs(parse_time(lifecycle["shutdownTime"]) - before - 3600 - 600) < 3
    assert "env" not in found["spec"]  # it would start the pod anew
    assert ready.pod_ip is not None
    assert ready.is_warm


async def test_an_empty_pool_is_a_cold_start(cluster: Cluster, claims: SandboxClaims) -> None:
    ready, _ = await claims.claim("large", SandboxSpec(memory="4g"))
    assert not ready.is_warm
    assert claims.stats.ready_seconds["cold"].count == 1
    await claims.claim("small", SPEC)
    assert claims.stats.ready_seconds["warm"].count == 1
    assert claims.stats.open_claims == 2


async def test_a_tier_without_a_pool(cluster: Cluster, claims: SandboxClaims) -> None:
    with pytest.raises(InvalidSandboxRequest, match=r"no sandboxes with 16g .* only with 1g, 4g") as raised:
        await claims.claim("huge", SandboxSpec(memory="16g"))
    assert raised.value.param == "memory"
    assert cluster.claims == []


async def test_the_same_sandbox_again(cluster: Cluster, claims: SandboxClaims) -> None:
    first, _ = await claims.claim("cntr_1-1", SPEC)
    again, is_new = await claims.claim("cntr_1-1", SPEC)
    assert (again.uid, is_new) == (first.uid, False)
    with pytest.raises(SandboxConflict):
        await claims.claim("cntr_1-1", SandboxSpec(memory="4g"))
    assert len(cluster.claims) == 1


async def test_two_replicas_make_one_claim_together(cluster: Cluster, claims: SandboxClaims) -> None:
    cluster.controller.behaviour.warm_seconds = 0.1
    async with open_claims(cluster, "replica-2") as others:
        results = await asyncio.gather(*(made.claim("cntr_1-1", SPEC) for made in (claims, others)))
    assert len({claim.uid for claim, _ in results}) == 1
    assert sorted(is_new for _, is_new in results) == [False, True]
    assert len(cluster.claims) == 1


async def test_another_process_finds_the_claim(cluster: Cluster, claims: SandboxClaims) -> None:
    made, _ = await claims.claim("cntr_1-1", SPEC)
    async with open_claims(cluster, "replica-2") as others:
        found = others.find("cntr_1-1")
        assert found is not None
        assert found.uid == made.uid


async def test_another_gateway_does_not_see_the_claim(cluster: Cluster, claims: SandboxClaims) -> None:
    made, _ = await claims.claim("cntr_1-1", SPEC)
    async with open_claims(cluster, gateway="gateway-2") as others:
        assert others.list_open() == []
        other, is_new = await others.claim("cntr_1-1", SPEC)
        assert is_new
        assert other.uid != made.uid


async def test_a_name_is_not_used_again(cluster: Cluster, claims: SandboxClaims) -> None:
    """The controller names a cold Sandbox after its claim: the next claim would wait for the end of the old one."""
    first, _ = await claims.claim("cntr_1-1", SPEC)
    await claims.release(first)
    second, is_new = await claims.claim("cntr_1-1", SPEC)
    assert is_new
    assert second.name != first.name
    found = claims.find("cntr_1-1")
    assert found is not None
    assert found.uid == second.uid


async def test_a_claim_that_is_being_deleted_is_not_adopted(cluster: Cluster, claims: SandboxClaims) -> None:
    first, _ = await claims.claim("cntr_1-1", SPEC)
    cluster.api.store.update(
        CLAIMS,
        NAMESPACE,
        first.name,
        lambda known: {**known, "metadata": {**known["metadata"], "finalizers": ["test/wait"]}},
    )
    cluster.api.store.delete(CLAIMS, NAMESPACE, first.name)
    async with open_claims(cluster, "replica-2") as others:
        second, _ = await others.claim("cntr_1-1", SPEC)
    assert second.uid != first.uid
    cluster.api.store.finish_deletion(CLAIMS, NAMESPACE, first.name)


async def test_a_caller_that_gives_up_leaves_no_claim(cluster: Cluster, claims: SandboxClaims) -> None:
    cluster.controller.behaviour.is_paused = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await claims.claim("cntr_1-1", SPEC)
    await wait_until(lambda: not cluster.claims)
    assert claims.stats.failures["timeout"] == 1
    assert claims.stats.in_flight == 0
    cluster.controller.behaviour.is_paused = False


async def test_a_caller_that_gives_up_while_the_claim_is_made(
    cluster: Cluster, claims: SandboxClaims
) -> None:
    cluster.api.faults.delay["POST"] = 0.2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await claims.claim("cntr_1-1", SPEC)
    await wait_until(lambda: cluster.api.count("DELETE") == 1 and not cluster.claims)


@pytest.mark.parametrize("is_used", [False, True], ids=["derived name", "random name"])
async def test_a_claim_whose_response_was_lost_goes_with_its_caller(
    cluster: Cluster, claims: SandboxClaims, monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    if is_used:
        await claims.release((await claims.claim("cntr_1-1", SPEC))[0])
    cluster.controller.behaviour.is_paused = True
    post, lost = SandboxClaims._post, list[SandboxClaim]()  # pyright: ignore[reportPrivateUsage]

    async def lose_first_response(self: SandboxClaims, claim: SandboxClaim) -> SandboxClaim:
        created = await post(self, claim)
        if not lost:
            lost.append(created)
            raise KubernetesApiError(504, "Timeout", "the response was lost")
        return created

    monkeypatch.setattr(SandboxClaims, "_post", lose_first_response)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await claims.claim("cntr_1-1", SPEC)
    await wait_until(lambda: not cluster.claims)
    assert len(lost) == 1
    cluster.controller.behaviour.is_paused = False


async def test_an_exhausted_pool(cluster: Cluster, claims: SandboxClaims) -> None:
    """Specification 003, US3-3: no pod becomes available in time."""
    cluster.controller.behaviour.max_pods = 2
    first, _ = await claims.claim("one", SPEC)
    await claims.claim("two", SPEC)
    waiting = asyncio.ensure_future(claims.claim("three", SPEC))
    await wait_until(lambda: len(cluster.claims) == 3)
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await claims.release(first)  # its pod ends, and there is room for another
    ready, _ = await waiting
    assert not ready.is_warm


async def test_claims_in_flight_are_bounded(cluster: Cluster) -> None:
    cluster.controller.behaviour.is_paused = True
    async with open_claims(cluster, in_flight=3) as claims:
        asked = [asyncio.ensure_future(claims.claim(f"cntr-{number}", SPEC)) for number in range(8)]
        await wait_until(lambda: len(cluster.claims) == 3)
        done, _ = await asyncio.wait(asked, timeout=0.1)
        assert (len(done), len(cluster.claims), claims.stats.in_flight) == (0, 3, 3)
        cluster.controller.behaviour.is_paused = False
        assert len({claim.uid for claim, _ in await asyncio.gather(*asked)}) == 8


async def test_a_hundred_claims_at_once(cluster: Cluster) -> None:
    async with open_claims(cluster, in_flight=100) as claims:
        made = await asyncio.gather(*(claims.claim(f"cntr-{number}", SPEC) for number in range(100)))
        assert len({claim.pod_ip for claim, _ in made}) == 100
        assert cluster.api.count("GET", "watch=true") == 1  # one watch serves all of them
        assert cluster.api.count("GET", "sandboxclaims/") == 0
        await asyncio.gather(*(claims.release(claim) for claim, _ in made))
        assert cluster.claims == []


# ---- what the controller and the API server refuse -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("plural", "name", "reason"),
    [(POOLS, POOL, "WarmPoolNotFound"), (TEMPLATES, POOL, "TemplateNotFound")],
)
async def test_a_pool_that_is_gone(
    cluster: Cluster, claims: SandboxClaims, plural: str, name: str, reason: str
) -> None:
    cluster.api.store.delete(plural, NAMESPACE, name)
    with pytest.raises(SandboxServerUnreachable, match=f"warm pool {POOL} cannot provide .*{reason}"):
        await claims.claim("cntr_1-1", SPEC)
    await wait_until(lambda: not cluster.claims)


async def test_a_pod_that_fails_at_its_start(cluster: Cluster, claims: SandboxClaims) -> None:
    cluster.controller.behaviour.is_paused = True
    waiting = asyncio.ensure_future(claims.claim("cntr_1-1", SPEC))
    await wait_until(lambda: cluster.claims)
    failed = {"type": "Ready", "status": "False", "reason": "PodFailed", "message": "Pod failed"}
    name = cluster.claims[0]["metadata"]["name"]
    cluster.api.store.set_status(CLAIMS, NAMESPACE, name, {"conditions": [failed]})
    with pytest.raises(SandboxStartFailed, match="PodFailed"):
        await waiting
    await wait_until(lambda: not cluster.claims)
    cluster.controller.behaviour.is_paused = False


async def test_a_claim_that_somebody_else_deletes(cluster: Cluster, claims: SandboxClaims) -> None:
    cluster.controller.behaviour.is_paused = True
    waiting = asyncio.ensure_future(claims.claim("cntr_1-1", SPEC))
    await wait_until(lambda: cluster.claims)
    cluster.api.store.delete(CLAIMS, NAMESPACE, cluster.claims[0]["metadata"]["name"])
    with pytest.raises(SandboxStartFailed, match="was deleted before it had a pod"):
        await waiting
    cluster.controller.behaviour.is_paused = False


async def test_missing_permissions(
    cluster: Cluster, claims: SandboxClaims, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.api.faults.denied.add("create")
    with pytest.raises(SandboxServerUnreachable, match="the Kubernetes API refuses it"):
        await claims.claim("cntr_1-1", SPEC)
    assert "fumehood doctor --config" in caplog.text


async def test_a_quota_on_claims(
    cluster: Cluster, claims: SandboxClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ApiFailure(403, "Forbidden", 'sandboxclaims "x" is forbidden: exceeded quota: sandboxes')

    monkeypatch.setattr(cluster.api.store, "create", refuse)
    with pytest.raises(SandboxServerAtCapacity, match="quota"):
        await claims.claim("cntr_1-1", SPEC)
    monkeypatch.undo()


async def test_errors_of_the_api_server_are_tried_again(cluster: Cluster, claims: SandboxClaims) -> None:
    cluster.api.faults.failing["POST"] = [500, 429, 503]
    _, is_new = await claims.claim("cntr_1-1", SPEC)
    assert is_new
    assert len(cluster.claims) == 1


async def test_an_outage_of_the_api_server_is_waited_for(cluster: Cluster, claims: SandboxClaims) -> None:
    await cluster.api.stop()
    waiting = asyncio.ensure_future(claims.claim("cntr_1-1", SPEC))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await cluster.api.start()
    claim, _ = await waiting
    assert claim.pod_ip is not None


# ---- the end --------------------------------------------------------------------------------------------------------


async def test_the_pod_ends_with_the_claim(cluster: Cluster, claims: SandboxClaims) -> None:
    claim, _ = await claims.claim("cntr_1-1", SPEC)
    await claims.release(claim)
    assert cluster.claims == []
    sandboxes = [found["metadata"]["name"] for found in cluster.api.store.list_objects(SANDBOXES, NAMESPACE)]
    assert claim.status.sandbox.name not in sandboxes
    await wait_until(lambda: cluster.controller.count_warm(POOL) == 2)


async def test_a_deletion_is_tried_again(cluster: Cluster, claims: SandboxClaims) -> None:
    claim, _ = await claims.claim("cntr_1-1", SPEC)
    cluster.api.faults.failing["DELETE"] = [500, 503]
    await claims.release(claim)
    assert cluster.claims == []
    assert cluster.api.count("DELETE") == 3


async def test_a_deletion_survives_its_caller_and_an_outage(cluster: Cluster, claims: SandboxClaims) -> None:
    claim, _ = await claims.claim("cntr_1-1", SPEC)
    await cluster.api.stop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.shield(claims.release(claim))
    assert claims.find("cntr_1-1") is None
    await cluster.api.start()
    await wait_until(lambda: not cluster.claims)


async def test_a_deletion_has_an_end(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async with open_claims(cluster, delete_seconds=0.2) as claims:
        claim, _ = await claims.claim("cntr_1-1", SPEC)
        cluster.api.faults.failing["DELETE"] = [500] * 100
        await claims.release(claim)
        assert "is left to its shutdown time" in caplog.text
        assert claims.stats.failures["delete"] == 1
        found = claims.find("cntr_1-1")  # a sweep can try again
        assert found is not None


async def test_only_this_claim_is_deleted(cluster: Cluster, claims: SandboxClaims) -> None:
    """A claim of the same name that somebody has made meanwhile stays."""
    claim, _ = await claims.claim("cntr_1-1", SPEC)
    body = {"metadata": {"name": claim.name}, "spec": {"warmPoolRef": {"name": POOL}}}
    cluster.api.store.delete(CLAIMS, NAMESPACE, claim.name)
    cluster.api.store.create(CLAIMS, NAMESPACE, body)
    await claims.release(claim)
    assert [found["metadata"]["name"] for found in cluster.claims] == [claim.name]


async def test_a_claim_that_nobody_extends_ends(cluster: Cluster) -> None:
    async with open_claims(cluster, lifetime=1.0, slack=0.0) as claims:
        await claims.claim("cntr_1-1", SPEC)
        await wait_until(lambda: not cluster.claims)
        await wait_until(lambda: claims.find("cntr_1-1") is None)


async def test_a_claim_is_extended_with_its_container(cluster: Cluster, claims: SandboxClaims) -> None:
    def shutdown_at() -> float:
        return parse_time(cluster.claims[0]["spec"]["lifecycle"]["shutdownTime"])

    claim, _ = await claims.claim("cntr_1-1", SPEC)
    before = shutdown_at()
    await claims.extend(claim, time.time() + 3600)
    assert shutdown_at() == before  # most of the slack is left
    until = time.time() + 7200
    await claims.extend(claim, until)
    assert abs(shutdown_at() - until - 600) < 2
    known = claims.find("cntr_1-1")
    assert known is not None
    await claims.extend(known, until + 60)
    assert cluster.api.count("PATCH") == 1
    assert known.pod_ip == claim.pod_ip


async def test_another_claim_of_the_name_is_not_extended(cluster: Cluster, claims: SandboxClaims) -> None:
    claim, _ = await claims.claim("cntr_1-1", SPEC)
    other = msgspec.structs.replace(claim.metadata, uid="another")
    stale = msgspec.structs.replace(claim, metadata=other)
    await claims.extend(stale, time.time() + 86_400)
    assert abs(parse_time(cluster.claims[0]["spec"]["lifecycle"]["shutdownTime"]) - time.time()) < 5000
