"""Build calls of client tools from the fragments that the model writes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import CustomToolCall, FunctionCall, ItemStatus, OutputItem
from fumehood.protocol.openai.stream_events import (
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    StreamEvent,
)
from fumehood.protocol.streaming_json import StringFieldScanner


class ClientCallBuilder(ABC):
    """Builds one call: its events, then its item."""

    def __init__(self, prefix: str, output_index: int, call_id: str, name: str) -> None:
        self.id = new_id(prefix)
        self.index = output_index
        self.call_id = call_id
        self.name = name

    @property
    @abstractmethod
    def arguments(self) -> str:
        """The arguments so far."""

    def begin(self) -> StreamEvent:
        return OutputItemAdded(output_index=self.index, item=self._build_item("in_progress"))

    @abstractmethod
    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]: ...

    def end(self, status: ItemStatus) -> tuple[OutputItem, Sequence[StreamEvent]]:
        item = self._build_item(status)
        return item, [self._make_done_event(), OutputItemDone(output_index=self.index, item=item)]

    @abstractmethod
    def _build_item(self, status: ItemStatus) -> OutputItem: ...

    @abstractmethod
    def _make_done_event(self) -> StreamEvent: ...


class FunctionCallBuilder(ClientCallBuilder):
    """Builds a function call."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__("fc", output_index, call_id, name)
        self._fragments: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._fragments)

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._fragments += fragments
        return [
            FunctionCallArgumentsDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in fragments
        ]

    def _build_item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self.id, call_id=self.call_id, name=self.name, arguments=self.arguments, status=status
        )

    def _make_done_event(self) -> StreamEvent:
        return FunctionCallArgumentsDone(item_id=self.id, output_index=self.index, arguments=self.arguments)


class CustomCallBuilder(ClientCallBuilder):
    """Builds a call of a custom tool, which the model calls as a function with the string field `input`."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__("ctc", output_index, call_id, name)
        self._scanner = StringFieldScanner("input")

    @property
    def arguments(self) -> str:
        return self._scanner.text

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        return [
            CustomToolCallInputDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in self._scanner.feed(fragments)
        ]

    @property
    def _input(self) -> str:
        return self._scanner.value or ""

    def _build_item(self, status: ItemStatus) -> CustomToolCall:
        return CustomToolCall(
            id=self.id, call_id=self.call_id, name=self.name, input=self._input, status=status
        )

    def _make_done_event(self) -> StreamEvent:
        return CustomToolCallInputDone(item_id=self.id, output_index=self.index, input=self._input)


def is_complete_json(arguments: str) -> bool:
    """Whether the arguments are a complete JSON object, so that nothing can follow."""
    try:
        return bool(arguments.strip()) and isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
