"""A cache of bounded size that several tenants share."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _TenantEntries[V]:
    """The values of one tenant and their sizes, by key, oldest first."""

    by_key: dict[str, tuple[V, int]] = field(default_factory=dict[str, tuple[V, int]])
    total_bytes: int = 0


class TenantFairCache[V]:
    """Values by tenant and key. When it is full, the tenant that uses most of it loses its oldest value.

    max_bytes: for all tenants. max_tenant_bytes: for one; it loses its own oldest values beyond it.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_bytes if max_tenant_bytes is None else max_tenant_bytes
        self._by_tenant: dict[Hashable, _TenantEntries[V]] = {}
        self._total_bytes = 0

    def get(self, tenant: Hashable, key: str) -> V | None:
        entries = self._by_tenant.get(tenant)
        entry = None if entries is None else entries.by_key.get(key)
        return None if entry is None else entry[0]

    def put(self, tenant: Hashable, key: str, value: V, size: int) -> None:
        """Add a value under a new key. One that is larger than the limit of a tenant is not kept."""
        if size > self.max_tenant_bytes:
            return
        entries = self._by_tenant.setdefault(tenant, _TenantEntries())
        entries.by_key[key] = (value, size)
        entries.total_bytes += size
        self._total_bytes += size
        while entries.total_bytes > self.max_tenant_bytes:
            self.drop(tenant, next(iter(entries.by_key)))
        while self._total_bytes > self.max_bytes:
            largest, entries = max(self._by_tenant.items(), key=lambda each: each[1].total_bytes)
            self.drop(largest, next(iter(entries.by_key)))

    def drop(self, tenant: Hashable, key: str) -> None:
        """Remove a value, if it is there."""
        entries = self._by_tenant.get(tenant)
        if entries is None or key not in entries.by_key:
            return
        _, size = entries.by_key.pop(key)
        entries.total_bytes -= size
        self._total_bytes -= size
        if not entries.by_key:
            del self._by_tenant[tenant]
