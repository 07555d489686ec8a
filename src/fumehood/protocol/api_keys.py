"""API keys: records, scopes and limits; secrets are stored only as hashes."""

import hashlib
import secrets
import string
from typing import Literal, get_args

import msgspec

type ApiKeyScope = Literal["responses", "containers", "files", "models", "metrics"]
"""What a key allows: `responses` creates and reads responses, and so runs code; `metrics` reads the metrics of all
tenants; the others allow the routes of that name.
"""

ALL_SCOPES: tuple[ApiKeyScope, ...] = get_args(ApiKeyScope.__value__)
TENANT_SCOPES: frozenset[ApiKeyScope] = frozenset(ALL_SCOPES) - {"metrics"}
"""The default scopes: everything of the key's own tenant."""

SECRET_PREFIX = "fh-"  # noqa: S105 - not a secret
_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 43  # characters; more than 256 bits
_HINT_LENGTH = 4


class ApiKeyLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a key; None is the server's setting.

    containers: running containers of its tenant.
    """

    requests_per_minute: int | None = None
    concurrent: int | None = None
    body_bytes: int | None = None
    containers: int | None = None


DEFAULT_KEY_LIMITS = ApiKeyLimits()


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key as stored.

    digest: hash of the secret, which is not stored.
    hint: the end of the secret, by which its owner recognises it.
    """

    id: str
    tenant: str
    digest: bytes
    hint: str
    created_at: float
    name: str = ""
    revoked_at: float | None = None
    limits: ApiKeyLimits = DEFAULT_KEY_LIMITS
    scopes: frozenset[ApiKeyScope] = TENANT_SCOPES


def new_key_id() -> str:
    """Return a new id, short enough to type; it is no secret."""
    return f"key_{secrets.token_hex(8)}"


def new_secret() -> str:
    return SECRET_PREFIX + "".join([secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH)])


def hash_secret(secret: bytes) -> bytes:
    """Hash a secret. A fast hash is enough for 256 random bits, and every request pays for it."""
    return hashlib.sha256(secret).digest()


def secret_hint(secret: str) -> str:
    return secret[-_HINT_LENGTH:]
