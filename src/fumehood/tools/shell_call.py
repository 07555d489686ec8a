"""One call of the shell: streams its commands, runs them one after another, and builds the result.

A call makes two items: `shell_call` with the commands, done when the model has written them, and `shell_call_output`,
which grows while they run.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fumehood.interfaces import (
    AdditionalItem,
    Clock,
    Container,
    ContainerEvent,
    ToolCallContext,
    ToolCallResult,
    ToolCallStep,
)
from fumehood.protocol.conversation import ToolExchange
from fumehood.protocol.openai.api_errors import ApiError
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    ContainerReference,
    ExecutionDetails,
    ItemStatus,
    ProducedFile,
    ShellAction,
    ShellCall,
    ShellCallOutput,
    ShellCallOutputContent,
    ShellExit,
    ShellTimeout,
)
from fumehood.protocol.openai.shell_command_stream import MAX_SHELL_COMMANDS, ShellCommandStream
from fumehood.protocol.openai.stream_events import (
    OutputItemAdded,
    OutputItemDone,
    ShellCallCommandDone,
    ShellCallOutputDelta,
    ShellCallOutputDone,
    ShellOutputText,
    StreamEvent,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionNote,
    Stderr,
    Stdout,
    make_execution_end,
)
from fumehood.tools.call_arguments import decode_arguments, to_replayable
from fumehood.tools.call_output_collector import NO_OUTPUT, RAN_STATUSES, CallOutput, OutputLimits
from fumehood.tools.container_binding import ContainerBinding
from fumehood.tools.produced_files import InlineLimits, ProducedFileCollector, ProducedFiles, describe_files

TOOL_NAME = "shell"
_OMISSION_MARK = "[{left_out:,} characters are left out here. Write to a file, and look at parts of it.]"
_MAX_HEADING_LENGTH = 200
_CONTINUABLE_STATUSES = RAN_STATUSES | {"timeout"}  # after any other, the container has lost its state


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellToolSettings:
    """Settings of the shell.

    execution_timeout: seconds that one command may run; the model may choose less.
    keeps_processes: whether containers keep background processes between calls; only for the tool description.
    inline: limits of file contents in items; larger images are not sent to models.
    """

    execution_timeout: float = 60.0
    keeps_processes: bool = True
    inline: InlineLimits = field(default_factory=InlineLimits)
    output: OutputLimits = field(default_factory=OutputLimits)


class _ShellArguments(msgspec.Struct):
    commands: Annotated[list[str], Meta(min_length=1, max_length=MAX_SHELL_COMMANDS)]
    timeout_ms: Annotated[int, Meta(ge=1)] | None = None
    max_output_length: Annotated[int, Meta(ge=1)] | None = None

    @property
    def action(self) -> ShellAction:
        return ShellAction(
            commands=self.commands, timeout_ms=self.timeout_ms, max_output_length=self.max_output_length
        )


_arguments_decoder = msgspec.json.Decoder(_ShellArguments)


class ShellCallSession:
    """A `ToolCallSession`."""

    def __init__(
        self, binding: ContainerBinding, settings: ShellToolSettings, clock: Clock, context: ToolCallContext
    ) -> None:
        self._binding = binding
        self._settings = settings
        self._clock = clock
        self._context = context
        self._index = context.output_index
        self._commands = ShellCommandStream()
        self._call = ShellCall(
            id=new_id("sh"),
            call_id=context.call_id,
            action=ShellAction(),
            environment=ContainerReference(container_id=binding.container_id),
        )
        self._call_output: _ShellOutputBuilder | None = None

    # ---- while the model writes -----------------------------------------------------------------------------------

    def open(self) -> Sequence[StreamEvent]:
        return (OutputItemAdded(output_index=self._index, item=self._call),)

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        return self._commands.make_events(self._commands.feed(fragments), self._index)

    # ---- execution --------------------------------------------------------------------------------------

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        try:
            arguments = self._read_arguments()
        except ValueError as error:
            yield self._build_unrun_result(f"Nothing ran: {error}.")
            return
        self._call = replace(self._call, action=arguments.action, status="completed")
        output = self._call_output = _ShellOutputBuilder(arguments, self._settings.output, self._context)
        yield [OutputItemDone(output_index=self._index, item=self._call), output.make_added_event()]
        try:
            container = await self._binding.open()
        except ApiError as error:
            events = output.end_all(f"The command did not run: {error.message}")
            yield self._build_result(events, ProducedFiles())
            return
        produced = ProducedFiles()
        max_ms = self._settings.execution_timeout * 1000
        timeout = min(max_ms, arguments.timeout_ms or max_ms) / 1000  # the model may send a huge integer
        for command in arguments.commands:
            if output.stop_reason is not None:
                break
            output.begin_command()
            request = ExecuteRequest(code=command, language="shell", timeout_seconds=timeout)
            remaining = self._context.deadline - self._clock.monotonic()
            async with aclosing(container.execute(request, remaining)) as events:
                async for event in events:
                    if step := output.add_event(event):
                        yield step
            await self._collect_files(container, produced)
        await self._drop_deleted_files(produced, len(output.command_outputs))
        yield self._build_result(output.end_all(output.stop_reason or ""), produced)

    def _read_arguments(self) -> _ShellArguments:
        """Raises ValueError with a sentence for the model."""
        arguments = decode_arguments(_arguments_decoder, self._commands.arguments)
        if arguments.commands != self._commands.commands:
            raise ValueError("the arguments name `commands` more than once")
        return arguments

    async def _collect_files(self, container: Container, produced: ProducedFiles) -> None:
        """Add the files of a command to those of the previous ones."""
        settings = self._settings
        budget = None
        if self._context.wants_contents:
            sent = sum(file.bytes for file in produced.details.values() if file.content is not None)
            budget = max(0, settings.inline.total_bytes - sent)
        collector = ProducedFileCollector(
            self._binding.containers,
            container,
            self._context.caller,
            limits=settings.inline,
            max_images=max(0, settings.output.images - len(produced.model_image_urls)),
            content_budget=budget,
        )
        added = await collector.collect(())
        added_ids = {file.file_id for file in added.files}
        produced.files = [file for file in produced.files if file.file_id not in added_ids] + added.files
        produced.details |= added.details
        produced.model_image_urls += added.model_image_urls
        # The last collection counts: it may have fetched what an earlier one could not.
        produced.missing, produced.is_complete = added.missing, added.is_complete

    async def _drop_deleted_files(self, produced: ProducedFiles, commands: int) -> None:
        """Drop files that a later command deleted."""
        if commands > 1 and produced.files:
            existing = {file.file_id for file in await self._binding.list_files()}
            produced.files = [file for file in produced.files if file.file_id in existing]

    # ---- result -----------------------------------------------------------------------------------------

    def abort(self, reason: str) -> ToolCallResult:
        reason = f"The call was not finished: {reason}."
        if self._call_output is None:
            return self._build_unrun_result(reason)
        return self._build_result(self._call_output.end_all(reason), ProducedFiles())

    def _build_unrun_result(self, reason: str) -> ToolCallResult:
        """The result of a call that did not run: only the first item."""
        commands = self._commands.announced_commands
        last = len(commands) - 1
        events: list[StreamEvent] = []
        if len(commands) > len(self._commands.complete_commands):
            events.append(
                ShellCallCommandDone(output_index=self._index, command_index=last, command=commands[last])
            )
        self._call = replace(self._call, action=ShellAction(commands=commands), status="incomplete")
        events.append(OutputItemDone(output_index=self._index, item=self._call))
        exchange = self._make_exchange(reason, ())
        return ToolCallResult(events=events, item=self._call, exchange=exchange, error_type="lost")

    def _build_result(self, events: Sequence[StreamEvent], produced: ProducedFiles) -> ToolCallResult:
        output = self._call_output
        if output is None:
            raise AssertionError("a result without commands that ran")
        item, done = output.finish(produced)
        images = tuple(produced.model_image_urls) if self._context.accepts_images else ()
        exchange = self._make_exchange(self._format_for_model(output, produced.files), images)
        return ToolCallResult(
            events=(*events, done),
            item=self._call,
            exchange=replace(exchange, half="call", output="", images=()),
            additional_items=[
                AdditionalItem(
                    output_index=output.index,
                    item=item,
                    exchange=replace(exchange, half="result", arguments=""),
                )
            ],
            files=produced.files,
            error_type=output.error_type,
        )

    def _make_exchange(self, output: str, images: tuple[str, ...]) -> ToolExchange:
        return ToolExchange(
            call_id=self._context.call_id,
            name=TOOL_NAME,
            arguments=to_replayable(self._commands.arguments, {"commands": self._commands.commands}),
            output=output,
            images=images,
        )

    def _format_for_model(self, output: "_ShellOutputBuilder", files: Sequence[ProducedFile]) -> str:
        """The text for the model: notices, output and exit code of each command, and files."""
        lines = [self._binding.pop_notices(), *output.format_for_model(), describe_files(files)]
        return "\n".join(line for line in lines if line) or NO_OUTPUT


class _ShellOutputBuilder:
    """Builds the item `shell_call_output`, command by command.

    command_outputs: of the commands that have begun. stop_reason: why the rest will not run.
    """

    def __init__(self, arguments: _ShellArguments, limits: OutputLimits, context: ToolCallContext) -> None:
        self.index = context.allocate_output_index()
        self.command_outputs: list[CallOutput] = []
        self.stop_reason: str | None = None
        self._commands = arguments.commands
        self._limits = _divide_limits(limits, len(self._commands), arguments.max_output_length)
        self._streamed_characters = 0  # of the running command
        self._item = ShellCallOutput(
            id=new_id("sho"), call_id=context.call_id, max_output_length=arguments.max_output_length
        )

    @property
    def error_type(self) -> str:
        """How the first command ended that did not come to its end; empty if all did."""
        ends = [output.end for output in self.command_outputs if output.end is not None]
        return next((end.status for end in ends if end.status not in _CONTINUABLE_STATUSES), "")

    def make_added_event(self) -> StreamEvent:
        return OutputItemAdded(output_index=self.index, item=self._item)

    def begin_command(self) -> None:
        self.command_outputs.append(CallOutput(self._limits))
        self._streamed_characters = 0

    def add_event(self, event: ContainerEvent) -> Sequence[StreamEvent]:
        """Collect an event of the running command, and return the events that it causes."""
        self.command_outputs[-1].add_event(event)
        match event:
            case Stdout(text):
                return self._make_delta_events(ShellOutputText(stdout=text))
            case Stderr(text):
                return self._make_delta_events(ShellOutputText(stderr=text))
            case ExecutionNote(text):
                return self._make_delta_events(ShellOutputText(stderr=f"{text}\n"))
            case ExecutionEnd():
                if event.status not in _CONTINUABLE_STATUSES:
                    self.stop_reason = "The command did not run, since one before it did not come to its end."
                return [self._make_done_event(len(self.command_outputs) - 1)]
            case _:  # a shell sends no other events
                return []

    def _make_delta_events(self, text: ShellOutputText) -> list[StreamEvent]:
        """Stream deltas up to the stored length; of longer output, the item has the beginning and the end."""
        if self._streamed_characters > self._limits.stored_output_characters:
            return []
        self._streamed_characters += len(text.stdout) + len(text.stderr)
        number = len(self.command_outputs) - 1
        delta = ShellCallOutputDelta(
            item_id=self._item.id, output_index=self.index, command_index=number, delta=text
        )
        return [delta]

    def _make_done_event(self, number: int) -> StreamEvent:
        output = _to_shell_output(self.command_outputs[number])
        return ShellCallOutputDone(
            item_id=self._item.id, output_index=self.index, command_index=number, output=[output]
        )

    def end_all(self, reason: str) -> list[StreamEvent]:
        """End the running command and all that have not begun, with this reason."""
        events: list[StreamEvent] = []
        if self.command_outputs and self.command_outputs[-1].end is None:
            events += self.add_event(make_execution_end("interrupted", reason))
        while len(self.command_outputs) < len(self._commands):
            self.begin_command()
            events += self.add_event(make_execution_end("lost", reason))
        return events

    def finish(self, produced: ProducedFiles) -> tuple[ShellCallOutput, StreamEvent]:
        ends = [output.end or make_execution_end("lost", "") for output in self.command_outputs]
        all_ended = all(end.status in _CONTINUABLE_STATUSES for end in ends)
        status: ItemStatus = "completed" if all_ended else "incomplete"
        contents = [_to_shell_output(output) for output in self.command_outputs]
        execution = ExecutionDetails(
            stdout=_join_lines(content.stdout for content in contents),
            stderr=_join_lines(content.stderr for content in contents),
            exit_code=ends[-1].exit_code,
            duration_ms=sum(end.duration_ms for end in ends),
            files=produced.list_details(),
            files_complete=produced.is_complete,
            missing_files=produced.missing,
            truncated=any(output.is_truncated for output in self.command_outputs),
        )
        item = replace(self._item, output=contents, status=status, execution=execution)
        return item, OutputItemDone(output_index=self.index, item=item)

    def format_for_model(self) -> list[str]:
        lines: list[str] = []
        for command, output in zip(self._commands, self.command_outputs, strict=True):
            if len(self._commands) > 1:
                lines.append(f"$ {_format_heading(command)}")
            lines.append(output.model_text.render(_OMISSION_MARK).rstrip("\n"))
            if output.end is not None and output.end.exit_code:
                lines.append(f"Exit code: {output.end.exit_code}")
        return lines


def _divide_limits(limits: OutputLimits, commands: int, length: int | None) -> OutputLimits:
    """The share of one command, so that all commands together stay within the limits of a call."""
    model = limits.model_output_characters // commands
    stored = limits.stored_output_characters // commands
    return OutputLimits(
        model_output_characters=min(model, length or model),
        stored_output_characters=min(stored, length or stored),
        images=0,
    )


def _to_shell_output(output: CallOutput) -> ShellCallOutputContent:
    end = output.end or make_execution_end("lost", "")
    return ShellCallOutputContent(
        stdout=output.stdout.render(),
        stderr=output.stderr.render(),
        outcome=ShellTimeout() if end.status == "timeout" else ShellExit(exit_code=end.exit_code),
    )


def _join_lines(texts: Iterable[str]) -> str:
    """Join texts, each beginning on a new line."""
    joined = ""
    for text in texts:
        joined += f"\n{text}" if text and joined and joined[-1] != "\n" else text
    return joined


def _format_heading(command: str) -> str:
    first, _, rest = command.strip().partition("\n")
    return f"{first[:_MAX_HEADING_LENGTH]} …" if rest or len(first) > _MAX_HEADING_LENGTH else first
