"""The single use of a pod: its memory tier, and the mark that it has had its sandbox."""

import logging
from pathlib import Path

from fumehood.protocol.sandbox.sandbox_errors import InvalidSandboxRequest, SandboxServerAtCapacity
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    MemoryTier,
    NetworkDisabled,
    SandboxSpec,
)
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings

logger = logging.getLogger(__name__)

_MARK = "used"
_LARGEST_FIRST: tuple[MemoryTier, ...] = ("64g", "16g", "4g", "1g")


class PodUse:
    """Admits one sandbox of one memory tier, once.

    Volumes outlive the containers of a pod, and so would the files of the first sandbox: a server that was restarted in
    a pod finds the mark in `state_dir` and refuses to start.
    """

    def __init__(self, settings: SandboxServerSettings) -> None:
        self._settings = settings
        self._mark: Path | None = None if settings.state_dir is None else settings.state_dir / _MARK
        self.is_used = False
        self.memory: MemoryTier = "1g"

    def open(self) -> None:
        """Raises IsolationUnavailable if the pod has had its sandbox, OSError."""
        if self._mark is not None and self._mark.exists():
            raise IsolationUnavailable(
                "This pod has had its sandbox, and its server was restarted.",
                "Delete the pod; its template needs restartPolicy Never and no liveness probe.",
            )

    def choose_memory(self, container_limit: int | None) -> None:
        """Set the tier of this pod. Raises IsolationUnavailable.

        container_limit: bytes that the container of the code may use, if they are limited and known.
        """
        chosen = self._settings.pod_memory
        if chosen is not None:
            if container_limit is not None and container_limit < MEMORY_TIERS[chosen]:
                raise IsolationUnavailable(
                    f"pod_memory is {chosen}, but the container of the code may use only {container_limit} bytes.",
                    "Set its resources.limits.memory to the tier, or pod_memory to a smaller one.",
                )
            self.memory = chosen
            return
        for tier in _LARGEST_FIRST:
            if MEMORY_TIERS[tier] <= (container_limit or 0):
                self.memory = tier
                return
        if self._settings.limits == "enforced":
            found = "unknown" if container_limit is None else f"{container_limit} bytes"
            raise IsolationUnavailable(
                f"The memory tier of this pod is not known: the limit of the code's container is {found}.",
                "Set its resources.limits.memory to a tier (1Gi, 4Gi, 16Gi, 64Gi), or pod_memory where the limit "
                "cannot be read, as in gVisor.",
            )
        logger.warning("Limits are best-effort: nothing limits the memory of the code.")

    def check_spec(self, spec: SandboxSpec, *, has_network: bool) -> None:
        """Raises InvalidSandboxRequest for what this pod cannot give.

        has_network: the code gets a network namespace of its own, in which the egress proxy can listen.
        """
        if spec.memory != self.memory:
            raise InvalidSandboxRequest(
                f"This pod has {self.memory} of memory and can run no sandbox of {spec.memory}; use a pod made "
                f"for {spec.memory}.",
                param="memory",
            )
        if not (has_network or isinstance(spec.network, NetworkDisabled)):
            raise InvalidSandboxRequest(
                "This pod cannot confine code to an allow-list: its container runtime lets the code have no network "
                "namespace of its own. Ask for a disabled network, or use a runtime class that lets it (gVisor).",
                param="network",
            )

    def reserve(self) -> None:
        """Use the pod up. Raises SandboxServerAtCapacity, OSError."""
        if self.is_used:
            raise SandboxServerAtCapacity("A pod runs one sandbox, once; start another pod for the next one.")
        if self._mark is not None:
            self._mark.touch()
        self.is_used = True
