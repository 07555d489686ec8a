"""The events of a response that has ended, for whoever wants to see it as a stream again; imports msgspec, siblings.

What was told in many deltas is told in one: `fold(unfold(response)) == response`, but the stream is not the first one.
"""

from collections.abc import Iterator

import msgspec

from fumehood.protocol.errors import ErrorDetail
from fumehood.protocol.events import (
    AnnotationAdded,
    ArgumentsDelta,
    ArgumentsDone,
    CodeDelta,
    CodeDone,
    CommandAdded,
    CommandDelta,
    CommandDone,
    Completed,
    Created,
    CustomInputDelta,
    CustomInputDone,
    ErrorOccurred,
    Failed,
    Incomplete,
    InProgress,
    InterpreterCompleted,
    InterpreterFailed,
    InterpreterInProgress,
    InterpreterInterpreting,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    ShellOutputDelta,
    ShellOutputDone,
    ShellText,
    StreamEvent,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryTextDelta,
    SummaryTextDone,
    TextDelta,
    TextDone,
)
from fumehood.protocol.items import (
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
    SummaryText,
)
from fumehood.protocol.responses import Response


def unfold(response: Response) -> list[StreamEvent]:
    """From `created` to the end, numbered."""
    opening = _opening(response)
    events: list[StreamEvent] = [Created(response=opening), InProgress(response=opening)]
    for index, item in enumerate(response.output):
        events += _item(item, index)
    events += _ending(response)
    for number, event in enumerate(events):
        event.sequence_number = number
    return events


def _opening(response: Response) -> Response:
    return msgspec.structs.replace(
        response,
        status="in_progress",
        output=[],
        usage=None,
        completed_at=None,
        error=None,
        incomplete_details=None,
    )


def _ending(response: Response) -> list[StreamEvent]:
    if response.status == "completed":
        return [Completed(response=response)]
    if response.status == "failed" and response.error is not None:
        error = ErrorDetail(message=response.error.message, type="server_error", code=response.error.code)
        return [ErrorOccurred(error=error), Failed(response=response)]
    return [Incomplete(response=response)]


def _item(item: OutputItem, index: int) -> Iterator[StreamEvent]:
    match item:
        case Message():
            yield ItemAdded(output_index=index, item=Message(id=item.id, phase=item.phase))
            for number, part in enumerate(item.content):
                yield from _text(item.id, index, number, part)
        case Reasoning():
            yield ItemAdded(output_index=index, item=Reasoning(id=item.id))
            yield from _reasoning(item, index)
        case FunctionCall():
            empty = FunctionCall(id=item.id, call_id=item.call_id, name=item.name)
            yield ItemAdded(output_index=index, item=empty)
            yield ArgumentsDelta(item_id=item.id, output_index=index, delta=item.arguments)
            yield ArgumentsDone(item_id=item.id, output_index=index, arguments=item.arguments)
        case CustomToolCall():
            bare = CustomToolCall(id=item.id, call_id=item.call_id, name=item.name)
            yield ItemAdded(output_index=index, item=bare)
            yield CustomInputDelta(item_id=item.id, output_index=index, delta=item.input)
            yield CustomInputDone(item_id=item.id, output_index=index, input=item.input)
        case CodeInterpreterCall():
            yield ItemAdded(
                output_index=index, item=CodeInterpreterCall(id=item.id, container_id=item.container_id)
            )
            yield from _code(item, index)
        case ShellCall():
            action = msgspec.structs.replace(item.action, commands=[])
            unwritten = msgspec.structs.replace(item, action=action, status="in_progress")
            yield ItemAdded(output_index=index, item=unwritten)
            yield from _commands(item, index)
        case ShellCallOutput():
            silent = msgspec.structs.replace(item, output=[], status="in_progress")
            yield ItemAdded(output_index=index, item=silent)
            yield from _said(item, index)
        case _:  # of a server that authored it, whose own events are not known here
            yield ItemAdded(output_index=index, item=item)
    yield ItemDone(output_index=index, item=item)


def _text(item_id: str, index: int, number: int, part: OutputText | Refusal) -> Iterator[StreamEvent]:
    if isinstance(part, Refusal):
        yield PartAdded(item_id=item_id, output_index=index, content_index=number, part=Refusal())
        yield RefusalDelta(item_id=item_id, output_index=index, content_index=number, delta=part.refusal)
        yield RefusalDone(item_id=item_id, output_index=index, content_index=number, refusal=part.refusal)
    else:
        yield PartAdded(item_id=item_id, output_index=index, content_index=number, part=OutputText())
        yield TextDelta(
            item_id=item_id,
            output_index=index,
            content_index=number,
            delta=part.text,
            logprobs=part.logprobs,
        )
        for place, annotation in enumerate(part.annotations):
            yield AnnotationAdded(
                item_id=item_id,
                output_index=index,
                content_index=number,
                annotation_index=place,
                annotation=annotation,
            )
        yield TextDone(
            item_id=item_id, output_index=index, content_index=number, text=part.text, logprobs=part.logprobs
        )
    yield PartDone(item_id=item_id, output_index=index, content_index=number, part=part)


def _reasoning(item: Reasoning, index: int) -> Iterator[StreamEvent]:
    for number, part in enumerate(item.summary):
        yield SummaryPartAdded(item_id=item.id, output_index=index, summary_index=number, part=SummaryText())
        yield SummaryTextDelta(item_id=item.id, output_index=index, summary_index=number, delta=part.text)
        yield SummaryTextDone(item_id=item.id, output_index=index, summary_index=number, text=part.text)
        yield SummaryPartDone(item_id=item.id, output_index=index, summary_index=number, part=part)
    for number, part in enumerate(item.content or ()):
        yield PartAdded(item_id=item.id, output_index=index, content_index=number, part=ReasoningText())
        yield ReasoningTextDelta(item_id=item.id, output_index=index, content_index=number, delta=part.text)
        yield ReasoningTextDone(item_id=item.id, output_index=index, content_index=number, text=part.text)
        yield PartDone(item_id=item.id, output_index=index, content_index=number, part=part)


def _code(item: CodeInterpreterCall, index: int) -> Iterator[StreamEvent]:
    yield InterpreterInProgress(item_id=item.id, output_index=index)
    code = item.code or ""
    yield CodeDelta(item_id=item.id, output_index=index, delta=code)
    yield CodeDone(item_id=item.id, output_index=index, code=code)
    if item.status in ("completed", "failed"):
        yield InterpreterInterpreting(item_id=item.id, output_index=index)
        ended = InterpreterCompleted if item.status == "completed" else InterpreterFailed
        yield ended(item_id=item.id, output_index=index)


def _commands(item: ShellCall, index: int) -> Iterator[StreamEvent]:
    for number, command in enumerate(item.action.commands):
        yield CommandAdded(output_index=index, command_index=number)
        yield CommandDelta(output_index=index, command_index=number, delta=command)
        yield CommandDone(output_index=index, command_index=number, command=command)


def _said(item: ShellCallOutput, index: int) -> Iterator[StreamEvent]:
    for number, output in enumerate(item.output):
        if output.stdout or output.stderr:
            said = ShellText(output.stdout, output.stderr)
            yield ShellOutputDelta(item_id=item.id, output_index=index, command_index=number, delta=said)
        yield ShellOutputDone(item_id=item.id, output_index=index, command_index=number, output=[output])
