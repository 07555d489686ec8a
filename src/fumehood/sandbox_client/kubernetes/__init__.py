"""Sandboxes in Kubernetes: pods that are claimed from the warm pools of agent-sandbox."""

from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.cluster_diagnostics import ClusterFinding, diagnose_cluster
from fumehood.sandbox_client.kubernetes.credentials import (
    ClusterCredentials,
    CredentialsError,
    load_credentials,
)
from fumehood.sandbox_client.kubernetes.provider import KubernetesSandboxProvider
from fumehood.sandbox_client.kubernetes.sandbox_claims import ClaimSettings
from fumehood.sandbox_client.kubernetes.warm_pools import WarmPoolError, find_warm_pools

__all__ = [
    "ClaimSettings",
    "ClusterCredentials",
    "ClusterFinding",
    "CredentialsError",
    "KubernetesApi",
    "KubernetesApiError",
    "KubernetesSandboxProvider",
    "WarmPoolError",
    "diagnose_cluster",
    "find_warm_pools",
    "load_credentials",
]
