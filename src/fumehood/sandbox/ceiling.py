"""How far an operator lets containers reach; imports `protocol`."""

from collections.abc import Collection

from fumehood.protocol.sandbox import NetworkAllowlist, NetworkPolicy

_ANY_DOMAIN = "*"


def beyond(network: NetworkPolicy, ceiling: Collection[str]) -> str | None:
    """A domain of the network that the ceiling does not have; None if there is none."""
    if not isinstance(network, NetworkAllowlist) or _ANY_DOMAIN in ceiling:
        return None
    domains = {spelt(domain) for domain in network.allowed_domains}
    return min(domains - {spelt(domain) for domain in ceiling}, default=None)


def spelt(domain: str) -> str:
    return domain.lower().removesuffix(".")
