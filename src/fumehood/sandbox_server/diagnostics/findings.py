"""Findings of `fumehood doctor`, and the host they are about."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import IsolationMode

REPORT_ADVICE = (
    "Mend what else is missing here; if nothing is, please report this with the whole output of `doctor`."
)

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
    """Everything `doctor` found."""

    mode: IsolationMode
    is_usable: bool
    findings: list[HostFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedHost:
    """The host to check; tests pass another root and other facts. `allows_trials` permits trying things out."""

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


def describe_error(error: Exception) -> str:
    """One sentence; errors that are not ours also get the name of their type."""
    prefix = "" if isinstance(error, SandboxError) else f"{type(error).__name__}: "
    return f"{prefix}{str(error).strip().removesuffix('.') or 'no reason given'}."
