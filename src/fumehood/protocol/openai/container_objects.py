"""Containers and their files: API objects and stored records."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import ListPage
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    LinkEntry,
    MemoryTier,
    NetworkAllowlist,
    NetworkDisabled,
    NetworkPolicy,
)

DATA_DIRECTORY = "/mnt/data"
_MAX_PATH_LENGTH = 4200  # longer than any path in a sandbox
_ALLOWLIST_FIELDS = frozenset({"allowed_domains", "domain_secrets"})

type ContainerFileSource = Literal["user", "assistant"]
type ContainerStatus = Literal["running", "expired", "deleted"]


# --- stored records ---------------------------------------------------------------------------------


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may choose about a container.

    file_ids: uploads to copy into it at creation.
    idle_minutes: idle time until it expires; None is the operator's default.
    """

    name: str = "auto"
    memory: MemoryTier = "1g"
    network: NetworkPolicy = NetworkDisabled()
    file_ids: tuple[str, ...] = ()
    idle_minutes: int | None = None


class ContainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored container; times are seconds since 1970.

    spec: with defaults filled in and without secrets.
    secrets: the domain secrets of its network policy, sealed.
    automatic: whether it was created by a call, not by a request for a container.
    status: the record of a deleted container stays for a while as a tombstone, to recognise its orphans.
    ended_at: when it expired or was deleted, 0 before. retained: bytes of user files kept after its end.
    sandbox, address: its current sandbox; empty before the first call and after a loss.
    incarnation: number of sandboxes so far; the fencing token of the current one.
    mark: snapshot token of its files after the last call.
    """

    id: str
    tenant: str
    spec: ContainerSpec
    secrets: str = ""
    automatic: bool = False
    status: ContainerStatus = "running"
    created_at: float
    last_active_at: float
    ended_at: float = 0.0
    retained: int = 0
    sandbox: str = ""
    address: str = ""
    incarnation: int = 0
    mark: str = ""


class ContainerFileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of a container's file; `path` is relative to /mnt/data and comes from untrusted code.

    id: derived from the path; stays the same when the file is rewritten.
    modified_ns: from the sandbox, 0 if the file is in none. changed_ns, inode: the same, 0 if unknown.
    source: who created it; a user's file stays a user's after code has changed it.
    executable: restored in new sandboxes.
    blob: the stored content, empty if there is none.
    """

    id: str
    container_id: str
    path: str
    bytes: int
    created_at: float
    modified_ns: int
    changed_ns: int = 0
    inode: int = 0
    source: ContainerFileSource
    executable: bool = False
    blob: str = ""


# --- API objects --------------------------------------------------------------------------------------


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    anchor: Literal["last_active_at"] = "last_active_at"
    minutes: int


class CreateContainer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/containers. Nulls and unknown fields are allowed."""

    name: str
    expires_after: ExpiresAfter | None = None
    file_ids: list[str] | None = None
    memory_limit: str | None = None
    network_policy: dict[str, Raw] | None = None
    skills: list[Raw] | None = None


class CreateContainerFile(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of POST /v1/containers/{container_id}/files."""

    file_id: str


class NetworkPolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A network policy without its secrets."""

    type: Literal["disabled", "allowlist"]
    allowed_domains: list[str] | UnsetType = UNSET


class ContainerObject(msgspec.Struct, frozen=True, kw_only=True):
    """A container in the API."""

    id: str
    object: Literal["container"] = "container"
    created_at: int
    name: str
    status: str
    expires_after: ExpiresAfter
    last_active_at: int
    memory_limit: MemoryTier
    network_policy: NetworkPolicyObject


class ContainerFileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A container file in the API; `path` is absolute and sanitized."""

    id: str
    object: Literal["container.file"] = "container.file"
    bytes: int
    container_id: str
    created_at: int
    path: str
    source: ContainerFileSource


class UnpackedFilesObject(ContainerFileObject, frozen=True, kw_only=True):
    """The files of an unpacked archive: the first one in OpenAI's form, and all of them."""

    unpacked: list[ContainerFileObject] = msgspec.field(name="fumehood:unpacked")


class ContainerFilePage(ListPage, frozen=True, kw_only=True):
    """A page of files, with what no page lists. All paths are relative to /mnt/data.

    links: symbolic links. unlisted: files beyond the limits, or written since the last call. truncated: whether there
    is more that cannot be named.
    """

    links: list[LinkEntry] = msgspec.field(name="fumehood:links")
    unlisted: list[str] = msgspec.field(name="fumehood:unlisted")
    truncated: bool = msgspec.field(name="fumehood:truncated")


def to_container_object(record: ContainerRecord) -> ContainerObject:
    network = record.spec.network
    policy = NetworkPolicyObject(type="disabled")
    if isinstance(network, NetworkAllowlist):
        policy = NetworkPolicyObject(type="allowlist", allowed_domains=list(network.allowed_domains))
    return ContainerObject(
        id=record.id,
        created_at=int(record.created_at),
        name=record.spec.name,
        status=record.status,
        expires_after=ExpiresAfter(minutes=record.spec.idle_minutes or 0),
        last_active_at=int(record.last_active_at),
        memory_limit=record.spec.memory,
        network_policy=policy,
    )


def to_container_file_object(record: ContainerFileRecord) -> ContainerFileObject:
    return ContainerFileObject(
        id=record.id,
        bytes=record.bytes,
        container_id=record.container_id,
        created_at=int(record.created_at),
        path=sanitize_name(f"{DATA_DIRECTORY}/{record.path}", _MAX_PATH_LENGTH),
        source=record.source,
    )


def to_unpacked_files_object(records: Sequence[ContainerFileRecord]) -> UnpackedFilesObject:
    """Return the API object of an unpacked archive; there is at least one record."""
    files = [to_container_file_object(record) for record in records]
    return UnpackedFilesObject(**msgspec.structs.asdict(files[0]), unpacked=files)


# --- parsing -----------------------------------------------------------------------------


class _NetworkType(msgspec.Struct):
    type: Literal["disabled", "allowlist"]


def parse_memory_tier(limit: str | None, param: str) -> MemoryTier:
    """Parse `memory_limit`. Raises InvalidRequest, which names the parameter."""
    if limit is None:
        return ContainerSpec().memory
    for tier in MEMORY_TIERS:
        if tier == limit:
            return tier
    tiers = ", ".join(f"'{tier}'" for tier in MEMORY_TIERS)
    raise InvalidRequest(
        f"{param} must be one of {tiers}, not '{sanitize_name(limit, 20)}'.",
        param=param,
        code="invalid_value",
    )


def parse_network_policy(policy: Mapping[str, Raw] | None, param: str) -> NetworkPolicy:
    """Parse a network policy; `validate_spec` checks whether it is allowed. Raises InvalidRequest."""
    if policy is None:
        return NetworkDisabled()
    known = {key: value for key, value in policy.items() if key in _ALLOWLIST_FIELDS}
    try:
        if msgspec.json.decode(msgspec.json.encode(policy), type=_NetworkType).type == "disabled":
            return NetworkDisabled()
        return msgspec.json.decode(msgspec.json.encode({**known, "type": "allowlist"}), type=NetworkAllowlist)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{param}: {error}", param=param, code="invalid_value") from None
