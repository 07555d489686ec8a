"""Items of a conversation: our own as Structs, foreign ones as bytes.

msgspec drops unknown fields and rejects unknown tags, so foreign items are never decoded and encoded again: only their
type and id are read, and their bytes are forwarded.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fumehood.protocol.openai.api_errors import InvalidRequest

type ItemStatus = Literal["in_progress", "completed", "incomplete"]
type CallStatus = Literal["in_progress", "interpreting", "completed", "incomplete", "failed"]
type MessagePhase = Literal["commentary", "final_answer"]


# --- message content ------------------------------------------------------------------------------


class ContainerFileCitationAnnotation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="container_file_citation"
):
    """A container file that the text refers to; indexes count code points."""

    container_id: str
    file_id: str
    filename: str
    start_index: int
    end_index: int


class FileCitationAnnotation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="file_citation"
):
    file_id: str
    filename: str
    index: int


class UrlCitationAnnotation(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="url_citation"):
    url: str
    title: str
    start_index: int
    end_index: int


type Annotation = ContainerFileCitationAnnotation | FileCitationAnnotation | UrlCitationAnnotation


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Annotation] = []
    logprobs: list[Raw] = []


class Refusal(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str = ""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    text: str = ""


type ContentPart = OutputText | Refusal | ReasoningText


# --- our own items -----------------------------------------------------------------------------


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText | Refusal] = []
    phase: MessagePhase | UnsetType = UNSET


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """`content` is the model's reasoning, which open models show; `summary` is what others return instead."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    status: ItemStatus | UnsetType = UNSET


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the client answers in its next request."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool whose input is text instead of JSON."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: ItemStatus = "in_progress"


class CodeInterpreterLogs(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="logs"):
    logs: str


class CodeInterpreterImage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """`url` is a data: URL, or the URL of a container file if that would be too long."""

    url: str


class ProducedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a call wrote or changed; `path` begins with /mnt/data/."""

    file_id: str
    container_id: str
    filename: str
    path: str
    bytes: int


class ExecutionDetailsFile(ProducedFile, frozen=True, kw_only=True):
    """A produced file with what identifies its content.

    sha256: hexadecimal; None if the file is not stored.
    content: base64; None if the client did not ask for it in time, or the file is too large.
    """

    mime_type: str
    sha256: str | None = None
    content: str | None = None


class UnavailableProducedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a call wrote or changed and that could not be fetched."""

    filename: str
    path: str
    bytes: int


class ExecutionDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details that OpenAI's items lack; sent on request, as `fumehood:execution`.

    files_complete: whether `files` has all files that the call wrote; `missing_files` has the others, if known.
    """

    stdout: str
    stderr: str
    exit_code: int
    duration_ms: int
    files: list[ExecutionDetailsFile] = []
    files_complete: bool = True
    missing_files: list[UnavailableProducedFile] = []
    truncated: bool = False


class CodeInterpreterCall(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter_call"):
    id: str
    status: CallStatus = "in_progress"
    code: str | None = ""
    container_id: str
    outputs: list[CodeInterpreterLogs | CodeInterpreterImage] | None = None
    execution: ExecutionDetails | UnsetType = msgspec.field(name="fumehood:execution", default=UNSET)


class ContainerReference(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="container_reference"
):
    container_id: str


class LocalEnvironment(msgspec.Struct, frozen=True, tag_field="type", tag="local"):
    """The client's own machine."""


class ShellAction(msgspec.Struct, kw_only=True):
    """The commands to run; limits are None if the model chose none."""

    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """Commands for a container or for the client; the output with the same `call_id` has the results."""

    id: str
    call_id: str
    action: ShellAction
    environment: ContainerReference | LocalEnvironment
    status: ItemStatus = "in_progress"


class ShellExit(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="exit"):
    """-1 if the command did not run or its sandbox was lost."""

    exit_code: int


class ShellTimeout(msgspec.Struct, frozen=True, tag_field="type", tag="timeout"):
    pass


class ShellCallOutputContent(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one command."""

    stdout: str
    stderr: str
    outcome: ShellExit | ShellTimeout


class ShellCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call_output"):
    """Output and outcome of each command of a call, in order.

    execution: details of all commands together.
    """

    id: str
    call_id: str
    output: list[ShellCallOutputContent] = []
    max_output_length: int | None = None
    status: ItemStatus = "in_progress"
    execution: ExecutionDetails | UnsetType = msgspec.field(name="fumehood:execution", default=UNSET)


class LocalShellAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec"):
    """One program with its arguments; fields that the model did not set are left out."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | UnsetType = UNSET
    working_directory: str | UnsetType = UNSET


class LocalShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A program that the client runs."""

    id: str
    call_id: str
    action: LocalShellAction
    status: ItemStatus = "in_progress"


class ApplyPatchOperation(msgspec.Struct, kw_only=True):
    """A change of one file. `diff` is in the V4A format; a file that is deleted has none."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | UnsetType = UNSET


class ApplyPatchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A change of a file that the client makes. One that was cut off stays `in_progress`, without its diff."""

    id: str
    call_id: str
    operation: ApplyPatchOperation
    status: Literal["in_progress", "completed"] = "in_progress"


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """Replaces everything before it; only the gateway can decrypt its content."""

    id: str
    encrypted_content: str


type AuthoredItem = (
    OutputMessage
    | ReasoningItem
    | FunctionCall
    | CustomToolCall
    | CodeInterpreterCall
    | ShellCall
    | ShellCallOutput
    | LocalShellCall
    | ApplyPatchCall
    | CompactionItem
)
# Raw: an item of a model server that speaks the Responses API itself.
type OutputItem = AuthoredItem | Raw


# --- foreign items -------------------------------------------------------------------------------


class InputItem(msgspec.Struct, frozen=True):
    """One item of the input: its type, id and bytes."""

    type: str
    id: str | None
    raw: bytes


class _ItemTag(msgspec.Struct):
    type: str | None = None
    id: Annotated[str, Meta(max_length=64)] | None = None
    role: str | None = None


_json_decoder = msgspec.json.Decoder()


def peek_item(raw: bytes | Raw, where: str) -> InputItem:
    """Read type and id of an item. Raises InvalidRequest, which names `where`.

    An item with a role but no type is a message, as in OpenAI's short form; one with only an id is a reference.
    """
    try:
        # Raw is not validated: lone surrogates and the like are found here.
        tag = msgspec.convert(_json_decoder.decode(raw), _ItemTag)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{where} is not a valid item: {error}", param=where) from None
    kind = tag.type or ("message" if tag.role else "item_reference" if tag.id else None)
    if kind is None:
        raise InvalidRequest(f"{where} has no `type`.", param=where)
    return InputItem(kind, tag.id, bytes(raw))
