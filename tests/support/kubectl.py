"""kubectl, and objects of Kubernetes as trees."""

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

Tree = dict[str, Any]

AGENTS = "agents.x-k8s.io/v1beta1"
EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"


class KubectlError(AssertionError):
    """What kubectl said."""


@dataclass(frozen=True)
class Kubectl:
    """For the cluster that KUBECONFIG names."""

    namespace: str = "default"
    timeout: float = 400

    def for_namespace(self, namespace: str) -> "Kubectl":
        return replace(self, namespace=namespace)

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        command = ["kubectl", f"--namespace={self.namespace}", *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=self.timeout, check=False
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        tree = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.run("apply", "--filename=-", stdin=json.dumps(tree))

    def get(self, kind: str, name: str) -> Tree:
        return json.loads(self.run("get", kind, name, "--output=json"))

    def list(self, kind: str, selector: str = "") -> list[Tree]:
        return json.loads(self.run("get", kind, "--output=json", f"--selector={selector}"))["items"]

    def names(self, kind: str, selector: str = "") -> set[str]:
        return {each["metadata"]["name"] for each in self.list(kind, selector)}

    def wait(self, target: str, condition: str, seconds: float = 60) -> None:
        """target: such as `pod/name`. condition: what `kubectl wait --for` takes."""
        self.run("wait", target, f"--for={condition}", f"--timeout={seconds:g}s")

    def wait_for_rollout(self, deployment: str, seconds: float) -> None:
        """Fails with what its pods say."""
        try:
            self.run("rollout", "status", f"deployment/{deployment}", f"--timeout={seconds:g}s")
        except KubectlError as error:
            described = self.run("describe", "pods")
            logs = self.run("logs", f"deployment/{deployment}", "--all-containers", "--tail=50")
            raise KubectlError(f"{error}\n{described}\n{logs}") from error

    def delete(self, target: str) -> None:
        """Return once it is gone."""
        self.run("delete", target, "--ignore-not-found", "--wait=true")


def find_cluster() -> Kubectl:
    """Fails where there is none: a test of a cluster is not skipped."""
    assert os.environ.get("KUBECONFIG"), "These tests need a cluster: run `make test-kubernetes`."
    return Kubectl()


@contextlib.contextmanager
def own_namespace(cluster: Kubectl) -> Generator[Kubectl]:
    """For a new namespace, which is gone afterwards with everything in it."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    cluster.run("create", "namespace", namespace)
    try:
        yield cluster.for_namespace(namespace)
    finally:
        cluster.delete(f"namespace/{namespace}")


def condition_of(tree: Mapping[str, Any], kind: str) -> Tree:
    """An empty one if the object has none of this kind."""
    conditions: list[Tree] = tree.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), Tree())


# --- objects --------------------------------------------------------------------------------------------


def template(name: str, pod: Mapping[str, Any]) -> Tree:
    """A SandboxTemplate without a network policy of the controller's."""
    return {
        "apiVersion": EXTENSIONS,
        "kind": "SandboxTemplate",
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": pod}, "networkPolicyManagement": "Unmanaged"},
    }


def warm_pool(name: str, template_name: str, replicas: int) -> Tree:
    return {
        "apiVersion": EXTENSIONS,
        "kind": "SandboxWarmPool",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": template_name}},
    }


def claim(name: str, pool: str, **lifecycle: str) -> Tree:
    return {
        "apiVersion": EXTENSIONS,
        "kind": "SandboxClaim",
        "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": pool}, "lifecycle": {"shutdownPolicy": "Delete", **lifecycle}},
    }
