"""What the egress proxy adds to requests, sealed while it is kept; imports msgspec, `interfaces` and `protocol`."""

import msgspec

from fumehood.interfaces import Sealer, Unsealable
from fumehood.protocol.containers import ContainerRecord, ContainerSpec
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.sandbox import DomainSecret, NetworkAllowlist, NetworkPolicy
from fumehood.protocol.sandbox_errors import RequestRefused

_secrets = msgspec.json.Decoder(list[DomainSecret])


class DomainSecrets:
    """Takes secrets out of what is stored of a container, and puts them back for its sandboxes alone.

    Without a sealer there can be none.
    """

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def sealed(self, tenant: str, container_id: str, spec: ContainerSpec) -> tuple[ContainerSpec, str]:
        """The spec without its secrets, and these as they are kept; raises InvalidRequest."""
        network = spec.network
        if not isinstance(network, NetworkAllowlist) or not network.domain_secrets:
            return spec, ""
        if self._sealer is None:
            raise InvalidRequest("network_policy: this server keeps no secrets.", param="network_policy")
        sealed = self._sealer.seal(_owner(tenant, container_id), msgspec.json.encode(network.domain_secrets))
        return without_secrets(spec), sealed

    def network(self, record: ContainerRecord) -> NetworkPolicy:
        """The network of a container with its secrets; raises RequestRefused where these cannot be opened any more."""
        network = record.spec.network
        if not isinstance(network, NetworkAllowlist) or not record.secrets:
            return network
        try:
            if self._sealer is None:
                raise Unsealable("it has no keys")
            content = self._sealer.open(_owner(record.tenant, record.id), record.secrets)
        except Unsealable as error:
            raise RequestRefused(
                f"The domain_secrets of this container cannot be opened any more, since {error}; create another one."
            ) from error
        return msgspec.structs.replace(network, domain_secrets=_secrets.decode(content))


def without_secrets(spec: ContainerSpec) -> ContainerSpec:
    if not isinstance(spec.network, NetworkAllowlist):
        return spec
    return msgspec.structs.replace(spec, network=msgspec.structs.replace(spec.network, domain_secrets=[]))


def _owner(tenant: str, container_id: str) -> str:
    """Nobody but this container, not even another one of the same tenant."""
    return f"{tenant}\0domain_secrets\0{container_id}"
