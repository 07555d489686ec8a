"""Runs one program in one sandbox for `fumehood exec`: signals, files, exit code; imports `interfaces`, siblings."""

import ast
import asyncio
import logging
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from fumehood.cli.folders import Folder, NotSaved, checked_parts, pictures
from fumehood.cli.output import Exit, Output, SavedFile, SkippedFile, Writer, broken_exit_code
from fumehood.cli.places import Place
from fumehood.interfaces import Sandbox
from fumehood.protocol.sandbox import (
    AnyOutput,
    Display,
    End,
    EndStatus,
    ExecuteRequest,
    FileEntry,
    Result,
    SandboxSpec,
)
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, TooLarge
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.files import printable
from fumehood.sandboxd.places import data_quota

NO_SANDBOX = 125
INTERRUPTED = 130
_EXIT_CODES: dict[EndStatus, int] = {
    "timeout": 124,
    "interrupted": INTERRUPTED,
    "out_of_memory": 137,
    "lost": NO_SANDBOX,
    "install_failed": NO_SANDBOX,
}
_FILE_BYTES = 256 << 20
_TOTAL_BYTES = 1 << 30
_PIECE = 1 << 20
_MOST_LINES = 20
_DRAIN_SECONDS = 1.0
_INTERRUPT_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the command line asked for; `folder` None means that files of the code are not kept."""

    code: str
    timeout: float
    spec: SandboxSpec
    place: Place
    uploads: tuple[Path, ...] = ()
    folder: Folder | None = None
    json: bool = False
    quiet: bool = False


def light_preload(code: str, uploads: tuple[Path, ...], preload: tuple[str, ...]) -> tuple[str, ...]:
    """Preload nothing for code that uses the standard library only: it then starts in a third of the time."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return preload
    own = {path.stem for path in uploads}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        roots = {name.partition(".")[0] for name in names}
        if "importlib" in roots or roots & own or not roots <= sys.stdlib_module_names:
            return preload
    return preload if "__import__" in code else ()


class Session:
    """One `fumehood exec`, from its first byte to its exit code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(self._output_broke)
        self._out = Output(self._writer, json=job.json, quiet=job.quiet)
        self._folder = job.folder
        self._sandbox: Sandbox | None = None
        self._request = ExecuteRequest(
            code=job.code, timeout_seconds=job.timeout, execution_id=secrets.token_hex(12)
        )
        self._running = False
        self._interrupting: asyncio.Task[None] | None = None
        self._work: asyncio.Task[int] | None = None
        self._leaving: int | None = None
        self._reason = ""
        self._saved: list[SavedFile] = []
        self._skipped: list[SkippedFile] = []

    async def run(self) -> int:
        """The exit code; whatever happens, nothing is left running."""
        _log_to(self._out)
        self._loop.add_signal_handler(signal.SIGINT, self._keyboard_interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._leave, 128 + number)
        code = await self._cancellable(self._guarded())
        directory = None if self._folder is None else str(self._folder.path)
        self._out.finish(
            Exit(
                code=code, reason=self._reason, directory=directory, files=self._saved, skipped=self._skipped
            )
        )
        if self._leaving is None:
            return await self._cancellable(self._drained(code))
        with suppress(TimeoutError):  # whoever ended us may have stopped reading as well
            await asyncio.wait_for(self._writer.drain(), _DRAIN_SECONDS)
        return code

    async def _drained(self, code: int) -> int:
        await self._writer.drain()
        return code

    async def _cancellable(self, work: Coroutine[Any, Any, int]) -> int:
        """Do it; when a signal asks us to leave, unwind it and take the signal's exit code instead."""
        self._work = asyncio.ensure_future(work)
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._leaving is None:
                raise
            return self._leaving

    # ---- signals ----------------------------------------------------------------------------------------------

    def _keyboard_interrupt(self) -> None:
        if self._sandbox is None or not self._running or self._interrupting is not None:
            self._leave(INTERRUPTED)
            return
        self._out.note("Interrupting the code; press Ctrl-C again to end it at once.")
        self._interrupting = asyncio.ensure_future(self._interrupt(self._sandbox))

    async def _interrupt(self, sandbox: Sandbox) -> None:
        """Also before it has had its turn, or before a server has heard of it."""
        try:
            while self._running:
                if await sandbox.interrupt(self._request.execution_id):
                    return
                await asyncio.sleep(_INTERRUPT_AGAIN_SECONDS)
        except SandboxError as error:
            self._out.warn(f"The code could not be interrupted: {error}")

    def _leave(self, code: int) -> None:
        """Unwind once; what cleans up is not disturbed by further signals."""
        if self._leaving is None and self._work is not None:
            self._leaving = code
            self._work.cancel()

    def _output_broke(self, error: OSError) -> None:
        self._loop.call_soon_threadsafe(self._leave_broken, error)  # we are on the writer's thread here

    def _leave_broken(self, error: OSError) -> None:
        code = broken_exit_code(error)
        if code == NO_SANDBOX:
            self._out.error(f"Standard output cannot be written: {error.strerror}.")
        self._leave(code)

    # ---- the program ------------------------------------------------------------------------------------------

    async def _guarded(self) -> int:
        try:
            return await self._isolated()
        except IsolationUnavailable as error:
            self._refuse(f"Code cannot be isolated here, so nothing was run. {error.reason}")
            self._out.error(error.advice)
        except SandboxError as error:
            self._refuse(str(error))
        except Exception as error:
            # Not the code's failure, so not an exit code that the code could have.
            self._refuse(f"Fumehood failed: {type(error).__name__}: {error}")
            self._out.error(traceback.format_exc())
        return NO_SANDBOX

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        self._out.error(reason)

    async def _isolated(self) -> int:
        job = self._job
        async with AsyncExitStack() as stack:
            with self._out.starting():
                self._sandbox = await stack.enter_async_context(job.place.sandbox(job.spec))
            before = await self._upload(self._sandbox)
            end = await self._execute(self._sandbox)
            self._reason = end.reason
            try:
                await self._bring_home(self._sandbox, end, before)
            except SandboxError as error:
                self._out.warn(f"The files that the code wrote cannot be read: {error}")
            return _EXIT_CODES.get(end.status, (end.exit_code & 0xFF) or int(end.status != "ok"))

    async def _execute(self, sandbox: Sandbox) -> End:
        self._running = True
        try:
            async with aclosing(sandbox.execute(self._request)) as events:
                async for event in events:
                    self._running = not isinstance(event, End)
                    await self._take(event)
                    if isinstance(event, End):
                        return event
        finally:
            self._running = False
            if self._interrupting is not None:
                self._interrupting.cancel()
        raise RuntimeError("an execution without an end")

    async def _upload(self, sandbox: Sandbox) -> str | None:
        """The mark of what is there before the code runs."""
        for path in self._job.uploads:
            await sandbox.write(path.name, _pieces(path))
        return (await sandbox.list()).mark if self._job.uploads else None

    async def _take(self, event: AnyOutput) -> None:
        saved: list[str] = []
        if isinstance(event, Display | Result):
            saved = await asyncio.to_thread(self._save_pictures, event.data)
        self._out.event(event, pictured=bool(saved))
        for path in saved:
            self._out.note(f"picture: {path}")

    def _save_pictures(self, data: dict[str, str]) -> list[str]:
        if self._folder is None and self._job.json:
            return []  # they are in the events
        paths: list[str] = []
        try:
            for suffix, content in pictures(data):
                folder = self._folder = self._folder or Folder(Path(tempfile.mkdtemp(prefix="fumehood-")))
                path = folder.save_picture(suffix, content)
                self._saved.append(SavedFile(path=path, source=None, size=len(content)))
                paths.append(str(folder.path / path))
        except (NotSaved, OSError) as error:  # OSError: there is no directory for temporary files
            self._out.warn(f"A picture was not saved: {error}")
        return paths

    # ---- files ------------------------------------------------------------------------------------------------

    async def _bring_home(self, sandbox: Sandbox, end: End, before: str | None) -> None:
        folder = self._job.folder
        if not end.state_kept:
            if folder is not None:
                self._out.warn("The sandbox is gone, and the files that the code wrote with it.")
            return
        listing = await sandbox.list(before)
        written = listing.files
        if folder is None:
            if written:
                self._out.note(f"The code wrote {_files(len(written))}; --files-out DIR keeps them.")
            return
        room = _TOTAL_BYTES
        for entry in written:
            room -= await self._bring(sandbox, folder, entry, room)
        if listing.truncated:
            self._skip("…", "some files are not listed: too many, too deep, or of names that are not text")
        self._tell(folder)

    async def _bring(self, sandbox: Sandbox, folder: Folder, entry: FileEntry, room: int) -> int:
        """Save one file; returns how much of the room it took."""
        limit = min(_FILE_BYTES, room)
        try:
            checked_parts(entry.path)
            if entry.size > limit:
                whose = "all files together (1 GiB)" if room < _FILE_BYTES else "one file (256 MiB)"
                raise NotSaved(f"{entry.size} bytes, more than is copied of {whose}")
            content = await _content(sandbox, entry.path, limit)
            path = await asyncio.to_thread(folder.save, entry.path, content)
        except (NotSaved, FileRefused, FileNotFound, TooLarge) as error:
            self._skip(entry.path, str(error).removeprefix(f"{printable(entry.path)}: "))
            return 0
        self._saved.append(SavedFile(path=path, source=entry.path, size=len(content)))
        return len(content)

    def _skip(self, path: str, reason: str) -> None:
        self._skipped.append(SkippedFile(path=printable(path), reason=reason))

    def _tell(self, folder: Folder) -> None:
        lines: list[str] = []
        for file in self._saved:
            if file.source is not None:
                other = (
                    ""
                    if file.path == file.source
                    else f" ({printable(file.source)} was there with other content)"
                )
                lines.append(f"saved: {printable(str(folder.path / file.path))}{other}")
        for line in _few(lines):
            self._out.note(line)
        for line in _few([f"not saved: {file.path}: {file.reason}" for file in self._skipped]):
            self._out.warn(line)


async def _content(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """What is there now, though it may be more than was listed."""
    pieces: list[bytes] = []
    async with aclosing(sandbox.read(path)) as reading:
        async for piece in reading:
            limit -= len(piece)
            if limit < 0:
                raise NotSaved("it grew while it was copied")
            pieces.append(piece)
    return b"".join(pieces)


async def _pieces(path: Path) -> AsyncGenerator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _files(number: int) -> str:
    return "one file" if number == 1 else f"{number} files"


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"… and {more} more"]


def check_uploads(paths: list[Path], spec: SandboxSpec) -> str | None:
    """Why these files cannot be put into a sandbox, or None."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        return "two files have the same name"
    room = data_quota(spec.memory)
    for path in paths:
        if not path.is_file():
            return f"{path} is not a file"
        room -= path.stat().st_size
        if room < 0:
            return f"{path} does not fit: half of the memory ({spec.memory}) may be files"
    return None


class _ToOutput(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "fields"):  # an event of the sandbox server, told by other means here
            self._out.warn(record.getMessage())


def _log_to(out: Output) -> None:
    """The sandbox server's warnings may quote what a sandbox said: they go the same guarded way."""
    logger = logging.getLogger("fumehood")
    logger.handlers = [_ToOutput(out)]
    logger.propagate = False
