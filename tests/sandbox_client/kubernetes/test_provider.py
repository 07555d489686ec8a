"""Sandboxes in pods: claimed, used, deleted."""

from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, SandboxSpec
from tests.support.kubernetes.cluster import run_cluster
from tests.support.waiting import wait_until


async def test_a_sandbox_is_a_claimed_pod() -> None:
    async with run_cluster() as cluster, cluster.make_provider() as provider:
        await wait_until(lambda: cluster.controller.count_warm("fumehood-sandbox") == 2)
        ref = await provider.create(SandboxSpec(), "cntr_1-1")
        (claim,) = cluster.claims
        assert ref.from_warm_pool
        sandbox = await provider.attach(ref)
        events = [event async for event in sandbox.execute(ExecuteRequest(code="print(6 * 7)"))]
        assert isinstance(events[-1], ExecutionEnd)
        print(events, claim, ref)
        await provider.destroy(ref)
        assert cluster.claims == []
