"""Reasoning that a server leaves in the text, between tags at its beginning."""

from collections.abc import Sequence

from fumehood.protocol.model_turns import AnyModelEvent, ModelReasoningDelta, ModelTextDelta

_OPENING = "<think>"
_CLOSING = "</think>"
_MAX_BUFFERED_CHARS = 256  # characters before the first tag, all of them spaces


class ThinkTagFilter:
    """Tells a text that begins with `<think>` as reasoning up to `</think>`, piece by piece.

    over: nothing more will be changed. Tags anywhere else are text, since models also write about them.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._buffered: list[ModelTextDelta] = []  # text that may be the beginning of the first tag
        self._inside_tag = False
        self._tail = ""  # reasoning that may be the beginning of the last tag
        self._tag_closed = False

    def filter_events(self, events: Sequence[AnyModelEvent]) -> list[AnyModelEvent]:
        sifted: list[AnyModelEvent] = []
        for event in events:
            if self.is_done:
                sifted.append(event)
            elif isinstance(event, ModelTextDelta):
                self._handle_text(event, sifted)
            else:
                self._flush(sifted)
                sifted.append(event)
        return sifted

    def _handle_text(self, text: ModelTextDelta, filtered: list[AnyModelEvent]) -> None:
        if self._tag_closed:
            self._emit_answer(text.delta, filtered)
        elif self._inside_tag:
            self._emit_reasoning(text.delta, filtered)
        else:
            self._buffered.append(text)
            written = "".join(held.delta for held in self._buffered)
            begun = written.lstrip()
            if begun.startswith(_OPENING):
                self._buffered.clear()
                self._inside_tag = True
                self._emit_reasoning(begun.removeprefix(_OPENING).lstrip("\n"), filtered)
            elif not _OPENING.startswith(begun) or len(written) > _MAX_BUFFERED_CHARS:
                self._flush(filtered)

    def _emit_reasoning(self, delta: str, filtered: list[AnyModelEvent]) -> None:
        thought, closing, rest = (self._tail + delta).partition(_CLOSING)
        self._tail = ""
        if not closing:
            kept = next(size for size in range(len(_CLOSING), -1, -1) if thought.endswith(_CLOSING[:size]))
            thought, self._tail = thought[: len(thought) - kept], thought[len(thought) - kept :]
        if thought:
            filtered.append(ModelReasoningDelta(thought))
        if closing:
            self._tag_closed = True
            self._emit_answer(rest, filtered)

    def _emit_answer(self, text: str, filtered: list[AnyModelEvent]) -> None:
        """The empty lines between the reasoning and the answer are neither's."""
        text = text.lstrip()
        if text:
            self.is_done = True
            filtered.append(ModelTextDelta(text))

    def _flush(self, filtered: list[AnyModelEvent]) -> None:
        """Something else has come: what was held back is what it looks like."""
        self.is_done = True
        filtered += self._buffered
        self._buffered.clear()
        if self._tail:
            filtered.append(ModelReasoningDelta(self._tail))
