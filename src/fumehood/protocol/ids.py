"""Identifiers with OpenAI's prefixes, never longer than 64 characters; imports the standard library."""

import secrets

LONGEST_ID = 64


def new_id(prefix: str) -> str:
    """`resp` gives `resp_` and 48 hexadecimal digits that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"
