"""Contents that the kits send: streams that end or fail, and archives."""

import io
import tarfile
import zipfile
from collections.abc import AsyncGenerator, Mapping

import pytest

from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat
from fumehood.testing.fakes.memory_sandbox_files import find_zstd


async def stream_chunks(*chunks: bytes) -> AsyncGenerator[bytes]:
    for chunk in chunks:
        yield chunk


class SourceError(Exception):
    """Raised by the stream of the caller, which gets it back unchanged."""


async def fail_midway(content: bytes = b"half") -> AsyncGenerator[bytes]:
    yield content
    raise SourceError


def build_archive(kind: ArchiveFormat, members: Mapping[str, bytes]) -> bytes:
    """Return an archive with these files. Names are not checked."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, content in members.items():
                zipped.writestr(zipfile.ZipInfo(name), content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz" if kind == "tar.gz" else "w:") as tarred:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tarred.addfile(info, io.BytesIO(content))
    if kind != "tar.zst":
        return buffer.getvalue()
    zstd = find_zstd()
    if zstd is None:
        pytest.skip("tar.zst needs Python 3.14 or backports.zstd")
    return zstd.compress(buffer.getvalue())
