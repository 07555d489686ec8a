"""Runs commands of the command line, in this process or in one of their own."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fumehood.cli import app
from tests.support.sandbox_runs import build_environment, has_cgroups, strip_limits_warning

FUMEHOOD = Path(sys.executable).parent / "fumehood"
TIMEOUT_SECONDS = 60


@dataclass
class CommandResult:
    code: int
    out: str
    err: str
    raw: bytes

    @property
    def streams(self) -> tuple[int, str, str]:
        return self.code, self.out, self.err

    @property
    def error_text(self) -> str:
        """Standard error as one line, without the frames of rich."""
        return " ".join(self.err.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"), " ")).split())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that `--json` printed."""
        assert self.code == 0, self
        return [json.loads(line) for line in self.out.splitlines()]


def clear_server_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove servers and API keys from the environment."""
    for name in ("FUMEHOOD_BASE_URL", "OPENAI_BASE_URL", "FUMEHOOD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run_command(
    *arguments: str, url: str | None = None, stdin: str | None = None, **environ: str
) -> CommandResult:
    """Run a command in this process."""
    variables = {"COLUMNS": "300", **({"FUMEHOOD_BASE_URL": url} if url else {}), **environ}
    result = CliRunner().invoke(app, [*arguments], input=stdin, env=variables)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return CommandResult(result.exit_code, result.stdout.strip(), result.stderr.strip(), result.stdout_bytes)


def run_fumehood(
    *arguments: str | Path, stdin: str | None = None, cwd: str | Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with the limits of sandboxes that work here."""
    result = subprocess.run(
        [FUMEHOOD, *arguments],
        input=stdin,
        cwd=cwd,
        env={**build_environment(), **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if not has_cgroups():
        result.stderr = strip_limits_warning(result.stderr)
    return result


def find_leftovers(pid: int) -> list[Path]:
    """The cgroups that a command has made, and the jail that it has started (in a session of its own)."""
    found = [path for path in Path("/sys/fs/cgroup").glob(f"**/fumehood-{pid}-*") if path.is_dir()]
    assert not found or has_cgroups()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(status)
    return found
