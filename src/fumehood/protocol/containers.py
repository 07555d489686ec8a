"""Containers and their files as clients see them, and as they are kept; imports msgspec and siblings."""

from typing import Literal

import msgspec

from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import MemoryTier, NetworkDisabled, NetworkPolicy

DATA_DIRECTORY = "/mnt/data"
_LONGEST_PATH = 4200  # longer than any path in a sandbox

type FileSource = Literal["user", "assistant"]


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose about a container."""

    name: str = "auto"
    memory: MemoryTier = "1g"
    network: NetworkPolicy = NetworkDisabled()
    file_ids: tuple[str, ...] = ()
    idle_minutes: int = 20


class ContainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A container as it is kept; times are seconds since 1970.

    sandbox, address: where it lives now, empty before the first call and after its sandbox was lost.
    incarnation: how many sandboxes it has had.
    mark: the state of its files at the last look.
    """

    id: str
    tenant: str
    spec: ContainerSpec
    status: Literal["running", "expired"] = "running"
    created_at: float
    last_active_at: float
    sandbox: str = ""
    address: str = ""
    incarnation: int = 0
    mark: str = ""


class ContainerFileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a container; `path` is relative to /mnt/data and comes from untrusted code.

    id: stays the same while the path does, however often the file is written.
    blob: the copy that outlives its sandbox, empty where there is none.
    """

    id: str
    container_id: str
    path: str
    bytes: int
    created_at: float
    modified_ns: int
    source: FileSource
    blob: str = ""


class ContainerFile(msgspec.Struct, frozen=True, kw_only=True):
    """A container file on the wire; `path` is absolute, and fit to be read."""

    id: str
    object: Literal["container.file"] = "container.file"
    bytes: int
    container_id: str
    created_at: int
    path: str
    source: FileSource


def file_on_the_wire(record: ContainerFileRecord) -> ContainerFile:
    return ContainerFile(
        id=record.id,
        bytes=record.bytes,
        container_id=record.container_id,
        created_at=int(record.created_at),
        path=clean_name(f"{DATA_DIRECTORY}/{record.path}", _LONGEST_PATH),
        source=record.source,
    )
