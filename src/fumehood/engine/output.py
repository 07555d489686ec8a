"""The output of a response in the making, and the way of its events into the log; imports `protocol` and siblings."""

from collections.abc import Sequence

from fumehood.engine.log import EventLog
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.items import OutputItem, ProducedFile


class Output:
    """The items of one response, each at its place, and the way of events into its log.

    files: what hosted calls have produced so far, for citations.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._items: list[OutputItem | None] = []
        self.files: list[ProducedFile] = []

    @property
    def items(self) -> list[OutputItem]:
        """Those that are done, in their order."""
        return [item for item in self._items if item is not None]

    def place(self) -> int:
        """The output index of an item that begins now."""
        self._items.append(None)
        return len(self._items) - 1

    def finish(self, output_index: int, item: OutputItem) -> None:
        self._items[output_index] = item

    def emit(self, events: Sequence[StreamEvent]) -> None:
        self._log.extend(events)
