"""Aggregation: the response that a stream of events adds up to.

Aggregating projected events gives the projection of the aggregated response.
"""

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from fumehood.protocol.openai.items import (
    ApplyPatchCall,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    CodeInterpreterCallCodeDelta,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    ErrorEvent,
    FunctionCallArgumentsDelta,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    ReasoningSummaryPartAdded,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
    RefusalDelta,
    ResponseEvent,
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallOutputDone,
    StreamEvent,
)


def aggregate_events(events: Iterable[StreamEvent]) -> Response:
    """Return the response that these events describe. Raises ValueError for an event out of order.

    Items are built from their own events alone, so that a stream that contradicts its last event is noticed.
    """
    aggregator = ResponseAggregator()
    for event in events:
        aggregator.apply(event)
    return aggregator.response


class ResponseAggregator:
    """Builds a response event by event."""

    def __init__(self) -> None:
        self._response: Response | None = None
        self._items: dict[int, OutputItem] = {}

    @property
    def response(self) -> Response:
        """The response so far. Raises ValueError before the first event."""
        if self._response is None:
            raise ValueError("the stream does not begin with response.created")
        output = [self._items[index] for index in sorted(self._items)]
        return msgspec.structs.replace(self._response, output=output)

    def apply(self, event: StreamEvent) -> None:
        match event:
            case ResponseEvent():
                self._response = event.response
            case OutputItemAdded():
                if event.output_index in self._items:
                    raise ValueError(f"output index {event.output_index} was added twice")
                self._items[event.output_index] = _mutable_copy(event.item)
            case OutputItemDone():
                if event.output_index not in self._items:
                    raise ValueError(f"output index {event.output_index} is done but was never added")
                self._items[event.output_index] = event.item
            case ErrorEvent():
                pass
            case _:
                self._apply_to_item(event)

    def _apply_to_item(self, event: StreamEvent) -> None:
        index = getattr(event, "output_index", None)
        if index is None:
            return
        if index not in self._items:
            raise ValueError(f"{type(event).__name__} for output index {index}, which was never added")
        _apply_to_output_item(self._items[index], event)


def _mutable_copy(item: OutputItem) -> OutputItem:
    """Copy an item, so that deltas do not change the one in the event."""
    match item:
        case OutputMessage():
            return msgspec.structs.replace(item, content=list(item.content))
        case ReasoningItem():
            content = item.content if item.content is UNSET else list(item.content)
            return msgspec.structs.replace(item, content=content, summary=list(item.summary))
        case FunctionCall() | CustomToolCall() | CodeInterpreterCall():
            return msgspec.structs.replace(item)
        case ShellCall():
            action = msgspec.structs.replace(item.action, commands=list(item.action.commands))
            return msgspec.structs.replace(item, action=action)
        case ShellCallOutput():
            return msgspec.structs.replace(item, output=list(item.output))
        case ApplyPatchCall():
            return msgspec.structs.replace(item, operation=msgspec.structs.replace(item.operation))
        case _:
            return item


def _apply_to_output_item(item: OutputItem, event: StreamEvent) -> None:
    match item, event:
        case (OutputMessage(), ContentPartAdded(part=OutputText() | Refusal() as part)):
            item.content.append(msgspec.structs.replace(part))
        case (OutputMessage(), ContentPartDone(part=OutputText() | Refusal() as part)):
            item.content[event.content_index] = msgspec.structs.replace(part)
        case (OutputMessage(), OutputTextDelta() | RefusalDelta() | OutputTextAnnotationAdded()):
            _apply_to_part(item.content[event.content_index], event)
        case (ReasoningItem(), ContentPartAdded(part=ReasoningText() as part)):
            item.content = [*(item.content or []), msgspec.structs.replace(part)]
        case (ReasoningItem(), ReasoningTextDelta()):
            content = item.content or []
            content[event.content_index].text += event.delta
        case (ReasoningItem(), ReasoningSummaryPartAdded()):
            item.summary.append(msgspec.structs.replace(event.part))
        case (ReasoningItem(), ReasoningSummaryTextDelta()):
            item.summary[event.summary_index].text += event.delta
        case (FunctionCall(), FunctionCallArgumentsDelta()):
            item.arguments += event.delta
        case (CustomToolCall(), CustomToolCallInputDelta()):
            item.input += event.delta
        case (CodeInterpreterCall(), CodeInterpreterCallCodeDelta()):
            item.code = (item.code or "") + event.delta
        case (ShellCall() | ShellCallOutput() | ApplyPatchCall(), _):
            _apply_to_tool_item(item, event)
        case _:
            pass


def _apply_to_tool_item(item: ShellCall | ShellCallOutput | ApplyPatchCall, event: StreamEvent) -> None:
    match item, event:
        case (ApplyPatchCall(), ApplyPatchDiffDelta()):
            item.operation.diff = (item.operation.diff or "") + event.delta
        case (ShellCall(), ShellCallCommandAdded()):
            item.action.commands.append(event.command)
        case (ShellCall(), ShellCallCommandDelta()):
            item.action.commands[event.command_index] += event.delta
        case (ShellCallOutput(), ShellCallOutputDone()):
            item.output += event.output
        case _:
            pass


def _apply_to_part(
    part: OutputText | Refusal, event: OutputTextDelta | RefusalDelta | OutputTextAnnotationAdded
) -> None:
    match part, event:
        case (OutputText(), OutputTextDelta()):
            part.text += event.delta
            part.logprobs = [*part.logprobs, *event.logprobs]
        case (OutputText(), OutputTextAnnotationAdded()):
            part.annotations = [*part.annotations, event.annotation]
        case (Refusal(), RefusalDelta()):
            part.refusal += event.delta
        case _:
            raise ValueError(f"{type(event).__name__} does not belong to a {type(part).__name__}")
