"""Encrypted state that clients carry."""

from typing import Protocol

# --- what clients carry for us ------------------------------------------------------------------------


class InvalidSeal(Exception):
    """What should have been sealed here for this tenant was not, or was changed since; says which, and no secret."""


class Sealer(Protocol):
    """Makes text that clients can carry and nobody else can read, change, or use for another tenant."""

    def seal(self, tenant: str, content: bytes) -> str: ...

    def unseal(self, tenant: str, sealed: str) -> bytes:
        """Raises InvalidSeal."""
        ...
