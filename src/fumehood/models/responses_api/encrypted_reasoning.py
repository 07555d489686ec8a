"""Reasoning that only its maker can read, on its way to the client and back.

Such content belongs to the item that the server made, by the server's own id, and to the model that wrote it. Both are
kept with it, so that it can be given back rightly whoever carried it meanwhile, and is never shown to another model.
"""

import hashlib
from dataclasses import dataclass

_PREFIX = "fh1"
_MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ReasoningOrigin:
    """Who made it: a fingerprint of the server and the model."""

    fingerprint: str

    @classmethod
    def for_model(cls, base_url: str, model: str) -> "ReasoningOrigin":
        return cls(hashlib.sha256(f"{base_url}\n{model}".encode()).hexdigest()[:16])

    def wrap(self, server_id: str | None, content: str) -> str:
        name = server_id or ""
        if ":" in name or len(name) > _MAX_ID_LENGTH:
            name = ""
        return f"{_PREFIX}:{self.fingerprint}:{name}:{content}"

    def unwrap(self, wrapped: str) -> tuple[str, str] | None:
        """The server's id, empty if it has none, and the content; None if another model made it."""
        mark, _, rest = wrapped.partition(":")
        maker, _, rest = rest.partition(":")
        their_id, _, content = rest.partition(":")
        return (their_id, content) if (mark, maker) == (_PREFIX, self.fingerprint) and content else None
