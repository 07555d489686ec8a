"""What a client sees of a run, and what response its events add up to.

Both are pure, and they commute: projecting every event and folding them gives the projection of the fold.
"""

from collections.abc import Collection, Iterable

import msgspec
from msgspec import UNSET

from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    CustomToolCall,
    ExecutionDetails,
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
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallFailed,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    ErrorEvent,
    FunctionCallArgumentsDelta,
    OutputItemAdded,
    OutputItemDone,
    OutputItemEvent,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    OutputTextDone,
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

INCLUDE_CODE_OUTPUTS = "code_interpreter_call.outputs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_EXECUTION = "fumehood:execution"
INCLUDE_IMAGE_URLS = "message.input_image.image_url"
ONLY_OPENAI_EVENTS = "fumehood:openais_events"
"""Not for clients to ask for: this one breaks off at events that are not OpenAI's."""

INCLUDE_VALUES = frozenset(
    {
        INCLUDE_CODE_OUTPUTS,
        INCLUDE_ENCRYPTED_REASONING,
        INCLUDE_LOGPROBS,
        INCLUDE_EXECUTION,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        INCLUDE_IMAGE_URLS,
        "computer_call_output.output.image_url",
    }
)


# --- what a client sees -------------------------------------------------------------------------------


def project_event(event: StreamEvent, include: Collection[str]) -> StreamEvent:
    """The event with what was not asked for left out; the very same object where there is nothing to leave out."""
    if isinstance(event, OutputItemEvent):
        item = project_item(event.item, include)
        return event if item is event.item else msgspec.structs.replace(event, item=item)
    if isinstance(event, ResponseEvent):
        response = project_response(event.response, include)
        return event if response is event.response else msgspec.structs.replace(event, response=response)
    if (
        isinstance(event, (OutputTextDelta, OutputTextDone))
        and event.logprobs
        and INCLUDE_LOGPROBS not in include
    ):
        return msgspec.structs.replace(event, logprobs=[])
    if isinstance(event, ContentPartDone) and isinstance(event.part, OutputText):
        part = _project_text(event.part, include)
        return event if part is event.part else msgspec.structs.replace(event, part=part)
    if isinstance(event, CodeInterpreterCallFailed) and ONLY_OPENAI_EVENTS in include:
        # As OpenAI ends a call, however it went; its item says that it failed.
        return CodeInterpreterCallCompleted(
            sequence_number=event.sequence_number, item_id=event.item_id, output_index=event.output_index
        )
    return event


def project_response(response: Response, include: Collection[str]) -> Response:
    output = [project_item(item, include) for item in response.output]
    if all(mine is theirs for mine, theirs in zip(output, response.output, strict=True)):
        return response
    return msgspec.structs.replace(response, output=output)


def project_item(item: OutputItem, include: Collection[str]) -> OutputItem:
    match item:
        case CodeInterpreterCall():
            hide_outputs = item.outputs is not None and INCLUDE_CODE_OUTPUTS not in include
            hide_execution = item.execution is not UNSET and INCLUDE_EXECUTION not in include
            if not hide_outputs and not hide_execution:
                return item
            return msgspec.structs.replace(
                item,
                outputs=None if hide_outputs else item.outputs,
                execution=UNSET if hide_execution else item.execution,
            )
        case ShellCallOutput(execution=ExecutionDetails()) if INCLUDE_EXECUTION not in include:
            return msgspec.structs.replace(item, execution=UNSET)
        case ReasoningItem(encrypted_content=str()) if INCLUDE_ENCRYPTED_REASONING not in include:
            return msgspec.structs.replace(item, encrypted_content=UNSET)
        case OutputMessage():
            content = [
                _project_text(part, include) if isinstance(part, OutputText) else part
                for part in item.content
            ]
            if all(mine is theirs for mine, theirs in zip(content, item.content, strict=True)):
                return item
            return msgspec.structs.replace(item, content=content)
        case _:
            return item


def _project_text(part: OutputText, include: Collection[str]) -> OutputText:
    return (
        msgspec.structs.replace(part, logprobs=[])
        if part.logprobs and INCLUDE_LOGPROBS not in include
        else part
    )


# --- what it all adds up to ---------------------------------------------------------------------------


def aggregate_events(events: Iterable[StreamEvent]) -> Response:
    """The response after these events, from the first on. Its items are built from their own events alone, so that
    a stream which does not add up to its last event is found out. Raises ValueError where an event cannot follow.
    """
    folded = ResponseAggregator()
    for event in events:
        folded.apply(event)
    return folded.response


class ResponseAggregator:
    """A response in the making, event by event."""

    def __init__(self) -> None:
        self._response: Response | None = None
        self._items: dict[int, OutputItem] = {}

    @property
    def response(self) -> Response:
        """The response as it stands; raises ValueError before the first event."""
        if self._response is None:
            raise ValueError("a stream begins with response.created")
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
                    raise ValueError(f"output index {event.output_index} is done and was never added")
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
    """An item that may grow: the event's own stays as it was sent."""
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
        case (ShellCall() | ShellCallOutput(), _):
            _apply_to_shell_item(item, event)
        case _:
            pass


def _apply_to_shell_item(item: ShellCall | ShellCallOutput, event: StreamEvent) -> None:
    match item, event:
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
