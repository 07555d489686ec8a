"""Replay: the events of a finished response, for streaming it again.

Each text is one delta, so the stream differs from the first one, but
`aggregate_events(replay_response(response)) == response`.
"""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from fumehood.protocol.openai.api_errors import ErrorDetail
from fumehood.protocol.openai.items import (
    ApplyPatchCall,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    LocalShellAction,
    LocalShellCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
    SummaryText,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.shell_command_stream import make_command_events
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallFailed,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    ErrorEvent,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ShellCallOutputDelta,
    ShellCallOutputDone,
    ShellOutputText,
    StreamEvent,
)


def replay_response(response: Response) -> list[StreamEvent]:
    """Return the numbered events of a response."""
    initial = _initial_response(response)
    events: list[StreamEvent] = [ResponseCreated(response=initial), ResponseInProgress(response=initial)]
    for index, item in enumerate(response.output):
        events += _item_events(item, index)
    error = response.error and ErrorDetail(
        message=response.error.message, type="server_error", code=response.error.code
    )
    events += make_terminal_events(response, error)
    for number, event in enumerate(events):
        event.sequence_number = number
    return events


def _initial_response(response: Response) -> Response:
    return msgspec.structs.replace(
        response,
        status="in_progress",
        output=[],
        usage=None,
        completed_at=None,
        error=None,
        incomplete_details=None,
    )


def make_terminal_events(response: Response, error: ErrorDetail | None) -> list[StreamEvent]:
    """The last events of a response, by its status. error: why it failed."""
    if response.status == "completed":
        return [ResponseCompleted(response=response)]
    if response.status == "failed" and error is not None:
        return [ErrorEvent(error=error), ResponseFailed(response=response)]
    return [ResponseIncomplete(response=response)]


def _item_events(item: OutputItem, index: int) -> Iterator[StreamEvent]:
    match item:
        case OutputMessage():
            yield OutputItemAdded(output_index=index, item=OutputMessage(id=item.id, phase=item.phase))
            for number, part in enumerate(item.content):
                yield from _text_part_events(item.id, index, number, part)
        case ReasoningItem():
            yield OutputItemAdded(output_index=index, item=ReasoningItem(id=item.id))
            yield from _reasoning_events(item, index)
        case FunctionCall():
            empty = FunctionCall(id=item.id, call_id=item.call_id, name=item.name)
            yield OutputItemAdded(output_index=index, item=empty)
            yield FunctionCallArgumentsDelta(item_id=item.id, output_index=index, delta=item.arguments)
            yield FunctionCallArgumentsDone(item_id=item.id, output_index=index, arguments=item.arguments)
        case CustomToolCall():
            empty = CustomToolCall(id=item.id, call_id=item.call_id, name=item.name)
            yield OutputItemAdded(output_index=index, item=empty)
            yield CustomToolCallInputDelta(item_id=item.id, output_index=index, delta=item.input)
            yield CustomToolCallInputDone(item_id=item.id, output_index=index, input=item.input)
        case CodeInterpreterCall():
            yield OutputItemAdded(
                output_index=index, item=CodeInterpreterCall(id=item.id, container_id=item.container_id)
            )
            yield from _code_events(item, index)
        case ShellCall():
            action = msgspec.structs.replace(item.action, commands=[])
            empty = msgspec.structs.replace(item, action=action, status="in_progress")
            yield OutputItemAdded(output_index=index, item=empty)
            yield from make_command_events(item.action.commands, index)
        case ShellCallOutput():
            empty = msgspec.structs.replace(item, output=[], status="in_progress")
            yield OutputItemAdded(output_index=index, item=empty)
            yield from _shell_output_events(item, index)
        case LocalShellCall():
            empty = msgspec.structs.replace(item, action=LocalShellAction(), status="in_progress")
            yield OutputItemAdded(output_index=index, item=empty)
        case ApplyPatchCall():
            yield from _patch_events(item, index)
        case _:  # authored by a model server; its delta events are unknown
            yield OutputItemAdded(output_index=index, item=item)
    yield OutputItemDone(output_index=index, item=item)


def _text_part_events(
    item_id: str, index: int, number: int, part: OutputText | Refusal
) -> Iterator[StreamEvent]:
    if isinstance(part, Refusal):
        yield ContentPartAdded(item_id=item_id, output_index=index, content_index=number, part=Refusal())
        yield RefusalDelta(item_id=item_id, output_index=index, content_index=number, delta=part.refusal)
        yield RefusalDone(item_id=item_id, output_index=index, content_index=number, refusal=part.refusal)
    else:
        yield ContentPartAdded(item_id=item_id, output_index=index, content_index=number, part=OutputText())
        yield OutputTextDelta(
            item_id=item_id,
            output_index=index,
            content_index=number,
            delta=part.text,
            logprobs=part.logprobs,
        )
        for position, annotation in enumerate(part.annotations):
            yield OutputTextAnnotationAdded(
                item_id=item_id,
                output_index=index,
                content_index=number,
                annotation_index=position,
                annotation=annotation,
            )
        yield OutputTextDone(
            item_id=item_id, output_index=index, content_index=number, text=part.text, logprobs=part.logprobs
        )
    yield ContentPartDone(item_id=item_id, output_index=index, content_index=number, part=part)


def _reasoning_events(item: ReasoningItem, index: int) -> Iterator[StreamEvent]:
    for number, part in enumerate(item.summary):
        yield ReasoningSummaryPartAdded(
            item_id=item.id, output_index=index, summary_index=number, part=SummaryText()
        )
        yield ReasoningSummaryTextDelta(
            item_id=item.id, output_index=index, summary_index=number, delta=part.text
        )
        yield ReasoningSummaryTextDone(
            item_id=item.id, output_index=index, summary_index=number, text=part.text
        )
        yield ReasoningSummaryPartDone(item_id=item.id, output_index=index, summary_index=number, part=part)
    for number, part in enumerate(item.content or ()):
        yield ContentPartAdded(
            item_id=item.id, output_index=index, content_index=number, part=ReasoningText()
        )
        yield ReasoningTextDelta(item_id=item.id, output_index=index, content_index=number, delta=part.text)
        yield ReasoningTextDone(item_id=item.id, output_index=index, content_index=number, text=part.text)
        yield ContentPartDone(item_id=item.id, output_index=index, content_index=number, part=part)


def _code_events(item: CodeInterpreterCall, index: int) -> Iterator[StreamEvent]:
    yield CodeInterpreterCallInProgress(item_id=item.id, output_index=index)
    code = item.code or ""
    yield CodeInterpreterCallCodeDelta(item_id=item.id, output_index=index, delta=code)
    yield CodeInterpreterCallCodeDone(item_id=item.id, output_index=index, code=code)
    if item.status in ("completed", "failed"):
        yield CodeInterpreterCallInterpreting(item_id=item.id, output_index=index)
        end_event = CodeInterpreterCallCompleted if item.status == "completed" else CodeInterpreterCallFailed
        yield end_event(item_id=item.id, output_index=index)


def _patch_events(item: ApplyPatchCall, index: int) -> Iterator[StreamEvent]:
    diff = item.operation.diff
    empty = item.operation if diff is UNSET else msgspec.structs.replace(item.operation, diff="")
    yield OutputItemAdded(
        output_index=index, item=msgspec.structs.replace(item, operation=empty, status="in_progress")
    )
    if diff is not UNSET:
        yield ApplyPatchDiffDelta(item_id=item.id, output_index=index, delta=diff)
        yield ApplyPatchDiffDone(item_id=item.id, output_index=index, diff=diff)


def _shell_output_events(item: ShellCallOutput, index: int) -> Iterator[StreamEvent]:
    for number, output in enumerate(item.output):
        if output.stdout or output.stderr:
            delta = ShellOutputText(output.stdout, output.stderr)
            yield ShellCallOutputDelta(item_id=item.id, output_index=index, command_index=number, delta=delta)
        yield ShellCallOutputDone(item_id=item.id, output_index=index, command_index=number, output=[output])
