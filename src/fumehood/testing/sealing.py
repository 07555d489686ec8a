"""Seals nothing, and shows who it was for; imports `interfaces` and the standard library."""

import base64

from fumehood.interfaces import Unsealable


class PlainSealer:
    """A `Sealer` for tests: anybody can read what it makes; another tenant still cannot open it."""

    def seal(self, tenant: str, content: bytes) -> str:
        return base64.b64encode(f"{tenant}\0".encode() + content).decode()

    def open(self, tenant: str, sealed: str) -> bytes:
        try:
            owner, mark, content = base64.b64decode(sealed, validate=True).partition(b"\0")
        except ValueError:
            raise Unsealable("it is not base64") from None
        if not mark:
            raise Unsealable("it was never sealed")
        if owner != tenant.encode():
            raise Unsealable("it is another tenant's")
        return content
