"""One call of the code interpreter: streams its code, executes it, and builds the result."""

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import (
    Clock,
    ContainerEvent,
    ExecutionStarted,
    ToolCallContext,
    ToolCallResult,
    ToolCallStep,
)
from fumehood.protocol.conversation import ToolExchange
from fumehood.protocol.openai.api_errors import ApiError
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    CallStatus,
    CodeInterpreterCall,
    CodeInterpreterLogs,
    ExecutionDetails,
)
from fumehood.protocol.openai.stream_events import (
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallFailed,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    OutputItemAdded,
    OutputItemDone,
    StreamEvent,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    Requirements,
    make_execution_end,
)
from fumehood.protocol.streaming_json import StringFieldScanner
from fumehood.tools.call_arguments import decode_arguments, to_replayable
from fumehood.tools.call_output_collector import NO_OUTPUT, RAN_STATUSES, CallOutput, OutputLimits
from fumehood.tools.container_binding import ContainerBinding
from fumehood.tools.produced_files import InlineLimits, ProducedFileCollector, ProducedFiles, describe_files

TOOL_NAME = "code_interpreter"

ANNOUNCED_LIBRARIES = (
    *("numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "seaborn"),
    *("sympy", "pillow", "pyarrow", "openpyxl"),
)
_OMISSION_MARK = (
    "[{left_out:,} characters are left out here. Print less, or write to a file and look at parts of it.]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeInterpreterToolSettings:
    """Settings of the code interpreter.

    execution_timeout: seconds that the code of one call may run.
    keeps_variables: whether containers keep variables between calls; only for the tool description.
    python, libraries: for the tool description.
    """

    execution_timeout: float = 60.0
    keeps_variables: bool = True
    inline: InlineLimits = field(default_factory=InlineLimits)
    output: OutputLimits = field(default_factory=OutputLimits)
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    libraries: tuple[str, ...] = ANNOUNCED_LIBRARIES


class _InterpreterArguments(msgspec.Struct):
    code: str
    requirements: Requirements | None = None


_arguments_decoder = msgspec.json.Decoder(_InterpreterArguments)


class InterpreterCallSession:
    """A `ToolCallSession`."""

    def __init__(
        self,
        binding: ContainerBinding,
        settings: CodeInterpreterToolSettings,
        clock: Clock,
        context: ToolCallContext,
    ) -> None:
        self._binding = binding
        self._settings = settings
        self._clock = clock
        self._context = context
        self._index = context.output_index
        self._id = new_id("ci")
        self._code_field = StringFieldScanner("code")
        self._output = CallOutput(settings.output)
        self._is_code_done = False
        self._started_at: float | None = None

    # ---- while the model writes -----------------------------------------------------------------------------------

    def open(self) -> Sequence[StreamEvent]:
        item = CodeInterpreterCall(id=self._id, container_id=self._binding.container_id, outputs=[])
        return (
            OutputItemAdded(output_index=self._index, item=item),
            CodeInterpreterCallInProgress(item_id=self._id, output_index=self._index),
        )

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        item_id, index = self._id, self._index
        return [
            CodeInterpreterCallCodeDelta(item_id=item_id, output_index=index, delta=delta)
            for delta in self._code_field.feed(fragments)
        ]

    # ---- execution --------------------------------------------------------------------------------------

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        try:
            arguments = self._read_arguments()
        except ValueError as error:
            yield self._fail(f"Nothing ran: {error}.")
            return
        yield self._finish_code()
        try:
            container = await self._binding.open()
        except ApiError as error:
            yield self._fail(f"The code did not run: {error.message}")
            return
        request = ExecuteRequest(
            code=arguments.code,
            timeout_seconds=self._settings.execution_timeout,
            requirements=arguments.requirements or [],
        )
        remaining = self._context.deadline - self._clock.monotonic()
        async with aclosing(container.execute(request, remaining)) as events:
            async for event in events:
                if step := self._add_event(event):
                    yield step
        collector = ProducedFileCollector(
            self._binding.containers,
            container,
            self._context.caller,
            limits=self._settings.inline,
            max_images=self._settings.output.images,
            content_budget=self._settings.inline.total_bytes if self._context.wants_contents else None,
        )
        yield self._finish(await collector.collect(self._output.images))

    def _read_arguments(self) -> _InterpreterArguments:
        """Raises ValueError with a sentence for the model."""
        arguments = decode_arguments(_arguments_decoder, self._code_field.text)
        if arguments.code != self._code_field.value:
            raise ValueError("the arguments name `code` more than once")
        return arguments

    def _add_event(self, event: ContainerEvent) -> Sequence[StreamEvent]:
        """Collect an event of the code, and return the events that it causes."""
        self._output.add_event(event)
        # It comes again from a second sandbox if the first one is lost.
        if not isinstance(event, ExecutionStarted) or self._started_at is not None:
            return ()
        self._started_at = self._clock.monotonic()
        return (CodeInterpreterCallInterpreting(item_id=self._id, output_index=self._index),)

    def abort(self, reason: str) -> ToolCallResult:
        seconds = 0.0 if self._started_at is None else self._clock.monotonic() - self._started_at
        self._output.add_event(
            make_execution_end("interrupted", f"The call was not finished: {reason}.", seconds)
        )
        return self._build_result("incomplete", self._finish_code(), ProducedFiles())

    # ---- result -----------------------------------------------------------------------------------------

    def _finish_code(self) -> tuple[StreamEvent, ...]:
        if self._is_code_done:
            return ()
        self._is_code_done = True
        return (
            CodeInterpreterCallCodeDone(
                item_id=self._id, output_index=self._index, code=self._code_field.value or ""
            ),
        )

    def _fail(self, reason: str) -> ToolCallResult:
        """The result of a call that did not run."""
        self._output.add_event(make_execution_end("lost", reason))
        return self._finish(ProducedFiles())

    def _finish(self, produced: ProducedFiles) -> ToolCallResult:
        completed = self._output.end is not None and self._output.end.status in RAN_STATUSES
        kind = CodeInterpreterCallCompleted if completed else CodeInterpreterCallFailed
        last = kind(item_id=self._id, output_index=self._index)
        status: CallStatus = "completed" if completed else "failed"
        return self._build_result(status, (*self._finish_code(), last), produced)

    def _build_result(
        self, status: CallStatus, events: Sequence[StreamEvent], produced: ProducedFiles
    ) -> ToolCallResult:
        output, end = self._output, self._output.end or make_execution_end("lost", "")
        item = CodeInterpreterCall(
            id=self._id,
            status=status,
            code=self._code_field.value or "",
            container_id=self._binding.container_id,
            outputs=[
                *([] if output.logs.is_empty else [CodeInterpreterLogs(logs=output.logs.render())]),
                *produced.images,
            ],
            execution=ExecutionDetails(
                stdout=output.stdout.render(),
                stderr=output.stderr.render(),
                exit_code=end.exit_code,
                duration_ms=end.duration_ms,
                files=produced.list_details(),
                files_complete=produced.is_complete,
                missing_files=produced.missing,
                truncated=output.is_truncated,
            ),
        )
        done = OutputItemDone(output_index=self._index, item=item)
        exchange = ToolExchange(
            call_id=self._context.call_id,
            name=TOOL_NAME,
            arguments=to_replayable(self._code_field.text, {"code": self._code_field.value or ""}),
            output=self._format_for_model(produced, end),
            images=tuple(produced.model_image_urls) if self._context.accepts_images else (),
        )
        return ToolCallResult(
            events=(*events, done),
            item=item,
            exchange=exchange,
            files=produced.files,
            error_type="" if end.status in RAN_STATUSES else end.status,
        )

    def _format_for_model(self, produced: ProducedFiles, end: ExecutionEnd) -> str:
        """The text for the model: notices, output, files, and a nonzero exit code."""
        lines = [self._binding.pop_notices(), self._output.model_text.render(_OMISSION_MARK).rstrip("\n")]
        lines.append(describe_files(produced.files))
        if end.exit_code:
            lines.append(f"Exit code: {end.exit_code}")
        return "\n".join(line for line in lines if line) or NO_OUTPUT
