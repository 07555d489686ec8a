"""Where the cluster keeps its files, and the addresses that it uses in a network of its own."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "node"
NODE_ADDRESS = "10.197.0.1"
NODE_NETWORK = "10.197.0.0/24"
POD_NETWORK = "10.244.0.0/22"
SERVICE_NETWORK = "10.96.0.0/16"
# The first address of the service network: what pods find the API server by.
API_SERVICE_ADDRESS = "10.96.0.1"
API_PORT = 6443
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
CONTROLLER_MANAGER_PORT = 10257
SCHEDULER_PORT = 10259
KUBELET_HEALTH_PORT = 10248
PROXY_HEALTH_PORT = 10256

PAUSE_IMAGE = "fumehood.test/pause:1"
ANSWER_IMAGE = "fumehood.test/answer:1"

# Where Debian has iptables and ip, which an ordinary user's PATH lacks.
SYSTEM_PROGRAMS = "/usr/sbin:/sbin"

# A socket's path has 107 bytes at most.
_MAX_SOCKET_PATH = 107


class ClusterError(Exception):
    """The cluster cannot be started, used or stopped; the text says what to do."""


@dataclass(frozen=True)
class Layout:
    """state: the directory with everything that one cluster writes; all but its logs goes with the cluster."""

    state: Path

    def __post_init__(self) -> None:
        if len(os.fsencode(self.containerd_socket)) > _MAX_SOCKET_PATH:
            raise ClusterError(
                f"The path of {self.state} is too long for a socket; choose another by --state."
            )

    @property
    def logs(self) -> Path:
        """Of the components, and those of pods below `pods`; they stay until the next start."""
        return self.state / "logs"

    @property
    def certificates(self) -> Path:
        return self.state / "certificates"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def data(self) -> Path:
        """What the components store."""
        return self.state / "data"

    @property
    def node_record(self) -> Path:
        """The process that is the node's PID 1: its number here, and when it was started."""
        return self.state / "node.json"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.kubeconfig_of("admin")

    def kubeconfig_of(self, user: str) -> Path:
        return self.config / f"{user}.kubeconfig"

    @property
    def cgroup(self) -> str:
        """Its name in each hierarchy; that of another state directory is another one."""
        return f"fumehood-kubernetes-{hashlib.sha256(os.fsencode(self.state)).hexdigest()[:8]}"
