"""What is kept of containers' files, and what sandboxes cannot talk anybody into."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.file_sync import ContainerFileLimits, FileChanges, FileSync, is_output_file
from fumehood.protocol.openai.api_errors import NotFound, ServiceUnavailable
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerSpec
from fumehood.protocol.sandbox.bundle_encoding import BundleContent
from fumehood.protocol.sandbox.sandbox_errors import (
    SandboxGone,
    SandboxPayloadTooLarge,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import FileEntry, FileListing, SandboxSpec
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    DeleteFile,
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from tests.support.containers import container_harness

SMALL = ContainerSettings(file_limits=ContainerFileLimits(file_bytes=10, container_bytes=25, files=4))


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("a.txt", True),
        ("dir/sub/a.txt", True),
        ("a b/ü.csv", True),
        ("tmp", True),
        (".hidden", True),
        (".env", True),
        ("dir/.hidden/a.txt", True),
        (".github/workflows/ci.yml", True),
        (".", False),
        ("a/./b", False),
        ("a/../b", False),
        ("__pycache__/a.txt", False),
        ("dir/__pycache__/a.pyc", False),
        ("a.pyc", False),
        ("backup~", False),
        (".a.swp", False),
        ("a.swp", False),
        ("half.tmp", False),
        ("", False),
        ("..", False),
        ("../a", False),
        ("/etc/passwd", False),
        ("a//b", False),
        ("a/", False),
        ("a\0b", False),
        ("x" * 5000, False),
    ],
)
def test_which_files_count(path: str, counts: bool) -> None:
    assert is_output_file(path) == counts


# --- bounds -------------------------------------------------------------------------------------------------


async def test_a_file_too_large_to_be_kept_is_there_while_its_sandbox_is() -> None:
    steps = [
        ScriptedExecution("x", [WriteFile("large.bin", bytes(11)), WriteFile("small.bin", b"s")]),
        ScriptedExecution("y"),
    ]
    async with container_harness(*steps, settings=SMALL) as harness:
        container = await harness.open()
        outcome = await harness.run(container, "x")
        assert outcome.paths == ["large.bin", "small.bin"]
        assert outcome.notes == snapshot(["There is no room to keep these when the sandbox ends: large.bin."])
        assert list(harness.blobs.contents.values()) == [b"s"]
        assert await harness.content(container, "large.bin") == bytes(11)
        harness.scripted.error = SandboxServerUnreachable("away")
        with pytest.raises(ServiceUnavailable):
            await harness.content(container, "large.bin")
        harness.scripted.error = None
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        with pytest.raises(NotFound):
            await harness.content(container, "large.bin")
        outcome = await harness.run(container, "y")
        assert outcome.notes[1:] == ["These files are gone: large.bin."]
        assert await harness.paths(container) == ["small.bin"]


async def test_a_container_keeps_so_many_bytes() -> None:
    steps = [
        ScriptedExecution("x", [WriteFile(name, bytes(10)) for name in ("a", "b", "c")]),
        ScriptedExecution("y", [DeleteFile("a")]),
        ScriptedExecution("z", [WriteFile("c", b"0123456789")]),
    ]
    async with container_harness(*steps, settings=SMALL) as harness:
        container = await harness.open()
        outcome = await harness.run(container, "x")
        assert [bool(record.blob) for record in outcome.files] == [True, True, False]
        await harness.run(container, "y")
        outcome = await harness.run(container, "z")
        assert outcome.notes == []
        assert [(record.path, bool(record.blob)) for record in outcome.files] == [("c", True)]


async def test_a_container_has_so_many_files() -> None:
    writes = [WriteFile(f"{number}.txt", b"x") for number in range(7)]
    async with container_harness(ScriptedExecution("x", writes), settings=SMALL) as harness:
        container = await harness.open()
        outcome = await harness.run(container, "x")
        assert outcome.paths == ["0.txt", "1.txt", "2.txt", "3.txt"]
        assert outcome.notes == snapshot(["3 files are not listed: a container has at most 4."])
        with pytest.raises(SandboxPayloadTooLarge):
            await container.save_file("figure.png", b"x")


async def test_what_is_saved_is_bounded_too() -> None:
    async with container_harness(ScriptedExecution("x"), settings=SMALL) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        with pytest.raises(SandboxPayloadTooLarge):
            await container.save_file("figure.png", bytes(11))
        await container.save_file("a/figure.png", bytes(10))
        await container.save_file("a/figure.png", bytes(10))
        with pytest.raises(SandboxPayloadTooLarge):
            await container.save_file("a/figure.png", bytes(10))
        assert await harness.paths(container) == ["a/figure-2.png", "a/figure.png"]


async def test_what_is_saved_outlives_the_sandbox() -> None:
    async with container_harness(ScriptedExecution("x"), ScriptedExecution("y")) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        await container.save_file("figure.png", b"saved")
        await harness.run(container, "y")
        assert (await harness.sandbox(container)).files.read_file("figure.png") == b"saved"


async def test_a_full_disk_costs_the_copy_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> str:
        raise ServiceUnavailable("The gateway's disk cannot be used now: No space left on device.")

    async with container_harness(ScriptedExecution("x", [WriteFile("a.txt", b"a")])) as harness:
        monkeypatch.setattr(harness.blobs, "put", full)
        container = await harness.open()
        outcome = await harness.run(container, "x")
        assert (outcome.end.status, outcome.paths) == ("ok", ["a.txt"])
        assert outcome.notes == ["There is no room to keep these when the sandbox ends: a.txt."]
        assert await harness.content(container, "a.txt") == b"a"


async def test_replaced_content_is_let_go() -> None:
    steps = [
        ScriptedExecution("x", [WriteFile("a", b"one"), WriteFile("b", b"one")]),
        ScriptedExecution("y", [WriteFile("a", b"two")]),
        ScriptedExecution("z", [WriteFile("b", b"two")]),
    ]
    async with container_harness(*steps) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        await harness.run(container, "y")
        assert sorted(harness.blobs.contents.values()) == [b"one", b"two"]
        await harness.run(container, "z")
        assert sorted(harness.blobs.contents.values()) == [b"two"]


# --- sandboxes that lie -------------------------------------------------------------------------------------


class LyingSandbox(ScriptedSandbox):
    """Lists and returns whatever a test sets."""

    def __init__(self, provider: ScriptedSandboxProvider) -> None:
        super().__init__(provider, "lying", SandboxSpec())
        self.listed: Sequence[FileEntry] = []
        self.complete = True
        self.truncated = False
        self.deleted: list[str] = []
        self.chunks: Mapping[str, Sequence[bytes | Exception]] = {}
        self.waiting: asyncio.Event | None = None

    async def list_files(self, since: str | None = None) -> FileListing:
        return FileListing(
            files=[*self.listed],
            mark="1",
            deleted=self.deleted,
            complete=self.complete,
            truncated=self.truncated,
        )

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        for chunk in self.chunks[path]:
            if self.waiting is not None:
                await self.waiting.wait()
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        for path in paths:
            yield [b"".join([chunk async for chunk in self.read_file(path)])]


def entry(path: str, size: int = 1, modified_ns: int = 1, changed_ns: int = 0, inode: int = 0) -> FileEntry:
    return FileEntry(path=path, size=size, modified_ns=modified_ns, changed_ns=changed_ns, inode=inode)


class FileSyncHarness:
    def __init__(self, **limits: float) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.blobs = MemoryBlobStore()
        self.files = FileSync(
            self.store,
            GarbageCollectedBlobs(self.blobs, self.store),
            self.clock,
            msgspec.convert(limits, ContainerFileLimits) if limits else ContainerFileLimits(),
        )
        self.sandbox = LyingSandbox(ScriptedSandboxProvider())

    async def capture_files(
        self, mark: str, listed: Sequence[FileEntry], **chunks: Sequence[bytes | Exception]
    ) -> FileChanges:
        """Capture what the sandbox lists, and returns in these chunks."""
        self.sandbox.listed, self.sandbox.chunks = listed, chunks
        return await self.capture(mark)

    async def capture(self, mark: str) -> FileChanges:
        await self.store.put_container(
            ContainerRecord(id="cntr_1", tenant="", spec=ContainerSpec(), created_at=1, last_active_at=1)
        )
        return await self.files.capture_changes("cntr_1", self.sandbox, mark)


async def test_a_file_that_is_larger_than_was_told() -> None:
    sync = FileSyncHarness(file_bytes=10)
    changes = await sync.capture_files("", [entry("a", size=1)], a=[b"x" * 6, b"x" * 6])
    assert [(record.path, record.blob) for record in changes.changed] == [("a", "")]
    assert sync.blobs.contents == {}


async def test_a_file_that_is_smaller_than_was_told() -> None:
    sync = FileSyncHarness()
    changes = await sync.capture_files("", [entry("a", size=1000), entry("b", size=-5)], a=[b"abc"], b=[b""])
    assert [(record.path, record.bytes) for record in changes.changed] == [("a", 3), ("b", 0)]


async def test_names_that_lead_elsewhere_are_not_looked_at() -> None:
    sync = FileSyncHarness()
    listed = [entry(path) for path in ("../a", "/etc/passwd", "a//b", ".", "")]
    assert (await sync.capture_files("", listed)).changed == []


async def test_a_sandbox_that_ends_meanwhile_leaves_what_was_copied() -> None:
    sync = FileSyncHarness()
    listed = [entry("a"), entry("b"), entry("c")]
    changes = await sync.capture_files("0", listed, a=[b"a"], b=[SandboxGone("gone")], c=[b"c"])
    copied = [record.path for record in changes.changed]
    assert "a" in copied
    assert "b" not in copied
    assert changes.mark == "0"  # the rest is still to be found


@given(st.lists(st.tuples(st.integers(-5, 20), st.lists(st.integers(0, 20), max_size=3)), max_size=20))
async def test_whatever_is_told_no_more_is_kept_than_there_is_room_for(
    files: list[tuple[int, list[int]]],
) -> None:
    sync = FileSyncHarness(file_bytes=30, container_bytes=60, files=15)
    names = [f"{number:02}" for number in range(len(files))]
    listed = [entry(name, size=size) for name, (size, _) in zip(names, files, strict=True)]
    chunks = {
        name: [name.encode()[:1] * size for size in sizes]
        for name, (_, sizes) in zip(names, files, strict=True)
    }
    changes = await sync.capture_files("", listed, **chunks)
    kept = [record for record in changes.changed if record.blob]
    assert [record.path for record in changes.changed] == names[:15]
    assert all(record.bytes == sum(files[int(record.path)][1]) <= 30 for record in kept)
    assert sum(record.bytes for record in kept) <= 60
    assert {record.blob for record in kept} == {*sync.blobs.contents}


async def test_copying_takes_so_long_and_no_longer() -> None:
    sync = FileSyncHarness(sync_timeout=0.01)
    sync.sandbox.waiting = asyncio.Event()
    changes = await sync.capture_files("0", [entry("a"), entry("b")], a=[b"a"], b=[b"b"])
    assert (changes.changed, changes.mark) == ([], "0")
    sync.sandbox.waiting = None
    changes = await sync.capture("0")
    assert ([record.path for record in changes.changed], changes.mark) == (["a", "b"], "1")


async def test_a_whole_listing_finds_what_changed() -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a"), entry("b"), entry("c")], a=[b"a"], b=[b"b"], c=[b"c"])
    sync.sandbox.listed = [entry("a"), entry("b", modified_ns=2)]
    changes = await sync.capture("forgotten")
    assert [record.path for record in changes.changed] == ["b"]
    assert {record.path for record in await sync.store.list_container_files("cntr_1")} == {"a", "b"}


@pytest.mark.parametrize("change", [entry("a", changed_ns=2, inode=1), entry("a", changed_ns=1, inode=2)])
@pytest.mark.parametrize("complete", [False, True])
async def test_a_change_that_kept_size_and_time_is_copied(change: FileEntry, complete: bool) -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a", changed_ns=1, inode=1)], a=[b"a"])
    sync.sandbox.complete = complete
    changes = await sync.capture_files("1", [change], a=[b"b"])
    assert [record.path for record in changes.changed] == ["a"]
    assert [*sync.blobs.contents.values()] == [b"b"]
    assert (await sync.capture("1")).changed == []


async def test_what_was_only_given_another_mode_or_name_was_not_written() -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a", changed_ns=1, inode=1)], a=[b"a"])
    moved = [entry("a", changed_ns=2, inode=1)]
    assert (await sync.capture_files("1", moved, a=[b"a"])).changed == []
    assert (await sync.capture_files("1", moved)).changed == []  # and it is not read again
    changes = await sync.capture_files("1", [entry("a", modified_ns=3, changed_ns=3, inode=1)], a=[b"a"])
    assert [record.path for record in changes.changed] == ["a"]


async def test_a_server_that_tells_no_change_times_is_taken_at_its_word() -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a")], a=[b"a"])
    assert (await sync.capture_files("1", [entry("a")])).changed == []


async def test_a_file_from_the_beginning_of_time_is_in_its_sandbox() -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a", modified_ns=0, changed_ns=1, inode=1)], a=[b"a"])
    assert (await sync.capture("1")).changed == []
    await sync.capture_files("1", [])
    assert await sync.store.list_container_files("cntr_1") == []


async def test_a_listing_that_is_cut_deletes_nothing() -> None:
    sync = FileSyncHarness()
    await sync.capture_files("", [entry("a"), entry("b")], a=[b"a"], b=[b"b"])
    sync.sandbox.truncated = True
    assert (await sync.capture_files("1", [entry("a")])).changed == []
    assert len(await sync.store.list_container_files("cntr_1")) == 2


async def test_a_listing_tells_of_deletions_that_nobody_knows() -> None:
    sync = FileSyncHarness()
    sync.sandbox.complete, sync.sandbox.deleted = False, ["never", "../x"]
    assert (await sync.capture("1")).changed == []


# --- back into a sandbox ------------------------------------------------------------------------------------


async def test_a_copy_that_is_gone_is_missed_and_not_fatal() -> None:
    async with container_harness(
        ScriptedExecution("x", [WriteFile("a", b"a"), WriteFile("b", b"b")]), ScriptedExecution("y")
    ) as harness:
        container = await harness.open()
        outcome = await harness.run(container, "x")
        await harness.blobs.delete(outcome.files[0].blob)
        assert await harness.content(container, "a") == b"a"  # the sandbox still has it
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        outcome = await harness.run(container, "y")
        assert outcome.notes[1:] == ["These files are gone: a."]
        assert await harness.paths(container) == ["b"]


async def test_large_files_come_back_in_pieces() -> None:
    large = bytes(range(256)) * 8192
    async with container_harness(
        ScriptedExecution("x", [WriteFile("large", large)]), ScriptedExecution("y"), ScriptedExecution("z")
    ) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        assert (await harness.run(container, "y")).paths == []
        assert (await harness.sandbox(container)).files.read_file("large") == large
        assert (await harness.run(container, "z")).paths == []
