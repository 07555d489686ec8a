"""API keys as they are kept, never their secrets."""

import hashlib
import secrets
import string
from typing import Literal, get_args

import msgspec

type ApiKeyScope = Literal["responses", "containers", "files", "models", "metrics"]
"""What a key is for: `responses` makes and reads responses, and so runs code; `metrics` reads the metrics of all
tenants together; the others are the routes of that name.
"""

ALL_SCOPES: tuple[ApiKeyScope, ...] = get_args(ApiKeyScope.__value__)
TENANT_SCOPES: frozenset[ApiKeyScope] = frozenset(ALL_SCOPES) - {"metrics"}
"""The scopes of a key for which none are named: everything of its own tenant."""

SECRET_PREFIX = "fh-"  # noqa: S105 - of every key, no secret
_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 43  # characters of such an alphabet: more than 256 bits
_HINT_LENGTH = 4


class ApiKeyLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key may do at most; None leaves it to the server's settings.

    containers: of its tenant, running at once.
    """

    requests_per_minute: int | None = None
    concurrent: int | None = None
    body_bytes: int | None = None
    containers: int | None = None


DEFAULT_KEY_LIMITS = ApiKeyLimits()


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key as the store keeps it.

    digest: of the secret, which nobody keeps.
    hint: the end of the secret, by which its owner recognises it.
    scopes: what it is for.
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
    """Short enough to be typed: it is a name, and worth nothing to whoever guesses it."""
    return f"key_{secrets.token_hex(8)}"


def new_secret() -> str:
    return SECRET_PREFIX + "".join([secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH)])


def hash_secret(secret: bytes) -> bytes:
    """A fast hash is right for these: slow ones make guessing dear where people choose secrets, but nobody guesses one
    of 256 random bits, and every request pays for this.
    """
    return hashlib.sha256(secret).digest()


def secret_hint(secret: str) -> str:
    return secret[-_HINT_LENGTH:]
