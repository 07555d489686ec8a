"""`fumehood exec` with and without `--server`: what both have in common, and what only the server has."""

import asyncio
import json
import re
import signal
import socket
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from tests.support.cli_runner import FUMEHOOD, TIMEOUT_SECONDS, find_leftovers, run_command
from tests.support.sandbox_runs import build_environment, has_cgroups, strip_limits_warning

TOKEN = "a-token-of-some-length"


@dataclass(frozen=True)
class ExecCommand:
    """The command, with sandboxes of its own or of a server."""

    url: str | None = None

    def start(self, *args: str | Path, token: str | None = TOKEN) -> subprocess.Popen[str]:
        variables = build_environment() | ({} if token is None else {"FUMEHOOD_SANDBOX_TOKEN": token})
        return subprocess.Popen(
            [FUMEHOOD, "exec", *(("--server", self.url) if self.url else ()), *args],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_and_read(self, code: str) -> subprocess.Popen[str]:
        """Start code and read the first line that it prints."""
        process = self.start("-c", code)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def run(self, *args: str | Path, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, token=token)
        stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        return subprocess.CompletedProcess(
            [], process.returncode, stdout, stderr if has_cgroups() else strip_limits_warning(stderr)
        )

    def find_sandboxes(self, process: subprocess.Popen[str] | None = None) -> Sequence[object]:
        """What a process has made and not removed, or all sandboxes of the server."""
        if self.url is None:
            return find_leftovers(process.pid) if process is not None else []
        return asyncio.run(self._list_sandboxes(self.url))

    async def _list_sandboxes(self, url: str) -> list[str]:
        async with RemoteSandboxProvider(url, TOKEN) as remote:
            return [info.id for info in await remote.list_sandboxes()]


@pytest.fixture(scope="module")
def remote() -> Generator[ExecCommand]:
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
            yield ExecCommand(ready[1])
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECONDS)


@pytest.fixture(params=["local", "remote"])
def command(request: pytest.FixtureRequest) -> ExecCommand:
    return request.getfixturevalue("remote") if request.param == "remote" else ExecCommand()


# --- with sandboxes of this host and of a server ------------------------------------------------------


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
def test_exit_code(command: ExecCommand, code: str, exit_code: int, stdout: str, stderr: str) -> None:
    result = command.run("-c", code)
    assert (result.returncode, result.stdout) == (exit_code, stdout), result.stderr
    assert re.search(stderr, result.stderr, re.DOTALL)
    assert stderr or not result.stderr
    assert command.find_sandboxes() == []


_SLEEPER = "import time\nprint('here', flush=True)\ntime.sleep(50)"


def test_an_interrupt_reaches_the_code(command: ExecCommand) -> None:
    process = command.start_and_read(_SLEEPER)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "KeyboardInterrupt" in stderr
    assert "The code was interrupted" in stderr
    assert command.find_sandboxes() == []


def test_termination_leaves_no_sandbox(command: ExecCommand) -> None:
    process = command.start_and_read(_SLEEPER)
    made = command.find_sandboxes(process)
    assert made
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert strip_limits_warning(stderr) == ""
    assert command.find_sandboxes(process) == []
    assert [path for path in made if isinstance(path, Path) and path.exists()] == []


def test_a_reader_that_leaves_ends_the_code(command: ExecCommand) -> None:
    process = command.start_and_read("while True: print('x' * 1000, flush=True)")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert strip_limits_warning(process.stderr.read()) == ""
    assert process.wait(TIMEOUT_SECONDS) == 141
    assert command.find_sandboxes() == []


# --- with a server only -------------------------------------------------------------------------------


def test_time_out(remote: ExecCommand) -> None:
    result = remote.run("--json", "--timeout", "1", "-c", "while True: pass")
    assert result.returncode == 124
    *_, end, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert (end["type"], end["status"], last["code"]) == ("end", "timeout", 124)


def test_files_in_and_out(remote: ExecCommand, tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("1\n2\n3\n")
    code = (
        "import os\nos.makedirs('a')\nopen('a/total.txt', 'w').write(str(sum(map(int, open('numbers.csv')))))\n"
        "open('.hidden', 'w').write('x')\nNone"
    )
    result = remote.run(
        "--json", "--file", tmp_path / "numbers.csv", "--files-out", tmp_path / "out", "-c", code
    )
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["files"] == [{"path": "a/total.txt", "source": "a/total.txt", "size": 1}]
    assert [skipped["path"] for skipped in last["skipped"]] == [".hidden"]
    assert (tmp_path / "out/a/total.txt").read_text() == "6"
    assert not (tmp_path / "out/numbers.csv").exists()


def test_requirements_are_checked_by_the_server(remote: ExecCommand) -> None:
    result = remote.run("--with", "--index-url=http://127.0.0.1:1", "-c", "print('ran')")
    assert (result.returncode, result.stdout) == (125, "")
    assert "--index-url" in result.stderr
    assert remote.find_sandboxes() == []


def test_a_server_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = ExecCommand(url).run("-c", "print('ran')")
    assert (result.returncode, result.stdout) == (125, "")
    assert result.stderr == f"The sandbox server at {url} cannot be reached: Connection refused.\n"
    as_json = ExecCommand(f"unix:{tmp_path}/none").run("--json", "-c", "print('ran')")
    (last,) = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert (last["type"], last["code"], as_json.returncode) == ("exit", 125, 125)
    assert "cannot be reached: No such file or directory" in last["reason"]


@pytest.mark.parametrize("token", [None, "another-token-altogether"])
def test_a_wrong_token(remote: ExecCommand, token: str | None) -> None:
    result = remote.run("-c", "print('ran')", token=token)
    assert (result.returncode, result.stdout) == (125, "")
    assert len(result.stderr.splitlines()) == 1
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
def test_invalid_usage(args: Sequence[str]) -> None:
    result = run_command("exec", "-c", "1", *args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err
    assert "passw0rd" not in result.err
