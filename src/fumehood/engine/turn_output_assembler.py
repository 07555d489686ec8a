"""Assembles output items and stream events from the events of one model turn.

An item gets its output index when it begins, an event its sequence number when it enters the log. Fragments of hosted
calls go to the sessions of their tools, which make the items.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES
from fumehood.engine.citations import cite_links, cite_unlinked, collect_paths, find_links
from fumehood.engine.item_builders import (
    CLIENT_CALL_BUILDERS,
    ClientCallBuilder,
    MessageBuilder,
    ReasoningBuilder,
    is_complete_json,
)
from fumehood.engine.run_event_log import EventLog
from fumehood.interfaces import ConfiguredTool, ToolCallContext, ToolCallResult, ToolCallSession
from fumehood.protocol.conversation import COMPACTION_TYPE, ConversationEntry, ToolExchange
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughDelta,
    ModelPassthroughItem,
    ModelPassthroughStarted,
    ModelReasoningDelta,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.items import (
    AuthoredItem,
    ContainerFileCitationAnnotation,
    ItemStatus,
    MessagePhase,
    OutputItem,
    ProducedFile,
)
from fumehood.protocol.openai.stream_events import OutputItemAdded, OutputItemDone, StreamEvent


class Toolbox(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that the model may call, by function name; of client tools, the type of each."""

    hosted_tools: Mapping[str, ConfiguredTool]
    client_tools: Mapping[str, str] = {}

    def without_hosted(self) -> "Toolbox":
        return Toolbox(hosted_tools={}, client_tools=self.client_tools)


class ResponseOutput:
    """The output items of one response, by output index.

    produced_files: what hosted calls have produced so far, for citations.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._items: list[OutputItem | None] = []
        self.produced_files: list[ProducedFile] = []

    @property
    def items(self) -> list[OutputItem]:
        """The finished items, in order."""
        return [item for item in self._items if item is not None]

    def allocate_output_index(self) -> int:
        """Reserve the output index of a new item."""
        self._items.append(None)
        return len(self._items) - 1

    def set_item(self, output_index: int, item: OutputItem) -> None:
        self._items[output_index] = item

    def emit(self, events: Sequence[StreamEvent]) -> None:
        self._log.append(events)


@dataclass(slots=True)
class HostedCall:
    """A call of a hosted tool, and its result once there is one."""

    index: int
    call_id: str
    session: ToolCallSession
    result: ToolCallResult | None = None


@dataclass(slots=True)
class _RejectedCall:
    """A call of an unknown tool, or one that the client could not carry out: only the model learns of it."""

    call_id: str
    name: str
    reason: str
    fragments: list[str] = field(default_factory=list[str])


class TurnOutputAssembler:
    """Assembles one model turn.

    make_context: makes the context of a hosted call from its output index and call id.
    max_hosted_calls: further hosted calls are ignored. single_call: only the first call of the turn counts.
    max_characters: that the model may write, and a quarter of that in events.
    summarises_reasoning: whether reasoning text is its own summary if the model server writes none.
    seal_reasoning: encrypts the texts of a reasoning item for the client; None if it did not ask for that.
    turn_end: the end of the turn, once the model server has sent it. call_ids: of all calls so far.
    """

    def __init__(
        self,
        number: int,
        output: ResponseOutput,
        toolbox: Toolbox,
        make_context: Callable[[int, str], ToolCallContext],
        *,
        max_hosted_calls: int | None = None,
        single_call: bool = False,
        max_characters: int = sys.maxsize,
        summarises_reasoning: bool = False,
        seal_reasoning: Callable[[Sequence[str]], str | None] | None = None,
    ) -> None:
        self.number = number
        self.turn_end: ModelTurnEnded | None = None
        self.call_ids: set[str] = set()
        self.hosted_calls: list[HostedCall] = []
        self.client_call_count = 0
        self.ignored_call_count = 0
        self._output = output
        self._toolbox = toolbox
        self._make_context = make_context
        self._max_hosted_calls = max_hosted_calls
        self._single_call = single_call
        self._max_characters = max_characters
        self._summarises_reasoning = summarises_reasoning
        self._seal_reasoning = seal_reasoning
        self._character_count = 0
        self._fragment_count = 0
        # Open items: at most one message or reasoning item, and any number of calls by the model's keys. None stands
        # for a call that is closed or ignored.
        self._message: MessageBuilder | None = None
        self._phase: MessagePhase | None = None  # of the next message
        self._reasoning: ReasoningBuilder | None = None
        self._open_calls: dict[int, HostedCall | ClientCallBuilder | _RejectedCall | None] = {}
        # Items of the model server that have begun, by its keys: output index, and the item as it began.
        self._open_passthrough: dict[int, tuple[int, msgspec.Raw]] = {}
        # Finished entries by output index, calls that only the model learns of, and events that are not in the log yet.
        self._entries_by_index: dict[int, ConversationEntry] = {}
        self._rejected_calls: list[_RejectedCall] = []
        self._pending_events: list[StreamEvent] = []

    # --- while the model writes ---

    def try_feed(self, batch: Sequence[AnyModelEvent]) -> bool:
        """Feed a batch synchronously if it only continues open text or calls; otherwise do nothing.

        Appends deltas without waking the run's task. Returns whether the batch was fed. Raises ModelError.
        """
        in_text = self._message is not None and self._message.open_text is not None
        for event in batch:
            if not (in_text if type(event) is ModelTextDelta else type(event) is ModelCallArgumentsDelta):
                return False
        self._feed_deltas(batch, 0)
        self._end_batch(len(batch))
        return True

    async def feed(self, batch: Sequence[AnyModelEvent]) -> None:
        """Process the model events of one read; their stream events enter the log together. Raises ModelError."""
        position = self._feed_deltas(batch, 0)
        while position < len(batch):
            event = batch[position]
            if isinstance(event, ModelTextDelta):
                await self._open_text()
            elif isinstance(event, ModelReasoningDelta):
                await self._open_reasoning_text()
            else:
                self._character_count += await self._feed_control_event(event)
                position += 1
            position = self._feed_deltas(batch, position)
        self._end_batch(len(batch))

    def _feed_deltas(self, batch: Sequence[AnyModelEvent], position: int) -> int:
        """Feed deltas of what is open, from `position` on; return the position of the first other event."""
        message, reasoning, pending = self._message, self._reasoning, self._pending_events
        while position < len(batch):
            event = batch[position]
            if type(event) is ModelTextDelta and message is not None and message.open_text is not None:
                pending.append(message.append_text(event.delta, event.logprobs))
            elif type(event) is ModelReasoningDelta and reasoning and reasoning.open_text is not None:
                pending += reasoning.append_text(event.delta)
            elif type(event) is ModelCallArgumentsDelta:
                fragments = _take_fragments(batch, position, event.key)
                pending += self._feed_call(event.key, fragments)
                self._character_count += sum(map(len, fragments))
                position += len(fragments)
                continue
            else:
                break
            self._character_count += len(event.delta)
            position += 1
        return position

    def _end_batch(self, size: int) -> None:
        self._fragment_count += size
        self._flush()
        if self._character_count > self._max_characters or self._fragment_count > self._max_characters // 4:
            raise ModelError("The model wrote without end, and was cut off.")

    async def _feed_control_event(self, event: AnyModelEvent) -> int:
        """Process an event other than the frequent deltas; return its number of characters."""
        match event:
            case ModelCallStarted():
                await self._start_call(event)
            case ModelTurnEnded():
                self.turn_end = event
            case ModelRefusalDelta():
                self._pending_events.append((await self._open_refusal()).append_refusal(event.delta))
                return len(event.delta)
            case ModelReasoningSummaryDelta():
                reasoning = self._reasoning or await self._open_reasoning(has_text=False)
                self._pending_events += reasoning.append_summary(event.index, event.delta)
                return len(event.delta)
            case ModelMessageStarted():
                self._close_reasoning()
                await self._close_message()
                self._phase = event.phase
            case ModelCitation():
                if self._message is not None and self._message.open_text is not None:
                    self._pending_events.append(self._message.add_url_citation(event.citation))
            case ModelReasoningStarted():
                await self._open_reasoning(has_text=False)
            case ModelReasoningEnded():
                if self._reasoning is None:
                    await self._open_reasoning(has_text=False)
                self._close_reasoning(event.encrypted_content)
            case ModelPassthroughStarted() | ModelPassthroughDelta() | ModelPassthroughItem():
                return await self._feed_passthrough(event)
            case _:  # `_feed_deltas` feeds the others
                pass
        return 0

    async def _pass_through_item(self, event: ModelPassthroughItem) -> None:
        if msgspec.json.decode(event.item, type=_ItemTag).type == COMPACTION_TYPE:
            return  # it is sealed by another server, and the conversation could not continue from it
        started = None if event.key is None else self._open_passthrough.pop(event.key, None)
        index = await self._begin_passthrough(event.item) if started is None else started[0]
        self._end_passthrough(index, event.item)
        self.client_call_count += event.awaits_client

    async def _feed_passthrough(
        self, event: ModelPassthroughStarted | ModelPassthroughDelta | ModelPassthroughItem
    ) -> int:
        """Process an event of an item of the model server; return its number of characters."""
        if isinstance(event, ModelPassthroughDelta):
            opened = self._open_passthrough.get(event.key)
            if opened is not None:
                self._pending_events.append(msgspec.structs.replace(event.event, output_index=opened[0]))
            return 1
        if isinstance(event, ModelPassthroughStarted):
            self._open_passthrough[event.key] = (await self._begin_passthrough(event.item), event.item)
        else:
            await self._pass_through_item(event)
        return len(bytes(event.item))

    async def _begin_passthrough(self, item: msgspec.Raw) -> int:
        self._close_reasoning()
        await self._close_message()
        self._close_complete_calls()
        index = self._output.allocate_output_index()
        self._pending_events.append(OutputItemAdded(output_index=index, item=item))
        return index

    def _end_passthrough(self, index: int, item: msgspec.Raw) -> None:
        self._pending_events.append(OutputItemDone(output_index=index, item=item))
        self._record_item(index, item)

    def _flush(self) -> None:
        if self._pending_events:
            self._output.emit(self._pending_events)
            self._pending_events.clear()

    async def _flush_one_by_one(self) -> None:
        """After a long turn, yield between events: each done event repeats the whole text, which takes time."""
        while self._character_count >= WORKER_THRESHOLD_BYTES and self._pending_events:
            self._output.emit([self._pending_events.pop(0)])
            await asyncio.sleep(0)
        self._flush()

    async def _open_message(self) -> MessageBuilder:
        if self._reasoning is not None:
            self._close_reasoning()
        if self._message is None:
            self._message = MessageBuilder(self._output.allocate_output_index(), self._phase)
            self._phase = None
            self._pending_events.append(self._message.begin())
        else:
            self._pending_events += self._message.end_part(await self._find_citations())
        return self._message

    async def _open_text(self) -> None:
        message = await self._open_message()
        self._pending_events.append(message.begin_text())

    async def _open_refusal(self) -> MessageBuilder:
        if self._message is not None and self._message.open_refusal is not None:
            return self._message
        message = await self._open_message()
        self._pending_events.append(message.begin_refusal())
        return message

    async def _open_reasoning(self, *, has_text: bool) -> ReasoningBuilder:
        self._close_reasoning()
        await self._close_message()
        self._reasoning = ReasoningBuilder(
            self._output.allocate_output_index(),
            has_text=has_text,
            summarises_text=self._summarises_reasoning,
        )
        self._pending_events.append(self._reasoning.begin())
        return self._reasoning

    async def _open_reasoning_text(self) -> None:
        reasoning = self._reasoning or await self._open_reasoning(has_text=True)
        self._pending_events += reasoning.begin_text()

    def _close_reasoning(self, encrypted_content: str | None = None) -> None:
        reasoning, self._reasoning = self._reasoning, None
        if reasoning is not None:
            if encrypted_content is None and self._seal_reasoning is not None:
                encrypted_content = self._seal_reasoning(reasoning.texts)
            item, events = reasoning.end(encrypted_content)
            self._pending_events += events
            self._record_item(reasoning.index, item)

    async def _close_message(self) -> None:
        self._end_message("completed", await self._find_citations())

    def _end_message(self, status: ItemStatus, citations: Sequence[ContainerFileCitationAnnotation]) -> None:
        message, self._message = self._message, None
        if message is not None:
            self._pending_events += message.end_part(citations)
            item, event = message.end(status)
            self._pending_events.append(event)
            self._record_item(message.index, item)

    async def _find_citations(
        self, unlinked: Sequence[ProducedFile] = ()
    ) -> list[ContainerFileCitationAnnotation]:
        """Citations for the open text. It stays open meanwhile, so that a cancelled run can still abort it.

        unlinked: files to cite even if the text does not link them.
        """
        if self._message is None or self._message.open_text is None:
            return []
        text = "".join(self._message.open_text)
        links = find_links(text)
        citations: list[ContainerFileCitationAnnotation] = []
        if links:
            files = {file.path: file for file in await self._find_files(collect_paths(links))}
            citations = cite_links(links, files)
        return citations + cite_unlinked(unlinked, citations, text)

    async def _find_files(self, paths: Sequence[str]) -> list[ProducedFile]:
        """Find files that this response produced, or that its tools know from earlier responses."""
        wanted = set(paths)
        known = {file.path: file for file in self._output.produced_files if file.path in wanted}
        missing = [path for path in paths if path not in known]
        if missing:
            for tool in self._toolbox.hosted_tools.values():
                known |= {file.path: file for file in await tool.find_files(missing)}
        return list(known.values())

    # --- calls ---

    async def _start_call(self, event: ModelCallStarted) -> None:
        self._close_reasoning()
        await self._close_message()
        self._close_complete_calls()
        if self._character_count >= WORKER_THRESHOLD_BYTES:
            await self._flush_one_by_one()
        self.call_ids.add(event.call_id)
        call = self._create_call(event)
        self._open_calls[event.key] = call
        if call is None:
            self.ignored_call_count += 1

    def _create_call(self, event: ModelCallStarted) -> HostedCall | ClientCallBuilder | _RejectedCall | None:
        if self._single_call and self._open_calls:
            return None
        tool = self._toolbox.hosted_tools.get(event.name)
        if tool is not None:
            if self._max_hosted_calls is not None and len(self.hosted_calls) >= self._max_hosted_calls:
                return None
            index = self._output.allocate_output_index()
            call = HostedCall(index, event.call_id, tool.start_call(self._make_context(index, event.call_id)))
            self.hosted_calls.append(call)
            self._pending_events += call.session.open()
            return call
        tool_type = self._toolbox.client_tools.get(event.name)
        if tool_type is None:
            reason = f"There is no tool named {event.name!r}. Use one of those that are offered, or answer."
            unknown = _RejectedCall(event.call_id, event.name, reason)
            self._rejected_calls.append(unknown)
            return unknown
        allocate = self._output.allocate_output_index
        builder = CLIENT_CALL_BUILDERS[tool_type](allocate, event.call_id, event.name)
        self._pending_events += builder.open()
        return builder

    def _feed_call(self, key: int, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        call = self._open_calls.get(key)
        if isinstance(call, HostedCall):
            return call.session.feed(fragments)
        if isinstance(call, _RejectedCall):
            call.fragments += fragments
        elif call is not None:
            return call.feed(fragments)
        return ()

    def _close_complete_calls(self) -> None:
        """Close the client calls with complete arguments, because another item begins."""
        for key, call in self._open_calls.items():
            if isinstance(call, ClientCallBuilder) and is_complete_json(call.arguments):
                self._close_call(call, "completed")
                self._open_calls[key] = None

    def _close_call(self, call: ClientCallBuilder, status: ItemStatus) -> None:
        try:
            item, events = call.end(status)
        except ValueError as error:
            if status == "completed":  # else it was cut off, and nobody has seen it
                reason = f"Nothing ran: {error}."
                self._rejected_calls.append(_RejectedCall(call.call_id, call.name, reason, [call.arguments]))
            return
        self.client_call_count += 1
        self._pending_events += events
        self._record_item(call.index, item)

    # --- end of the turn ---

    @property
    def needs_next_turn(self) -> bool:
        """Whether the model has to read call results next, and none is left to the client."""
        return (
            bool(self.hosted_calls or self._rejected_calls or self.ignored_call_count)
            and not self.client_call_count
        )

    async def finish(self, status: ItemStatus) -> None:
        """Close all open items except hosted calls."""
        is_answer = status == "completed" and not self._open_calls
        self._close_items(
            status, await self._find_citations(self._output.produced_files if is_answer else ())
        )
        await self._flush_one_by_one()

    def abort(self, reason: str) -> None:
        """Close all open items, including hosted calls, without awaiting anything."""
        self._close_items("incomplete", ())
        self._flush()
        for call in self.hosted_calls:
            if call.result is None:
                self.record_result(call, call.session.abort(reason))

    def _close_items(self, status: ItemStatus, citations: Sequence[ContainerFileCitationAnnotation]) -> None:
        self._close_reasoning()
        self._end_message(status, citations)
        for index, item in self._open_passthrough.values():  # as they began: nothing of them is complete
            self._end_passthrough(index, item)
        self._open_passthrough.clear()
        for call in self._open_calls.values():
            if isinstance(call, ClientCallBuilder):
                self._close_call(call, status)
        self._open_calls = dict.fromkeys(self._open_calls)

    def record_result(self, call: HostedCall, result: ToolCallResult) -> None:
        """Emit and record the result of a hosted call."""
        call.result = result
        self._output.emit(result.events)
        self._output.produced_files.extend(result.files)
        self._record_item(call.index, result.item, result.exchange)
        for item in result.additional_items:
            self._record_item(item.output_index, item.item, item.exchange)

    def _record_item(self, index: int, item: OutputItem, exchange: ToolExchange | None = None) -> None:
        self._output.set_item(index, item)
        self._entries_by_index[index] = _make_entry(self.number, item, exchange)

    @property
    def entries(self) -> tuple[ConversationEntry, ...]:
        """The entries of the turn, in output order."""
        return tuple(self._entries_by_index[index] for index in sorted(self._entries_by_index))

    @property
    def rejected_call_entries(self) -> tuple[ConversationEntry, ...]:
        """Entries that tell only the model why its calls were rejected."""
        return tuple(
            ConversationEntry(
                type="fumehood:rejected_call",
                id=None,
                turn=self.number,
                raw=b"{}",
                exchange=ToolExchange(
                    call_id=call.call_id,
                    name=call.name,
                    arguments=arguments if is_complete_json(arguments := "".join(call.fragments)) else "{}",
                    output=call.reason,
                ),
            )
            for call in self._rejected_calls
        )


def _take_fragments(batch: Sequence[AnyModelEvent], position: int, key: int) -> list[str]:
    """The consecutive argument fragments of one call, which are fed together."""
    fragments: list[str] = []
    for event in islice(batch, position, None):
        if not isinstance(event, ModelCallArgumentsDelta) or event.key != key:
            break
        fragments.append(event.delta)
    return fragments


class _ItemTag(msgspec.Struct):
    type: str
    id: str | None = None


def _make_entry(turn: int, item: OutputItem, exchange: ToolExchange | None) -> ConversationEntry:
    raw = msgspec.json.encode(item)
    if isinstance(item, msgspec.Raw):
        tag = msgspec.json.decode(raw, type=_ItemTag)
        return ConversationEntry(type=tag.type, id=tag.id, turn=turn, raw=raw, exchange=exchange)
    return ConversationEntry(type=_get_item_type(item), id=item.id, turn=turn, raw=raw, exchange=exchange)


def _get_item_type(item: AuthoredItem) -> str:
    return str(type(item).__struct_config__.tag)
