"""Limits of what one call sends: the runner keeps to them, the supervisor ends a sandbox that exceeds them.

The supervisor's limits are derived from the runner's with a margin, so that an honest program never loses its sandbox.
"""

# --- limits of the runner ---

MAX_OUTPUT_BYTES = 1 << 20  # text of a call, unless the supervisor sets another limit
SWITCH_COST = 16  # bytes of it that a switch between stdout and stderr costs
MAX_TOTAL_DISPLAY_BYTES = 32 << 20  # all displays and the result of a call, encoded
MAX_DISPLAY_BYTES = 8 << 20  # one display
MAX_DISPLAYS = 100
MAX_MIME_TYPES = 32  # of one display
FLUSH_BYTES = 32 * 1024  # text is sent when this much is queued,
FLUSH_CHUNKS = 4096  # or this many chunks,
QUIET_SECONDS = 0.010  # or when nothing was sent for this long,
TICK_MS = 20  # or at the pump's next tick,
MAX_FLUSHES = 1000  # or when the program flushes, up to this many times in a call
MAX_NAME_CHARS = 1024  # of an exception
MAX_VALUE_CHARS = 32 * 1024
MAX_TRACEBACK_CHARS = 128 * 1024

# --- limits of the supervisor ---

MAX_MESSAGES_PER_SECOND = 250  # each wakes the server, which has one CPU for all; the runner sends up to 150
_JSON_GROWTH = 12  # bytes per character at most, with escapes
_SLACK = 1 << 20


def max_body_bytes(output_bytes: int, display_bytes: int) -> int:
    """Return the most bytes that the bodies of all messages of a call can have."""
    error = _JSON_GROWTH * (MAX_NAME_CHARS + MAX_VALUE_CHARS + MAX_TRACEBACK_CHARS)
    return output_bytes + display_bytes + error + _SLACK


def max_message_burst(output_bytes: int) -> int:
    """Return how many messages a call may send beyond `MAX_MESSAGES_PER_SECOND`: those not caused by a tick."""
    return 4 * MAX_FLUSHES + output_bytes // min(FLUSH_BYTES, FLUSH_CHUNKS) * 4


def max_batched_events(output_bytes: int) -> int:
    """Return how many chunks the batches of a call may have: at most two for each switch between streams."""
    return 2 * (output_bytes // SWITCH_COST) + 1000
