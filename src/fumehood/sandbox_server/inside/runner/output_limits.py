"""The most that one call sends: the runner keeps to it, the supervisor ends whoever exceeds it.

Both sides take their numbers from here, so that no honest program can cost its sandbox. The supervisor's are
derived from the runner's and leave room.
"""

# --- the runner's ---------------------------------------------------------------------------------------

MAX_OUTPUT_BYTES = 1 << 20  # text of a call, if the supervisor says nothing else
SWITCH_COST = 16  # bytes of it that a change between stdout and stderr takes
MAX_TOTAL_DISPLAY_BYTES = 32 << 20  # displays and the result of a call together, encoded
MAX_DISPLAY_BYTES = 8 << 20  # one of them
MAX_DISPLAYS = 100
MAX_MIME_TYPES = 32  # of one display
FLUSH_BYTES = 32 * 1024  # text is sent when this much has gathered,
FLUSH_PIECES = 4096  # or this many pieces,
QUIET_SECONDS = 0.010  # or when nothing was sent for so long,
TICK_MS = 20  # or at the pump's next tick,
MAX_FLUSHES = 1000  # or when the program flushes, so many times in a call
MAX_NAME_CHARS = 1024  # of an exception
MAX_VALUE_CHARS = 32 * 1024
MAX_TRACEBACK_CHARS = 128 * 1024

# --- the supervisor's -----------------------------------------------------------------------------------

MAX_MESSAGES_PER_SECOND = (
    250  # each wakes the server, which has one processor for all; the runner's pace is 150
)
_JSON_GROWTH = 12  # bytes that a character takes at most, in escapes
_SLACK = 1 << 20


def max_body_bytes(output_bytes: int, display_bytes: int) -> int:
    """The most that the bodies of all messages of a call can be. A batch is at most as long as its text counts for."""
    error = _JSON_GROWTH * (MAX_NAME_CHARS + MAX_VALUE_CHARS + MAX_TRACEBACK_CHARS)
    return output_bytes + display_bytes + error + _SLACK


def max_message_burst(output_bytes: int) -> int:
    """How many messages may come beyond `MESSAGES_PER_SECOND`: those that are sent for other reasons than that time has
    passed.
    """
    return 4 * MAX_FLUSHES + output_bytes // min(FLUSH_BYTES, FLUSH_PIECES) * 4


def max_batched_events(output_bytes: int) -> int:
    """How many pieces of text batches may have: each batch has a switch, so they are at most twice the switches."""
    return 2 * (output_bytes // SWITCH_COST) + 1000
