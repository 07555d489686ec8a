"""Replaces placeholders by secrets in request headers."""

import base64
import binascii
import re

_BASIC = re.compile(rb"(basic +)([A-Za-z0-9+/]+=*)", re.IGNORECASE)


class SecretPlaceholders:
    """The secrets of one domain: `$NAME` in a header's value is replaced by the secret of that name.

    Names match whole (`$KEY` does not match in `$KEY_2`), and replaced text is not searched again.
    """

    def __init__(self, secrets: dict[str, str]) -> None:
        self._values = {name.encode(): value.encode("ascii") for name, value in secrets.items()}
        names = b"|".join(re.escape(name) for name in self._values)
        self._pattern = re.compile(rb"\$(" + names + rb")(?![A-Za-z0-9_])")

    def fill(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers with secrets; also within the base64 of `Authorization: Basic`."""
        return [
            (name, value)
            if name.lower() in (b"host", b"content-length")
            else (name, self._fill_value(name, value))
            for name, value in headers
        ]

    def _fill_value(self, name: bytes, value: bytes) -> bytes:
        if name.lower() == b"authorization" and (match := _BASIC.fullmatch(value)):
            try:
                credentials = base64.b64decode(match[2], validate=True)
            except binascii.Error:
                return value
            return match[1] + base64.b64encode(self._replace(credentials))
        return self._replace(value)

    def _replace(self, text: bytes) -> bytes:
        return self._pattern.sub(lambda match: self._values[match[1]], text)
