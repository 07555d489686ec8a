"""`fumehood exec --server`: the manners of `fumehood exec`, with a real server."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fumehood.cli import app
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from tests.support.sandbox_runs import build_environment, strip_limits_warning

FUMEHOOD = Path(sys.executable).parent / "fumehood"
TOKEN = "a-token-of-some-length"
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class RemoteExec:
    """The command, against one server."""

    url: str

    def start(self, *args: str | Path, token: str | None = TOKEN) -> subprocess.Popen[str]:
        variables = build_environment() | ({} if token is None else {"FUMEHOOD_SANDBOX_TOKEN": token})
        return subprocess.Popen(
            [FUMEHOOD, "exec", "--server", self.url, *args],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str | Path, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, token=token)
        stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        return subprocess.CompletedProcess([], process.returncode, stdout, stderr)

    def list_sandboxes(self) -> list[str]:
        async def ask() -> list[str]:
            async with RemoteSandboxProvider(self.url, TOKEN) as remote:
                return [info.id for info in await remote.list_sandboxes()]

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def command() -> Generator[RemoteExec]:
    process = subprocess.Popen(
        [FUMEHOOD, "sandbox", "--listen", "127.0.0.1:0", "--preload", "", "--pool", "1", "--grace", "0"],
        env=build_environment() | {"FUMEHOOD_SANDBOX_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        ready = re.match(r"Serving sandboxes on (\S+) ", process.stdout.readline())
        try:
            assert ready is not None
            yield RemoteExec(ready[1])
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout", "stderr"),
    [
        ("print('a', end=''); 'b'", 0, "a\n'b'\n", r""),
        ("1/0", 1, "", r"Traceback .*ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", 3, "", r""),
        ("import os; os._exit(0)", 125, "", r"The sandbox was lost: .*exited with code 0"),
    ],
    ids=["ends", "raises", "exits", "dies"],
)
def test_exit_code(command: RemoteExec, code: str, exit_code: int, stdout: str, stderr: str) -> None:
    result = command.run("-c", code)
    assert (result.returncode, result.stdout) == (exit_code, stdout), result.stderr
    assert re.search(stderr, result.stderr, re.DOTALL)
    assert stderr or not result.stderr
    assert command.list_sandboxes() == []


def test_time_out(command: RemoteExec) -> None:
    result = command.run("--json", "--timeout", "1", "-c", "while True: pass")
    assert result.returncode == 124
    *_, end, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert (end["type"], end["status"], last["code"]) == ("end", "timeout", 124)


def test_files_in_and_out(command: RemoteExec, tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("1\n2\n3\n")
    code = (
        "import os\nos.makedirs('a')\nopen('a/total.txt', 'w').write(str(sum(map(int, open('numbers.csv')))))\n"
        "open('.hidden', 'w').write('x')\nNone"
    )
    result = command.run(
        "--json", "--file", tmp_path / "numbers.csv", "--files-out", tmp_path / "out", "-c", code
    )
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["files"] == [{"path": "a/total.txt", "source": "a/total.txt", "size": 1}]
    assert [skipped["path"] for skipped in last["skipped"]] == [".hidden"]
    assert (tmp_path / "out/a/total.txt").read_text() == "6"
    assert not (tmp_path / "out/numbers.csv").exists()


_SLEEPER = "import time\nprint('here', flush=True)\ntime.sleep(50)"


def test_an_interrupt_reaches_the_code(command: RemoteExec) -> None:
    process = command.start("-c", _SLEEPER)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "KeyboardInterrupt" in stderr
    assert "The code was interrupted" in stderr
    assert command.list_sandboxes() == []


def test_termination_leaves_no_sandbox(command: RemoteExec) -> None:
    process = command.start("-c", _SLEEPER)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    assert len(command.list_sandboxes()) == 1
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == ""
    assert command.list_sandboxes() == []


def test_a_reader_that_leaves_ends_the_code(command: RemoteExec) -> None:
    process = command.start("-c", "while True: print('x' * 1000, flush=True)")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(TIMEOUT_SECONDS) == 141
    assert command.list_sandboxes() == []


def test_requirements_are_the_servers_to_judge(command: RemoteExec) -> None:
    result = command.run("--with", "--index-url=http://127.0.0.1:1", "-c", "print('ran')")
    assert (result.returncode, result.stdout) == (125, "")
    assert "--index-url" in result.stderr
    assert command.list_sandboxes() == []


def test_a_server_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = RemoteExec(url).run("-c", "print('ran')")
    assert (result.returncode, result.stdout) == (125, "")
    assert result.stderr == f"The sandbox server at {url} cannot be reached: Connection refused.\n"
    as_json = RemoteExec(f"unix:{tmp_path}/none").run("--json", "-c", "print('ran')")
    (last,) = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert (last["type"], last["code"], as_json.returncode) == ("exit", 125, 125)
    assert "cannot be reached: No such file or directory" in last["reason"]


@pytest.mark.parametrize("token", [None, "another-token-altogether"])
def test_a_wrong_token(command: RemoteExec, token: str | None) -> None:
    result = command.run("-c", "print('ran')", token=token)
    assert (result.returncode, result.stdout) == (125, "")
    assert len(strip_limits_warning(result.stderr).splitlines()) == 1
    assert "set the variable FUMEHOOD_SANDBOX_TOKEN" in result.stderr
    assert TOKEN not in result.stderr
    assert token is None or token not in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--server", "localhost:8080"),
        ("--server", "http://user:passw0rd@localhost"),
        ("--server", "http://127.0.0.1:1", "--mode", "namespaces"),
        ("--server", "http://127.0.0.1:1", "--limits", "enforced"),
        ("--server", "http://127.0.0.1:1", "--timeout", "100000"),
    ],
    ids=" ".join,
)
def test_wrong_use(args: Sequence[str]) -> None:
    result = CliRunner().invoke(app, ["exec", "-c", "1", *args])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr
    assert "passw0rd" not in result.stderr
