"""Encrypted state that clients carry."""

from typing import Protocol

MAX_SEALED_BYTES = 7 << 20
"""Of content. Clients send seals in JSON, where OpenAI's API takes 10 MiB, and base64 adds a third."""


class InvalidSeal(Exception):
    """A text was not sealed here for this tenant, or was changed since. The message contains no secret."""


class Sealer(Protocol):
    """Encrypts state and binds it to a tenant, so that a client can carry it but not read, change or share it."""

    def seal(self, tenant: str, content: bytes) -> str:
        """Return the content as encrypted ASCII text.

        tenant: who may bring it back.
        content: at most MAX_SEALED_BYTES; the caller checks that.
        """
        ...

    def unseal(self, tenant: str, sealed: str) -> bytes:
        """Return the content of a seal.

        tenant: who brings it back.
        sealed: from `seal`.

        Raises InvalidSeal if it was not sealed for this tenant, or was changed.
        """
        ...
