"""Shows where the time of a cold start goes, on both sides of the jail.

The product has no timers for this. The benchmark runs a copy of `sandbox_server` whose zygote wraps the functions
that build a sandbox; the code in the sandbox prints the recorded times. The supervisor's functions are wrapped in this
process. All processes read the same monotonic clock.
"""

import ast
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest
from fumehood.sandbox_server.host import jail_launcher
from fumehood.sandbox_server.host.resource_allocator import ResourceAllocator
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

# Written into the copy. Each entry: name, depth, start, end or None.
_RECORDER = """
import builtins, functools, importlib, os, time, types
timeline, depth = [], [0]
builtins.fumehood_timeline = timeline

def wrapped(name, function):
    @functools.wraps(function)
    def timed(*args, **kwargs):
        entry = [name, depth[0], time.perf_counter(), None]
        timeline.append(entry)
        depth[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth[0] -= 1
            entry[3] = time.perf_counter()
    return timed

def wrap_module(name):
    module = importlib.import_module("fumehood.sandbox_server.inside." + name)
    for key, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType):
            setattr(module, key, wrapped(name + "." + key, value))
        elif isinstance(value, type) and "__init__" in vars(value) and name.startswith("runner."):
            value.__init__ = wrapped(name + "." + key, value.__init__)

def begin(spawn):
    @functools.wraps(spawn)
    def spawning(*args):
        timeline.clear()
        depth[0] = 0
        return wrapped("zygote.spawn", spawn)(*args)
    return spawning

def install(zygote):
    for name in (
        "syscalls", "jail.jail_builder", "jail.landlock", "jail.seccomp_installer",
        "processes.startup_messages", "processes.interpreter_entrypoint", "runner.code_runner", "runner.output_capture",
        "runner.captured_streams",
    ):
        wrap_module(name)
    for name in ("fork", "unshare", "setns", "closerange"):
        setattr(os, name, wrapped("os." + name, getattr(os, name)))
    server = zygote.InterpreterForkServer
    server._fork_interpreter = begin(server._fork_interpreter)
"""
_INSTALL = """

from fumehood.sandbox_server.inside import timeline_recorder as _recorder
_recorder.install(sys.modules[__name__])
"""
_PRINT_TIMELINE = "import builtins; print(list(builtins.fumehood_timeline))"


@dataclass
class TimelineEntry:
    """One timed step of a creation; `inside`: in the jail, otherwise in the supervisor."""

    name: str
    inside: bool
    depth: int
    started_at: float
    ended_at: float | None


class SupervisorTimeline:
    """Records the supervisor's steps by wrapping what it calls."""

    def __init__(self) -> None:
        self.entries: list[TimelineEntry] = []
        self._undo: list[Callable[[], None]] = []

    def mark(self, name: str) -> None:
        self.entries.append(TimelineEntry(name, False, 0, time.perf_counter(), None))

    def _wrap(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return  # renamed since; the other entries are still useful
        setattr(owner, name, functools.wraps(original)(replacement(original)))
        self._undo.append(lambda: setattr(owner, name, original))

    def install(self) -> None:
        def timed_step(title: str) -> Callable[[Any], Any]:
            def replacement(original: Any) -> Any:
                def timed(*args: Any, **kwargs: Any) -> Any:
                    entry = TimelineEntry(title, False, 0, time.perf_counter(), None)
                    self.entries.append(entry)
                    try:
                        return original(*args, **kwargs)
                    finally:
                        entry.ended_at = time.perf_counter()

                return timed

            return replacement

        def marked_call(title: Callable[[Any], str]) -> Callable[[Any], Any]:
            def replacement(original: Any) -> Any:
                def marked(*args: Any, **kwargs: Any) -> Any:
                    self.mark(title(args[1]))
                    return original(*args, **kwargs)

                return marked

            return replacement

        self._wrap(ResourceAllocator, "allocate", timed_step("allocate a user and a cgroup"))
        self._wrap(Supervisor, "_fork", timed_step("request the fork"))
        self._wrap(SandboxInstance, "claim", marked_call(lambda _: "claim: begins"))
        self._wrap(
            SandboxInstance, "handle_zygote_event", marked_call(lambda event: f"received: {event['event']}")
        )
        self._wrap(
            SandboxInstance, "_handle_message", marked_call(lambda message: f"received: {message.kind.name}")
        )
        self._wrap(SandboxInstance, "send_message", marked_call(lambda kind: f"sent: {kind.name}"))
        self._wrap(
            ZygoteConnection,
            "send_request",
            marked_call(lambda body: f"requested: {body.get('op', 'configure')}"),
        )

    def uninstall(self) -> None:
        for undo in reversed(self._undo):
            undo()


def _instrumented_copy(directory: str) -> Path:
    copy = Path(directory) / "fumehood" / "sandbox_server"
    shutil.copytree(
        Path(jail_launcher.__file__).parents[1],
        copy,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    (copy / "inside" / "timeline_recorder.py").write_text(_RECORDER)
    zygote = copy / "inside" / "processes" / "zygote.py"
    zygote.write_text(zygote.read_text() + _INSTALL)
    for path in [Path(directory), copy.parent, copy, *copy.rglob("*")]:
        path.chmod(0o755)
    return copy


async def record_timelines(creations: int) -> list[list[TimelineEntry]]:
    """Timelines of cold creations, each from the request for a sandbox to the end of its first call."""
    here = jail_launcher._SERVER_PACKAGE
    watch = SupervisorTimeline()
    with tempfile.TemporaryDirectory() as directory:
        jail_launcher._SERVER_PACKAGE = _instrumented_copy(directory)
        try:
            async with Supervisor(SandboxServerSettings(pool=0)) as supervisor:
                watch.install()
                return [await _record_one(supervisor, watch) for _ in range(creations)]
        finally:
            jail_launcher._SERVER_PACKAGE = here
            watch.uninstall()


async def _record_one(supervisor: Supervisor, watch: SupervisorTimeline) -> list[TimelineEntry]:
    watch.entries.clear()
    watch.mark("sandbox requested")
    sandbox = await supervisor.create()
    watch.mark("created")
    text = ""
    async for event in InProcessSandbox(sandbox).execute(ExecuteRequest(code=_PRINT_TIMELINE)):
        if getattr(event, "text", None):
            watch.mark("first output")
            text += event.text  # pyright: ignore[reportAttributeAccessIssue]
    outside = list(watch.entries)
    await sandbox.destroy()
    inside = [TimelineEntry(name, True, depth, *times) for name, depth, *times in ast.literal_eval(text)]
    return sorted([*outside, *inside], key=lambda entry: entry.started_at)


def print_timelines(creations: Sequence[Sequence[TimelineEntry]]) -> None:
    """Print the median start and duration of each step over the creations."""
    begins: dict[tuple[str, bool, int, int], list[float]] = {}
    lasts: dict[tuple[str, bool, int, int], list[float]] = {}
    for timeline in creations:
        start, seen = timeline[0].started_at, dict[str, int]()
        for entry in timeline:
            seen[entry.name] = seen.get(entry.name, 0) + 1
            key = (entry.name, entry.inside, entry.depth, seen[entry.name])
            begins.setdefault(key, []).append((entry.started_at - start) * 1000)
            if entry.ended_at is not None:
                lasts.setdefault(key, []).append((entry.ended_at - entry.started_at) * 1000)
    table = Table(title=f"A cold creation, medians of {len(creations)}", title_justify="left")
    for name in ("at ms", "takes ms", "supervisor", "in the jail"):
        table.add_column(name, justify="right" if name.endswith("ms") else "left")
    for key in sorted(begins, key=lambda key: statistics.median(begins[key])):
        name, inside, depth, _ = key
        label = "  " * depth + name
        takes = f"{statistics.median(lasts[key]):.2f}" if key in lasts else ""
        table.add_row(
            f"{statistics.median(begins[key]):.2f}", takes, "" if inside else label, label if inside else ""
        )
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
