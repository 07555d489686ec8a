"""Tells whether this machine can isolate code, and what to do if not.

Two halves: what can be read about the machine (each check takes a `Host`, so that other machines can be
played), and one real sandbox from end to end, which alone decides whether it works.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import IsolationMode, Stdout
from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.diagnostics import package_checks
from fumehood.sandbox_server.diagnostics.findings import FindingState, HostFinding, HostReport, InspectedHost
from fumehood.sandbox_server.host import cgroups, disks
from fumehood.sandbox_server.host.cgroups import CgroupUnavailable
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable, discover_runtime
from fumehood.sandbox_server.host.uid_ranges import reserve_subordinate_uids
from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.seccomp.syscall_policy import POLICY_OF_MODE
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

_MINIMUM_KERNEL = (5, 11)  # overlays in user namespaces; proc with subset=pid, openat2 and pidfds are older
_RECOMMENDED_KERNEL = (5, 13)  # Landlock
PROBE_FILE = "fumehood-probe.txt"
# It only looks: a socket that is made and closed sends nothing, and nothing is ever connected.
PROBE_CODE = f"""
import json, socket
print(6 * 7)
def look(name):
    try:
        with open("/proc/self/net/" + name) as f:
            return f.read(100_000)
    except OSError:
        return None
try:
    socket.socket().close()
    sockets = True
except OSError:
    sockets = False
with open({PROBE_FILE!r}) as f:
    given = f.read()
with open({PROBE_FILE!r}, "w") as f:
    f.write(given[::-1])
seen = {{name: look(name) for name in ("dev", "route", "ipv6_route")}}
print(json.dumps({{"sockets": sockets, **seen}}))
"""
# Made by the kernel in every network namespace once a module is loaded; without a route they lead nowhere.
UNROUTED_TUNNELS = {
    "tunl0",
    "gre0",
    "gretap0",
    "erspan0",
    "sit0",
    "ip_vti0",
    "ip6_vti0",
    "ip6tnl0",
    "ip6gre0",
}
_REPORT_ADVICE = (
    "See what else is missing here; if nothing is, please report this with all that `doctor` printed."
)


async def diagnose(settings: Settings, host: InspectedHost | None = None) -> HostReport:
    """Everything: what can be read, then the real thing."""
    found = check_host(settings, host)
    lived = await run_smoke_test(settings)
    works = all(finding.state != "missing" for finding in lived)
    if works:
        # Reading can be wrong where trying cannot; but code that runs does not show what would have held it.
        found = [item if _is_decisive(item, settings) else _downgrade_to_warning(item) for item in found]
        works = all(finding.state != "missing" for finding in found)
    return HostReport(settings.mode, works, [*found, *lived])


def _is_decisive(finding: HostFinding, settings: Settings) -> bool:
    """Without Landlock nothing in this mode stands between code and files."""
    return settings.mode == "unsafe-degraded" and finding.name == "Landlock"


def _downgrade_to_warning(finding: HostFinding) -> HostFinding:
    return replace(finding, state="warning") if finding.state == "missing" else finding


def check_host(settings: Settings, host: InspectedHost | None = None) -> list[HostFinding]:
    host = host or InspectedHost()
    return [finding for check in _CHECKS[settings.mode] for finding in _run_check(check, settings, host)]


def _run_check(check: "HostCheck", settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """What a check finds; one that fails is a finding as well, whatever it failed of."""
    try:
        yield from check(settings, host)
    except Exception as error:
        name: str = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
        yield HostFinding(
            name, "missing", f"This could not be looked at: {_describe_error(error)}", _REPORT_ADVICE
        )


def _describe_error(error: Exception) -> str:
    whose = "" if isinstance(error, SandboxError) else f"{type(error).__name__}: "
    return f"{whose}{str(error).strip().removesuffix('.') or 'no reason given'}."


# ---- the kernel -----------------------------------------------------------------------------------------------


def check_kernel(_: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    release = host.read("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield HostFinding("kernel", "missing", "its version cannot be read", "Mount /proc.")
        return
    version = (int(match[1]), int(match[2]))
    if version < _MINIMUM_KERNEL:
        yield HostFinding("kernel", "missing", release, "Use Linux 5.11 or later; 5.13 or later is better.")
    elif version < _RECOMMENDED_KERNEL:
        advice = "Linux 5.13 brings Landlock, the second wall behind the mounts."
        yield HostFinding("kernel", "warning", release, advice)
    else:
        yield HostFinding("kernel", "ok", release)


def check_user_namespaces(_: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """Also for root: the jail is made by an ordinary user then, too."""
    name = "user namespaces"
    if host.read("proc/self/uid_map") is None:
        yield HostFinding(name, "missing", "the kernel has none", "Use a kernel with CONFIG_USER_NS.")
        return
    most = host.read("proc/sys/user/max_user_namespaces")
    if most is not None and int(most) == 0:
        advice = _sysctl_advice("user.max_user_namespaces=15000")
        yield HostFinding(name, "missing", "user.max_user_namespaces is 0", advice)
    elif host.read("proc/sys/kernel/unprivileged_userns_clone") == "0":
        advice = _sysctl_advice("kernel.unprivileged_userns_clone=1")
        yield HostFinding(name, "missing", "kernel.unprivileged_userns_clone is 0", advice)
    elif host.read("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        yield _check_apparmor(host)
    elif host.allows_trials and (problem := _try_user_namespace()):
        yield HostFinding(
            name,
            "missing",
            f"they are refused: {problem}",
            "A container runtime's seccomp profile is the usual cause: run the container with "
            "`--security-opt seccomp=unconfined`, or with a profile that allows clone, unshare, mount and setns; "
            "or use --mode pod.",
        )
    else:
        yield HostFinding(name, "ok", "allowed" if most is None else f"allowed, up to {most}")


def _sysctl_advice(setting: str) -> str:
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


def _check_apparmor(host: InspectedHost) -> HostFinding:
    name = "user namespaces"
    program = find_apparmor_program()
    profile = _find_granting_profile(host, program)
    if profile is not None:
        return HostFinding(name, "ok", f"AppArmor restricts them, {profile} allows them to {program}")
    advice = (
        "Ubuntu 24.04 and later allow user namespaces to named programs only. As root, write the profile below to "
        "/etc/apparmor.d/fumehood and run `apparmor_parser -r /etc/apparmor.d/fumehood`. It is for the command "
        f"{program} and what that starts, not for Python: start Fumehood by this command, not as `python -m "
        "fumehood`. Whoever may write to that file may make user namespaces, too.\n\n"
        f"{render_apparmor_profile(program)}"
    )
    return HostFinding(
        name, "missing", "AppArmor restricts them (apparmor_restrict_unprivileged_userns is 1)", advice
    )


def find_apparmor_program() -> str:
    """The command `fumehood` of this environment. AppArmor knows it by its name without links, and what it
    executes, Python for the jail among it, stays in its profile."""
    started = Path(sys.argv[0])
    if started.name != "fumehood" or not started.is_file():
        started = Path(sysconfig.get_path("scripts"), "fumehood")
    return os.path.realpath(started)


def render_apparmor_profile(program: str) -> str:
    """Unconfined but for the right to make user namespaces, which what it executes inherits."""
    return (
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n\n"
        f'profile fumehood "{program}" flags=(unconfined) {{\n'
        "  userns,\n"
        "  include if exists <local/fumehood>\n"
        "}\n"
    )


def _find_granting_profile(host: InspectedHost, program: str) -> str | None:
    for path in sorted((host.root / "etc/apparmor.d").glob("*")):
        text = host.read(str(path.relative_to(host.root))) if path.is_file() else None
        if text and re.search(r"^\s*userns,", text, re.MULTILINE) and program in text:
            return f"/etc/apparmor.d/{path.name}"
    return None


def check_proc(_: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """A new proc is granted only where the present one is in full view; containers cover parts of it."""
    mounts = host.read("proc/self/mountinfo")
    if mounts is None:
        yield HostFinding("/proc", "missing", "it is not mounted", "Mount /proc.")
        return
    points = [fields[4] for line in mounts.splitlines() if len(fields := line.split()) > 4]
    covered = sorted({point for point in points if point.startswith("/proc/") and "binfmt_misc" not in point})
    if covered:
        detail = f"parts are covered: {', '.join(covered[:4])}{' …' if len(covered) > 4 else ''}"
        advice = (
            "This is a container. Docker and Podman: run it with `--security-opt systempaths=unconfined`; "
            "Kubernetes: `procMount: Unmasked` with `hostUsers: false`, or --mode pod."
        )
        yield HostFinding("/proc", "missing", detail, advice)
    else:
        yield HostFinding("/proc", "ok", "in full view")


def check_seccomp(settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    name = "system-call filter"
    try:
        program = seccomp.load_program(POLICY_OF_MODE[settings.mode], host.machine)
    except RuntimeError as error:
        yield HostFinding(name, "missing", str(error), "Use x86_64 or aarch64.")
        return
    status = host.read("proc/self/status") or ""
    match = re.search(r"^Seccomp:\s*(\d)", status, re.MULTILINE)
    if match is None or "errno" not in (host.read("proc/sys/kernel/seccomp/actions_avail") or "errno"):
        yield HostFinding(
            name, "missing", "the kernel has no seccomp filters", "Use a kernel with CONFIG_SECCOMP_FILTER."
        )
        return
    outer = ", inside another one (a container's)" if match[1] == "2" else ""
    yield HostFinding(name, "ok", f"seccomp, {host.machine}, {len(program) // 8} instructions{outer}")


def check_landlock(settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    version = syscalls.landlock_abi() if host.landlock_version is None else host.landlock_version
    if version:
        yield HostFinding("Landlock", "ok", f"version {version}")
        return
    advice = "Use Linux 5.13 or later, and add `landlock` to the kernel parameter `lsm=`."
    if settings.mode == "unsafe-degraded":
        yield HostFinding(
            "Landlock", "missing", "not available: nothing else would keep code from files", advice
        )
    else:
        yield HostFinding("Landlock", "warning", "not available: one wall fewer behind the mounts", advice)


def check_overlay(_: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    if "overlay" in (host.read("proc/filesystems") or ""):
        yield HostFinding("overlayfs", "ok", "available")
        return
    advice = (
        "As root: `modprobe overlay`. Without it the host's packages and paths cannot be hidden from code."
    )
    yield HostFinding("overlayfs", "missing", "not loaded", advice)


# ---- what the machine gives us --------------------------------------------------------------------------------


def check_cgroups(settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """Make the tree that a supervisor would make, and remove it."""
    state: FindingState = "missing" if settings.limits == "enforced" else "warning"
    try:
        tree = cgroups.open_tree(
            memory_total=settings.total_memory_limit(),
            cpus=None,
            pids_total=4096,
            root=host.root / "sys/fs/cgroup",
            proc=host.root / "proc",
        )
    except CgroupUnavailable as error:
        other = " Or use --limits best-effort, which runs code without a bound on memory."
        advice = error.advice + (other if state == "missing" else "")
        yield HostFinding("cgroups", state, error.reason, advice)
        return
    except OSError as error:
        yield HostFinding(
            "cgroups", state, f"they cannot be read: {error}", "Mount /proc and /sys/fs/cgroup."
        )
        return
    version, has_cpu = tree.version, tree.has_cpu
    tree.close()
    if has_cpu:
        yield HostFinding("cgroups", "ok", f"{version}: memory, processes and processors are bounded")
    else:
        advice = "Delegate the cpu controller too (systemd: Delegate=yes)."
        yield HostFinding(
            "cgroups", "warning", f"{version}: memory and processes are bounded, processors are not", advice
        )


def check_uid_ranges(settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    name = "users of sandboxes"
    if settings.mode == "unsafe-degraded":
        advice = "Sandboxes of this mode can disturb each other: use it for one at a time, or use --mode namespaces."
        yield HostFinding(name, "warning", "all sandboxes share one", advice)
        return
    if host.uid == 0:
        yield HostFinding(name, "ok", f"one for each, from {settings.uid_base} on")
        return
    users = reserve_subordinate_uids(host.root / "etc")
    if users is not None:
        yield HostFinding(name, "ok", f"one for each, {users.count} from {users.first_uid} on (newuidmap)")
        return
    advice = (
        "Sandboxes of one user share some quotas of the kernel. Install newuidmap (package uidmap or shadow-utils) "
        "and grant a range, the same in both files, as root: "
        "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`."
    )
    yield HostFinding(name, "warning", "all sandboxes share yours", advice)


def check_python(settings: Settings, _: InspectedHost) -> Iterator[HostFinding]:
    try:
        runtime = discover_runtime()
    except PythonRuntimeUnavailable as error:
        advice = "Install Fumehood in a virtual environment of a standard build of Python."
        yield HostFinding("Python", "missing", str(error), advice)
        return
    yield HostFinding("Python", "ok", f"{sys.version.split()[0]}: {runtime.executable}")
    absent = _find_missing_packages(settings)
    present = [name for name in settings.preload if name not in absent]
    detail = ", ".join(f"{name} {_read_version(name)}" for name in present) or "none"
    if absent:
        advice = "`pip install 'fumehood[sandbox]'` gives sandboxes the usual packages."
        yield HostFinding("packages", "warning", f"{detail}; not installed: {', '.join(absent)}", advice)
    else:
        yield HostFinding("packages", "ok", detail)


def _find_missing_packages(settings: Settings) -> list[str]:
    return [name for name in settings.preload if importlib.util.find_spec(name) is None]


def _read_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def check_permissions(_: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """As root, sandboxes are other users, to whom what was installed with `umask 077` is closed."""
    if host.uid != 0:
        return
    try:
        runtime = discover_runtime()
    except PythonRuntimeUnavailable:
        return  # check_python tells
    # Not all of the prefix: one such as /usr/local holds more than Python, and maybe secrets.
    trees = [Path(sysconfig.get_path("stdlib")), *(item.path for item in runtime.packages)]
    trees.append(Path(__file__).parents[2])
    closed = {tree: first for tree in trees if (first := find_unreadable(tree))}
    if runtime.prefix is not None:
        for path in (runtime.prefix, runtime.prefix / "bin", runtime.executable, runtime.prefix / "lib"):
            if not _is_readable_by_others(path):
                closed.setdefault(runtime.prefix, path)
    if not closed:
        yield HostFinding("readable for others", "ok", "the interpreter, its packages and Fumehood")
        return
    detail = f"sandboxes are other users, who may not read {', '.join(map(str, closed.values()))}"
    advice = f"As root: `chmod -R go+rX {' '.join(shlex.quote(str(tree)) for tree in closed)}`."
    yield HostFinding("readable for others", "missing", detail, advice)


def find_unreadable(tree: Path) -> Path | None:
    """The first thing in a tree that only its owner or group may read."""
    for directory, _, names in os.walk(tree):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            if not _is_readable_by_others(path):
                return path
    return None


def _is_readable_by_others(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # just removed
        return True
    wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
    return stat.S_ISLNK(mode) or mode & wanted == wanted


def check_disks(settings: Settings, host: InspectedHost) -> Iterator[HostFinding]:
    """As root: whether the files of large sandboxes lie on disks; a fallback to memory is no secret."""
    if host.uid != 0 or not host.allows_trials or settings.disks == "off":
        return
    try:
        directory = disks.check_disk_support(settings)
    except disks.DisksUnavailable as error:
        state: FindingState = "missing" if settings.disks == "required" else "warning"
        detail = f"files of large sandboxes would be kept in memory: {error.reason}"
        yield HostFinding("disks", state, detail, error.advice)
        return
    free = disks.format_size(disks.free_bytes(directory))
    yield HostFinding("disks", "ok", f"files of large sandboxes lie in {directory}, {free} free")


def check_guest_socket(settings: Settings, _: InspectedHost) -> Iterator[HostFinding]:
    path = settings.guest_socket
    if path is not None and path.is_socket():
        yield HostFinding("guest socket", "ok", str(path))
        return
    advice = "Start the code container first: `python -m fumehood.sandbox_server.inside.pod_entrypoint PATH`."
    yield HostFinding("guest socket", "missing", f"{path or 'none'} is not there", advice)


type HostCheck = Callable[[Settings, InspectedHost], Iterator[HostFinding]]

_NAMESPACE_CHECKS: tuple[HostCheck, ...] = (check_user_namespaces, check_proc, check_overlay)
_HOST_CHECKS: tuple[HostCheck, ...] = (
    check_landlock,
    check_cgroups,
    check_uid_ranges,
    check_python,
    check_permissions,
)
_CHECKS: dict[IsolationMode, tuple[HostCheck, ...]] = {
    "namespaces": (check_kernel, *_NAMESPACE_CHECKS, check_seccomp, *_HOST_CHECKS, check_disks),
    "pod": (check_kernel, check_seccomp, check_guest_socket),
    "unsafe-degraded": (check_kernel, check_seccomp, *_HOST_CHECKS),
}


# ---- the real thing -------------------------------------------------------------------------------------------


async def run_smoke_test(settings: Settings) -> list[HostFinding]:
    """One sandbox, from nothing to an answer that is checked; the first failure ends it."""
    findings: list[HostFinding] = []
    began = time.monotonic()
    try:
        async with Supervisor(replace(settings, pool=0, capacity=1)) as supervisor:
            zygote = time.monotonic() - began
            sandbox = await supervisor.create()
            took = f"ready after {zygote:.1f} s, a sandbox takes {(time.monotonic() - began - zygote) * 1000:.0f} ms"
            findings.append(HostFinding("sandbox starts", "ok", took))
            findings += await _run_probe_code(sandbox, settings)
            findings += _check_from_host(supervisor, settings)
            findings.append(await package_checks.check_packages(supervisor, settings))
    except IsolationUnavailable as error:
        # Whoever reads this has just run it.
        advice = _REPORT_ADVICE if "fumehood doctor" in error.advice else error.advice
        findings.append(HostFinding("sandbox starts", "missing", error.reason, advice))
    except Exception as error:
        name = "sandbox works" if findings else "sandbox starts"
        findings.append(HostFinding(name, "missing", _describe_error(error), _REPORT_ADVICE))
    return findings


async def _run_probe_code(sandbox: SandboxInstance, settings: Settings) -> list[HostFinding]:
    given = os.urandom(8).hex()
    await sandbox.files.write(PROBE_FILE, given.encode())
    printed = ""
    reason = ""
    async for event in sandbox.execute(PROBE_CODE, timeout=30):
        printed += event.text if isinstance(event, Stdout) else ""
        reason = getattr(event, "reason", "") or getattr(event, "traceback", "") or reason
    answer, _, facts = printed.partition("\n")
    if answer != "42" or not facts:
        detail = f"6 * 7 gave {printed!r}. {reason}".strip()
        return [HostFinding("code runs", "missing", detail, "Please report this.")]
    returned = (await sandbox.files.read(PROBE_FILE, limit=100)).decode()
    same = returned == given[::-1]
    return [
        HostFinding("code runs", "ok", "6 * 7 is 42"),
        HostFinding("files", "ok", "what the code writes is read back")
        if same
        else HostFinding("files", "missing", f"{returned!r} came back", "Please report this."),
        assess_network(ObservedNetwork(**json.loads(facts)), settings),
    ]


@dataclass(frozen=True, slots=True)
class ObservedNetwork:
    """What code saw: whether it may make a socket, and the kernel's tables; None could not be read."""

    sockets: bool
    dev: str | None
    route: str | None
    ipv6_route: str | None

    def find_routes_out(self) -> list[str]:
        """Interfaces other than the loopback, and which of them have a default route."""
        routes = [row for line in (self.route or "").splitlines()[1:] if len(row := line.split()) > 7]
        routes6 = [row for line in (self.ipv6_route or "").splitlines() if len(row := line.split()) > 9]
        used = {row[0] for row in routes} | {row[9] for row in routes6}
        default = {row[0] for row in routes if row[1] == row[7] == "00000000"}
        default |= {row[9] for row in routes6 if row[0] == "0" * 32 and row[1] == "00"}
        names = {line.partition(":")[0].strip() for line in (self.dev or "").splitlines()[2:]}
        ways = (names - (UNROUTED_TUNNELS - used) | default) - {"lo", "*"}  # a route to * is a refusal
        return [f"{name} with a default route" if name in default else name for name in sorted(ways)]


def assess_network(seen: ObservedNetwork, settings: Settings) -> HostFinding:
    if settings.mode == "unsafe-degraded":
        if seen.sockets:
            detail = "the code can make sockets, in the network of this machine"
            return HostFinding("network", "missing", detail, "Please report this.")
        return HostFinding("network", "ok", "off: the filter allows no socket")
    if seen.dev is None or seen.route is None:
        return HostFinding(
            "network", "warning", "what the code has of it cannot be read", "Please report this."
        )
    ways = seen.find_routes_out()
    if not ways:
        return HostFinding("network", "ok", "off: there is the loopback only")
    detail = f"the code has {', '.join(ways)}"
    if settings.mode == "namespaces":
        return HostFinding("network", "missing", detail, "Please report this.")
    advice = "This mode leaves the network to what is around it: use a network policy, or --mode namespaces."
    return HostFinding("network", "warning", detail, advice)


def assess_preload(problems: dict[str, str], known: list[str]) -> Iterator[HostFinding]:
    """One word for each package, whichever of its modules failed; those known not to be there are told already."""
    failed = {name: why for name, why in problems.items() if "." not in name and name not in known}
    if not known:  # else a module of a package may only lack another package
        for name, why in problems.items():
            failed.setdefault(name.partition(".")[0], why)
    if failed:
        names = ", ".join(f"{name} ({why})" for name, why in failed.items())
        advice = "Install these packages for sandboxes, or do not preload them."
        yield HostFinding("preload", "warning", names, advice)


def _check_from_host(supervisor: Supervisor, settings: Settings) -> Iterator[HostFinding]:
    about, pid = supervisor.zygote.info, supervisor.zygote.pid
    # The packages of a pod are not those of this machine.
    yield from assess_preload(
        about.problems, [] if settings.mode == "pod" else _find_missing_packages(settings)
    )
    if pid is None or settings.mode == "pod":
        return
    yield package_checks.check_bytecode(settings)
    users = _read_uids_below(pid)
    if 0 in users or not users:
        yield HostFinding("kernel user", "missing", "the code runs as root", "Please report this.")
    else:
        yield HostFinding("kernel user", "ok", f"the code is uid {max(users)} on this machine")


def _read_uids_below(top: int) -> set[int]:
    """The users, as the host counts them, of a process and all its descendants."""
    parents: dict[int, int] = {}
    uids: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/status"):
        try:
            status = dict(line.split(":\t", 1) for line in entry.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        pid = int(status["Pid"])
        parents[pid], uids[pid] = int(status["PPid"]), int(status["Uid"].split()[0])
    below = {top}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {uids[pid] for pid in below if pid in uids}
