"""The manifests of `deploy/kubernetes`, deployed as docs/kubernetes.md says, serve a turn from beginning to end."""

import json
import os
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.cluster_sandboxes import (
    DEPLOY,
    POOL,
    ClusterSandboxes,
    answer_of,
    apply_overlay,
    ask,
    authorize,
    logs_of,
    packages_from,
)
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer
from tests.support.kubectl import Kubectl, Tree, claim, find_cluster
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.waiting import becomes_true
from tools.kubernetes_cluster.layout import NODE_ADDRESS, NODE_NAME

_NAMESPACE = "fumehood"
_GATEWAY = "fumehood-gateway"
_VOLUME = "fumehood-test"
_OVERLAYS = sorted(path.parent for path in (DEPLOY / "overlays").glob("*/kustomization.yaml"))


@dataclass(frozen=True)
class _Deployment:
    """url: of the service in the cluster. key: the first API key."""

    kubectl: Kubectl
    url: str
    key: str
    model: ScriptedModelServer
    index: FakePackageIndex


@pytest.fixture(scope="module")
def namespace() -> Generator[Kubectl]:
    """As it is shipped; it enforces the strictest standard for pods."""
    cluster = find_cluster()
    cluster.run("apply", f"--filename={DEPLOY / 'base' / 'namespace.yaml'}")
    yield cluster.for_namespace(_NAMESPACE)
    cluster.delete(f"namespace/{_NAMESPACE}")
    cluster.delete(f"persistentvolume/{_VOLUME}")


@pytest.fixture(scope="module")
def deployment(namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Generator[_Deployment]:
    directory = tmp_path_factory.mktemp("deployment")
    token = secrets.token_hex(32)
    namespace.run("create", "secret", "generic", "fumehood-sandbox-token", f"--from-literal=token={token}")
    disk = directory / "disk"
    disk.mkdir()
    namespace.apply(_volume(disk))
    with ScriptedModelServer(host=NODE_ADDRESS) as model, FakePackageIndex(host=NODE_ADDRESS) as index:
        apply_overlay(
            namespace,
            directory,
            {
                "resources": [os.path.relpath(DEPLOY / "base", directory.resolve())],
                **packages_from(index.url, directory),
                "configMapGenerator": [_config_map(model.url)],
            },
        )
        key = _create_key(namespace)
        namespace.wait_for_rollout(_GATEWAY, 300)
        ClusterSandboxes(namespace, directory).wait_until_full()
        address = namespace.get("service", _GATEWAY)["spec"]["clusterIP"]
        yield _Deployment(namespace, f"http://{address}/v1", key, model, index)


def _volume(disk: Path) -> Tree:
    """A disk of the node, for the claim of the base, which names no storage class."""
    node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _VOLUME},
        "spec": {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": _NAMESPACE, "name": _GATEWAY},
            "local": {"path": str(disk)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}},
        },
    }


def _config_map(model_url: str) -> Tree:
    """The shipped settings, with a model."""
    settings = yaml.safe_load((DEPLOY / "base" / "fumehood.yaml").read_text())
    settings["models"] = [{"match": "*", "base_url": model_url}]
    return {
        "name": _GATEWAY,
        "behavior": "replace",
        "literals": [f"fumehood.yaml={json.dumps(settings)}"],
    }


def _create_key(namespace: Kubectl) -> str:
    """In the container that waits for it."""
    running = "jsonpath={.items[0].status.initContainerStatuses[0].state.running}"
    selector = "--selector=app.kubernetes.io/component=gateway"
    assert becomes_true(lambda: namespace.run("get", "pods", selector, f"--output={running}"), 120)
    command = ("exec", f"deployment/{_GATEWAY}", "--container=wait-for-key", "--")
    return namespace.run(*command, "fumehood", "keys", "create").strip()


# --- tests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", ["base", *(f"overlays/{path.name}" for path in _OVERLAYS)])
def test_the_api_server_accepts_the_manifests(namespace: Kubectl, overlay: str) -> None:
    applied = namespace.run("apply", "--dry-run=server", f"--kustomize={DEPLOY / overlay}")
    lines = applied.splitlines()
    assert all(line.endswith("(server dry run)") for line in lines)
    for kind in ("deployment.apps", "sandboxtemplate.", "sandboxwarmpool.", "poddisruptionbudget.policy"):
        assert any(line.startswith(kind) for line in lines), kind


def test_a_turn_with_a_package_and_a_file(deployment: _Deployment) -> None:
    files = {"hello/__init__.py": "def greet(name):\n    return f'Hello, {name}!'\n"}
    deployment.index.add(wheel("hello", "1.0", files))
    authorization = authorize(deployment.key)
    uploaded = httpx.post(
        f"{deployment.url}/files",
        files={"file": ("names.csv", b"name\nAda\nGrace\n")},
        data={"purpose": "user_data"},
        headers=authorization,
        timeout=60,
    )
    assert uploaded.status_code == 200, uploaded.text
    code = """
import csv, hello
names = [row["name"] for row in csv.DictReader(open("/mnt/data/names.csv"))]
text = "\\n".join(hello.greet(name) for name in names)
print(text)
with open("/mnt/data/greetings.txt", "w") as file:
    print(text, end="", file=file)
"""
    deployment.model.script(code_call(code, requirements=["hello"]), text_answer("I greeted them."))
    container = {"type": "auto", "file_ids": [uploaded.json()["id"]]}
    response = ask(deployment.url, "", key=deployment.key, container=container, input="Greet them.")
    assert response["status"] == "completed"
    installed, _, printed = logs_of(response).partition("Hello")
    assert "installed hello 1.0" in installed
    assert f"Hello{printed}" == "Hello, Ada!\nHello, Grace!\n"
    assert answer_of(response) == "I greeted them."
    (call,) = (item for item in response["output"] if item["type"] == "code_interpreter_call")
    made = f"{deployment.url}/containers/{call['container_id']}"
    listed = httpx.get(f"{made}/files", headers=authorization, timeout=60).json()["data"]
    (file,) = (each for each in listed if each["path"] == "/mnt/data/greetings.txt")
    content = httpx.get(f"{made}/files/{file['id']}/content", headers=authorization, timeout=60)
    assert content.text == "Hello, Ada!\nHello, Grace!"
    (made_claim,) = deployment.kubectl.list("sandboxclaims")
    assert made_claim["spec"]["warmPoolRef"]["name"] == POOL
    httpx.delete(made, headers=authorization, timeout=60).raise_for_status()
    assert becomes_true(lambda: not deployment.kubectl.names("sandboxclaims"), 60)


def test_without_a_key_nothing_is_served(deployment: _Deployment) -> None:
    answer = httpx.get(f"{deployment.url}/containers", timeout=60)
    assert answer.status_code == 401


def test_a_pod_refuses_whoever_has_no_token(deployment: _Deployment) -> None:
    """As another pod would ask: with the bridge of this cluster no network policy stands in the way."""
    kubectl = deployment.kubectl
    kubectl.apply(claim("mine", POOL))
    kubectl.wait("sandboxclaim/mine", "condition=Ready")
    address = f"http://{kubectl.get('sandboxclaim', 'mine')['status']['sandbox']['podIPs'][0]}:8080"
    assert httpx.get(f"{address}/health", timeout=30).status_code == 200
    for headers in ({}, authorize("wrong")):
        assert httpx.get(f"{address}/v1/sandboxes", headers=headers, timeout=30).status_code == 401
    kubectl.delete("sandboxclaim/mine")
