"""Prints the events of an execution, as text or as JSON lines."""

import asyncio
import errno
import io
import os
import queue
import re
import select
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import override

import msgspec
from rich.console import Console
from rich.text import Text

from fumehood.cli.options import EXIT_UNAVAILABLE
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionNote,
    ExpressionResult,
    Stderr,
    Stdout,
)

STDOUT_FD = 1
STDERR_FD = 2
_WRITE_BYTES = 1 << 16
_RESET = "\x1b[0m"
# Colours pass; other control sequences are made visible.
_CONTROL_CHARACTERS = re.compile(r"(\x1b\[[0-9;:]{0,32}m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class SavedFile(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is the path below /mnt/data, null for a displayed image."""

    path: str
    source: str | None
    size: int


class SkippedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    reason: str


class ExecExit(msgspec.Struct, frozen=True, kw_only=True, tag="exit", tag_field="type"):
    """The last line of `exec --json`: the exit code and the saved files.

    reason: why the code did not run or was stopped, else empty.
    directory: the directory of `files`; null if nothing was saved.
    """

    code: int
    reason: str = ""
    directory: str | None = None
    files: list[SavedFile] = msgspec.field(default_factory=list[SavedFile])
    skipped: list[SkippedFile] = msgspec.field(default_factory=list[SkippedFile])


class OutputWriterThread:
    """Writes to descriptors, in order, in a daemon thread.

    A blocked reader must not delay timeouts and signals. The thread holds no lock while it waits, so the process can
    exit at any time.
    """

    def __init__(self, on_broken: Callable[[OSError], None]) -> None:
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[tuple[int, bytes] | Future[None]] = queue.SimpleQueue()
        self._broken: set[int] = set()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, fd: int, text: str) -> None:
        self._queue.put((fd, text.encode(errors="backslashreplace")))

    async def drain(self) -> None:
        """Wait until everything queued so far is written."""
        done: Future[None] = Future()
        self._queue.put(done)
        await asyncio.wrap_future(done)

    def _run(self) -> None:
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
                    view = view[os.write(fd, view[:_WRITE_BYTES]) :]
                except BlockingIOError:  # another process has made the terminal non-blocking
                    select.select([], [fd], [])
        except OSError as error:
            self._broken.add(fd)
            if fd == STDOUT_FD:
                self._on_broken(error)


def exit_code_of_write_error(error: OSError) -> int:
    """141, as shells report SIGPIPE, if the reader is gone."""
    return 141 if error.errno == errno.EPIPE else EXIT_UNAVAILABLE


def escape_control_sequences(text: str) -> str:
    """Make control sequences visible, except colours: no cursor moves, titles, pastes or bells."""
    return _CONTROL_CHARACTERS.sub(_escape_match, text.replace("\r\n", "\n"))


def _escape_match(match: re.Match[str]) -> str:
    if match[1]:
        return match[1]
    char = match[0]
    if char == "\r":
        return "\n"
    if char < " ":
        return chr(0x2400 + ord(char))
    return "\u2421" if char == "\x7f" else f"\\x{ord(char):02x}"


def _encode_json_line(value: msgspec.Struct) -> str:
    """Encode one JSON line; escape DEL and C1 control characters, which JSON allows and terminals interpret."""
    text = msgspec.json.encode(value).decode()
    return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


class _ConsoleStream(io.StringIO):
    """The stream that rich writes to: forwards to the writer thread."""

    def __init__(self, writer: OutputWriterThread) -> None:
        super().__init__()
        self._writer = writer

    @override
    def write(self, text: str, /) -> int:
        self._writer.put(STDERR_FD, text)
        return len(text)

    @override
    def isatty(self) -> bool:
        return os.isatty(STDERR_FD)


class ExecOutput:
    """Prints output of the code to its stream, and messages of Fumehood to standard error."""

    def __init__(self, writer: OutputWriterThread, *, json: bool = False, quiet: bool = False) -> None:
        self._writer = writer
        self._json = json
        self._quiet = quiet
        self._is_terminal: dict[int, bool] = {fd: os.isatty(fd) for fd in (STDOUT_FD, STDERR_FD)}
        self._console = Console(
            file=_ConsoleStream(writer), soft_wrap=True, highlight=False, markup=False, emoji=False
        )
        self._has_open_line: dict[int, bool] = {STDOUT_FD: False, STDERR_FD: False}
        self._has_used_colour = False

    @contextmanager
    def show_startup(self) -> Generator[Callable[[str], None]]:
        """Show how the start proceeds: the yielded function shows a step, such as the package that is installed.

        On a terminal it is a spinner that disappears, otherwise each step is a line.
        """
        if self._quiet:
            yield lambda _: None
        elif self._console.is_terminal:
            with self._console.status("starting the sandbox…", spinner="dots") as status:
                yield lambda step: status.update(Text(f"{escape_control_sequences(step)}…"))
        else:
            yield self.note

    def show_event(self, event: ExecutionEvent, *, image_saved: bool = False) -> None:
        """Print one event; `image_saved` suppresses the text of an image that was saved."""
        if self._json:
            self._writer.put(STDOUT_FD, _encode_json_line(event))
            return
        match event:
            case Stdout(text):
                self._write(STDOUT_FD, text)
            case Stderr(text):
                self._write(STDERR_FD, text)
            case DisplayData(data):
                if not image_saved:
                    self._write_block(STDOUT_FD, data.get("text/plain", ""))
            case ExpressionResult(data):
                self._write_block(STDOUT_FD, data.get("text/plain", ""))
            case ExceptionRaised(traceback=traceback):
                self._write_block(STDERR_FD, traceback)
            case ExecutionNote(text):
                self.note(text)
            case ExecutionEnd(reason=reason):
                if reason:
                    self.warn(reason)

    def _write_block(self, fd: int, text: str) -> None:
        """Write text on lines of its own."""
        if text:
            self._end_line(fd)
            self._write(fd, text if text.endswith("\n") else text + "\n")

    def _write(self, fd: int, text: str) -> None:
        if self._is_terminal[fd]:
            text = escape_control_sequences(text)
            self._has_used_colour |= "\x1b" in text
        self._writer.put(fd, text)
        if text:
            self._has_open_line[fd] = not text.endswith("\n")

    def _end_line(self, fd: int) -> None:
        if self._has_open_line[fd]:
            self._writer.put(fd, "\n")
            self._has_open_line[fd] = False

    # ---- messages ---------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if not self._quiet:
            self._print_message(text, "dim")

    def warn(self, text: str) -> None:
        self._print_message(text, "yellow")

    def error(self, text: str) -> None:
        self._print_message(text, "red")

    def _print_message(self, text: str, style: str) -> None:
        if self._is_terminal[STDERR_FD]:
            text = escape_control_sequences(text)
            if self._has_used_colour:
                self._writer.put(STDERR_FD, _RESET)
            if self._is_terminal[STDOUT_FD]:
                self._end_line(STDOUT_FD)
        self._end_line(STDERR_FD)
        self._console.print(Text(text, style=style))

    def finish(self, result: ExecExit) -> None:
        if self._json:
            self._writer.put(STDOUT_FD, _encode_json_line(result))
        for fd, terminal in self._is_terminal.items():
            if self._has_used_colour and terminal:
                self._writer.put(fd, _RESET)
