"""The model `direct`, which is none: it runs the Python of the user's message; imports `protocol`, `interfaces`.

For smoke tests, examples and the first minute after an installation: the whole way through the gateway and back, with
code, output and files, and no model server anywhere.
"""

import ast
import re
import warnings
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec

from fumehood.interfaces import Take
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.ids import new_id
from fumehood.protocol.models import (
    AnyModelEvent,
    CallArguments,
    CallStarted,
    ModelProfile,
    ModelRequest,
    Text,
    TurnEnded,
)
from fumehood.protocol.responses import Usage
from fumehood.protocol.tools import FunctionSpec

_FUNCTION = "code_interpreter"
_PIECES = 4
_BYTES_A_TOKEN = 4
_LONGEST_BARE_CODE = 100_000

_FENCE = re.compile(r"^(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = frozenset({"", "python", "python3", "py"})
_PATH = re.compile(r"/mnt/data/[^\s'\"`<>()\[\]]*[^\s'\"`<>()\[\].,:;!?]")

_LIST = re.compile(r"^Files: (/mnt/data/.*?)(?: and \d+ more)?$", re.MULTILINE)

_HOW = (
    "I am not a language model: I run the Python code of your message. Send code, best between ``` fences, and offer "
    "the code_interpreter tool."
)
_NO_TOOL = "I only run Python code, and this request does not let me: offer the code_interpreter tool."
_NO_OUTPUT = "The code ran and printed nothing."


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    role: str = "user"
    content: str | list[_Part] | None = None


class _Output(msgspec.Struct):
    output: str | list[_Part] | None = None


class DirectModel:
    """A `ModelBackend` that calls `code_interpreter` with the user's own code and repeats what it printed."""

    async def stream(
        self,
        request: ModelRequest,
        take: Take | None = None,  # noqa: ARG002 - everything is there at once
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        text, exchanges = _latest(request.segments)
        code = _code_of(text)
        if exchanges:
            answer = _answer(exchanges)
        elif code is None:
            answer = _HOW
        elif not _may_call(request):
            answer = _NO_TOOL
        else:
            async for batch in _call(request, code):
                yield batch
            return
        pieces = _cut(answer)
        for piece in pieces:
            yield [Text(piece)]
        yield [TurnEnded("stop", _usage(request, answer))]

    def check(self, request: ModelRequest) -> None:
        """It looks at what it understands."""

    async def count(self, request: ModelRequest) -> tuple[int, bool]:
        return _tokens(request), False

    def profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - there is one
        return ModelProfile()

    async def close(self) -> None:
        pass


async def _call(request: ModelRequest, code: str) -> AsyncGenerator[Sequence[AnyModelEvent]]:
    arguments = msgspec.json.encode({"code": code}).decode()
    yield [CallStarted(0, new_id("call"), _FUNCTION)]
    for piece in _cut(arguments):
        yield [CallArguments(0, piece)]
    yield [TurnEnded("calls", _usage(request, arguments))]


def _may_call(request: ModelRequest) -> bool:
    if isinstance(request.choice, FunctionSpec):
        return request.choice.name == _FUNCTION
    return request.choice != "none" and any(spec.name == _FUNCTION for spec in request.functions)


# --- what is asked ------------------------------------------------------------------------------------


def _latest(segments: Sequence[Segment]) -> tuple[str, list[ToolExchange]]:
    """The last message of the user, and the calls since."""
    exchanges: list[ToolExchange] = []
    for entry in _backwards(segments):
        if entry.exchange is not None:
            if entry.exchange.name == _FUNCTION:
                exchanges.append(entry.exchange)
        elif entry.type == "function_call_output":
            exchanges.append(_answered(entry))
        elif entry.type == "message":
            text = _user_text(entry)
            if text is not None:
                return text, exchanges[::-1]
    return "", exchanges[::-1]


def _answered(entry: Entry) -> ToolExchange:
    """A call that the client itself has answered, as a gateway before this one does."""
    try:
        output = msgspec.json.decode(entry.raw, type=_Output).output
    except msgspec.DecodeError:
        output = None
    text = output if isinstance(output, str) else "\n".join(part.text or "" for part in output or ())
    return ToolExchange(call_id="", name=_FUNCTION, arguments="{}", output=text)


def _backwards(segments: Sequence[Segment]) -> Iterator[Entry]:
    for segment in reversed(segments):
        yield from reversed(segment.entries)


def _user_text(entry: Entry) -> str | None:
    try:
        message = msgspec.json.decode(entry.raw, type=_Message)
    except msgspec.DecodeError:
        return None
    if message.role != "user":
        return None
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(part.text for part in message.content if part.text)


def _code_of(text: str) -> str | None:
    """The fenced Python, all of it; without a fence the whole text, if that is Python."""
    blocks = [block for _, language, block in _FENCE.findall(text) if language.lower() in _LANGUAGES]
    if blocks:
        return "\n".join(block.rstrip("\n") for block in blocks)
    text = text.strip()
    return text if text and len(text) <= _LONGEST_BARE_CODE and _is_python(text) else None


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd about other people's code
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # A single word, or words with commas, are more likely prose.
    only = tree.body[0].value if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else None
    return bool(tree.body) and not isinstance(only, ast.Name | ast.Tuple)


# --- what is answered ---------------------------------------------------------------------------------


def _answer(exchanges: Sequence[ToolExchange]) -> str:
    output = "\n".join(exchange.output.rstrip("\n") for exchange in exchanges).strip("\n") or _NO_OUTPUT
    links = [f"[{path.rpartition('/')[2]}](sandbox:{path})" for path in _paths(output)]
    return "\n\n".join([output, "\n".join(links)]) if links else output


def _paths(output: str) -> list[str]:
    """The files that a result names: in its own list of them, where names may have spaces, else anywhere."""
    listed = _LIST.findall(output)
    if not listed:
        return list(dict.fromkeys(_PATH.findall(output)))
    return list(
        dict.fromkeys(path for line in listed for path in line.split(", ") if path.startswith("/mnt/data/"))
    )


def _cut(text: str) -> list[str]:
    size = max(1, -(-len(text) // _PIECES))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _tokens(request: ModelRequest) -> int:
    size = sum(len(entry.raw) for segment in request.segments for entry in segment.entries)
    return (size + len(request.instructions or "")) // _BYTES_A_TOKEN


def _usage(request: ModelRequest, written: str) -> Usage:
    read, wrote = _tokens(request), len(written.encode()) // _BYTES_A_TOKEN + 1
    return Usage(input_tokens=read, output_tokens=wrote, total_tokens=read + wrote)
