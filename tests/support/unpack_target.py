"""Unpacks archives into a directory of the test and lists the result."""

import contextlib
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.sandbox_server.inside.files import archive_unpacker, file_bundles
from fumehood.sandbox_server.inside.files.archive_unpacker import UnpackLimits, UnpackOutcome
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused, WriteQuota


class GrantedPermit(WriteQuota):
    """Grants reservations up to `quota` bytes."""

    def __init__(self, quota: int = 1 << 40) -> None:
        self.quota = quota
        self.received = -1

    def reserve(self, size: int) -> None:
        if size > self.quota:
            raise FileTaskRefused("no quota left")
        self.quota -= size

    def confirm_complete(self, received: int) -> None:
        self.received = received


LIMITS = UnpackLimits(members=1000, size=64 << 20)


@contextlib.contextmanager
def feed_pipe(body: bytes) -> Generator[int]:
    """Yield the read end of a pipe that delivers `body`."""
    reader, writer = os.pipe()

    def feed() -> None:
        with os.fdopen(writer, "wb", 0) as file, contextlib.suppress(BrokenPipeError):
            for at in range(0, len(body), 4096):
                file.write(body[at : at + 4096])

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield reader
    finally:
        os.close(reader)
        feeder.join()


@dataclass
class UnpackTarget:
    """A data directory to unpack into, open as `fd`."""

    data: Path
    fd: int

    def unpack(
        self,
        body: bytes,
        kind: str,
        into: str = "",
        limits: UnpackLimits | None = None,
        permit: GrantedPermit | None = None,
    ) -> UnpackOutcome:
        with feed_pipe(body) as source:
            return archive_unpacker.unpack_archive(
                self.fd,
                source,
                kind=kind,
                into=into,
                token="token",
                limits=limits or LIMITS,
                permit=permit or GrantedPermit(),
            )

    def receive(
        self, body: bytes, limits: UnpackLimits | None = None, permit: GrantedPermit | None = None
    ) -> UnpackOutcome:
        with feed_pipe(body) as source:
            return file_bundles.receive_files(
                self.fd, source, token="token", limits=limits or LIMITS, permit=permit or GrantedPermit()
            )

    def tree(self) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = {}
        for path in sorted(self.data.rglob("*")):
            name = str(path.relative_to(self.data))
            found[name] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        return found


def expect_refusal(
    target: UnpackTarget, body: bytes, kind: str, reason: str, limits: UnpackLimits | None = None
) -> FileTaskRefused:
    before = target.tree()
    with pytest.raises(FileTaskRefused, match=reason) as caught:
        target.unpack(body, kind, limits=limits)
    assert target.tree() == before, "something of a refused archive is there"
    return caught.value
