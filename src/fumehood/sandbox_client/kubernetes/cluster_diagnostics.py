"""Checks for `fumehood doctor --config`: whether the gateway can claim sandboxes from its cluster."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_objects import GROUP, VERSION, SandboxWarmPool
from fumehood.sandbox_client.kubernetes.warm_pools import WarmPoolError, find_warm_pools, list_warm_pools

type ClusterFindingState = Literal["ok", "warning", "missing"]

CLAIM_VERBS = ("create", "get", "list", "watch", "patch", "delete")
POOL_VERBS = ("list",)
_CONTROLLER = "/apis/apps/v1/namespaces/agent-sandbox-system/deployments/agent-sandbox-controller"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_BROKEN_VERSIONS = ((0, 5, 0), (0, 5, 1))
_OLDEST_VERSION = (1, 0, 0)
_VERSION = re.compile(r":v?(\d+)\.(\d+)\.(\d+)")
_INSTALL = "Install agent-sandbox 1.0 or later, with its extensions; docs/kubernetes.md says how."


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """`missing` keeps the gateway from claiming sandboxes, `warning` may; `advice` says what to do."""

    name: str
    state: ClusterFindingState
    detail: str
    advice: str = ""


class _Version(msgspec.Struct, frozen=True, rename="camel"):
    git_version: str = ""


class _ReviewStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _Review(msgspec.Struct, frozen=True):
    status: _ReviewStatus = _ReviewStatus()


class _Container(msgspec.Struct, frozen=True):
    name: str = ""
    image: str = ""


class _PodSpec(msgspec.Struct, frozen=True):
    containers: list[_Container] = []


class _PodTemplate(msgspec.Struct, frozen=True):
    spec: _PodSpec = _PodSpec()


class _DeploymentSpec(msgspec.Struct, frozen=True):
    template: _PodTemplate = _PodTemplate()


class _Deployment(msgspec.Struct, frozen=True):
    spec: _DeploymentSpec = _DeploymentSpec()


class _TemplateSpec(msgspec.Struct, frozen=True, rename="camel"):
    pod_template: _PodTemplate = _PodTemplate()


class _Template(msgspec.Struct, frozen=True):
    spec: _TemplateSpec = _TemplateSpec()


async def diagnose_cluster(
    api: KubernetesApi,
    namespace: str,
    template: str | None,
    pool: str | None,
    pools: Mapping[MemoryTier, str],
    version: str,
) -> Sequence[ClusterFinding]:
    """Check the API server, the permissions, the controller, the pools and their images; change nothing.

    template, pool, pools: as in the settings. version: of the gateway.
    """
    findings = [await _check_reachable(api)]
    if findings[0].state == "missing":
        return findings
    findings.append(await _check_permissions(api, namespace))
    findings.append(await _check_controller(api))
    try:
        listed = {found.name: found for found in await list_warm_pools(api, namespace)}
        chosen = await find_warm_pools(api, namespace, template, pool, pools)
    except WarmPoolError as error:
        advice = (
            "Correct sandbox_warm_pool, sandbox_template or sandbox_namespace, or apply deploy/kubernetes."
        )
        return [*findings, ClusterFinding("warm pools", "missing", f"{error}.", advice)]
    for tier, name in chosen.items():
        findings.append(_check_pool(tier, listed[name], namespace))
    templates = dict.fromkeys(listed[name].template for name in chosen.values())
    return [*findings, *[await _check_image(api, namespace, used, version) for used in templates]]


async def _check_reachable(api: KubernetesApi) -> ClusterFinding:
    try:
        found = await api.request("GET", "/version", _Version)
    except KubernetesApiError as error:
        advice = "Check the server and the credentials of the kubeconfig, or of the pod's service account."
        if error.status == 401:
            advice = "The token is not valid (any more): check the kubeconfig, or the pod's service account."
        return ClusterFinding("API server", "missing", f"{api.server}: {error.message}", advice)
    return ClusterFinding("API server", "ok", f"{api.server} answers, Kubernetes {found.git_version}.")


async def _check_permissions(api: KubernetesApi, namespace: str) -> ClusterFinding:
    wanted = [(verb, "sandboxclaims") for verb in CLAIM_VERBS]
    wanted += [(verb, "sandboxwarmpools") for verb in POOL_VERBS]
    try:
        denied = [
            f"{verb} {resource}"
            for verb, resource in wanted
            if not await _may(api, namespace, verb, resource)
        ]
    except KubernetesApiError as error:
        return ClusterFinding("permissions", "warning", f"They cannot be checked: {error.message}")
    if denied:
        return ClusterFinding(
            "permissions",
            "missing",
            f"The credentials do not allow in the namespace {namespace}: {', '.join(denied)}.",
            "Apply the Role and the RoleBinding of deploy/kubernetes, for the gateway's service account.",
        )
    return ClusterFinding("permissions", "ok", f"Claims can be made and deleted in {namespace}.")


async def _may(api: KubernetesApi, namespace: str, verb: str, resource: str) -> bool:
    attributes = {"namespace": namespace, "verb": verb, "group": GROUP, "resource": resource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return (await api.request("POST", _REVIEWS, _Review, body=body)).status.allowed


async def _check_controller(api: KubernetesApi) -> ClusterFinding:
    """Tell the version of the controller by the tag of its image."""
    try:
        deployment = await api.request("GET", _CONTROLLER, _Deployment)
    except KubernetesApiError as error:
        why = "these credentials may not read its Deployment" if error.status == 403 else f"{error.message}"
        return ClusterFinding(
            "controller",
            "warning",
            f"The version of agent-sandbox is unknown: {why}.",
            "Run doctor with a kubeconfig that may read agent-sandbox-system, or see to it that 1.0 or later runs.",
        )
    images = [container.image for container in deployment.spec.template.spec.containers]
    found = next((match for image in images if (match := _VERSION.search(image))), None)
    if found is None:
        return ClusterFinding(
            "controller",
            "warning",
            f"The version of agent-sandbox is unknown: its image is {', '.join(images) or 'not named'}.",
            "See to it that 1.0 or later runs.",
        )
    numbers = tuple(map(int, found.groups()))
    text = ".".join(map(str, numbers))
    if numbers in _BROKEN_VERSIONS:
        return ClusterFinding(
            "controller",
            "missing",
            f"agent-sandbox {text} loses the status of claims that get a warm pod: calls would wait in vain.",
            _INSTALL,
        )
    if numbers < _OLDEST_VERSION:
        return ClusterFinding(
            "controller",
            "missing",
            f"agent-sandbox {text} is older than the API {GROUP}/{VERSION}.",
            _INSTALL,
        )
    return ClusterFinding("controller", "ok", f"agent-sandbox {text}.")


def _check_pool(tier: MemoryTier, pool: SandboxWarmPool, namespace: str) -> ClusterFinding:
    name = f"warm pool {tier}"
    ready, wanted = pool.status.ready_replicas, pool.spec.replicas
    detail = f"{pool.name} of the template {pool.template}: {ready} of {wanted} pods are ready."
    if ready >= wanted:
        return ClusterFinding(name, "ok", detail)
    advice = (
        f"kubectl -n {namespace} get pods, and kubectl describe of one that is not ready: often the image cannot be "
        "pulled, the Secret with the token is missing, or the nodes have no room."
    )
    return ClusterFinding(name, "warning" if ready else "missing", detail, advice)


async def _check_image(api: KubernetesApi, namespace: str, template: str, version: str) -> ClusterFinding:
    name = "image"
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxtemplates/{template}"
    try:
        found = await api.request("GET", path, _Template)
    except KubernetesApiError as error:
        if error.status == 404:
            return ClusterFinding(
                name, "missing", f"There is no SandboxTemplate {template}.", "Create it: deploy/kubernetes."
            )
        why = "these credentials may not read it" if error.status == 403 else error.message
        return ClusterFinding(name, "warning", f"The image of the template {template} is unknown: {why}.")
    images = dict.fromkeys(container.image for container in found.spec.pod_template.spec.containers)
    listed = ", ".join(images) or "none"
    others = [image for image in images if not re.search(rf":v?{re.escape(version)}(@|$)", image)]
    if others or not images:
        return ClusterFinding(
            name,
            "warning",
            f"The template {template} runs {listed}, this gateway is {version}.",
            "Gateway and sandboxes are tested in one version: use the sandbox image with the gateway's tag.",
        )
    return ClusterFinding(name, "ok", f"The template {template} runs {listed}.")
