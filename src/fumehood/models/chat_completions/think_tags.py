"""Extracts reasoning that a server leaves in the text between `<think>` tags."""

from fumehood.protocol.model_turns import AnyModelEvent, ModelReasoningDelta, ModelTextDelta

_OPENING = "<think>"
_CLOSING = "</think>"
_MAX_BUFFERED_CHARS = 256  # whitespace before the first tag


class ThinkTagFilter:
    """Turns a text that begins with `<think>` into reasoning up to `</think>`, delta by delta.

    Tags anywhere else stay text: models also write about them. After the tag, or without one, events pass unchanged.
    """

    def __init__(self) -> None:
        self._is_done = False
        self._buffered: list[ModelTextDelta] = []  # text that may be the start of the opening tag
        self._inside_tag = False
        self._tail = ""  # reasoning that may be the start of the closing tag
        self._tag_closed = False

    def filter_events(self, events: list[AnyModelEvent]) -> list[AnyModelEvent]:
        if self._is_done:
            return events
        filtered: list[AnyModelEvent] = []
        for event in events:
            if self._is_done:
                filtered.append(event)
            elif isinstance(event, ModelTextDelta):
                self._handle_text(event, filtered)
            else:
                self._flush(filtered)
                filtered.append(event)
        return filtered

    def _handle_text(self, text: ModelTextDelta, filtered: list[AnyModelEvent]) -> None:
        if self._tag_closed:
            self._emit_answer(text.delta, filtered)
        elif self._inside_tag:
            self._emit_reasoning(text.delta, filtered)
        else:
            self._buffered.append(text)
            text_so_far = "".join(event.delta for event in self._buffered)
            stripped = text_so_far.lstrip()
            if stripped.startswith(_OPENING):
                self._buffered.clear()
                self._inside_tag = True
                self._emit_reasoning(stripped.removeprefix(_OPENING).lstrip("\n"), filtered)
            elif not _OPENING.startswith(stripped) or len(text_so_far) > _MAX_BUFFERED_CHARS:
                self._flush(filtered)

    def _emit_reasoning(self, delta: str, filtered: list[AnyModelEvent]) -> None:
        reasoning, closing, rest = (self._tail + delta).partition(_CLOSING)
        self._tail = ""
        if not closing:
            overlap = next(
                size for size in range(len(_CLOSING), -1, -1) if reasoning.endswith(_CLOSING[:size])
            )
            reasoning, self._tail = (
                reasoning[: len(reasoning) - overlap],
                reasoning[len(reasoning) - overlap :],
            )
        if reasoning:
            filtered.append(ModelReasoningDelta(reasoning))
        if closing:
            self._tag_closed = True
            self._emit_answer(rest, filtered)

    def _emit_answer(self, text: str, filtered: list[AnyModelEvent]) -> None:
        """Drop the whitespace between reasoning and answer."""
        text = text.lstrip()
        if text:
            self._is_done = True
            filtered.append(ModelTextDelta(text))

    def _flush(self, filtered: list[AnyModelEvent]) -> None:
        """Emit the buffered text as it is: the text does not begin with a tag, or another event came."""
        self._is_done = True
        filtered += self._buffered
        self._buffered.clear()
        if self._tail:
            filtered.append(ModelReasoningDelta(self._tail))
