"""Seals nothing, and shows who it was for."""

import base64

from fumehood.interfaces import InvalidSeal


class PlainSealer:
    """A `Sealer` for tests: anybody can read what it makes; another tenant still cannot open it."""

    def seal(self, tenant: str, content: bytes) -> str:
        return base64.b64encode(f"{tenant}\0".encode() + content).decode()

    def unseal(self, tenant: str, sealed: str) -> bytes:
        try:
            owner, mark, content = base64.b64decode(sealed, validate=True).partition(b"\0")
        except ValueError:
            raise InvalidSeal("it is not base64") from None
        if not mark:
            raise InvalidSeal("it was never sealed")
        if owner != tenant.encode():
            raise InvalidSeal("it is another tenant's")
        return content
