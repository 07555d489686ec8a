"""`fumehood doctor` on this machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandbox_runs import build_environment, has_cgroups

FUMEHOOD = Path(sys.executable).parent / "fumehood"
QUICKLY = {"FUMEHOOD_SANDBOX_PRELOAD": ""}  # what is loaded beforehand takes most of the time


def run(*args: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FUMEHOOD, "doctor", *args],
        env={**build_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_this_machine_isolates() -> None:
    result = run()
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    assert result.stdout.endswith("This host can isolate code (mode namespaces).\n")
    for name in ("sandbox starts", "code runs", "files", "network", "kernel user"):
        assert re.search(rf"^ok\s+{name}\s", result.stdout, re.MULTILINE), result.stdout
    assert re.search(
        r"^warning\s+packages\s.*the package index cannot be reached", result.stdout, re.MULTILINE
    )
    for name in (
        "kernel",
        "user namespaces",
        "overlayfs",
        "/proc",
        "system-call filter",
        "Landlock",
        "cgroups",
    ):
        assert re.search(rf"^(ok|warning)\s+{name}\s", result.stdout, re.MULTILINE), result.stdout


def test_a_mode_that_does_not_work(tmp_path: Path) -> None:
    arguments = ("--mode", "pod", "--guest-socket", tmp_path / "none")
    result = run(*arguments)
    assert result.returncode == 1
    assert "This host cannot isolate code (mode pod)." in result.stdout
    assert "Start the code container first" in result.stdout
    as_json = run(*arguments, "--json")
    report = json.loads(as_json.stdout)
    assert as_json.returncode == 1
    assert (report["is_usable"], report["mode"]) == (False, "pod")
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert states["kernel"] == "ok"
    assert states["guest socket"] == states["sandbox starts"] == "missing"


def test_each_thing_is_said_once() -> None:
    """Where no package is installed, its name stands in one line, without the modules below it."""
    result = run(FUMEHOOD_SANDBOX_PRELOAD="no_such,nor_this")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("no_such") == 1
    assert result.stdout.count("pip install 'fumehood[sandbox]'") == 1
    assert "preload" not in result.stdout


def test_unsafe_degraded() -> None:
    result = run("--mode", "unsafe-degraded", **QUICKLY)
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    assert re.search(r"^ok\s+network\s+off: the filter allows no socket\s*$", result.stdout, re.MULTILINE)


@pytest.mark.skipif(has_cgroups(), reason="memory can be bounded here")
def test_where_memory_cannot_be_bounded() -> None:
    result = run("--limits", "enforced")
    assert result.returncode == 1
    assert re.search(r"^missing\s+cgroups\s", result.stdout, re.MULTILINE)
    assert "--limits best-effort" in result.stdout


def test_settings_from_the_environment(tmp_path: Path) -> None:
    variables = {"FUMEHOOD_MODE": "pod", "FUMEHOOD_GUEST_SOCKET": str(tmp_path / "none")}
    report = json.loads(run("--json", **variables).stdout)
    assert (report["mode"], report["is_usable"]) == ("pod", False)
    # A socket in the environment is for those calls that use one.
    assert json.loads(run("--json", "--mode", "namespaces", **variables, **QUICKLY).stdout)["is_usable"]
    assert run(FUMEHOOD_LIMITS="some").returncode == 2


def test_settings_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text(f'mode = "pod"\nguest_socket = "{tmp_path}/none"\ncapacity = 9\n')
    result = run("--config", file, "--json")
    assert (result.returncode, json.loads(result.stdout)["mode"]) == (1, "pod")
    file.write_text('disk = "off"\n')
    result = run("--config", file)
    assert (result.returncode, result.stdout) == (2, "")
    assert "did you mean disks?" in " ".join(result.stderr.split())


def test_wrong_use() -> None:
    assert run("--mode", "none").returncode == 2
    assert run("--guest-socket", "/nowhere").returncode == 2
