"""The most that one call sends: the runner keeps to it, the supervisor ends whoever exceeds it; imports nothing.

Both sides take their numbers from here, so that no honest program can cost its sandbox. The supervisor's are
derived from the runner's and leave room.
"""

# --- the runner's ---------------------------------------------------------------------------------------

OUTPUT_BYTES = 1 << 20  # text of a call, if the supervisor says nothing else
SWITCH_COST = 16  # bytes of it that a change between stdout and stderr takes
DISPLAY_BYTES = 32 << 20  # displays and the result of a call together, encoded
DISPLAY_LIMIT = 8 << 20  # one of them
DISPLAYS = 100
MIME_TYPES = 32  # of one display
FULL_BYTES = 32 * 1024  # text is sent when this much has gathered,
FULL_PIECES = 4096  # or this many pieces,
QUIET_SECONDS = 0.010  # or when nothing was sent for so long,
TICK_MS = 20  # or at the pump's next tick,
FLUSHES = 1000  # or when the program flushes, so many times in a call
NAME_CHARS = 1024  # of an exception
VALUE_CHARS = 32 * 1024
TRACEBACK_CHARS = 128 * 1024

# --- the supervisor's -----------------------------------------------------------------------------------

MESSAGES_PER_SECOND = 250  # each wakes the server, which has one processor for all; the runner's pace is 150
_JSON_GROWTH = 12  # bytes that a character takes at most, in escapes
_SLACK = 1 << 20


def body_bytes(output_bytes: int, display_bytes: int) -> int:
    """The most that the bodies of all messages of a call can be. A batch is at most as long as its text counts for."""
    error = _JSON_GROWTH * (NAME_CHARS + VALUE_CHARS + TRACEBACK_CHARS)
    return output_bytes + display_bytes + error + _SLACK


def messages_at_once(output_bytes: int) -> int:
    """How many messages may come beyond `MESSAGES_PER_SECOND`: those that are sent for other reasons than that time has
    passed.
    """
    return 4 * FLUSHES + output_bytes // min(FULL_BYTES, FULL_PIECES) * 4


def batched_events(output_bytes: int) -> int:
    """How many pieces of text batches may have: each batch has a switch, so they are at most twice the switches."""
    return 2 * (output_bytes // SWITCH_COST) + 1000
