"""Build output items, and the events that announce them, from the deltas that the model writes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    Annotation,
    ContainerFileCitationAnnotation,
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    MessagePhase,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
    UrlCitationAnnotation,
)
from fumehood.protocol.openai.stream_events import (
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
    """

    def __init__(self, output_index: int, *, has_text: bool) -> None:
        self.id = new_id("rs")
        self.index = output_index
        self.open_text: list[str] | None = None  # deltas of the text, once it has begun
        self._has_text = has_text
        self._summary: list[SummaryText] = []
        self._paragraph: list[str] = []
        self._open_paragraph: int | None = None  # the model server's index of the open paragraph

    def begin(self) -> StreamEvent:
        item = ReasoningItem(id=self.id, content=[] if self._has_text else UNSET)
        return OutputItemAdded(output_index=self.index, item=item)

    def begin_text(self) -> list[StreamEvent]:
        self.open_text = []
        return [
            *self._end_paragraph(),
            ContentPartAdded(item_id=self.id, output_index=self.index, content_index=0, part=ReasoningText()),
        ]

    def append_text(self, delta: str) -> StreamEvent:
        if self.open_text is not None:
            self.open_text.append(delta)
        return ReasoningTextDelta(item_id=self.id, output_index=self.index, content_index=0, delta=delta)

    def append_summary(self, paragraph: int, delta: str) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if paragraph != self._open_paragraph:
            events = self._end_paragraph()
            self._open_paragraph = paragraph
            events.append(
                ReasoningSummaryPartAdded(
                    item_id=self.id,
                    output_index=self.index,
                    summary_index=len(self._summary),
                    part=SummaryText(),
                )
            )
        self._paragraph.append(delta)
        events.append(
            ReasoningSummaryTextDelta(
                item_id=self.id, output_index=self.index, summary_index=len(self._summary), delta=delta
            )
        )
        return events

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
        if self.open_text is not None:
            part = ReasoningText(text="".join(self.open_text))
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
    """Builds one call: its events, then its item."""

    def __init__(self, prefix: str, output_index: int, call_id: str, name: str) -> None:
        self.id = new_id(prefix)
        self.index = output_index
        self.call_id = call_id
        self.name = name

    @property
    @abstractmethod
    def arguments(self) -> str:
        """The arguments so far."""

    def begin(self) -> StreamEvent:
        return OutputItemAdded(output_index=self.index, item=self._build_item("in_progress"))

    @abstractmethod
    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]: ...

    def end(self, status: ItemStatus) -> tuple[OutputItem, Sequence[StreamEvent]]:
        item = self._build_item(status)
        return item, [self._make_done_event(), OutputItemDone(output_index=self.index, item=item)]

    @abstractmethod
    def _build_item(self, status: ItemStatus) -> OutputItem: ...

    @abstractmethod
    def _make_done_event(self) -> StreamEvent: ...


class FunctionCallBuilder(ClientCallBuilder):
    """Builds a function call."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__("fc", output_index, call_id, name)
        self._fragments: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._fragments)

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._fragments += fragments
        return [
            FunctionCallArgumentsDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in fragments
        ]

    def _build_item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self.id, call_id=self.call_id, name=self.name, arguments=self.arguments, status=status
        )

    def _make_done_event(self) -> StreamEvent:
        return FunctionCallArgumentsDone(item_id=self.id, output_index=self.index, arguments=self.arguments)


class CustomCallBuilder(ClientCallBuilder):
    """Builds a call of a custom tool, which the model calls as a function with the string field `input`."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__("ctc", output_index, call_id, name)
        self._scanner = StringFieldScanner("input")

    @property
    def arguments(self) -> str:
        return self._scanner.text

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        return [
            CustomToolCallInputDelta(item_id=self.id, output_index=self.index, delta=delta)
            for delta in self._scanner.feed(fragments)
        ]

    @property
    def _input(self) -> str:
        return self._scanner.value or ""

    def _build_item(self, status: ItemStatus) -> CustomToolCall:
        return CustomToolCall(
            id=self.id, call_id=self.call_id, name=self.name, input=self._input, status=status
        )

    def _make_done_event(self) -> StreamEvent:
        return CustomToolCallInputDone(item_id=self.id, output_index=self.index, input=self._input)


def is_complete_json(arguments: str) -> bool:
    """Whether the arguments are a complete JSON object, so that nothing can follow."""
    try:
        return bool(arguments.strip()) and isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
