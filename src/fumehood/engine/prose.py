"""Messages and reasoning as they are written, part by part; imports `protocol` and siblings."""

from collections.abc import Awaitable, Callable, Sequence

from msgspec import UNSET, Raw, UnsetType

from fumehood.engine.citations import cite_links, cite_unlinked, find_links, paths_of
from fumehood.protocol.events import (
    AnnotationAdded,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    StreamEvent,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryTextDelta,
    SummaryTextDone,
    TextDelta,
    TextDone,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import (
    Annotation,
    ContainerFileCitation,
    ItemStatus,
    Message,
    OutputText,
    Phase,
    ProducedFile,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
    UrlCitation,
)

type FindFiles = Callable[[Sequence[str]], Awaitable[Sequence[ProducedFile]]]


class WrittenMessage:
    """A message of the assistant: text and refusals, one part after another.

    The pieces of a part are joined once, when it is done.
    """

    def __init__(self, output_index: int, phase: Phase | None = None) -> None:
        self.id = new_id("msg")
        self.index = output_index
        self._phase: Phase | UnsetType = phase or UNSET
        self.text: list[str] | None = None  # the pieces of the text that is open
        self.refusal: list[str] | None = None
        self.part = -1
        self._logprobs: list[Raw] = []
        self._sources: list[UrlCitation] = []
        self._parts: list[OutputText | Refusal] = []

    def begin(self) -> StreamEvent:
        return ItemAdded(output_index=self.index, item=Message(id=self.id, phase=self._phase))

    def begin_text(self) -> StreamEvent:
        self.text = []
        self._logprobs = []
        self._sources = []
        return self._begin_part(OutputText())

    def begin_refusal(self) -> StreamEvent:
        self.refusal = []
        return self._begin_part(Refusal())

    def _begin_part(self, part: OutputText | Refusal) -> StreamEvent:
        self.part += 1
        return PartAdded(item_id=self.id, output_index=self.index, content_index=self.part, part=part)

    def write(self, delta: str, logprobs: list[Raw]) -> StreamEvent:
        if self.text is not None:
            self.text.append(delta)
        if logprobs:
            self._logprobs += logprobs
        return TextDelta(
            item_id=self.id,
            output_index=self.index,
            content_index=self.part,
            delta=delta,
            logprobs=logprobs,
        )

    def cite(self, source: UrlCitation) -> StreamEvent:
        self._sources.append(source)
        return self._annotated(len(self._sources) - 1, source)

    def _annotated(self, number: int, citation: Annotation) -> StreamEvent:
        return AnnotationAdded(
            item_id=self.id,
            output_index=self.index,
            content_index=self.part,
            annotation_index=number,
            annotation=citation,
        )

    def refuse(self, delta: str) -> StreamEvent:
        if self.refusal is not None:
            self.refusal.append(delta)
        return RefusalDelta(item_id=self.id, output_index=self.index, content_index=self.part, delta=delta)

    async def end_part(
        self, find_files: FindFiles, unlinked: Sequence[ProducedFile] = ()
    ) -> list[StreamEvent]:
        """Close the part that is open, if one is. `unlinked`: files to cite even if no link leads to them."""
        if self.text is None:
            return self._end_refusal()
        text = "".join(self.text)
        # Whoever is cancelled while files are looked up finds the part still open, and can cut it off.
        citations = await _citations(text, find_files, unlinked)
        self.text = None
        return self._end_text(text, citations)

    def _end_refusal(self) -> list[StreamEvent]:
        if self.refusal is None:
            return []
        part = Refusal(refusal="".join(self.refusal))
        self.refusal = None
        self._parts.append(part)
        return [
            RefusalDone(
                item_id=self.id, output_index=self.index, content_index=self.part, refusal=part.refusal
            ),
            self._part_done(part),
        ]

    def _end_text(self, text: str, citations: list[ContainerFileCitation]) -> list[StreamEvent]:
        part = OutputText(text=text, annotations=[*self._sources, *citations], logprobs=self._logprobs)
        self._parts.append(part)
        return [
            *(
                self._annotated(number, citation)
                for number, citation in enumerate(citations, len(self._sources))
            ),
            TextDone(
                item_id=self.id,
                output_index=self.index,
                content_index=self.part,
                text=text,
                logprobs=self._logprobs,
            ),
            self._part_done(part),
        ]

    def _part_done(self, part: OutputText | Refusal) -> StreamEvent:
        return PartDone(item_id=self.id, output_index=self.index, content_index=self.part, part=part)

    def cut_off(self) -> list[StreamEvent]:
        """Close the open part as it stands, in a hurry: nothing is looked up."""
        if self.text is None:
            return self._end_refusal()
        text = "".join(self.text)
        self.text = None
        return self._end_text(text, [])

    def end(self, status: ItemStatus) -> tuple[Message, StreamEvent]:
        item = Message(id=self.id, status=status, content=self._parts, phase=self._phase)
        return item, ItemDone(output_index=self.index, item=item)


async def _citations(
    text: str, find_files: FindFiles, unlinked: Sequence[ProducedFile]
) -> list[ContainerFileCitation]:
    links = find_links(text)
    citations: list[ContainerFileCitation] = []
    if links:
        files = {file.path: file for file in await find_files(paths_of(links))}
        citations = cite_links(links, files)
    return citations + cite_unlinked(unlinked, citations, text)


class WrittenReasoning:
    """Reasoning that the model shows, or tells the gist of, or keeps to itself under seal.

    shown: whether it is known from the start that there will be text.
    """

    def __init__(self, output_index: int, *, shown: bool) -> None:
        self.id = new_id("rs")
        self.index = output_index
        self.thoughts: list[str] | None = None  # the pieces of the text, once it has begun
        self._shown = shown
        self._summary: list[SummaryText] = []
        self._paragraph: list[str] = []
        self._told: int | None = None  # the server's number of the paragraph that is open

    def begin(self) -> StreamEvent:
        item = Reasoning(id=self.id, content=[] if self._shown else UNSET)
        return ItemAdded(output_index=self.index, item=item)

    def begin_thoughts(self) -> list[StreamEvent]:
        self.thoughts = []
        return [
            *self._end_paragraph(),
            PartAdded(item_id=self.id, output_index=self.index, content_index=0, part=ReasoningText()),
        ]

    def think(self, delta: str) -> StreamEvent:
        if self.thoughts is not None:
            self.thoughts.append(delta)
        return ReasoningTextDelta(item_id=self.id, output_index=self.index, content_index=0, delta=delta)

    def summarise(self, paragraph: int, delta: str) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if paragraph != self._told:
            events = self._end_paragraph()
            self._told = paragraph
            events.append(
                SummaryPartAdded(
                    item_id=self.id,
                    output_index=self.index,
                    summary_index=len(self._summary),
                    part=SummaryText(),
                )
            )
        self._paragraph.append(delta)
        events.append(
            SummaryTextDelta(
                item_id=self.id, output_index=self.index, summary_index=len(self._summary), delta=delta
            )
        )
        return events

    def _end_paragraph(self) -> list[StreamEvent]:
        if self._told is None:
            return []
        self._told = None
        part = SummaryText(text="".join(self._paragraph))
        self._paragraph.clear()
        number = len(self._summary)
        self._summary.append(part)
        return [
            SummaryTextDone(item_id=self.id, output_index=self.index, summary_index=number, text=part.text),
            SummaryPartDone(item_id=self.id, output_index=self.index, summary_index=number, part=part),
        ]

    def end(self, sealed: str | None = None) -> tuple[Reasoning, list[StreamEvent]]:
        events = self._end_paragraph()
        content: list[ReasoningText] | UnsetType = UNSET
        if self.thoughts is not None:
            part = ReasoningText(text="".join(self.thoughts))
            content = [part]
            events += [
                ReasoningTextDone(item_id=self.id, output_index=self.index, content_index=0, text=part.text),
                PartDone(item_id=self.id, output_index=self.index, content_index=0, part=part),
            ]
        item = Reasoning(
            id=self.id,
            summary=self._summary,
            content=content,
            encrypted_content=UNSET if sealed is None else sealed,
        )
        return item, [*events, ItemDone(output_index=self.index, item=item)]
