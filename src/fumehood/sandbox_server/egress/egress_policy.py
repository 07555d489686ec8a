"""`EgressPolicy`: the domains, ports and secrets of one sandbox.

`build_policy` checks a request against the operator's settings and builds it.
"""

import re
from dataclasses import dataclass, field

from fumehood.protocol.sandbox.sandbox_errors import InvalidSandboxRequest
from fumehood.protocol.sandbox.sandbox_messages import (
    DomainSecret,
    NetworkAllowlist,
    NetworkDisabled,
    NetworkPolicy,
)
from fumehood.sandbox_server.egress.domain_parsing import InvalidDomainName, RequestTarget, parse_domain_name
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.settings import SandboxServerSettings

_PROXY = f"http://127.0.0.1:{layout.EGRESS_PORT}"
_NOT_PROXIED = "localhost,127.0.0.1,::1"
PROXY_ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _PROXY),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _NOT_PROXIED),
}
CA_ENVIRONMENT = dict.fromkeys(
    (
        *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "PIP_CERT"),
        "GIT_SSL_CAINFO",
    ),
    layout.CA_BUNDLE,
)
# Variables that the sandbox itself uses.
_RESERVED_NAMES = {
    name.upper() for name in (*PROXY_ENVIRONMENT, *CA_ENVIRONMENT, *layout.ENVIRON, "ALL_PROXY")
}
_RESERVED_PREFIXES = ("LD_", "PYTHON")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What one sandbox may reach, and the secrets that it may use there.

    domains: normalised. secrets: by domain, then by name; not part of the repr.
    """

    domains: frozenset[str]
    ports: frozenset[int]
    secrets: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]], repr=False)

    def refusal_reason(self, target: RequestTarget) -> str | None:
        """Return why the sandbox may not connect there, or None if it may."""
        if target.name not in self.domains:
            return f"the domain {target.name} is not on this sandbox's allow-list"
        if target.port not in self.ports:
            return f"port {target.port} of {target.name} is not open to sandboxes"
        return None

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the sandbox; a secret's variable holds its placeholder."""
        names = {name for of_domain in self.secrets.values() for name in of_domain}
        return {**PROXY_ENVIRONMENT, **{name: f"${name}" for name in sorted(names)}}


def build_policy(network: NetworkPolicy, settings: SandboxServerSettings) -> EgressPolicy | None:
    """Return the policy of a sandbox, or None for no network.

    Raises InvalidSandboxRequest if it asks for more than the operator allows.
    """
    if isinstance(network, NetworkDisabled):
        return None
    if settings.mode == "unsafe-degraded":
        raise _refusal_error(
            "Mode unsafe-degraded has no egress proxy, so a sandbox there gets no allow-list. Ask for a disabled "
            "network, or run sandboxes in mode namespaces."
        )
    if settings.mode == "pod" and settings.egress_socket is None:
        raise _refusal_error(
            "This pod has no container for an egress proxy (egress_socket), so its sandbox gets no allow-list. Ask for "
            "a disabled network, or add the container `egress` to the pod's template."
        )
    if settings.egress == "off":
        raise _refusal_error(
            "This server gives sandboxes no network. Its operator may allow it by setting egress to allowlist."
        )
    permitted = None
    if settings.egress_domains is not None:
        permitted = {parse_domain_name(domain) for domain in settings.egress_domains}
    domains = frozenset(_check_domain(domain, permitted) for domain in network.allowed_domains)
    return EgressPolicy(domains, frozenset(settings.egress_ports), _collect_secrets(network, domains))


def _check_domain(text: str, permitted: set[str] | None) -> str:
    try:
        domain = parse_domain_name(text)
    except InvalidDomainName as error:
        hint = " Name each subdomain: there are no wildcards." if "*" in text else ""
        raise _refusal_error(f"{_quote(text)} cannot be on an allow-list: {error}.{hint}") from None
    if permitted is not None and domain not in permitted:
        raise _refusal_error(f"The domain {domain} is not among those that this server's operator allows.")
    return domain


def _collect_secrets(network: NetworkAllowlist, domains: frozenset[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for secret in network.domain_secrets:
        domain = _check_secret_domain(secret, domains)
        name = secret.name
        if name.upper() in _RESERVED_NAMES or name.upper().startswith(_RESERVED_PREFIXES):
            raise _refusal_error(f"A secret cannot be named {name}: the sandbox itself uses that variable.")
        if not _HEADER_VALUE.fullmatch(secret.value):
            raise _refusal_error(
                f"The value of secret {name} cannot be part of a header: it must be printable ASCII without "
                "surrounding white space."
            )
        if name in found.setdefault(domain, {}):
            raise _refusal_error(f"The secret {name} is given twice for {domain}.")
        found[domain][name] = secret.value
    return found


def _check_secret_domain(secret: DomainSecret, domains: frozenset[str]) -> str:
    try:
        domain = parse_domain_name(secret.domain)
    except InvalidDomainName:
        domain = ""
    if domain not in domains:
        raise _refusal_error(
            f"The secret {secret.name} is for {_quote(secret.domain)}, which is not among the allowed domains."
        )
    return domain


def _quote(text: str) -> str:
    return ascii(text[:100])


def _refusal_error(message: str) -> InvalidSandboxRequest:
    return InvalidSandboxRequest(message, param="network")
