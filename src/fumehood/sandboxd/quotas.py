"""What each tenant has of the sandboxes, and how much it may have; imports `fumehood.protocol` and siblings."""

from dataclasses import dataclass

from fumehood.protocol.sandbox import MEMORY_TIERS, SandboxSpec
from fumehood.protocol.sandbox_errors import QuotaExceeded
from fumehood.sandboxd.settings import Settings


@dataclass(slots=True)
class _Share:
    sandboxes: int = 0
    memory: int = 0


class Quotas:
    """Taken before a sandbox is made and given back when it has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._shares: dict[str, _Share] = {}

    def take(self, spec: SandboxSpec) -> None:
        """Raises QuotaExceeded, and then nothing is taken."""
        share = self._shares.get(spec.tenant) or _Share()
        memory = share.memory + MEMORY_TIERS[spec.memory]
        most, most_memory = self._settings.tenant_sandboxes, self._settings.tenant_memory
        whose = f"Tenant {spec.tenant!r}" if spec.tenant else "The caller"
        if most is not None and share.sandboxes >= most:
            raise QuotaExceeded(
                f"{whose} has {share.sandboxes} sandboxes, as many as a tenant may have; delete one or wait.",
                param="tenant",
            )
        if most_memory is not None and memory > most_memory:
            raise QuotaExceeded(
                f"{whose} has sandboxes of {share.memory} bytes of memory, and {spec.memory} more would exceed "
                f"the {most_memory} that a tenant may have; delete one, wait, or ask for less.",
                param="memory",
            )
        share.sandboxes += 1
        share.memory = memory
        self._shares[spec.tenant] = share

    def give_back(self, spec: SandboxSpec) -> None:
        share = self._shares[spec.tenant]
        share.sandboxes -= 1
        share.memory -= MEMORY_TIERS[spec.memory]
        if not share.sandboxes:
            del self._shares[spec.tenant]
