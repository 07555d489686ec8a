"""Containers whose sandboxes are pods: nothing is left behind, and nothing is lost but variables."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fumehood.containers import ContainerSettings, SandboxContainerService
from fumehood.containers.container_settings import IsolationScope
from fumehood.gateway_stats import ContainerStats
from fumehood.interfaces import Caller, Store
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionNote,
    SandboxInfo,
    SandboxSpec,
    Stdout,
)
from fumehood.sandbox_client.kubernetes import KubernetesSandboxProvider
from fumehood.sandbox_client.kubernetes.claim_objects import parse_time
from fumehood.store import GarbageCollectedBlobs
from fumehood.testing import FakeClock, MemoryBlobStore, MemoryStore
from tests.support.kubernetes.cluster import POOL, Cluster, run_cluster
from tests.support.kubernetes.controller import PodEnd
from tests.support.kubernetes.pods import RelayedPods, run_relayed_pods
from tests.support.waiting import wait_until

SOMEBODY = Caller("somebody")
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Harness:
    """A container service over the pods of a cluster."""

    def __init__(
        self, cluster: Cluster, provider: KubernetesSandboxProvider, store: Store, **settings: Any
    ) -> None:
        self.cluster = cluster
        self.provider = provider
        self.store = store
        self.clock = FakeClock()
        self.stats = ContainerStats()
        blobs = GarbageCollectedBlobs(MemoryBlobStore(), store)
        chosen: dict[str, Any] = {"containers_per_tenant": 1000, **settings}
        self.containers = SandboxContainerService(
            provider, store, blobs, self.clock, ContainerSettings(**chosen), stats=self.stats
        )

    async def run(self, code: str, container_id: str | None = None) -> tuple[str, str, ExecutionEnd]:
        """Return what the code prints, the notices, and the end."""
        name = container_id or self.containers.reserve_id()
        container = await self.containers.open_container(SOMEBODY, name, ContainerSpec())
        printed, notices, end = "", "", None
        async for event in container.execute(ExecuteRequest(code=code)):
            match event:
                case Stdout(text):
                    printed += text
                case ExecutionNote(text):
                    notices += text
                case ExecutionEnd():
                    end = event
                case _:
                    pass
        container.release()
        assert end is not None
        return printed, notices, end


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pods() -> AsyncGenerator[RelayedPods]:
    async with run_relayed_pods() as running:
        yield running


@asynccontextmanager
async def open_harness(
    pods: RelayedPods, isolation: IsolationScope = "container", replicas: int = 2, **settings: Any
) -> AsyncGenerator[Harness]:
    async with (
        run_cluster(nullcontext(pods), replicas) as cluster,
        cluster.make_provider() as provider,
    ):
        await wait_until(lambda: cluster.controller.count_warm(POOL) == replicas)
        yield Harness(cluster, provider, MemoryStore(), isolation=isolation, **settings)


# ---- nothing is left behind ---------------------------------------------------------------------------------------


async def test_a_hundred_executions_one_after_another(pods: RelayedPods) -> None:
    """Specification 003, SC-003: each has a pod of its own, and none is left."""
    async with open_harness(pods, "execution") as harness:
        cluster = harness.cluster
        container = harness.containers.reserve_id()
        for number in range(100):
            code = f"import os\nprint(os.listdir())\nopen('file-{number % 3}', 'w').write('{number}')"
            printed, _, end = await harness.run(code, container)
            assert (end.status, printed.count("file-")) == ("ok", min(number, 3))
            assert cluster.claims == []
        assert len(cluster.controller.addresses) == len(set(cluster.controller.addresses)) == 100
        await wait_until(lambda: cluster.controller.is_idle)
        assert len(cluster.controller.pods) == cluster.controller.count_warm(POOL) == 2


async def test_a_hundred_executions_at_once(pods: RelayedPods) -> None:
    async with open_harness(pods, "execution", replicas=10) as harness:
        cluster = harness.cluster
        results = await asyncio.gather(*(harness.run(f"print({number})") for number in range(100)))
        assert [printed for printed, _, _ in results] == [f"{number}\n" for number in range(100)]
        assert cluster.claims == []
        assert len(set(cluster.controller.addresses)) == 100
        assert (harness.provider.stats.in_flight, harness.provider.stats.open_claims) == (0, 0)
        assert set(harness.stats.sandbox_starts) == {"warm", "cold"}


async def test_parallel_calls_in_one_container_each_have_a_pod(pods: RelayedPods) -> None:
    """Specification 003, EC-4."""
    async with open_harness(pods, "execution") as harness:
        container = harness.containers.reserve_id()
        await harness.run("open('shared.txt', 'w').write('here')", container)
        code = "import time\nprint(open('shared.txt').read())\ntime.sleep(0.3)"
        running = [asyncio.ensure_future(harness.run(code, container)) for _ in range(3)]
        await wait_until(lambda: len(harness.cluster.claims) == 3)
        for printed, _, end in await asyncio.gather(*running):
            assert (printed, end.status) == ("here\n", "ok")
        assert harness.cluster.claims == []


async def test_a_deleted_and_an_expired_container(pods: RelayedPods) -> None:
    async with open_harness(pods) as harness:
        names = [harness.containers.reserve_id() for _ in range(2)]
        for name in names:
            await harness.run("x = 1", name)
        assert len(harness.cluster.claims) == 2
        await harness.containers.delete_container(SOMEBODY, names[0])
        assert len(harness.cluster.claims) == 1
        harness.clock.advance(3600)
        await harness.containers.sweep()
        assert harness.cluster.claims == []


async def test_a_claim_lives_as_long_as_its_container(pods: RelayedPods) -> None:
    def shutdown_at() -> float:
        return parse_time(harness.cluster.claims[0]["spec"]["lifecycle"]["shutdownTime"])

    async with open_harness(pods, max_lifetime_hours=100.0) as harness:
        # The real time, at which the claim was made.
        harness.clock.advance(time.time() - harness.clock.now())
        name = harness.containers.reserve_id()
        await harness.run("x = 1", name)
        before = shutdown_at()
        for _ in range(6):
            harness.clock.advance(19 * 60)
            await harness.run("x += 1", name)
            await harness.containers.sweep()
        assert shutdown_at() - harness.clock.now() >= 20 * 60 + 300
        assert shutdown_at() > before
        assert harness.cluster.api.count("PATCH") < 6


async def test_claims_that_a_killed_gateway_left(pods: RelayedPods) -> None:
    """What no container refers to is deleted; containers of a dead replica live on."""
    async with open_harness(pods) as harness:
        store, cluster = harness.store, harness.cluster
        kept = harness.containers.reserve_id()
        await harness.run("x = 41", kept)
        lost = harness.containers.reserve_id()
        await harness.run("x = 1", lost)
        record = await store.get_container(lost)
        assert record is not None
        # As if the process had died between the claim and the record.
        await store.update_container(msgspec.structs.replace(record, sandbox="", address="", incarnation=0))
        assert len(cluster.claims) == 2
        async with cluster.make_provider(replica="replica-2") as provider:
            heir = Harness(cluster, provider, store)
            async with heir.containers:
                await wait_until(lambda: len(cluster.claims) == 1)
                assert heir.stats.orphans == 1
                printed, _, _ = await heir.run("print(x + 1)", kept)
                assert printed == "42\n"


async def test_a_claim_that_is_not_recorded_yet_has_time(pods: RelayedPods) -> None:
    async with open_harness(pods) as harness:
        harness.clock.advance(time.time() - harness.clock.now())
        name = harness.containers.reserve_id()
        await harness.containers.open_container(SOMEBODY, name, ContainerSpec())
        other = harness.cluster.make_provider(replica="replica-2")
        async with other:
            await other.create(SandboxSpec(), f"{name}-1")
        heir = Harness(harness.cluster, harness.provider, harness.store)
        heir.clock.advance(time.time() - heir.clock.now())
        await wait_until(lambda: harness.provider.claims.find(f"{name}-1"))
        await heir.containers.sweep()
        assert len(harness.cluster.claims) == 1
        heir.clock.advance(301)
        await heir.containers.sweep()
        assert harness.cluster.claims == []


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["failed", "replaced", "unnoticed"])
async def test_a_pod_that_dies_in_mid_call(pods: RelayedPods, end: PodEnd) -> None:
    """The call fails and the model is told; the next call has the files of earlier ones, and no variables."""
    async with open_harness(pods) as harness:
        name = harness.containers.reserve_id()
        await harness.run("x = 41\nopen('kept.txt', 'w').write('kept')", name)
        first = harness.cluster.claims[0]["metadata"]
        calling = asyncio.ensure_future(harness.run("import time\ntime.sleep(60)", name))
        await wait_until(lambda: harness.stats.running_calls == 1)
        infos: list[SandboxInfo] = []
        while not any(info.running for info in infos):
            infos = await harness.provider.list_sandboxes()
        await harness.cluster.controller.kill_pod(first["name"], end)
        _, _, lost = await asyncio.wait_for(calling, 10)
        assert (lost.status, lost.state_kept) == ("lost", False)
        assert "The sandbox was lost. The code may have run" in lost.reason
        await wait_until(lambda: not harness.cluster.claims)
        printed, notices, ended = await harness.run("print(open('kept.txt').read(), 'x' in globals())", name)
        assert (printed, ended.status) == ("kept False\n", "ok")
        assert "A new sandbox: variables" in notices
        assert harness.cluster.claims[0]["metadata"]["uid"] != first["uid"]


async def test_no_pod_in_time(pods: RelayedPods) -> None:
    """Specification 003, US3-3: the model is told after `claim_timeout`, and the claim is gone."""
    async with open_harness(pods, claim_timeout=0.5) as harness:
        harness.cluster.controller.behaviour.max_pods = 2
        await asyncio.gather(*(harness.run("x = 1") for _ in range(2)))
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        _, _, end = await harness.run("print(1)")
        assert 0.5 <= loop.time() - started_at < 1.5
        assert (end.status, end.exit_code) == ("lost", -1)
        assert end.reason.startswith("No sandbox is free at the moment, try again later")
        await wait_until(lambda: len(harness.cluster.claims) == 2)


async def test_a_slow_pool(pods: RelayedPods) -> None:
    async with open_harness(pods, claim_timeout=10) as harness:
        harness.cluster.controller.behaviour.warm_seconds = 0.5
        printed, _, _ = await harness.run("print('late')")
        assert printed == "late\n"
        assert harness.provider.stats.ready_seconds["warm"].sum >= 0.5


async def test_a_tier_without_a_pool(pods: RelayedPods) -> None:
    async with open_harness(pods, memory_tiers=("1g", "4g")) as harness:
        with pytest.raises(InvalidRequest, match="containers of 1g or 4g, not of 64g") as raised:
            await harness.containers.create_container(SOMEBODY, ContainerSpec(memory="64g"))
        assert raised.value.param == "memory_limit"
        await harness.containers.create_container(SOMEBODY, ContainerSpec(memory="4g"))
