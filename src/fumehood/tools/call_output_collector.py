"""Collects the output of a call within limits."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fumehood.interfaces import ContainerEvent, ExecutionStarted
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecutionEnd,
    ExecutionNote,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.tools.images import DecodedImage, decode_display

RAN_STATUSES = frozenset({"ok", "error"})  # also code that raises and a command that fails
NO_OUTPUT = "(no output)"  # shown to the model
_TEXT_TYPES = ("text/plain", "text/markdown", "text/html", "text/latex", "application/json", "image/svg+xml")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """How much output of a call is kept; of longer output, the beginning and the end.

    model_output_characters: sent to the model.
    stored_output_characters: stored in the item, of the logs, stdout and stderr each.
    images: displayed images of one call; image_bytes: size of one.
    """

    model_output_characters: int = 20_000
    stored_output_characters: int = 1 << 18
    images: int = 16
    image_bytes: int = 16 << 20


class HeadTailBuffer:
    """Keeps the beginning and end of a text, and counts the characters omitted between them."""

    def __init__(self, limit: int) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._room = limit // 2
        self._tail_limit = limit - limit // 2
        self._tail_size = 0
        self._total = 0
        self._limit = limit
        self._ends_line = True

    @property
    def is_truncated(self) -> bool:
        return self._total > self._limit

    @property
    def is_empty(self) -> bool:
        return not self._total

    def add(self, text: str) -> None:
        if not text:
            return
        self._total += len(text)
        self._ends_line = text[-1] == "\n"
        if self._room:
            self._head.append(text[: self._room])
            text = text[self._room :]
            self._room -= len(self._head[-1])
        if text:
            self._tail.append(text[-self._tail_limit :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._tail_limit:
                self._tail_size -= len(self._tail.popleft())

    def add_line(self, text: str) -> None:
        """Add text on a new line."""
        self.add(text if self._ends_line else f"\n{text}")

    def render(self, omission_mark: str = "[… {left_out:,} characters left out …]") -> str:
        """Return at most `limit` characters, with the mark in place of what is omitted.

        A mark longer than half of a very low limit is added on top of it.
        """
        head, tail = "".join(self._head), "".join(self._tail)
        if not self.is_truncated:
            return head + tail
        widest = len(omission_mark.format(left_out=self._total)) + 2
        room = self._limit if widest > self._limit // 2 else self._limit - widest
        head, tail = head[: room // 2], tail[-(room - room // 2) :]
        marker = omission_mark.format(left_out=self._total - room)
        return f"{head}\n{marker}\n{tail}"


class CallOutput:
    """The output of one call.

    model_text: for the model; logs: for clients; images: displayed images, in order.
    """

    def __init__(self, limits: OutputLimits) -> None:
        self.model_text = HeadTailBuffer(limits.model_output_characters)
        self.logs = HeadTailBuffer(limits.stored_output_characters)
        self.stdout = HeadTailBuffer(limits.stored_output_characters)
        self.stderr = HeadTailBuffer(limits.stored_output_characters)
        self.images: list[DecodedImage] = []
        self.end: ExecutionEnd | None = None
        self._limits = limits
        self._image_count = 0

    @property
    def is_truncated(self) -> bool:
        parts = (self.logs, self.stdout, self.stderr)
        return any(part.is_truncated for part in parts) or self._image_count > len(self.images)

    def add_event(self, event: ContainerEvent) -> None:
        match event:
            case Stdout(text):
                self._add(self.stdout, text)
            case Stderr(text):
                self._add(self.stderr, text)
            case DisplayData(data):
                self._add_display(data, "\n")
            case ExpressionResult(data):
                self._add_display(data, "")
            case ExceptionRaised(traceback=traceback):
                self._add_line(self.stderr, traceback)
            case ExecutionNote(text):
                self._add_line(self.stderr, f"{text}\n")
            case ExecutionEnd():
                self.end = event
                self._add_line(self.stderr, event.reason)
            case ExecutionStarted():
                pass

    def _add_display(self, data: Mapping[str, str], end: str) -> None:
        image = decode_display(data, self._limits.image_bytes)
        if image is None:
            text = next((data[kind] for kind in _TEXT_TYPES if kind in data), "")
            self._add_line(self.stdout, text + end)
            return
        self._image_count += 1
        if self._image_count <= self._limits.images:
            self.images.append(image)
            self.model_text.add_line(f"[figure {self._image_count}]\n")
        elif self._image_count == self._limits.images + 1:
            self.model_text.add_line(f"[more than {self._limits.images} figures: the others are left out]\n")

    def _add(self, stream: HeadTailBuffer, text: str) -> None:
        stream.add(text)
        self.logs.add(text)
        self.model_text.add(text)

    def _add_line(self, stream: HeadTailBuffer, text: str) -> None:
        if text:
            stream.add_line(text)
            self.logs.add_line(text)
            self.model_text.add_line(text)
