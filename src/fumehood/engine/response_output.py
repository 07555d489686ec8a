"""Collects the output items of a response and appends its events to the log."""

from collections.abc import Sequence

from fumehood.engine.event_log import EventLog
from fumehood.protocol.openai.items import OutputItem, ProducedFile
from fumehood.protocol.openai.stream_events import StreamEvent


class ResponseOutput:
    """The output items of one response, by output index.

    produced_files: what hosted calls have produced so far, for citations.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._items: list[OutputItem | None] = []
        self.produced_files: list[ProducedFile] = []

    @property
    def items(self) -> list[OutputItem]:
        """The finished items, in order."""
        return [item for item in self._items if item is not None]

    def allocate_output_index(self) -> int:
        """Reserve the output index of a new item."""
        self._items.append(None)
        return len(self._items) - 1

    def set_item(self, output_index: int, item: OutputItem) -> None:
        self._items[output_index] = item

    def emit(self, events: Sequence[StreamEvent]) -> None:
        self._log.append(events)
