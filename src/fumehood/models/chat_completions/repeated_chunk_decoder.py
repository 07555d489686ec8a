"""Reads runs of events that differ in one string only, many at a time.

Almost all events of a model server repeat the one before but for a few characters of text. Where that is so, a whole
read is cut at what repeats, and the strings in between are decoded together, at a fraction of the cost.
"""

import re
from collections.abc import Callable
from typing import Self

import msgspec

_JSON_STRING = re.compile(rb'\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
_strings_decoder = msgspec.json.Decoder(list[str])


class RepeatedChunkDecoder:
    """Events `data: ` + prefix + string + suffix, one after another."""

    def __init__(self, prefix: bytes, suffix: bytes) -> None:
        self._opening = b"data: " + prefix
        self._closing = suffix + b"\n\n"
        self._separator = self._closing + self._opening

    @classmethod
    def learn(cls, payload: bytes, key: bytes, is_equivalent: Callable[[bytes, str], bool]) -> Self | None:
        """What repeats around the string of that key.

        same: whether a payload means the same as this one, but for another string in that place.
        """
        place = payload.rfind(b'"' + key + b'":')
        found = _JSON_STRING.match(payload, place + len(key) + 3) if place >= 0 else None
        if found is None:
            return None
        prefix, suffix = payload[: found.start(1)].lstrip(), payload[found.end() :].rstrip()
        if b"\n" in prefix or b"\n" in suffix or not is_equivalent(prefix + b'"?"' + suffix, "?"):
            return None
        return cls(prefix, suffix)

    def decode_run(self, block: bytes) -> tuple[list[str], int] | None:
        """The strings with which these lines begin, and how many bytes they took; None if there are none."""
        opening = self._opening
        if not block.startswith(opening):
            return None
        parts = block.split(self._separator)
        parts[0] = parts[0][len(opening) :]
        rest = 0
        last = parts[-1].find(self._closing)
        if last < 0:
            return None
        rest = len(parts[-1]) - last - len(self._closing)
        parts[-1] = parts[-1][:last]
        try:
            # A newline cannot be in a string, so nothing grows together that was apart.
            strings = _strings_decoder.decode(b"[" + b"\n,".join(parts) + b"]")
        except (msgspec.DecodeError, UnicodeError):
            return None
        return (strings, len(block) - rest) if len(strings) == len(parts) else None
