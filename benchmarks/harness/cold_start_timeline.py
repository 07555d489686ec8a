"""Shows where the time of a cold creation goes, from both sides of the jail.

The product is not asked to keep time: a copy of `sandboxd` is made whose zygote wraps the functions that build a
sandbox, and the code that runs in the sandbox reads the moments out. On the supervisor's side the same is done to
this process. Clocks agree, since every process reads the same monotonic one.
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

from fumehood.sandbox_server.host import jail_launcher
from fumehood.sandbox_server.host.host_resources import HostResources
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

# Goes into the copy. Each entry: name, depth, beginning, end or None.
_RECORDER = """
import builtins, functools, importlib, os, time, types
moments, depth = [], [0]
builtins.fumehood_moments = moments

def wrapped(name, function):
    @functools.wraps(function)
    def timed(*args, **kwargs):
        entry = [name, depth[0], time.perf_counter(), None]
        moments.append(entry)
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
        elif isinstance(value, type) and "__init__" in vars(value) and name in ("runner", "streams"):
            value.__init__ = wrapped(name + "." + key, value.__init__)

def begin(spawn):
    @functools.wraps(spawn)
    def spawning(*args):
        moments.clear()
        depth[0] = 0
        return wrapped("zygote.spawn", spawn)(*args)
    return spawning

def install(zygote):
    for name in ("init", "interpreter", "jail", "landlock", "filters", "syscalls", "runner", "streams"):
        wrap_module(name)
    for name in ("fork", "unshare", "setns", "closerange"):
        setattr(os, name, wrapped("os." + name, getattr(os, name)))
    zygote.Zygote._fork = begin(zygote.Zygote._fork)
"""
_INSTALL = """

from fumehood.sandbox_server.inside import moments as _moments
_moments.install(sys.modules[__name__])
"""
_PRINT_MOMENTS = "import builtins; print(list(builtins.fumehood_moments))"


@dataclass
class TimelineEntry:
    """A stretch of time in one creation; `inside` the jail or in the supervisor."""

    name: str
    inside: bool
    depth: int
    started_at: float
    ended_at: float | None


class SupervisorTimeline:
    """Moments of the supervisor's side, by wrapping what it calls."""

    def __init__(self) -> None:
        self.entries: list[TimelineEntry] = []
        self._undo: list[Callable[[], None]] = []

    def mark(self, name: str) -> None:
        self.entries.append(TimelineEntry(name, False, 0, time.perf_counter(), None))

    def _wrap(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return  # renamed since; the other moments are still worth seeing
        setattr(owner, name, functools.wraps(original)(replacement(original)))
        self._undo.append(lambda: setattr(owner, name, original))

    def install(self) -> None:
        def stretch(title: str) -> Callable[[Any], Any]:
            def replacement(original: Any) -> Any:
                def timed(*args: Any, **kwargs: Any) -> Any:
                    moment = TimelineEntry(title, False, 0, time.perf_counter(), None)
                    self.entries.append(moment)
                    try:
                        return original(*args, **kwargs)
                    finally:
                        moment.ended_at = time.perf_counter()

                return timed

            return replacement

        def telling(title: Callable[[Any], str]) -> Callable[[Any], Any]:
            def replacement(original: Any) -> Any:
                def told(*args: Any, **kwargs: Any) -> Any:
                    self.mark(title(args[1]))
                    return original(*args, **kwargs)

                return told

            return replacement

        self._wrap(HostResources, "take", stretch("take a user and a cgroup"))
        self._wrap(Supervisor, "_fork", stretch("ask the zygote"))
        self._wrap(SandboxInstance, "claim", telling(lambda _: "hand over: begins"))
        self._wrap(SandboxInstance, "handle_zygote_event", telling(lambda event: f"heard: {event['event']}"))
        self._wrap(SandboxInstance, "_handle_message", telling(lambda message: f"heard: {message.kind.name}"))
        self._wrap(SandboxInstance, "_send", telling(lambda kind: f"told: {kind.name}"))
        self._wrap(ZygoteConnection, "request", telling(lambda body: f"asked: {body.get('op', 'configure')}"))

    def uninstall(self) -> None:
        for undo in reversed(self._undo):
            undo()


def _instrumented_copy(directory: str) -> Path:
    copy = Path(directory) / "sandboxd"
    shutil.copytree(
        Path(jail_launcher.__file__).parent,
        copy,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    (copy / "inside" / "moments.py").write_text(_RECORDER)
    zygote = copy / "inside" / "zygote.py"
    zygote.write_text(zygote.read_text() + _INSTALL)
    for path in [Path(directory), *copy.rglob("*"), copy]:
        path.chmod(0o755)
    return copy


async def record_timelines(creations: int) -> list[list[TimelineEntry]]:
    """Moments of some cold creations, each from asking for a sandbox to the end of its first call."""
    here = jail_launcher._SERVER_PACKAGE
    watch = SupervisorTimeline()
    with tempfile.TemporaryDirectory() as directory:
        jail_launcher._SERVER_PACKAGE = _instrumented_copy(directory)
        try:
            async with Supervisor(Settings(pool=0)) as supervisor:
                watch.install()
                return [await _record_one(supervisor, watch) for _ in range(creations)]
        finally:
            jail_launcher._SERVER_PACKAGE = here
            watch.uninstall()


async def _record_one(supervisor: Supervisor, watch: SupervisorTimeline) -> list[TimelineEntry]:
    watch.entries.clear()
    watch.mark("asked for a sandbox")
    sandbox = await supervisor.create()
    watch.mark("created")
    text = ""
    async for event in sandbox.execute(_PRINT_MOMENTS):
        if getattr(event, "text", None):
            watch.mark("first output")
            text += event.text  # pyright: ignore[reportAttributeAccessIssue]
    moments = list(watch.entries)
    await sandbox.destroy()
    inside = [TimelineEntry(name, True, depth, *times) for name, depth, *times in ast.literal_eval(text)]
    return sorted([*moments, *inside], key=lambda moment: moment.started_at)


def print_timelines(creations: Sequence[Sequence[TimelineEntry]]) -> None:
    """Medians over the creations of when each stretch begins and how long it takes."""
    begins: dict[tuple[str, bool, int, int], list[float]] = {}
    lasts: dict[tuple[str, bool, int, int], list[float]] = {}
    for moments in creations:
        start, seen = moments[0].started_at, dict[str, int]()
        for moment in moments:
            seen[moment.name] = seen.get(moment.name, 0) + 1
            key = (moment.name, moment.inside, moment.depth, seen[moment.name])
            begins.setdefault(key, []).append((moment.started_at - start) * 1000)
            if moment.ended_at is not None:
                lasts.setdefault(key, []).append((moment.ended_at - moment.started_at) * 1000)
    table = Table(title=f"A cold creation, medians of {len(creations)}", title_justify="left")
    for name in ("at ms", "takes ms", "supervisor", "in the jail"):
        table.add_column(name, justify="right" if name.endswith("ms") else "left")
    for key in sorted(begins, key=lambda key: statistics.median(begins[key])):
        name, inside, depth, _ = key
        told = "  " * depth + name
        takes = f"{statistics.median(lasts[key]):.2f}" if key in lasts else ""
        table.add_row(
            f"{statistics.median(begins[key]):.2f}", takes, "" if inside else told, told if inside else ""
        )
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
