"""Domain names and authorities, in one spelling or refused; imports only the standard library."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# IDNA of 2003 and of 2008 read these differently: two programs would mean two domains.
_AMBIGUOUS = frozenset("ßς\u200c\u200d")
_LONGEST = 253


class BadName(ValueError):
    """Not a domain name; the text says why."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Whom a request is for: `name` is normalised."""

    name: str
    port: int


def normalised(name: str) -> str:
    """The one spelling of a domain: lower case, ASCII, no dot at the end; BadName for anything else.

    Addresses are no names, in none of the spellings that some resolvers understand (`127.1`, `0x7f000001`).
    """
    if any(char in _AMBIGUOUS for char in name):
        raise BadName("the name is ambiguous; write it in its xn-- form")
    try:
        plain = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        raise BadName("the name has no ASCII form") from None
    plain = plain.lower().removesuffix(".")
    labels = plain.split(".")
    if len(plain) > _LONGEST or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadName("it is not a domain name")
    if _NUMBER.fullmatch(labels[-1]):
        raise BadName("it is an address; domains are allowed by name")
    return plain


def authority(text: str, *, default_port: int | None) -> Authority:
    """`name:port`, or `name` where there is a default; without user information, ASCII only."""
    if not text.isascii():
        raise BadName("it is not ASCII")
    name, colon, digits = text.partition(":")
    if not colon:
        if default_port is None:
            raise BadName("it has no port")
        return Authority(normalised(name), default_port)
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 0 < int(digits) < 65536:
        raise BadName("it has no valid port")
    return Authority(normalised(name), int(digits))
