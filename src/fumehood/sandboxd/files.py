"""Files of a live sandbox, whole in memory until the streaming ones are here; imports siblings."""

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Self

from fumehood.protocol.sandbox import ArchiveFormat, FileEntry, FileListing, Unpacked
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, TooLarge
from fumehood.sandboxd.sandbox import LocalSandbox

_MOST = 64 << 20


class OpenFile:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    async def chunks(self) -> AsyncGenerator[bytes]:
        yield self._content

    def close(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class SandboxFiles:
    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox

    async def list(self, since: str | None = None) -> FileListing:
        del since
        found, cut = await self._sandbox.list_files()
        return FileListing(files=found, mark="0", truncated=cut)

    async def open(self, path: str) -> OpenFile:
        try:
            return OpenFile(await self._sandbox.read_file(path, limit=_MOST))
        except FileRefused as error:
            raise self._missing(error) from error

    async def write(
        self, path: str, content: bytes | AsyncIterable[bytes], *, limit: int | None = None
    ) -> FileEntry:
        if not isinstance(content, bytes):
            taken = bytearray()
            async for chunk in content:
                taken += chunk
                if len(taken) > (_MOST if limit is None else limit):
                    raise TooLarge(f"{path} is too large.")
            content = bytes(taken)
        await self._sandbox.write_file(path, content)
        found, _ = await self._sandbox.list_files()
        return next(entry for entry in found if entry.path == path)

    async def delete(self, path: str) -> None:
        try:
            await self._sandbox.delete_file(path)
        except FileRefused as error:
            raise self._missing(error) from error

    async def unpack(
        self,
        content: bytes | AsyncIterable[bytes],
        *,
        kind: ArchiveFormat,
        into: str = "",
        limit: int | None = None,
    ) -> Unpacked:
        del content, kind, into, limit
        raise FileRefused("Archives cannot be unpacked yet.")

    def _missing(self, error: FileRefused) -> Exception:
        return FileNotFound(error.message) if "No such file" in error.message else error
