"""Multipart bodies as clients write them."""

from collections.abc import Sequence

BOUNDARY = b"b0undary"


def quoted(name: str) -> str:
    """As browsers write the name of a file."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def part(name: str, content: bytes, filename: str | None = None, *headers: bytes) -> bytes:
    """One part, from its headers to the end of its content."""
    named = b'; filename="%b"' % filename.encode() if filename is not None else b""
    lines = [b'Content-Disposition: form-data; name="%b"%b' % (name.encode(), named), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


def form(parts: Sequence[bytes], boundary: bytes = BOUNDARY) -> bytes:
    body = b"".join(b"--%b\r\n%b\r\n" % (boundary, each) for each in parts)
    return body + b"--%b--\r\n" % boundary


def form_type(boundary: bytes = BOUNDARY) -> dict[str, str]:
    return {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
