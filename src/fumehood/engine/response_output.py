"""The output of a response in the making, and the way of its events into the log."""

from collections.abc import Sequence

from fumehood.engine.event_log import EventLog
from fumehood.protocol.openai.items import OutputItem, ProducedFile
from fumehood.protocol.openai.stream_events import StreamEvent


class ResponseOutput:
    """The items of one response, each at its place, and the way of events into its log.

    files: what hosted calls have produced so far, for citations.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._items: list[OutputItem | None] = []
        self.produced_files: list[ProducedFile] = []

    @property
    def items(self) -> list[OutputItem]:
        """Those that are done, in their order."""
        return [item for item in self._items if item is not None]

    def allocate_output_index(self) -> int:
        """The output index of an item that begins now."""
        self._items.append(None)
        return len(self._items) - 1

    def set_item(self, output_index: int, item: OutputItem) -> None:
        self._items[output_index] = item

    def emit(self, events: Sequence[StreamEvent]) -> None:
        self._log.append(events)
