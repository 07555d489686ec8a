"""`fumehood doctor --config` with the settings of a gateway: cluster, sandbox servers, models."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import fumehood
from tests.support.cli_runner import CommandResult, run_command
from tests.support.kubernetes.cluster import (
    LARGE_POOL,
    NAMESPACE,
    POOL,
    Cluster,
    ClusterThread,
    run_cluster_thread,
)
from tests.support.kubernetes.object_store import POOLS, TEMPLATES
from tests.support.kubernetes.pods import POD_TOKEN, run_idle_pods
from tests.support.small_model_server import KEY, run_small_model_server
from tests.support.waiting import becomes_true

IMAGE = f"registry.example/fumehood-sandbox:{fumehood.__version__}"


@pytest.fixture
def cluster() -> Generator[ClusterThread]:
    with run_cluster_thread(run_idle_pods) as running:
        running.call(lambda found: set_image(found, IMAGE))
        assert becomes_true(lambda: running.call(lambda found: found.controller.count_warm(POOL)) == 2)
        yield running


def set_image(cluster: Cluster, image: str) -> None:
    spec = {"podTemplate": {"spec": {"containers": [{"name": "server", "image": image}]}}}
    for name in (POOL, LARGE_POOL):
        cluster.api.store.update(TEMPLATES, NAMESPACE, name, lambda known: {**known, "spec": spec})


def diagnose(directory: Path, interpreter: dict[str, Any], *arguments: str, **more: Any) -> CommandResult:
    tree = {"providers": {"code_interpreter": {"settings": interpreter}}, **more}
    file = directory / "gateway.yaml"
    file.write_text(json.dumps(tree))
    return run_command("doctor", "--config", str(file), *arguments, K=KEY)


def read_findings(result: CommandResult) -> dict[str, tuple[str, str, str]]:
    return {
        finding["name"]: (finding["state"], finding["detail"], finding["advice"])
        for finding in json.loads(result.out)["findings"]
    }


def test_a_cluster_that_is_in_order(cluster: ClusterThread, tmp_path: Path) -> None:
    settings = cluster.cluster.interpreter_settings(tmp_path, sandbox_warm_pools={"4g": LARGE_POOL})
    result = diagnose(tmp_path, settings)
    assert result.code == 0, result
    assert f"A gateway with {tmp_path}/gateway.yaml can serve." in result.out
    findings = read_findings(diagnose(tmp_path, settings, "--json"))
    assert [name for name, (state, _, _) in findings.items() if state == "ok"] == [
        "cluster: API server",
        "cluster: permissions",
        "cluster: controller",
        "cluster: warm pool 1g",
        "cluster: warm pool 4g",
        "cluster: image",
    ]
    assert "2 of 2 pods are ready" in findings["cluster: warm pool 1g"][1]
    assert findings["cluster: controller"][1] == "agent-sandbox 1.0.3."
    assert cluster.count_claims() == 0
    assert POD_TOKEN not in result.out


def deny(*verbs: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.api.faults.denied.update(verbs)


def run_version(image: str) -> Callable[[Cluster], None]:
    return lambda cluster: setattr(cluster.api, "controller_image", image)


def use_image(image: str) -> Callable[[Cluster], None]:
    return lambda cluster: set_image(cluster, image)


def delete(plural: str) -> Callable[[Cluster], None]:
    def spoil(cluster: Cluster) -> None:
        cluster.api.store.delete(plural, NAMESPACE, POOL)

    return spoil


def revoke_token(cluster: Cluster) -> None:
    cluster.api.tokens.clear()


def drain_pool(cluster: Cluster) -> None:
    cluster.api.store.set_status(POOLS, NAMESPACE, POOL, {"replicas": 2, "readyReplicas": 0})


@pytest.mark.parametrize(
    ("spoil", "name", "state", "said", "advised"),
    [
        (
            deny("create", "patch"),
            "permissions",
            "missing",
            "create sandboxclaims, patch sandboxclaims",
            "Role",
        ),
        (
            deny("list sandboxwarmpools"),
            "warm pools",
            "missing",
            "do not allow to list sandboxwarmpools",
            "pool",
        ),
        (
            run_version("x/agent-sandbox-controller:v0.5.0"),
            "controller",
            "missing",
            "0.5.0 loses the status",
            "1.0",
        ),
        (
            run_version("x/agent-sandbox-controller:0.5.1"),
            "controller",
            "missing",
            "0.5.1 loses the status",
            "1.0",
        ),
        (
            run_version("x/agent-sandbox-controller:v0.4.6"),
            "controller",
            "missing",
            "older than the API",
            "1.0",
        ),
        (run_version("x@sha256:abc"), "controller", "warning", "is unknown: its image is x@sha256", "1.0"),
        (run_version(""), "controller", "warning", "is unknown: deployments.apps not found", "kubeconfig"),
        (drain_pool, "warm pool 1g", "missing", "0 of 2 pods are ready", "kubectl -n fumehood get pods"),
        (
            use_image("y:0.0.1"),
            "image",
            "warning",
            "runs y:0.0.1, this gateway is",
            "tag",
        ),
        (
            delete(TEMPLATES),
            "image",
            "missing",
            f"no SandboxTemplate {POOL}",
            "deploy/kubernetes",
        ),
        (
            delete(POOLS),
            "warm pools",
            "missing",
            f"there is no SandboxWarmPool {POOL} in the namespace {NAMESPACE}, only {LARGE_POOL}",
            "sandbox_warm_pool",
        ),
        (
            revoke_token,
            "API server",
            "missing",
            "Unauthorized",
            "token is not valid",
        ),
    ],
)
def test_a_cluster_with_a_problem(
    cluster: ClusterThread,
    tmp_path: Path,
    spoil: Callable[[Cluster], object],
    name: str,
    state: str,
    said: str,
    advised: str,
) -> None:
    settings = cluster.cluster.interpreter_settings(tmp_path)
    cluster.call(spoil)
    result = diagnose(tmp_path, settings, "--json")
    found = read_findings(result)[f"cluster: {name}"]
    assert found[0] == state
    assert said in found[1]
    assert advised in found[2]
    assert result.code == (1 if state == "missing" else 0)


def test_an_api_server_that_is_down(cluster: ClusterThread, tmp_path: Path) -> None:
    settings = cluster.cluster.interpreter_settings(tmp_path)
    cluster.run(lambda found: found.api.stop())
    result = diagnose(tmp_path, settings)
    assert result.code == 1
    assert "cannot be reached" in result.out
    assert "cannot serve as it is" in result.out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sandbox_kubeconfig": "/no/such/file"}, "/no/such/file cannot be read"),
        ({"sandbox_token_file": "/no/such/token"}, "/no/such/token cannot be read"),
    ],
)
def test_files_that_are_missing(
    cluster: ClusterThread, tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    chosen = cluster.cluster.interpreter_settings(tmp_path) | settings
    result = diagnose(tmp_path, chosen)
    assert result.code == 1
    assert said in result.out


def test_model_servers_are_checked(tmp_path: Path) -> None:
    with run_small_model_server(flavor="vllm") as server:
        model = {"match": "*", "base_url": server.url, "api_key_env": "K"}
        broken = {"match": "other", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "NOT_SET"}
        interpreter = {"sandbox_url": "http://127.0.0.1:1"}
        result = diagnose(tmp_path, interpreter, "--json", models=[model, broken])
    findings = read_findings(result)
    assert result.code == 1
    assert findings["model *: reachable"][0] == "ok"
    assert findings["model *: tool call"][0] == "ok"
    assert findings["model other"][:2] == (
        "missing",
        "The variable NOT_SET is not set, or holds no valid key.",
    )
    assert findings["sandboxes: server"][0] == "missing"
    assert KEY not in result.out


def test_the_settings_decide(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("server: {port: 1}\nmodels: []\n")
    result = run_command("doctor", "--config", str(file), "--mode", "pod")
    assert result.code == 2
    assert "cannot be combined with the settings of a gateway" in result.error_text
    file.write_text("server: {port: nonsense}\n")
    result = run_command("doctor", "--config", str(file))
    assert result.code == 2
    assert "server.port" in result.error_text
