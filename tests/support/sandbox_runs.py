"""Sandboxes for tests in one process: settings that work here, and a call's outcome."""

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionLanguage,
    ExecutionNote,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.sandbox_server.host import cgroups
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance


@functools.cache
def has_cgroups() -> bool:
    """Whether this user may bound memory here; an ordinary one often may not."""
    try:
        cgroups.open_tree(memory_total=None, cpus=None, pids_total=None).close()
    except cgroups.CgroupUnavailable:
        return False
    return True


def settings(**changes: Any) -> SandboxServerSettings:
    defaults: dict[str, Any] = {"pool": 0, "limits": "enforced" if has_cgroups() else "best-effort"}
    return SandboxServerSettings(**{**defaults, **changes})


@dataclass(frozen=True)
class ExecutionOutcome:
    events: list[ExecutionEvent]

    @property
    def stdout(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Stdout))

    @property
    def stderr(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Stderr))

    @property
    def result(self) -> str | None:
        return next(
            (event.data["text/plain"] for event in self.events if isinstance(event, ExpressionResult)), None
        )

    @property
    def displays(self) -> list[dict[str, str]]:
        return [event.data for event in self.events if isinstance(event, DisplayData)]

    @property
    def raised(self) -> ExceptionRaised | None:
        return next((event for event in self.events if isinstance(event, ExceptionRaised)), None)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, ExecutionNote)]

    @property
    def end(self) -> ExecutionEnd:
        last = self.events[-1]
        assert isinstance(last, ExecutionEnd)
        assert not any(isinstance(event, ExecutionEnd) for event in self.events[:-1])
        return last


def start(
    sandbox: SandboxInstance,
    code: str,
    *,
    timeout: float = 60,
    language: ExecutionLanguage = "python",
    requirements: Sequence[str] = (),
) -> SandboxExecution:
    return sandbox.executions.start_or_get(
        ExecuteRequest(code=code, timeout_seconds=timeout, language=language, requirements=list(requirements))
    )


async def wait_for_outcome(execution: SandboxExecution) -> ExecutionOutcome:
    return ExecutionOutcome([event async for event in iter_events(execution)])


async def run(
    sandbox: SandboxInstance, code: str, *, timeout: float = 60, language: ExecutionLanguage = "python"
) -> ExecutionOutcome:
    """Interrupts the code when the caller is cancelled."""
    execution = start(sandbox, code, timeout=timeout, language=language)
    try:
        return await wait_for_outcome(execution)
    finally:
        execution.interrupt()


def build_environment() -> dict[str, str]:
    """For commands: none of the caller's settings, and the limits that work here."""
    kept = ("FUMEHOOD_PACKAGES_DIR", "FUMEHOOD_INDEX_URL")  # not the machine's own
    inherited = {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith("FUMEHOOD_")
    }
    return inherited if has_cgroups() else {**inherited, "FUMEHOOD_LIMITS": "best-effort"}


def strip_limits_warning(stderr: str) -> str:
    """What a command said besides that memory is not bounded, which it says wherever `environment` asks for it."""
    return re.sub(r"^Limits are best-effort: .*\n", "", stderr, count=1, flags=re.MULTILINE)
