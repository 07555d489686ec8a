"""The model `direct`: runs the code of the user's message through the hosted tools, without a language model.

For smoke tests, examples and the first minute after an installation.
"""

import ast
import re
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from fumehood.interfaces import AcceptBatch
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelProfile,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.responses import Usage
from fumehood.protocol.openai.tool_specs import ModelToolDefinition

_PYTHON = "code_interpreter"
_SHELL = "shell"
_UNKNOWN_FUNCTION = ""  # function name of a result whose call is unknown
_DELTA_COUNT = 4
_BYTES_PER_TOKEN = 4
_MAX_UNFENCED_CHARS = 100_000

_FENCE = re.compile(r"^(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {
    **dict.fromkeys(("", "python", "python3", "py"), _PYTHON),
    **dict.fromkeys(("sh", "bash", "shell"), _SHELL),
}
_PATH = re.compile(r"/mnt/data/[^\s'\"`<>()\[\]]*[^\s'\"`<>()\[\].,:;!?]")

_FILE_LIST = re.compile(r"^Files: (/mnt/data/.*?)(?: and \d+ more)?$", re.MULTILINE)

_USAGE_HINT = (
    "I am not a language model: I run the Python code of your message. Send code, best between ``` fences, and offer "
    "the code_interpreter tool. Commands between ```sh fences run in the shell tool."
)
_NO_TOOL = "I only run code, and this request does not let me: offer the {tools} tool."
_NO_OUTPUT = "The code ran and printed nothing."


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    role: str = "user"
    content: str | list[_Part] | None = None


class _Output(msgspec.Struct):
    output: str | list[_Part] | None = None


@dataclass(frozen=True, slots=True)
class _RequestedCall:
    """A tool call that the user's message requests."""

    name: str
    code: str

    @property
    def arguments(self) -> str:
        arguments = {"code": self.code} if self.name == _PYTHON else {"commands": [self.code]}
        return msgspec.json.encode(arguments).decode()


class DirectExecutionBackend:
    """A `ModelBackend` that calls the code interpreter and the shell with the user's code, one call per turn, and
    answers with their output.
    """

    async def stream(
        self,
        request: ModelRequest,
        accept_batch: AcceptBatch | None = None,  # noqa: ARG002 - the whole answer is known at once
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        text, exchanges = _find_latest_message(request.segments)
        requested = _extract_calls(text)
        allowed = [call for call in requested if _may_call(request, call.name)]
        call = _next_call(allowed, exchanges)
        if call is not None:
            yield [ModelCallStarted(0, new_id("call"), call.name)]
            for delta in _split_into_deltas(call.arguments):
                yield [ModelCallArgumentsDelta(0, delta)]
            yield [ModelTurnEnded("calls", _estimate_usage(request, call.arguments))]
            return
        if exchanges:
            answer = _format_answer(exchanges)
        elif not requested:
            answer = _USAGE_HINT
        else:
            answer = _NO_TOOL.format(tools=" and the ".join(dict.fromkeys(call.name for call in requested)))
        for delta in _split_into_deltas(answer):
            yield [ModelTextDelta(delta)]
        yield [ModelTurnEnded("stop", _estimate_usage(request, answer))]

    def validate_request(self, request: ModelRequest) -> None:
        """Accept every request: content it cannot read is ignored."""

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        return _estimate_input_tokens(request), False

    def get_profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - all names are the same
        return ModelProfile()

    async def close(self) -> None:
        pass


def _may_call(request: ModelRequest, name: str) -> bool:
    if isinstance(request.tool_choice, ModelToolDefinition):
        return request.tool_choice.name == name
    return request.tool_choice != "none" and any(spec.name == name for spec in request.function_tools)


def _next_call(calls: Sequence[_RequestedCall], exchanges: Sequence[ToolExchange]) -> _RequestedCall | None:
    """The first call without a result; None if all have one."""
    done = Counter(exchange.name for exchange in exchanges)
    for call in calls:
        name = call.name if done[call.name] else _UNKNOWN_FUNCTION
        if not done[name]:
            return call
        done[name] -= 1
    return None


# --- reading the request ------------------------------------------------------------------------------


def _find_latest_message(segments: Sequence[ConversationSegment]) -> tuple[str, list[ToolExchange]]:
    """The last user message with text and the tool calls after it. Without one, the last system or developer message:
    some clients, ours included, send prompts as system messages, and files alone in a user message.
    """
    exchanges: list[ToolExchange] = []
    without_user: tuple[str, list[ToolExchange]] | None = None
    for entry in (entry for segment in reversed(segments) for entry in reversed(segment.entries)):
        if (result := _read_tool_result(entry)) is not None:
            exchanges.append(result)
        elif entry.type == "message":
            message = _decode_message(entry)
            text = _get_message_text(message)
            if message.role == "user" and text.strip():
                return text, exchanges[::-1]
            if message.role in ("system", "developer") and without_user is None:
                without_user = text, exchanges[::-1]
    return without_user or ("", exchanges[::-1])


def _read_tool_result(entry: ConversationEntry) -> ToolExchange | None:
    if entry.exchange is None:
        return _read_client_output(entry) if entry.type == "function_call_output" else None
    has_result = entry.exchange.name in (_PYTHON, _SHELL) and entry.exchange.half != "call"
    return entry.exchange if has_result else None


def _read_client_output(entry: ConversationEntry) -> ToolExchange:
    """The output of a call that the client ran itself, such as another gateway in front of this one."""
    try:
        output = msgspec.json.decode(entry.raw, type=_Output).output
    except msgspec.DecodeError:
        output = None
    text = output if isinstance(output, str) else "\n".join(part.text or "" for part in output or ())
    return ToolExchange(call_id="", name=_UNKNOWN_FUNCTION, arguments="{}", output=text)


def _decode_message(entry: ConversationEntry) -> _Message:
    try:
        return msgspec.json.decode(entry.raw, type=_Message)
    except msgspec.DecodeError:
        return _Message(role="")


def _get_message_text(message: _Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(part.text for part in message.content if part.text)


def _extract_calls(text: str) -> list[_RequestedCall]:
    """One call per fenced block, with adjacent blocks of one language joined. Without a fence, the whole text if it is
    Python.
    """
    fenced = [
        (_LANGUAGES.get(language.lower()), block.rstrip("\n")) for _, language, block in _FENCE.findall(text)
    ]
    known = [(name, block) for name, block in fenced if name is not None]
    if known:
        grouped = groupby(known, key=lambda one: one[0])
        return [_RequestedCall(name, "\n".join(block for _, block in blocks)) for name, blocks in grouped]
    text = text.strip()
    is_code = text and len(text) <= _MAX_UNFENCED_CHARS and _is_python(text)
    return [_RequestedCall(_PYTHON, text)] if is_code else []


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings about the user's code
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # A single word, or words with commas, is more likely prose.
    only = tree.body[0].value if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else None
    return bool(tree.body) and not isinstance(only, ast.Name | ast.Tuple)


# --- writing the answer -------------------------------------------------------------------------------


def _format_answer(exchanges: Sequence[ToolExchange]) -> str:
    output = "\n".join(exchange.output.rstrip("\n") for exchange in exchanges).strip("\n") or _NO_OUTPUT
    links = [f"[{path.rpartition('/')[2]}](sandbox:{path})" for path in _find_file_paths(output)]
    return "\n\n".join([output, "\n".join(links)]) if links else output


def _find_file_paths(output: str) -> list[str]:
    """The files that a result names: from its `Files:` lines, whose names may contain spaces, else from anywhere."""
    listed = _FILE_LIST.findall(output)
    if not listed:
        return list(dict.fromkeys(_PATH.findall(output)))
    return list(
        dict.fromkeys(path for line in listed for path in line.split(", ") if path.startswith("/mnt/data/"))
    )


def _split_into_deltas(text: str) -> list[str]:
    size = max(1, -(-len(text) // _DELTA_COUNT))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _estimate_input_tokens(request: ModelRequest) -> int:
    size = sum(len(entry.raw) for segment in request.segments for entry in segment.entries)
    return (size + len(request.instructions or "")) // _BYTES_PER_TOKEN


def _estimate_usage(request: ModelRequest, output: str) -> Usage:
    input_tokens, output_tokens = (
        _estimate_input_tokens(request),
        len(output.encode()) // _BYTES_PER_TOKEN + 1,
    )
    return Usage(
        input_tokens=input_tokens, output_tokens=output_tokens, total_tokens=input_tokens + output_tokens
    )
