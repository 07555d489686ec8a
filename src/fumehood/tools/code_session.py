"""One call of the code interpreter, from its first character to its result; imports `interfaces` and siblings."""

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import CallContext, Clock, Container, Started, ToolResult, ToolStep
from fumehood.protocol.conversation import ToolExchange
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
from fumehood.protocol.sandbox import End, ExecuteRequest, Requirements
from fumehood.protocol.streaming_json import StringField
from fumehood.tools.arguments import read_arguments, replayable
from fumehood.tools.code_output import CodeOutput, OutputLimits
from fumehood.tools.produced import Gatherer, InlineLimits, Produced, named
from fumehood.tools.running import NOTHING, RAN, ended, executed
from fumehood.tools.workplace import Workplace

NAME = "code_interpreter"

LIBRARIES = (
    *("numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "seaborn"),
    *("sympy", "pillow", "pyarrow", "openpyxl"),
)
_LEFT_OUT = (
    "[{left_out:,} characters are left out here. Print less, or write to a file and look at parts of it.]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterSettings:
    """How the code interpreter runs code, and what the model is told of it.

    execution_timeout: seconds that the code of one call may run.
    keeps_variables: whether they are there in the next call: what the containers do, for the model to know.
    inline: how much of what produced files hold is sent inside of items.
    python, libraries: what the model is told is there.
    """

    execution_timeout: float = 60.0
    keeps_variables: bool = True
    inline: InlineLimits = field(default_factory=InlineLimits)
    output: OutputLimits = field(default_factory=OutputLimits)
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    libraries: tuple[str, ...] = LIBRARIES


class _Arguments(msgspec.Struct):
    code: str
    requirements: Requirements | None = None


_arguments = msgspec.json.Decoder(_Arguments)


class CodeSession:
    """A `CallSession`."""

    def __init__(
        self, workplace: Workplace, settings: InterpreterSettings, clock: Clock, context: CallContext
    ) -> None:
        self._place = workplace
        self._settings = settings
        self._clock = clock
        self._context = context
        self._index = context.output_index
        self._id = new_id("ci")
        self._field = StringField("code")
        self._output = CodeOutput(settings.output)
        self._code_is_done = False
        self._started_at: float | None = None

    # ---- while the model writes -----------------------------------------------------------------------------------

    def open(self) -> Sequence[StreamEvent]:
        item = CodeInterpreterCall(id=self._id, container_id=self._place.container_id, outputs=[])
        return (
            ItemAdded(output_index=self._index, item=item),
            InterpreterInProgress(item_id=self._id, output_index=self._index),
        )

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        item_id, index = self._id, self._index
        return [
            CodeDelta(item_id=item_id, output_index=index, delta=delta)
            for delta in self._field.feed(fragments)
        ]

    # ---- when it has written --------------------------------------------------------------------------------------

    async def run(self) -> AsyncGenerator[ToolStep]:
        try:
            arguments = self._read_arguments()
        except ValueError as error:
            yield self._failed(f"Nothing ran: {error}.")
            return
        yield self._code_done()
        try:
            container = await self._place.open()
        except ApiError as error:
            yield self._failed(f"The code did not run: {error.message}")
            return
        async with aclosing(self._execute(container, arguments)) as steps:
            async for step in steps:
                yield step
        gatherer = Gatherer(
            self._place.containers,
            container,
            self._context.caller,
            limits=self._settings.inline,
            most=self._settings.output.images,
            contents_left=self._settings.inline.total_bytes if self._context.wants_contents else None,
        )
        yield self._result(await gatherer.gather(self._output.figures))

    def _read_arguments(self) -> _Arguments:
        """Raises ValueError with a sentence for the model."""
        arguments = read_arguments(_arguments, self._field.text)
        if arguments.code != self._field.value:
            raise ValueError("the arguments name `code` more than once")
        return arguments

    async def _execute(
        self, container: Container, arguments: _Arguments
    ) -> AsyncGenerator[Sequence[StreamEvent]]:
        """Run the code, at most as long as the whole response has; what it says is in `self._output`."""
        remaining = self._context.deadline - self._clock.monotonic()
        request = ExecuteRequest(
            code=arguments.code,
            timeout_seconds=self._settings.execution_timeout,
            requirements=arguments.requirements or [],
        )
        async with aclosing(executed(container, request, remaining)) as events:
            async for event in events:
                if not isinstance(event, Started):
                    self._output.take(event)
                elif self._started_at is None:
                    self._started_at = self._clock.monotonic()
                    yield (InterpreterInterpreting(item_id=self._id, output_index=self._index),)

    def abort(self, reason: str) -> ToolResult:
        ran = 0.0 if self._started_at is None else self._clock.monotonic() - self._started_at
        self._output.take(ended("interrupted", f"The call was not finished: {reason}.", ran))
        return self._settled("incomplete", self._code_done(), Produced())

    # ---- what comes of it -----------------------------------------------------------------------------------------

    def _code_done(self) -> tuple[StreamEvent, ...]:
        if self._code_is_done:
            return ()
        self._code_is_done = True
        return (CodeDone(item_id=self._id, output_index=self._index, code=self._field.value or ""),)

    def _failed(self, reason: str) -> ToolResult:
        """The result of a call that never ran."""
        self._output.take(ended("lost", reason))
        return self._result(Produced())

    def _result(self, produced: Produced) -> ToolResult:
        completed = self._output.end is not None and self._output.end.status in RAN
        kind = InterpreterCompleted if completed else InterpreterFailed
        last = kind(item_id=self._id, output_index=self._index)
        status: CallStatus = "completed" if completed else "failed"
        return self._settled(status, (*self._code_done(), last), produced)

    def _settled(self, status: CallStatus, events: Sequence[StreamEvent], produced: Produced) -> ToolResult:
        output, end = self._output, self._output.end or ended("lost", "")
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
                files=produced.detailed_files(),
                files_complete=produced.complete,
                missing_files=produced.missing,
                truncated=output.truncated,
            ),
        )
        done = ItemDone(output_index=self._index, item=item)
        exchange = ToolExchange(
            call_id=self._context.call_id,
            name=NAME,
            arguments=replayable(self._field.text, {"code": self._field.value or ""}),
            output=self._told(produced, end),
            images=tuple(produced.urls) if self._context.takes_images else (),
        )
        return ToolResult(events=(*events, done), item=item, exchange=exchange, files=produced.files)

    def _told(self, produced: Produced, end: End) -> str:
        """What the model reads: news, output, files, and the exit code if it is not 0."""
        lines = [self._place.take_news(), self._output.told.text(_LEFT_OUT).rstrip("\n")]
        lines.append(named(produced.files))
        if end.exit_code:
            lines.append(f"Exit code: {end.exit_code}")
        return "\n".join(line for line in lines if line) or NOTHING
