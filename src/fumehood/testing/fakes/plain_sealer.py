"""A `Sealer` without encryption."""

import base64

from fumehood.interfaces import InvalidSeal


class PlainSealer:
    """A `Sealer` whose seals are readable, but still bound to their tenant."""

    def seal(self, tenant: str, content: bytes) -> str:
        return base64.b64encode(f"{tenant}\0".encode() + content).decode()

    def unseal(self, tenant: str, sealed: str) -> bytes:
        try:
            owner, separator, content = base64.b64decode(sealed, validate=True).partition(b"\0")
        except ValueError:
            raise InvalidSeal("it is not base64") from None
        if not separator:
            raise InvalidSeal("it was never sealed")
        if owner != tenant.encode():
            raise InvalidSeal("it belongs to another tenant")
        return content
