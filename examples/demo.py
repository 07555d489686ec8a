"""A conversation with a gateway of one's own, streamed: code, output, picture, files.

Run it with `make demo`. It starts `fumehood serve` with nothing configured, so the model is the built-in `direct`,
which runs the Python it is sent, and talks to it through the OpenAI SDK. It leaves what was made in `demo-output/`,
or in a temporary directory where that cannot be written, and ends with 0 only if all went as it should.
"""

import base64
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from fumehood.cli.exec.exec_output import escape_control_sequences
from fumehood.cli.output_directory import OutputDirectory

OUTPUT = Path(__file__).resolve().parent.parent / "demo-output"
LAX = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_LIMITS"
NO_LIMITS = (
    "This user may not bound memory here (no delegated cgroup), so the demonstration, whose code is known, "
    "runs without that bound; `fumehood doctor` says what to do."
)
CANNOT_SERVE = 125


@dataclass(frozen=True)
class Turn:
    """One message of the user's; `says` must be somewhere in what the code prints."""

    title: str
    code: str
    says: str


TURNS = (
    Turn(
        "The first turn measures and draws",
        """
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

random = np.random.default_rng(7)
measurements = pd.DataFrame({
    "reagent": random.choice(["acetone", "ethanol", "hexane"], 300),
    "vapour": random.gamma(2.0, 15.0, 300).round(1),
})
summary = measurements.groupby("reagent").vapour.agg(["count", "mean", "max"]).round(1)
print(summary)

summary["mean"].plot.barh(color="teal", figsize=(6, 3), xlabel="vapour, ppm")
plt.tight_layout()
plt.show()
""",
        says="ethanol",
    ),
    Turn(
        "The second finds its variables, and writes a file",
        """
highest = summary["max"].idxmax()
summary.to_csv("vapour.csv")
print(f"{len(measurements)} measurements, the highest of {highest}")
""",
        says="300 measurements, the highest of",
    ),
)


class Demo:
    def __init__(self, console: Console, folder: OutputDirectory, client: OpenAI) -> None:
        self._console = console
        self._folder = folder
        self._client = client
        self._left: list[str] = []
        self._problems: list[str] = []

    def run(self) -> bool:
        previous: str | None = None
        for number, turn in enumerate(TURNS, 1):
            previous = self._turn(number, turn, previous)
        if len(self._left) < 2:
            self._problems.append("There should be a chart and a table.")
        self._console.print()
        for name in self._left:
            place = escape_control_sequences(str(self._folder.path / name))
            self._console.print(f"What was made lies in {place}", soft_wrap=True, highlight=False)
        for problem in self._problems:
            self._console.print(Text(problem, style="red"))
        return not self._problems

    def _turn(self, number: int, turn: Turn, previous: str | None) -> str:
        self._console.print()
        self._console.print(Text(f"{number}. {turn.title}", style="bold"))
        events: Any = self._client.responses.create(
            model="direct",
            input=f"```python\n{turn.code.strip()}\n```",
            tools=[{"type": "code_interpreter", "container": {"type": "auto"}}],
            include=["code_interpreter_call.outputs"],
            previous_response_id=previous,
            stream=True,
        )
        response: Any = None
        last = ""
        for event in events:
            if event.type != last:
                self._console.print(Text(f"  {event.type}", style="dim"))
            last = event.type
            if event.type == "response.code_interpreter_call_code.done":
                code = Syntax(event.code, "python", background_color="default", word_wrap=True)
                self._console.print(Padding(code, (0, 0, 0, 4)))
            elif event.type == "response.output_item.done" and event.item.type == "code_interpreter_call":
                self._outputs(turn, event.item)
            elif event.type in ("response.completed", "response.failed", "response.incomplete"):
                response = event.response
        if response is None or response.status != "completed":
            self._problems.append(f"“{turn.title}” did not complete.")
        else:
            self._take_home(response)
        return response.id if response else ""

    def _outputs(self, turn: Turn, call: Any) -> None:
        said = ""
        for output in call.outputs or []:
            if output.type == "logs":
                said += output.logs
                for line in escape_control_sequences(output.logs).splitlines():
                    self._console.print(Text(f"  | {line}"), soft_wrap=True)
            else:
                content = base64.b64decode(output.url.partition(",")[2])
                self._left.append(self._folder.save("chart.png", content))
                self._console.print(Text(f"  | [picture: {self._left[-1]}]", style="cyan"), soft_wrap=True)
        if turn.says not in said:
            self._problems.append(f"“{turn.title}” did not say {turn.says!r}.")

    def _take_home(self, response: Any) -> None:
        """The files that the answer cites, pictures excepted: those were shown."""
        for item in response.output:
            for part in item.content if item.type == "message" else []:
                for note in part.annotations:
                    if note.type == "container_file_citation" and not note.filename.endswith(".png"):
                        content = self._client.containers.files.content.retrieve(
                            note.file_id, container_id=note.container_id
                        )
                        self._left.append(self._folder.save(note.filename, content.read()))


class NotServed(Exception):
    """It says itself why."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code


@contextlib.contextmanager
def gateway(directory: Path, limits: str) -> Iterator[str]:
    """A gateway that keeps its things in this directory; its base URL."""
    environment = {
        **os.environ,
        "FUMEHOOD_STORAGE__URL": f"sqlite:///{directory}/demo.db",
        "FUMEHOOD_STORAGE__BLOBS": str(directory / "blobs"),
        "FUMEHOOD_TELEMETRY__LOG_LEVEL": "error",
        LAX: limits,
    }
    command = [sys.executable, "-m", "fumehood", "serve", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"on (http://\S+/v1)", line):
                try:
                    yield found[1]
                finally:
                    process.terminate()
                    process.communicate()
                return
        raise NotServed(said.strip(), process.wait())


def output_folder() -> OutputDirectory:
    with contextlib.suppress(OSError):
        OUTPUT.mkdir(exist_ok=True)
        if os.access(OUTPUT, os.W_OK | os.X_OK):
            return OutputDirectory(OUTPUT)
    return OutputDirectory(Path(tempfile.mkdtemp(prefix="fumehood-demo-")))


def talk(console: Console, directory: Path, limits: str) -> bool:
    with contextlib.ExitStack() as stack:
        with console.status("starting the gateway…"):
            url = stack.enter_context(gateway(directory, limits))
        console.print(Text(f"A gateway serves on {url}", style="dim"))
        if limits == "best-effort":
            console.print(Text(NO_LIMITS, style="yellow"), soft_wrap=True)
        client = stack.enter_context(OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120))
        return Demo(console, output_folder(), client).run()


def main() -> int:
    console = Console(highlight=False, markup=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix="fumehood-demo-") as directory:
        try:
            return 0 if talk(console, Path(directory), "enforced") else 1
        except NotServed as refusal:
            try:
                if refusal.code == CANNOT_SERVE:
                    return 0 if talk(console, Path(directory), "best-effort") else 1
            except NotServed:
                pass
            console.print(Text(str(refusal), style="red"), soft_wrap=True)
            return 1


if __name__ == "__main__":
    sys.exit(main())
