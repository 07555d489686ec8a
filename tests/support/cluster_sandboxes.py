"""The sandboxes that `deploy/kubernetes` ships, in a namespace of a real cluster, and gateways that claim them."""

import contextlib
import json
import os
import secrets
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fumehood.sandbox_client.kubernetes import (
    ClaimSettings,
    KubernetesApi,
    KubernetesSandboxProvider,
    load_credentials,
)
from tests.support.gateway_process import GatewayProcess, run_gateway
from tests.support.kubectl import Kubectl, Tree
from tools.kubernetes_cluster.layout import NODE_ADDRESS

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
POOL = "fumehood-sandbox"
_POOL_4G = "fumehood-sandbox-4g"
_PERMISSIONS = DEPLOY / "base" / "gateway-permissions.yaml"
# How long an answer may take on a busy machine.
_TIMEOUT = 300


@dataclass(frozen=True)
class ClusterSandboxes:
    """directory: with the token of the pods, and what a gateway needs to claim them with the permissions shipped."""

    kubectl: Kubectl
    directory: Path

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of the code interpreter."""
        return {
            "sandbox_warm_pool": POOL,
            "sandbox_namespace": self.kubectl.namespace,
            "sandbox_kubeconfig": str(self.directory / "kubeconfig"),
            "sandbox_token_file": str(self.directory / "token"),
            **more,
        }

    @contextlib.contextmanager
    def run_gateway(
        self, directory: Path, models: list[dict[str, Any]] | None = None, **more: Any
    ) -> Generator[GatewayProcess]:
        """One in the network of the node. models: without any, it runs the code of the message."""
        directory.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "providers": {"code_interpreter": {"settings": self.settings(**more)}},
            **({} if models is None else {"models": models}),
        }
        with run_gateway(directory, settings) as gateway:
            yield gateway

    def make_provider(self) -> KubernetesSandboxProvider:
        """As a gateway has it, for both tiers; the caller starts and closes it."""
        api = KubernetesApi(load_credentials(str(self.directory / "kubeconfig"), os.environ))
        settings = ClaimSettings(
            namespace=self.kubectl.namespace,
            pools={"1g": POOL, "4g": _POOL_4G},
            gateway=uuid.uuid4().hex,
            replica=uuid.uuid4().hex,
        )
        return KubernetesSandboxProvider(api, settings, token=(self.directory / "token").read_text())

    def claims(self) -> set[str]:
        return self.kubectl.names("sandboxclaims")

    def wait_until_full(self, seconds: float = 180) -> None:
        """Until every pod of the pool is ready."""
        replicas = self.kubectl.get("sandboxwarmpool", POOL)["spec"]["replicas"]
        condition = f"jsonpath={{.status.readyReplicas}}={replicas}"
        self.kubectl.wait(f"sandboxwarmpool/{POOL}", condition, seconds)

    def scale(self, replicas: int) -> None:
        patch = json.dumps({"spec": {"replicas": replicas}})
        self.kubectl.run("patch", f"sandboxwarmpool/{POOL}", "--type=merge", f"--patch={patch}")


def install_sandboxes(
    kubectl: Kubectl, directory: Path, *, replicas: int, index_url: str = ""
) -> ClusterSandboxes:
    """Template and pool in the namespace of `kubectl`, as they are shipped, and a service account for gateways.

    index_url: where its pods get packages; without it they can install none.
    """
    apply_overlay(
        kubectl,
        directory,
        {
            "namespace": kubectl.namespace,
            "resources": [_relative(DEPLOY / "sandbox", directory)],
            **packages_from(index_url, directory),
        },
    )
    token = secrets.token_hex(32)
    kubectl.run("create", "secret", "generic", "fumehood-sandbox-token", f"--from-literal=token={token}")
    _write_secret(directory / "token", token)
    kubectl.run("apply", f"--filename={_PERMISSIONS}")
    _write_kubeconfig(kubectl, directory / "kubeconfig")
    sandboxes = ClusterSandboxes(kubectl, directory)
    sandboxes.scale(replicas)
    sandboxes.wait_until_full()
    return sandboxes


def install_4g_pool(kubectl: Kubectl, directory: Path) -> None:
    """The shipped pool of the tier 4g, with one pod, beside the sandboxes that are there."""
    resources = [_relative(DEPLOY / "components" / "memory-4g" / "sandbox", directory)]
    apply_overlay(kubectl, directory, {"namespace": kubectl.namespace, "resources": resources})
    kubectl.wait(f"sandboxwarmpool/{_POOL_4G}", "jsonpath={.status.readyReplicas}=1", 180)


def apply_overlay(kubectl: Kubectl, directory: Path, kustomization: Tree) -> None:
    """The kustomization's paths are relative to the directory."""
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    kubectl.run("apply", f"--kustomize={directory}")


def packages_from(index_url: str, directory: Path) -> Tree:
    """What lets the pods of an overlay in this directory install packages of an index."""
    if not index_url:
        return {}
    # The component adds the container as the last one; the shipped template has an empty list of variables there.
    variable = {"name": "FUMEHOOD_INDEX_URL", "value": index_url}
    patch = [
        {"op": "test", "path": "/spec/podTemplate/spec/containers/2/name", "value": "egress"},
        {"op": "replace", "path": "/spec/podTemplate/spec/containers/2/env", "value": [variable]},
    ]
    return {
        "components": [_relative(DEPLOY / "components" / "packages", directory)],
        "patches": [{"target": {"kind": "SandboxTemplate"}, "patch": json.dumps(patch)}],
    }


def _relative(path: Path, directory: Path) -> str:
    return os.path.relpath(path, directory.resolve())


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _write_kubeconfig(kubectl: Kubectl, path: Path) -> None:
    """The cluster of KUBECONFIG, and the service account of the gateway."""
    tree = json.loads(kubectl.run("config", "view", "--raw", "--minify", "--flatten", "--output=json"))
    token = kubectl.run("create", "token", "fumehood-gateway", "--duration=12h").strip()
    tree["users"] = [{"name": "gateway", "user": {"token": token}}]
    tree["contexts"][0]["context"]["user"] = "gateway"
    _write_secret(path, json.dumps(tree))


# --- what is asked of a gateway -------------------------------------------------------------------------


def ask(url: str, code: str, *, key: str = "", container: Any = None, **fields: Any) -> Tree:
    """The response to a request for this code; the gateway has no model, or one that calls for other code."""
    request = {
        "model": "m",
        "input": f"```python\n{code}\n```",
        "tools": [{"type": "code_interpreter", "container": container or {"type": "auto"}}],
        "include": ["code_interpreter_call.outputs"],
        **fields,
    }
    answer = httpx.post(f"{url}/responses", json=request, headers=authorize(key), timeout=_TIMEOUT)
    assert answer.status_code == 200, answer.text
    return answer.json()


def authorize(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def logs_of(response: Tree) -> str:
    """What the code of its calls printed."""
    outputs: list[Tree] = []
    for item in response["output"]:
        if item["type"] == "code_interpreter_call":
            outputs += item["outputs"] or []
    return "".join(output["logs"] for output in outputs if output["type"] == "logs")


def answer_of(response: Tree) -> str:
    parts: list[Tree] = []
    for item in response["output"]:
        if item["type"] == "message":
            parts += item["content"]
    return "".join(part["text"] for part in parts)


def node_url(port: int) -> str:
    """For pods: an address of the node."""
    return f"http://{NODE_ADDRESS}:{port}"
