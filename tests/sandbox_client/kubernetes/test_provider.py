"""Sandboxes in pods: found by other processes, lost with their pods, and never left behind."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext

import pytest
import pytest_asyncio

from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    SandboxInfo,
    SandboxSpec,
    Stdout,
)
from fumehood.sandbox_client.kubernetes import KubernetesSandboxProvider
from fumehood.sandbox_client.kubernetes.claim_objects import parse_time
from fumehood.sandbox_client.kubernetes.pod_sandbox import ClaimedPod
from tests.support.kubernetes.cluster import NAMESPACE, POOL, Cluster, run_cluster
from tests.support.kubernetes.controller import PodEnd
from tests.support.kubernetes.object_store import CLAIMS
from tests.support.kubernetes.pods import RelayedPods, run_relayed_pods
from tests.support.waiting import wait_until

WAITS = "import os, time\nprint('waiting', flush=True)\nwhile True: time.sleep(0.01)"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pods() -> AsyncGenerator[RelayedPods]:
    async with run_relayed_pods() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(pods: RelayedPods) -> AsyncGenerator[Cluster]:
    async with run_cluster(nullcontext(pods)) as running:
        await wait_until(lambda: running.controller.count_warm(POOL) == 2)
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def provider(cluster: Cluster) -> AsyncGenerator[KubernetesSandboxProvider]:
    async with cluster.make_provider() as opened:
        yield opened


def claim_name(cluster: Cluster) -> str:
    (claim,) = cluster.claims
    return claim["metadata"]["name"]


async def run(sandbox: Sandbox, code: str) -> tuple[str, ExecutionEnd]:
    """Return what the code prints, and its end."""
    printed: list[str] = []
    async with aclosing(sandbox.execute(ExecuteRequest(code=code))) as events:
        async for event in events:
            if isinstance(event, Stdout):
                printed.append(event.text)
            if isinstance(event, ExecutionEnd):
                return "".join(printed), event
    raise AssertionError("there was no end")


# ---- found again ----------------------------------------------------------------------------------------------------


async def test_another_replica_uses_the_same_pod(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    assert ref.from_warm_pool
    await run(await provider.attach(ref), "x = 41")
    async with cluster.make_provider(replica="replica-2") as other:
        printed, _ = await run(await other.attach(SandboxRef(ref.id, ref.address)), "print(x + 1)")
        assert printed == "42\n"
        again = await other.create(SandboxSpec(), "cntr_1-1")
        assert again.address == ref.address
        await other.destroy(SandboxRef(ref.id, ref.address))
    assert cluster.claims == []
    await wait_until(lambda: provider.claims.find("cntr_1-1") is None)
    with pytest.raises(SandboxNotFound):
        await provider.attach(ref)


async def test_a_replica_that_has_not_heard_of_the_claim_yet(cluster: Cluster) -> None:
    async with (
        cluster.make_provider(poll_seconds=0.1) as provider,
        cluster.make_provider(replica="replica-2") as other,
    ):
        await wait_until(lambda: cluster.api.open_watches == 2)
        cluster.api.mute_watches()
        ref = await provider.create(SandboxSpec(), "cntr_1-1")  # asks for its claim itself
        assert other.claims.find("cntr_1-1") is None
        printed, _ = await run(await other.attach(ref), "print('found')")
        assert printed == "found\n"
        with pytest.raises(SandboxNotFound):
            await other.attach(SandboxRef("cntr_2-1", ref.address.replace(ref.address[-4:], "0000")))
        await other.destroy(ref)
    assert cluster.claims == []


async def test_containers_go_on_while_the_api_server_is_down(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    await run(await provider.attach(ref), "x = 41")
    await cluster.api.stop()
    printed, _ = await run(await provider.attach(ref), "print(x + 1)")
    assert printed == "42\n"
    await provider.extend_lifetime(ref, time.time() + 86_400)  # said in the log, no error
    infos = await provider.list_sandboxes()
    assert [info.id for info in infos] == ["cntr_1-1"]
    await provider.health()
    await cluster.api.start()
    await provider.destroy(ref)
    assert cluster.claims == []


async def test_a_claim_without_a_sandbox_is_listed(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    """A process that died left it; a sweep must see it."""
    cluster.controller.behaviour.is_paused = True
    asking = asyncio.ensure_future(provider.create(SandboxSpec(), "cntr_1-1"))
    async with cluster.make_provider(replica="replica-2") as other:
        await wait_until(lambda: other.claims.find("cntr_1-1"))
        (info,) = await other.list_sandboxes()
        assert (info.id, info.memory, info.running) == ("cntr_1-1", "1g", None)
        assert abs(info.last_used_at - time.time()) < 5
        await other.destroy(SandboxRef(info.id))
    with pytest.raises(SandboxStartFailed):
        await asking
    assert cluster.claims == []
    cluster.controller.behaviour.is_paused = False


async def test_the_lifetime_follows_the_container(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    await provider.extend_lifetime(ref, time.time() + 86_400)
    shutdown_at = parse_time(cluster.claims[0]["spec"]["lifecycle"]["shutdownTime"])
    assert shutdown_at - time.time() > 86_400
    await provider.destroy(ref)
    await provider.extend_lifetime(ref, time.time() + 86_400)
    assert cluster.api.count("PATCH") == 1


# ---- lost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["failed", "replaced", "unnoticed"])
async def test_a_pod_that_dies_in_mid_call(
    cluster: Cluster, provider: KubernetesSandboxProvider, end: PodEnd
) -> None:
    """Specification 003, EC-1. In all cases the claim is deleted; a pod that replaces the old one is not used."""
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    sandbox = await provider.attach(ref)
    async with aclosing(sandbox.execute(ExecuteRequest(code=WAITS))) as events:
        assert isinstance(await anext(events), Stdout)
        await cluster.controller.kill_pod(claim_name(cluster), end)
        async with asyncio.timeout(10):
            with pytest.raises(SandboxGone) as raised:
                await anext(events)
    assert not raised.value.nothing_started
    await wait_until(lambda: not cluster.claims)
    with pytest.raises((SandboxGone, SandboxNotFound)):
        await provider.attach(ref)
    again = await provider.create(SandboxSpec(), "cntr_1-1")
    assert again.address != ref.address
    assert len(set(cluster.controller.addresses)) == len(cluster.controller.addresses)


@pytest.mark.parametrize("end", ["failed", "replaced", "unnoticed"])
async def test_a_pod_that_dies_between_calls(
    cluster: Cluster, provider: KubernetesSandboxProvider, end: PodEnd
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    await cluster.controller.kill_pod(claim_name(cluster), end)
    async with asyncio.timeout(10):
        with pytest.raises(SandboxGone):
            await provider.attach(ref)
    await wait_until(lambda: not cluster.claims)


async def test_a_pod_that_answers_late_is_used(
    provider: KubernetesSandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    read_info, asked = ClaimedPod.read_info, list[ClaimedPod]()

    async def answer_late(pod: ClaimedPod) -> SandboxInfo:
        asked.append(pod)
        if len(asked) == 1:
            raise TimeoutError
        return await read_info(pod)

    monkeypatch.setattr(ClaimedPod, "read_info", answer_late)
    printed, _ = await run(await provider.attach(ref), "print('late')")
    assert printed == "late\n"
    assert len(asked) == 2


async def test_a_pod_that_dies_before_its_sandbox_is_used(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    """The container asks for the same sandbox again, and gets another pod."""
    first = await provider.create(SandboxSpec(), "cntr_1-1")
    await cluster.controller.kill_pod(claim_name(cluster), "unnoticed")
    with pytest.raises(SandboxStartFailed):
        await provider.create(SandboxSpec(), "cntr_1-1")
    second = await provider.create(SandboxSpec(), "cntr_1-1")
    assert second.address != first.address
    printed, _ = await run(await provider.attach(second), "print('here')")
    assert printed == "here\n"


async def test_a_connection_that_breaks_loses_nothing(
    cluster: Cluster, pods: RelayedPods, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    sandbox = await provider.attach(ref)
    code = WAITS.replace("True:", "not os.path.exists('go'):") + "\nprint('done')"
    async with aclosing(sandbox.execute(ExecuteRequest(code=code))) as events:
        assert isinstance(await anext(events), Stdout)
        pods.cut_connections()
        await sandbox.write_file("go", b"")
        texts = [event.text async for event in events if isinstance(event, Stdout)]
    assert texts == ["done\n"]
    assert len(cluster.claims) == 1


async def test_a_sandbox_that_ends_takes_its_pod_along(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    _, end = await run(await provider.attach(ref), "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (end.status, end.state_kept) == ("lost", False)
    await wait_until(lambda: not cluster.claims)


async def test_a_claim_that_is_deleted_ends_its_calls(
    cluster: Cluster, provider: KubernetesSandboxProvider
) -> None:
    ref = await provider.create(SandboxSpec(), "cntr_1-1")
    sandbox = await provider.attach(ref)
    async with aclosing(sandbox.execute(ExecuteRequest(code=WAITS))) as events:
        assert isinstance(await anext(events), Stdout)
        cluster.api.store.delete(CLAIMS, NAMESPACE, claim_name(cluster))
        async with asyncio.timeout(10):
            try:
                (last,) = [event async for event in events if isinstance(event, ExecutionEnd)]
                assert (last.status, last.state_kept) == ("lost", False)
            except SandboxGone:
                pass
    with pytest.raises(SandboxNotFound):
        await provider.attach(ref)


async def test_a_pod_that_cannot_be_used(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The pod is ready, and nothing listens, or its server has another token: the claim is not kept."""
    async with cluster.make_provider(token="another-token-entirely") as provider:
        with pytest.raises(SandboxStartFailed, match="token"):
            await provider.create(SandboxSpec(), "cntr_1-1")
        await wait_until(lambda: not cluster.claims)
    async with cluster.make_provider(port=1) as provider:
        with pytest.raises(SandboxStartFailed, match="cannot be reached"):
            await provider.create(SandboxSpec(), "cntr_1-1")
        await wait_until(lambda: not cluster.claims)
    assert "cannot be used" in caplog.text


async def test_a_caller_that_gives_up_while_the_sandbox_is_made(
    cluster: Cluster, pods: RelayedPods, provider: KubernetesSandboxProvider
) -> None:
    pods.delay = 60
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await provider.create(SandboxSpec(), "cntr_1-1")
    pods.delay = 0
    await wait_until(lambda: not cluster.claims)


async def test_claims_that_may_not_be_listed(cluster: Cluster) -> None:
    cluster.api.faults.denied.add("list sandboxclaims")
    provider = cluster.make_provider()
    with pytest.raises(SandboxServerUnreachable, match="Sandbox claims cannot be listed"):
        await provider.start()
    await provider.close()
