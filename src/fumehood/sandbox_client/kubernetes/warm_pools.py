"""Finds the warm pools that the settings name."""

from collections.abc import Iterable, Mapping

from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_objects import GROUP, VERSION, SandboxWarmPool, WarmPoolList

DEFAULT_TIER: MemoryTier = "1g"


class WarmPoolError(Exception):
    """There is no pool to take sandboxes from. The message says why and what to do."""


def warm_pools_path(namespace: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxwarmpools"


async def list_warm_pools(api: KubernetesApi, namespace: str) -> list[SandboxWarmPool]:
    """Return all pools of a namespace. Raises WarmPoolError."""
    try:
        return (await api.request("GET", warm_pools_path(namespace), WarmPoolList)).items
    except KubernetesApiError as error:
        raise WarmPoolError(_explain(error, api, namespace)) from error


def _explain(error: KubernetesApiError, api: KubernetesApi, namespace: str) -> str:
    match error.status:
        case 401:
            return f"{api.server} does not accept the credentials: {error.message}"
        case 403:
            return (
                f"the credentials do not allow to list sandboxwarmpools in the namespace {namespace}: apply the Role "
                f"of deploy/kubernetes ({error.message})"
            )
        case 404:
            return (
                f"{api.server} knows no SandboxWarmPool of {GROUP}/{VERSION}: install agent-sandbox 1.0 with its "
                "extensions"
            )
        case _:
            return f"the warm pools cannot be listed: {error.message}"


async def find_warm_pools(
    api: KubernetesApi,
    namespace: str,
    template: str | None,
    pool: str | None,
    pools: Mapping[MemoryTier, str],
) -> dict[MemoryTier, str]:
    """Return the pool of each memory tier. Raises WarmPoolError.

    template: its only pool has the smallest tier. pool: has the smallest tier; with a template, a pool of that.
    pools: those of other tiers.
    """
    known = {found.name: found for found in await list_warm_pools(api, namespace)}
    chosen: dict[MemoryTier, str] = {}
    if pool is not None:
        chosen[DEFAULT_TIER] = pool
    elif template is not None:
        chosen[DEFAULT_TIER] = _resolve_template(template, [*known.values()], namespace)
    chosen |= pools
    for name in chosen.values():
        if name not in known:
            raise WarmPoolError(
                f"there is no SandboxWarmPool {name} in the namespace {namespace}, only {_join(known)}"
            )
    if pool is not None and template is not None and known[pool].template != template:
        raise WarmPoolError(
            f"the SandboxWarmPool {pool} is one of the template {known[pool].template}, not of {template}: set only "
            "one of sandbox_template and sandbox_warm_pool"
        )
    return chosen


def _resolve_template(template: str, pools: list[SandboxWarmPool], namespace: str) -> str:
    found = sorted(pool.name for pool in pools if pool.template == template)
    if not found:
        others = ", ".join(sorted(f"{pool.name} (of {pool.template})" for pool in pools)) or "none"
        raise WarmPoolError(
            f"no SandboxWarmPool in the namespace {namespace} refers to the template {template}; pools there: {others}"
        )
    if len(found) > 1:
        raise WarmPoolError(
            f"several SandboxWarmPools refer to the template {template}: {_join(found)}; name one of them in "
            "sandbox_warm_pool"
        )
    return found[0]


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
