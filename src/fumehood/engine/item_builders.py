"""Build output items, and the events that announce them, from the deltas that the model writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from fumehood.protocol.openai.client_tools_as_functions import (
    APPLY_PATCH,
    LOCAL_SHELL,
    SHELL,
    parse_local_shell_action,
    parse_patch_operation,
    parse_shell_action,
)
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    Annotation,
    ApplyPatchCall,
    ApplyPatchOperation,
    ContainerFileCitationAnnotation,
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    LocalEnvironment,
    LocalShellAction,
    LocalShellCall,
    MessagePhase,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    ShellAction,
    ShellCall,
    SummaryText,
    UrlCitationAnnotation,
)
from fumehood.protocol.openai.shell_command_stream import ShellCommandStream, make_command_events
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    StreamEvent,
)
from fumehood.protocol.streaming_json import StringFieldScanner

_TEXT_PARAGRAPH = -1  # the paragraph of a summary that repeats the text; a server's paragraphs count from 0


class MessageBuilder:
    """Builds an assistant message from text and refusal parts. The deltas of a part are joined once, at its end."""

    def __init__(self, output_index: int, phase: MessagePhase | None = None) -> None:
        self.id = new_id("msg")
        self.index = output_index
        self._phase: MessagePhase | UnsetType = phase or UNSET
        self.open_text: list[str] | None = None  # deltas of the open text part
        self.open_refusal: list[str] | None = None
        self.part_index = -1
        self._logprobs: list[Raw] = []
        self._url_citations: list[UrlCitationAnnotation] = []
        self._parts: list[OutputText | Refusal] = []

    def begin(self) -> StreamEvent:
        return OutputItemAdded(output_index=self.index, item=OutputMessage(id=self.id, phase=self._phase))

    def begin_text(self) -> StreamEvent:
        self.open_text = []
        self._logprobs = []
        self._url_citations = []
        return self._begin_part(OutputText())

    def begin_refusal(self) -> StreamEvent:
        self.open_refusal = []
        return self._begin_part(Refusal())

    def _begin_part(self, part: OutputText | Refusal) -> StreamEvent:
        self.part_index += 1
        return ContentPartAdded(
            item_id=self.id, output_index=self.index, content_index=self.part_index, part=part
        )

    def append_text(self, delta: str, logprobs: list[Raw]) -> StreamEvent:
        if self.open_text is not None:
            self.open_text.append(delta)
        if logprobs:
            self._logprobs += logprobs
        return OutputTextDelta(
            item_id=self.id,
            output_index=self.index,
            content_index=self.part_index,
            delta=delta,
            logprobs=logprobs,
        )

    def add_url_citation(self, citation: UrlCitationAnnotation) -> StreamEvent:
        self._url_citations.append(citation)
        return self._make_annotation_event(len(self._url_citations) - 1, citation)

    def _make_annotation_event(self, index: int, citation: Annotation) -> StreamEvent:
        return OutputTextAnnotationAdded(
            item_id=self.id,
            output_index=self.index,
            content_index=self.part_index,
            annotation_index=index,
            annotation=citation,
        )

    def append_refusal(self, delta: str) -> StreamEvent:
        if self.open_refusal is not None:
            self.open_refusal.append(delta)
        return RefusalDelta(
            item_id=self.id, output_index=self.index, content_index=self.part_index, delta=delta
        )

    def end_part(self, citations: Sequence[ContainerFileCitationAnnotation]) -> list[StreamEvent]:
        """Close the open part, if any. `citations`: of its text."""
        return self._end_refusal() if self.open_text is None else self._end_text(self.open_text, citations)

    def _end_refusal(self) -> list[StreamEvent]:
        if self.open_refusal is None:
            return []
        part = Refusal(refusal="".join(self.open_refusal))
        self.open_refusal = None
        self._parts.append(part)
        return [
            RefusalDone(
                item_id=self.id, output_index=self.index, content_index=self.part_index, refusal=part.refusal
            ),
            self._make_part_done_event(part),
        ]

    def _end_text(
        self, deltas: Sequence[str], citations: Sequence[ContainerFileCitationAnnotation]
    ) -> list[StreamEvent]:
        text = "".join(deltas)
        self.open_text = None
        part = OutputText(text=text, annotations=[*self._url_citations, *citations], logprobs=self._logprobs)
        self._parts.append(part)
        return [
            *(
                self._make_annotation_event(number, citation)
                for number, citation in enumerate(citations, len(self._url_citations))
            ),
            OutputTextDone(
                item_id=self.id,
                output_index=self.index,
                content_index=self.part_index,
                text=text,
                logprobs=self._logprobs,
            ),
            self._make_part_done_event(part),
        ]

    def _make_part_done_event(self, part: OutputText | Refusal) -> StreamEvent:
        return ContentPartDone(
            item_id=self.id, output_index=self.index, content_index=self.part_index, part=part
        )

    def end(self, status: ItemStatus) -> tuple[OutputMessage, StreamEvent]:
        item = OutputMessage(id=self.id, status=status, content=self._parts, phase=self._phase)
        return item, OutputItemDone(output_index=self.index, item=item)


class ReasoningBuilder:
    """Builds a reasoning item from text, summary paragraphs or encrypted content.

    has_text: whether it is known from the start that there will be text.
    summarises_text: whether the text is its own summary if the model server writes none.
    """

    def __init__(self, output_index: int, *, has_text: bool, summarises_text: bool = False) -> None:
        self.id = new_id("rs")
        self.index = output_index
        self.open_text: list[str] | None = None  # deltas of the text, once it has begun
        self._has_text = has_text
        self._summarises_text = summarises_text
        self._summary: list[SummaryText] = []
        self._paragraph: list[str] = []
        self._open_paragraph: int | None = None  # the model server's index of the open paragraph

    def begin(self) -> StreamEvent:
        item = ReasoningItem(id=self.id, content=[] if self._has_text else UNSET)
        return OutputItemAdded(output_index=self.index, item=item)

    @property
    def texts(self) -> list[str]:
        """The text so far, as the only element; empty without text."""
        return [] if self.open_text is None else ["".join(self.open_text)]

    def begin_text(self) -> list[StreamEvent]:
        """Begin the text. An open paragraph stays open: servers may send text and summary in turns."""
        self.open_text = []
        events: list[StreamEvent] = []
        if self._summarises_text and self._open_paragraph is None and not self._summary:
            events.append(self._begin_paragraph(_TEXT_PARAGRAPH))
        events.append(
            ContentPartAdded(item_id=self.id, output_index=self.index, content_index=0, part=ReasoningText())
        )
        return events

    def append_text(self, delta: str) -> Sequence[StreamEvent]:
        if self.open_text is not None:
            self.open_text.append(delta)
        event = ReasoningTextDelta(item_id=self.id, output_index=self.index, content_index=0, delta=delta)
        if self._open_paragraph != _TEXT_PARAGRAPH:
            return (event,)
        return (self._append_to_paragraph(delta), event)

    def append_summary(self, paragraph: int, delta: str) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if paragraph != self._open_paragraph:
            events = self._end_paragraph()
            events.append(self._begin_paragraph(paragraph))
        events.append(self._append_to_paragraph(delta))
        return events

    def _begin_paragraph(self, paragraph: int) -> StreamEvent:
        self._open_paragraph = paragraph
        return ReasoningSummaryPartAdded(
            item_id=self.id, output_index=self.index, summary_index=len(self._summary), part=SummaryText()
        )

    def _append_to_paragraph(self, delta: str) -> StreamEvent:
        self._paragraph.append(delta)
        return ReasoningSummaryTextDelta(
            item_id=self.id, output_index=self.index, summary_index=len(self._summary), delta=delta
        )

    def _end_paragraph(self) -> list[StreamEvent]:
        if self._open_paragraph is None:
            return []
        self._open_paragraph = None
        part = SummaryText(text="".join(self._paragraph))
        self._paragraph.clear()
        number = len(self._summary)
        self._summary.append(part)
        return [
            ReasoningSummaryTextDone(
                item_id=self.id, output_index=self.index, summary_index=number, text=part.text
            ),
            ReasoningSummaryPartDone(
                item_id=self.id, output_index=self.index, summary_index=number, part=part
            ),
        ]

    def end(self, encrypted_content: str | None = None) -> tuple[ReasoningItem, list[StreamEvent]]:
        events = self._end_paragraph()
        content: list[ReasoningText] | UnsetType = UNSET
        for text in self.texts:
            part = ReasoningText(text=text)
            content = [part]
            events += [
                ReasoningTextDone(item_id=self.id, output_index=self.index, content_index=0, text=part.text),
                ContentPartDone(item_id=self.id, output_index=self.index, content_index=0, part=part),
            ]
        item = ReasoningItem(
            id=self.id,
            summary=self._summary,
            content=content,
            encrypted_content=UNSET if encrypted_content is None else encrypted_content,
        )
        return item, [*events, OutputItemDone(output_index=self.index, item=item)]


# --- calls of client tools ----------------------------------------------------------------------------


class ClientCallBuilder(ABC):
    """Builds one call: its events, then its item.

    index: the output index, once the item has begun. An item begins when nothing can make it meaningless any more.
    """

    def __init__(self, prefix: str, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        self.id = new_id(prefix)
        self.index = -1
        self.call_id = call_id
        self.name = name
        self._allocate_index = allocate_index

    @property
    @abstractmethod
    def arguments(self) -> str:
        """The arguments so far."""

    @property
    def _has_begun(self) -> bool:
        return self.index >= 0

    def open(self) -> Sequence[StreamEvent]:
        """The events of a call of which only the name is known."""
        return ()

    @abstractmethod
    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]: ...

    @abstractmethod
    def end(self, status: ItemStatus) -> tuple[OutputItem, Sequence[StreamEvent]]:
        """The item and its last events.

        Raises ValueError, with a sentence for the model, if the arguments make no call and no item has begun.
        """

    def _begin(self, item: OutputItem) -> StreamEvent:
        self.index = self._allocate_index()
        return OutputItemAdded(output_index=self.index, item=item)

    def _make_item_done(self, item: OutputItem) -> StreamEvent:
        return OutputItemDone(output_index=self.index, item=item)


class FunctionCallBuilder(ClientCallBuilder):
    """Builds a function call."""

    def __init__(self, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        super().__init__("fc", allocate_index, call_id, name)
        self._fragments: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._fragments)

    def open(self) -> Sequence[StreamEvent]:
        return [self._begin(self._build_item("in_progress"))]

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._fragments += fragments
        return [
            FunctionCallArgumentsDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in fragments
        ]

    def end(self, status: ItemStatus) -> tuple[FunctionCall, Sequence[StreamEvent]]:
        item = self._build_item(status)
        done = FunctionCallArgumentsDone(item_id=self.id, output_index=self.index, arguments=item.arguments)
        return item, [done, self._make_item_done(item)]

    def _build_item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self.id, call_id=self.call_id, name=self.name, arguments=self.arguments, status=status
        )


class CustomCallBuilder(ClientCallBuilder):
    """Builds a call of a custom tool, which the model calls as a function with the string field `input`."""

    def __init__(self, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        super().__init__("ctc", allocate_index, call_id, name)
        self._scanner = StringFieldScanner("input")

    @property
    def arguments(self) -> str:
        return self._scanner.text

    def open(self) -> Sequence[StreamEvent]:
        return [self._begin(self._build_item("in_progress"))]

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        return [
            CustomToolCallInputDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in self._scanner.feed(fragments)
        ]

    def end(self, status: ItemStatus) -> tuple[CustomToolCall, Sequence[StreamEvent]]:
        item = self._build_item(status)
        done = CustomToolCallInputDone(item_id=self.id, output_index=self.index, input=item.input)
        return item, [done, self._make_item_done(item)]

    def _build_item(self, status: ItemStatus) -> CustomToolCall:
        text = self._scanner.value or ""
        return CustomToolCall(id=self.id, call_id=self.call_id, name=self.name, input=text, status=status)


class ShellCallBuilder(ClientCallBuilder):
    """Builds a call of the client's shell. It begins with its first command.

    If the arguments are cut off or turn out to be invalid, only complete commands are handed to the client.
    """

    def __init__(self, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        super().__init__("sh", allocate_index, call_id, name)
        self._commands = ShellCommandStream()

    @property
    def arguments(self) -> str:
        return self._commands.arguments

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        pieces = self._commands.feed(fragments)
        if not pieces:
            return ()
        events = [] if self._has_begun else [self._begin(self._build_item(ShellAction(), "in_progress"))]
        return [*events, *self._commands.make_events(pieces, self.index)]

    def end(self, status: ItemStatus) -> tuple[ShellCall, Sequence[StreamEvent]]:
        events: list[StreamEvent] = []
        try:
            action = self._parse_action(status)
        except ValueError:
            if not self._has_begun:
                raise
            action, status = ShellAction(commands=self._commands.complete_commands), "incomplete"
        if not self._has_begun:
            events.append(self._begin(self._build_item(ShellAction(), "in_progress")))
            events += make_command_events(action.commands, self.index)
        item = self._build_item(action, status)
        return item, [*events, self._make_item_done(item)]

    def _parse_action(self, status: ItemStatus) -> ShellAction:
        if status != "completed":
            raise ValueError("the call was cut off")
        action = parse_shell_action(self.arguments)
        if self._has_begun and action.commands != self._commands.commands:
            raise ValueError("the arguments name `commands` more than once")
        return action

    def _build_item(self, action: ShellAction, status: ItemStatus) -> ShellCall:
        return ShellCall(
            id=self.id, call_id=self.call_id, action=action, environment=LocalEnvironment(), status=status
        )


class LocalShellCallBuilder(ClientCallBuilder):
    """Builds a call of the client's `local_shell`, which has no events for its parts."""

    def __init__(self, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        super().__init__("lsh", allocate_index, call_id, name)
        self._fragments: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._fragments)

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._fragments += fragments
        return ()

    def end(self, status: ItemStatus) -> tuple[LocalShellCall, Sequence[StreamEvent]]:
        if status != "completed":
            raise ValueError("the call was cut off")
        action = parse_local_shell_action(self.arguments)
        begun = self._begin(LocalShellCall(id=self.id, call_id=self.call_id, action=LocalShellAction()))
        item = LocalShellCall(id=self.id, call_id=self.call_id, action=action, status=status)
        return item, [begun, self._make_item_done(item)]


class ApplyPatchCallBuilder(ClientCallBuilder):
    """Builds a call of `apply_patch`. It begins with its diff, once file and operation are known.

    If the arguments are cut off or turn out to be invalid, the client gets no diff that it could apply.
    """

    def __init__(self, allocate_index: Callable[[], int], call_id: str, name: str) -> None:
        super().__init__("apc", allocate_index, call_id, name)
        self._type = StringFieldScanner("type")
        self._path = StringFieldScanner("path")
        self._diff = StringFieldScanner("diff")

    @property
    def arguments(self) -> str:
        return self._diff.text

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        if self._has_begun:
            return self._make_deltas(self._diff.feed(fragments))
        for scanner in (self._type, self._path, self._diff):
            scanner.feed(fragments)
        operation = self._read_operation()
        if operation is None:
            return ()
        return [self._begin(self._build_item(operation)), *self._make_deltas([self._diff.value or ""])]

    def _read_operation(self) -> ApplyPatchOperation | None:
        """The operation with an empty diff, as soon as the diff has begun."""
        if not (self._type.is_complete and self._path.is_complete and self._path.value and self._diff.value):
            return None
        kind = self._type.value
        if kind != "create_file" and kind != "update_file":
            return None
        return ApplyPatchOperation(type=kind, path=self._path.value, diff="")

    def _make_deltas(self, pieces: Sequence[str]) -> list[StreamEvent]:
        return [
            ApplyPatchDiffDelta(item_id=self.id, output_index=self.index, delta=piece) for piece in pieces
        ]

    def end(self, status: ItemStatus) -> tuple[ApplyPatchCall, Sequence[StreamEvent]]:
        try:
            operation = self._parse_operation(status)
        except ValueError:
            begun = self._read_operation() if self._has_begun else None
            if begun is None:
                raise
            item = self._build_item(begun)
            return item, [self._make_item_done(item)]
        events: list[StreamEvent] = []
        if not self._has_begun:
            empty = operation if operation.diff is UNSET else replace(operation, diff="")
            events.append(self._begin(self._build_item(empty)))
            events += self._make_deltas([operation.diff] if operation.diff else [])
        if operation.diff:
            events.append(ApplyPatchDiffDone(item_id=self.id, output_index=self.index, diff=operation.diff))
        item = replace(self._build_item(operation), status="completed")
        return item, [*events, self._make_item_done(item)]

    def _parse_operation(self, status: ItemStatus) -> ApplyPatchOperation:
        if status != "completed":
            raise ValueError("the call was cut off")
        operation = parse_patch_operation(self.arguments)
        if self._has_begun:
            streamed = (self._type.value, self._path.value, self._diff.value)
            if streamed != (operation.type, operation.path, operation.diff):
                raise ValueError("the arguments name a field more than once")
        return operation

    def _build_item(self, operation: ApplyPatchOperation) -> ApplyPatchCall:
        return ApplyPatchCall(id=self.id, call_id=self.call_id, operation=operation)


CLIENT_CALL_BUILDERS: Mapping[str, Callable[[Callable[[], int], str, str], ClientCallBuilder]] = {
    "function": FunctionCallBuilder,
    "custom": CustomCallBuilder,
    SHELL: ShellCallBuilder,
    LOCAL_SHELL: LocalShellCallBuilder,
    APPLY_PATCH: ApplyPatchCallBuilder,
}
"""Builders of calls, by the type of the tool. Arguments: how to allocate an output index, call id, function name."""


def is_complete_json(arguments: str) -> bool:
    """Whether the arguments are a complete JSON object, so that nothing can follow."""
    try:
        return bool(arguments.strip()) and isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
