"""Wraps encrypted reasoning with its origin, so that only the model that produced it gets it back.

Clients store the wrapped content. It also holds the server's item id, which the server wants back with it.
"""

import hashlib
from dataclasses import dataclass

from fumehood.protocol.model_turns import UPSTREAM_REASONING_PREFIX

_PREFIX = UPSTREAM_REASONING_PREFIX.removesuffix(":")
_MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ReasoningOrigin:
    """A fingerprint of the server and the model that produced the reasoning."""

    fingerprint: str

    @classmethod
    def for_model(cls, base_url: str, model: str) -> "ReasoningOrigin":
        return cls(hashlib.sha256(f"{base_url}\n{model}".encode()).hexdigest()[:16])

    def wrap(self, server_id: str | None, content: str) -> str:
        item_id = server_id or ""
        if ":" in item_id or len(item_id) > _MAX_ID_LENGTH:
            item_id = ""
        return f"{_PREFIX}:{self.fingerprint}:{item_id}:{content}"

    def unwrap(self, wrapped: str) -> tuple[str, str] | None:
        """The server's item id (may be empty) and the content; None if another model produced it."""
        prefix, _, rest = wrapped.partition(":")
        fingerprint, _, rest = rest.partition(":")
        item_id, _, content = rest.partition(":")
        return (
            (item_id, content) if (prefix, fingerprint) == (_PREFIX, self.fingerprint) and content else None
        )
