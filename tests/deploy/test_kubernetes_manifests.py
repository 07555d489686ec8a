"""The manifests of deploy/kubernetes: schemas, and what docs/kubernetes.md and docs/security.md promise."""

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

import fumehood
from fumehood.gateway_config import load_config
from fumehood.sandbox_server.settings_loader import load_sandbox_config
from tools import build_kubernetes_schemas, render_kubernetes

SCHEMAS = Path(__file__).parent / "kubernetes_schemas.json"
NAMES = sorted(render_kubernetes.find_kustomizations())

type Resource = dict[str, Any]


@cache
def _rendered(name: str) -> list[Resource]:
    text = (render_kubernetes.RENDERED / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


@cache
def _schemas() -> Resource:
    return json.loads(SCHEMAS.read_text(encoding="utf-8"))


@cache
def _validator(kind: str) -> jsonschema_rs.Draft202012Validator:
    schemas = _schemas()
    return jsonschema_rs.Draft202012Validator(
        {**schemas["resources"][kind], "definitions": schemas["definitions"]}
    )


def _kind(resource: Resource) -> str:
    return f"{resource['apiVersion']}/{resource['kind']}"


def _problems(resource: Resource) -> list[str]:
    errors = _validator(_kind(resource)).iter_errors(resource)
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in errors]


def _find(name: str, kind: str) -> list[Resource]:
    return [resource for resource in _rendered(name) if resource["kind"] == kind]


def _pods(name: str) -> Iterator[tuple[str, Resource]]:
    for resource in _rendered(name):
        title = f"{resource['kind']} {resource['metadata']['name']}"
        if resource["kind"] == "Deployment":
            yield title, resource["spec"]["template"]["spec"]
        elif resource["kind"] == "SandboxTemplate":
            yield title, resource["spec"]["podTemplate"]["spec"]


def _containers(pod: Resource) -> dict[str, Resource]:
    return {
        container["name"]: container for container in (*pod.get("initContainers", ()), *pod["containers"])
    }


# --- What was rendered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rendered_manifests_are_of_these_sources(name: str) -> None:
    text = (render_kubernetes.RENDERED / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(rf"^{render_kubernetes.DIGEST_PREFIX}(\w+)$", text, re.MULTILINE)
    assert found is not None
    assert found[1] == render_kubernetes.compute_digest(), "run `python -m tools.render_kubernetes`"


def test_nothing_else_is_rendered() -> None:
    assert sorted(path.stem for path in render_kubernetes.RENDERED.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_kustomize_renders_the_same(name: str) -> None:
    command = render_kubernetes.find_kustomize()
    if command is None:
        pytest.skip("there is no kubectl and no kustomize")
    text = render_kubernetes.render(command, render_kubernetes.find_kustomizations()[name])
    assert list(yaml.safe_load_all(text)) == _rendered(name)


# --- Schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_resources_fit_the_schemas(name: str) -> None:
    found = {resource["metadata"]["name"]: _problems(resource) for resource in _rendered(name)}
    assert {title: problems for title, problems in found.items() if problems} == {}


def test_schemas_are_of_the_versions_that_the_test_cluster_runs() -> None:
    comment = _schemas()["$comment"]
    assert build_kubernetes_schemas.KUBERNETES in comment
    assert build_kubernetes_schemas.AGENT_SANDBOX in comment


def test_schemas_find_mistakes() -> None:
    template = copy.deepcopy(_find("base", "SandboxTemplate")[0])
    spec = template["spec"]
    spec["podTemplate"]["spec"]["containers"][0]["readinessProbes"] = {}
    spec["podTemplate"]["spec"]["volumes"][0]["secret"]["defaultMode"] = "0440"
    spec["networkPolicyManagement"] = "None"
    spec["networkPolicy"]["ingress"][0]["port"] = 8080
    assert len(_problems(template)) == 4
    pool = copy.deepcopy(_find("base", "SandboxWarmPool")[0])
    del pool["spec"]["sandboxTemplateRef"]
    assert _problems(pool)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_resources_refer_to_exist(name: str) -> None:
    known = {(resource["kind"], resource["metadata"]["name"]) for resource in _rendered(name)}
    for pool in _find(name, "SandboxWarmPool"):
        assert ("SandboxTemplate", pool["spec"]["sandboxTemplateRef"]["name"]) in known
    for _, pod in _pods(name):
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in known
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in known
            if "secret" in volume:
                assert volume["secret"]["secretName"] == "fumehood-sandbox-token"
        mounted = {
            mount["name"] for container in _containers(pod).values() for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {resource["metadata"].get("namespace") for resource in _rendered(name)} == {None, "fumehood"}


@pytest.mark.parametrize("name", NAMES)
def test_images_have_the_version_of_the_package(name: str) -> None:
    images = {container["image"] for _, pod in _pods(name) for container in _containers(pod).values()}
    assert images == {f"localhost/fumehood-{part}:{fumehood.__version__}" for part in ("gateway", "sandbox")}


# --- Security ---------------------------------------------------------------------------------------------------------


def _violations_of_restricted(pod: Resource) -> Iterator[str]:
    """What Kubernetes' Pod Security Standard `restricted` forbids."""
    context = pod["securityContext"]
    if context["seccompProfile"]["type"] != "RuntimeDefault" or context["runAsNonRoot"] is not True:
        yield "securityContext"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod["volumes"]:
        kind = next(key for key in volume if key != "name")
        if kind not in ("configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"):
            yield f"volume {volume['name']}"
    for name, container in _containers(pod).items():
        own = container["securityContext"]
        if own["allowPrivilegeEscalation"] is not False or own["capabilities"] != {"drop": ["ALL"]}:
            yield f"container {name}"
        if own.get("runAsUser", context.get("runAsUser")) in (None, 0) or own.get("privileged"):
            yield f"user of container {name}"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"port of container {name}"


@pytest.mark.parametrize("name", NAMES)
def test_pods_satisfy_the_standard_that_the_namespace_enforces(name: str) -> None:
    (namespace,) = _find(name, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for title, pod in _pods(name):
        assert list(_violations_of_restricted(pod)) == [], title
        for container in _containers(pod).values():
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", NAMES)
def test_code_gets_neither_token_nor_account_nor_environment(name: str) -> None:
    for template in _find(name, "SandboxTemplate"):
        pod = template["spec"]["podTemplate"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["shareProcessNamespace"] is False
        assert pod["restartPolicy"] == "Never"
        assert "serviceAccountName" not in pod
        containers = _containers(pod)
        holders = [
            title
            for title, container in containers.items()
            if any(mount["name"] == "token" for mount in container["volumeMounts"])
        ]
        assert holders == ["server"]
        code = containers["code"]
        assert "env" not in code
        assert "envFrom" not in code
        writable = {mount["mountPath"] for mount in code["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/mnt/data", "/tmp", "/home/user", "/dev/shm", "/run/fumehood/code"}
        users = [container["securityContext"]["runAsUser"] for container in containers.values()]
        assert len(set(users)) == len(users)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_gateway_reaches_sandbox_pods(name: str) -> None:
    (gateway,) = _find(name, "Deployment")
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    for template in _find(name, "SandboxTemplate"):
        spec = template["spec"]
        assert spec["networkPolicyManagement"] == "Managed"
        assert spec["networkPolicy"]["ingress"] == [
            {"from": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": 8080, "protocol": "TCP"}]}
        ]
        assert spec["podTemplate"]["metadata"]["labels"] != labels


def test_pods_have_no_way_out_without_the_component_packages() -> None:
    assert _find("base", "SandboxTemplate")[0]["spec"]["networkPolicy"]["egress"] == []
    for template in _find("packages", "SandboxTemplate"):
        addresses = [
            peer["ipBlock"]
            for rule in template["spec"]["networkPolicy"]["egress"]
            for peer in rule["to"]
            if "ipBlock" in peer
        ]
        assert all("169.254.0.0/16" in block["except"] for block in addresses if "." in block["cidr"])


def test_gateway_may_claim_sandboxes_and_nothing_else() -> None:
    (role,) = _find("base", "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["extensions.agents.x-k8s.io"],
            "resources": ["sandboxclaims"],
            "verbs": ["create", "get", "list", "watch", "patch", "delete"],
        },
        {
            "apiGroups": ["extensions.agents.x-k8s.io"],
            "resources": ["sandboxwarmpools"],
            "verbs": ["list"],
        },
    ]


# --- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_gateway_are_valid(name: str, tmp_path: Path) -> None:
    (config,) = _find(name, "ConfigMap")
    (gateway,) = _find(name, "Deployment")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    file = tmp_path / "fumehood.yaml"
    file.write_text(config["data"]["fumehood.yaml"], encoding="utf-8")
    environ = {entry["name"]: entry["value"] for entry in container["env"] if "__" in entry["name"]}
    settings = load_config(file, environ).providers.code_interpreter.settings
    pools = {pool["metadata"]["name"] for pool in _find(name, "SandboxWarmPool")}
    assert {settings.sandbox_warm_pool, *settings.sandbox_warm_pools.values()} == pools
    token = next(
        mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "sandbox-token"
    )
    assert settings.sandbox_token_file == f"{token}/token"


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_sandbox_servers_are_valid(name: str) -> None:
    for template in _find(name, "SandboxTemplate"):
        containers = _containers(template["spec"]["podTemplate"]["spec"])
        environ = {entry["name"]: entry["value"] for entry in containers["server"]["env"]}
        settings = load_sandbox_config(None, environ).settings
        assert settings.state_dir is not None
        assert (settings.egress_socket is not None) == ("egress" in containers)
        assert ("egress" in containers) == (name in ("packages", "complete"))


@pytest.mark.parametrize("name", NAMES)
def test_containers_run_modules_that_exist(name: str) -> None:
    for template in _find(name, "SandboxTemplate"):
        for container in template["spec"]["podTemplate"]["spec"]["containers"]:
            if container["command"] == ["python"]:
                assert container["args"][0] == "-m"
                assert find_spec(container["args"][1]) is not None


# --- Memory tiers -----------------------------------------------------------------------------------------------------

_MEBIBYTES = {"Mi": 1, "Gi": 1024}


def _to_mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * _MEBIBYTES[quantity[-2:]]


def test_shares_of_memory_follow_the_tier() -> None:
    for template in _find("complete", "SandboxTemplate"):
        pod = template["spec"]["podTemplate"]["spec"]
        containers = _containers(pod)
        variables = {entry["name"]: entry["value"] for entry in containers["server"]["env"]}
        tier = _to_mebibytes(variables["FUMEHOOD_SANDBOX_POD_MEMORY"].replace("g", "Gi"))
        assert _to_mebibytes(containers["code"]["resources"]["limits"]["memory"]) == tier
        sizes = {
            volume["name"]: _to_mebibytes(volume["emptyDir"]["sizeLimit"])
            for volume in pod["volumes"]
            if volume["name"] in ("data", "tmp", "home", "shm")
        }
        assert sizes == {"data": tier // 2, "tmp": tier // 4, "home": tier // 8, "shm": tier // 8}
