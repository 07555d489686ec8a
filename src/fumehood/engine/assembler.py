"""Turns what a model writes into items and events; imports `interfaces`, `protocol` and siblings.

One `Turn` assembles one turn of the model. Items get their place when they begin, and events their number when they
enter the log: nothing is counted anywhere else. Calls of hosted tools are handed to their sessions piece by piece;
what those answer with is theirs.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.aside import LARGE
from fumehood.engine.calls import WrittenCall, WrittenCustomCall, WrittenFunctionCall, is_whole
from fumehood.engine.output import Output
from fumehood.engine.prose import WrittenMessage, WrittenReasoning
from fumehood.interfaces import CallContext, CallSession, OfferedTool, ToolResult
from fumehood.protocol.conversation import COMPACTION, Entry, ToolExchange
from fumehood.protocol.errors import ModelError
from fumehood.protocol.events import ItemAdded, ItemDone, StreamEvent
from fumehood.protocol.items import AuthoredItem, ItemStatus, OutputItem, Phase, ProducedFile
from fumehood.protocol.models import (
    AnyModelEvent,
    CallArguments,
    CallStarted,
    Cited,
    ItemPassed,
    MessageStarted,
    ReasoningEnded,
    ReasoningStarted,
    Refused,
    Summary,
    Text,
    Thought,
    TurnEnded,
)


class Toolbox(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may call: hosted tools, and the client's functions and custom tools, by name."""

    hosted: Mapping[str, OfferedTool]
    functions: frozenset[str] = frozenset()
    customs: frozenset[str] = frozenset()

    def without_hosted(self) -> "Toolbox":
        return Toolbox(hosted={}, functions=self.functions, customs=self.customs)


@dataclass(slots=True)
class HostedCall:
    """A call that a hosted tool answers; `result` once it has."""

    index: int
    call_id: str
    session: CallSession
    result: ToolResult | None = None


@dataclass(slots=True)
class _UnknownCall:
    """A call of something that is not there: only the model hears of it."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list[str])


class Turn:
    """One turn of the model.

    ended: how the model's server said that it ended, once it has.
    hosted: the calls that are run here; client_calls, ignored_calls: how many others there were.
    context: what a hosted call is told, by its output index and its id.
    most_hosted: how many hosted calls are still allowed; further ones are ignored.
    one_call: only the first call of the turn counts.
    most_written: how many characters the model may write, and a quarter of that in pieces.
    """

    def __init__(
        self,
        number: int,
        output: Output,
        toolbox: Toolbox,
        context: Callable[[int, str], CallContext],
        *,
        most_hosted: int | None = None,
        one_call: bool = False,
        most_written: int = sys.maxsize,
    ) -> None:
        self.number = number
        self.ended: TurnEnded | None = None
        self.hosted: list[HostedCall] = []
        self.client_calls = 0
        self.ignored_calls = 0
        self._output = output
        self._toolbox = toolbox
        self._context = context
        self._most_hosted = most_hosted
        self._one_call = one_call
        self._most_written = most_written
        self._written = 0  # characters
        self._pieces = 0
        # What is open: at most one message or one reasoning, and any number of calls, by the model's own keys. None is
        # a call that is over, or is ignored.
        self._message: WrittenMessage | None = None
        self._phase: Phase | None = None  # of the message that is to come
        self._reasoning: WrittenReasoning | None = None
        self._calls: dict[int, HostedCall | WrittenCall | _UnknownCall | None] = {}
        # What is done: items by their output index, calls of what is not there, and events that wait to enter the log.
        self._made: dict[int, Entry] = {}
        self._unknown: list[_UnknownCall] = []
        self._pending: list[StreamEvent] = []

    # --- while the model writes ---

    def take(self, batch: Sequence[AnyModelEvent]) -> bool:
        """As `feed`, but at once, for a batch that only goes on with the text or the calls that are open; whether it is
        one. Nothing is done with any other. Raises ModelError.
        """
        message = self._message
        in_text = message is not None and message.text is not None
        for event in batch:
            if not (in_text if type(event) is Text else type(event) is CallArguments):
                return False
        feeding = self.feed(batch)
        try:
            feeding.send(None)
        except StopIteration:
            return True
        raise RuntimeError("What goes on has nothing to wait for.")

    async def feed(self, batch: Sequence[AnyModelEvent]) -> None:
        """Everything that one read brought; its events enter the log together. Raises ModelError."""
        pending = self._pending
        written = 0
        key = -1
        fragments: list[str] = []  # of that call; it is fed with all of them at once
        for event in batch:
            if fragments and not (type(event) is CallArguments and event.key == key):
                pending += self._feed_call(key, fragments)
                fragments = []
            if type(event) is Text:
                written += len(event.delta)
                message = self._message
                if message is None or message.text is None:
                    message = await self._open_text()
                pending.append(message.write(event.delta, event.logprobs))
            elif type(event) is CallArguments:
                written += len(event.delta)
                key = event.key
                fragments.append(event.delta)
            elif type(event) is Thought:
                written += len(event.delta)
                reasoning = self._reasoning
                if reasoning is None or reasoning.thoughts is None:
                    reasoning = await self._open_thoughts()
                pending.append(reasoning.think(event.delta))
            else:
                written += await self._feed_rarer(event)
        if fragments:
            pending += self._feed_call(key, fragments)
        self._written += written
        self._pieces += len(batch)
        self._flush()
        if self._written > self._most_written or self._pieces > self._most_written // 4:
            raise ModelError("The model wrote without end, and was cut off.")

    async def _feed_rarer(
        self,
        event: CallStarted
        | TurnEnded
        | Refused
        | Summary
        | MessageStarted
        | Cited
        | ReasoningStarted
        | ReasoningEnded
        | ItemPassed,
    ) -> int:
        """What does not come by the thousand; how many characters it was."""
        match event:
            case CallStarted():
                await self._start_call(event)
            case TurnEnded():
                self.ended = event
            case Refused():
                self._pending.append((await self._open_refusal()).refuse(event.delta))
                return len(event.delta)
            case Summary():
                reasoning = self._reasoning or await self._open_reasoning(shown=False)
                self._pending += reasoning.summarise(event.index, event.delta)
                return len(event.delta)
            case MessageStarted():
                self._close_reasoning()
                await self._close_message("completed")
                self._phase = event.phase
            case Cited():
                if self._message is not None and self._message.text is not None:
                    self._pending.append(self._message.cite(event.citation))
            case ReasoningStarted():
                await self._open_reasoning(shown=False)
            case ReasoningEnded():
                if self._reasoning is None:
                    await self._open_reasoning(shown=False)
                self._close_reasoning(event.sealed)
            case ItemPassed():
                await self._pass_item(event)
                return len(bytes(event.item))
        return 0

    async def _pass_item(self, event: ItemPassed) -> None:
        if msgspec.json.decode(event.item, type=_Tag).type == COMPACTION:
            return  # one of another server's stands for nothing here, and nobody could go on after it
        self._close_reasoning()
        await self._close_message("completed")
        self._close_whole_calls()
        index = self._output.place()
        self._pending += [
            ItemAdded(output_index=index, item=event.item),
            ItemDone(output_index=index, item=event.item),
        ]
        self._finish(index, event.item)
        self.client_calls += event.open

    def _flush(self) -> None:
        if self._pending:
            self._output.emit(self._pending)
            self._pending.clear()

    async def _flush_in_turns(self) -> None:
        """One by one where much was written: every event that closes something says all of it once more, and others
        want to be served meanwhile.
        """
        while self._written >= LARGE and self._pending:
            self._output.emit([self._pending.pop(0)])
            await asyncio.sleep(0)
        self._flush()

    async def _open_message(self) -> WrittenMessage:
        if self._reasoning is not None:
            self._close_reasoning()
        if self._message is None:
            self._message = WrittenMessage(self._output.place(), self._phase)
            self._phase = None
            self._pending.append(self._message.begin())
        else:
            self._pending += await self._message.end_part(self._find_files)
        return self._message

    async def _open_text(self) -> WrittenMessage:
        message = await self._open_message()
        self._pending.append(message.begin_text())
        return message

    async def _open_refusal(self) -> WrittenMessage:
        if self._message is not None and self._message.refusal is not None:
            return self._message
        message = await self._open_message()
        self._pending.append(message.begin_refusal())
        return message

    async def _open_reasoning(self, *, shown: bool) -> WrittenReasoning:
        self._close_reasoning()
        await self._close_message("completed")
        self._reasoning = WrittenReasoning(self._output.place(), shown=shown)
        self._pending.append(self._reasoning.begin())
        return self._reasoning

    async def _open_thoughts(self) -> WrittenReasoning:
        reasoning = self._reasoning or await self._open_reasoning(shown=True)
        self._pending += reasoning.begin_thoughts()
        return reasoning

    def _close_reasoning(self, sealed: str | None = None) -> None:
        reasoning, self._reasoning = self._reasoning, None
        if reasoning is not None:
            item, events = reasoning.end(sealed)
            self._pending += events
            self._finish(reasoning.index, item)

    async def _close_message(self, status: ItemStatus, unlinked: Sequence[ProducedFile] = ()) -> None:
        message = self._message
        if message is not None:
            self._pending += await message.end_part(self._find_files, unlinked)
            self._message = None
            item, event = message.end(status)
            self._pending.append(event)
            self._finish(message.index, item)

    async def _find_files(self, paths: Sequence[str]) -> list[ProducedFile]:
        """What this response produced, and what its tools know from before."""
        wanted = set(paths)
        known = {file.path: file for file in self._output.files if file.path in wanted}
        missing = [path for path in paths if path not in known]
        if missing:
            for tool in self._toolbox.hosted.values():
                known |= {file.path: file for file in await tool.find_files(missing)}
        return list(known.values())

    # --- calls ---

    async def _start_call(self, event: CallStarted) -> None:
        self._close_reasoning()
        await self._close_message("completed")
        self._close_whole_calls()
        if self._written >= LARGE:
            await self._flush_in_turns()
        call = self._begin_call(event)
        self._calls[event.key] = call
        if call is None:
            self.ignored_calls += 1

    def _begin_call(self, event: CallStarted) -> HostedCall | WrittenCall | _UnknownCall | None:
        if self._one_call and self._calls:
            return None
        tool = self._toolbox.hosted.get(event.name)
        if tool is not None:
            if self._most_hosted is not None and len(self.hosted) >= self._most_hosted:
                return None
            index = self._output.place()
            call = HostedCall(index, event.call_id, tool.begin(self._context(index, event.call_id)))
            self.hosted.append(call)
            self._pending += call.session.open()
            return call
        if event.name in self._toolbox.customs:
            written = WrittenCustomCall(self._output.place(), event.call_id, event.name)
        elif event.name in self._toolbox.functions:
            written = WrittenFunctionCall(self._output.place(), event.call_id, event.name)
        else:
            unknown = _UnknownCall(event.call_id, event.name)
            self._unknown.append(unknown)
            return unknown
        self.client_calls += 1
        self._pending.append(written.begin())
        return written

    def _feed_call(self, key: int, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        call = self._calls.get(key)
        if isinstance(call, HostedCall):
            return call.session.feed(fragments)
        if isinstance(call, _UnknownCall):
            call.pieces += fragments
        elif call is not None:
            return call.feed(fragments)
        return ()

    def _close_whole_calls(self) -> None:
        """End the client's calls whose arguments are complete, now that another one begins."""
        for key, call in self._calls.items():
            if isinstance(call, WrittenCall) and is_whole(call.arguments):
                self._close_call(call, "completed")
                self._calls[key] = None

    def _close_call(self, call: WrittenCall, status: ItemStatus) -> None:
        item, events = call.end(status)
        self._pending += events
        self._finish(call.index, item)

    # --- when the model has ended ---

    @property
    def goes_on(self) -> bool:
        """Whether the model has something to read next: results of calls, with none left to the client."""
        return bool(self.hosted or self._unknown or self.ignored_calls) and not self.client_calls

    async def finish(self, status: ItemStatus) -> None:
        """Close everything that is open, hosted calls excepted."""
        self._close_reasoning()
        last = status == "completed" and not self._calls
        await self._close_message(status, self._output.files if last else ())
        self._close_client_calls(status)
        await self._flush_in_turns()

    def cut_off(self, reason: str) -> None:
        """As `finish`, in a hurry and with the hosted calls: nothing is awaited."""
        self._close_reasoning()
        if self._message is not None:
            self._pending += self._message.cut_off()
            item, event = self._message.end("incomplete")
            self._pending.append(event)
            self._finish(self._message.index, item)
            self._message = None
        self._close_client_calls("incomplete")
        self._flush()
        for call in self.hosted:
            if call.result is None:
                self.settle(call, call.session.abort(reason))

    def _close_client_calls(self, status: ItemStatus) -> None:
        for call in self._calls.values():
            if isinstance(call, WrittenCall):
                self._close_call(call, status)
        self._calls = dict.fromkeys(self._calls)

    def settle(self, call: HostedCall, result: ToolResult) -> None:
        """A hosted call has its result."""
        call.result = result
        self._output.emit(result.events)
        self._output.files.extend(result.files)
        self._finish(call.index, result.item, result.exchange)
        for further in result.further:
            self._finish(further.output_index, further.item, further.exchange)

    def _finish(self, index: int, item: OutputItem, exchange: ToolExchange | None = None) -> None:
        self._output.finish(index, item)
        self._made[index] = _entry(self.number, item, exchange)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What the turn made, in order."""
        return tuple(self._made[index] for index in sorted(self._made))

    @property
    def hidden_entries(self) -> tuple[Entry, ...]:
        """What only the model is told: that it called what is not there."""
        return tuple(
            Entry(
                type="fumehood:unknown_call",
                id=None,
                turn=self.number,
                raw=b"{}",
                exchange=ToolExchange(
                    call_id=call.call_id,
                    name=call.name,
                    arguments=arguments if is_whole(arguments := "".join(call.pieces)) else "{}",
                    output=f"There is no tool named {call.name!r}. Use one of those that are offered, or answer.",
                ),
            )
            for call in self._unknown
        )


class _Tag(msgspec.Struct):
    type: str
    id: str | None = None


def _entry(turn: int, item: OutputItem, exchange: ToolExchange | None) -> Entry:
    raw = msgspec.json.encode(item)
    if isinstance(item, msgspec.Raw):
        tag = msgspec.json.decode(raw, type=_Tag)
        return Entry(type=tag.type, id=tag.id, turn=turn, raw=raw, exchange=exchange)
    return Entry(type=_type_of(item), id=item.id, turn=turn, raw=raw, exchange=exchange)


def _type_of(item: AuthoredItem) -> str:
    return str(type(item).__struct_config__.tag)
