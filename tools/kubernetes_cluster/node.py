"""The node: a process tree with namespaces of its own, whose PID 1 starts the components and ends with all of them.

Everything that the cluster changes is private to these namespaces: mounts, network interfaces, packet filters and the
sysctls of the network. What is left when PID 1 is killed are cgroups and the state directory.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tools.kubernetes_cluster.components import BOUND_DIRECTORIES, Component
from tools.kubernetes_cluster.layout import NODE_ADDRESS, NODE_NAME, SYSTEM_PROGRAMS, ClusterError, Layout

_NAMESPACES = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
# Kubelet sets these for the whole machine unless it finds these values; so it is shown files that say so.
_KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def start_node(layout: Layout, components: Sequence[Component]) -> None:
    """Record its PID 1 and leave it running."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            _become_node(layout, components)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    if status:
        raise ClusterError(f"The node could not be started; {layout.logs / 'node.log'} says why.")


def _become_node(layout: Layout, components: Sequence[Component]) -> None:
    os.setsid()
    log = os.open(layout.logs / "node.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _starting(layout).write_text("node")
    os.unshare(_NAMESPACES)
    init = os.fork()
    if init:
        record = {"pid": init, "started": _started(init)}
        layout.node_record.write_text(json.dumps(record))
        return
    try:
        _prepare(layout)
        _run(layout, components)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _command(*arguments: str) -> None:
    subprocess.run(arguments, check=True)


def _prepare(layout: Layout) -> None:
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PROGRAMS}"
    # What the node mounts is seen by its containers, and not by the machine.
    _command("mount", "--make-rprivate", "/")
    _command("mount", "--make-rshared", "/")
    _command("mount", "-t", "proc", "proc", "/proc")
    _command("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    for target, name in BOUND_DIRECTORIES.items():
        source = layout.state / name
        source.mkdir(parents=True, exist_ok=True)
        _cover(Path(target).parent)
        Path(target).mkdir(exist_ok=True)
        _command("mount", "--bind", str(source), target)
    for name, value in _KERNEL_SETTINGS.items():
        shown = Path("/run/kernel-settings") / name
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(f"{value}\n")
        _command("mount", "--bind", str(shown), f"/proc/sys/{name}")
    socket.sethostname(NODE_NAME)
    _command("ip", "link", "set", "lo", "up")
    # An interface that is up and leads nowhere: addresses of services need a route before they are rewritten.
    _command("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
    _command("ip", "link", "set", "node1", "up")
    _command("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
    _command("ip", "link", "set", "node0", "up")
    _command("ip", "route", "add", "default", "dev", "node0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for controller in _controllers():
        group = controller / layout.cgroup
        group.mkdir(exist_ok=True)
        shares = group / "cpu.shares"
        if shares.exists():  # version 1: as much as kubelet gives to the pods of a node of this size
            shares.write_text(str(1024 * (os.cpu_count() or 1)))


def _cover(directory: Path) -> None:
    """Let the node make entries in a directory of the machine which the machine does not get."""
    if os.path.ismount(directory):
        return
    layers = Path("/run/layers") / directory.name
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    options = f"lowerdir={directory},upperdir={layers / 'upper'},workdir={layers / 'work'}"
    _command("mount", "-t", "overlay", "-o", options, "overlay", str(directory))


def _run(layout: Layout, components: Sequence[Component]) -> None:
    """Start them one after another, and reap what ends; what ends is recorded, and started no more."""
    names: dict[int, str] = {}
    for component in components:
        _starting(layout).write_text(component.name)
        names[_start(layout, component)] = component.name
        while not component.is_healthy():
            _reap(layout, names, os.WNOHANG)
            time.sleep(0.1)
    _starting(layout).unlink()
    while True:
        _reap(layout, names, 0)


def _start(layout: Layout, component: Component) -> int:
    program = shutil.which(component.command[0])
    if program is None:
        raise ClusterError(f"There is no {component.command[0]}.")
    log = str(layout.logs / f"{component.name}.log")
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(program, list(component.command), os.environ, file_actions=files)


def _reap(layout: Layout, names: dict[int, str], options: int) -> None:
    """One process, or none with WNOHANG; it may be an orphan, such as that of every container."""
    pid, status = os.waitpid(-1, options)
    if name := names.pop(pid, None):
        code = os.waitstatus_to_exitcode(status)
        (layout.state / f"{name}.ended").write_text(f"{code}\n")
        print(f"{name} ended: {code}", file=sys.stderr, flush=True)


def _starting(layout: Layout) -> Path:
    return layout.state / "starting"


def starting_component(layout: Layout) -> str | None:
    """The one that is to become healthy next, while the node starts."""
    try:
        return _starting(layout).read_text()
    except FileNotFoundError:
        return None


def ended_components(layout: Layout) -> list[str]:
    return sorted(path.stem for path in layout.state.glob("*.ended"))


def _started(pid: int) -> str:
    """When the process was started, in ticks: with its number it is one process and no other."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def find_node(layout: Layout) -> int | None:
    """The node's PID 1, as seen from here, if it runs."""
    try:
        record = json.loads(layout.node_record.read_text())
        return record["pid"] if _started(record["pid"]) == record["started"] else None
    except (FileNotFoundError, ProcessLookupError):
        return None


def join_network(layout: Layout) -> None:
    """This process and what it starts are in the node's network from now on."""
    pid = find_node(layout)
    if pid is None:
        raise ClusterError("The cluster does not run; start it: python -m tools.kubernetes_cluster up")
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        os.setns(namespace, os.CLONE_NEWNET)
    finally:
        os.close(namespace)


def stop_node(layout: Layout, timeout: float = 60.0) -> None:
    """Kill everything in the node; its mounts and its network end with it."""
    if pid := find_node(layout):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)
    until = time.monotonic() + timeout
    while find_node(layout) is not None or not _remove_cgroups(layout):
        if time.monotonic() > until:
            raise ClusterError(f"The cgroups {layout.cgroup} below /sys/fs/cgroup are still in use.")
        time.sleep(0.1)


def _controllers() -> list[Path]:
    """The roots of the cgroup hierarchies: one for each controller, or one for all (version 2)."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]


def _remove_cgroups(layout: Layout) -> bool:
    """Whether they are gone; one in which the last process is just ending is not, yet."""
    left = False
    for controller in _controllers():
        root = controller / layout.cgroup
        for directory, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.rmdir(directory)
                except OSError:
                    left = True
    return not left
