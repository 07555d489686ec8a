"""Identifiers with OpenAI's prefixes, never longer than 64 characters; imports the standard library."""

import os
import time

LONGEST_ID = 64

_RANDOM_BYTES = 17
_AT_ONCE = 64  # the system is asked for so many: while it answers, other threads take their turn, and that takes long
_spare: list[str] = []
os.register_at_fork(after_in_child=_spare.clear)


def new_id(prefix: str) -> str:
    """`resp` gives `resp_` and 48 hexadecimal digits, of which nobody can guess 34.

    The others tell the time, to about a millisecond: what is made together stands together in every index, so that a
    database has to write one page where it would have to write many.
    """
    return f"{prefix}_{time.time_ns() >> 20:014x}{_random_digits()}"


def _random_digits() -> str:
    """Nobody gets the same ones, in whichever thread."""
    while True:
        try:
            return _spare.pop()
        except IndexError:
            digits, length = os.urandom(_RANDOM_BYTES * _AT_ONCE).hex(), 2 * _RANDOM_BYTES
            _spare.extend([digits[start : start + length] for start in range(0, len(digits), length)])
