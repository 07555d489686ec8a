"""A whole cluster for tests: API server, controller, pods, a template and its pool."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fumehood.gateway_stats import ClaimStats
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_client.kubernetes import ClaimSettings, KubernetesApi, KubernetesSandboxProvider
from fumehood.sandbox_client.kubernetes.credentials import ClusterCredentials, StaticToken
from fumehood.sandbox_client.server_connection import SandboxConnectionTimeouts
from tests.support.kubernetes.api_server import TOKEN, KubernetesApiServer, run_api_server
from tests.support.kubernetes.controller import StandInController
from tests.support.kubernetes.object_store import CLAIMS, POOLS, TEMPLATES, Object, part
from tests.support.kubernetes.pods import POD_TOKEN, PodHost, run_relayed_pods

NAMESPACE = "fumehood"
TEMPLATE = POOL = "fumehood-sandbox"
LARGE_POOL = "fumehood-sandbox-4g"  # of a template of its own, and without warm pods
TIER_POOLS: Mapping[MemoryTier, str] = {"1g": POOL, "4g": LARGE_POOL}


@dataclass
class Cluster:
    """One cluster that runs."""

    api: KubernetesApiServer
    controller: StandInController
    host: PodHost

    @property
    def claims(self) -> list[Object]:
        """All claims that there are."""
        return self.api.store.list_objects(CLAIMS, NAMESPACE)

    @property
    def ready_claims(self) -> list[str]:
        """The names of the claims that have a pod."""
        return [
            claim["metadata"]["name"]
            for claim in self.claims
            if part(part(claim, "status"), "sandbox").get("podIPs")
        ]

    def add_pool(self, name: str = POOL, template: str = TEMPLATE, replicas: int = 2) -> None:
        """Add a pool, and its template if that is not there."""
        known = [found["metadata"]["name"] for found in self.api.store.list_objects(TEMPLATES, NAMESPACE)]
        if template not in known:
            self.api.store.create(TEMPLATES, NAMESPACE, {"metadata": {"name": template}})
        spec = {"replicas": replicas, "sandboxTemplateRef": {"name": template}}
        self.api.store.create(POOLS, NAMESPACE, {"metadata": {"name": name}, "spec": spec})

    def credentials(self) -> ClusterCredentials:
        return ClusterCredentials(server=self.api.url, namespace=NAMESPACE, token_source=StaticToken(TOKEN))

    def connect(self) -> KubernetesApi:
        return KubernetesApi(self.credentials())

    def make_provider(
        self,
        *,
        pools: Mapping[MemoryTier, str] = TIER_POOLS,
        gateway: str = "gateway-1",
        replica: str = "replica-1",
        probe_seconds: float = 0.3,
        stats: ClaimStats | None = None,
        token: str = POD_TOKEN,
        port: int | None = None,
        **settings: Any,
    ) -> KubernetesSandboxProvider:
        """Make a provider for this cluster; the caller starts and closes it."""
        chosen = ClaimSettings(namespace=NAMESPACE, pools=pools, gateway=gateway, replica=replica, **settings)
        return KubernetesSandboxProvider(
            self.connect(),
            chosen,
            token=token,
            port=port or self.host.port,
            stats=stats,
            timeouts=SandboxConnectionTimeouts(resume=0.2),
            probe_seconds=probe_seconds,
        )

    def interpreter_settings(self, directory: Path, **settings: Any) -> dict[str, Any]:
        """Return the settings of a gateway for this cluster; the files that they name are written."""
        token = directory / "sandbox-token"
        token.write_text(POD_TOKEN, encoding="utf-8")
        token.chmod(0o600)
        return {
            "sandbox_warm_pool": POOL,
            "sandbox_token_file": str(token),
            "sandbox_kubeconfig": str(self.write_kubeconfig(directory)),
            "sandbox_port": self.host.port,
            **settings,
        }

    def write_kubeconfig(self, directory: Path) -> Path:
        """Write a kubeconfig for this cluster."""
        path = directory / "kubeconfig.yaml"
        config = {
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.api.url}}],
            "users": [{"name": "gateway", "user": {"token": TOKEN}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "gateway", "namespace": NAMESPACE}}
            ],
        }
        path.write_bytes(msgspec.yaml.encode(config))
        return path


@asynccontextmanager
async def run_cluster(
    pods: AbstractAsyncContextManager[PodHost] | None = None, replicas: int = 2
) -> AsyncGenerator[Cluster]:
    """Run a cluster with a pool. pods: where its pods run; by default they share one sandbox server."""
    async with pods or run_relayed_pods() as host, run_api_server() as api:
        controller = StandInController(api.store, NAMESPACE, host)
        cluster = Cluster(api, controller, host)
        cluster.add_pool(replicas=replicas)
        cluster.add_pool(LARGE_POOL, LARGE_POOL, replicas=0)
        try:
            yield cluster
        finally:
            await controller.close()


class ClusterThread:
    """A cluster in a thread of its own, for tests without an event loop."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self._loop = loop

    def call[T](self, function: Callable[[Cluster], T]) -> T:
        """Call a function with the cluster, in its thread."""

        async def run() -> T:
            return function(self.cluster)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def run[T](self, function: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function with the cluster, in its thread."""
        return asyncio.run_coroutine_threadsafe(function(self.cluster), self._loop).result(30)

    def count_claims(self) -> int:
        return self.call(lambda cluster: len(cluster.claims))


@contextmanager
def run_cluster_thread(
    pods: Callable[[], AbstractAsyncContextManager[PodHost]] = run_relayed_pods, replicas: int = 2
) -> Generator[ClusterThread]:
    """Run a cluster in another thread until the block is left."""
    started = Future[ClusterThread]()

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            async with run_cluster(pods(), replicas) as cluster:
                stop.append(lambda: loop.call_soon_threadsafe(ended.set))
                started.set_result(ClusterThread(cluster, loop))
                await ended.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    stop: list[Callable[[], object]] = []
    with ThreadPoolExecutor(1) as executor:
        served = executor.submit(asyncio.run, serve())
        try:
            yield started.result(60)
        finally:
            for step in stop:
                step()
            served.result(60)
