"""Who sends a request."""

from dataclasses import dataclass

from fumehood.protocol.api_keys import DEFAULT_KEY_LIMITS, TENANT_SCOPES, ApiKeyLimits, ApiKeyScope


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request. Objects of other tenants are treated as absent.

    tenant: whose objects it may use.
    key_id: of its API key; empty without authentication.
    limits, scopes: of its API key.
    """

    tenant: str = ""
    key_id: str = ""
    limits: ApiKeyLimits = DEFAULT_KEY_LIMITS
    scopes: frozenset[ApiKeyScope] = TENANT_SCOPES
