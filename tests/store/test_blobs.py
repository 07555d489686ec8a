"""Blobs on a disk; imports the store."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fumehood.store.blobs import DirectoryBlobs


async def content_of(blobs: DirectoryBlobs, name: str) -> bytes:
    return b"".join([piece async for piece in blobs.read(name)])


async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


async def test_bytes_and_pieces_have_one_name(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "blobs")
    name = await blobs.put(b"abc")
    assert name == hashlib.sha256(b"abc").hexdigest()
    assert await blobs.put(in_pieces(b"a", b"", b"bc")) == name
    assert await content_of(blobs, name) == b"abc"
    (file,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert file.stat().st_mode & 0o777 == 0o600


async def test_large_and_empty(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    large = os.urandom(3 << 20)
    assert await content_of(blobs, await blobs.put(large)) == large
    assert await content_of(blobs, await blobs.put(b"")) == b""


async def test_what_is_not_there(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "blobs")
    (tmp_path / "secret").write_text("x")
    for name in ("0" * 64, "../secret", "", "ab/../../secret", "A" * 64):
        with pytest.raises(KeyError):
            await content_of(blobs, name)
        await blobs.delete(name)
    assert (tmp_path / "secret").exists()


async def test_deleted(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    name = await blobs.put(b"x")
    await blobs.delete(name)
    await blobs.delete(name)
    with pytest.raises(KeyError):
        await content_of(blobs, name)


async def test_a_source_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("gone")

    blobs = DirectoryBlobs(tmp_path)
    with pytest.raises(ValueError, match="gone"):
        await blobs.put(broken())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


async def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    kept = await DirectoryBlobs(tmp_path).put(b"kept")
    (tmp_path / "unfinished" / "x").write_text("half")
    blobs = DirectoryBlobs(tmp_path)
    assert not list((tmp_path / "unfinished").iterdir())
    assert await content_of(blobs, kept) == b"kept"
