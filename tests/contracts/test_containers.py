"""The conformance kit of containers on ours, over a double and over real sandboxes; imports pytest and fumehood."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from fumehood.files.uploads import UploadedFiles
from fumehood.interfaces import BlobStore, SandboxProvider, SandboxRef, Store
from fumehood.protocol.files import NewFile
from fumehood.protocol.sandbox import OutputEvent, Raised, Stdout
from fumehood.sandbox.container import ContainerSettings, Isolation
from fumehood.sandbox.containers import SandboxContainers
from fumehood.sandbox.local import LocalSandboxes, LocalSettings
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import (
    Action,
    DeleteFile,
    FakeClock,
    MemoryBlobs,
    MemoryStore,
    ScriptedSandbox,
    ScriptedSandboxes,
    Step,
    WriteFile,
)
from fumehood.testing.containers_kit import PYTHON_PROGRAMS, SOMEBODY, ContainersKit, Program, Subject
from tests.support.sandboxes import has_cgroups


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def subject(request: pytest.FixtureRequest) -> AsyncGenerator[Subject]:
    kit = cast("type[Any]", request.cls)  # pyright: ignore[reportUnknownMemberType]
    async with kit.opened() as made:
        yield made


def over(
    provider: SandboxProvider,
    isolation: Isolation = "container",
    store: Store | None = None,
    blobs: BlobStore | None = None,
) -> Subject:
    clock = FakeClock()
    settings = ContainerSettings(isolation=isolation, containers_per_tenant=1000)
    kept = store or MemoryStore(clock)
    shared = ReferredBlobs(blobs or MemoryBlobs(), kept)
    uploads = UploadedFiles(kept, shared, clock)
    containers = SandboxContainers(provider, kept, shared, clock, settings, uploads=uploads)

    async def end_sandbox(container_id: str) -> None:
        (name,) = [one.id for one in await provider.sandboxes() if one.id.startswith(container_id)]
        await provider.destroy(SandboxRef(name))

    async def upload(name: str, content: bytes) -> str:
        async def pieces() -> AsyncGenerator[bytes]:
            yield content

        return (await uploads.create(SOMEBODY, NewFile(filename=name, purpose="user_data"), pieces())).id

    async def let_pass(seconds: float) -> None:
        clock.advance(seconds)

    return Subject(
        containers,
        keeps_variables=isolation == "container",
        end_sandbox=end_sandbox,
        let_pass=let_pass,
        upload=upload,
    )


async def _print_out(sandbox: ScriptedSandbox) -> OutputEvent:
    return Stdout(sandbox.files.read("out.txt").decode() + "\n")


def scripted() -> ScriptedSandboxes:
    behaviours: dict[Program, list[Action]] = {
        "prints hello": [Stdout("hello\n")],
        "raises ValueError": [Raised("ValueError", "no", "ValueError: no\n")],
        "waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
        "writes out.txt": [WriteFile("out.txt", b"made")],
        "changes out.txt": [WriteFile("out.txt", b"changed")],
        "deletes out.txt": [DeleteFile("out.txt")],
        "prints out.txt": [_print_out],
        "writes hidden and temporary files": [
            WriteFile(name, b"x") for name in (".hidden", "__pycache__/x.pyc", "backup~", "half.tmp")
        ],
    }
    return ScriptedSandboxes(
        always=[Step(PYTHON_PROGRAMS[name], actions) for name, actions in behaviours.items()]
    )


@asynccontextmanager
async def real(isolation: Isolation) -> AsyncGenerator[Subject]:
    limits = "enforced" if has_cgroups() else "best-effort"
    async with LocalSandboxes(LocalSettings(limits=limits, pool=1, options=("--preload", ""))) as provider:
        yield over(provider, isolation)


@pytest.mark.asyncio(loop_scope="class")
class TestOverADouble(ContainersKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async with scripted() as provider:
            yield over(provider)


@pytest.mark.asyncio(loop_scope="class")
class TestOnADisk(ContainersKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        with tempfile.TemporaryDirectory() as directory:
            store = await SqliteStore.open(Path(directory) / "store.db")
            async with scripted() as provider:
                yield over(provider, store=store, blobs=DiskBlobs(Path(directory) / "blobs"))
            await store.close()


@pytest.mark.asyncio(loop_scope="class")
class TestOverADoubleForEachCall(ContainersKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async with scripted() as provider:
            yield over(provider, "execution")


@pytest.mark.asyncio(loop_scope="class")
class TestOverSandboxes(ContainersKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async with real("container") as subject:
            yield subject


@pytest.mark.asyncio(loop_scope="class")
class TestOverASandboxForEachCall(ContainersKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async with real("execution") as subject:
            yield subject
