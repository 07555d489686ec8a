"""From a claim to the first output of code in its pod, in a real cluster.

    python -m tools.kubernetes_cluster run python -m benchmarks.kubernetes [--quick] [--json FILE]

For the cluster that KUBECONFIG names, which has agent-sandbox and the images, from where its pods can be reached. It
installs the shipped template and pool in a namespace of its own. docs/benchmarks.md says what the rows mean.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result_table import percentile
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, SandboxSpec, Stdout
from fumehood.sandbox_client.kubernetes import (
    ClaimSettings,
    KubernetesApi,
    KubernetesSandboxProvider,
    load_credentials,
)
from tests.support.cluster_sandboxes import POOL, ClusterSandboxes, install_sandboxes
from tests.support.kubectl import find_cluster

_POOL_SIZE = 4
_CLAIM_TIMEOUT = 300.0
_WATCH_SECONDS = 3600
# In the order in which they follow each other.
_TURN = ("claim made", "pod ready", "sandbox made", "first output", "total")
_POD_STAGES = ("pod made", "scheduled", "containers run", "server answers", "pod ready", "claim ready")


@dataclass
class Samples:
    """Seconds of each stage, one for each repetition."""

    title: str
    stages: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, stages: dict[str, float]) -> None:
        for name, seconds in stages.items():
            self.stages.setdefault(name, []).append(seconds)


class _TimedApi(KubernetesApi):
    """Remembers how long the last POST took."""

    post_seconds = 0.0

    @override
    async def request(self, method: str, path: str, response_type: type[Any], **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return await super().request(method, path, response_type, **more)
        finally:
            if method == "POST":
                self.post_seconds = time.perf_counter() - began


class PodTimeline:
    """When each pod of a namespace reached a stage, by the clock of this process."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._seen: dict[str, dict[str, float]] = {}

    async def follow(self) -> None:
        query = {"watch": "true", "timeoutSeconds": str(_WATCH_SECONDS)}
        rest = b""
        async with self._api.open_stream(self._path, query, _WATCH_SECONDS) as chunks:
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._note(json.loads(line)["object"])

    def _note(self, pod: dict[str, Any]) -> None:
        stages = self._seen.setdefault(pod["metadata"]["name"], {})
        status: dict[str, Any] = pod.get("status", {})
        conditions: list[dict[str, str]] = status.get("conditions", [])
        true = {each["type"] for each in conditions if each["status"] == "True"}
        containers: list[dict[str, Any]] = status.get("containerStatuses", [])
        reached = {
            "pod made": True,
            "scheduled": "PodScheduled" in true,
            "containers run": bool(containers) and all("running" in each["state"] for each in containers),
            "server answers": bool(containers) and all(each.get("started") for each in containers),
            "pod ready": "Ready" in true,
        }
        for name, is_reached in reached.items():
            if is_reached:
                stages.setdefault(name, time.perf_counter())

    def stages_of(self, pod: str, began: float) -> dict[str, float]:
        """Seconds that each stage took after the one before."""
        seen = self._seen[pod]
        found: dict[str, float] = {}
        last = began
        for name in _POD_STAGES:
            if name in seen:
                found[name], last = seen[name] - last, seen[name]
        return found


@contextlib.asynccontextmanager
async def _open_provider(
    sandboxes: ClusterSandboxes,
) -> AsyncGenerator[tuple[KubernetesSandboxProvider, _TimedApi]]:
    namespace = sandboxes.kubectl.namespace
    api = _TimedApi(load_credentials(str(sandboxes.directory / "kubeconfig"), os.environ))
    settings = ClaimSettings(
        namespace=namespace, pools={"1g": POOL}, gateway=uuid.uuid4().hex, replica="benchmark"
    )
    token = (sandboxes.directory / "token").read_text()
    async with KubernetesSandboxProvider(api, settings, token=token) as provider:
        yield provider, api


async def _time_turn(
    provider: KubernetesSandboxProvider, api: _TimedApi
) -> tuple[dict[str, float], str, float]:
    """The stages of a claim and a first execution, the pod's name, and when the claim began."""
    name, spec = uuid.uuid4().hex, SandboxSpec()
    began = time.perf_counter()
    async with asyncio.timeout(_CLAIM_TIMEOUT):
        claim, _ = await provider.claims.claim(name, spec)
        ready = time.perf_counter()
        made = api.post_seconds
        ref = await provider.create(spec, name)
        created = time.perf_counter()
        sandbox = await provider.attach(ref)
        first = None
        async for event in sandbox.execute(ExecuteRequest(code="print(6 * 7)")):
            if isinstance(event, Stdout) and first is None:
                assert event.text == "42\n", event
                first = time.perf_counter()
    assert first is not None
    await provider.destroy(ref)
    stages = {
        "claim made": made,
        "pod ready": ready - began - made,
        "sandbox made": created - ready,
        "first output": first - created,
        "total": first - began,
    }
    assert claim.status is not None
    return stages, claim.status.sandbox.name, began


async def _wait_until_full(sandboxes: ClusterSandboxes) -> None:
    await asyncio.to_thread(sandboxes.wait_until_full, 300)


async def _measure_warm(sandboxes: ClusterSandboxes, repetitions: int) -> Samples:
    samples = Samples("warm: a pod of the pool is ready")
    async with _open_provider(sandboxes) as (provider, api):
        for _ in range(repetitions):
            await _wait_until_full(sandboxes)
            stages, _, _ = await _time_turn(provider, api)
            samples.add(stages)
    return samples


async def _measure_cold(sandboxes: ClusterSandboxes, repetitions: int) -> list[Samples]:
    turn, pod = Samples("cold: the pool is empty"), Samples("cold: from the claim to a pod that is ready")
    api = KubernetesApi(load_credentials(None, os.environ))
    timeline = PodTimeline(api, sandboxes.kubectl.namespace)
    following = asyncio.create_task(timeline.follow())
    try:
        sandboxes.scale(0)
        async with _open_provider(sandboxes) as (provider, timed):
            for _ in range(repetitions):
                await _wait_until_gone(sandboxes)
                stages, name, began = await _time_turn(provider, timed)
                turn.add(stages)
                parts = timeline.stages_of(name, began)
                parts["claim ready"] = stages["claim made"] + stages["pod ready"] - sum(parts.values())
                pod.add(parts)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await api.close()
        sandboxes.scale(_POOL_SIZE)
    return [turn, pod]


async def _wait_until_gone(sandboxes: ClusterSandboxes) -> None:
    arguments = ("wait", "pods", "--all", "--for=delete", "--timeout=300s")
    await asyncio.to_thread(sandboxes.kubectl.run, *arguments)


async def _measure_burst(sandboxes: ClusterSandboxes, claims: int) -> Samples:
    samples = Samples(f"{claims} at once, {_POOL_SIZE} of them warm")
    await _wait_until_full(sandboxes)

    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(_open_provider(sandboxes)) for _ in range(claims)]
        for stages, _, _ in await asyncio.gather(*(_time_turn(provider, api) for provider, api in opened)):
            samples.add(stages)
    return samples


def _print(console: Console, samples: Sequence[Samples]) -> None:
    for each in samples:
        count = max(len(values) for values in each.stages.values())
        table = Table("stage", "p50 ms", "p90 ms", "p99 ms", title=f"{each.title} (n={count})")
        for name in _order(each):
            if values := each.stages.get(name):
                figures = (f"{1000 * percentile(values, share):.0f}" for share in (0.5, 0.9, 0.99))
                table.add_row(name, *figures)
        console.print(table)


def _order(samples: Samples) -> tuple[str, ...]:
    return _TURN if "total" in samples.stages else _POD_STAGES


async def _run(sandboxes: ClusterSandboxes, *, quick: bool) -> list[Samples]:
    steps: list[Callable[[], Awaitable[Samples | list[Samples]]]] = [
        lambda: _measure_warm(sandboxes, 5 if quick else 50),
        lambda: _measure_burst(sandboxes, 8),
        lambda: _measure_cold(sandboxes, 3 if quick else 20),
    ]
    found: list[Samples] = []
    for step in steps:
        measured = await step()
        found += measured if isinstance(measured, list) else [measured]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the samples to this file")
    arguments = parser.parse_args()
    cluster = find_cluster()
    kubectl = cluster.for_namespace(f"bench-{uuid.uuid4().hex[:8]}")
    cluster.run("create", "namespace", kubectl.namespace)
    try:
        with tempfile.TemporaryDirectory() as directory:
            sandboxes = install_sandboxes(kubectl, Path(directory), replicas=_POOL_SIZE)
            samples = asyncio.run(_run(sandboxes, quick=arguments.quick))
    finally:
        cluster.delete(f"namespace/{kubectl.namespace}")
    console = Console()
    console.print(f"{platform.platform()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.0f}")
    _print(console, samples)
    if arguments.json:
        arguments.json.write_text(json.dumps({each.title: each.stages for each in samples}, indent=1))


if __name__ == "__main__":
    main()
