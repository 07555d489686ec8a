"""Reasoning that only its maker can read, on its way to the client and back; imports the standard library.

Such content belongs to the item that the server made, by the server's own id, and to the model that wrote it. Both are
kept with it, so that it can be given back rightly whoever carried it meanwhile, and is never shown to another model.
"""

import hashlib
from dataclasses import dataclass

_MARK = "fh1"
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class Origin:
    """Who made it: a fingerprint of the server and the model."""

    mark: str

    @classmethod
    def of(cls, base_url: str, model: str) -> "Origin":
        return cls(hashlib.sha256(f"{base_url}\n{model}".encode()).hexdigest()[:16])

    def seal(self, their_id: str | None, content: str) -> str:
        name = their_id or ""
        if ":" in name or len(name) > _LONGEST_NAME:
            name = ""
        return f"{_MARK}:{self.mark}:{name}:{content}"

    def open(self, sealed: str) -> tuple[str, str] | None:
        """The server's id, empty if it has none, and the content; None if another model made it."""
        mark, _, rest = sealed.partition(":")
        maker, _, rest = rest.partition(":")
        their_id, _, content = rest.partition(":")
        return (their_id, content) if (mark, maker) == (_MARK, self.mark) and content else None
