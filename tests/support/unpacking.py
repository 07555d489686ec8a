"""Unpacks archives in a directory of the test's own, and looks what is there; imports `fumehood.sandboxd.inside`."""

import contextlib
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.sandboxd.inside import archives, bundles
from fumehood.sandboxd.inside.archives import Bounds, Done
from fumehood.sandboxd.inside.leave import Refused


class Granted:
    """Leave that is given until so many bytes were taken."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.received = -1

    def take(self, size: int) -> None:
        if size > self.room:
            raise Refused("no room")
        self.room -= size

    def settle(self, received: int) -> None:
        self.received = received


BOUNDS = Bounds(members=1000, size=64 << 20)


@contextlib.contextmanager
def fed(body: bytes) -> Generator[int]:
    """A pipe through which it comes."""
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
class Place:
    """A data directory with something beside it that must stay as it is."""

    data: Path
    fd: int

    def unpack(
        self,
        body: bytes,
        kind: str,
        into: str = "",
        bounds: Bounds | None = None,
        leave: Granted | None = None,
    ) -> Done:
        with fed(body) as source:
            return archives.unpack(
                self.fd,
                source,
                kind=kind,
                into=into,
                token="token",
                bounds=bounds or BOUNDS,
                leave=leave or Granted(),
            )

    def receive(self, body: bytes, bounds: Bounds | None = None, leave: Granted | None = None) -> Done:
        with fed(body) as source:
            return bundles.receive(
                self.fd, source, token="token", bounds=bounds or BOUNDS, leave=leave or Granted()
            )

    def tree(self) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = {}
        for path in sorted(self.data.rglob("*")):
            name = str(path.relative_to(self.data))
            found[name] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        return found


def refused(place: Place, body: bytes, kind: str, reason: str, bounds: Bounds | None = None) -> Refused:
    before = place.tree()
    with pytest.raises(Refused, match=reason) as caught:
        place.unpack(body, kind, bounds=bounds)
    assert place.tree() == before, "something of a refused archive is there"
    return caught.value
