"""Tools that the client runs itself, besides functions and custom tools: `shell`, `local_shell` and `apply_patch`.

A model sees each as a function of that name, whose arguments are what the item of the call carries: the `action` of a
shell, the `operation` of a patch.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw

from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.items import ApplyPatchOperation, InputItem, LocalShellAction, ShellAction
from fumehood.protocol.openai.shell_command_stream import SHELL_PARAMETERS
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec

SHELL = "shell"
LOCAL_SHELL = "local_shell"
APPLY_PATCH = "apply_patch"
CLIENT_TOOL_TYPES = (SHELL, LOCAL_SHELL, APPLY_PATCH)
_MAX_SKILLS = 64

_LOCAL_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": 'The program and its arguments, e.g. ["bash", "-lc", "ls -l | head"].',
        },
        "working_directory": {"type": "string", "description": "Where to run it, if not where you are."},
        "timeout_ms": {"type": "integer", "minimum": 1, "description": "Milliseconds that it may take."},
        "env": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Environment variables to add.",
        },
    },
    "required": ["command"],
    "additionalProperties": False,
}
_APPLY_PATCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": {"type": "string", "description": "The file, relative to the workspace."},
        "diff": {"type": "string", "description": "The change; not for delete_file."},
    },
    "required": ["type", "path"],
    "additionalProperties": False,
}
_SHELL_DESCRIPTION = (
    "Runs commands in a shell on the user's machine, one after another, and returns what they write to stdout and "
    "stderr and how they end. Each command has a shell of its own: join what belongs together with &&. There is no "
    "keyboard: nothing can ask you back."
)
_LOCAL_SHELL_DESCRIPTION = (
    "Runs a program on the user's machine and returns its output. It is run without a shell: for pipes, variables and "
    'the like, run one, such as ["bash", "-lc", "…"]. There is no keyboard: nothing can ask you back.'
)
_APPLY_PATCH_DESCRIPTION = (
    "Creates, updates or deletes one file of the user's workspace.\n"
    "- create_file: every line of `diff` is `+` followed by a line of the new file.\n"
    "- update_file: `diff` has one or more hunks. A hunk begins with a line `@@`, or `@@ ` and the line of the class "
    "or function that the change is in, without line numbers. Then come lines as they are in the file: `-` before a "
    "line to remove, `+` before a line to add, a space before a line that stays. Show three lines that stay before and "
    "after each change.\n"
    "- delete_file: without `diff`."
)


class _Skill(msgspec.Struct):
    name: str
    description: str = ""
    path: str | None = None


class _Environment(msgspec.Struct):
    type: str = "local"
    skills: list[_Skill] | None = None


class _ShellConfig(msgspec.Struct):
    environment: _Environment | None = None


class _EnvironmentTag(msgspec.Struct):
    type: str = "local"


class _ShellTag(msgspec.Struct):
    environment: _EnvironmentTag | None = None


def is_client_tool(spec: ToolSpec) -> bool:
    """Whether the client runs the tool: a shell only if its environment is local, as it is by default."""
    if spec.type != SHELL:
        return spec.type in (LOCAL_SHELL, APPLY_PATCH)
    try:
        environment = msgspec.json.decode(spec.raw, type=_ShellTag).environment
    except msgspec.DecodeError:
        return False
    return environment is None or environment.type == "local"


def describe_client_tool(spec: ToolSpec, where: str) -> ModelToolDefinition:
    """The function that a model sees. Raises InvalidRequest, which names `where`."""
    if spec.type == APPLY_PATCH:
        parameters = Raw(msgspec.json.encode(_APPLY_PATCH_PARAMETERS))
        return ModelToolDefinition(
            name=spec.type, description=_APPLY_PATCH_DESCRIPTION, parameters=parameters
        )
    if spec.type == LOCAL_SHELL:
        parameters = Raw(msgspec.json.encode(_LOCAL_SHELL_PARAMETERS))
        return ModelToolDefinition(
            name=spec.type, description=_LOCAL_SHELL_DESCRIPTION, parameters=parameters
        )
    try:
        environment = msgspec.json.decode(spec.raw, type=_ShellConfig).environment
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{where} holds a shell that cannot be read: {error}", param=where) from None
    skills = (environment.skills if environment is not None else None) or []
    if len(skills) > _MAX_SKILLS:
        raise InvalidRequest(f"{where}: a shell can have at most {_MAX_SKILLS} skills.", param=where)
    description = _SHELL_DESCRIPTION
    if skills:
        lines = [_describe_skill(skill) for skill in skills]
        description += "\nSkills, with their instructions in SKILL.md; read them before use:\n" + "\n".join(
            lines
        )
    return ModelToolDefinition(name=spec.type, description=description, parameters=SHELL_PARAMETERS)


def _describe_skill(skill: _Skill) -> str:
    place = f" (in {sanitize_name(skill.path)})" if skill.path else ""
    return f"- {sanitize_name(skill.name)}{place}: {skill.description}"


# --- arguments of a call ------------------------------------------------------------------------------


class _ShellArguments(msgspec.Struct):
    commands: Annotated[list[str], Meta(min_length=1)] | Annotated[str, Meta(min_length=1)]
    timeout_ms: Annotated[int, Meta(ge=1)] | None = None
    max_output_length: Annotated[int, Meta(ge=1)] | None = None


class _LocalShellArguments(msgspec.Struct):
    command: Annotated[list[str], Meta(min_length=1)] | Annotated[str, Meta(min_length=1)]
    env: dict[str, str] | None = None
    timeout_ms: Annotated[int, Meta(ge=1)] | None = None
    working_directory: str | None = None


_shell_decoder = msgspec.json.Decoder(_ShellArguments)
_local_shell_decoder = msgspec.json.Decoder(_LocalShellArguments)
_patch_decoder = msgspec.json.Decoder(ApplyPatchOperation)


def parse_shell_action(arguments: str) -> ShellAction:
    """Raises ValueError with a sentence for the model. One command may stand without a list."""
    parsed = _decode(_shell_decoder, arguments)
    commands = [parsed.commands] if isinstance(parsed.commands, str) else parsed.commands
    return ShellAction(
        commands=commands, timeout_ms=parsed.timeout_ms, max_output_length=parsed.max_output_length
    )


def parse_local_shell_action(arguments: str) -> LocalShellAction:
    """Raises ValueError with a sentence for the model. A command without a list is one for a shell."""
    parsed = _decode(_local_shell_decoder, arguments)
    command = ["bash", "-lc", parsed.command] if isinstance(parsed.command, str) else parsed.command
    return LocalShellAction(
        command=command,
        env=parsed.env or {},
        timeout_ms=parsed.timeout_ms or UNSET,
        working_directory=parsed.working_directory or UNSET,
    )


def parse_patch_operation(arguments: str) -> ApplyPatchOperation:
    """Raises ValueError with a sentence for the model."""
    operation = _decode(_patch_decoder, arguments)
    if not operation.path:
        raise ValueError("`path` is empty")
    if operation.type == "delete_file":
        operation.diff = UNSET
    elif not operation.diff:
        raise ValueError(f"{operation.type} needs a `diff`")
    return operation


def _decode[T](decoder: msgspec.json.Decoder[T], arguments: str) -> T:
    try:
        return decoder.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"the arguments are not as described: {error}") from None


# --- items that come back -----------------------------------------------------------------------------

CLIENT_TOOL_BY_ITEM = {
    "shell_call": SHELL,
    "shell_call_output": SHELL,
    "local_shell_call": LOCAL_SHELL,
    "local_shell_call_output": LOCAL_SHELL,
    "apply_patch_call": APPLY_PATCH,
    "apply_patch_call_output": APPLY_PATCH,
}
"""The type of the tool, by the type of an item. Items of a hosted shell have the same types."""


class ClientToolCall(msgspec.Struct, frozen=True):
    """A call as the function call that the model wrote.

    is_awaited: whether the client must answer it: it is complete, and no container runs it.
    """

    call_id: str
    name: str
    arguments: str
    is_awaited: bool


class ClientToolResult(msgspec.Struct, frozen=True):
    """A result as the text that the model reads."""

    call_id: str
    text: str


class _ShellItemAction(msgspec.Struct, omit_defaults=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _ShellItem(msgspec.Struct):
    call_id: str
    action: _ShellItemAction
    environment: _EnvironmentTag | None = None
    status: str | None = None


class _LocalShellItemAction(msgspec.Struct, omit_defaults=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    working_directory: str | None = None


class _LocalShellItem(msgspec.Struct):
    call_id: str
    action: _LocalShellItemAction
    status: str | None = None


class _PatchItem(msgspec.Struct):
    call_id: str
    operation: ApplyPatchOperation
    status: str | None = None


class _OutputItem(msgspec.Struct):
    """`id` names the call if there is no `call_id`: OpenAI's type of a local shell's output has only that."""

    id: str | None = None
    call_id: str | None = None
    output: str | None = None
    status: str | None = None


_COMPLETED = ("completed", None)


def read_client_call(item_type: str, raw: bytes) -> ClientToolCall | None:
    """None if the item is no call of a client tool, or lacks what a call needs. Raises msgspec.DecodeError."""
    try:
        match item_type:
            case "shell_call":
                shell = msgspec.json.decode(raw, type=_ShellItem)
                is_local = shell.environment is None or shell.environment.type == "local"
                is_awaited = is_local and shell.status in _COMPLETED
                return ClientToolCall(shell.call_id, SHELL, _encode(shell.action), is_awaited)
            case "local_shell_call":
                local = msgspec.json.decode(raw, type=_LocalShellItem)
                local.action.env = local.action.env or None
                is_awaited = local.status in _COMPLETED
                return ClientToolCall(local.call_id, LOCAL_SHELL, _encode(local.action), is_awaited)
            case "apply_patch_call":
                patch = msgspec.json.decode(raw, type=_PatchItem)
                is_awaited = patch.status in _COMPLETED
                return ClientToolCall(patch.call_id, APPLY_PATCH, _encode(patch.operation), is_awaited)
            case _:
                return None
    except msgspec.ValidationError:
        return None


def read_client_result(item_type: str, raw: bytes) -> ClientToolResult | None:
    """None if the item is no result of a client tool, or not as the API describes it. Raises msgspec.DecodeError."""
    if item_type not in ("local_shell_call_output", "apply_patch_call_output"):
        return None
    try:
        item = msgspec.json.decode(raw, type=_OutputItem)
    except msgspec.ValidationError:
        return None
    call_id = item.call_id or item.id
    if call_id is None:
        return None
    text = item.output or ""
    if item_type == "apply_patch_call_output" and item.status == "failed":
        text = f"The patch was not applied. {text}".rstrip()
    return ClientToolResult(call_id, text or item.status or "(no output)")


class _CallIdTag(msgspec.Struct):
    call_id: str | None = None


_call_id_decoder = msgspec.json.Decoder(_CallIdTag)
_NULL = Raw(b"null")


def _peek_call_id(raw: bytes) -> str | None:
    try:
        return _call_id_decoder.decode(raw).call_id
    except msgspec.ValidationError:
        return None


def complete_call_ids(items: Sequence[InputItem], newest: Sequence[ConversationEntry]) -> Sequence[InputItem]:
    """The items, with a `call_id` in each output of a local shell: in OpenAI's type only `id` names the call.

    newest: the entries of the response before these items.
    """
    if all(item.type != "local_shell_call_output" for item in items):
        return items
    calls = [item for item in (*newest, *items) if item.type == "local_shell_call"]
    call_ids = {call.id: _peek_call_id(call.raw) for call in calls if call.id}
    return [_complete_call_id(item, call_ids) for item in items]


def _complete_call_id(item: InputItem, call_ids: Mapping[str, str | None]) -> InputItem:
    if item.type != "local_shell_call_output" or item.id is None:
        return item
    fields: dict[str, Raw] = msgspec.json.decode(item.raw, type=dict[str, Raw])
    if fields.get("call_id", _NULL) != _NULL:
        return item
    del fields["id"]
    fields["call_id"] = Raw(msgspec.json.encode(call_ids.get(item.id) or item.id))
    return InputItem(item.type, None, msgspec.json.encode(fields))


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
