"""What containers reach, with which secrets, and where these are kept; real sandboxes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings, IsolationScope
from fumehood.interfaces import Caller
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, ExecuteRequest, NetworkAllowlist, Stdout
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.store.aes_gcm_sealer import AesGcmSealer, load_or_create_keys
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import run_server
from tests.support.websites import Website, WebsiteAuthority

SOMEBODY = Caller("somebody")
SECRET = "hunter2-hunter2-hunter2"
SITE = "data.test"
_ASKS = """
import os, urllib.request, urllib.error
def ask(host, port):
    key = os.environ.get("API_KEY", "")
    request = urllib.request.Request(f"https://{{host}}:{{port}}/", headers={{"authorization": key}})
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except OSError as error:
        return type(error).__name__
print(os.environ.get("API_KEY"), ask("{site}", {port}), ask("other.test", {port}))
"""


class NetworkHarness:
    """A gateway's containers on a disk."""

    def __init__(self, containers: SandboxContainerService, site: Website) -> None:
        self.containers = containers
        self.site = site

    async def ask(self, container_id: str) -> str:
        container = await self.containers.open_container(SOMEBODY, container_id, ContainerSpec())
        request = ExecuteRequest(code=_ASKS.format(site=SITE, port=self.site.port))
        async with aclosing(container.execute(request)) as events:
            return "".join([event.text async for event in events if isinstance(event, Stdout)])


async def network_harness(directory: Path, isolation: IsolationScope) -> AsyncGenerator[NetworkHarness]:
    """One after another over the same files and sandboxes, as if the gateway were restarted."""
    authority = WebsiteAuthority(directory)
    async with Website(tls=authority.context(SITE)) as site:
        egress = settings(
            preload=(),
            egress="allowlist",
            egress_hosts=dict.fromkeys((SITE, "other.test"), "127.0.0.1"),
            egress_private_networks=("127.0.0.0/8",),
            egress_ports=(site.port,),
            egress_ca_file=Path(authority.file),
        )
        async with run_server(egress) as server, RemoteSandboxProvider(server.where) as remote:
            while True:
                store = await SqliteStore.open(directory / "store.db")
                containers = SandboxContainerService(
                    remote,
                    store,
                    GarbageCollectedBlobs(DiskBlobStore(directory / "blobs"), store),
                    FakeClock(),
                    ContainerSettings(isolation=isolation, allowed_domains=frozenset({SITE})),
                    sealer=AesGcmSealer(load_or_create_keys(directory / "keys")),
                )
                try:
                    yield NetworkHarness(containers, site)
                finally:
                    await containers.close()
                    await store.close()


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_secrets_reach_their_domain_and_nothing_else(tmp_path: Path, isolation: IsolationScope) -> None:
    network = NetworkAllowlist(
        allowed_domains=[SITE], domain_secrets=[DomainSecret(domain=SITE, name="API_KEY", value=SECRET)]
    )
    async with aclosing(network_harness(tmp_path, isolation)) as gateways:
        first = await anext(gateways)
        made = await first.containers.create_container(SOMEBODY, ContainerSpec(network=network))
        closed = await first.containers.create_container(SOMEBODY, ContainerSpec())
        place = first
        for restart in (True, False):
            assert await place.ask(made.id) == "$API_KEY 200 URLError\n"
            assert place.site.seen.pop().headers["authorization"] == SECRET
            assert (await place.ask(closed.id)).startswith("None URLError URLError")
            assert place.site.seen == []
            for file in tmp_path.rglob("*"):
                assert not file.is_file() or SECRET.encode() not in file.read_bytes()
            place = await anext(gateways) if restart else place
        await place.containers.delete_container(SOMEBODY, made.id)
