"""What every implementation of `BlobStore` must pass; imports pytest and `interfaces`.

Give a test class the fixture `blobs` and inherit from `BlobKit`.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator

import pytest

from fumehood.interfaces import BlobStore


async def whole(blobs: BlobStore, name: str) -> bytes:
    return b"".join([piece async for piece in blobs.read(name)])


async def _pieces(*pieces: bytes) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


class BlobKit:
    async def test_what_went_in_comes_out(self, blobs: BlobStore) -> None:
        for content in (b"", b"x", bytes(range(256)) * 20_000):
            name = await blobs.put(content)
            assert name == hashlib.sha256(content).hexdigest()
            assert await whole(blobs, name) == content

    async def test_pieces_are_one_blob(self, blobs: BlobStore) -> None:
        pieces = [b"a" * 700_000, b"", b"b" * 700_000, b"c"]
        name = await blobs.put(_pieces(*pieces))
        assert name == await blobs.put(b"".join(pieces))
        assert await whole(blobs, name) == b"".join(pieces)
        assert await blobs.put(_pieces()) == await blobs.put(b"")

    async def test_a_deleted_blob_is_gone(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"gone")
        kept = await blobs.put(b"kept")
        await blobs.delete(name)
        await blobs.delete(name)
        with pytest.raises(KeyError):
            await anext(blobs.read(name))
        assert await whole(blobs, kept) == b"kept"
        assert await blobs.put(b"gone") == name
        assert await whole(blobs, name) == b"gone"

    async def test_other_names_are_nobodys(self, blobs: BlobStore) -> None:
        real = await blobs.put(b"real")
        for name in (
            "",
            "..",
            "../secret",
            "/etc/passwd",
            real.upper(),
            real + "\n",
            real[:-1],
            "\0",
            "\udcff",
        ):
            with pytest.raises(KeyError):
                await anext(blobs.read(name))
            await blobs.delete(name)
        assert await whole(blobs, real) == b"real"

    async def test_a_broken_upload_leaves_nothing(self, blobs: BlobStore) -> None:
        async def broken() -> AsyncGenerator[bytes]:
            yield b"x" * 2_000_000
            raise RuntimeError("the client is gone")

        with pytest.raises(RuntimeError, match="gone"):
            await blobs.put(broken())
        with pytest.raises(KeyError):
            await anext(blobs.read(hashlib.sha256(b"x" * 2_000_000).hexdigest()))

    async def test_many_at_once(self, blobs: BlobStore) -> None:
        contents = [bytes([number % 10]) * 50_000 for number in range(40)]
        names = await asyncio.gather(*(blobs.put(_pieces(content)) for content in contents))
        assert len(set(names)) == 10
        found = await asyncio.gather(*(whole(blobs, name) for name in names))
        assert found == contents

    async def test_reading_can_be_left(self, blobs: BlobStore) -> None:
        name = await blobs.put(b"y" * 3_000_000)
        reading = blobs.read(name)
        assert (await anext(reading)).startswith(b"y")
        await reading.aclose()
        assert len(await whole(blobs, name)) == 3_000_000
