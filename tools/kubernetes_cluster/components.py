"""The programs of the node, in the order in which they start: their command lines and configuration files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.kubernetes_cluster.binaries import Binaries
from tools.kubernetes_cluster.health import answers, listens
from tools.kubernetes_cluster.layout import (
    API_PORT,
    CONTROLLER_MANAGER_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    KUBELET_HEALTH_PORT,
    NODE_ADDRESS,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_NETWORK,
    PROXY_HEALTH_PORT,
    SCHEDULER_PORT,
    SERVICE_NETWORK,
    Layout,
)

# Debian's place for them.
CNI_PLUGINS = Path("/usr/lib/cni")
# There are none; the default would be made on the machine.
_VOLUME_PLUGINS = "/run/kubelet-volume-plugins"
# Where the node has what it writes: path in the node -> path below the state directory.
BOUND_DIRECTORIES = {
    "/var/lib/kubelet": "data/kubelet",
    "/var/lib/containerd": "data/containerd",
    "/var/lib/cni": "data/cni",
    "/var/log/pods": "logs/pods",
    "/var/log/containers": "data/container-logs",
}


@dataclass(frozen=True)
class Component:
    """is_healthy: for a process in the node's network; the components after it start when it is."""

    name: str
    command: Sequence[str]
    is_healthy: Callable[[], bool]


def write_configuration(layout: Layout) -> None:
    """What the components read besides certificates and kubeconfigs."""
    (layout.config / "containerd.toml").write_text(_containerd_config(layout))
    networks = layout.config / "cni"
    networks.mkdir(exist_ok=True)
    (networks / "10-pods.conflist").write_text(json.dumps(_pod_network(), indent=2))
    (layout.config / "kubelet.json").write_text(json.dumps(_kubelet_config(layout), indent=2))
    # No name server: there is no way out of the node's network.
    (layout.config / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def list_components(layout: Layout, binaries: Binaries) -> list[Component]:
    certificates = layout.certificates
    return [
        Component("etcd", _etcd(layout, binaries), _asks(f"http://127.0.0.1:{ETCD_PORT}/readyz")),
        Component(
            "containerd",
            ["containerd", "--config", str(layout.config / "containerd.toml")],
            lambda: listens(layout.containerd_socket),
        ),
        Component(
            "kube-apiserver",
            _api_server(layout, binaries),
            _asks(f"https://{NODE_ADDRESS}:{API_PORT}/readyz"),
        ),
        Component(
            "kube-controller-manager",
            [
                binaries["kube-controller-manager"],
                f"--kubeconfig={layout.kubeconfig_of('kube-controller-manager')}",
                f"--root-ca-file={certificates / 'ca.crt'}",
                f"--service-account-private-key-file={certificates / 'service-accounts.key'}",
                "--use-service-account-credentials=true",
                f"--cluster-cidr={POD_NETWORK}",
                f"--service-cluster-ip-range={SERVICE_NETWORK}",
                f"--flex-volume-plugin-dir={_VOLUME_PLUGINS}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
            ],
            _asks(f"https://127.0.0.1:{CONTROLLER_MANAGER_PORT}/healthz"),
        ),
        Component(
            "kube-scheduler",
            [
                binaries["kube-scheduler"],
                f"--kubeconfig={layout.kubeconfig_of('kube-scheduler')}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
            ],
            _asks(f"https://127.0.0.1:{SCHEDULER_PORT}/healthz"),
        ),
        Component(
            "kubelet",
            [
                binaries["kubelet"],
                f"--kubeconfig={layout.kubeconfig_of('kubelet')}",
                f"--config={layout.config / 'kubelet.json'}",
                f"--hostname-override={NODE_NAME}",
                f"--node-ip={NODE_ADDRESS}",
            ],
            _asks(f"http://127.0.0.1:{KUBELET_HEALTH_PORT}/healthz"),
        ),
        Component(
            "kube-proxy",
            [
                binaries["kube-proxy"],
                f"--kubeconfig={layout.kubeconfig_of('kube-proxy')}",
                f"--hostname-override={NODE_NAME}",
                f"--cluster-cidr={POD_NETWORK}",
                "--proxy-mode=iptables",
                # These limits are the machine's, not the node's; 0 leaves them.
                "--conntrack-max-per-core=0",
                "--conntrack-min=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
            ],
            _asks(f"http://127.0.0.1:{PROXY_HEALTH_PORT}/healthz"),
        ),
    ]


def _asks(url: str) -> Callable[[], bool]:
    return lambda: answers(url)


def _etcd(layout: Layout, binaries: Binaries) -> list[str]:
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    return [
        binaries["etcd"],
        f"--name={NODE_NAME}",
        f"--data-dir={layout.data / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={NODE_NAME}={peer}",
        # Nothing in it is worth keeping, and a busy disk would hold up everything.
        "--unsafe-no-fsync",
    ]


def _api_server(layout: Layout, binaries: Binaries) -> list[str]:
    certificates = layout.certificates
    return [
        binaries["kube-apiserver"],
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--client-ca-file={certificates / 'ca.crt'}",
        f"--tls-cert-file={certificates / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={certificates / 'kube-apiserver.key'}",
        f"--kubelet-client-certificate={certificates / 'kubelet-client.crt'}",
        f"--kubelet-client-key={certificates / 'kubelet-client.key'}",
        f"--kubelet-certificate-authority={certificates / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={certificates / 'service-accounts.key'}",
        f"--service-account-signing-key-file={certificates / 'service-accounts.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
    ]


def _containerd_config(layout: Layout) -> str:
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{layout.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "/run/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # No AppArmor profile can be loaded from inside the node.
  disable_apparmor = true
  # Root without CAP_SYS_RESOURCE, as in a virtual machine for builds, cannot protect a process from the OOM killer.
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{layout.config / "cni"}"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def _pod_network() -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": POD_NETWORK}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def _kubelet_config(layout: Layout) -> dict[str, object]:
    certificates = layout.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificates / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(certificates / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "volumePluginDir": _VOLUME_PLUGINS,
        "clusterDomain": "cluster.local",
        "resolvConf": str(layout.config / "resolv.conf"),
        # Nothing imported is ever collected, however full the machine's disk is: it could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "evictionPressureTransitionPeriod": "0s",
        "shutdownGracePeriod": "0s",
    }
