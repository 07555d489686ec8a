"""Files in and out of real sandboxes: streams, snapshot tokens, limits, failures midway."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.bundle_encoding import (
    BundleContent,
    BundledFile,
    ReadFilesResponseDecoder,
    encode_bundle,
)
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxFileNotFound,
    SandboxGone,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.host.resource_allocator import ResourceAllocator, SandboxResources
from fumehood.sandbox_server.inside.files import untrusted_files
from fumehood.sandbox_server.inside.files.untrusted_files import MAX_ENTRIES, FileStat
from fumehood.sandbox_server.supervisor import sandbox_files
from fumehood.sandbox_server.supervisor.sandbox_files import FileSnapshots
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import has_cgroups, run, settings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_cgroups = pytest.mark.skipif(not has_cgroups(), reason="no cgroup is delegated to this user")
PIECE = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor() -> AsyncIterator[Supervisor]:
    async with Supervisor(settings(preload=(), transfer_idle_timeout=1.5, file_bytes=2 << 30)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create()
    yield made
    await made.destroy()


async def list_names(sandbox: SandboxInstance) -> list[str]:
    """Everything in the data directory, as the code sees it."""
    result = (await run(sandbox, "import os; sorted(os.listdir('/mnt/data'))")).result
    assert result is not None
    return eval(result)


class Source:
    """Gives so many pieces, and stops for a sign after some of them."""

    def __init__(self, pieces: int, stop_after: int | None = None) -> None:
        self._pieces = pieces
        self._stop_after = stop_after
        self._piece = os.urandom(PIECE)
        self.stopped = asyncio.Event()
        self.go_on = asyncio.Event()
        self.highest = 0

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for number in range(self._pieces):
            if number == self._stop_after:
                self.stopped.set()
                await self.go_on.wait()
            self.highest = max(self.highest, resident())
            yield self._piece


async def _files(source: Source) -> AsyncGenerator[Sequence[BundledFile]]:
    number = 0
    async for piece in source:
        yield [(f"new/{number}", piece)]
        number += 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- in ---------------------------------------------------------------------------------------------------------


async def _large_upload(sandbox: SandboxInstance, mebibytes: int) -> None:
    cgroup = sandbox.resources.cgroup
    assert cgroup is not None
    source = Source(mebibytes)
    await sandbox.files.write("warm", Source(1))
    charged, before = cgroup.memory_current(), resident()
    entry = await sandbox.files.write("large", source)
    assert entry.size == mebibytes << 20
    assert source.highest - before < 24 << 20, "the supervisor gathers what it passes on"
    assert cgroup.memory_current() - charged > (mebibytes << 20) * 9 // 10
    assert (await sandbox.files.list()).files[0].size == entry.size
    async with await sandbox.files.open("large") as file:
        received = 0
        async for chunk in file.chunks():
            received += len(chunk)
            source.highest = max(source.highest, resident())
    assert received == entry.size
    assert source.highest - before < 24 << 20


@needs_cgroups
async def test_uploads_keep_the_supervisor_small_and_are_charged_to_the_sandbox(
    sandbox: SandboxInstance,
) -> None:
    await _large_upload(sandbox, 64)


@pytest.mark.slow
@needs_cgroups
async def test_a_gibibyte(supervisor: Supervisor) -> None:
    await _large_upload(await supervisor.create(SandboxSpec(memory="4g")), 1024)


async def test_a_stream_arrives_as_it_was(sandbox: SandboxInstance) -> None:
    pieces = [b"", b"a", os.urandom(PIECE + 1), b"", os.urandom(777)]

    async def content() -> AsyncGenerator[bytes]:
        for piece in pieces:
            yield piece

    entry = await sandbox.files.write("d/f", content())
    whole = b"".join(pieces)
    assert entry.size == len(whole)
    assert await sandbox.files.read("d/f", limit=1 << 30) == whole
    listed = (await sandbox.files.list()).files
    assert listed == [entry]
    assert (await sandbox.files.write("d/f", b"")).size == 0


async def test_an_upload_over_the_limit_leaves_nothing(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", b"old")
    for content in (Source(5), bytes(5 * PIECE)):
        with pytest.raises(SandboxPayloadTooLarge, match="f: larger than 3000000 bytes"):
            await sandbox.files.write("f", content, limit=3_000_000)
    assert await list_names(sandbox) == ["f"]
    assert await sandbox.files.read("f", limit=10) == b"old"


async def test_a_cancelled_upload_leaves_nothing(sandbox: SandboxInstance) -> None:
    source = Source(10, stop_after=5)
    upload = asyncio.create_task(sandbox.files.write("new/f", source))
    await source.stopped.wait()
    assert (await sandbox.files.list()).files == [], "an unfinished file is listed"
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await list_names(sandbox) == []
    assert (await sandbox.files.write("new/f", b"x")).size == 1


async def test_a_source_that_fails_leaves_nothing(sandbox: SandboxInstance) -> None:
    async def content() -> AsyncGenerator[bytes]:
        yield bytes(PIECE)
        raise ConnectionError("the client went away")

    with pytest.raises(ConnectionError):
        await sandbox.files.write("f", content())
    with pytest.raises(ConnectionError):
        await sandbox.files.unpack(content(), kind="zip")
    assert await list_names(sandbox) == []


async def test_a_source_that_gives_nothing_is_given_up(sandbox: SandboxInstance) -> None:
    with pytest.raises(FileRefused, match="f: nothing of it arrived for"):
        await sandbox.files.write("f", Source(3, stop_after=1))
    assert await list_names(sandbox) == []


async def test_slow_uploads_do_not_hold_up_the_rest(sandbox: SandboxInstance) -> None:
    sources = [Source(2, stop_after=1) for _ in range(3)]
    uploads = [
        asyncio.create_task(sandbox.files.write(f"f{number}", source))
        for number, source in enumerate(sources)
    ]
    await sources[0].stopped.wait()
    await sources[1].stopped.wait()
    await asyncio.wait_for(sandbox.files.list(), 3)
    with pytest.raises(SandboxFileNotFound):
        await asyncio.wait_for(sandbox.files.delete("none"), 3)
    for source in sources:
        source.go_on.set()
    assert [entry.size for entry in await asyncio.gather(*uploads)] == [2 * PIECE] * 3


@needs_cgroups
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("do", ["write", "unpack", "receive"])
async def test_a_helper_that_is_killed_or_frozen_leaves_nothing(
    sandbox: SandboxInstance, how: signal.Signals, do: str
) -> None:
    """As by the kernel for want of memory, or by anything that stops it: the upload ends, and what it left goes."""
    cgroup = sandbox.resources.cgroup
    assert cgroup is not None
    before = set(cgroup.processes())
    source = Source(30, stop_after=10)

    async def upload() -> None:
        match do:
            case "write":
                await sandbox.files.write("f", source)
            case "unpack":
                await sandbox.files.unpack(source, kind="zip")
            case _:
                await sandbox.files.write_bundle(encode_bundle(_files(source)))

    uploading = asyncio.create_task(upload())
    await source.stopped.wait()
    (helper,) = set(cgroup.processes()) - before
    try:
        os.kill(helper, how)
    except PermissionError:
        pytest.skip("the helper is another user's")
    source.go_on.set()
    with pytest.raises(FileRefused, match=r"helper ended|took nothing of it for"):
        await asyncio.wait_for(uploading, 30)
    assert await list_names(sandbox) == []
    await wait_until(lambda: set(cgroup.processes()) == before)


async def test_a_sandbox_that_ends_meanwhile(sandbox: SandboxInstance) -> None:
    source = Source(10, stop_after=5)
    upload = asyncio.create_task(sandbox.files.write("f", source))
    await source.stopped.wait()
    await sandbox.destroy()
    with pytest.raises(SandboxGone):
        await asyncio.wait_for(upload, 10)
    with pytest.raises(SandboxGone):
        await sandbox.files.unpack(b"", kind="tar")


@needs_cgroups
async def test_an_upload_larger_than_the_memory_left_is_refused_before_the_kernel_acts(
    sandbox: SandboxInstance,
) -> None:
    program = """
import os
kept, memory = "kept", os.memfd_create("m")
size = 0
while size < (1 << 30) - (100 << 20): size += os.write(memory, bytes(1 << 20))
"""
    await run(sandbox, program)
    assert sandbox.resources.cgroup is not None
    for _ in range(2):
        with pytest.raises(FileRefused, match="does not fit into the sandbox's memory"):
            await sandbox.files.write("f", Source(200))
    assert await list_names(sandbox) == []
    assert (await run(sandbox, "kept")).result == "'kept'"
    assert sandbox.resources.cgroup.oom_kills() == 0
    assert (await sandbox.files.write("f", Source(20))).size == 20 * PIECE


async def test_parents_of_a_failed_upload_are_not_made(sandbox: SandboxInstance) -> None:
    await run(sandbox, "import os; os.makedirs('d/is-a-directory')")
    for path in ("d/is-a-directory", "d"):
        with pytest.raises(FileRefused, match="Is a directory"):
            await sandbox.files.write(path, b"x")
    with pytest.raises(SandboxPayloadTooLarge):
        await sandbox.files.write("e/f/g", Source(2), limit=PIECE)
    assert await list_names(sandbox) == ["d"]


async def test_our_own_names(sandbox: SandboxInstance) -> None:
    await run(sandbox, "open('.fumehood-mine', 'w').close(); open('.hidden', 'w').close()")
    assert [entry.path for entry in (await sandbox.files.list()).files] == [".hidden"]
    for action in (
        sandbox.files.write(".fumehood-x", b""),
        sandbox.files.open(".fumehood-mine"),
        sandbox.files.delete(".fumehood-mine"),
        sandbox.files.unpack(b"", kind="tar", into=".fumehood-x/y"),
    ):
        with pytest.raises(FileRefused, match="server's own"):
            await action


# ---- many at once -----------------------------------------------------------------------------------------------


async def read_many(sandbox: SandboxInstance, paths: Sequence[str]) -> list[BundleContent]:
    answers = ReadFilesResponseDecoder(paths)
    found = [content async for piece in sandbox.files.read_bundle(paths) for content in answers.feed(piece)]
    answers.finish()
    return found


@pytest_asyncio.fixture(loop_scope="module", params=["the supervisor reads", "a helper reads"])
async def either(
    supervisor: Supervisor, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SandboxInstance]:
    """As for files in memory, and as for those in a pod or on a disk."""
    take = ResourceAllocator.allocate

    def unreadable(*arguments: Any) -> SandboxResources:
        return replace(take(*arguments), directly_readable=False)

    if request.param == "a helper reads":
        monkeypatch.setattr(ResourceAllocator, "allocate", unreadable)
    made = await supervisor.create()
    yield made
    await made.destroy()


async def test_many_files_are_read_in_order(either: SandboxInstance) -> None:
    program = """
import os
for i in range(3000): open(f"f{i}", "w").write(str(i) * (i % 100))
os.symlink("f1", "link"); os.mkfifo("pipe"); os.symlink("/etc", "etc"); os.mkdir("d")
"""
    await run(either, program)
    paths = ["link", "pipe", "etc/passwd", "d", "../x", "none", *(f"f{number}" for number in range(3000))]
    found = await read_many(either, paths)
    assert [type(one) for one in found[:6]] == [*[FileRefused] * 5, SandboxFileNotFound]
    assert found[6:] == [str(number).encode() * (number % 100) for number in range(3000)]
    assert await read_many(either, []) == []


async def test_leaving_many_files_half_read_ends_what_reads(either: SandboxInstance) -> None:
    await either.files.write("f", bytes(PIECE))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        reading = either.files.read_bundle(["f"] * 200)
        assert await anext(reading)
        await reading.aclose()
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert await read_many(either, ["f"]) == [bytes(PIECE)]


async def test_many_files_while_code_replaces_them(either: SandboxInstance) -> None:
    """Whatever code does meanwhile, what comes is from below the data directory, or refused for itself."""
    program = """
import os, threading, time
for i in range(50): open(f"f{i}", "w").write("mine")
os.symlink("/etc/passwd", "link")
stop = False
def swap():
    while not stop:
        for i in range(50):
            os.rename("link", f"f{i}") if os.path.lexists("link") else None
            os.symlink("/etc/passwd", "link")
            open("new", "w").write("mine"); os.rename("new", f"f{i}")
threading.Thread(target=swap, daemon=True).start()
"""
    await run(either, program)
    for _ in range(10):
        for content in await read_many(either, [f"f{number}" for number in range(50)] * 4):
            assert content in (b"mine", b"") or isinstance(content, FileRefused | SandboxFileNotFound)
    written = await either.files.write_bundle(
        encode_bundle(
            _batch(
                [(f"f{number % 50}/x" if number % 3 else f"f{number % 50}", b"mine") for number in range(150)]
            )
        )
    )
    assert written.files + written.refused == 150


async def _batch(files: Sequence[BundledFile]) -> AsyncGenerator[Sequence[BundledFile]]:
    yield files


async def test_more_files_than_the_quota_takes(sandbox: SandboxInstance) -> None:
    """What fits is there and whole; the rest is told by name, with the reason."""
    whole = os.urandom(PIECE)
    many = [(f"d{number % 5}/{number}", whole) for number in range(700)]

    async def sent() -> AsyncGenerator[Sequence[BundledFile]]:
        for one in many:
            yield [one]

    written = await sandbox.files.write_bundle(encode_bundle(sent()))
    assert written.refused > 0
    assert written.files + written.refused == 700
    assert any("No space left on device" in reason or "memory" in reason for reason in written.reasons)
    listing = await sandbox.files.list()
    assert len(listing.files) == written.files
    assert {file.size for file in listing.files} == {PIECE}
    assert (await run(sandbox, "1 + 1")).result == "2"


async def test_more_files_than_inodes() -> None:
    async with Supervisor(settings(preload=(), inodes=400)) as small:
        sandbox = await small.create()
        written = await sandbox.files.write_bundle(
            encode_bundle(_batch([(f"{number}", b"x") for number in range(600)]))
        )
        assert 0 < written.files < 400
        assert written.files + written.refused == 600
        assert "No space left on device" in written.reasons[0]
        assert len((await sandbox.files.list()).files) == written.files


async def test_many_files_of_which_the_sender_leaves(sandbox: SandboxInstance) -> None:
    source = Source(10, stop_after=5)
    upload = asyncio.create_task(sandbox.files.write_bundle(encode_bundle(_files(source))))
    await source.stopped.wait()
    assert (await sandbox.files.list()).files == []
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await list_names(sandbox) == []


# ---- out --------------------------------------------------------------------------------------------------------


async def test_what_is_not_there(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", b"x")
    for path in ("none", "none/none", "f/below"):
        with pytest.raises(SandboxFileNotFound, match=path):
            await sandbox.files.open(path)
        with pytest.raises(SandboxFileNotFound, match=path):
            await sandbox.files.delete(path)


async def test_a_file_that_grows_while_it_is_read(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", b"x" * (3 * PIECE))
    async with await sandbox.files.open("f") as file:
        await run(sandbox, "open('f', 'ab').write(b'y' * (1 << 20))")
        assert await file.read() == b"x" * (3 * PIECE)


async def test_a_file_that_shrinks_while_it_is_read(sandbox: SandboxInstance) -> None:
    """Nothing is made up for what is missing: the reader hears of it before the promised size has come."""
    await sandbox.files.write("f", b"x" * (3 * PIECE))
    received = 0

    async def read_all() -> None:
        nonlocal received
        async for chunk in file.chunks():
            received += len(chunk)

    async with await sandbox.files.open("f") as file:
        await run(sandbox, "import os; os.truncate('f', 1 << 20)")
        with pytest.raises(FileRefused, match="f: it became shorter while it was read"):
            await read_all()
    assert received == PIECE


async def test_a_file_that_is_replaced_or_deleted_while_it_is_read(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", b"old")
    async with await sandbox.files.open("f") as file:
        await sandbox.files.write("f", b"new and longer")
        await sandbox.files.delete("f")
        assert await file.read() == b"old"


async def test_an_abandoned_read_closes_its_file(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", bytes(4 * PIECE))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        async with await sandbox.files.open("f") as file:
            reading = asyncio.create_task(file.read())
            await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        with pytest.raises(ValueError, match="closed"):
            await file.read()
    for _ in range(100):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        await asyncio.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_sparse_file_of_a_tebibyte(sandbox: SandboxInstance) -> None:
    await run(sandbox, "open('sparse', 'wb').truncate(1 << 40)")
    assert (await sandbox.files.list()).files[0].size == 1 << 40
    with pytest.raises(SandboxPayloadTooLarge, match="sparse: larger than 2147483648 bytes"):
        await sandbox.files.open("sparse")


# ---- snapshot tokens --------------------------------------------------------------------------------------------


async def test_what_changed_since(sandbox: SandboxInstance) -> None:
    for name in ("kept", "changed", "deleted", "moved"):
        await sandbox.files.write(f"d/{name}", b"old")
    first = await sandbox.files.list()
    assert (first.complete, len(first.files)) == (True, 4)
    await run(
        sandbox,
        "import os; os.unlink('d/deleted'); open('d/changed', 'w').write('new'); open('new', 'w').close()\n"
        "os.rename('d/moved', 'd/there')",
    )
    second = await sandbox.files.list(first.mark)
    assert [entry.path for entry in second.files] == ["d/changed", "d/there", "new"]
    assert second.deleted == ["d/deleted", "d/moved"]
    assert (second.complete, second.truncated) == (False, False)
    third = await sandbox.files.list(second.mark)
    assert (third.files, third.deleted, third.complete) == ([], [], False)
    assert third.mark == second.mark, "an unchanged state keeps its mark"
    assert len((await sandbox.files.list(first.mark)).files) == 3, "an older mark is still known"


HIDDEN_CHANGES = {
    "same size and times": "s = os.stat('f'); open('f', 'r+').write('new')\n"
    "os.utime('f', ns=(s.st_atime_ns, s.st_mtime_ns))",
    "another file": "s = os.stat('f'); open('g', 'w').write('new'); os.utime('g', ns=(s.st_atime_ns, s.st_mtime_ns))\n"
    "os.rename('g', 'f')",
    "made again": "s = os.stat('f'); os.unlink('f'); open('f', 'w').write('new')\n"
    "os.utime('f', ns=(s.st_atime_ns, s.st_mtime_ns))",
    "from the past": "open('f', 'w').write('new'); os.utime('f', (0, 0))",
}


@pytest.mark.parametrize("change", HIDDEN_CHANGES.values(), ids=HIDDEN_CHANGES)
async def test_changes_cannot_be_hidden(sandbox: SandboxInstance, change: str) -> None:
    await sandbox.files.write("f", b"old")
    before = await sandbox.files.list()
    outcome = await run(sandbox, f"import os\n{change}")
    assert outcome.end.status == "ok", outcome
    since = await sandbox.files.list(before.mark)
    assert ([entry.path for entry in since.files], since.complete) == (["f"], False)
    assert since.files != before.files, "whoever has forgotten the mark can tell as well"


async def test_unknown_and_forgotten_marks_give_everything(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("f", b"x")
    first = await sandbox.files.list()
    for mark in ("nonsense", "", "x" * 10_000):
        listing = await sandbox.files.list(mark)
        assert (listing.complete, len(listing.files)) == (True, 1)
    for number in range(sandbox_files.MAX_SNAPSHOTS):
        await sandbox.files.write("f", bytes(number))
        await sandbox.files.list()
    listing = await sandbox.files.list(first.mark)
    assert (listing.complete, listing.deleted) == (True, [])


async def test_a_listing_that_is_cut_is_always_complete(sandbox: SandboxInstance) -> None:
    """What it leaves out may be anything, so nothing can be told from it later."""
    await run(sandbox, f"for i in range({MAX_ENTRIES + 1}): open(str(i), 'w').close()")
    first = await sandbox.files.list()
    assert (first.truncated, first.complete, len(first.files)) == (True, True, MAX_ENTRIES)
    second = await sandbox.files.list(first.mark)
    assert (second.truncated, second.complete, second.deleted) == (True, True, [])


async def test_marks_are_bounded() -> None:
    kept = FileSnapshots()
    large = [FileStat(f"{number:05}" + "x" * 300, 1, 1, 1, 1, 1) for number in range(10_000)]
    tokens = [kept.add([FileStat("f", number, 1, 1, 1, 1), *large]) for number in range(20)]
    assert kept.get(tokens[-1]) is not None
    assert len(kept) < sandbox_files.MAX_SNAPSHOTS
    assert kept.get(kept.add([FileStat("y" * (17 << 20), 1, 1, 1, 1, 1)])) is None


async def test_a_listing_never_strays_into_a_neighbour(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that ends during a walk gives its descriptor's number to the next one."""
    ended, walk = threading.Event(), untrusted_files.list_files

    def walk_late(data_fd: int) -> untrusted_files.DirectoryListing:
        ended.wait(20)
        return walk(data_fd)

    monkeypatch.setattr(untrusted_files, "list_files", walk_late)
    ending = await supervisor.create()
    await ending.files.write("mine", b"")
    listing = asyncio.create_task(ending.files.list())
    await asyncio.sleep(0.1)
    await ending.destroy()
    neighbours = [await supervisor.create() for _ in range(2)]
    for neighbour in neighbours:
        await neighbour.files.write("theirs", b"")
    ended.set()
    assert [file.path for file in (await listing).files] in ([], ["mine"])
    for neighbour in neighbours:
        await neighbour.destroy()
