"""Identifiers with OpenAI's prefixes, never longer than 64 characters; imports the standard library."""

import os
import time

LONGEST_ID = 64


def new_id(prefix: str, joint: str = "_") -> str:
    """`resp` gives `resp_` and 48 hexadecimal digits, of which nobody can guess 34.

    The others tell the time, to about a millisecond: what is made together stands together in every index, so that a
    database has to write one page where it would have to write many.
    """
    return f"{prefix}{joint}{time.time_ns() >> 20:014x}{os.urandom(17).hex()}"
