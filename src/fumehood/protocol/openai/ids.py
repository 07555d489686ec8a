"""Identifiers with OpenAI's prefixes, never longer than 64 characters."""

import os
import time

MAX_ID_LENGTH = 64

_ITEM_ID_PREFIXES = {
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "code_interpreter_call": "ci",
    "compaction": "cmp",
    "custom_tool_call": "ctc",
    "file_search_call": "fs",
    "function_call": "fc",
    "local_shell_call": "lsh",
    "mcp_approval_request": "mcpr",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "message": "msg",
    "reasoning": "rs",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "web_search_call": "ws",
}


def new_id(prefix: str, separator: str = "_") -> str:
    """Return the prefix and 48 hexadecimal digits: 14 of the time, 34 random.

    Starting with the time keeps new rows together in every index, so that a database writes fewer pages.
    """
    return f"{prefix}{separator}{time.time_ns() >> 20:014x}{os.urandom(17).hex()}"


def new_item_id(kind: str) -> str:
    """Return a new id for an item of that type."""
    return new_id(_ITEM_ID_PREFIXES.get(kind, "item"))
