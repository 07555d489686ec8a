"""Tells whether this machine can isolate code, and what to do if not; imports `fumehood.protocol.sandbox`, siblings.

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

from fumehood.protocol.sandbox import Mode, Stdout
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.sandboxd import cgroups, disks, package_findings, seccomp
from fumehood.sandboxd.cgroups import CgroupUnavailable
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.findings import Finding, Host, Report, State
from fumehood.sandboxd.inside import syscalls
from fumehood.sandboxd.runtime import RuntimeUnavailable, discover_runtime
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.seccomp.policy import POLICY_OF_MODE
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor
from fumehood.sandboxd.users import subordinate_users

_OLDEST_KERNEL = (5, 11)  # overlays in user namespaces; proc with subset=pid, openat2 and pidfds are older
_WANTED_KERNEL = (5, 13)  # Landlock
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
IDLE_TUNNELS = {"tunl0", "gre0", "gretap0", "erspan0", "sit0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
_REPORT = "See what else is missing here; if nothing is, please report this with all that `doctor` printed."


async def examine(settings: Settings, host: Host | None = None) -> Report:
    """Everything: what can be read, then the real thing."""
    found = inspect(settings, host)
    lived = await try_out(settings)
    works = all(finding.state != "missing" for finding in lived)
    if works:
        # Reading can be wrong where trying cannot; but code that runs does not show what would have held it.
        found = [item if _decides(item, settings) else _at_most_a_warning(item) for item in found]
        works = all(finding.state != "missing" for finding in found)
    return Report(settings.mode, works, [*found, *lived])


def _decides(finding: Finding, settings: Settings) -> bool:
    """Without Landlock nothing in this mode stands between code and files."""
    return settings.mode == "unsafe-degraded" and finding.name == "Landlock"


def _at_most_a_warning(finding: Finding) -> Finding:
    return replace(finding, state="warning") if finding.state == "missing" else finding


def inspect(settings: Settings, host: Host | None = None) -> list[Finding]:
    host = host or Host()
    return [finding for check in _CHECKS[settings.mode] for finding in _look(check, settings, host)]


def _look(check: "Check", settings: Settings, host: Host) -> Iterator[Finding]:
    """What a check finds; one that fails is a finding as well, whatever it failed of."""
    try:
        yield from check(settings, host)
    except Exception as error:
        name: str = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
        yield Finding(name, "missing", f"This could not be looked at: {_said(error)}", _REPORT)


def _said(error: Exception) -> str:
    whose = "" if isinstance(error, SandboxError) else f"{type(error).__name__}: "
    return f"{whose}{str(error).strip().removesuffix('.') or 'no reason given'}."


# ---- the kernel -----------------------------------------------------------------------------------------------


def check_kernel(_: Settings, host: Host) -> Iterator[Finding]:
    release = host.read("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield Finding("kernel", "missing", "its version cannot be read", "Mount /proc.")
        return
    version = (int(match[1]), int(match[2]))
    if version < _OLDEST_KERNEL:
        yield Finding("kernel", "missing", release, "Use Linux 5.11 or later; 5.13 or later is better.")
    elif version < _WANTED_KERNEL:
        advice = "Linux 5.13 brings Landlock, the second wall behind the mounts."
        yield Finding("kernel", "warning", release, advice)
    else:
        yield Finding("kernel", "ok", release)


def check_user_namespaces(_: Settings, host: Host) -> Iterator[Finding]:
    """Also for root: the jail is made by an ordinary user then, too."""
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
        yield _apparmor(host)
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


def _apparmor(host: Host) -> Finding:
    name = "user namespaces"
    program = apparmor_program()
    profile = _granting_profile(host, program)
    if profile is not None:
        return Finding(name, "ok", f"AppArmor restricts them, {profile} allows them to {program}")
    advice = (
        "Ubuntu 24.04 and later allow user namespaces to named programs only. As root, write the profile below to "
        "/etc/apparmor.d/fumehood and run `apparmor_parser -r /etc/apparmor.d/fumehood`. It is for the command "
        f"{program} and what that starts, not for Python: start Fumehood by this command, not as `python -m "
        "fumehood`. Whoever may write to that file may make user namespaces, too.\n\n"
        f"{apparmor_profile(program)}"
    )
    return Finding(
        name, "missing", "AppArmor restricts them (apparmor_restrict_unprivileged_userns is 1)", advice
    )


def apparmor_program() -> str:
    """The command `fumehood` of this environment. AppArmor knows it by its name without links, and what it
    executes, Python for the jail among it, stays in its profile."""
    started = Path(sys.argv[0])
    if started.name != "fumehood" or not started.is_file():
        started = Path(sysconfig.get_path("scripts"), "fumehood")
    return os.path.realpath(started)


def apparmor_profile(program: str) -> str:
    """Unconfined but for the right to make user namespaces, which what it executes inherits."""
    return (
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n\n"
        f'profile fumehood "{program}" flags=(unconfined) {{\n'
        "  userns,\n"
        "  include if exists <local/fumehood>\n"
        "}\n"
    )


def _granting_profile(host: Host, program: str) -> str | None:
    for path in sorted((host.root / "etc/apparmor.d").glob("*")):
        text = host.read(str(path.relative_to(host.root))) if path.is_file() else None
        if text and re.search(r"^\s*userns,", text, re.MULTILINE) and program in text:
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
    try:
        program = seccomp.load_blob(POLICY_OF_MODE[settings.mode], host.machine)
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
    advice = "Use Linux 5.13 or later, and add `landlock` to the kernel parameter `lsm=`."
    if settings.mode == "unsafe-degraded":
        yield Finding("Landlock", "missing", "not available: nothing else would keep code from files", advice)
    else:
        yield Finding("Landlock", "warning", "not available: one wall fewer behind the mounts", advice)


def check_overlay(_: Settings, host: Host) -> Iterator[Finding]:
    if "overlay" in (host.read("proc/filesystems") or ""):
        yield Finding("overlayfs", "ok", "available")
        return
    advice = (
        "As root: `modprobe overlay`. Without it the host's packages and paths cannot be hidden from code."
    )
    yield Finding("overlayfs", "missing", "not loaded", advice)


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
        other = " Or use --limits best-effort, which runs code without a bound on memory."
        advice = error.advice + (other if state == "missing" else "")
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
    advice = (
        "Sandboxes of one user share some quotas of the kernel. Install newuidmap (package uidmap or shadow-utils) "
        "and grant a range, the same in both files, as root: "
        "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`."
    )
    yield Finding(name, "warning", "all sandboxes share yours", advice)


def check_python(settings: Settings, _: Host) -> Iterator[Finding]:
    try:
        runtime = discover_runtime()
    except RuntimeUnavailable as error:
        advice = "Install Fumehood in a virtual environment of a standard build of Python."
        yield Finding("Python", "missing", str(error), advice)
        return
    yield Finding("Python", "ok", f"{sys.version.split()[0]}: {runtime.executable}")
    absent = _not_installed(settings)
    present = [name for name in settings.preload if name not in absent]
    detail = ", ".join(f"{name} {_version_of(name)}" for name in present) or "none"
    if absent:
        advice = "`pip install 'fumehood[sandbox]'` gives sandboxes the usual packages."
        yield Finding("packages", "warning", f"{detail}; not installed: {', '.join(absent)}", advice)
    else:
        yield Finding("packages", "ok", detail)


def _not_installed(settings: Settings) -> list[str]:
    return [name for name in settings.preload if importlib.util.find_spec(name) is None]


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def check_readable(_: Settings, host: Host) -> Iterator[Finding]:
    """As root, sandboxes are other users, to whom what was installed with `umask 077` is closed."""
    if host.uid != 0:
        return
    try:
        runtime = discover_runtime()
    except RuntimeUnavailable:
        return  # check_python tells
    # Not all of the prefix: one such as /usr/local holds more than Python, and maybe secrets.
    trees = [Path(sysconfig.get_path("stdlib")), *(item.path for item in runtime.packages)]
    trees.append(Path(__file__).parents[1])
    closed = {tree: first for tree in trees if (first := closed_to_others(tree))}
    if runtime.prefix is not None:
        for path in (runtime.prefix, runtime.prefix / "bin", runtime.executable, runtime.prefix / "lib"):
            if not _open_to_others(path):
                closed.setdefault(runtime.prefix, path)
    if not closed:
        yield Finding("readable for others", "ok", "the interpreter, its packages and Fumehood")
        return
    detail = f"sandboxes are other users, who may not read {', '.join(map(str, closed.values()))}"
    advice = f"As root: `chmod -R go+rX {' '.join(shlex.quote(str(tree)) for tree in closed)}`."
    yield Finding("readable for others", "missing", detail, advice)


def closed_to_others(tree: Path) -> Path | None:
    """The first thing in a tree that only its owner or group may read."""
    for directory, _, names in os.walk(tree):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            if not _open_to_others(path):
                return path
    return None


def _open_to_others(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # just removed
        return True
    wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
    return stat.S_ISLNK(mode) or mode & wanted == wanted


def check_disks(settings: Settings, host: Host) -> Iterator[Finding]:
    """As root: whether the files of large sandboxes lie on disks; a fallback to memory is no secret."""
    if host.uid != 0 or not host.live or settings.disks == "off":
        return
    try:
        directory = disks.look(settings)
    except disks.DisksUnavailable as error:
        state: State = "missing" if settings.disks == "required" else "warning"
        detail = f"files of large sandboxes would be kept in memory: {error.reason}"
        yield Finding("disks", state, detail, error.advice)
        return
    free = disks.in_words(disks.free_space(directory))
    yield Finding("disks", "ok", f"files of large sandboxes lie in {directory}, {free} free")


def check_guest(settings: Settings, _: Host) -> Iterator[Finding]:
    path = settings.guest_socket
    if path is not None and path.is_socket():
        yield Finding("guest socket", "ok", str(path))
        return
    advice = "Start the code container first: `python -m fumehood.sandboxd.inside.guest PATH`."
    yield Finding("guest socket", "missing", f"{path or 'none'} is not there", advice)


type Check = Callable[[Settings, Host], Iterator[Finding]]

_WALLS: tuple[Check, ...] = (check_user_namespaces, check_proc, check_overlay)
_MACHINE: tuple[Check, ...] = (check_landlock, check_cgroups, check_users, check_python, check_readable)
_CHECKS: dict[Mode, tuple[Check, ...]] = {
    "namespaces": (check_kernel, *_WALLS, check_seccomp, *_MACHINE, check_disks),
    "pod": (check_kernel, check_seccomp, check_guest),
    "unsafe-degraded": (check_kernel, check_seccomp, *_MACHINE),
}


# ---- the real thing -------------------------------------------------------------------------------------------


async def try_out(settings: Settings) -> list[Finding]:
    """One sandbox, from nothing to an answer that is checked; the first failure ends it."""
    findings: list[Finding] = []
    began = time.monotonic()
    try:
        async with Supervisor(replace(settings, pool=0, capacity=1)) as supervisor:
            zygote = time.monotonic() - began
            sandbox = await supervisor.create()
            took = f"ready after {zygote:.1f} s, a sandbox takes {(time.monotonic() - began - zygote) * 1000:.0f} ms"
            findings.append(Finding("sandbox starts", "ok", took))
            findings += await _run_in(sandbox, settings)
            findings += _seen_from_outside(supervisor, settings)
            findings.append(await package_findings.look(supervisor, settings))
    except IsolationUnavailable as error:
        # Whoever reads this has just run it.
        advice = _REPORT if "fumehood doctor" in error.advice else error.advice
        findings.append(Finding("sandbox starts", "missing", error.reason, advice))
    except Exception as error:
        name = "sandbox works" if findings else "sandbox starts"
        findings.append(Finding(name, "missing", _said(error), _REPORT))
    return findings


async def _run_in(sandbox: LocalSandbox, settings: Settings) -> list[Finding]:
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
        return [Finding("code runs", "missing", detail, "Please report this.")]
    returned = (await sandbox.files.read(PROBE_FILE, limit=100)).decode()
    same = returned == given[::-1]
    return [
        Finding("code runs", "ok", "6 * 7 is 42"),
        Finding("files", "ok", "what the code writes is read back")
        if same
        else Finding("files", "missing", f"{returned!r} came back", "Please report this."),
        judge_network(Network(**json.loads(facts)), settings),
    ]


@dataclass(frozen=True, slots=True)
class Network:
    """What code saw: whether it may make a socket, and the kernel's tables; None could not be read."""

    sockets: bool
    dev: str | None
    route: str | None
    ipv6_route: str | None

    def ways_out(self) -> list[str]:
        """Interfaces other than the loopback, and which of them have a default route."""
        routes = [row for line in (self.route or "").splitlines()[1:] if len(row := line.split()) > 7]
        routes6 = [row for line in (self.ipv6_route or "").splitlines() if len(row := line.split()) > 9]
        used = {row[0] for row in routes} | {row[9] for row in routes6}
        default = {row[0] for row in routes if row[1] == row[7] == "00000000"}
        default |= {row[9] for row in routes6 if row[0] == "0" * 32 and row[1] == "00"}
        names = {line.partition(":")[0].strip() for line in (self.dev or "").splitlines()[2:]}
        ways = (names - (IDLE_TUNNELS - used) | default) - {"lo", "*"}  # a route to * is a refusal
        return [f"{name} with a default route" if name in default else name for name in sorted(ways)]


def judge_network(seen: Network, settings: Settings) -> Finding:
    if settings.mode == "unsafe-degraded":
        if seen.sockets:
            detail = "the code can make sockets, in the network of this machine"
            return Finding("network", "missing", detail, "Please report this.")
        return Finding("network", "ok", "off: the filter allows no socket")
    if seen.dev is None or seen.route is None:
        return Finding("network", "warning", "what the code has of it cannot be read", "Please report this.")
    ways = seen.ways_out()
    if not ways:
        return Finding("network", "ok", "off: there is the loopback only")
    detail = f"the code has {', '.join(ways)}"
    if settings.mode == "namespaces":
        return Finding("network", "missing", detail, "Please report this.")
    advice = "This mode leaves the network to what is around it: use a network policy, or --mode namespaces."
    return Finding("network", "warning", detail, advice)


def judge_preload(problems: dict[str, str], known: list[str]) -> Iterator[Finding]:
    """One word for each package, whichever of its modules failed; those known not to be there are told already."""
    failed = {name: why for name, why in problems.items() if "." not in name and name not in known}
    if not known:  # else a module of a package may only lack another package
        for name, why in problems.items():
            failed.setdefault(name.partition(".")[0], why)
    if failed:
        names = ", ".join(f"{name} ({why})" for name, why in failed.items())
        advice = "Install these packages for sandboxes, or do not preload them."
        yield Finding("preload", "warning", names, advice)


def _seen_from_outside(supervisor: Supervisor, settings: Settings) -> Iterator[Finding]:
    about, pid = supervisor.zygote.about, supervisor.zygote.pid
    # The packages of a pod are not those of this machine.
    yield from judge_preload(about.problems, [] if settings.mode == "pod" else _not_installed(settings))
    if pid is None or settings.mode == "pod":
        return
    yield package_findings.look_at_bytecode(settings)
    users = _users_below(pid)
    if 0 in users or not users:
        yield Finding("kernel user", "missing", "the code runs as root", "Please report this.")
    else:
        yield Finding("kernel user", "ok", f"the code is uid {max(users)} on this machine")


def _users_below(top: int) -> set[int]:
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
