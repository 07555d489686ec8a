"""What a client sees of a run, and what response its events add up to; imports msgspec and siblings.

Both are pure, and they commute: projecting every event and folding them gives the projection of the fold.
"""

from collections.abc import Collection, Iterable

import msgspec
from msgspec import UNSET

from fumehood.protocol.events import (
    AnnotationAdded,
    ArgumentsDelta,
    CodeDelta,
    CommandAdded,
    CommandDelta,
    CustomInputDelta,
    ErrorOccurred,
    InterpreterCompleted,
    InterpreterFailed,
    ItemAdded,
    ItemDone,
    ItemEvent,
    PartAdded,
    PartDone,
    ReasoningTextDelta,
    RefusalDelta,
    ResponseEvent,
    ShellOutputDone,
    StreamEvent,
    SummaryPartAdded,
    SummaryTextDelta,
    TextDelta,
    TextDone,
)
from fumehood.protocol.items import (
    CodeInterpreterCall,
    CustomToolCall,
    Execution,
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
)
from fumehood.protocol.responses import Response

OUTPUTS = "code_interpreter_call.outputs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
EXECUTION = "fumehood:execution"
IMAGE_URLS = "message.input_image.image_url"
OPENAIS_EVENTS = "fumehood:openais_events"
"""Not for clients to ask for: this one breaks off at events that are not OpenAI's."""

INCLUDABLE = frozenset(
    {
        OUTPUTS,
        ENCRYPTED_REASONING,
        LOGPROBS,
        EXECUTION,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        IMAGE_URLS,
        "computer_call_output.output.image_url",
    }
)


# --- what a client sees -------------------------------------------------------------------------------


def project(event: StreamEvent, include: Collection[str]) -> StreamEvent:
    """The event with what was not asked for left out; the very same object where there is nothing to leave out."""
    if isinstance(event, ItemEvent):
        item = project_item(event.item, include)
        return event if item is event.item else msgspec.structs.replace(event, item=item)
    if isinstance(event, ResponseEvent):
        response = project_response(event.response, include)
        return event if response is event.response else msgspec.structs.replace(event, response=response)
    if isinstance(event, (TextDelta, TextDone)) and event.logprobs and LOGPROBS not in include:
        return msgspec.structs.replace(event, logprobs=[])
    if isinstance(event, PartDone) and isinstance(event.part, OutputText):
        part = _project_text(event.part, include)
        return event if part is event.part else msgspec.structs.replace(event, part=part)
    if isinstance(event, InterpreterFailed) and OPENAIS_EVENTS in include:
        # As OpenAI ends a call, however it went; its item says that it failed.
        return InterpreterCompleted(
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
            hide_outputs = item.outputs is not None and OUTPUTS not in include
            hide_execution = item.execution is not UNSET and EXECUTION not in include
            if not hide_outputs and not hide_execution:
                return item
            return msgspec.structs.replace(
                item,
                outputs=None if hide_outputs else item.outputs,
                execution=UNSET if hide_execution else item.execution,
            )
        case ShellCallOutput(execution=Execution()) if EXECUTION not in include:
            return msgspec.structs.replace(item, execution=UNSET)
        case Reasoning(encrypted_content=str()) if ENCRYPTED_REASONING not in include:
            return msgspec.structs.replace(item, encrypted_content=UNSET)
        case Message():
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
    return msgspec.structs.replace(part, logprobs=[]) if part.logprobs and LOGPROBS not in include else part


# --- what it all adds up to ---------------------------------------------------------------------------


def fold(events: Iterable[StreamEvent]) -> Response:
    """The response after these events, from the first on. Its items are built from their own events alone, so that
    a stream which does not add up to its last event is found out. Raises ValueError where an event cannot follow.
    """
    folded = Fold()
    for event in events:
        folded.apply(event)
    return folded.response


class Fold:
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
            case ItemAdded():
                if event.output_index in self._items:
                    raise ValueError(f"output index {event.output_index} was added twice")
                self._items[event.output_index] = _copy(event.item)
            case ItemDone():
                if event.output_index not in self._items:
                    raise ValueError(f"output index {event.output_index} is done and was never added")
                self._items[event.output_index] = event.item
            case ErrorOccurred():
                pass
            case _:
                self._apply_to_item(event)

    def _apply_to_item(self, event: StreamEvent) -> None:
        index = getattr(event, "output_index", None)
        if index is None:
            return
        if index not in self._items:
            raise ValueError(f"{type(event).__name__} for output index {index}, which was never added")
        _grow(self._items[index], event)


def _copy(item: OutputItem) -> OutputItem:
    """An item that may grow: the event's own stays as it was sent."""
    match item:
        case Message():
            return msgspec.structs.replace(item, content=list(item.content))
        case Reasoning():
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


def _grow(item: OutputItem, event: StreamEvent) -> None:
    match item, event:
        case (Message(), PartAdded(part=OutputText() | Refusal() as part)):
            item.content.append(msgspec.structs.replace(part))
        case (Message(), PartDone(part=OutputText() | Refusal() as part)):
            item.content[event.content_index] = msgspec.structs.replace(part)
        case (Message(), TextDelta() | RefusalDelta() | AnnotationAdded()):
            _grow_part(item.content[event.content_index], event)
        case (Reasoning(), PartAdded(part=ReasoningText() as part)):
            item.content = [*(item.content or []), msgspec.structs.replace(part)]
        case (Reasoning(), ReasoningTextDelta()):
            content = item.content or []
            content[event.content_index].text += event.delta
        case (Reasoning(), SummaryPartAdded()):
            item.summary.append(msgspec.structs.replace(event.part))
        case (Reasoning(), SummaryTextDelta()):
            item.summary[event.summary_index].text += event.delta
        case (FunctionCall(), ArgumentsDelta()):
            item.arguments += event.delta
        case (CustomToolCall(), CustomInputDelta()):
            item.input += event.delta
        case (CodeInterpreterCall(), CodeDelta()):
            item.code = (item.code or "") + event.delta
        case (ShellCall() | ShellCallOutput(), _):
            _grow_shell(item, event)
        case _:
            pass


def _grow_shell(item: ShellCall | ShellCallOutput, event: StreamEvent) -> None:
    match item, event:
        case (ShellCall(), CommandAdded()):
            item.action.commands.append(event.command)
        case (ShellCall(), CommandDelta()):
            item.action.commands[event.command_index] += event.delta
        case (ShellCallOutput(), ShellOutputDone()):
            item.output += event.output
        case _:
            pass


def _grow_part(part: OutputText | Refusal, event: TextDelta | RefusalDelta | AnnotationAdded) -> None:
    match part, event:
        case (OutputText(), TextDelta()):
            part.text += event.delta
            part.logprobs = [*part.logprobs, *event.logprobs]
        case (OutputText(), AnnotationAdded()):
            part.annotations = [*part.annotations, event.annotation]
        case (Refusal(), RefusalDelta()):
            part.refusal += event.delta
        case _:
            raise ValueError(f"{type(event).__name__} does not belong to a {type(part).__name__}")
