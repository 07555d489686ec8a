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


class ItemEvent(StreamEvent, kw_only=True):
    """An event of one output item."""

    item_id: str
    output_index: int


class ContentEvent(ItemEvent, kw_only=True):
    """An event of one content part."""

    content_index: int


class SummaryEvent(ItemEvent, kw_only=True):
    """An event of one paragraph of a reasoning summary."""

    summary_index: int


class ShellCommandEvent(StreamEvent, kw_only=True):
    """An event of one command of a shell call."""

    output_index: int
    command_index: int


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


class ContentPartEvent(ContentEvent, kw_only=True):
    part: ContentPart


class ContentPartAdded(ContentPartEvent, tag="response.content_part.added"):
    pass


class ContentPartDone(ContentPartEvent, tag="response.content_part.done"):
    pass


# gc=False: deltas come by the thousand and hold only strings and numbers.
class OutputTextDelta(ContentEvent, kw_only=True, gc=False, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Raw] = []


class OutputTextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Raw] = []


class OutputTextAnnotationAdded(ContentEvent, kw_only=True, tag="response.output_text.annotation.added"):
    annotation_index: int
    annotation: Annotation


class RefusalDelta(ContentEvent, kw_only=True, gc=False, tag="response.refusal.delta"):
    delta: str


class RefusalDone(ContentEvent, kw_only=True, tag="response.refusal.done"):
    refusal: str


class ReasoningTextDelta(ContentEvent, kw_only=True, gc=False, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ReasoningSummaryPartAdded(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class ReasoningSummaryPartDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class ReasoningSummaryTextDelta(
    SummaryEvent, kw_only=True, gc=False, tag="response.reasoning_summary_text.delta"
):
    delta: str


class ReasoningSummaryTextDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class FunctionCallArgumentsDelta(
    ItemEvent, kw_only=True, gc=False, tag="response.function_call_arguments.delta"
):
    delta: str


class FunctionCallArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    arguments: str


class CustomToolCallInputDelta(
    ItemEvent, kw_only=True, gc=False, tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomToolCallInputDone(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


class CodeInterpreterCallCodeDelta(
    ItemEvent, kw_only=True, gc=False, tag="response.code_interpreter_call_code.delta"
):
    delta: str


class CodeInterpreterCallCodeDone(ItemEvent, kw_only=True, tag="response.code_interpreter_call_code.done"):
    code: str


class CodeInterpreterCallInProgress(ItemEvent, tag="response.code_interpreter_call.in_progress"):
    pass


class CodeInterpreterCallInterpreting(ItemEvent, tag="response.code_interpreter_call.interpreting"):
    pass


class CodeInterpreterCallCompleted(ItemEvent, tag="response.code_interpreter_call.completed"):
    pass


class CodeInterpreterCallFailed(ItemEvent, tag="response.code_interpreter_call.failed"):
    """Our extension: a call that timed out or lost its sandbox should not look completed."""


class ShellCallCommandAdded(ShellCommandEvent, kw_only=True, tag="response.shell_call_command.added"):
    """A command starts; `command` is its text so far."""

    command: str = ""


class ShellCallCommandDelta(
    ShellCommandEvent, kw_only=True, gc=False, tag="response.shell_call_command.delta"
):
    delta: str


class ShellCallCommandDone(ShellCommandEvent, kw_only=True, tag="response.shell_call_command.done"):
    command: str


class ApplyPatchDiffDelta(
    ItemEvent, kw_only=True, gc=False, tag="response.apply_patch_call_operation_diff.delta"
):
    """Part of the diff. OpenAI sends it and `ApplyPatchDiffDone`; its SDKs have no types for them."""

    delta: str


class ApplyPatchDiffDone(ItemEvent, kw_only=True, tag="response.apply_patch_call_operation_diff.done"):
    diff: str


class ShellOutputText(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Output of a command, on one stream or both."""

    stdout: str = ""
    stderr: str = ""


class ShellCallOutputDelta(ItemEvent, kw_only=True, gc=False, tag="response.shell_call_output_content.delta"):
    command_index: int
    delta: ShellOutputText


class ShellCallOutputDone(ItemEvent, kw_only=True, tag="response.shell_call_output_content.done"):
    """The whole output of one command, with its outcome."""

    command_index: int
    output: list[ShellCallOutputContent]


type PassthroughItemEvent = (
    ShellCallCommandAdded
    | ShellCallCommandDelta
    | ShellCallCommandDone
    | ApplyPatchDiffDelta
    | ApplyPatchDiffDone
)
"""Events of items that a model server makes; the client gets them as they are, but for the output index."""
