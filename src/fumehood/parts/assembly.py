"""Parts of a stream, at any moment of it; imports its siblings."""

import msgspec

from fumehood.parts.canonical import Json, JsonObject, Part, Status, ToolCall, ToolResult
from fumehood.parts.convert import from_vendor, vendor_named
from fumehood.parts.streams import STREAMS

_OPEN = (None, "in_progress")


class Assembly:
    """Takes the events of one response as the vendor sends them, and has its items and parts whenever asked.

    After the last event they are what the vendor would have sent in one piece. Before, and after a stream that broke
    off, they are what has come: the beginning of a text, those arguments of a call that are whole.
    """

    def __init__(self, vendor: str) -> None:
        self._vendor = vendor_named(vendor).name
        self._stream = STREAMS[self._vendor]()

    def feed(self, event: Json) -> None:
        """Events that are not known are left alone."""
        if isinstance(event, dict):
            self._stream.feed(event)

    def document(self) -> Json:
        """The items, or the response, as far as they are here."""
        return self._stream.document()

    def parts(self, ended: Status | None = None) -> list[Part]:
        """`ended`: how calls ended that the stream has not told the end of, if it is over."""
        parts = from_vendor(self._vendor, self.document())
        tools = [part for part in parts if isinstance(part, ToolCall | ToolResult)]
        settled = {part.call_id for part in tools if part.call_id and part.status not in _OPEN}
        unfinished = self._stream.pieces.unfinished
        item = -1
        for part in parts:
            if part.source is not None and part.source.item is not msgspec.UNSET:
                item += 1
            if item in unfinished and isinstance(part, ToolCall | ToolResult) and part.status in _OPEN:
                part.status = part.status if part.call_id in settled else ended or "in_progress"
        return parts


def assembled(vendor: str, events: list[JsonObject]) -> Json:
    assembly = Assembly(vendor)
    for event in events:
        assembly.feed(event)
    return assembly.document()
