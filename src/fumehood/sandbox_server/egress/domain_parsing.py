"""Normalises domain names and parses authorities."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# IDNA 2003 and IDNA 2008 map these differently: two programs would mean two domains.
_AMBIGUOUS_CHARACTERS = frozenset("ßς\u200c\u200d")
_MAX_NAME = 253


class InvalidDomainName(ValueError):
    """The text is not a domain name; the message says why."""


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The server of a request; `name` is normalised."""

    name: str
    port: int


def parse_domain_name(name: str) -> str:
    """Return a domain in lower-case ASCII without a final dot. Raises InvalidDomainName.

    IP addresses are not names, in any spelling that resolvers accept (`127.1`, `0x7f000001`).
    """
    if any(char in _AMBIGUOUS_CHARACTERS for char in name):
        raise InvalidDomainName("the name is ambiguous; write it in its xn-- form")
    try:
        plain = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        raise InvalidDomainName("the name has no ASCII form") from None
    plain = plain.lower().removesuffix(".")
    labels = plain.split(".")
    if len(plain) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidDomainName("it is not a domain name")
    if _NUMBER.fullmatch(labels[-1]):
        raise InvalidDomainName("it is an address; domains are allowed by name")
    return plain


def parse_authority(text: str, *, default_port: int | None) -> RequestTarget:
    """Parse `name:port`, or `name` if there is a default port. Raises InvalidDomainName."""
    if not text.isascii():
        raise InvalidDomainName("it is not ASCII")
    name, colon, digits = text.partition(":")
    if not colon:
        if default_port is None:
            raise InvalidDomainName("it has no port")
        return RequestTarget(parse_domain_name(name), default_port)
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 0 < int(digits) < 65536:
        raise InvalidDomainName("it has no valid port")
    return RequestTarget(parse_domain_name(name), int(digits))
