"""Containers with many files: how often a sandbox server and a disk are asked, and what goes wrong in the middle.

Imports pytest and fumehood.
"""

import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings, IsolationScope
from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.files.upload_file_service import UploadFileService
from fumehood.protocol.openai.api_errors import BodyTooLarge, InvalidRequest, ServiceUnavailable
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.openai.file_objects import FileUploadMetadata
from fumehood.protocol.sandbox.bundle_encoding import BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxPayloadTooLarge,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, UnpackSummary, WriteFilesSummary
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.store import temporary_blob_files
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.conformance_kits.payloads import build_archive
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness
from tests.support.sandbox_http import serve_provider

MANY = 400
FILES = {f"src/d{number % 9}/{number}.py": b"%d" % number for number in range(MANY)}


@dataclass
class RemoteHarness:
    """Containers before a sandbox server; `asked` counts the requests for files."""

    containers: SandboxContainerService
    requests: list[str]

    async def run(self, container_id: str, code: str) -> list[str]:
        """What the call left."""
        container = await self.containers.open_container(SOMEBODY, container_id, ContainerSpec())
        try:
            async for _ in container.execute(ExecuteRequest(code=code)):
                pass
            return sorted(record.path for record in (await container.collect_files()).files)
        finally:
            container.release()

    def asked(self) -> Counter[str]:
        """Since the last time."""
        kinds = ("files", "read", "write", "unpack")
        found = Counter(
            kind
            for request in self.requests
            for kind in kinds
            if f"/{kind}" in request.partition("/sandboxes/")[2]
        )
        self.requests.clear()
        return found


@asynccontextmanager
async def remote_harness(
    *steps: ScriptedExecution, isolation: IsolationScope = "container"
) -> AsyncGenerator[RemoteHarness]:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with (
        ScriptedSandboxProvider(repeatable=steps) as scripted,
        serve_provider(scripted) as server,
        RemoteSandboxProvider(server.url) as remote,
    ):
        settings = ContainerSettings(isolation=isolation)
        containers = SandboxContainerService(
            remote, store, GarbageCollectedBlobs(MemoryBlobStore(), store), clock, settings
        )
        yield RemoteHarness(containers, server.requests)


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_the_number_of_requests_does_not_grow_with_the_number_of_files(
    isolation: IsolationScope,
) -> None:
    made = [WriteFile(f"out/{number}.txt", b"made") for number in range(MANY)]
    changed = [WriteFile(path, b"changed") for path in [*FILES][:10]]
    async with remote_harness(
        ScriptedExecution("look"),
        ScriptedExecution("make", made),
        ScriptedExecution("change", changed),
        isolation=isolation,
    ) as harness:
        record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        unpacked = await harness.containers.unpack_archive(
            SOMEBODY, record.id, build_archive("tar", FILES), "tar"
        )
        assert sorted(one.path for one in unpacked) == sorted(FILES)
        assert harness.asked() == {"unpack": 1, "files": 1, "read": 1}

        assert await harness.run(record.id, "look") == []
        assert harness.asked() == {
            "write": 1,
            "files": 2,
        }  # all of them at once, and a look before and after the call

        again = {"write": 1} if isolation == "execution" else {}
        assert len(await harness.run(record.id, "make")) == MANY
        assert harness.asked() == {"read": 1, "files": 1 + len(again), **again}

        assert await harness.run(record.id, "change") == sorted([*FILES][:10])
        assert harness.asked() == {"read": 1, "files": 1 + len(again), **again}


async def test_the_number_of_waits_for_a_disk_does_not_grow_with_the_number_of_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    synced = temporary_blob_files.fsync_paths

    def count(descriptor: int, paths: Sequence[str]) -> None:
        waits.append("all")
        synced(descriptor, paths)

    monkeypatch.setattr(temporary_blob_files, "fsync_paths", count)

    def sync(descriptor: int) -> None:
        assert descriptor >= 0
        waits.append("one")

    monkeypatch.setattr(os, "fsync", sync)
    blobs = DiskBlobStore(tmp_path)
    await blobs.put_many([b"%d" % number for number in range(1000)])
    assert waits == ["all", "all"]
    waits.clear()
    await blobs.put_many([b"few", b"of them"])
    assert "one" in waits


# --- what goes wrong ----------------------------------------------------------------------------------------


async def _unpacked(harness: ContainerHarness, content: bytes | AsyncIterable[bytes]) -> None:
    record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
    try:
        await harness.containers.unpack_archive(SOMEBODY, record.id, content, "tar")
    finally:
        assert await harness.store.list_container_files(record.id) == []
        assert harness.blobs.contents == {}
        assert harness.scripted.specs == {}


async def test_a_disk_that_is_full_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with container_harness() as harness:
        put, left = harness.blobs.put, MANY // 2

        async def full(content: bytes | AsyncIterable[bytes], *more: object) -> str:
            nonlocal left
            left -= 1
            if left < 0:
                raise ServiceUnavailable("The gateway's disk cannot be used now: No space left on device.")
            return await put(content, *more)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(harness.blobs, "put", full)
        with pytest.raises(ServiceUnavailable, match="No space left"):
            await _unpacked(harness, build_archive("tar", FILES))


async def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def leaving() -> AsyncGenerator[bytes]:
        yield build_archive("tar", FILES)[:5000]
        raise ConnectionError("the client went away")

    async with container_harness() as harness:
        with pytest.raises(ConnectionError):
            await _unpacked(harness, leaving())


async def test_a_sandbox_that_fails_while_it_is_read_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaking(_: object, paths: Sequence[str]) -> AsyncGenerator[Sequence[bytes]]:
        yield [b"x"] * (len(paths) // 2)
        raise SandboxServerUnreachable("The connection broke.")

    monkeypatch.setattr(ScriptedSandbox, "read_files", breaking)
    async with container_harness() as harness:
        with pytest.raises(ServiceUnavailable):
            await _unpacked(harness, build_archive("tar", FILES))


@pytest.mark.parametrize(
    "limits", [ContainerFileLimits(files=MANY - 1), ContainerFileLimits(container_bytes=500_000)]
)
async def test_more_than_a_container_may_have(limits: ContainerFileLimits) -> None:
    files = {**FILES, "large": bytes(490_000)} if limits.container_bytes < 1 << 20 else FILES
    async with container_harness(settings=ContainerSettings(file_limits=limits)) as harness:
        with pytest.raises(BodyTooLarge, match="no room"):
            await _unpacked(harness, build_archive("tar", files))


async def test_what_a_new_sandbox_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not say of each why."""
    write_all = ScriptedSandbox.write_files

    async def without_some(
        self: ScriptedSandbox, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        async def rest() -> AsyncGenerator[Sequence[BundledFile]]:
            async for some in files():
                yield [file for file in some if "d3" not in file[0]]

        written = await write_all(self, rest)
        return WriteFilesSummary(
            files=written.files, bytes=written.bytes, modified_ns=written.modified_ns, refused=99
        )

    monkeypatch.setattr(ScriptedSandbox, "write_files", without_some)
    async with container_harness(ScriptedExecution("x"), ScriptedExecution("y")) as harness:
        record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        await harness.containers.unpack_archive(SOMEBODY, record.id, build_archive("tar", FILES), "tar")
        outcome = await harness.run(await harness.open(record.id), "x")
        refused = sorted(path for path in FILES if "d3" in path)
        (note,) = outcome.notes
        assert note.startswith(f"These files could not be restored in this sandbox: {refused[0]}")
        assert (outcome.end.status, outcome.paths) == ("ok", [])
        assert await harness.paths(await harness.open(record.id)) == sorted(FILES)  # they are still kept
        assert (await harness.run(await harness.open(record.id), "y")).paths == []


@pytest.mark.parametrize(
    "error", [FileRefused("more than 5 members"), SandboxPayloadTooLarge("too many bytes")]
)
async def test_a_new_sandbox_that_takes_none(monkeypatch: pytest.MonkeyPatch, error: SandboxError) -> None:
    async def refuse(
        _: object, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        assert [batch async for batch in files()]
        raise error

    monkeypatch.setattr(ScriptedSandbox, "write_files", refuse)
    async with container_harness(ScriptedExecution("x")) as harness:
        record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        await harness.containers.unpack_archive(SOMEBODY, record.id, build_archive("tar", FILES), "tar")
        outcome = await harness.run(await harness.open(record.id), "x")
        assert outcome.end.status == "ok"
        assert outcome.notes[0].startswith("These files could not be restored in this sandbox: src/d0/0.py")
        assert len(await harness.store.list_container_files(record.id)) == MANY


async def test_a_copy_that_is_gone_is_missed_among_many() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        records = await harness.containers.unpack_archive(
            SOMEBODY, record.id, build_archive("tar", FILES), "tar"
        )
        await harness.blobs.delete(*(one.blob for one in records[7:9]))
        outcome = await harness.run(await harness.open(record.id), "x")
        gone = sorted(one.path for one in records[7:9])
        assert outcome.notes == [f"These files are gone: {gone[0]}, {gone[1]}."]
        assert len(await harness.store.list_container_files(record.id)) == MANY - 2


async def test_what_code_changes_while_files_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes one between the unpacking and the look at what is there now."""
    unpack = ScriptedSandbox.unpack_archive
    (path, *_) = FILES

    async def meddled(self: ScriptedSandbox, content: bytes, **how: str) -> UnpackSummary:
        unpacked = await unpack(self, content, **how)  # pyright: ignore[reportArgumentType]
        if self.id.endswith("-1"):  # where the code is
            self.files.write_file(path, b"x" * len(FILES[path]))
        return unpacked

    async with container_harness(ScriptedExecution("x"), ScriptedExecution("y")) as harness:
        record = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        await harness.run(await harness.open(record.id), "x")
        monkeypatch.setattr(ScriptedSandbox, "unpack_archive", meddled)
        await harness.containers.unpack_archive(SOMEBODY, record.id, build_archive("tar", FILES), "tar")
        outcome = await harness.run(await harness.open(record.id), "y")
        assert outcome.paths == [path]
        assert await harness.content(await harness.open(record.id), path) == b"x" * len(FILES[path])


async def test_uploads_that_cannot_all_be_there_are_taken_back() -> None:
    async with container_harness(
        ScriptedExecution("x", [WriteFile("two.txt/x", b"in the way")]), ScriptedExecution("y")
    ) as harness:
        blobs = GarbageCollectedBlobs(harness.blobs, harness.store)
        uploads = UploadFileService(harness.store, blobs, harness.clock)
        containers = SandboxContainerService(
            harness.scripted, harness.store, blobs, harness.clock, uploads=uploads
        )
        record = await containers.create_container(SOMEBODY, ContainerSpec())
        container = await containers.open_container(SOMEBODY, record.id, ContainerSpec())
        await harness.run(container, "x")
        ids: list[str] = []
        for name in ("one.txt", "two.txt", "three.txt"):
            upload = await uploads.create_file(
                SOMEBODY, FileUploadMetadata(filename=name, purpose="user_data"), _once(name)
            )
            ids.append(upload.id)
        await harness.store.put_container_files(
            [], [one.id for one in await harness.store.list_container_files(record.id)]
        )  # nobody knows of it
        with pytest.raises(InvalidRequest, match=r"two\.txt"):
            await containers.copy_uploads(SOMEBODY, record.id, ids)
        assert await harness.paths(container) == []
        sandbox = await harness.sandbox(container)
        assert [file.path for file in sandbox.files.list_files().files] == ["two.txt/x"]
        assert len(await containers.copy_uploads(SOMEBODY, record.id, [ids[0], ids[2]])) == 2
        await harness.run(await containers.open_container(SOMEBODY, record.id, ContainerSpec()), "y")


async def _once(text: str) -> AsyncGenerator[bytes]:
    yield text.encode()
