"""A killed call is reported only when all its processes are dead."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, ExecutionEvent, ExecutionLanguage, Stdout
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings, start

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Freeing its memory keeps a killed process alive for a while.
HEAVY = (
    'python -S -c \'import sys, time; held = bytearray(b"1" * (96 << 20)); '
    'print("up", flush=True); time.sleep(600)\' {marker}'
)
PLACES = {
    "child": "{heavy} & wait",
    "session of its own": "setsid {heavy} & wait",
    "double fork": "(setsid sh -c '{quoted} & wait' &); sleep 600",
    "ignores signals": "trap '' INT TERM HUP; {heavy} & wait",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor() -> AsyncIterator[Supervisor]:
    async with Supervisor(settings(preload=())) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    sandbox = await supervisor.create()
    yield sandbox
    await sandbox.destroy()


def find_processes(marker: str) -> set[int]:
    """The processes of this host that have the marker among their arguments."""
    found: set[int] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "cmdline").read_bytes():
                found.add(int(directory.name))
        except OSError:
            continue
    return found


def is_alive(pid: int) -> bool:
    """One that is being taken apart counts: until then it holds memory, files and a place among the processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class WatchedExecution:
    """A call whose processes are looked at in the moment in which its end is reported."""

    def __init__(
        self, sandbox: SandboxInstance, code: str, marker: str, language: ExecutionLanguage, timeout: float
    ) -> None:
        self.execution = start(sandbox, code, timeout=timeout, language=language)
        sandbox.executions.on_end = self._on_end
        self.marker = marker
        self.started: set[int] = set()
        self.survivors: list[int] | None = None

    def _on_end(self, *_: object) -> None:
        self.survivors = [pid for pid in self.started if is_alive(pid)]

    async def follow(self, interrupt_at: int = 0) -> ExecutionEnd:
        """Interrupt it once so many processes are up, if any; else wait for its end."""
        seen = ""
        last: ExecutionEvent | None = None
        async for last in iter_events(self.execution):
            if isinstance(last, Stdout):
                seen += last.text
                self.started |= find_processes(self.marker)
            if interrupt_at and seen.count("up") >= interrupt_at:
                interrupt_at = 0
                self.execution.interrupt()
        assert isinstance(last, ExecutionEnd)
        assert self.started
        return last


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_an_interrupted_command_is_reported_when_its_processes_are_dead(
    sandbox: SandboxInstance, place: str
) -> None:
    for _ in range(3):
        marker = secrets.token_hex(8)
        heavy = HEAVY.format(marker=marker)
        quoted = heavy.replace("'", "'\\''")
        call = WatchedExecution(sandbox, place.format(heavy=heavy, quoted=quoted), marker, "shell", 60)
        end = await call.follow(interrupt_at=1)
        assert (end.status, end.state_kept) == ("interrupted", True)
        assert call.survivors == []


async def test_a_command_that_ran_too_long_is_reported_when_its_processes_are_dead(
    sandbox: SandboxInstance,
) -> None:
    await run(sandbox, "kept = 5")
    marker = secrets.token_hex(8)
    heavy = f"setsid {HEAVY.format(marker=marker)} & "
    call = WatchedExecution(sandbox, heavy * 4 + "wait", marker, "shell", 4)
    end = await call.follow()
    assert (end.status, end.state_kept) == ("timeout", True)
    assert call.survivors == []
    assert (await run(sandbox, "kept")).result == "5"


async def test_an_interrupted_command_needs_no_descriptors(sandbox: SandboxInstance) -> None:
    """A program that has opened all it may does not keep a later command from being ended whole."""
    await run(
        sandbox, "held = []\ntry:\n    while True: held.append(open('/dev/null'))\nexcept OSError: pass"
    )
    await run(sandbox, "for _ in range(12): held.pop().close()")  # what starting a command takes
    marker = secrets.token_hex(8)
    call = WatchedExecution(sandbox, f"setsid {HEAVY.format(marker=marker)} & wait", marker, "shell", 60)
    end = await call.follow(interrupt_at=1)
    assert end.status == "interrupted"
    assert call.survivors == []


async def test_killed_code_is_reported_when_its_subprocesses_are_dead(sandbox: SandboxInstance) -> None:
    marker = secrets.token_hex(8)
    code = (
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"command = {HEAVY.format(marker=marker)!r}\n"
        "for _ in range(3): subprocess.Popen(command, shell=True, start_new_session=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    call = WatchedExecution(sandbox, code, marker, "python", 60)
    end = await call.follow(interrupt_at=3)
    assert (end.status, end.state_kept) == ("interrupted", False)
    assert call.survivors == []
