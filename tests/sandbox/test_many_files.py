"""Containers with many files: how often a sandbox server and a disk are asked, and what goes wrong in the middle.

Imports pytest and fumehood.
"""

import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.files.uploads import UploadedFiles
from fumehood.protocol.containers import ContainerSpec
from fumehood.protocol.errors import BodyTooLarge, InvalidRequest, Unavailable
from fumehood.protocol.files import NewFile
from fumehood.protocol.sandbox import ExecuteRequest, Unpacked, Written
from fumehood.protocol.sandbox_bundles import WholeFile
from fumehood.protocol.sandbox_errors import FileRefused, SandboxError, TooLarge, Unreachable
from fumehood.sandbox.container import ContainerSettings, Isolation
from fumehood.sandbox.containers import SandboxContainers
from fumehood.sandbox.http import Interrupted
from fumehood.sandbox.kept_files import FileLimits
from fumehood.sandbox.remote import RemoteSandboxes
from fumehood.store import blob_batches
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobs,
    MemoryStore,
    ScriptedSandbox,
    ScriptedSandboxes,
    Step,
    WriteFile,
)
from fumehood.testing.sandbox_kit_files import archive
from tests.support.containers import SOMEBODY, Host, host
from tests.support.sandbox_http import served

MANY = 400
FILES = {f"src/d{number % 9}/{number}.py": b"%d" % number for number in range(MANY)}


@dataclass
class Away:
    """Containers before a sandbox server; `asked` counts the requests for files."""

    containers: SandboxContainers
    requests: list[str]

    async def run(self, container_id: str, code: str) -> list[str]:
        """What the call left."""
        container = await self.containers.open(SOMEBODY, container_id, ContainerSpec())
        try:
            async for _ in container.execute(ExecuteRequest(code=code)):
                pass
            return sorted(record.path for record in (await container.collect()).files)
        finally:
            container.leave()

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
async def away(*steps: Step, isolation: Isolation = "container") -> AsyncGenerator[Away]:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with (
        ScriptedSandboxes(always=steps) as scripted,
        served(scripted) as server,
        RemoteSandboxes(server.url) as remote,
    ):
        settings = ContainerSettings(isolation=isolation)
        containers = SandboxContainers(remote, store, ReferredBlobs(MemoryBlobs(), store), clock, settings)
        yield Away(containers, server.requests)


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_the_number_of_requests_does_not_grow_with_the_number_of_files(isolation: Isolation) -> None:
    made = [WriteFile(f"out/{number}.txt", b"made") for number in range(MANY)]
    changed = [WriteFile(path, b"changed") for path in [*FILES][:10]]
    async with away(Step("look"), Step("make", made), Step("change", changed), isolation=isolation) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        unpacked = await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        assert sorted(one.path for one in unpacked) == sorted(FILES)
        assert here.asked() == {"unpack": 1, "files": 1, "read": 1}

        assert await here.run(record.id, "look") == []
        assert here.asked() == {
            "write": 1,
            "files": 2,
        }  # all of them at once, and a look before and after the call

        again = {"write": 1} if isolation == "execution" else {}
        assert len(await here.run(record.id, "make")) == MANY
        assert here.asked() == {"read": 1, "files": 1 + len(again), **again}

        assert await here.run(record.id, "change") == sorted([*FILES][:10])
        assert here.asked() == {"read": 1, "files": 1 + len(again), **again}


async def test_the_number_of_waits_for_a_disk_does_not_grow_with_the_number_of_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    synced = blob_batches.sync_all

    def count(descriptor: int, paths: Sequence[str]) -> None:
        waits.append("all")
        synced(descriptor, paths)

    monkeypatch.setattr(blob_batches, "sync_all", count)

    def sync(descriptor: int) -> None:
        assert descriptor >= 0
        waits.append("one")

    monkeypatch.setattr(os, "fsync", sync)
    blobs = DiskBlobs(tmp_path)
    await blobs.put_all([b"%d" % number for number in range(1000)])
    assert waits == ["all", "all"]
    waits.clear()
    await blobs.put_all([b"few", b"of them"])
    assert "one" in waits


# --- what goes wrong ----------------------------------------------------------------------------------------


async def _unpacked(here: Host, content: bytes | AsyncIterable[bytes]) -> None:
    record = await here.containers.create(SOMEBODY, ContainerSpec())
    try:
        await here.containers.unpack(SOMEBODY, record.id, content, "tar")
    finally:
        assert await here.kept.files(record.id) == []
        assert here.blobs.blobs == {}
        assert here.scripted.specs == {}


async def test_a_disk_that_is_full_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with host() as here:
        put, left = here.blobs.put, MANY // 2

        async def full(content: bytes | AsyncIterable[bytes], *more: object) -> str:
            nonlocal left
            left -= 1
            if left < 0:
                raise Unavailable("The gateway's disk cannot be used now: No space left on device.")
            return await put(content, *more)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(here.blobs, "put", full)
        with pytest.raises(Unavailable, match="No space left"):
            await _unpacked(here, archive("tar", FILES))


async def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def leaving() -> AsyncGenerator[bytes]:
        yield archive("tar", FILES)[:5000]
        raise ConnectionError("the client went away")

    async with host() as here:
        with pytest.raises(ConnectionError):
            await _unpacked(here, leaving())


async def test_a_sandbox_that_fails_while_it_is_read_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaking(_: object, paths: Sequence[str]) -> AsyncGenerator[Sequence[bytes]]:
        yield [b"x"] * (len(paths) // 2)
        raise Unreachable("The connection broke.")

    monkeypatch.setattr(ScriptedSandbox, "read_all", breaking)
    async with host() as here:
        with pytest.raises(Unavailable):
            await _unpacked(here, archive("tar", FILES))


@pytest.mark.parametrize("limits", [FileLimits(files=MANY - 1), FileLimits(container_bytes=500_000)])
async def test_more_than_a_container_may_have(limits: FileLimits) -> None:
    files = {**FILES, "large": bytes(490_000)} if limits.container_bytes < 1 << 20 else FILES
    async with host(settings=ContainerSettings(files=limits)) as here:
        with pytest.raises(BodyTooLarge, match="no room"):
            await _unpacked(here, archive("tar", files))


async def test_what_a_new_sandbox_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not say of each why."""
    write_all = ScriptedSandbox.write_all

    async def without_some(self: ScriptedSandbox, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        async def rest() -> AsyncGenerator[Sequence[WholeFile]]:
            async for some in files:
                yield [file for file in some if "d3" not in file[0]]

        written = await write_all(self, rest())
        return Written(files=written.files, bytes=written.bytes, modified_ns=written.modified_ns, refused=99)

    monkeypatch.setattr(ScriptedSandbox, "write_all", without_some)
    async with host(Step("x"), Step("y")) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        ran = await here.run(await here.open(record.id), "x")
        refused = sorted(path for path in FILES if "d3" in path)
        (note,) = ran.notes
        assert note.startswith(f"Not to be had in this sandbox: {refused[0]}")
        assert (ran.end.status, ran.paths) == ("ok", [])
        assert await here.paths(await here.open(record.id)) == sorted(FILES)  # they are still kept
        assert (await here.run(await here.open(record.id), "y")).paths == []


@pytest.mark.parametrize("error", [FileRefused("more than 5 members"), TooLarge("too many bytes")])
async def test_a_new_sandbox_that_takes_none(monkeypatch: pytest.MonkeyPatch, error: SandboxError) -> None:
    async def refuse(_: object, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        assert [batch async for batch in files]
        raise error

    monkeypatch.setattr(ScriptedSandbox, "write_all", refuse)
    async with host(Step("x")) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        ran = await here.run(await here.open(record.id), "x")
        assert ran.end.status == "ok"
        assert ran.notes[0].startswith("Not to be had in this sandbox: src/d0/0.py")
        assert len(await here.kept.files(record.id)) == MANY


async def test_a_connection_that_breaks_once_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write_all, tries = ScriptedSandbox.write_all, 0

    async def breaking(self: ScriptedSandbox, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        nonlocal tries
        tries += 1
        if tries == 1:
            await anext(aiter(files))
            raise Interrupted("The connection broke.")
        return await write_all(self, files)

    monkeypatch.setattr(ScriptedSandbox, "write_all", breaking)
    async with host(Step("x")) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        ran = await here.run(await here.open(record.id), "x")
        assert (ran.end.status, ran.notes, tries) == ("ok", [], 2)


async def test_a_copy_that_is_gone_is_missed_among_many() -> None:
    async with host(Step("x")) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        records = await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        await here.blobs.delete(*(one.blob for one in records[7:9]))
        ran = await here.run(await here.open(record.id), "x")
        gone = sorted(one.path for one in records[7:9])
        assert ran.notes == [f"Not to be had any more: {gone[0]}, {gone[1]}."]
        assert len(await here.kept.files(record.id)) == MANY - 2


async def test_what_code_changes_while_files_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes one between the unpacking and the look at what is there now."""
    unpack = ScriptedSandbox.unpack
    (path, *_) = FILES

    async def meddled(self: ScriptedSandbox, content: bytes, **how: str) -> Unpacked:
        unpacked = await unpack(self, content, **how)  # pyright: ignore[reportArgumentType]
        if self.id.endswith("-1"):  # where the code is
            self.files.write(path, b"x" * len(FILES[path]))
        return unpacked

    async with host(Step("x"), Step("y")) as here:
        record = await here.containers.create(SOMEBODY, ContainerSpec())
        await here.run(await here.open(record.id), "x")
        monkeypatch.setattr(ScriptedSandbox, "unpack", meddled)
        await here.containers.unpack(SOMEBODY, record.id, archive("tar", FILES), "tar")
        ran = await here.run(await here.open(record.id), "y")
        assert ran.paths == [path]
        assert await here.content(await here.open(record.id), path) == b"x" * len(FILES[path])


async def test_uploads_that_cannot_all_be_there_are_taken_back() -> None:
    async with host(Step("x", [WriteFile("two.txt/x", b"in the way")]), Step("y")) as here:
        blobs = ReferredBlobs(here.blobs, here.kept)
        uploads = UploadedFiles(here.kept, blobs, here.clock)
        containers = SandboxContainers(here.scripted, here.kept, blobs, here.clock, uploads=uploads)
        record = await containers.create(SOMEBODY, ContainerSpec())
        container = await containers.open(SOMEBODY, record.id, ContainerSpec())
        await here.run(container, "x")
        ids: list[str] = []
        for name in ("one.txt", "two.txt", "three.txt"):
            upload = await uploads.create(SOMEBODY, NewFile(filename=name, purpose="user_data"), _once(name))
            ids.append(upload.id)
        await here.kept.put_files(
            [], [one.id for one in await here.kept.files(record.id)]
        )  # nobody knows of it
        with pytest.raises(InvalidRequest, match=r"two\.txt"):
            await containers.place(SOMEBODY, record.id, ids)
        assert await here.paths(container) == []
        sandbox = await here.sandbox(container)
        assert [file.path for file in sandbox.files.listing().files] == ["two.txt/x"]
        assert len(await containers.place(SOMEBODY, record.id, [ids[0], ids[2]])) == 2
        await here.run(await containers.open(SOMEBODY, record.id, ContainerSpec()), "y")


async def _once(text: str) -> AsyncGenerator[bytes]:
    yield text.encode()
