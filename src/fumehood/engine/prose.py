"""Messages and reasoning as they are written, part by part; imports `protocol` and siblings."""

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Raw

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
    TextDone,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import (
    ContainerFileCitation,
    ItemStatus,
    Message,
    OutputText,
    ProducedFile,
    Reasoning,
    ReasoningText,
    Refusal,
)

type FindFiles = Callable[[Sequence[str]], Awaitable[Sequence[ProducedFile]]]


class WrittenMessage:
    """A message of the assistant: text and refusals, one part after another.

    The pieces of a part are joined once, when it is done.
    """

    def __init__(self, output_index: int) -> None:
        self.id = new_id("msg")
        self.index = output_index
        self.text: list[str] | None = None  # the pieces of the text that is open
        self.refusal: list[str] | None = None
        self.part = -1
        self._logprobs: list[Raw] = []
        self._parts: list[OutputText | Refusal] = []

    def begin(self) -> StreamEvent:
        return ItemAdded(output_index=self.index, item=Message(id=self.id))

    def begin_text(self) -> StreamEvent:
        self.text = []
        self._logprobs = []
        return self._begin_part(OutputText())

    def begin_refusal(self) -> StreamEvent:
        self.refusal = []
        return self._begin_part(Refusal())

    def _begin_part(self, part: OutputText | Refusal) -> StreamEvent:
        self.part += 1
        return PartAdded(item_id=self.id, output_index=self.index, content_index=self.part, part=part)

    def note_logprobs(self, logprobs: list[Raw]) -> None:
        self._logprobs.extend(logprobs)

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
        part = OutputText(text=text, annotations=[*citations], logprobs=self._logprobs)
        self._parts.append(part)
        return [
            *(
                AnnotationAdded(
                    item_id=self.id,
                    output_index=self.index,
                    content_index=self.part,
                    annotation_index=number,
                    annotation=citation,
                )
                for number, citation in enumerate(citations)
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
        item = Message(id=self.id, status=status, content=self._parts)
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
    """Reasoning that the model shows."""

    def __init__(self, output_index: int) -> None:
        self.id = new_id("rs")
        self.index = output_index
        self._pieces: list[str] = []

    def begin(self) -> list[StreamEvent]:
        return [
            ItemAdded(output_index=self.index, item=Reasoning(id=self.id, content=[])),
            PartAdded(item_id=self.id, output_index=self.index, content_index=0, part=ReasoningText()),
        ]

    def think(self, delta: str) -> StreamEvent:
        self._pieces.append(delta)
        return ReasoningTextDelta(item_id=self.id, output_index=self.index, content_index=0, delta=delta)

    def end(self) -> tuple[Reasoning, list[StreamEvent]]:
        part = ReasoningText(text="".join(self._pieces))
        item = Reasoning(id=self.id, content=[part])
        return item, [
            ReasoningTextDone(item_id=self.id, output_index=self.index, content_index=0, text=part.text),
            PartDone(item_id=self.id, output_index=self.index, content_index=0, part=part),
            ItemDone(output_index=self.index, item=item),
        ]
