"""The container service passes its kit, over fake and over real sandboxes."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings, IsolationScope
from fumehood.files.upload_file_service import UploadFileService
from fumehood.interfaces import BlobStore, SandboxProvider, SandboxRef, Store
from fumehood.protocol.openai.file_objects import FileUploadMetadata
from fumehood.sandbox_client.local_server_provider import LocalServerProvider, LocalServerSettings
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
)
from fumehood.testing.conformance_kits.container_service_kit import (
    SOMEBODY,
    ContainerServiceKit,
    ContainerSubject,
)
from fumehood.testing.conformance_kits.payloads import stream_chunks
from tests.support.kubernetes.cluster import run_cluster
from tests.support.sandbox_runs import has_cgroups
from tests.support.scripted_sandbox_programs import make_scripted_sandboxes


def make_subject(
    provider: SandboxProvider,
    isolation: IsolationScope = "container",
    store: Store | None = None,
    blobs: BlobStore | None = None,
) -> ContainerSubject:
    clock = FakeClock()
    settings = ContainerSettings(isolation=isolation, containers_per_tenant=1000)
    records = store or MemoryStore(clock)
    referenced = GarbageCollectedBlobs(blobs or MemoryBlobStore(), records)
    uploads = UploadFileService(records, referenced, clock)
    containers = SandboxContainerService(provider, records, referenced, clock, settings, uploads=uploads)

    async def destroy_sandbox(container_id: str) -> None:
        (name,) = [info.id for info in await provider.list_sandboxes() if info.id.startswith(container_id)]
        await provider.destroy(SandboxRef(name))

    async def upload(name: str, content: bytes) -> str:
        metadata = FileUploadMetadata(filename=name, purpose="user_data")
        return (await uploads.create_file(SOMEBODY, metadata, stream_chunks(content))).id

    async def advance_clock(seconds: float) -> None:
        clock.advance(seconds)

    return ContainerSubject(
        containers,
        keeps_variables=isolation == "container",
        destroy_sandbox=destroy_sandbox,
        advance_clock=advance_clock,
        upload=upload,
    )


@asynccontextmanager
async def open_fake_subject(isolation: IsolationScope) -> AsyncGenerator[ContainerSubject]:
    async with make_scripted_sandboxes() as provider:
        yield make_subject(provider, isolation)


@asynccontextmanager
async def open_disk_subject() -> AsyncGenerator[ContainerSubject]:
    with tempfile.TemporaryDirectory() as directory:
        store = await SqliteStore.open(Path(directory) / "store.db")
        async with make_scripted_sandboxes() as provider:
            yield make_subject(provider, store=store, blobs=DiskBlobStore(Path(directory) / "blobs"))
        await store.close()


@asynccontextmanager
async def open_real_subject(isolation: IsolationScope) -> AsyncGenerator[ContainerSubject]:
    limits = "enforced" if has_cgroups() else "best-effort"
    settings = LocalServerSettings(limits=limits, pool=1, options=("--preload", ""))
    async with LocalServerProvider(settings) as provider:
        yield make_subject(provider, isolation)


@asynccontextmanager
async def open_pod_subject(isolation: IsolationScope) -> AsyncGenerator[ContainerSubject]:
    async with run_cluster(replicas=4) as cluster, cluster.make_provider() as provider:
        yield make_subject(provider, isolation)


@pytest.mark.asyncio(loop_scope="class")
class TestOverFakeSandboxes(ContainerServiceKit):
    open_subject = staticmethod(partial(open_fake_subject, "container"))


@pytest.mark.asyncio(loop_scope="class")
class TestOnADisk(ContainerServiceKit):
    open_subject = staticmethod(open_disk_subject)


@pytest.mark.asyncio(loop_scope="class")
class TestOverAFakeSandboxForEachCall(ContainerServiceKit):
    open_subject = staticmethod(partial(open_fake_subject, "execution"))


@pytest.mark.asyncio(loop_scope="class")
class TestOverSandboxes(ContainerServiceKit):
    open_subject = staticmethod(partial(open_real_subject, "container"))


@pytest.mark.asyncio(loop_scope="class")
class TestOverASandboxForEachCall(ContainerServiceKit):
    open_subject = staticmethod(partial(open_real_subject, "execution"))


@pytest.mark.asyncio(loop_scope="class")
class TestOverPods(ContainerServiceKit):
    open_subject = staticmethod(partial(open_pod_subject, "container"))


@pytest.mark.asyncio(loop_scope="class")
class TestOverAPodForEachCall(ContainerServiceKit):
    open_subject = staticmethod(partial(open_pod_subject, "execution"))
