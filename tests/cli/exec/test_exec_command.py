"""`fumehood exec` with real sandboxes, and the parts that guard the operator."""

import fcntl
import json
import os
import re
import select
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.cli.exec.exec_output import escape_control_sequences
from fumehood.cli.exec.exec_session import choose_preload
from fumehood.cli.output_directory import FileNotSaved, OutputDirectory, decode_images, split_safe_path
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, ExecutionEvent, Stdout
from tests.support.cli_runner import FUMEHOOD, TIMEOUT_SECONDS, find_leftovers, run_command, run_fumehood
from tests.support.sandbox_runs import build_environment, has_cgroups

ROOT = Path(__file__).resolve().parents[3]


needs_memory_bounds = pytest.mark.skipif(not has_cgroups(), reason="this user may not bound memory here")


# ---- what the README says -------------------------------------------------------------------------------------


def readme_examples() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [block for _, block in blocks if block.startswith("fumehood exec")]


def test_readme_examples(tmp_path: Path) -> None:
    examples = readme_examples()
    assert len(examples) == 2
    environ = {**build_environment(), "PATH": f"{FUMEHOOD.parent}:{os.environ['PATH']}"}
    printed = [
        subprocess.run(
            ["sh", "-c", text],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        ).stdout
        for text in examples
    ]
    assert printed == ["45\n", ""]
    assert (tmp_path / "out/squares.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/figure-1.png").read_bytes().startswith(b"\x89PNG")


# ---- exit codes -----------------------------------------------------------------------------------------------

_MEMORY_FILES = """
import os
kept = []
for number in range(3000):
    kept.append(os.memfd_create(str(number)))
    os.write(kept[-1], b"x" * (2 << 20))
"""
_DEAF_LOOP = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
_FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("bytearray(2 << 30)", 1, "MemoryError"),
        pytest.param(_MEMORY_FILES, 137, "out of memory (1g)", marks=needs_memory_bounds),
    ],
    ids=["MemoryError", "memory bomb"],
)
def test_out_of_memory(code: str, exit_code: int, stderr: str) -> None:
    result = run_fumehood("exec", "-c", code)
    assert (result.returncode, result.stdout) == (exit_code, ""), result.stderr
    assert stderr in result.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "and was interrupted."),
        (_DEAF_LOOP, "was killed"),
        (_FORK_BOMB, "ran longer than 1 s"),
    ],
    ids=["loop", "deaf loop", "fork bomb"],
)
def test_time_out(code: str, reason: str) -> None:
    result = run_fumehood("exec", "--json", "--timeout", "1", "-c", code)
    assert result.returncode == 124
    *_, end, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert end["type"] == "end"
    assert end["status"] == "timeout"
    assert end["duration_ms"] < 4000
    assert reason in end["reason"]
    assert last["code"] == 124


def test_nothing_runs_without_isolation(tmp_path: Path) -> None:
    result = run_fumehood("exec", "--mode", "pod", "--guest-socket", tmp_path / "none", "-c", "print('ran')")
    assert (result.returncode, result.stdout) == (125, "")
    assert "This host cannot isolate code, so nothing was run." in result.stderr
    assert "Start the code container first" in result.stderr
    as_json = run_fumehood(
        "exec", "--json", "--mode", "pod", "--guest-socket", tmp_path / "none", "-c", "print('ran')"
    )
    (last,) = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert last["type"] == "exit"
    assert last["code"] == as_json.returncode == 125
    assert "nothing was run" in last["reason"]


@pytest.mark.root
def test_refuses_without_cgroups() -> None:
    script = 'umount -l /sys/fs/cgroup && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", FUMEHOOD, "exec", "-c", "print('ran')"]
    result = subprocess.run(
        command, env=build_environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (result.returncode, result.stdout) == (125, ""), result.stderr
    assert "Mount a cgroup file system" in result.stderr
    assert "best-effort" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("-c", "1", "file.py"),
        ("no-such-file.py",),
        ("--memory", "8g", "-c", "1"),
        ("--timeout", "0", "-c", "1"),
        ("--timeout", "nan", "-c", "1"),
        ("--timeout", "soon", "-c", "1"),
        ("--mode", "none", "-c", "1"),
        ("--mode", "pod", "-c", "1"),
        ("--file", "no-such-file.csv", "-c", "1"),
        ("--files-out", "/dev/null", "-c", "1"),
        ("--no-such-option", "-c", "1"),
    ],
    ids=" ".join,
)
def test_invalid_usage(args: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command("exec", *args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err


def test_code_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"print('\xff')\n")
    assert run_fumehood("exec", tmp_path / "bad.py").returncode == 2
    assert run_fumehood("exec", "-c", os.fsdecode(b"print('\xff')")).returncode == 2


# ---- code in, output and files out ----------------------------------------------------------------------------


def test_file_with_uploads_and_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("1\n2\n3\n")
    (tmp_path / "sum.py").write_bytes(
        "# -*- coding: latin-1 -*-\nimport os\nos.makedirs('a/b')\n"
        "total = sum(map(int, open('numbers.csv')))\nopen('a/b/total.txt', 'w').write(f'é{total}')\n".encode(
            "latin-1"
        )
    )
    args = ("exec", "--file", "numbers.csv", "--files-out", "out", "sum.py")
    result = run_fumehood(*args, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"], (
        "what was uploaded is not brought back"
    )
    assert (tmp_path / "out/a/b/total.txt").read_text() == "é6"
    assert result.stderr == "saved: out/a/b/total.txt\n"
    (tmp_path / "out/a/b/total.txt").write_text("mine")
    assert run_fumehood(*args, "--quiet", cwd=tmp_path).stderr == ""
    assert (tmp_path / "out/a/b/total.txt").read_text() == "mine"
    assert (tmp_path / "out/a/b/total-2.txt").read_text() == "é6"


_HOSTILE = r"""
import os
for name in ("n\nl", "e\x1b[31m", b"\xff\xfe", "\u202egnp.exe", "x" * 255, "-rf", "taken", "good.txt"):
    open(name, "w").write("theirs")
os.mkdir("link")
open("link/inside", "w").write("theirs")
os.symlink("/etc/passwd", "passwd")
os.symlink("/", "root")
os.mkfifo("fifo")
os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 10 << 30)
print("\x1b[2Jraw")
"""


def test_hostile_files_through_standard_input(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("mine")
    (out / "link").symlink_to(outside)
    (out / "taken").symlink_to(outside / "secret")
    result = run_fumehood("exec", "--files-out", out, "-", stdin=_HOSTILE)
    assert (result.returncode, result.stdout) == (0, "\x1b[2Jraw\n"), "a pipe gets the output as it is"
    assert (outside / "secret").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["secret"]
    saved = {path.name for path in out.iterdir() if not path.is_symlink()}
    assert saved == {"x" * 255, "-rf", "taken-2", "good.txt"}
    assert all(stat.S_IMODE((out / name).stat().st_mode) & 0o111 == 0 for name in saved)
    assert "\x1b" not in result.stderr
    skipped = re.findall(r"^not saved: ([^:]+): (.*)$", result.stderr, re.MULTILINE)
    assert dict(skipped).keys() == {
        "n\\x0al",
        "e\\x1b[31m",
        "…",
        "\\u202egnp.exe",
        "link/inside",
        "sparse",
    }
    assert "10737418240 bytes" in dict(skipped)["sparse"]
    assert "names that are not text" in dict(skipped)["…"]
    assert "a file or a link" in dict(skipped)["link/inside"]


def test_json(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib.pyplot as plt\nprint('out\\x9b'); print('err', file=sys.stderr)\n"
        "plt.plot([1, 2]); plt.show()\nopen('made.txt', 'w').write('x')\nraise KeyError('no')"
    )
    result = run_fumehood("exec", "--json", "--files-out", tmp_path / "out", "-c", code)
    assert result.returncode == 1
    *lines, last = result.stdout.splitlines()
    events = [msgspec.json.decode(line, type=ExecutionEvent) for line in lines]
    assert [type(event).__name__ for event in events] == [
        "Stdout",
        "Stderr",
        "DisplayData",
        "ExceptionRaised",
        "ExecutionEnd",
    ]
    assert events[0] == Stdout("out\x9b\n")
    assert "\x9b" not in result.stdout
    assert isinstance(events[-1], ExecutionEnd)
    picture = (tmp_path / "out/figure-1.png").stat().st_size
    assert json.loads(last) == {
        "type": "exit",
        "code": 1,
        "reason": "",
        "directory": str(tmp_path / "out"),
        "files": [
            {"path": "figure-1.png", "source": None, "size": picture},
            {"path": "made.txt", "source": "made.txt", "size": 1},
        ],
        "skipped": [],
    }


def test_hidden_and_large_files_are_not_saved(tmp_path: Path) -> None:
    code = (
        "import os\nos.makedirs('.git/hooks'); os.makedirs('a/.b')\n"
        "for name in ('.envrc', '.git/hooks/post-checkout', 'a/.b/c', 'a/plain'): open(name, 'w').write('x')\n"
        "os.truncate(os.open('large', os.O_CREAT | os.O_RDWR), (256 << 20) + 1)"
    )
    result = run_fumehood("exec", "--json", "--files-out", tmp_path / "out", "-c", code)
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert [file["path"] for file in last["files"]] == ["a/plain"]
    skipped = {file["path"]: file["reason"] for file in last["skipped"]}
    assert skipped.keys() == {".envrc", ".git/hooks/post-checkout", "a/.b/c", "large"}
    assert skipped.pop("large") == f"{(256 << 20) + 1} bytes, over the limit of one file (256 MiB)"
    assert set(skipped.values()) == {"hidden: a part of its path begins with a dot"}
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["a", "plain"]
    assert result.stderr.count("not saved: ") == 4


def test_an_image_that_cannot_be_saved_does_not_end_the_run() -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show(); print('went on')"
    source = (
        "import sys, tempfile; tempfile.tempdir = '/nowhere'; from fumehood.cli import main\n"
        f"sys.argv = ['fumehood', 'exec', '-c', {code!r}]; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", source],
        env=build_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("went on\n")
    assert "An image was not saved: " in result.stderr


# ---- signals and terminals ------------------------------------------------------------------------------------


def test_a_blocked_reader_does_not_delay_the_timeout() -> None:
    process = subprocess.Popen(
        [FUMEHOOD, "exec", "--timeout", "1", "-c", "while True: print('x' * 10_000)"],
        env=build_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    began = time.monotonic()
    # Standard output is full by then, and nobody has read from it.
    while find_leftovers(process.pid) or time.monotonic() - began < 1:
        assert time.monotonic() - began < 20, "the sandbox outlives its time"
        time.sleep(0.05)
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 124


class PseudoTerminal:
    """The command on a terminal of its own, which is its controlling one."""

    def __init__(self, *args: str) -> None:
        self.master, slave = os.openpty()
        self.output = ""
        self.process = subprocess.Popen(
            [FUMEHOOD, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**build_environment(), "TERM": "xterm", "COLUMNS": "120"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(slave)

    def until(self, text: str | None) -> str:
        """Everything up to and with the text, or up to the end."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while text is None or text not in self.output:
            assert time.monotonic() < deadline, self.output
            if not select.select([self.master], [], [], 1)[0]:
                continue
            try:
                self.output += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the terminal's other end is closed
                assert text is None, self.output
                break
        return self.output

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> int:
        self.until(None)
        os.close(self.master)
        return self.process.wait(TIMEOUT_SECONDS)


def test_code_cannot_drive_the_terminal() -> None:
    code = r"print('A\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b2J\x08\x7fZ'); raise ValueError('\x1b[3J')"
    terminal = PseudoTerminal("exec", "-c", code)
    terminal.until("Z")
    assert terminal.close() == 1
    assert "starting the sandbox…" in terminal.output
    displayed = terminal.output[terminal.output.index("A␛") :]
    assert displayed.startswith("A␛]0;owned␇␛[2J\x1b[31mred\\x9b2J␈␡Z\r\n")
    assert (
        set(re.findall(r"\x1b\S*?[@-Z\\^-~]", displayed.replace("\x1b[31m", "").replace("\x1b[0m", "")))
        == set()
    )
    assert "ValueError: ␛[3J" in displayed


def test_second_interrupt_ends_deaf_code() -> None:
    terminal = PseudoTerminal("exec", "-c", f"print('he' + 're', flush=True)\n{_DEAF_LOOP}")
    terminal.until("here")
    terminal.press(b"\x03")
    terminal.until("press Ctrl-C again")
    terminal.press(b"\x03")
    assert terminal.close() == 130
    assert "Traceback" not in terminal.output
    assert not find_leftovers(terminal.process.pid)


# ---- the parts ------------------------------------------------------------------------------------------------


@settings(database=None)  # the working directory may not be ours to write to
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_escaped_text_has_no_controls_but_colours(text: str) -> None:
    displayed = re.sub(r"\x1b\[[0-9;:]*m", "", escape_control_sequences(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", displayed)
    if text.isprintable():
        assert displayed == text


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../../up",
        "a//b",
        "./a",
        "a/",
        "a\0b",
        "a\nb",
        "a\x9bb",
        "\udcff",
        "d/" * 40 + "f",
        ".envrc",
        "..a",
        ".git/hooks/post-checkout",
        "a/.vscode/tasks.json",
    ],
)
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotSaved):
        split_safe_path(name)
    with pytest.raises(FileNotSaved):
        OutputDirectory(tmp_path / "out").save(name, b"")
    assert list((tmp_path / "out").iterdir()) == []


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    directory = OutputDirectory(tmp_path)
    assert directory.save("a.txt", b"1") == "a.txt"
    assert directory.save("a.txt", b"1") == "a.txt"
    assert directory.save("a.txt", b"2") == "a-2.txt"
    assert directory.save("a.txt", b"2") == "a-2.txt"
    assert directory.save_image(".png", b"x") == "figure-1.png"
    assert directory.save_image(".png", b"y") == "figure-2.png"
    os.mkfifo(tmp_path / "figure-3.png")
    assert directory.save_image(".png", b"z") == "figure-4.png"
    assert (tmp_path / "a.txt").read_bytes() == b"1"


def test_images_of_a_display_event() -> None:
    display_data = {
        "text/plain": "x",
        "image/png": "aGk=",
        "image/svg+xml": "<svg/>",
        "application/x-sh": "aGk=",
    }
    assert list(decode_images(display_data)) == [(".png", b"hi"), (".svg", b"<svg/>")]
    with pytest.raises(FileNotSaved):
        list(decode_images({"image/png": "é"}))


@pytest.mark.parametrize(
    ("code", "is_light"),
    [
        ("print(1)", True),
        ("import json, os.path\nfrom collections import deque", True),
        ("import pandas as pd", False),
        ("def f():\n    from matplotlib import pyplot", False),
        ("__import__('numpy')", False),
        ("import importlib", False),
        ("import helper", False),
        ("from . import x", False),
        ("!not python", False),
    ],
)
def test_code_of_the_standard_library_preloads_nothing(code: str, is_light: bool) -> None:
    preload = ("numpy",)
    assert choose_preload(code, (), preload) == (() if is_light else preload)


def test_version_and_module() -> None:
    commands: list[list[Any]] = [[FUMEHOOD, "--version"], [sys.executable, "-m", "fumehood", "--version"]]
    printed = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands
    }
    assert len(printed) == 1
    assert re.fullmatch(r"fumehood \d+\.\d+\.\d+\n", printed.pop())


def test_help_tells_the_exit_codes_and_what_is_not_saved() -> None:
    text = run_fumehood("exec", "--help").stdout
    for phrase in (
        "256 MiB",
        "1 GiB",
        "hidden files",
        "FUMEHOOD_MODE",
        "FUMEHOOD_LIMITS",
        "FUMEHOOD_GUEST_SOCKET",
    ):
        assert phrase in " ".join(text.split())
        assert phrase in " ".join((ROOT / "docs/command-line.md").read_text().split())
    for code in ("124", "125", "130", "137"):
        assert re.search(rf"^\s+{code}\s+\w", text, re.MULTILINE)
