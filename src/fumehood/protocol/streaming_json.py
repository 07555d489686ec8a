"""Extracts strings from a JSON object that arrives in fragments.

A model writes the arguments of a call in fragments. Parsing them all again with each fragment would be quadratic, so
each character is scanned once.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from json import decoder
from typing import NamedTuple

_NOT_SPACE = re.compile(r"[^ \t\n\r]")
_KEY_OR_END = re.compile(r'["}]')
_SCALAR_END = re.compile(r"[,}]")
_NESTING = re.compile(r'["\[\]{}]')
# Stops at a quotation mark, an incomplete escape or an invalid one.
_STRING = re.compile(r'[^"\\]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*+)*+')
# What the next fragment may complete: half of a surrogate pair, the start of an escape, or both.
_INCOMPLETE_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_ESCAPE_LENGTH = 6  # characters of \uXXXX
_SEPARATOR = "\0"

# The C scanner of `json`: returns the string from a position on, and its end. Raises ValueError.
_read_string: Callable[[str, int, bool], tuple[str, int]] = vars(decoder)["scanstring"]


class _JsonFieldScanner(ABC):
    """Scans for the value of one field of the object.

    It is lenient with text that is not JSON: the caller validates the whole `text` at the end. If the field occurs
    twice, the first one counts, since it was streamed already.
    """

    _value_opener: str  # first character of the value

    def __init__(self, name: str) -> None:
        self._name = name
        self._fragments: list[str] = []
        self._pieces: list[str] = []
        self._key: list[str] = []
        self._pending_escape = ""  # an incomplete escape
        self._depth = 0
        self._inside = False
        self._found = False
        self._complete = False
        self._step: Callable[[str, int], int] = self._opening

    @property
    def text(self) -> str:
        """Everything fed so far."""
        return "".join(self._fragments)

    @property
    def is_complete(self) -> bool:
        """Whether the value has ended."""
        return self._complete

    def _consume(self, fragment: str) -> None:
        self._fragments.append(fragment)
        if self._inside and not self._pending_escape:
            pieces = _decode_simple_fragments((fragment,))
            if pieces is not None:
                self._pieces += pieces
                return
        text = self._pending_escape + fragment
        self._pending_escape = ""
        position = 0
        while position < len(text):
            position = self._step(text, position)

    @abstractmethod
    def _begin_value(self) -> None: ...

    @abstractmethod
    def _end_string(self) -> None: ...

    # ---- states: each consumes text from a position on and returns where the next one starts ----------------------

    def _opening(self, text: str, position: int) -> int:
        found = _NOT_SPACE.search(text, position)
        if found is None:
            return len(text)
        self._step = self._before_key if found.group() == "{" else self._ignore
        return found.end()

    def _before_key(self, text: str, position: int) -> int:
        found = _KEY_OR_END.search(text, position)
        if found is None:
            return len(text)
        self._key = []
        self._step = self._in_key if found.group() == '"' else self._ignore
        return found.end()

    def _in_key(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        self._key.append(text[position:end])
        if text[end : end + 1] == '"':
            self._step = self._before_value
            return end + 1
        return self._hold_escape(text, end)

    def _before_value(self, text: str, position: int) -> int:
        found = _NOT_SPACE.search(text, position)
        if found is None:
            return len(text)
        match found.group():
            case ":":
                return found.end()
            case mark if mark == self._value_opener and _unescape("".join(self._key)) == self._name:
                self._found = True
                self._begin_value()
            case '"':
                self._step = self._in_string
            case "{" | "[":
                self._depth = 1
                self._step = self._nested
            case _:
                self._step = self._in_scalar
                return found.start()
        return found.end()

    def _in_field(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        has_ended = text[end : end + 1] == '"'
        piece = _unescape(text[position:end])
        if not has_ended and "\ud800" <= piece[-1:] <= "\udbff":
            end -= _ESCAPE_LENGTH  # half of a surrogate pair: the other half may follow
            piece = piece[:-1]
        if piece:
            self._pieces.append(_replace_lone_surrogates(piece))
        if has_ended:
            self._inside = False
            self._end_string()
            return end + 1
        return self._hold_escape(text, end)

    def _in_string(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        if text[end : end + 1] == '"':
            self._step = self._nested if self._depth else self._before_key
            return end + 1
        return self._hold_escape(text, end)

    def _nested(self, text: str, position: int) -> int:
        found = _NESTING.search(text, position)
        if found is None:
            return len(text)
        match found.group():
            case '"':
                self._step = self._in_string
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                if not self._depth:
                    self._step = self._before_key
        return found.end()

    def _in_scalar(self, text: str, position: int) -> int:
        found = _SCALAR_END.search(text, position)
        if found is None:
            return len(text)
        self._step = self._before_key
        return found.start()

    def _ignore(self, text: str, _position: int) -> int:
        return len(text)

    def _string_end(self, text: str, position: int) -> int:
        found = _STRING.match(text, position)
        return position if found is None else found.end()

    def _hold_escape(self, text: str, position: int) -> int:
        """Keep an incomplete escape for the next fragment; stop at an invalid one."""
        if _INCOMPLETE_ESCAPE.fullmatch(text, position):
            self._pending_escape = text[position:]
        else:
            self._inside = False
            self._step = self._ignore
        return len(text)


class StringFieldScanner(_JsonFieldScanner):
    """Scans for one string field."""

    _value_opener = '"'

    @property
    def value(self) -> str | None:
        """The string so far, None before it starts."""
        return "".join(self._pieces) if self._found else None

    def feed(self, fragments: Sequence[str]) -> Sequence[str]:
        """Consume fragments; return what each adds to the string, without empty pieces."""
        if self._inside and not self._pending_escape:
            pieces = _decode_simple_fragments(fragments)
            if pieces is not None:
                self._fragments += fragments
                self._pieces += pieces
                return pieces
        known = len(self._pieces)
        for fragment in fragments:
            self._consume(fragment)
        return self._pieces[known:]

    def _begin_value(self) -> None:
        self._inside = True
        self._step = self._in_field

    def _end_string(self) -> None:
        self._complete = True
        self._step = self._ignore


class StringArrayPiece(NamedTuple):
    """What a fragment adds to one string of an array, and whether that string has ended."""

    position: int
    text: str
    is_complete: bool


class StringArrayScanner(_JsonFieldScanner):
    """Scans for one field with an array of strings; stops at an element of another type."""

    _value_opener = "["

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._strings: list[str] = []
        self._string_open = False
        self._emitted = 0  # pieces of the current string
        self._new_pieces: list[StringArrayPiece] = []

    @property
    def values(self) -> list[str]:
        """The strings so far; the last one may be incomplete."""
        return [*self._strings, "".join(self._pieces)] if self._string_open else [*self._strings]

    def is_string_complete(self, number: int) -> bool:
        """Whether that string has ended."""
        return number < len(self._strings)

    def feed(self, fragment: str) -> list[StringArrayPiece]:
        """Consume a fragment; return what it adds to the strings, in order."""
        new_pieces = self._new_pieces = []
        self._consume(fragment)
        if len(self._pieces) > self._emitted:
            new_pieces.append(
                StringArrayPiece(len(self._strings), "".join(self._pieces[self._emitted :]), False)
            )
            self._emitted = len(self._pieces)
        return new_pieces

    def _begin_value(self) -> None:
        self._step = self._before_element

    def _before_element(self, text: str, position: int) -> int:
        found = _NOT_SPACE.search(text, position)
        if found is None:
            return len(text)
        match found.group():
            case ",":
                pass
            case '"':
                self._string_open = self._inside = True
                self._step = self._in_field
            case mark:
                self._complete = mark == "]"
                self._step = self._ignore
        return found.end()

    def _end_string(self) -> None:
        pieces, self._pieces = self._pieces, []
        self._new_pieces.append(StringArrayPiece(len(self._strings), "".join(pieces[self._emitted :]), True))
        self._strings.append("".join(pieces))
        self._string_open, self._emitted = False, 0
        self._step = self._before_element


def _decode_simple_fragments(fragments: Sequence[str]) -> Sequence[str] | None:
    """Decode fragments without escapes or with simple ones, which nearly all are. None if one needs the full scanner.

    All are decoded at once, joined by a separator that no simple escape produces.
    """
    text = _SEPARATOR.join(fragments)
    if '"' not in text and "\\" not in text:
        return [fragment for fragment in fragments if fragment]
    if "\\u" in text:
        return None
    try:
        decoded, end = _read_string(text + '"', 0, False)
    except ValueError:  # an incomplete or invalid escape
        return None
    pieces = decoded.split(_SEPARATOR)
    if end <= len(text) or len(pieces) != len(fragments):
        return None
    return [piece for piece in pieces if piece]


def _unescape(text: str) -> str:
    """Decode complete escapes; lone surrogates stay."""
    return _read_string(text + '"', 0, False)[0] if "\\" in text else text


def _replace_lone_surrogates(text: str) -> str:
    """Replace what UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
