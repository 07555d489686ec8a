"""`fumehood doctor` on this machine; imports only the standard library."""

import json
import re
import subprocess
import sys
from pathlib import Path

FUMEHOOD = Path(sys.executable).parent / "fumehood"


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FUMEHOOD, "doctor", *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_this_machine_isolates() -> None:
    done = run()
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert done.stdout.endswith("Code can be isolated here (mode namespaces).\n")
    for name in ("sandbox starts", "code runs", "files", "network", "kernel user"):
        assert re.search(rf"^ok\s+{name}\s", done.stdout, re.MULTILINE), done.stdout
    for name in (
        "kernel",
        "user namespaces",
        "bubblewrap",
        "/proc",
        "system-call filter",
        "Landlock",
        "cgroups",
    ):
        assert re.search(rf"^(ok|warning)\s+{name}\s", done.stdout, re.MULTILINE), done.stdout


def test_a_mode_that_does_not_work(tmp_path: Path) -> None:
    arguments = ("--mode", "pod", "--guest-socket", tmp_path / "none")
    done = run(*arguments)
    assert done.returncode == 1
    assert "Code cannot be isolated here (mode pod)." in done.stdout
    assert "Start the code container first" in done.stdout
    as_json = run(*arguments, "--json")
    report = json.loads(as_json.stdout)
    assert as_json.returncode == 1
    assert (report["works"], report["mode"]) == (False, "pod")
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert states["kernel"] == "ok"
    assert states["guest socket"] == states["sandbox starts"] == "missing"


def test_wrong_use() -> None:
    assert run("--mode", "none").returncode == 2
