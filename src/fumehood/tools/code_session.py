"""One call of the code interpreter, from its first character to its result; imports `interfaces` and siblings."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, Clock, Container, Containers, ToolResult, ToolStep
from fumehood.protocol.containers import ContainerSpec
from fumehood.protocol.conversation import Exchange
from fumehood.protocol.errors import ApiError
from fumehood.protocol.events import (
    CodeDelta,
    CodeDone,
    InterpreterCompleted,
    InterpreterFailed,
    InterpreterInProgress,
    InterpreterInterpreting,
    ItemAdded,
    ItemDone,
    StreamEvent,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import CallStatus, CodeInterpreterCall, Execution, Logs
from fumehood.protocol.sandbox import End, EndStatus, ExecuteRequest, Requirements
from fumehood.protocol.streaming_json import StringField
from fumehood.tools.carried import Carried
from fumehood.tools.code_output import CodeOutput, OutputLimits
from fumehood.tools.produced import Gatherer, Produced

NAME = "code_interpreter"

LIBRARIES = (
    *("numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "seaborn"),
    *("sympy", "pillow", "pyarrow", "openpyxl"),
)
_LEFT_OUT = (
    "[{left_out:,} characters are left out here. Print less, or write to a file and look at parts of it.]"
)
NOTHING = "(no output)"
_FILES_NAMED = 20
_LAST_WORD_SECONDS = 0.5  # the sandbox's own time-out tells more than ours

_RAN = frozenset({"ok", "error"})  # code that raises has run


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterSettings:
    """
    execution_timeout: seconds that the code of one call may run.
    keeps_variables: whether they are there in the next call: what the containers do, for the model to know.
    inline_bytes: pictures up to this size are data: URLs, larger ones addresses of container files.
    python, libraries: what the model is told is there.
    """

    execution_timeout: float = 60.0
    keeps_variables: bool = True
    inline_bytes: int = 1 << 20
    output: OutputLimits = field(default_factory=OutputLimits)
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    libraries: tuple[str, ...] = LIBRARIES


@dataclass(slots=True)
class Workplace:
    """Where the calls of one request run, and how.

    news: what the model should know first; told with the first result, and then not again.
    heir_of: the container that this one replaces, see `Containers.open`.
    carried: files of the conversation that it has to be given first.
    """

    containers: Containers
    clock: Clock
    settings: InterpreterSettings
    container_id: str
    spec: ContainerSpec
    carried: Carried
    news: str = ""
    heir_of: str | None = None

    async def open(self, caller: Caller) -> Container:
        """The container with its files; raises ApiError."""
        container = await self.containers.open(caller, self.container_id, self.spec, self.heir_of)
        told = await self.carried.bring()
        self.news = "\n".join(filter(None, [self.news, told]))
        return container

    def take_news(self) -> str:
        news, self.news = self.news, ""
        return news


class _Arguments(msgspec.Struct):
    code: str
    requirements: Requirements | None = None


_arguments = msgspec.json.Decoder(_Arguments)
_objects = msgspec.json.Decoder(dict[str, Raw])


class CodeSession:
    """A `CallSession`."""

    def __init__(self, workplace: Workplace, context: CallContext) -> None:
        self._place = workplace
        self._context = context
        self._index = context.output_index
        self._id = new_id("ci")
        self._field = StringField("code")
        self._output = CodeOutput(workplace.settings.output)
        self._code_is_done = False

    # ---- while the model writes -----------------------------------------------------------------------------------

    def open(self) -> Sequence[StreamEvent]:
        item = CodeInterpreterCall(id=self._id, container_id=self._place.container_id, outputs=[])
        return (
            ItemAdded(output_index=self._index, item=item),
            InterpreterInProgress(item_id=self._id, output_index=self._index),
        )

    def feed(self, arguments: str) -> Sequence[StreamEvent]:
        delta = self._field.feed(arguments)
        if not delta:
            return ()
        return (CodeDelta(item_id=self._id, output_index=self._index, delta=delta),)

    # ---- when it has written --------------------------------------------------------------------------------------

    async def run(self) -> AsyncGenerator[ToolStep]:
        try:
            arguments = self._read_arguments()
        except ValueError as error:
            yield self._failed(f"Nothing ran: {error}.")
            return
        yield (*self._code_done(), InterpreterInterpreting(item_id=self._id, output_index=self._index))
        try:
            async with asyncio.timeout(self._context.deadline - self._place.clock.monotonic()):
                container = await self._place.open(self._context.caller)
        except ApiError as error:
            yield self._failed(f"The code did not run: {error.message}")
            return
        except TimeoutError:
            yield self._failed("The code did not run: the time for this response was over before.")
            return
        await self._execute(container, arguments)
        gatherer = Gatherer(
            self._place.containers,
            container,
            self._context.caller,
            inline_bytes=self._place.settings.inline_bytes,
            most=self._place.settings.output.images,
        )
        yield self._result(await gatherer.gather(self._output.figures))

    def _read_arguments(self) -> _Arguments:
        """Raises ValueError with a sentence for the model."""
        try:
            arguments = _arguments.decode(self._field.text)
        except msgspec.ValidationError as error:
            raise ValueError(f"the arguments do not fit: {error}") from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ValueError(f"the arguments are not valid JSON ({error})") from None
        if arguments.code != self._field.value:
            raise ValueError("the arguments name `code` more than once")
        return arguments

    async def _execute(self, container: Container, arguments: _Arguments) -> None:
        """Run the code, at most as long as the whole response has; what it says is in `self._output`."""
        remaining = self._context.deadline - self._place.clock.monotonic()
        if remaining <= 0:
            self._output.take(_ended("timeout", "The time for this response was over before the code began."))
            return
        request = ExecuteRequest(
            code=arguments.code,
            timeout_seconds=min(self._place.settings.execution_timeout, remaining),
            requirements=arguments.requirements or [],
        )
        try:
            async with (
                asyncio.timeout(remaining + _LAST_WORD_SECONDS),
                aclosing(container.execute(request)) as events,
            ):
                async for event in events:
                    self._output.take(event)
        except TimeoutError:
            self._output.take(_ended("timeout", "The time for this response is over; the code was stopped."))
        if self._output.end is None:
            self._output.take(_ended("lost", "The sandbox did not say how the code ended."))

    def abort(self, reason: str) -> ToolResult:
        self._output.take(_ended("interrupted", f"The call was not finished: {reason}."))
        return self._settled("incomplete", self._code_done(), Produced())

    # ---- what comes of it -----------------------------------------------------------------------------------------

    def _code_done(self) -> tuple[StreamEvent, ...]:
        if self._code_is_done:
            return ()
        self._code_is_done = True
        return (CodeDone(item_id=self._id, output_index=self._index, code=self._field.value or ""),)

    def _failed(self, reason: str) -> ToolResult:
        """Of a call that never ran."""
        self._output.take(_ended("lost", reason))
        return self._result(Produced())

    def _result(self, produced: Produced) -> ToolResult:
        completed = self._output.end is not None and self._output.end.status in _RAN
        kind = InterpreterCompleted if completed else InterpreterFailed
        last = kind(item_id=self._id, output_index=self._index)
        return self._settled("completed" if completed else "failed", (*self._code_done(), last), produced)

    def _settled(self, status: CallStatus, events: Sequence[StreamEvent], produced: Produced) -> ToolResult:
        output, end = self._output, self._output.end or _ended("lost", "")
        item = CodeInterpreterCall(
            id=self._id,
            status=status,
            code=self._field.value or "",
            container_id=self._place.container_id,
            outputs=[*([] if output.logs.empty else [Logs(logs=output.logs.text())]), *produced.images],
            execution=Execution(
                stdout=output.stdout.text(),
                stderr=output.stderr.text(),
                exit_code=end.exit_code,
                duration_ms=end.duration_ms,
                files=list(produced.files),
                truncated=output.truncated,
            ),
        )
        done = ItemDone(output_index=self._index, item=item)
        exchange = Exchange(
            call_id=self._context.call_id,
            name=NAME,
            arguments=self._replayable_arguments(),
            output=self._told(produced, end),
            images=tuple(produced.urls) if self._context.takes_images else (),
        )
        return ToolResult(events=(*events, done), item=item, exchange=exchange, files=produced.files)

    def _told(self, produced: Produced, end: End) -> str:
        """What the model reads: news, output, files, and the exit code if it is not 0."""
        lines = [self._place.take_news(), self._output.told.text(_LEFT_OUT).rstrip("\n")]
        if produced.files:
            names = [file.path for file in produced.files[:_FILES_NAMED]]
            more = len(produced.files) - len(names)
            lines.append(f"Files: {', '.join(names)}{f' and {more} more' if more else ''}")
        if end.exit_code:
            lines.append(f"Exit code: {end.exit_code}")
        return "\n".join(line for line in lines if line) or NOTHING

    def _replayable_arguments(self) -> str:
        """As the model wrote them, if they are JSON: model servers refuse to be shown anything else."""
        text = self._field.text
        try:
            _objects.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return msgspec.json.encode({"code": self._field.value or ""}).decode()
        return text


def _ended(status: EndStatus, reason: str) -> End:
    return End(status=status, exit_code=-1, duration_ms=0, state_kept=True, reason=reason)
