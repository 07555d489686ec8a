"""Explains why a body is not valid JSON."""

import re

# Everything up to the first lone escaped surrogate. Possessive, so that it never backtracks.
_VALID_PREFIX = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)


def explain_json_error(body: bytes, error: Exception) -> str:
    """An error message for the client.

    error: what the decoder raised.
    """
    if not body.strip():
        return "The body is empty; send a JSON object."
    try:
        body.decode()
    except UnicodeDecodeError as fault:  # the decoder may count bytes differently
        wrong = body[fault.start : fault.start + 3]
        if b"\xed\xa0" <= wrong < b"\xee":
            return _explain_surrogate(wrong.hex(" "), fault.start)
        return f"The body is not UTF-8 text: invalid byte at position {fault.start}."
    if (position := find_lone_surrogate(body)) is not None:
        return _explain_surrogate(body[position : position + 6].decode("latin-1"), position)
    return f"The body is not JSON: {error}."


def find_lone_surrogate(body: bytes) -> int | None:
    """The position of an escaped surrogate that is not part of a pair."""
    valid = _VALID_PREFIX.match(body)
    position = 0 if valid is None else valid.end()
    return position if body[position : position + 3].lower() == b"\\ud" else None


def _explain_surrogate(written: str, position: int) -> str:
    return (
        f"The body has a lone surrogate at byte {position} ({written}): it is half of a character. Send such "
        "characters as UTF-8, or escape them as pairs."
    )
