"""Reasoning that a server leaves in the text, between tags at its beginning; imports `protocol`."""

from collections.abc import Sequence

from fumehood.protocol.models import AnyModelEvent, Text, Thought

_OPENING = "<think>"
_CLOSING = "</think>"
_MOST_HELD = 256  # characters before the first tag, all of them spaces


class ThinkTags:
    """Tells a text that begins with `<think>` as reasoning up to `</think>`, piece by piece.

    over: nothing more will be changed. Tags anywhere else are text, since models also write about them.
    """

    def __init__(self) -> None:
        self.over = False
        self._held: list[Text] = []  # text that may be the beginning of the first tag
        self._within = False
        self._tail = ""  # reasoning that may be the beginning of the last tag
        self._closed = False

    def sift(self, events: Sequence[AnyModelEvent]) -> list[AnyModelEvent]:
        sifted: list[AnyModelEvent] = []
        for event in events:
            if self.over:
                sifted.append(event)
            elif isinstance(event, Text):
                self._take(event, sifted)
            else:
                self._leave(sifted)
                sifted.append(event)
        return sifted

    def _take(self, text: Text, sifted: list[AnyModelEvent]) -> None:
        if self._closed:
            self._answer(text.delta, sifted)
        elif self._within:
            self._think(text.delta, sifted)
        else:
            self._held.append(text)
            written = "".join(held.delta for held in self._held)
            begun = written.lstrip()
            if begun.startswith(_OPENING):
                self._held.clear()
                self._within = True
                self._think(begun.removeprefix(_OPENING).lstrip("\n"), sifted)
            elif not _OPENING.startswith(begun) or len(written) > _MOST_HELD:
                self._leave(sifted)

    def _think(self, delta: str, sifted: list[AnyModelEvent]) -> None:
        thought, closing, rest = (self._tail + delta).partition(_CLOSING)
        self._tail = ""
        if not closing:
            kept = next(size for size in range(len(_CLOSING), -1, -1) if thought.endswith(_CLOSING[:size]))
            thought, self._tail = thought[: len(thought) - kept], thought[len(thought) - kept :]
        if thought:
            sifted.append(Thought(thought))
        if closing:
            self._closed = True
            self._answer(rest, sifted)

    def _answer(self, text: str, sifted: list[AnyModelEvent]) -> None:
        """The empty lines between the reasoning and the answer are neither's."""
        text = text.lstrip()
        if text:
            self.over = True
            sifted.append(Text(text))

    def _leave(self, sifted: list[AnyModelEvent]) -> None:
        """Something else has come: what was held back is what it looks like."""
        self.over = True
        sifted += self._held
        self._held.clear()
        if self._tail:
            sifted.append(Thought(self._tail))
