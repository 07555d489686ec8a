"""One call of the shell, from its first character to its result; imports `interfaces` and siblings.

A call is two items. The first, the commands, is done when the model has written it; the second, what they say, begins
then, and grows while they run, one after another.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fumehood.interfaces import CallContext, Clock, Container, FurtherItem, Started, ToolResult, ToolStep
from fumehood.protocol.conversation import ToolExchange
from fumehood.protocol.errors import ApiError
from fumehood.protocol.events import (
    CommandAdded,
    CommandDelta,
    CommandDone,
    ItemAdded,
    ItemDone,
    ShellOutputDelta,
    ShellOutputDone,
    ShellText,
    StreamEvent,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import (
    ContainerReference,
    Execution,
    ItemStatus,
    ProducedFile,
    ShellAction,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
    ShellTimeout,
)
from fumehood.protocol.sandbox import AnyOutput, End, ExecuteRequest, Note, Stderr, Stdout
from fumehood.protocol.streaming_json import StringPiece, StringsField
from fumehood.tools.arguments import read_arguments, replayable
from fumehood.tools.code_output import CodeOutput, OutputLimits
from fumehood.tools.produced import Gatherer, InlineLimits, Produced, named
from fumehood.tools.running import NOTHING, RAN, ended, executed
from fumehood.tools.workplace import Workplace

NAME = "shell"
MOST_COMMANDS = 64
_LEFT_OUT = "[{left_out:,} characters are left out here. Write to a file, and look at parts of it.]"
_LONGEST_HEADING = 200
_WENT_ON = RAN | {"timeout"}  # after anything else the rest would not find what it stands on


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellSettings:
    """How the shell runs commands, and what the model is told of it.

    execution_timeout: seconds that one command may run; the model may choose less.
    keeps_processes: whether what runs in the background is there in the next call: what the containers do, for the
        model to know.
    inline: how much of what produced files hold is sent inside of items; larger pictures are not shown to models.
    """

    execution_timeout: float = 60.0
    keeps_processes: bool = True
    inline: InlineLimits = field(default_factory=InlineLimits)
    output: OutputLimits = field(default_factory=OutputLimits)


class _Arguments(msgspec.Struct):
    commands: Annotated[list[str], Meta(min_length=1, max_length=MOST_COMMANDS)]
    timeout_ms: Annotated[int, Meta(ge=1)] | None = None
    max_output_length: Annotated[int, Meta(ge=1)] | None = None

    @property
    def action(self) -> ShellAction:
        return ShellAction(
            commands=self.commands, timeout_ms=self.timeout_ms, max_output_length=self.max_output_length
        )


_arguments = msgspec.json.Decoder(_Arguments)


class ShellSession:
    """A `CallSession`."""

    def __init__(
        self, workplace: Workplace, settings: ShellSettings, clock: Clock, context: CallContext
    ) -> None:
        self._place = workplace
        self._settings = settings
        self._clock = clock
        self._context = context
        self._index = context.output_index
        self._field = StringsField("commands")
        self._begun = 0  # commands that were told
        self._call = ShellCall(
            id=new_id("sh"),
            call_id=context.call_id,
            action=ShellAction(),
            environment=ContainerReference(container_id=workplace.container_id),
        )
        self._answer: _Answer | None = None

    # ---- while the model writes -----------------------------------------------------------------------------------

    def open(self) -> Sequence[StreamEvent]:
        return (ItemAdded(output_index=self._index, item=self._call),)

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        return [
            event
            for fragment in fragments
            for piece in self._field.feed(fragment)
            for event in self._written(piece)
        ]

    def _written(self, piece: StringPiece) -> list[StreamEvent]:
        number, index = piece.number, self._index
        events: list[StreamEvent] = []
        if number == self._begun:
            self._begun += 1
            events.append(CommandAdded(output_index=index, command_index=number))
        if piece.text:
            events.append(CommandDelta(output_index=index, command_index=number, delta=piece.text))
        if piece.over:
            command = self._field.values[number]
            events.append(CommandDone(output_index=index, command_index=number, command=command))
        return events

    # ---- when it has written --------------------------------------------------------------------------------------

    async def run(self) -> AsyncGenerator[ToolStep]:
        try:
            arguments = self._read_arguments()
        except ValueError as error:
            yield self._unrun(f"Nothing ran: {error}.")
            return
        self._call = replace(self._call, action=arguments.action, status="completed")
        answer = self._answer = _Answer(arguments, self._settings.output, self._context)
        yield [ItemDone(output_index=self._index, item=self._call), answer.added()]
        try:
            container = await self._place.open()
        except ApiError as error:
            events = answer.end_all(f"The command did not run: {error.message}")
            yield self._result(events, Produced())
            return
        produced = Produced()
        for command in arguments.commands:
            if answer.stopped is not None:
                break
            async with aclosing(self._run_command(container, command, arguments, answer)) as steps:
                async for step in steps:
                    yield step
            await self._gather(container, produced)
        await self._forget_deleted(produced, len(answer.said))
        yield self._result(answer.end_all(answer.stopped or ""), produced)

    def _read_arguments(self) -> _Arguments:
        """Raises ValueError with a sentence for the model."""
        arguments = read_arguments(_arguments, self._field.text)
        if arguments.commands != self._field.values:
            raise ValueError("the arguments name `commands` more than once")
        return arguments

    async def _run_command(
        self, container: Container, command: str, arguments: _Arguments, answer: "_Answer"
    ) -> AsyncGenerator[Sequence[StreamEvent]]:
        longest = self._settings.execution_timeout * 1000
        request = ExecuteRequest(
            code=command,
            language="shell",
            timeout_seconds=min(longest, arguments.timeout_ms or longest) / 1000,  # of any size: no float yet
        )
        remaining = self._context.deadline - self._clock.monotonic()
        answer.begin()
        async with aclosing(executed(container, request, remaining)) as events:
            async for event in events:
                if not isinstance(event, Started) and (step := answer.take(event)):
                    yield step

    async def _gather(self, container: Container, produced: Produced) -> None:
        """What a command left, beside what those before it did."""
        settings = self._settings
        left = None
        if self._context.wants_contents:
            sent = sum(file.bytes for file in produced.details.values() if file.content is not None)
            left = max(0, settings.inline.total_bytes - sent)
        gatherer = Gatherer(
            self._place.containers,
            container,
            self._context.caller,
            limits=settings.inline,
            most=max(0, settings.output.images - len(produced.urls)),
            contents_left=left,
        )
        found = await gatherer.gather(())
        again = {file.file_id for file in found.files}
        produced.files = [file for file in produced.files if file.file_id not in again] + found.files
        produced.details |= found.details
        produced.urls += found.urls
        # What one command could not fetch, the look after the next one may have.
        produced.missing, produced.complete = found.missing, found.complete

    async def _forget_deleted(self, produced: Produced, commands: int) -> None:
        """What one command wrote, a later one may have removed."""
        if commands > 1 and produced.files:
            there = {file.file_id for file in await self._place.files()}
            produced.files = [file for file in produced.files if file.file_id in there]

    # ---- what comes of it -----------------------------------------------------------------------------------------

    def abort(self, reason: str) -> ToolResult:
        reason = f"The call was not finished: {reason}."
        if self._answer is None:
            return self._unrun(reason)
        return self._result(self._answer.end_all(reason), Produced())

    def _unrun(self, reason: str) -> ToolResult:
        """The result of a call that never ran: it is one item only."""
        commands = self._field.values[: self._begun]
        last = len(commands) - 1
        events: list[StreamEvent] = []
        if commands and not self._field.is_over(last):
            events.append(CommandDone(output_index=self._index, command_index=last, command=commands[last]))
        self._call = replace(self._call, action=ShellAction(commands=commands), status="incomplete")
        events.append(ItemDone(output_index=self._index, item=self._call))
        exchange = self._exchange(reason, ())
        return ToolResult(events=events, item=self._call, exchange=exchange)

    def _result(self, events: Sequence[StreamEvent], produced: Produced) -> ToolResult:
        answer = self._answer
        if answer is None:
            raise AssertionError("a result without commands that ran")
        item, done = answer.done(produced)
        images = tuple(produced.urls) if self._context.takes_images else ()
        exchange = self._exchange(self._told(answer, produced.files), images)
        return ToolResult(
            events=(*events, done),
            item=self._call,
            exchange=replace(exchange, tells="call", output="", images=()),
            further=[
                FurtherItem(
                    output_index=answer.index,
                    item=item,
                    exchange=replace(exchange, tells="result", arguments=""),
                )
            ],
            files=produced.files,
        )

    def _exchange(self, output: str, images: tuple[str, ...]) -> ToolExchange:
        return ToolExchange(
            call_id=self._context.call_id,
            name=NAME,
            arguments=replayable(self._field.text, {"commands": self._field.values}),
            output=output,
            images=images,
        )

    def _told(self, answer: "_Answer", files: Sequence[ProducedFile]) -> str:
        """What the model reads: news, what each command said and how it ended, and files."""
        lines = [self._place.take_news(), *answer.told(), named(files)]
        return "\n".join(line for line in lines if line) or NOTHING


class _Answer:
    """The second item of a call, command by command.

    said: what the commands that have begun said. stopped: why the rest will not run.
    """

    def __init__(self, arguments: _Arguments, limits: OutputLimits, context: CallContext) -> None:
        self.index = context.place()
        self.said: list[CodeOutput] = []
        self.stopped: str | None = None
        self._commands = arguments.commands
        self._limits = _shared(limits, len(self._commands), arguments.max_output_length)
        self._streamed = 0  # characters of the command that runs
        self._item = ShellCallOutput(
            id=new_id("sho"), call_id=context.call_id, max_output_length=arguments.max_output_length
        )

    def added(self) -> StreamEvent:
        return ItemAdded(output_index=self.index, item=self._item)

    def begin(self) -> None:
        self.said.append(CodeOutput(self._limits))
        self._streamed = 0

    def take(self, event: AnyOutput) -> list[StreamEvent]:
        """An event of the command that runs."""
        self.said[-1].take(event)
        match event:
            case Stdout(text):
                return self._delta(ShellText(stdout=text))
            case Stderr(text):
                return self._delta(ShellText(stderr=text))
            case Note(text):
                return self._delta(ShellText(stderr=f"{text}\n"))
            case End():
                if event.status not in _WENT_ON:
                    self.stopped = "The command did not run, since one before it did not come to its end."
                return [self._command_done(len(self.said) - 1)]
            case _:  # a shell shows nothing else
                return []

    def _delta(self, text: ShellText) -> list[StreamEvent]:
        """The event for it, until as much was sent as is kept: of more, the item shows the beginning and the end."""
        if self._streamed > self._limits.kept_characters:
            return []
        self._streamed += len(text.stdout) + len(text.stderr)
        number = len(self.said) - 1
        delta = ShellOutputDelta(
            item_id=self._item.id, output_index=self.index, command_index=number, delta=text
        )
        return [delta]

    def _command_done(self, number: int) -> StreamEvent:
        output = _output(self.said[number])
        return ShellOutputDone(
            item_id=self._item.id, output_index=self.index, command_index=number, output=[output]
        )

    def end_all(self, reason: str) -> list[StreamEvent]:
        """End what runs, and what has not begun, for this reason."""
        events: list[StreamEvent] = []
        if self.said and self.said[-1].end is None:
            events += self.take(ended("interrupted", reason))
        while len(self.said) < len(self._commands):
            self.begin()
            events += self.take(ended("lost", reason))
        return events

    def done(self, produced: Produced) -> tuple[ShellCallOutput, StreamEvent]:
        ends = [one.end or ended("lost", "") for one in self.said]
        whole = all(end.status in _WENT_ON for end in ends)
        status: ItemStatus = "completed" if whole else "incomplete"
        output = [_output(one) for one in self.said]
        execution = Execution(
            stdout=_in_a_row(one.stdout for one in output),
            stderr=_in_a_row(one.stderr for one in output),
            exit_code=ends[-1].exit_code,
            duration_ms=sum(end.duration_ms for end in ends),
            files=produced.detailed_files(),
            files_complete=produced.complete,
            missing_files=produced.missing,
            truncated=any(one.truncated for one in self.said),
        )
        item = replace(self._item, output=output, status=status, execution=execution)
        return item, ItemDone(output_index=self.index, item=item)

    def told(self) -> list[str]:
        lines: list[str] = []
        for command, said in zip(self._commands, self.said, strict=True):
            if len(self._commands) > 1:
                lines.append(f"$ {_heading(command)}")
            lines.append(said.told.text(_LEFT_OUT).rstrip("\n"))
            if said.end is not None and said.end.exit_code:
                lines.append(f"Exit code: {said.end.exit_code}")
        return lines


def _shared(limits: OutputLimits, commands: int, length: int | None) -> OutputLimits:
    """The share of one command, so that all together keep to what one call may say."""
    model, kept = (most // commands for most in (limits.model_characters, limits.kept_characters))
    return OutputLimits(
        model_characters=min(model, length or model), kept_characters=min(kept, length or kept), images=0
    )


def _output(said: CodeOutput) -> ShellOutput:
    end = said.end or ended("lost", "")
    return ShellOutput(
        stdout=said.stdout.text(),
        stderr=said.stderr.text(),
        outcome=ShellTimeout() if end.status == "timeout" else ShellExit(exit_code=end.exit_code),
    )


def _in_a_row(texts: Iterable[str]) -> str:
    """Each beginning with a line of its own."""
    whole = ""
    for text in texts:
        whole += f"\n{text}" if text and whole and whole[-1] != "\n" else text
    return whole


def _heading(command: str) -> str:
    first, _, rest = command.strip().partition("\n")
    return f"{first[:_LONGEST_HEADING]} …" if rest or len(first) > _LONGEST_HEADING else first
