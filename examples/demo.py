"""A session in one sandbox, call by call: state, a chart, an error, a loop that is stopped; imports fumehood and rich.

Run it with `make demo`. It leaves the chart in `demo-output/`, or in a temporary directory where that cannot be
written, and ends with 0 only if all went as it should.
"""

import asyncio
import logging
import os
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from fumehood.cli_files import Folder, pictures
from fumehood.cli_output import neutral
from fumehood.protocol.sandbox import AnyOutput, Display, End, EndStatus, Note, Raised, Result, Stderr, Stdout
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

OUTPUT = Path(__file__).resolve().parent.parent / "demo-output"


@dataclass(frozen=True)
class Step:
    """One call; `says` must be somewhere in what it prints, shows or raises."""

    title: str
    code: str
    says: str
    status: EndStatus = "ok"
    timeout: float = 30.0


STEPS = (
    Step(
        "Make a data frame",
        """
import numpy as np
import pandas as pd

random = np.random.default_rng(7)
measurements = pd.DataFrame({
    "reagent": random.choice(["acetone", "ethanol", "hexane"], 300),
    "vapour": random.gamma(2.0, 15.0, 300).round(1),
})
measurements.head(3)
""",
        says="reagent",
    ),
    Step(
        "A second call sees what the first one made",
        """
groups = measurements.groupby("reagent").vapour
summary = groups.agg(["count", "mean", "max"]).round(1)
print(summary)
""",
        says="ethanol",
    ),
    Step(
        "A chart, shown and written to a file",
        """
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
summary["mean"].plot.barh(ax=axes, color="teal")
axes.set_xlabel("vapour, ppm")
figure.tight_layout()
figure.savefig("vapour.png")
plt.show()
""",
        says="",
    ),
    Step(
        "Code that raises is a call that ended, with its traceback",
        """
limit = {"acetone": 500, "ethanol": 200}
for name in summary.index:
    print(name, limit[name])
""",
        says="KeyError: 'hexane'",
        status="error",
    ),
    Step(
        "A loop without an end is stopped after two seconds",
        """
import itertools, time

for round_number in itertools.count(1):
    print("stirring, round", round_number, flush=True)
    time.sleep(0.5)
""",
        says="stirring, round 3",
        status="timeout",
        timeout=2.0,
    ),
    Step(
        "The sandbox is still there, with everything in it",
        """
print(f"{len(measurements)} measurements, stopped in round {round_number}")
""",
        says="300 measurements, stopped in round",
    ),
)


class Demo:
    def __init__(self, console: Console, folder: Folder) -> None:
        self._console = console
        self._folder = folder
        self._pictures: list[str] = []
        self._problems: list[str] = []
        self._unfinished = ""  # printed, but without the end of its line

    async def run(self) -> bool:
        async with AsyncExitStack() as stack:
            with self._console.status("starting the sandbox…"):
                supervisor, compromise = await start(stack)
                sandbox = await supervisor.create()
            if compromise:
                self._console.print(Text(compromise, style="yellow"), soft_wrap=True)
            for number, step in enumerate(STEPS, 1):
                await self._call(sandbox, number, step)
            await self._take_home(sandbox, "vapour.png")
        for problem in self._problems:
            self._console.print(Text(problem, style="red"))
        return not self._problems

    async def _call(self, sandbox: LocalSandbox, number: int, step: Step) -> None:
        self._console.print()
        self._console.print(Text(f"{number}. {step.title}", style="bold"))
        code = step.code.strip()
        syntax = Syntax(code, "python", background_color="default", word_wrap=True)
        self._console.print(Padding(syntax, (0, 0, 0, 4)))
        said = ""
        async for event in sandbox.execute(code, timeout=step.timeout):
            said += self._show(event)
            if isinstance(event, End):
                self._judge(step, event, said)

    def _show(self, event: AnyOutput) -> str:
        """Print an event as it comes; returns what it said."""
        if self._unfinished and not isinstance(event, Stdout):
            self._print(self._unfinished, "")
            self._unfinished = ""
        match event:
            case Stdout(text):
                lines, end, self._unfinished = (self._unfinished + text).rpartition("\n")
                self._print(lines + end, "")
            case Stderr(text):
                self._print(text, "yellow")
            case Raised(traceback=text):
                self._print(text, "yellow")
            case Note(text):
                self._print(text, "dim")
            case Result(data) | Display(data):
                text = data.get("text/plain", "")
                shown = [self._folder.save_picture(suffix, content) for suffix, content in pictures(data)]
                self._pictures += shown
                self._print(f"[picture: {', '.join(shown)}]" if shown else text, "cyan")
            case End():
                text = ""
        return text

    def _print(self, text: str, style: str) -> None:
        for line in neutral(text).splitlines():
            self._console.print(Text(f"  | {line}", style=style), soft_wrap=True)

    def _judge(self, step: Step, end: End, said: str) -> None:
        how = f"  {end.status} after {end.duration_ms} ms. {end.reason}".rstrip()
        self._console.print(Text(how, style="dim"), soft_wrap=True)
        if end.status != step.status:
            self._problems.append(f"“{step.title}” ended as {end.status}, not as {step.status}.")
        if step.says not in said:
            self._problems.append(f"“{step.title}” did not say {step.says!r}.")

    async def _take_home(self, sandbox: LocalSandbox, name: str) -> None:
        content = await sandbox.files.read(name, limit=1 << 20)
        if not content.startswith(b"\x89PNG") or not self._pictures:
            self._problems.append("There is no chart.")
            return
        self._console.print()
        for path in [*self._pictures, self._folder.save(name, content)]:
            self._console.print(
                f"The chart lies in {self._folder.path / path}", soft_wrap=True, highlight=False
            )


async def start(stack: AsyncExitStack) -> tuple[Supervisor, str]:
    """With every limit enforced; where only the limits are not to be had, without them, and a sentence that says so.

    That is right for the code above, which is known, and not for code of others.
    """
    try:
        return await stack.enter_async_context(Supervisor(Settings(pool=0))), ""
    except IsolationUnavailable as refusal:
        logging.getLogger("fumehood").setLevel(logging.ERROR)  # the sentence is instead of its warning
        try:
            lax = await stack.enter_async_context(Supervisor(Settings(pool=0, limits="best-effort")))
        except IsolationUnavailable:
            raise refusal from None
        return lax, (
            "This user may not bound memory here (no delegated cgroup), so the demonstration, whose code is known, "
            "runs without that bound; `fumehood doctor` says what to do."
        )


def output_folder() -> Folder:
    with suppress(OSError):
        OUTPUT.mkdir(exist_ok=True)
        if os.access(OUTPUT, os.W_OK | os.X_OK):
            return Folder(OUTPUT)
    return Folder(Path(tempfile.mkdtemp(prefix="fumehood-demo-")))


async def main() -> int:
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        return 0 if await Demo(console, output_folder()).run() else 1
    except IsolationUnavailable as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
