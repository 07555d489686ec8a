"""Network policies of containers: allowed domains, and secrets sealed at rest."""

from collections.abc import Collection

import msgspec

from fumehood.interfaces import InvalidSeal, Sealer
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerSpec
from fumehood.protocol.sandbox.sandbox_errors import InvalidSandboxRequest
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, NetworkAllowlist, NetworkPolicy

_ANY_DOMAIN = "*"
_secrets_decoder = msgspec.json.Decoder(list[DomainSecret])


class DomainSecretSealer:
    """Encrypts the domain secrets of stored containers, and decrypts them for their sandboxes.

    sealer: None rejects containers with secrets.
    """

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def seal_spec(self, tenant: str, container_id: str, spec: ContainerSpec) -> tuple[ContainerSpec, str]:
        """Return the spec without its secrets, and the secrets sealed. Raises InvalidRequest."""
        network = spec.network
        if not isinstance(network, NetworkAllowlist) or not network.domain_secrets:
            return spec, ""
        if self._sealer is None:
            raise InvalidRequest("network_policy: this server cannot store secrets.", param="network_policy")
        sealed = self._sealer.seal(
            _sealing_context(tenant, container_id), msgspec.json.encode(network.domain_secrets)
        )
        return strip_secrets(spec), sealed

    def open_network(self, record: ContainerRecord) -> NetworkPolicy:
        """Return the container's network with its secrets. Raises InvalidSandboxRequest if they cannot be unsealed."""
        network = record.spec.network
        if not isinstance(network, NetworkAllowlist) or not record.secrets:
            return network
        try:
            if self._sealer is None:
                raise InvalidSeal("there is no key")
            content = self._sealer.unseal(_sealing_context(record.tenant, record.id), record.secrets)
        except InvalidSeal as error:
            raise InvalidSandboxRequest(
                f"The domain_secrets of this container cannot be decrypted: {error}; create another one."
            ) from error
        return msgspec.structs.replace(network, domain_secrets=_secrets_decoder.decode(content))


def strip_secrets(spec: ContainerSpec) -> ContainerSpec:
    if not isinstance(spec.network, NetworkAllowlist):
        return spec
    return msgspec.structs.replace(spec, network=msgspec.structs.replace(spec.network, domain_secrets=[]))


def _sealing_context(tenant: str, container_id: str) -> str:
    """Bind the secrets to one container of one tenant."""
    return f"{tenant}\0domain_secrets\0{container_id}"


def find_forbidden_domain(network: NetworkPolicy, allowed_domains: Collection[str]) -> str | None:
    """Return a domain of the network that is not allowed, or None."""
    if not isinstance(network, NetworkAllowlist) or _ANY_DOMAIN in allowed_domains:
        return None
    domains = {normalize_domain(domain) for domain in network.allowed_domains}
    return min(domains - {normalize_domain(domain) for domain in allowed_domains}, default=None)


def normalize_domain(domain: str) -> str:
    return domain.lower().removesuffix(".")
