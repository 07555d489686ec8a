"""Shows what happens in a sandbox, for people or as JSON; imports msgspec, rich and `fumehood.protocol.sandbox`."""

import asyncio
import errno
import io
import os
import queue
import re
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import override

import msgspec
from rich.console import Console
from rich.text import Text

from fumehood.protocol.sandbox import AnyOutput, Display, End, Note, Raised, Result, Stderr, Stdout

STDOUT = 1
STDERR = 2
_PIECE = 1 << 16
_RESET = "\x1b[0m"
# Colours are let through; everything else that a terminal would obey becomes visible.
_CONTROL = re.compile(r"(\x1b\[[0-9;:]{0,32}m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class SavedFile(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is the path below /mnt/data, null for a picture that was shown."""

    path: str
    source: str | None
    size: int


class SkippedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    reason: str


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag="exit", tag_field="type"):
    """The last line of `exec --json`: what the command leaves with, and what it saved where.

    reason: why code could not be run or did not end by itself, else empty.
    directory: where `files` lie; null when nothing was to be saved.
    """

    code: int
    reason: str = ""
    directory: str | None = None
    files: list[SavedFile] = msgspec.field(default_factory=list[SavedFile])
    skipped: list[SkippedFile] = msgspec.field(default_factory=list[SkippedFile])


class Writer:
    """Writes to descriptors, in order, from a thread of its own.

    A reader that does not read must stop neither the clock of a call nor the answer to a signal. Nothing is
    buffered here, and the thread holds no lock while it waits, so the program can end under it.
    """

    def __init__(self, on_broken: Callable[[OSError], None]) -> None:
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[tuple[int, bytes] | Future[None]] = queue.SimpleQueue()
        self._broken: set[int] = set()
        threading.Thread(target=self._work, name="output", daemon=True).start()

    def put(self, fd: int, text: str) -> None:
        self._queue.put((fd, text.encode(errors="backslashreplace")))

    async def drain(self) -> None:
        """Wait until everything put so far has been taken."""
        done: Future[None] = Future()
        self._queue.put(done)
        await asyncio.wrap_future(done)

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, Future):
                if item.set_running_or_notify_cancel():
                    item.set_result(None)
            elif item[0] not in self._broken:
                self._write(*item)

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(fd, view[:_PIECE]) :]
                except BlockingIOError:  # somebody who shares the terminal has made it non-blocking
                    select.select([], [fd], [])
        except OSError as error:
            self._broken.add(fd)
            if fd == STDOUT:
                self._on_broken(error)


def broken_exit_code(error: OSError) -> int:
    """141 is what a shell shows for a program whose reader went away."""
    return 141 if error.errno == errno.EPIPE else 125


def neutral(text: str) -> str:
    """Text for a terminal that cannot move the cursor, set the title, paste, or ring."""
    return _CONTROL.sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    if match[1]:
        return match[1]
    char = match[0]
    if char == "\r":
        return "\n"
    if char < " ":
        return chr(0x2400 + ord(char))
    return "\u2421" if char == "\x7f" else f"\\x{ord(char):02x}"


def _json_line(value: msgspec.Struct) -> str:
    """JSON leaves DEL and the second set of control characters as they are, and terminals obey those too."""
    text = msgspec.json.encode(value).decode()
    return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


class _Feed(io.StringIO):
    """What rich writes to: the same queue as everything else."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    @override
    def write(self, text: str, /) -> int:
        self._writer.put(STDERR, text)
        return len(text)

    @override
    def isatty(self) -> bool:
        return os.isatty(STDERR)


class Output:
    """What the code says goes where the code sent it; what Fumehood says goes to standard error."""

    def __init__(self, writer: Writer, *, json: bool = False, quiet: bool = False) -> None:
        self._writer = writer
        self._json = json
        self._quiet = quiet
        self._terminals: dict[int, bool] = {fd: os.isatty(fd) for fd in (STDOUT, STDERR)}
        self._console = Console(
            file=_Feed(writer), soft_wrap=True, highlight=False, markup=False, emoji=False
        )
        self._open_line: dict[int, bool] = {STDOUT: False, STDERR: False}
        self._coloured = False

    def starting(self) -> AbstractContextManager[object]:
        """A sign of life until the first sandbox is there; only where somebody looks."""
        if self._quiet or not self._console.is_terminal:
            return nullcontext()
        return self._console.status("starting the sandbox…", spinner="dots")

    def event(self, event: AnyOutput, *, pictured: bool = False) -> None:
        """Show one step; `pictured` says that a picture in it has been saved and stands for it."""
        if self._json:
            self._writer.put(STDOUT, _json_line(event))
            return
        match event:
            case Stdout(text):
                self._say(STDOUT, text)
            case Stderr(text):
                self._say(STDERR, text)
            case Display(data):
                if not pictured:
                    self._line(STDOUT, data.get("text/plain", ""))
            case Result(data):
                self._line(STDOUT, data.get("text/plain", ""))
            case Raised(traceback=traceback):
                self._line(STDERR, traceback)
            case Note(text):
                self.note(text)
            case End(reason=reason):
                if reason:
                    self.warn(reason)

    def _line(self, fd: int, text: str) -> None:
        """Text that begins and ends its own lines, unlike what the code prints."""
        if text:
            self._end_line(fd)
            self._say(fd, text if text.endswith("\n") else text + "\n")

    def _say(self, fd: int, text: str) -> None:
        if self._terminals[fd]:
            text = neutral(text)
            self._coloured |= "\x1b" in text
        self._writer.put(fd, text)
        if text:
            self._open_line[fd] = not text.endswith("\n")

    def _end_line(self, fd: int) -> None:
        if self._open_line[fd]:
            self._writer.put(fd, "\n")
            self._open_line[fd] = False

    # ---- Fumehood's own words ---------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if not self._quiet:
            self._message(text, "dim")

    def warn(self, text: str) -> None:
        self._message(text, "yellow")

    def error(self, text: str) -> None:
        self._message(text, "red")

    def _message(self, text: str, style: str) -> None:
        if self._terminals[STDERR]:
            text = neutral(text)
            if self._coloured:
                self._writer.put(STDERR, _RESET)
            if self._terminals[STDOUT]:
                self._end_line(STDOUT)
        self._end_line(STDERR)
        self._console.print(Text(text, style=style))

    def finish(self, last: Exit) -> None:
        if self._json:
            self._writer.put(STDOUT, _json_line(last))
        for fd, terminal in self._terminals.items():
            if self._coloured and terminal:
                self._writer.put(fd, _RESET)
