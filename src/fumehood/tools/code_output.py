"""What a call of code says and shows, bounded whatever comes; imports `protocol` and siblings."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fumehood.protocol.sandbox import (
    AnyOutput,
    Display,
    End,
    Note,
    Raised,
    Result,
    Stderr,
    Stdout,
)
from fumehood.tools.pictures import Picture, shown_picture

_TEXTS = ("text/plain", "text/markdown", "text/html", "text/latex", "application/json", "image/svg+xml")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """How much of what a call says and shows is kept.

    model_characters: how much of the output the model is told; kept_characters: how much the item holds, of the
        logs, of stdout and of stderr. Of more, the beginning and the end are kept.
    images: how many pictures one call may show; image_bytes: how large one may be.
    """

    model_characters: int = 20_000
    kept_characters: int = 1 << 18
    images: int = 16
    image_bytes: int = 16 << 20


class HeadAndTail:
    """Text of which the beginning and the end are kept, and counted what was left out between them."""

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
    def truncated(self) -> bool:
        return self._total > self._limit

    @property
    def empty(self) -> bool:
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
        """On a line of its own."""
        self.add(text if self._ends_line else f"\n{text}")

    def text(self, explanation: str = "[… {left_out:,} characters left out …]") -> str:
        """At most as many characters as the limit, with the explanation in the place of what is left out.

        Where that would take more than half of them, as only very low limits have it, it comes on top.
        """
        head, tail = "".join(self._head), "".join(self._tail)
        if not self.truncated:
            return head + tail
        widest = len(explanation.format(left_out=self._total)) + 2
        room = self._limit if widest > self._limit // 2 else self._limit - widest
        head, tail = head[: room // 2], tail[-(room - room // 2) :]
        marker = explanation.format(left_out=self._total - room)
        return f"{head}\n{marker}\n{tail}"


class CodeOutput:
    """One call, event by event.

    told: what the model reads; logs: what clients do. figures: the pictures that were shown, in order.
    """

    def __init__(self, limits: OutputLimits) -> None:
        self.told = HeadAndTail(limits.model_characters)
        self.logs = HeadAndTail(limits.kept_characters)
        self.stdout = HeadAndTail(limits.kept_characters)
        self.stderr = HeadAndTail(limits.kept_characters)
        self.figures: list[Picture] = []
        self.end: End | None = None
        self._limits = limits
        self._shown = 0

    @property
    def truncated(self) -> bool:
        parts = (self.logs, self.stdout, self.stderr)
        return any(part.truncated for part in parts) or self._shown > len(self.figures)

    def take(self, event: AnyOutput) -> None:
        match event:
            case Stdout(text):
                self._add(self.stdout, text)
            case Stderr(text):
                self._add(self.stderr, text)
            case Display(data):
                self._show(data, "\n")
            case Result(data):
                self._show(data, "")
            case Raised(traceback=traceback):
                self._add_line(self.stderr, traceback)
            case Note(text):
                self._add_line(self.stderr, f"{text}\n")
            case End():
                self.end = event
                self._add_line(self.stderr, event.reason)

    def _show(self, data: Mapping[str, str], end: str) -> None:
        picture = shown_picture(data, self._limits.image_bytes)
        if picture is None:
            text = next((data[kind] for kind in _TEXTS if kind in data), "")
            self._add_line(self.stdout, text + end)
            return
        self._shown += 1
        if self._shown <= self._limits.images:
            self.figures.append(picture)
            self.told.add_line(f"[figure {self._shown}]\n")
        elif self._shown == self._limits.images + 1:
            self.told.add_line(f"[more than {self._limits.images} figures: the others are left out]\n")

    def _add(self, stream: HeadAndTail, text: str) -> None:
        stream.add(text)
        self.logs.add(text)
        self.told.add(text)

    def _add_line(self, stream: HeadAndTail, text: str) -> None:
        if text:
            stream.add_line(text)
            self.logs.add_line(text)
            self.told.add_line(text)
