"""Requests, responses and events of the sandbox protocol; docs/sandbox-protocol.md describes it.

A change that an older peer would misread raises `PROTOCOL_VERSION`.
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


# Names chosen by clients; they appear in URLs and logs.
type ResourceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$(?!\n)")]
type Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:@-]{0,128}$(?!\n)")]
type Domain = Annotated[str, Meta(min_length=1, max_length=253)]
type RequirementLine = Annotated[str, Meta(min_length=1, max_length=500)]
type Requirements = Annotated[list[RequirementLine], Meta(max_length=100)]


class DomainSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A secret that the egress proxy inserts into requests to one domain; code sees only a placeholder.

    name: the environment variable that holds the placeholder. The proxy replaces the placeholder by `value` in the
    headers of requests to `domain`.
    """

    domain: Domain
    name: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$(?!\n)")]
    value: Annotated[str, Meta(min_length=1, max_length=8192)]

    def __repr__(self) -> str:
        """Hide the value: specs appear in logs and tracebacks."""
        return f"DomainSecret(domain={self.domain!r}, name={self.name!r}, value=…)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("domain", self.domain), ("name", self.name), ("value", "…")]


class NetworkDisabled(
    msgspec.Struct, frozen=True, tag_field="type", tag="disabled", forbid_unknown_fields=True
):
    """No network access."""


class NetworkAllowlist(
    msgspec.Struct, frozen=True, tag_field="type", tag="allowlist", kw_only=True, forbid_unknown_fields=True
):
    """HTTP and HTTPS to these domains, without their subdomains, through the egress proxy."""

    allowed_domains: Annotated[list[Domain], Meta(min_length=1, max_length=100)]
    domain_secrets: Annotated[list[DomainSecret], Meta(max_length=50)] = []


type NetworkPolicy = NetworkDisabled | NetworkAllowlist


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may choose about a sandbox; the operator decides the rest.

    requirements: packages to install first, as in a requirements file: names, extras, versions and markers; no
    options, URLs or paths.
    tenant: whose quota the sandbox counts against; only sandboxes of one tenant share a zygote.
    fresh_interpreter: start a new Python in the jail instead of continuing the forked one. It has its own
    address-space layout and hash seed, and pays for its imports.
    """

    memory: MemoryTier = "1g"
    network: NetworkPolicy = NetworkDisabled()
    requirements: Requirements = []
    tenant: Tenant = ""
    fresh_interpreter: bool = False


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A running sandbox; times are seconds since 1970."""

    id: str
    memory: MemoryTier
    tenant: str
    created_at: float
    last_used_at: float
    running: str | None = None  # id of the running execution
    waiting: int = 0
    warm: bool | None = None  # whether it came from the warm pool


class SandboxList(msgspec.Struct, frozen=True, kw_only=True):
    """Every live sandbox."""

    sandboxes: list[SandboxInfo]


type ExecutionTimeout = Annotated[float, Meta(gt=0, le=86_400)]


type ExecutionLanguage = Literal["python", "shell"]


class ExecuteRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One call of code in a sandbox. Defaults are not sent, so that an older server rejects only what it does not know.

    language: `shell` runs the code as one shell command, in its own process.
    execution_id: chosen by the client; the same id again attaches to the running call and runs nothing twice.
    Without one the server chooses.
    requirements: packages to install first; if that fails, the code does not run.
    """

    code: str
    language: ExecutionLanguage = "python"
    timeout_seconds: ExecutionTimeout = 60.0
    requirements: Requirements = []
    execution_id: ResourceName | None = None

    @property
    def noun(self) -> str:
        """What runs, for messages: `code` or `command`."""
        return "command" if self.language == "shell" else "code"


class BaseExecutionEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """An event of an execution; exactly one `ExecutionEnd` comes last."""


class Stdout(BaseExecutionEvent, frozen=True, tag="stdout"):
    text: str


class Stderr(BaseExecutionEvent, frozen=True, tag="stderr"):
    text: str


class DisplayData(BaseExecutionEvent, frozen=True, tag="display"):
    """Rich output: `data` maps a MIME type to text, or to base64 for binary types."""

    data: dict[str, str]


class ExpressionResult(BaseExecutionEvent, frozen=True, tag="result"):
    """The value of the last expression, in the same form as DisplayData."""

    data: dict[str, str]


class ExceptionRaised(BaseExecutionEvent, frozen=True, tag="error"):
    """The code raised an exception; `traceback` shows the user's lines only."""

    name: str
    value: str
    traceback: str


class ExecutionNote(BaseExecutionEvent, frozen=True, tag="note"):
    """Something that did not end the call, for example a child process killed for memory."""

    text: str


type ExecutionEndStatus = Literal[
    "ok", "error", "timeout", "interrupted", "out_of_memory", "lost", "install_failed"
]


class ExecutionEnd(BaseExecutionEvent, frozen=True, tag="end", kw_only=True):
    """How the execution ended, as the supervisor observed it.

    exit_code: 0; 1 if the code raised; n for `sys.exit(n)`; a command's own, 128 + n for signal n; -1 for a timeout,
    a lost sandbox and packages that could not be installed.
    state_kept: whether variables remain for the next call; False means that the sandbox is gone.
    reason: one sentence for people and models; empty if the code finished or raised.
    packages_ms: time to install packages, not included in `duration_ms` if the code ran.
    """

    status: ExecutionEndStatus
    exit_code: int
    duration_ms: int
    state_kept: bool
    reason: str = ""
    packages_ms: int = 0


def make_execution_end(
    status: ExecutionEndStatus, reason: str, seconds: float = 0.0, *, state_kept: bool = True
) -> ExecutionEnd:
    """Make the end of an execution that its sandbox did not report, after `seconds`."""
    return ExecutionEnd(
        status=status, exit_code=-1, duration_ms=round(seconds * 1000), state_kept=state_kept, reason=reason
    )


type ExecutionEvent = (
    Stdout | Stderr | DisplayData | ExpressionResult | ExceptionRaised | ExecutionNote | ExecutionEnd
)


class InterruptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was something to stop."""

    interrupted: bool


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file under /mnt/data; `path` is relative, POSIX, and comes from untrusted code.

    modified_ns: code can set it. changed_ns, inode: code cannot choose them, so equal entries mean equal content; 0
        from servers that do not send them.
    executable: whether its owner may execute it.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int = 0
    inode: int = 0
    executable: bool = False


class LinkEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A symbolic link under /mnt/data; both fields come from untrusted code, and nothing follows it."""

    path: str
    target: str


class FileListing(msgspec.Struct, frozen=True, kw_only=True):
    """Files below /mnt/data, sorted by path.

    mark: the snapshot token of this state; the next listing can return only what changed since.
    complete: whether `files` is everything; otherwise it and `deleted` are the changes since the token.
    truncated: whether some are omitted: too many, too deep, or with names that are not text.
    links: all symbolic links, sorted by path, also if `complete` is false.
    """

    files: list[FileEntry]
    mark: str
    deleted: list[str] = []
    complete: bool = True
    truncated: bool = False
    links: list[LinkEntry] = []


type ArchiveFormat = Literal["zip", "tar", "tar.gz", "tar.zst"]


class UnpackSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of unpacking; `skipped` counts members that are neither files nor directories.

    modified_ns, changed_ns: of the file written last; a file with a later time was changed since.
    """

    files: int
    bytes: int
    skipped: int = 0
    modified_ns: int = 0
    changed_ns: int = 0


class WriteFilesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of writing many files.

    modified_ns, changed_ns: as in UnpackSummary.
    refused: how many could not be written. reasons: why, for the first of them.
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
    """`POST /execute`: code in a new sandbox that ends with it; `files` maps names to base64."""

    code: str
    timeout_seconds: ExecutionTimeout = 60.0
    requirements: Requirements = []
    files: dict[str, str] = {}
    memory: MemoryTier = "1g"
    tenant: Tenant = ""


class OneShotResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`stderr` ends with the traceback, or with why the code could not run or finish."""

    status: Literal["success", "error"]
    stdout: str
    stderr: str
    exit_code: int
    execution_time_ms: int
    files_produced: dict[str, str]


class ServerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a sandbox server.

    status: `ok`; otherwise no sandbox can be made, and the HTTP status is 503. `ended`: a pod that has had its sandbox.
    """

    status: Literal["ok", "starting", "stopping", "ended"]
    mode: IsolationMode
    protocol: int
    version: str
    python: str
    capacity: int
    live: int
    parked: int
    running: int
    uptime_seconds: float
