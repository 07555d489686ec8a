"""What passes between a sandbox server and its callers; imports msgspec and the standard library."""

from typing import Literal

import msgspec

type MemoryTier = Literal["1g", "4g", "16g", "64g"]
type Mode = Literal["namespaces", "pod", "unsafe-degraded"]
type Limits = Literal["enforced", "best-effort"]

MEMORY_TIERS: dict[MemoryTier, int] = {
    "1g": 1 << 30,
    "4g": 4 << 30,
    "16g": 16 << 30,
    "64g": 64 << 30,
}


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose about a sandbox; the rest is the operator's.

    fresh_interpreter: start a new Python in the finished jail instead of continuing the forked one; it has
    an address-space layout and a hash seed of its own, and pays for its imports.
    """

    memory: MemoryTier = "1g"
    fresh_interpreter: bool = False


class OutputEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """One step of an execution; exactly one `End` comes last."""


class Stdout(OutputEvent, frozen=True, tag="stdout"):
    text: str


class Stderr(OutputEvent, frozen=True, tag="stderr"):
    text: str


class Display(OutputEvent, frozen=True, tag="display"):
    """Something shown: `data` maps a MIME type to text, or to base64 for binary types."""

    data: dict[str, str]


class Result(OutputEvent, frozen=True, tag="result"):
    """The value of the last expression, in the same form as `Display`."""

    data: dict[str, str]


class Raised(OutputEvent, frozen=True, tag="error"):
    """The code raised; `traceback` shows the user's lines only."""

    name: str
    value: str
    traceback: str


class Note(OutputEvent, frozen=True, tag="note"):
    """Something the supervisor saw that did not end the call, e.g. a child killed for memory."""

    text: str


type EndStatus = Literal["ok", "error", "timeout", "interrupted", "out_of_memory", "lost"]


class End(OutputEvent, frozen=True, tag="end", kw_only=True):
    """How the execution ended, as the supervisor observed it.

    exit_code: 0; 1 when the code raised; n for `sys.exit(n)`; -1 for a time-out and for a lost sandbox.
    state_kept: whether variables are still there for the next call; False means that the sandbox is gone.
    reason: one sentence for people and models, empty when the code simply finished or raised.
    """

    status: EndStatus
    exit_code: int
    duration_ms: int
    state_kept: bool
    reason: str = ""


type AnyOutput = Stdout | Stderr | Display | Result | Raised | Note | End


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file under /mnt/data; `path` is relative, POSIX, and comes from untrusted code."""

    path: str
    size: int
    modified_ns: int
