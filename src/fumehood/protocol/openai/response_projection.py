"""Projection: what one client sees of an event, an item or a response, given its `include` values."""

from collections.abc import Collection

import msgspec
from msgspec import UNSET

from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    ExecutionDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ShellCallOutput,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallFailed,
    ContentPartDone,
    OutputItemEvent,
    OutputTextDelta,
    OutputTextDone,
    ResponseEvent,
    ShellCallOutputDelta,
    ShellCallOutputDone,
    ShellCommandEvent,
    StreamEvent,
)

INCLUDE_CODE_OUTPUTS = "code_interpreter_call.outputs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_EXECUTION = "fumehood:execution"
INCLUDE_IMAGE_URLS = "message.input_image.image_url"
ONLY_OPENAI_EVENTS = "fumehood:openais_events"
"""Set by the gateway for clients that fail on events unknown to OpenAI; clients cannot ask for it."""

UNHANDLED_EVENTS = (
    ShellCommandEvent,
    ShellCallOutputDelta,
    ShellCallOutputDone,
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
)
"""Events of OpenAI's at which such clients fail, too. Nothing is lost without them: the items contain it all."""

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


def project_event(event: StreamEvent, include: Collection[str]) -> StreamEvent:
    """Return the event without fields that were not asked for; the same object if there are none."""
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
        # OpenAI ends every call so; the item says that it failed.
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
