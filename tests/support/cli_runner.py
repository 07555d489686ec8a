"""Runs commands of the command line in this process."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from fumehood.cli import app


@dataclass
class CommandResult:
    code: int
    out: str
    err: str
    raw: bytes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that `--json` printed."""
        assert self.code == 0, self
        return [json.loads(line) for line in self.out.splitlines()]


def clear_server_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove servers and API keys from the environment."""
    for name in ("FUMEHOOD_BASE_URL", "OPENAI_BASE_URL", "FUMEHOOD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run_command(*arguments: str, url: str | None = None, **environ: str) -> CommandResult:
    variables = {"COLUMNS": "300", **({"FUMEHOOD_BASE_URL": url} if url else {}), **environ}
    result = CliRunner().invoke(app, [*arguments], env=variables)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return CommandResult(result.exit_code, result.stdout.strip(), result.stderr.strip(), result.stdout_bytes)
