"""`fumehood doctor` on this machine."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.cli_runner import run_fumehood
from tests.support.sandbox_runs import has_cgroups

QUICKLY = {"FUMEHOOD_SANDBOX_PRELOAD": ""}  # what is loaded beforehand takes most of the time


run = partial(run_fumehood, "doctor")


def test_this_host_isolates() -> None:
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


def test_a_mode_that_is_not_usable(tmp_path: Path) -> None:
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


def test_a_missing_package_is_reported_once() -> None:
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
def test_memory_that_cannot_be_limited() -> None:
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
    file = tmp_path / "sandbox.yaml"
    file.write_text(f"mode: pod\nguest_socket: {tmp_path}/none\ncapacity: 9\n")
    result = run("--config", file, "--json")
    assert (result.returncode, json.loads(result.stdout)["mode"]) == (1, "pod")
    file.write_text("disk: off\n")
    result = run("--config", file)
    assert (result.returncode, result.stdout) == (2, "")
    assert "did you mean disks?" in " ".join(result.stderr.split())


def test_invalid_usage() -> None:
    assert run("--mode", "none").returncode == 2
    assert run("--guest-socket", "/nowhere").returncode == 2
