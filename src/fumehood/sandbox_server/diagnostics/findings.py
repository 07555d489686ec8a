"""What `doctor` finds, and the machine it looks at."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox.sandbox_messages import IsolationMode

type FindingState = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class HostFinding:
    """`missing` stops sandboxes of the chosen mode, `warning` weakens or slows them; `advice` says what to do."""

    name: str
    state: FindingState
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """All that `doctor` has found."""

    mode: IsolationMode
    is_usable: bool
    findings: list[HostFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedHost:
    """The machine to look at; tests give another root and other facts. `live` allows trying things out."""

    root: Path = Path("/")
    machine: str = os.uname().machine
    uid: int = os.geteuid()
    landlock_version: int | None = None
    allows_trials: bool = True

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None
