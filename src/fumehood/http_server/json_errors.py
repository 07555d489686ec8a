"""Says what is wrong with a body that is not JSON."""

import re

# Everything up to the first escaped surrogate that is not half of a pair. Possessive, so that it never goes back.
_VALID_PREFIX = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)


def explain_json_error(body: bytes, error: Exception) -> str:
    """One sentence, or two, for whoever sent it.

    error: what the decoder raised.
    """
    if not body.strip():
        return "The body is empty; send a JSON object."
    try:
        body.decode()
    except UnicodeDecodeError as fault:  # that of the decoder may count from elsewhere
        wrong = body[fault.start : fault.start + 3]
        if b"\xed\xa0" <= wrong < b"\xee":
            return _explain_surrogate(wrong.hex(" "), fault.start)
        return f"The body is not UTF-8 text: byte {fault.start} cannot be read."
    if (place := find_lone_surrogate(body)) is not None:
        return _explain_surrogate(body[place : place + 6].decode("latin-1"), place)
    return f"The body is not JSON: {error}."


def find_lone_surrogate(body: bytes) -> int | None:
    """Where a `\\ud…` stands that is half of a character."""
    sound = _VALID_PREFIX.match(body)
    place = 0 if sound is None else sound.end()
    return place if body[place : place + 3].lower() == b"\\ud" else None


def _explain_surrogate(written: str, place: int) -> str:
    return (
        f"The body has a lone surrogate at byte {place} ({written}): it is half of a character. Send such characters "
        "as UTF-8, or escape them as pairs."
    )
