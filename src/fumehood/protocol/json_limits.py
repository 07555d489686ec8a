"""Limits the number of values in a JSON document before it is decoded.

Decoding holds the GIL, and its time depends on the number of values: 32 MB take 30 ms as one string, and two seconds as
empty lists. The document is scanned in steps that are each short.
"""

import re

MAX_VALUES = 500_000

_SCAN_BYTES = 1 << 20
# Possessive: backtracking state would take far more memory than the text.
_INSIDE_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


def has_too_many_values(document: bytes, limit: int = MAX_VALUES) -> bool:
    """Whether a document has more values than the limit, approximately. It need not be valid JSON."""
    steps = range(0, len(document), _SCAN_BYTES)
    # An upper bound, since strings contain commas, too.
    if sum(document.count(b",", start, start + _SCAN_BYTES) for start in steps) <= limit:
        return False
    return _count_values(document, limit) > limit


def _count_values(document: bytes, limit: int) -> int:
    """Count the commas outside strings, up to the limit."""
    count = position = 0
    while count <= limit:
        quote = document.find(b'"', position)
        end = len(document) if quote < 0 else quote
        while position < end and count <= limit:
            count += document.count(b",", position, min(position + _SCAN_BYTES, end))
            position += _SCAN_BYTES
        if quote < 0:
            break
        position = _find_end_of_string(document, quote + 1)
    return count


def _find_end_of_string(document: bytes, position: int) -> int:
    """Return the position after the string around `position`; the end of the document if it is unterminated."""
    while position < len(document):
        inside = _INSIDE_STRING.match(document, position, position + _SCAN_BYTES)
        end = position if inside is None else inside.end()
        if document[end : end + 1] == b'"':
            return end + 1
        if end == position:  # a backslash at the very end
            break
        position = end
    return len(document)
