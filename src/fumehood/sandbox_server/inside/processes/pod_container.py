"""What the container of the code in a pod can tell about itself: its memory limit, and what that limit killed."""

import contextlib
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes the largest multiple of a page instead of a word


def read_memory_limit(cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that the container may use; None if they are not limited, or unknown as in gVisor."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((cgroups / name).read_text())
            return limit if limit < _UNLIMITED else None
    return None


def count_oom_kills(cgroups: Path = _CGROUPS) -> int:
    """Return how many of its processes the kernel has killed at the limit; 0 if that is unknown."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            facts = dict(line.split() for line in (cgroups / name).read_text().splitlines())
            return int(facts.get("oom_kill", 0))
    return 0
