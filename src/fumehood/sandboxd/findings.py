"""What `doctor` finds, and the machine it looks at; imports only `fumehood.protocol.sandbox`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox import Mode

type State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` stops sandboxes of the chosen mode, `warning` weakens or slows them; `advice` says what to do."""

    name: str
    state: State
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that `doctor` has found."""

    mode: Mode
    works: bool
    findings: list[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine to look at; tests give another root and other facts. `live` allows trying things out."""

    root: Path = Path("/")
    machine: str = os.uname().machine
    uid: int = os.geteuid()
    landlock: int | None = None
    live: bool = True

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None
