"""`DiskBlobStore`, beyond its kit."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import override

import pytest

from fumehood.protocol.openai.api_errors import StorageUnavailable
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.testing.conformance_kits.payloads import stream_chunks
from tests.support.small_disk import mount_small_disk

ROOT = Path(__file__).resolve().parents[2]

UPLOAD = """
import asyncio, sys
from pathlib import Path
from fumehood.store.disk_blob_store import DiskBlobStore
async def forever():
    while True:
        yield b"x" * (1 << 20)
        print("more", flush=True)
        await asyncio.sleep(0)
asyncio.run(DiskBlobStore(Path(sys.argv[1])).put(forever()))
"""


UPLOAD_MANY = """
import asyncio, sys
from pathlib import Path
from fumehood.store.disk_blob_store import DiskBlobStore
async def forever(names):
    print("more", flush=True)
    await asyncio.Event().wait()
asyncio.run(DiskBlobStore(Path(sys.argv[1])).put_many([b"%d" % number for number in range(20)], forever))
"""


def _list_files(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


async def test_a_blob_is_the_owners_alone_under_two_levels(tmp_path: Path) -> None:
    blobs = DiskBlobStore(tmp_path / "blobs")
    name = await blobs.put(b"content")
    (file,) = _list_files(tmp_path / "blobs")
    assert file == Path(name[:2], name[2:4], name)
    assert (tmp_path / "blobs" / file).stat().st_mode & 0o777 == 0o600
    for directory in (tmp_path / "blobs").rglob("*"):
        assert not directory.is_dir() or directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [1, 20])
async def test_an_upload_that_is_cancelled_leaves_nothing(tmp_path: Path, number: int) -> None:
    blobs = DiskBlobStore(tmp_path)
    waiting = asyncio.Event()

    async def wait_forever(names: Sequence[str] = ("streamed",)) -> None:
        assert len(names) == number
        waiting.set()
        await asyncio.Event().wait()

    async def stream() -> AsyncGenerator[bytes]:
        yield b"x" * 3_000_000
        await wait_forever()

    upload = asyncio.create_task(
        blobs.put(stream())
        if number == 1
        else blobs.put_many([bytes([content]) for content in range(number)], wait_forever)
    )
    await waiting.wait()
    assert len(_list_files(tmp_path)) == number
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    await asyncio.get_running_loop().shutdown_default_executor()
    assert _list_files(tmp_path) == []
    assert [*(tmp_path / "incoming").iterdir()] == []


async def test_a_download_that_is_cancelled_closes_nothing_under_a_thread_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(io.FileIO):
        @override
        def read(self, size: int | None = -1, /) -> bytes:
            reading.set()
            go_on.wait()
            return b"" if self.closed else super().read(size)

    blobs = DiskBlobStore(tmp_path)
    name = await blobs.put(b"content")
    opened: list[Slow] = []

    def opens(path: Path, *_: object, **__: object) -> Slow:
        opened.append(Slow(path))
        return opened[-1]

    monkeypatch.setattr(Path, "open", opens)
    chunks = blobs.read(name)
    download = asyncio.ensure_future(anext(chunks))
    await asyncio.to_thread(reading.wait)
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    closed_too_early = opened[0].closed
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (closed_too_early, opened[0].closed) == (False, True)


@pytest.mark.parametrize(("program", "number"), [(UPLOAD, 1), (UPLOAD_MANY, 20)])
async def test_what_a_dead_process_left_is_swept_and_nothing_else(
    tmp_path: Path, program: str, number: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline)
    incoming = _list_files(tmp_path)
    assert len(incoming) == number
    blobs = DiskBlobStore(tmp_path)
    assert _list_files(tmp_path) == incoming, "it lives"
    name = await blobs.put(b"kept")
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.communicate)
    assert len(_list_files(tmp_path)) == number + 1
    DiskBlobStore(tmp_path)
    assert [path.name for path in _list_files(tmp_path)] == [name]
    assert [*(tmp_path / "incoming").iterdir()] == []


async def test_the_source_s_errors_stay_its_own(tmp_path: Path) -> None:
    async def broken() -> AsyncGenerator[bytes]:
        yield b"x"
        raise ConnectionResetError("the client is gone")

    with pytest.raises(ConnectionResetError):
        await DiskBlobStore(tmp_path).put(broken())


async def test_what_is_to_stay_free_is_left_alone(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    spare = disk.f_blocks * disk.f_frsize  # more than is ever free
    arrived = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal arrived
        while True:
            arrived += 1 << 16
            yield bytes(1 << 16)

    for content in (b"x", endless()):
        with pytest.raises(StorageUnavailable, match="No space left on device except the reserve"):
            await DiskBlobStore(tmp_path, min_free_bytes=spare).put(content)
    with pytest.raises(StorageUnavailable, match="No space left on device except the reserve"):
        await DiskBlobStore(tmp_path, min_free_bytes=spare).put_many([b"x", b"y"])
    assert arrived <= 2 << 20
    assert _list_files(tmp_path) == []
    await DiskBlobStore(tmp_path, min_free_bytes=1).put(b"x")
    assert len(_list_files(tmp_path)) == 1


async def test_a_blob_deleted_while_it_is_put_again_exists(tmp_path: Path) -> None:
    """A batch skips an existing blob, which is deleted before the batch is published."""
    blobs = DiskBlobStore(tmp_path)
    contents = [bytes([number]) for number in range(20)]
    names = await blobs.put_many(contents)

    async def lose(_: Sequence[str]) -> None:
        await blobs.delete(*names[5:7])

    assert await blobs.put_many(contents, lose) == names
    assert await blobs.read_many(names) == contents


@pytest.mark.root
async def test_a_disk_without_space(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path, "1m"):
        blobs = DiskBlobStore(tmp_path / "blobs")
        for content in (b"x" * 2_000_000, stream_chunks(b"x" * 1_500_000, b"y" * 1_500_000)):
            with pytest.raises(StorageUnavailable, match="No space left on device"):
                await blobs.put(content)
        with pytest.raises(StorageUnavailable, match="No space left on device"):
            await blobs.put_many([bytes([number]) * 10_000 for number in range(250)])
        await asyncio.get_running_loop().shutdown_default_executor()
        assert _list_files(tmp_path) == []
