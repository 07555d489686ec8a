"""Findings of `fumehood doctor` on simulated hosts, and on this one."""

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from fumehood.protocol.sandbox.sandbox_messages import IsolationMode
from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.diagnostics import HostFinding, InspectedHost, diagnose, host_checks, smoke_test
from fumehood.sandbox_server.diagnostics.host_checks import HostCheck
from fumehood.sandbox_server.diagnostics.smoke_test import SandboxNetworkView
from fumehood.sandbox_server.host.python_runtime import PackageDirectory, discover_runtime
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor import managed_zygote
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support import sandbox_runs

_PLAIN = {
    "proc/sys/kernel/osrelease": "6.8.0-31-generic\n",
    "proc/sys/user/max_user_namespaces": "63000\n",
    "proc/self/uid_map": "0 0 4294967295\n",
    "proc/self/status": "Name:\tpython\nSeccomp:\t0\n",
    "proc/self/mountinfo": "22 1 0:21 / /proc rw shared:5 - proc proc rw\n"
    "30 22 0:27 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n",
    "proc/filesystems": "nodev\tproc\nnodev\toverlay\n",
}


def simulate_host(
    root: Path,
    files: dict[str, str | None] | None = None,
    *,
    uid: int = 1000,
    landlock: int = 4,
    machine: str = "x86_64",
) -> InspectedHost:
    """A machine with these files under its root; None removes one of the usual ones."""
    content: dict[str, str | None] = {**_PLAIN, **(files or {})}
    for name, text in content.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return InspectedHost(root=root, uid=uid, landlock_version=landlock, machine=machine, allows_trials=False)


def run_check(
    host: InspectedHost, check: HostCheck, settings: SandboxServerSettings | None = None
) -> HostFinding:
    """The last thing that a check finds."""
    return list(check(settings or SandboxServerSettings(), host))[-1]


def test_a_plain_machine(tmp_path: Path) -> None:
    host = simulate_host(tmp_path)
    checks: list[HostCheck] = [
        host_checks.check_kernel,
        host_checks.check_user_namespaces,
        host_checks.check_proc,
        host_checks.check_seccomp,
        host_checks.check_landlock,
        host_checks.check_overlay,
    ]
    assert [run_check(host, check).state for check in checks] == ["ok"] * len(checks)


@pytest.mark.parametrize(
    ("release", "state"),
    [("4.18.0-553.el8", "missing"), ("5.10.0", "missing"), ("5.12.0", "warning"), ("7.0.1", "ok")],
)
def test_kernels(tmp_path: Path, release: str, state: str) -> None:
    finding = run_check(
        simulate_host(tmp_path, {"proc/sys/kernel/osrelease": release}), host_checks.check_kernel
    )
    assert finding.state == state
    assert finding.detail == release
    assert bool(finding.advice) == (state != "ok")


_COVERED_PROC = _PLAIN["proc/self/mountinfo"] + "40 22 0:30 /sys /proc/sys ro - proc proc rw\n"


@pytest.mark.parametrize(
    ("check", "files", "said"),
    [
        (host_checks.check_user_namespaces, {"proc/self/uid_map": None}, ["CONFIG_USER_NS"]),
        (
            host_checks.check_user_namespaces,
            {"proc/sys/user/max_user_namespaces": "0"},
            ["sysctl -w user.max_user_namespaces=15000"],
        ),
        (
            host_checks.check_user_namespaces,
            {"proc/sys/kernel/unprivileged_userns_clone": "0"},
            ["sysctl -w kernel.unprivileged_userns_clone=1"],
        ),
        (
            host_checks.check_proc,
            {"proc/self/mountinfo": _COVERED_PROC},
            ["parts are covered: /proc/sys", "systempaths=unconfined"],
        ),
        (host_checks.check_seccomp, {}, ["riscv64"]),
    ],
    ids=["no user namespaces", "none allowed", "not for users", "a container covers /proc", "other machine"],
)
def test_what_the_kernel_lacks(
    tmp_path: Path, check: HostCheck, files: dict[str, str | None], said: list[str]
) -> None:
    finding = run_check(simulate_host(tmp_path, files, machine="riscv64"), check)
    assert finding.state == "missing"
    for text in said:
        assert text in f"{finding.detail} {finding.advice}"


def simulate_ubuntu(root: Path) -> InspectedHost:
    return simulate_host(root, {"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"})


def test_ubuntu_gets_its_apparmor_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the command, by its name without links, as pipx and `uv tool` make some; not for Python."""
    program, link = tmp_path / "tool/bin/fumehood", tmp_path / "bin/fumehood"
    for path in (program, link):
        path.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    link.symlink_to(program)
    monkeypatch.setattr(sys, "argv", [str(link), "doctor"])
    finding = run_check(simulate_ubuntu(tmp_path), host_checks.check_user_namespaces)
    assert finding.state == "missing"
    assert f'profile fumehood "{program}" flags=(unconfined) {{\n  userns,\n' in finding.advice
    profile = tmp_path / "etc/apparmor.d/fumehood"
    profile.parent.mkdir(parents=True)
    profile.write_text(finding.advice.partition("\n\n")[2])
    assert run_check(simulate_ubuntu(tmp_path), host_checks.check_user_namespaces).state == "ok"
    # Another environment is another program.
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python3/fumehood/__main__.py"])
    finding = run_check(simulate_ubuntu(tmp_path), host_checks.check_user_namespaces)
    assert finding.state == "missing"
    assert f'"{Path(sys.executable).parent / "fumehood"}"' in finding.advice


def test_landlock_is_a_must_only_where_it_is_the_wall(tmp_path: Path) -> None:
    host = simulate_host(tmp_path, landlock=0)
    assert run_check(host, host_checks.check_landlock).state == "warning"
    assert (
        run_check(host, host_checks.check_landlock, SandboxServerSettings(mode="unsafe-degraded")).state
        == "missing"
    )


def test_limits_decide_what_missing_cgroups_mean(tmp_path: Path) -> None:
    host = simulate_host(
        tmp_path,
        {"proc/self/stat": f"1 (python) S {'0 ' * 50}", "proc/self/cgroup": "0::/\n"},
    )
    assert run_check(host, host_checks.check_cgroups).state == "missing"
    assert (
        run_check(host, host_checks.check_cgroups, SandboxServerSettings(limits="best-effort")).state
        == "warning"
    )


def test_overlays_are_needed_and_packages_are_not(tmp_path: Path) -> None:
    host = simulate_host(tmp_path, {"proc/filesystems": "nodev\tproc\n"})
    assert run_check(host, host_checks.check_overlay).state == "missing"
    packages = run_check(
        host, host_checks.check_python, SandboxServerSettings(preload=("msgspec", "no_such_package"))
    )
    assert packages.state == "warning"
    assert "not installed: no_such_package" in packages.detail


def test_users(tmp_path: Path) -> None:
    assert run_check(simulate_host(tmp_path, uid=0), host_checks.check_uid_ranges).state == "ok"
    degraded = SandboxServerSettings(mode="unsafe-degraded")
    assert (
        run_check(simulate_host(tmp_path, uid=0), host_checks.check_uid_ranges, degraded).state == "warning"
    )
    finding = run_check(simulate_host(tmp_path, uid=1000), host_checks.check_uid_ranges)
    assert finding.state == "warning"
    assert "usermod --add-subuids" in finding.advice


def test_a_pod_needs_its_socket(tmp_path: Path) -> None:
    settings = SandboxServerSettings(mode="pod", guest_socket=tmp_path / "guest")
    assert run_check(simulate_host(tmp_path), host_checks.check_guest_socket, settings).state == "missing"


async def test_what_cannot_be_read_does_not_outweigh_what_works(tmp_path: Path) -> None:
    host = simulate_host(tmp_path, {"proc/sys/user/max_user_namespaces": "0"})
    report = await diagnose(sandbox_runs.settings(preload=()), host)
    assert report.is_usable
    states = {finding.name: finding.state for finding in report.findings}
    assert states["user namespaces"] == "warning"
    assert "missing" not in states.values()


async def test_an_isolation_step_that_fails_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shown to sandboxes in a plainer way when a mask cannot be mounted; `doctor` names the step."""
    real = discover_runtime()
    (site,) = real.packages
    inner = PackageDirectory(site.path / "numpy", frozenset({"linalg"}))
    nested = replace(real, packages=(site, inner))  # layers of an overlay may not overlap
    monkeypatch.setattr(managed_zygote, "discover_runtime", lambda: nested)
    with pytest.raises(
        IsolationUnavailable, match=r"lay out the files of sandboxes: .*site-packages.*overlap"
    ):
        async with Supervisor(sandbox_runs.settings(preload=())):
            pytest.fail("it started")
    report = await diagnose(sandbox_runs.settings(preload=()))
    assert not report.is_usable
    found = {finding.name: finding for finding in report.findings}
    assert found["sandbox starts"].state == "missing"
    assert "site-packages" in found["sandbox starts"].detail
    assert "layers overlap" in found["sandbox starts"].detail
    assert "code runs" not in found
    assert "`fumehood doctor`" not in found["sandbox starts"].advice


async def test_code_that_runs_does_not_make_up_for_the_only_wall(tmp_path: Path) -> None:
    settings = sandbox_runs.settings(mode="unsafe-degraded", preload=())
    report = await diagnose(settings, simulate_host(tmp_path, landlock=0))
    states = {finding.name: finding.state for finding in report.findings}
    assert states["code runs"] == "ok", "this machine has Landlock, the one that is played has not"
    assert states["Landlock"] == "missing"
    assert not report.is_usable


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        importlib.metadata.PackageNotFoundError("fumehood"),
        KeyError(),
        IsolationUnavailable("The jail fell apart.", "Run `fumehood doctor`."),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_fails_is_a_finding(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(Supervisor, "__aenter__", fail)
    monkeypatch.setattr(host_checks, "discover_runtime", fail)
    report = await diagnose(SandboxServerSettings(), simulate_host(tmp_path))
    assert not report.is_usable
    findings = {finding.name: finding for finding in report.findings}
    for name in ("python", "sandbox starts"):
        assert findings[name].state == "missing"
        assert (str(error) or "no reason given").split(".")[0] in findings[name].detail
        assert findings[name].detail.endswith(".")
        assert "fumehood doctor" not in findings[name].advice


# ---- the network that code sees ---------------------------------------------------------------------------------

_DEV = """Inter-|   Receive                |  Transmit
 face |bytes    packets errs drop|bytes    packets errs
    lo:       0       0    0    0        0       0    0
"""
_ROUTE = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
_DEFAULT = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
_LOCAL = "eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
_REFUSAL6 = f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200       lo\n"
_DEFAULT6 = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 00000002 00000000 00000003     eth0\n"
_LOOPBACK = SandboxNetworkView(sockets=True, dev=_DEV, route=_ROUTE, ipv6_route=_REFUSAL6)


@pytest.mark.parametrize(
    ("seen", "state", "detail"),
    [
        (_LOOPBACK, "ok", "loopback only"),
        (replace(_LOOPBACK, ipv6_route=None), "ok", "loopback only"),
        (replace(_LOOPBACK, dev=_DEV + "  sit0: 0 0\n tunl0: 0 0\n"), "ok", "loopback only"),
        (replace(_LOOPBACK, dev=_DEV + "  eth0: 9 9\n"), "missing", "the code has eth0"),
        (replace(_LOOPBACK, dev=_DEV + " eth0:9 9\n", route=_ROUTE + _LOCAL), "missing", "the code has eth0"),
        (replace(_LOOPBACK, route=_ROUTE + _DEFAULT), "missing", "the code has eth0 with a default route"),
        (replace(_LOOPBACK, ipv6_route=_DEFAULT6), "missing", "the code has eth0 with a default route"),
        (replace(_LOOPBACK, dev=None), "warning", "cannot be read"),
    ],
)
def test_network(seen: SandboxNetworkView, state: str, detail: str) -> None:
    finding = smoke_test.assess_network(seen, SandboxServerSettings())
    assert finding.state == state
    assert detail in finding.detail
    in_a_pod = smoke_test.assess_network(seen, SandboxServerSettings(mode="pod"))
    assert in_a_pod.state == ("warning" if state == "missing" else state)


def test_network_where_only_the_filter_stops_it() -> None:
    settings = SandboxServerSettings(mode="unsafe-degraded")
    unseen = SandboxNetworkView(sockets=False, dev=None, route=None, ipv6_route=None)
    assert smoke_test.assess_network(unseen, settings).state == "ok"
    assert smoke_test.assess_network(replace(unseen, sockets=True), settings).state == "missing"


def test_the_probe_sees_the_interfaces_of_where_it_runs(tmp_path: Path) -> None:
    """Its code, run outside of any sandbox, finds what this very process has."""
    (tmp_path / smoke_test.PROBE_FILE).write_text("ab")
    command = [sys.executable, "-c", smoke_test.PROBE_CODE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    answer, _, facts = done.stdout.partition("\n")
    assert answer == "42"
    assert (tmp_path / smoke_test.PROBE_FILE).read_text() == "ba"
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    names = {line.partition(":")[0].strip() for line in lines} - {"lo"} - smoke_test.UNROUTED_TUNNELS
    seen = {way.split()[0] for way in SandboxNetworkView(**json.loads(facts)).find_routes_out()}
    assert names <= seen


# ---- packages and their files -----------------------------------------------------------------------------------


def test_preload_names_each_package_once() -> None:
    gone = "ModuleNotFoundError: No module named"
    problems = {
        "numpy": f"{gone} 'numpy'",
        "numpy.fft": f"{gone} 'numpy'",
        "pandas.plotting._matplotlib": "ImportError: matplotlib is required",
    }
    assert list(smoke_test.assess_preload(problems, ["numpy"])) == []
    (in_a_pod,) = smoke_test.assess_preload(problems, [])
    assert in_a_pod.detail == f"numpy ({gone} 'numpy'), pandas (ImportError: matplotlib is required)"
    (odd,) = smoke_test.assess_preload({**problems, "sqlite3": "ImportError: no"}, ["numpy"])
    assert odd.detail == "sqlite3 (ImportError: no)"


def test_trees_that_only_their_owner_may_read(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    module = inner / "module.py"
    module.touch()
    for path in (tmp_path, tmp_path / "a", inner):
        path.chmod(0o755)
    module.chmod(0o644)
    (inner / "link").symlink_to("nowhere")
    assert host_checks.find_unreadable(tmp_path) is None
    module.chmod(0o600)
    assert host_checks.find_unreadable(tmp_path) == module
    inner.chmod(0o700)
    assert host_checks.find_unreadable(tmp_path) == inner


def test_root_is_told_what_sandboxes_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site 1").mkdir(mode=0o700)
    closed = PackageDirectory(tmp_path / "site 1", frozenset())
    runtime = replace(host_checks.discover_runtime(), packages=(closed,))
    monkeypatch.setattr(host_checks, "discover_runtime", lambda: runtime)
    finding = run_check(simulate_host(tmp_path, uid=0), host_checks.check_permissions)
    assert finding.state == "missing"
    assert "chmod -R go+rX" in finding.advice
    assert f"'{tmp_path}/site 1'" in finding.advice
    assert (
        list(host_checks.check_permissions(SandboxServerSettings(), simulate_host(tmp_path, uid=1000))) == []
    )


@pytest.mark.parametrize(
    ("mode", "blob"), [("namespaces", "namespaces"), ("pod", "pod"), ("unsafe-degraded", "degraded")]
)
def test_the_filter_of_the_mode_is_looked_at(mode: IsolationMode, blob: str, tmp_path: Path) -> None:
    length = len(seccomp.load_program(blob, "aarch64")) // 8
    finding = run_check(
        simulate_host(tmp_path, machine="aarch64"),
        host_checks.check_seccomp,
        SandboxServerSettings(mode=mode),
    )
    assert f"aarch64, {length} instructions" in finding.detail
