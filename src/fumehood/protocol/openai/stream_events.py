"""The stream events of a response.

Events contain all fields; `response_projection` removes what a client did not ask for. An event in a log never changes.
Only the engine sets `sequence_number`.
"""

import msgspec
from msgspec import Raw

from fumehood.protocol.openai.api_errors import ErrorDetail
from fumehood.protocol.openai.items import (
    Annotation,
    ContentPart,
    OutputItem,
    ShellCallOutputContent,
    SummaryText,
)
from fumehood.protocol.openai.responses import Response


class StreamEvent(msgspec.Struct, tag_field="type"):
    """An event of a response; numbered when it enters the event log."""

    sequence_number: int = -1


class ResponseEvent(StreamEvent, kw_only=True):
    """An event with the whole response."""

    response: Response


class ResponseCreated(ResponseEvent, tag="response.created"):
    pass


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    pass


class ResponseFailed(ResponseEvent, tag="response.failed"):
    pass


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """Also ends a cancelled foreground run: OpenAI has no event for that."""


class ErrorEvent(StreamEvent, kw_only=True, tag="error"):
    error: ErrorDetail


class OutputItemEvent(StreamEvent, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(OutputItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(OutputItemEvent, tag="response.output_item.done"):
    pass


class ContentPartEvent(StreamEvent, kw_only=True):
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class ContentPartAdded(ContentPartEvent, tag="response.content_part.added"):
    pass


class ContentPartDone(ContentPartEvent, tag="response.content_part.done"):
    pass


# gc=False: deltas come by the thousand and hold only strings and numbers.
class OutputTextDelta(StreamEvent, kw_only=True, gc=False, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Raw] = []


class OutputTextDone(StreamEvent, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Raw] = []


class OutputTextAnnotationAdded(StreamEvent, kw_only=True, tag="response.output_text.annotation.added"):
    item_id: str
    output_index: int
    content_index: int
    annotation_index: int
    annotation: Annotation


class RefusalDelta(StreamEvent, kw_only=True, gc=False, tag="response.refusal.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str


class RefusalDone(StreamEvent, kw_only=True, tag="response.refusal.done"):
    item_id: str
    output_index: int
    content_index: int
    refusal: str


class ReasoningTextDelta(StreamEvent, kw_only=True, gc=False, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(StreamEvent, kw_only=True, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str


class ReasoningSummaryPartAdded(StreamEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class ReasoningSummaryPartDone(StreamEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class ReasoningSummaryTextDelta(
    StreamEvent, kw_only=True, gc=False, tag="response.reasoning_summary_text.delta"
):
    item_id: str
    output_index: int
    summary_index: int
    delta: str


class ReasoningSummaryTextDone(StreamEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    item_id: str
    output_index: int
    summary_index: int
    text: str


class FunctionCallArgumentsDelta(
    StreamEvent, kw_only=True, gc=False, tag="response.function_call_arguments.delta"
):
    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(StreamEvent, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    arguments: str


class CustomToolCallInputDelta(
    StreamEvent, kw_only=True, gc=False, tag="response.custom_tool_call_input.delta"
):
    item_id: str
    output_index: int
    delta: str


class CustomToolCallInputDone(StreamEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    item_id: str
    output_index: int
    input: str


class CodeInterpreterCallCodeDelta(
    StreamEvent, kw_only=True, gc=False, tag="response.code_interpreter_call_code.delta"
):
    item_id: str
    output_index: int
    delta: str


class CodeInterpreterCallCodeDone(StreamEvent, kw_only=True, tag="response.code_interpreter_call_code.done"):
    item_id: str
    output_index: int
    code: str


class CodeInterpreterCallEvent(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class CodeInterpreterCallInProgress(
    CodeInterpreterCallEvent, tag="response.code_interpreter_call.in_progress"
):
    pass


class CodeInterpreterCallInterpreting(
    CodeInterpreterCallEvent, tag="response.code_interpreter_call.interpreting"
):
    pass


class CodeInterpreterCallCompleted(CodeInterpreterCallEvent, tag="response.code_interpreter_call.completed"):
    pass


class CodeInterpreterCallFailed(CodeInterpreterCallEvent, tag="response.code_interpreter_call.failed"):
    """Our extension: a call that timed out or lost its sandbox should not look completed."""


class ShellCallCommandAdded(StreamEvent, kw_only=True, tag="response.shell_call_command.added"):
    """A command starts; `command` is its text so far."""

    output_index: int
    command_index: int
    command: str = ""


class ShellCallCommandDelta(StreamEvent, kw_only=True, gc=False, tag="response.shell_call_command.delta"):
    output_index: int
    command_index: int
    delta: str


class ShellCallCommandDone(StreamEvent, kw_only=True, tag="response.shell_call_command.done"):
    output_index: int
    command_index: int
    command: str


class ShellOutputText(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Output of a command, on one stream or both."""

    stdout: str = ""
    stderr: str = ""


class ShellCallOutputDelta(
    StreamEvent, kw_only=True, gc=False, tag="response.shell_call_output_content.delta"
):
    item_id: str
    output_index: int
    command_index: int
    delta: ShellOutputText


class ShellCallOutputDone(StreamEvent, kw_only=True, tag="response.shell_call_output_content.done"):
    """The whole output of one command, with its outcome."""

    item_id: str
    output_index: int
    command_index: int
    output: list[ShellCallOutputContent]
