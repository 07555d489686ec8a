"""Calls that the client answers, as the model writes them; imports `protocol` and the standard library."""

import msgspec

from fumehood.protocol.events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    StreamEvent,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import CustomToolCall, FunctionCall, ItemStatus
from fumehood.protocol.streaming_json import StringField


class WrittenFunctionCall:
    """A call of one of the client's functions."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        self.id = new_id("fc")
        self.index = output_index
        self.call_id = call_id
        self.name = name
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> StreamEvent:
        return ItemAdded(output_index=self.index, item=self._item("", "in_progress"))

    def feed(self, delta: str) -> list[StreamEvent]:
        self._pieces.append(delta)
        return [ArgumentsDelta(item_id=self.id, output_index=self.index, delta=delta)]

    def end(self, status: ItemStatus) -> tuple[FunctionCall, list[StreamEvent]]:
        item = self._item(self.arguments, status)
        return item, [
            ArgumentsDone(item_id=self.id, output_index=self.index, arguments=item.arguments),
            ItemDone(output_index=self.index, item=item),
        ]

    def _item(self, arguments: str, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self.id, call_id=self.call_id, name=self.name, arguments=arguments, status=status
        )


class WrittenCustomCall:
    """A call of one of the client's custom tools, which a model calls like a function with the field `input`."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        self.id = new_id("ctc")
        self.index = output_index
        self.call_id = call_id
        self.name = name
        self._scanner = StringField("input")

    @property
    def arguments(self) -> str:
        return self._scanner.text

    def begin(self) -> StreamEvent:
        return ItemAdded(output_index=self.index, item=self._item("", "in_progress"))

    def feed(self, delta: str) -> list[StreamEvent]:
        found = self._scanner.feed(delta)
        return [CustomInputDelta(item_id=self.id, output_index=self.index, delta=found)] if found else []

    def end(self, status: ItemStatus) -> tuple[CustomToolCall, list[StreamEvent]]:
        item = self._item(self._scanner.value or "", status)
        return item, [
            CustomInputDone(item_id=self.id, output_index=self.index, input=item.input),
            ItemDone(output_index=self.index, item=item),
        ]

    def _item(self, text: str, status: ItemStatus) -> CustomToolCall:
        return CustomToolCall(id=self.id, call_id=self.call_id, name=self.name, input=text, status=status)


type WrittenCall = WrittenFunctionCall | WrittenCustomCall


def is_whole(arguments: str) -> bool:
    """Whether these are complete, so that no more of them can come."""
    try:
        return bool(arguments.strip()) and isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
