"""Starts the cluster, waits until a pod runs in it, says how it is, and removes it."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tools.kubernetes_cluster.binaries import AGENT_SANDBOX_VERSION, Binaries, build_binaries
from tools.kubernetes_cluster.certificates import write_credentials
from tools.kubernetes_cluster.components import CNI_PLUGINS, list_components, write_configuration
from tools.kubernetes_cluster.images import import_image, write_image
from tools.kubernetes_cluster.layout import (
    ANSWER_IMAGE,
    NODE_NAME,
    PAUSE_IMAGE,
    SYSTEM_PROGRAMS,
    ClusterError,
    Layout,
)
from tools.kubernetes_cluster.node import (
    ended_components,
    find_node,
    join_network,
    start_node,
    starting_component,
    stop_node,
)

_CONTROLLER_IMAGE = f"fumehood.test/agent-sandbox-controller:{AGENT_SANDBOX_VERSION}"
_CONTROLLER_NAMESPACE = "agent-sandbox-system"
# How much of a log is shown with an error.
_LOG_LINES = 15
# Debian's package of each program that is needed.
_HOST_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "mount": "mount",
}


def start_cluster(layout: Layout, timeout: float, *, keep: bool) -> None:
    """Returns when the controller of agent-sandbox runs in a pod: then everything below it works.

    The calling process is in the cluster's network afterwards. If it fails, its logs stay, and with `keep` also what
    runs.
    """
    if find_node(layout) is not None:
        raise ClusterError(f"A cluster runs already, in {layout.state}.")
    _check_host()
    binaries = build_binaries()
    stop_cluster(layout)  # what one left that was not stopped
    if layout.logs.exists():
        shutil.rmtree(layout.logs)
    for directory in (layout.logs, layout.certificates, layout.config, layout.data):
        directory.mkdir(parents=True)
    _link_kubectl(layout, binaries)
    write_credentials(layout)
    write_configuration(layout)
    components = list_components(layout, binaries)
    until = time.monotonic() + timeout
    try:
        start_node(layout, components)
        join_network(layout)
        _wait_until_ready(layout, binaries, until)
    except BaseException:
        if not keep:
            stop_node(layout)
        raise


def _wait_until_ready(layout: Layout, binaries: Binaries, until: float) -> None:
    _wait(layout, until, "node", lambda: starting_component(layout) is None)
    for name, image in ((PAUSE_IMAGE, "pause"), (ANSWER_IMAGE, "answer")):
        _import_program(layout, binaries.programs[image], name)
    _import_program(layout, binaries.programs["agent-sandbox-controller"], _CONTROLLER_IMAGE)
    _wait(layout, until, "kubelet", lambda: _node_is_ready(layout))
    _install_agent_sandbox(layout, binaries)
    _wait(layout, until, "kubelet", lambda: _is_available(layout, "deployment/agent-sandbox-controller"))


def stop_cluster(layout: Layout) -> None:
    """Ends every process of it, and removes its cgroups and its files but the logs."""
    stop_node(layout)
    if layout.state.exists():
        for path in layout.state.iterdir():
            if path.is_dir() and not path.is_symlink():
                if path != layout.logs:
                    shutil.rmtree(path)
            else:
                path.unlink()


def describe_cluster(layout: Layout) -> str:
    if (pid := find_node(layout)) is None:
        return f"No cluster runs in {layout.state}."
    lines = [f"The cluster in {layout.state} runs; the PID 1 of its node is {pid} here."]
    lines += [
        f"{name} has ended; {layout.logs / f'{name}.log'} says why." for name in ended_components(layout)
    ]
    join_network(layout)
    with contextlib.suppress(ClusterError):
        lines.append(run_kubectl(layout, "get", "nodes,pods", "--all-namespaces", "--output=wide"))
    lines.append("Use it by: python -m tools.kubernetes_cluster run kubectl get pods")
    return "\n".join(lines)


def environment_for(layout: Layout) -> dict[str, str]:
    """What a program needs to find the cluster, in whose network it has to be."""
    path = f"{layout.state / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "KUBECONFIG": str(layout.kubeconfig), "PATH": path}


def run_kubectl(layout: Layout, *arguments: str, stdin: str | None = None) -> str:
    """Its output. Only for a process in the cluster's network."""
    command = [str(layout.state / "bin" / "kubectl"), *arguments]
    done = subprocess.run(
        command, env=environment_for(layout), input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"`kubectl {' '.join(arguments)}` failed:\n{done.stderr or done.stdout}")
    return done.stdout


def _check_host() -> None:
    if os.geteuid() != 0:
        raise ClusterError("A cluster needs root: containerd and kubelet mount, and make cgroups.")
    path = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PROGRAMS}"
    missing = {package for name, package in _HOST_PROGRAMS.items() if shutil.which(name, path=path) is None}
    if not (CNI_PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise ClusterError(
            "Programs of this machine are missing; install them:\n"
            f"  apt-get update && apt-get install --no-install-recommends {' '.join(sorted(missing))}"
        )


def _link_kubectl(layout: Layout, binaries: Binaries) -> None:
    directory = layout.state / "bin"
    directory.mkdir()
    (directory / "kubectl").symlink_to(binaries["kubectl"])


def _import_program(layout: Layout, program: Path, name: str) -> None:
    archive = layout.state / "image.tar"
    write_image(program, name, archive)
    import_image(layout, archive)
    archive.unlink()


def _install_agent_sandbox(layout: Layout, binaries: Binaries) -> None:
    """Its own manifests, with the image that was built here; there is one replica, so no leader is elected."""
    directory = layout.config / "agent-sandbox"
    shutil.copytree(binaries.manifests, directory / "release")
    container = "/spec/template/spec/containers/0"
    patch = [
        {"op": "replace", "path": f"{container}/image", "value": _CONTROLLER_IMAGE},
        {"op": "test", "path": f"{container}/args/0", "value": "--leader-elect=true"},
        {"op": "replace", "path": f"{container}/args/0", "value": "--leader-elect=false"},
    ]
    patches = [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}]
    overlay = {"resources": ["release"], "patches": patches}
    (directory / "kustomization.yaml").write_text(json.dumps(overlay))
    # The CRDs are too large for the annotation of a client-side apply.
    run_kubectl(layout, "apply", "--server-side", "--kustomize", str(directory))
    run_kubectl(
        layout, "wait", "--for=condition=Established", "customresourcedefinitions", "--all", "--timeout=60s"
    )


# --- waiting ------------------------------------------------------------------------------------------


def _wait(layout: Layout, until: float, component: str, is_ready: Callable[[], bool]) -> None:
    """component: whose log tells why it takes so long, once all have started."""
    while not is_ready():
        if find_node(layout) is None:
            raise _failure(layout, "node", "has ended")
        if ended := ended_components(layout):
            raise _failure(layout, ended[0], "has ended")
        if time.monotonic() > until:
            raise _failure(layout, starting_component(layout) or component, "is not ready in time")
        time.sleep(0.2)


def _failure(layout: Layout, component: str, what: str) -> ClusterError:
    log = layout.logs / f"{component}.log"
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return ClusterError("\n".join([f"{component} {what}. The last lines of {log}:", *lines]))


def _node_is_ready(layout: Layout) -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    try:
        return run_kubectl(layout, "get", "node", NODE_NAME, f"--output=jsonpath={path}") == "True"
    except ClusterError:
        return False


def _is_available(layout: Layout, deployment: str) -> bool:
    path = '{.status.conditions[?(@.type=="Available")].status}'
    arguments = ("get", deployment, f"--namespace={_CONTROLLER_NAMESPACE}", f"--output=jsonpath={path}")
    return run_kubectl(layout, *arguments) == "True"
