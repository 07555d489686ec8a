"""What `fumehood doctor` can read about the host without starting a sandbox.

Each check gets an `InspectedHost`, so that tests can describe other hosts.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from fumehood.protocol.sandbox.sandbox_messages import IsolationMode
from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.diagnostics.findings import (
    REPORT_ADVICE,
    FindingState,
    HostFinding,
    InspectedHost,
    describe_error,
)
from fumehood.sandbox_server.host import cgroups, disks
from fumehood.sandbox_server.host.cgroups import CgroupUnavailable
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable, discover_runtime
from fumehood.sandbox_server.host.uid_ranges import reserve_subordinate_uids
from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.seccomp.syscall_policy import POLICY_OF_MODE
from fumehood.sandbox_server.settings import SandboxServerSettings

_MINIMUM_KERNEL = (5, 11)  # overlays in user namespaces; proc with subset=pid, openat2 and pidfds are older
_RECOMMENDED_KERNEL = (5, 13)  # Landlock


def check_host(settings: SandboxServerSettings, host: InspectedHost | None = None) -> list[HostFinding]:
    host = host or InspectedHost()
    return [finding for check in _CHECKS[settings.mode] for finding in _run_check(check, settings, host)]


def _run_check(
    check: "HostCheck", settings: SandboxServerSettings, host: InspectedHost
) -> Iterator[HostFinding]:
    """The findings of a check; a check that raises is a finding, too."""
    try:
        yield from check(settings, host)
    except Exception as error:
        name: str = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
        yield HostFinding(name, "missing", f"This check failed: {describe_error(error)}", REPORT_ADVICE)


# ---- the kernel -----------------------------------------------------------------------------------------------


def check_kernel(_: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    release = host.read("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield HostFinding("kernel", "missing", "its version cannot be read", "Mount /proc.")
        return
    version = (int(match[1]), int(match[2]))
    if version < _MINIMUM_KERNEL:
        yield HostFinding("kernel", "missing", release, "Use Linux 5.11 or later; 5.13 or later is better.")
    elif version < _RECOMMENDED_KERNEL:
        advice = "Linux 5.13 has Landlock, a second layer behind the mounts."
        yield HostFinding("kernel", "warning", release, advice)
    else:
        yield HostFinding("kernel", "ok", release)


def check_user_namespaces(_: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    """Also for root: the jail drops to an ordinary user first."""
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
    """Create one in a child process; returns the error, or an empty string."""
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
        "fumehood`. Whoever can write to that file can create user namespaces, too.\n\n"
        f"{render_apparmor_profile(program)}"
    )
    return HostFinding(
        name, "missing", "AppArmor restricts them (apparmor_restrict_unprivileged_userns is 1)", advice
    )


def find_apparmor_program() -> str:
    """The resolved path of the command `fumehood`, which AppArmor matches.

    Programs that it executes, such as Python for the jail, stay in its profile.
    """
    started = Path(sys.argv[0])
    if started.name != "fumehood" or not started.is_file():
        started = Path(sysconfig.get_path("scripts"), "fumehood")
    return os.path.realpath(started)


def render_apparmor_profile(program: str) -> str:
    """A profile that is unconfined and grants user namespaces, also to executed programs."""
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


def check_proc(_: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    """The kernel allows a new proc mount only if the present one is not masked, as containers do."""
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


def check_seccomp(settings: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
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


def check_landlock(settings: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    version = syscalls.landlock_abi() if host.landlock_version is None else host.landlock_version
    if version:
        yield HostFinding("Landlock", "ok", f"version {version}")
        return
    advice = "Use Linux 5.13 or later, and add `landlock` to the kernel parameter `lsm=`."
    if settings.mode == "unsafe-degraded":
        yield HostFinding(
            "Landlock", "missing", "not available: nothing else protects files in this mode", advice
        )
    else:
        yield HostFinding("Landlock", "warning", "not available: one layer fewer behind the mounts", advice)


def check_overlay(_: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    if "overlay" in (host.read("proc/filesystems") or ""):
        yield HostFinding("overlayfs", "ok", "available")
        return
    advice = (
        "As root: `modprobe overlay`. Without it the host's packages and paths cannot be hidden from code."
    )
    yield HostFinding("overlayfs", "missing", "not loaded", advice)


# ---- resources of the host ------------------------------------------------------------------------------------


def check_cgroups(settings: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    """Create the cgroup tree of a supervisor, and remove it."""
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


def check_uid_ranges(settings: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
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


def check_python(settings: SandboxServerSettings, _: InspectedHost) -> Iterator[HostFinding]:
    try:
        runtime = discover_runtime()
    except PythonRuntimeUnavailable as error:
        advice = "Install Fumehood in a virtual environment of a standard build of Python."
        yield HostFinding("Python", "missing", str(error), advice)
        return
    yield HostFinding("Python", "ok", f"{sys.version.split()[0]}: {runtime.executable}")
    absent = find_missing_packages(settings)
    present = [name for name in settings.preload if name not in absent]
    detail = ", ".join(f"{name} {_read_version(name)}" for name in present) or "none"
    if absent:
        advice = "`pip install 'fumehood[sandbox]'` gives sandboxes the usual packages."
        yield HostFinding("packages", "warning", f"{detail}; not installed: {', '.join(absent)}", advice)
    else:
        yield HostFinding("packages", "ok", detail)


def find_missing_packages(settings: SandboxServerSettings) -> list[str]:
    return [name for name in settings.preload if importlib.util.find_spec(name) is None]


def _read_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def check_permissions(_: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    """As root, sandboxes have other uids, which cannot read what was installed with `umask 077`."""
    if host.uid != 0:
        return
    try:
        runtime = discover_runtime()
    except PythonRuntimeUnavailable:
        return  # check_python reports it
    # Not the whole prefix: /usr/local, for example, holds more than Python, maybe secrets.
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
    """The first entry in a tree that others may not read."""
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


def check_disks(settings: SandboxServerSettings, host: InspectedHost) -> Iterator[HostFinding]:
    """As root: whether files of large sandboxes are on disks, or fall back to memory."""
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
    yield HostFinding("disks", "ok", f"files of large sandboxes are in {directory}, {free} free")


def check_guest_socket(settings: SandboxServerSettings, _: InspectedHost) -> Iterator[HostFinding]:
    path = settings.guest_socket
    if path is not None and path.is_socket():
        yield HostFinding("guest socket", "ok", str(path))
        return
    advice = "Start the code container first: `python -m fumehood.sandbox_server.inside.pod_entrypoint PATH`."
    yield HostFinding("guest socket", "missing", f"{path or 'none'} is not there", advice)


type HostCheck = Callable[[SandboxServerSettings, InspectedHost], Iterator[HostFinding]]

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
