"""What passes between a sandbox server and its callers.

docs/sandbox-protocol.md tells how it travels. A change that an older peer would misread raises `PROTOCOL_VERSION`.
What can go wrong is in `fumehood.protocol.sandbox.sandbox_errors`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

type MemoryTier = Literal["1g", "4g", "16g", "64g"]
type IsolationMode = Literal["namespaces", "pod", "unsafe-degraded"]
type LimitEnforcement = Literal["enforced", "best-effort"]

MEMORY_TIERS: dict[MemoryTier, int] = {
    "1g": 1 << 30,
    "4g": 4 << 30,
    "16g": 16 << 30,
    "64g": 64 << 30,
}


# Names that callers choose: they come back in URLs and logs.
type ResourceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$(?!\n)")]
type Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:@-]{0,128}$(?!\n)")]
type Domain = Annotated[str, Meta(min_length=1, max_length=253)]
type RequirementLine = Annotated[str, Meta(min_length=1, max_length=500)]
type Requirements = Annotated[list[RequirementLine], Meta(max_length=100)]


class DomainSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that the egress proxy puts into requests to one domain; the code only ever sees a placeholder.

    name: of the environment variable that holds the placeholder; wherever the placeholder stands in a header of
    a request to `domain`, the proxy puts `value`.
    """

    domain: Domain
    name: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$(?!\n)")]
    value: Annotated[str, Meta(min_length=1, max_length=8192)]

    def __repr__(self) -> str:
        """Without the value: specs end up in logs and tracebacks."""
        return f"DomainSecret(domain={self.domain!r}, name={self.name!r}, value=…)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("domain", self.domain), ("name", self.name), ("value", "…")]


class NetworkDisabled(
    msgspec.Struct, frozen=True, tag_field="type", tag="disabled", forbid_unknown_fields=True
):
    """No network at all."""


class NetworkAllowlist(
    msgspec.Struct, frozen=True, tag_field="type", tag="allowlist", kw_only=True, forbid_unknown_fields=True
):
    """HTTP and HTTPS to these domains through the egress proxy; a domain counts without its subdomains."""

    allowed_domains: Annotated[list[Domain], Meta(min_length=1, max_length=100)]
    domain_secrets: Annotated[list[DomainSecret], Meta(max_length=50)] = []


type NetworkPolicy = NetworkDisabled | NetworkAllowlist


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller may choose about a sandbox; the rest is the operator's.

    requirements: packages to install before the sandbox is handed over, as in a requirements file: names, extras,
    versions and markers, no options, URLs or paths.
    tenant: whose quota it counts against, and whom it may share a zygote with.
    fresh_interpreter: start a new Python in the finished jail instead of continuing the forked one; it has
    an address-space layout and a hash seed of its own, and pays for its imports.
    """

    memory: MemoryTier = "1g"
    network: NetworkPolicy = NetworkDisabled()
    requirements: Requirements = []
    tenant: Tenant = ""
    fresh_interpreter: bool = False


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that lives; times are seconds since 1970."""

    id: str
    memory: MemoryTier
    tenant: str
    created_at: float
    last_used_at: float
    running: str | None = None  # the id of the execution that has its turn
    waiting: int = 0
    warm: bool | None = None  # whether it had been waiting when it was asked for


type ExecutionTimeout = Annotated[float, Meta(gt=0, le=86_400)]


type ExecutionLanguage = Literal["python", "shell"]


class ExecuteRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One call of code in a sandbox. What is as usual is not sent, so that an older server takes what it knows, and
    refuses what it does not.

    language: `shell` runs the code as one command of the sandbox's shell, in a process of its own.
    execution_id: chosen by the caller; asking again under the same id attaches to the run that is there and runs
    nothing twice. Without one the server chooses.
    requirements: packages to install before the code runs; if that fails, the code does not run.
    """

    code: str
    language: ExecutionLanguage = "python"
    timeout_seconds: ExecutionTimeout = 60.0
    requirements: Requirements = []
    execution_id: ResourceName | None = None

    @property
    def noun(self) -> str:
        """What runs, for sentences."""
        return "command" if self.language == "shell" else "code"


class BaseExecutionEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """One step of an execution; exactly one `End` comes last."""


class Stdout(BaseExecutionEvent, frozen=True, tag="stdout"):
    text: str


class Stderr(BaseExecutionEvent, frozen=True, tag="stderr"):
    text: str


class DisplayData(BaseExecutionEvent, frozen=True, tag="display"):
    """Something shown: `data` maps a MIME type to text, or to base64 for binary types."""

    data: dict[str, str]


class ExpressionResult(BaseExecutionEvent, frozen=True, tag="result"):
    """The value of the last expression, in the same form as `Display`."""

    data: dict[str, str]


class ExceptionRaised(BaseExecutionEvent, frozen=True, tag="error"):
    """The code raised; `traceback` shows the user's lines only."""

    name: str
    value: str
    traceback: str


class ExecutionNote(BaseExecutionEvent, frozen=True, tag="note"):
    """Something the supervisor saw that did not end the call, e.g. a child killed for memory."""

    text: str


type ExecutionEndStatus = Literal[
    "ok", "error", "timeout", "interrupted", "out_of_memory", "lost", "install_failed"
]


class ExecutionEnd(BaseExecutionEvent, frozen=True, tag="end", kw_only=True):
    """How the execution ended, as the supervisor observed it.

    exit_code: 0; 1 when the code raised; n for `sys.exit(n)`; what a command's shell says, 128 + n for signal n; -1 for
    a time-out, a lost sandbox and packages that could not be installed.
    state_kept: whether variables are still there for the next call; False means that the sandbox is gone.
    reason: one sentence for people and models, empty when the code simply finished or raised.
    packages_ms: how long packages were installed before, which is not in `duration_ms` if the code ran.
    """

    status: ExecutionEndStatus
    exit_code: int
    duration_ms: int
    state_kept: bool
    reason: str = ""
    packages_ms: int = 0


type ExecutionEvent = (
    Stdout | Stderr | DisplayData | ExpressionResult | ExceptionRaised | ExecutionNote | ExecutionEnd
)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file under /mnt/data; `path` is relative, POSIX, and comes from untrusted code.

    modified_ns: code may set it to what it likes. changed_ns, inode: these it cannot choose, so that two entries which
        are equal tell of the same content; 0 from servers that do not tell.
    executable: whether its owner may run it.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int = 0
    inode: int = 0
    executable: bool = False


class FileListing(msgspec.Struct, frozen=True, kw_only=True):
    """Files below /mnt/data, sorted by path.

    mark: names this state; given back, the next listing tells only what changed since.
    complete: `files` is everything; False means that it and `deleted` are the changes since the mark.
    truncated: some are left out: too many, too deep, or of names that are not text.
    """

    files: list[FileEntry]
    mark: str
    deleted: list[str] = []
    complete: bool = True
    truncated: bool = False


type ArchiveFormat = Literal["zip", "tar", "tar.gz", "tar.zst"]


class UnpackSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive left behind; `skipped` tells the members that are neither files nor directories.

    modified_ns, changed_ns: when the last of its files was written, and was in place: one that is newer, by either, was
        changed since.
    """

    files: int
    bytes: int
    skipped: int = 0
    modified_ns: int = 0
    changed_ns: int = 0


class WriteSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What was put in place of many files.

    modified_ns, changed_ns: as in `Unpacked`.
    refused: how many could not be; reasons: why, of the first of them, by name.
    """

    files: int
    bytes: int
    modified_ns: int = 0
    changed_ns: int = 0
    refused: int = 0
    reasons: list[str] = []


class ReadFilesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /sandboxes/{id}/read`: the content of many files, in this order."""

    paths: list[str]


class OneShotRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /execute`: code in a fresh sandbox that ends with it; `files` maps names to base64."""

    code: str
    timeout_seconds: ExecutionTimeout = 60.0
    requirements: Requirements = []
    files: dict[str, str] = {}
    memory: MemoryTier = "1g"
    tenant: Tenant = ""


class OneShotResponse(msgspec.Struct, frozen=True, kw_only=True):
    """stderr ends with the traceback or with the sentence that says why the code could not run or finish."""

    status: Literal["success", "error"]
    stdout: str
    stderr: str
    exit_code: int
    execution_time_ms: int
    files_produced: dict[str, str]


class ServerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox server says of itself.

    status: `ok`, or `starting` while no sandbox could be made; then the HTTP status is 503.
    """

    status: Literal["ok", "starting", "stopping"]
    mode: IsolationMode
    protocol: int
    version: str
    python: str
    capacity: int
    live: int
    parked: int
    running: int
    uptime_seconds: float
