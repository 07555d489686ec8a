"""One real sandbox from start to answer: the part of `fumehood doctor` that decides."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, Stdout
from fumehood.sandbox_server.diagnostics.findings import REPORT_ADVICE, HostFinding, describe_error
from fumehood.sandbox_server.diagnostics.host_checks import find_missing_packages
from fumehood.sandbox_server.host.disks import format_size
from fumehood.sandbox_server.host.python_runtime import discover_runtime
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import bytecode_cache
from fumehood.sandbox_server.packages.installer import Installer
from fumehood.sandbox_server.packages.installer_factory import packages_directory
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

PROBE_FILE = "fumehood-probe.txt"
# Only observes: it opens and closes a socket, but never connects or sends.
PROBE_CODE = f"""
import json, socket
print(6 * 7)
def read_table(name):
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
    content = f.read()
with open({PROBE_FILE!r}, "w") as f:
    f.write(content[::-1])
tables = {{name: read_table(name) for name in ("dev", "route", "ipv6_route")}}
print(json.dumps({{"sockets": sockets, **tables}}))
"""
# The kernel creates these in every network namespace once their module is loaded; without a route they lead nowhere.
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
_BYTECODE_ADVICE = (
    "Sandboxes work, but import their packages slowly. Let Fumehood keep bytecode: set packages_dir (or "
    "FUMEHOOD_PACKAGES_DIR) to a directory that this user alone can write. Or compile where the packages are "
    "installed: `uv pip install --compile-bytecode …`, or `python -m compileall DIRECTORY`."
)
_INDEX_TIMEOUT = 20.0
_INDEX_ADVICE = (
    "Let this machine reach the index, name another one (index_url, FUMEHOOD_INDEX_URL) or a directory of wheels "
    "(find_links); or set packages to false."
)


async def run_smoke_test(settings: SandboxServerSettings) -> list[HostFinding]:
    """Start a sandbox, run code in it and check the results; the first failure ends the test."""
    findings: list[HostFinding] = []
    started_at = time.monotonic()
    try:
        async with Supervisor(replace(settings, pool=0, capacity=1)) as supervisor:
            zygote_seconds = time.monotonic() - started_at
            sandbox = await supervisor.create()
            sandbox_ms = (time.monotonic() - started_at - zygote_seconds) * 1000
            detail = f"ready after {zygote_seconds:.1f} s, a sandbox takes {sandbox_ms:.0f} ms"
            findings.append(HostFinding("sandbox starts", "ok", detail))
            findings += await _run_probe_code(sandbox, settings)
            findings += _check_from_host(supervisor, settings)
            findings.append(await _check_packages(supervisor, settings))
    except IsolationUnavailable as error:
        # The reader has just run `doctor`.
        advice = REPORT_ADVICE if "fumehood doctor" in error.advice else error.advice
        findings.append(HostFinding("sandbox starts", "missing", error.reason, advice))
    except Exception as error:
        name = "sandbox works" if findings else "sandbox starts"
        findings.append(HostFinding(name, "missing", describe_error(error), REPORT_ADVICE))
    return findings


async def _run_probe_code(sandbox: SandboxInstance, settings: SandboxServerSettings) -> list[HostFinding]:
    content = os.urandom(8).hex()
    await sandbox.files.write(PROBE_FILE, content.encode())
    printed = ""
    reason = ""
    request = ExecuteRequest(code=PROBE_CODE, timeout_seconds=30)
    async for event in InProcessSandbox(sandbox).execute(request):
        printed += event.text if isinstance(event, Stdout) else ""
        reason = getattr(event, "reason", "") or getattr(event, "traceback", "") or reason
    answer, _, network = printed.partition("\n")
    if answer != "42" or not network:
        detail = f"6 * 7 gave {printed!r}. {reason}".strip()
        return [HostFinding("code runs", "missing", detail, "Please report this.")]
    returned = (await sandbox.files.read(PROBE_FILE, limit=100)).decode()
    is_same = returned == content[::-1]
    return [
        HostFinding("code runs", "ok", "6 * 7 is 42"),
        HostFinding("files", "ok", "what the code writes is read back")
        if is_same
        else HostFinding("files", "missing", f"{returned!r} came back", "Please report this."),
        assess_network(SandboxNetworkView(**json.loads(network)), settings),
    ]


@dataclass(frozen=True, slots=True)
class SandboxNetworkView:
    """What the code saw: whether it may open a socket, and the kernel's tables; None if unreadable."""

    sockets: bool
    dev: str | None
    route: str | None
    ipv6_route: str | None

    def find_routes_out(self) -> list[str]:
        """Interfaces other than loopback, and which of them have a default route."""
        routes = [row for line in (self.route or "").splitlines()[1:] if len(row := line.split()) > 7]
        routes6 = [row for line in (self.ipv6_route or "").splitlines() if len(row := line.split()) > 9]
        used = {row[0] for row in routes} | {row[9] for row in routes6}
        default = {row[0] for row in routes if row[1] == row[7] == "00000000"}
        default |= {row[9] for row in routes6 if row[0] == "0" * 32 and row[1] == "00"}
        names = {line.partition(":")[0].strip() for line in (self.dev or "").splitlines()[2:]}
        ways = (names - (UNROUTED_TUNNELS - used) | default) - {
            "lo",
            "*",
        }  # a route to * is an unreachable route
        return [f"{name} with a default route" if name in default else name for name in sorted(ways)]


def assess_network(seen: SandboxNetworkView, settings: SandboxServerSettings) -> HostFinding:
    if settings.mode == "unsafe-degraded":
        if seen.sockets:
            detail = "the code can open sockets in the network of this host"
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
    """One finding per package that failed to import; `known` missing packages are reported elsewhere."""
    failed = {name: why for name, why in problems.items() if "." not in name and name not in known}
    if not known:  # otherwise a module may merely lack one of these packages
        for name, why in problems.items():
            failed.setdefault(name.partition(".")[0], why)
    if failed:
        names = ", ".join(f"{name} ({why})" for name, why in failed.items())
        advice = "Install these packages for sandboxes, or do not preload them."
        yield HostFinding("preload", "warning", names, advice)


def _check_from_host(supervisor: Supervisor, settings: SandboxServerSettings) -> Iterator[HostFinding]:
    info, pid = supervisor.zygote.info, supervisor.zygote.pid
    # The packages of a pod are not those of this host.
    yield from assess_preload(
        info.problems, [] if settings.mode == "pod" else find_missing_packages(settings)
    )
    if pid is None or settings.mode == "pod":
        return
    yield _check_bytecode(settings)
    uids = _read_uids_below(pid)
    if 0 in uids or not uids:
        yield HostFinding("kernel user", "missing", "the code runs as root", "Please report this.")
    else:
        yield HostFinding("kernel user", "ok", f"the code is uid {max(uids)} on this machine")


def _read_uids_below(top: int) -> set[int]:
    """Host uids of a process and its descendants."""
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


async def _check_packages(supervisor: Supervisor, settings: SandboxServerSettings) -> HostFinding:
    """Whether packages can be installed; at most a warning, because code runs without."""
    if not settings.packages:
        return HostFinding("packages", "ok", "installing is off")
    installer = supervisor.installer
    if installer is None:
        advice = "Nothing, if the usual ones are enough; set packages to false to say so."
        return HostFinding("packages", "warning", supervisor.packages_unavailable, advice)
    if not isinstance(installer, Installer):  # in a pod, which serves no diagnosis
        return HostFinding("packages", "ok", "installed by the container egress")
    count, size = installer.store.usage()
    stored = f"{count} layers ({format_size(size)}) in {installer.store.path}"
    try:
        await installer.check_index(_INDEX_TIMEOUT)
    except InstallFailed as error:
        return HostFinding(
            "packages",
            "warning",
            f"{error.message} Stored packages still work: {stored}.",
            _INDEX_ADVICE,
        )
    return HostFinding("packages", "ok", f"the index answers; {stored}")


def _check_bytecode(settings: SandboxServerSettings) -> HostFinding:
    """Whether sandboxes find bytecode of their packages; raises PythonRuntimeUnavailable."""
    runtime = discover_runtime()
    uncompiled = bytecode_cache.find_uncompiled(runtime)
    if not uncompiled:
        return HostFinding("bytecode", "ok", "beside the packages")
    names = sum(len(names) for _, names in uncompiled)
    if settings.mode != "namespaces":
        return HostFinding("bytecode", "warning", f"missing for {names} packages", _BYTECODE_ADVICE)
    try:
        tree = bytecode_cache.prepare_bytecode(runtime, packages_directory(settings))
    except bytecode_cache.BytecodeUnavailable as error:
        return HostFinding("bytecode", "warning", f"missing for {names} packages: {error}", _BYTECODE_ADVICE)
    return HostFinding("bytecode", "ok", f"compiled by Fumehood, in {tree}")
