"""The objects of agent-sandbox that the gateway reads and writes, with the fields that it uses."""

import time
from datetime import UTC, datetime
from typing import Literal

import msgspec

GROUP = "extensions.agents.x-k8s.io"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "fumehood"
GATEWAY_LABEL = "fumehood/gateway"  # whose containers: the id of the gateway's database
REPLICA_LABEL = "fumehood/replica"  # which process made the claim
MEMORY_LABEL = "fumehood/memory"
SANDBOX_ANNOTATION = "fumehood/sandbox"  # the name of the sandbox, which is no valid label

# The claim can never become ready: what it refers to is missing or invalid.
_CONFIGURATION_REASONS = frozenset(
    {
        "EnvVarsInjectionRejected",
        "InvalidConfiguration",
        "InvalidMetadata",
        "TemplateNotFound",
        "VolumeClaimTemplatesError",
        "WarmPoolNotFound",
    }
)
# The pod has ended, or its time is over; another claim may do better.
_ENDED_REASONS = frozenset({"ClaimExpired", "PodFailed", "PodSucceeded", "SandboxExpired"})

type ClaimFailure = Literal["configuration", "ended"]


class KubernetesObject(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of an object; unknown fields are ignored, and defaults are not sent."""


class ObjectMetadata(KubernetesObject, frozen=True, kw_only=True, omit_defaults=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def created_at(self) -> float:
        return 0.0 if self.creation_timestamp is None else parse_time(self.creation_timestamp)


class ListMetadata(KubernetesObject, frozen=True, kw_only=True):
    resource_version: str = ""
    # Of a list that has more pages.
    continue_token: str = msgspec.field(default="", name="continue")


class ClaimLifecycle(KubernetesObject, frozen=True, kw_only=True):
    shutdown_time: str | None = None
    shutdown_policy: str = "Retain"


class WarmPoolReference(KubernetesObject, frozen=True, kw_only=True):
    name: str = ""


class ClaimSpec(KubernetesObject, frozen=True, kw_only=True):
    warm_pool_ref: WarmPoolReference = WarmPoolReference()
    lifecycle: ClaimLifecycle = ClaimLifecycle()


class StatusCondition(KubernetesObject, frozen=True, kw_only=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class ClaimedSandbox(KubernetesObject, frozen=True, kw_only=True):
    name: str = ""
    # Documented as `podIPs`: the rule for names would make `podIps` of it.
    pod_ips: list[str] = msgspec.field(default_factory=list[str], name="podIPs")


class ClaimStatus(KubernetesObject, frozen=True, kw_only=True):
    conditions: list[StatusCondition] = []
    sandbox: ClaimedSandbox = ClaimedSandbox()


class SandboxClaim(KubernetesObject, frozen=True, kw_only=True):
    """A SandboxClaim: it gets a pod, and the pod ends with it."""

    api_version: str = API_VERSION
    kind: str = "SandboxClaim"
    metadata: ObjectMetadata = ObjectMetadata()
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def sandbox_name(self) -> str:
        return self.metadata.annotations.get(SANDBOX_ANNOTATION, "")

    @property
    def is_deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def ready_condition(self) -> StatusCondition | None:
        return next((found for found in self.status.conditions if found.type == "Ready"), None)

    @property
    def pod_ip(self) -> str | None:
        """The address of its pod, once that is ready."""
        ready = self.ready_condition
        if self.is_deleting or ready is None or ready.status != "True" or not self.status.sandbox.pod_ips:
            return None
        return self.status.sandbox.pod_ips[0]

    @property
    def is_warm(self) -> bool:
        """Whether its pod comes from the pool: one that was started for the claim has the claim's name."""
        return self.status.sandbox.name != self.name

    @property
    def failure(self) -> ClaimFailure | None:
        """Why it will never be ready, or never again; None if it may be."""
        ready = self.ready_condition
        if ready is None or ready.status == "True":
            return None
        if ready.reason in _CONFIGURATION_REASONS:
            return "configuration"
        return "ended" if ready.reason in _ENDED_REASONS else None

    @property
    def shutdown_at(self) -> float | None:
        """When the controller deletes it."""
        at = self.spec.lifecycle.shutdown_time
        return None if at is None else parse_time(at)

    def describe_state(self) -> str:
        """Say why it is not ready, for operators."""
        ready = self.ready_condition
        if ready is None:
            return "the controller has not looked at it yet: is agent-sandbox running, with --extensions?"
        return f"{ready.reason}: {ready.message}" if ready.message else ready.reason


class ClaimList(KubernetesObject, frozen=True, kw_only=True):
    metadata: ListMetadata = ListMetadata()
    items: list[SandboxClaim] = []


class ClaimEvent(KubernetesObject, frozen=True, kw_only=True):
    """One line of a watch. Of a BOOKMARK `object` has metadata only; of an ERROR it is a Status."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class ApiStatus(KubernetesObject, frozen=True, kw_only=True):
    """What the API server answers in place of an object."""

    code: int = 0
    reason: str = ""
    message: str = ""


class WarmPoolSpec(KubernetesObject, frozen=True, kw_only=True):
    replicas: int = 1
    sandbox_template_ref: WarmPoolReference = WarmPoolReference()


class WarmPoolStatus(KubernetesObject, frozen=True, kw_only=True):
    replicas: int = 0
    ready_replicas: int = 0


class SandboxWarmPool(KubernetesObject, frozen=True, kw_only=True):
    """A SandboxWarmPool: pods of one template that are started ahead."""

    metadata: ObjectMetadata = ObjectMetadata()
    spec: WarmPoolSpec = WarmPoolSpec()
    status: WarmPoolStatus = WarmPoolStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def template(self) -> str:
        return self.spec.sandbox_template_ref.name


class WarmPoolList(KubernetesObject, frozen=True, kw_only=True):
    metadata: ListMetadata = ListMetadata()
    items: list[SandboxWarmPool] = []


def parse_time(text: str) -> float:
    """Return seconds since 1970 of a time as Kubernetes writes it; 0 for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def format_time(seconds: float | None = None) -> str:
    """Write a time, by default now, as Kubernetes does: in UTC, without fractions."""
    at = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
