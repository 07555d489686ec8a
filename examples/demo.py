"""A streamed conversation with a local gateway: code, output, an image, a file.

Run it with `make demo`. It starts `fumehood serve` without configuration, so the model is the built-in `direct`, which
runs the Python it is sent, and talks to it through the OpenAI SDK. It saves the files to `demo-output/`, or to a
temporary directory if that is not writable, and exits with 0 only if everything worked.
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
LIMITS_VARIABLE = "FUMEHOOD_PROVIDERS__CODE_INTERPRETER__SETTINGS__SANDBOX_LIMITS"
NO_LIMITS = (
    "This user cannot limit memory here (no delegated cgroup), so the demo, whose code is trusted, runs without the "
    "limit; `fumehood doctor` says what to do."
)
EXIT_UNAVAILABLE = 125


@dataclass(frozen=True)
class Turn:
    """One user message; the output of its code must contain `expected`."""

    title: str
    code: str
    expected: str


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
        expected="ethanol",
    ),
    Turn(
        "The second finds its variables, and writes a file",
        """
highest = summary["max"].idxmax()
summary.to_csv("vapour.csv")
print(f"{len(measurements)} measurements, the highest of {highest}")
""",
        expected="300 measurements, the highest of",
    ),
)


class Demo:
    def __init__(self, console: Console, directory: OutputDirectory, client: OpenAI) -> None:
        self._console = console
        self._directory = directory
        self._client = client
        self._saved: list[str] = []
        self._problems: list[str] = []

    def run(self) -> bool:
        previous: str | None = None
        for number, turn in enumerate(TURNS, 1):
            previous = self._run_turn(number, turn, previous)
        if len(self._saved) < 2:
            self._problems.append("There should be a chart and a table.")
        self._console.print()
        for name in self._saved:
            path = escape_control_sequences(str(self._directory.path / name))
            self._console.print(f"Saved {path}", soft_wrap=True, highlight=False)
        for problem in self._problems:
            self._console.print(Text(problem, style="red"))
        return not self._problems

    def _run_turn(self, number: int, turn: Turn, previous: str | None) -> str:
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
                self._show_outputs(turn, event.item)
            elif event.type in ("response.completed", "response.failed", "response.incomplete"):
                response = event.response
        if response is None or response.status != "completed":
            self._problems.append(f"“{turn.title}” did not complete.")
        else:
            self._save_files(response)
        return response.id if response else ""

    def _show_outputs(self, turn: Turn, call: Any) -> None:
        logs = ""
        for output in call.outputs or []:
            if output.type == "logs":
                logs += output.logs
                for line in escape_control_sequences(output.logs).splitlines():
                    self._console.print(Text(f"  | {line}"), soft_wrap=True)
            else:
                content = base64.b64decode(output.url.partition(",")[2])
                self._saved.append(self._directory.save("chart.png", content))
                self._console.print(Text(f"  | [image: {self._saved[-1]}]", style="cyan"), soft_wrap=True)
        if turn.expected not in logs:
            self._problems.append(f"“{turn.title}” did not print {turn.expected!r}.")

    def _save_files(self, response: Any) -> None:
        """Save the files that the answer cites, except images, which are saved already."""
        for item in response.output:
            for part in item.content if item.type == "message" else []:
                for note in part.annotations:
                    if note.type == "container_file_citation" and not note.filename.endswith(".png"):
                        content = self._client.containers.files.content.retrieve(
                            note.file_id, container_id=note.container_id
                        )
                        self._saved.append(self._directory.save(note.filename, content.read()))


class GatewayNotStarted(Exception):
    """The gateway exited; the text is its output."""

    def __init__(self, output: str, code: int) -> None:
        super().__init__(output)
        self.code = code


@contextlib.contextmanager
def gateway(directory: Path, limits: str) -> Iterator[str]:
    """Run a gateway that stores its data in this directory; yields its base URL."""
    environment = {
        **os.environ,
        "FUMEHOOD_STORAGE__URL": f"sqlite:///{directory}/demo.db",
        "FUMEHOOD_STORAGE__BLOBS": str(directory / "blobs"),
        "FUMEHOOD_TELEMETRY__LOG_LEVEL": "error",
        LIMITS_VARIABLE: limits,
    }
    command = [sys.executable, "-m", "fumehood", "serve", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if found := re.search(r"on (http://\S+/v1)", line):
                try:
                    yield found[1]
                finally:
                    process.terminate()
                    process.communicate()
                return
        raise GatewayNotStarted(output.strip(), process.wait())


def open_output_directory() -> OutputDirectory:
    with contextlib.suppress(OSError):
        OUTPUT.mkdir(exist_ok=True)
        if os.access(OUTPUT, os.W_OK | os.X_OK):
            return OutputDirectory(OUTPUT)
    return OutputDirectory(Path(tempfile.mkdtemp(prefix="fumehood-demo-")))


def run_demo(console: Console, directory: Path, limits: str) -> bool:
    with contextlib.ExitStack() as stack:
        with console.status("starting the gateway…"):
            url = stack.enter_context(gateway(directory, limits))
        console.print(Text(f"The gateway listens on {url}", style="dim"))
        if limits == "best-effort":
            console.print(Text(NO_LIMITS, style="yellow"), soft_wrap=True)
        client = stack.enter_context(OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120))
        return Demo(console, open_output_directory(), client).run()


def main() -> int:
    console = Console(highlight=False, markup=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix="fumehood-demo-") as directory:
        try:
            return 0 if run_demo(console, Path(directory), "enforced") else 1
        except GatewayNotStarted as error:
            try:
                if error.code == EXIT_UNAVAILABLE:
                    return 0 if run_demo(console, Path(directory), "best-effort") else 1
            except GatewayNotStarted:
                pass
            console.print(Text(str(error), style="red"), soft_wrap=True)
            return 1


if __name__ == "__main__":
    sys.exit(main())
