"""Who sends a request."""

from dataclasses import dataclass

from fumehood.protocol.api_keys import DEFAULT_KEY_LIMITS, TENANT_SCOPES, ApiKeyLimits, ApiKeyScope


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is; nothing of another tenant exists for it.

    key: the id of the key that it came with, empty where none is needed.
    scopes: what its key is for.
    """

    tenant: str = ""
    key_id: str = ""
    limits: ApiKeyLimits = DEFAULT_KEY_LIMITS
    scopes: frozenset[ApiKeyScope] = TENANT_SCOPES
