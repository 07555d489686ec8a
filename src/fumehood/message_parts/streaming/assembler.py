"""Assembly of a vendor's stream into items and parts, at any point of the stream."""

import msgspec

from fumehood.message_parts.canonical_parts import (
    Json,
    Part,
    Status,
    ToolPart,
)
from fumehood.message_parts.conversion import from_vendor, get_vendor

_OPEN_STATUSES = (None, "in_progress")


class StreamAssembler:
    """Accepts the events of one response and returns its items and parts at any time.

    After the last event they are what the vendor would have sent without streaming. Before, or after an interrupted
    stream, they are what has arrived: the start of a text, the complete arguments of a call.
    """

    def __init__(self, vendor: str) -> None:
        self._vendor = vendor
        self._stream = get_vendor(vendor).stream()

    def feed(self, event: Json) -> None:
        """Add an event. Unknown events are ignored."""
        if isinstance(event, dict):
            self._stream.feed(event)

    def build_document(self) -> Json:
        """Return the items, or the response, as far as they have arrived."""
        return self._stream.build_document()

    def build_parts(self, end_status: Status | None = None) -> list[Part]:
        """Return the parts. end_status: the status of unfinished calls if the stream has ended."""
        parts = from_vendor(self._vendor, self.build_document())
        tools = [part for part in parts if isinstance(part, ToolPart)]
        settled = {part.call_id for part in tools if part.call_id and part.status not in _OPEN_STATUSES}
        unfinished = self._stream.partial_items.unfinished_positions
        item = -1
        for part in parts:
            if part.source is not None and part.source.item is not msgspec.UNSET:
                item += 1
            if item in unfinished and isinstance(part, ToolPart) and part.status in _OPEN_STATUSES:
                part.status = part.status if part.call_id in settled else end_status or "in_progress"
        return parts
