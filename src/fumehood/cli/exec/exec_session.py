"""Runs one `fumehood exec`: sandbox, signals, files and exit code."""

import ast
import asyncio
import logging
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

from fumehood.cli.exec.exec_output import (
    ExecExit,
    ExecOutput,
    OutputWriterThread,
    SavedFile,
    SkippedFile,
    exit_code_of_write_error,
)
from fumehood.cli.options import EXIT_UNAVAILABLE
from fumehood.cli.output_directory import FileNotSaved, OutputDirectory, decode_images, split_safe_path
from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    InvalidServerToken,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEndStatus,
    ExecutionEvent,
    ExpressionResult,
    FileEntry,
    SandboxSpec,
)
from fumehood.sandbox_server.host.resource_allocator import file_quota_bytes
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages.requirements import summarise
from fumehood.sandbox_server.supervisor.sandbox_files import to_printable

if TYPE_CHECKING:
    from fumehood.sandbox_client import RemoteSandboxProvider
    from fumehood.sandbox_server.settings import SandboxServerSettings

logger = logging.getLogger(__name__)

type ShowStep = Callable[[str], None]

EXIT_INTERRUPTED = 130
_EXIT_CODES: dict[ExecutionEndStatus, int] = {
    "timeout": 124,
    "interrupted": EXIT_INTERRUPTED,
    "out_of_memory": 137,
    "lost": EXIT_UNAVAILABLE,
    "install_failed": EXIT_UNAVAILABLE,
}
_MAX_FILE_BYTES = 256 << 20
_MAX_TOTAL_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
_MAX_LINES = 20
_DRAIN_SECONDS = 1.0
_DESTROY_TIMEOUT = 5.0
_INTERRUPT_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecJob:
    """The options of one `fumehood exec`.

    open_sandbox: a sandbox that is created when it is entered, destroyed when it is left; the function that it is given
        shows the steps of its start.
    output_directory: without it, files are not saved.
    """

    code: str
    timeout: float
    open_sandbox: Callable[[ShowStep], AbstractAsyncContextManager[Sandbox]]
    uploads: tuple[Path, ...] = ()
    output_directory: OutputDirectory | None = None
    json: bool = False
    quiet: bool = False


def choose_preload(code: str, uploads: tuple[Path, ...], preload: tuple[str, ...]) -> tuple[str, ...]:
    """Preload nothing if the code uses only the standard library: it then starts in a third of the time."""
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


class ExecSession:
    """One `fumehood exec`."""

    def __init__(self, job: ExecJob) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._writer = OutputWriterThread(self._on_write_error)
        self._output = ExecOutput(self._writer, json=job.json, quiet=job.quiet)
        self._output_directory = job.output_directory
        self._sandbox: Sandbox | None = None
        self._request = ExecuteRequest(
            code=job.code, timeout_seconds=job.timeout, execution_id=secrets.token_hex(12)
        )
        self._is_running = False
        self._interrupt_task: asyncio.Task[None] | None = None
        self._task: asyncio.Task[int] | None = None
        self._signal_exit_code: int | None = None
        self._reason = ""
        self._saved_files: list[SavedFile] = []
        self._skipped_files: list[SkippedFile] = []

    async def run(self) -> int:
        """Run it and return the exit code; nothing is left running."""
        _redirect_logs(self._output)
        self._loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._cancel_with_exit_code, 128 + number)
        code = await self._run_cancellable(self._run_reporting_errors())
        directory = None if self._output_directory is None else str(self._output_directory.path)
        self._output.finish(
            ExecExit(
                code=code,
                reason=self._reason,
                directory=directory,
                files=self._saved_files,
                skipped=self._skipped_files,
            )
        )
        if self._signal_exit_code is None:
            return await self._run_cancellable(self._drain_output(code))
        with suppress(TimeoutError):  # after a signal, the reader may be gone
            await asyncio.wait_for(self._writer.drain(), _DRAIN_SECONDS)
        return code

    async def _drain_output(self, code: int) -> int:
        await self._writer.drain()
        return code

    async def _run_cancellable(self, coroutine: Coroutine[Any, Any, int]) -> int:
        """Await the coroutine; if a signal cancels it, return the signal's exit code."""
        self._task = asyncio.ensure_future(coroutine)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._signal_exit_code is None:
                raise
            return self._signal_exit_code

    # ---- signals ----------------------------------------------------------------------------------------------

    def _on_sigint(self) -> None:
        if self._sandbox is None or not self._is_running or self._interrupt_task is not None:
            self._cancel_with_exit_code(EXIT_INTERRUPTED)
            return
        self._output.note("Interrupting the code; press Ctrl-C again to kill it.")
        self._interrupt_task = asyncio.ensure_future(self._interrupt(self._sandbox))

    async def _interrupt(self, sandbox: Sandbox) -> None:
        """Interrupt the code; retry while a server does not know the execution yet."""
        try:
            while self._is_running:
                if await sandbox.interrupt(self._request.execution_id):
                    return
                await asyncio.sleep(_INTERRUPT_RETRY_SECONDS)
        except SandboxError as error:
            self._output.warn(f"The code could not be interrupted: {error}")

    def _cancel_with_exit_code(self, code: int) -> None:
        """Cancel the task once; further signals do not disturb the cleanup."""
        if self._signal_exit_code is None and self._task is not None:
            self._signal_exit_code = code
            self._task.cancel()

    def _on_write_error(self, error: OSError) -> None:
        self._loop.call_soon_threadsafe(self._exit_on_write_error, error)  # called in the writer thread

    def _exit_on_write_error(self, error: OSError) -> None:
        code = exit_code_of_write_error(error)
        if code == EXIT_UNAVAILABLE:
            self._output.error(f"Cannot write to standard output: {error.strerror}.")
        self._cancel_with_exit_code(code)

    # ---- execution --------------------------------------------------------------------------------------------

    async def _run_reporting_errors(self) -> int:
        try:
            return await self._run_in_sandbox()
        except IsolationUnavailable as error:
            self._report_failure(f"This host cannot isolate code, so nothing was run. {error.reason}")
            self._output.error(error.advice)
        except SandboxError as error:
            self._report_failure(str(error))
        except Exception as error:
            # Our failure: return an exit code that the code cannot have.
            self._report_failure(f"Fumehood failed: {type(error).__name__}: {error}")
            self._output.error(traceback.format_exc())
        return EXIT_UNAVAILABLE

    def _report_failure(self, reason: str) -> None:
        self._reason = reason
        self._output.error(reason)

    async def _run_in_sandbox(self) -> int:
        job = self._job
        async with AsyncExitStack() as stack:
            with self._output.show_startup() as show_step:
                self._sandbox = await stack.enter_async_context(job.open_sandbox(show_step))
            snapshot = await self._upload_files(self._sandbox)
            end = await self._execute(self._sandbox)
            self._reason = end.reason
            try:
                await self._download_files(self._sandbox, end, snapshot)
            except SandboxError as error:
                self._output.warn(f"Cannot read the files that the code wrote: {error}")
            return _EXIT_CODES.get(end.status, (end.exit_code & 0xFF) or int(end.status != "ok"))

    async def _execute(self, sandbox: Sandbox) -> ExecutionEnd:
        self._is_running = True
        try:
            async with aclosing(sandbox.execute(self._request)) as events:
                async for event in events:
                    self._is_running = not isinstance(event, ExecutionEnd)
                    await self._handle_event(event)
                    if isinstance(event, ExecutionEnd):
                        return event
        finally:
            self._is_running = False
            if self._interrupt_task is not None:
                self._interrupt_task.cancel()
        raise RuntimeError("the execution ended without an end event")

    async def _upload_files(self, sandbox: Sandbox) -> str | None:
        """Upload the files of --file; returns the snapshot token before the code runs."""
        for path in self._job.uploads:
            await sandbox.write_file(path.name, _read_chunks(path))
        return (await sandbox.list_files()).mark if self._job.uploads else None

    async def _handle_event(self, event: ExecutionEvent) -> None:
        saved: list[str] = []
        if isinstance(event, DisplayData | ExpressionResult):
            saved = await asyncio.to_thread(self._save_images, event.data)
        self._output.show_event(event, image_saved=bool(saved))
        for path in saved:
            self._output.note(f"image: {path}")

    def _save_images(self, data: dict[str, str]) -> list[str]:
        if self._output_directory is None and self._job.json:
            return []  # the events contain them
        paths: list[str] = []
        try:
            for suffix, content in decode_images(data):
                directory = self._output_directory = self._output_directory or OutputDirectory(
                    Path(tempfile.mkdtemp(prefix="fumehood-"))
                )
                path = directory.save_image(suffix, content)
                self._saved_files.append(SavedFile(path=path, source=None, size=len(content)))
                paths.append(str(directory.path / path))
        except (FileNotSaved, OSError) as error:  # OSError: no temporary directory
            self._output.warn(f"An image was not saved: {error}")
        return paths

    # ---- files ------------------------------------------------------------------------------------------------

    async def _download_files(self, sandbox: Sandbox, end: ExecutionEnd, snapshot: str | None) -> None:
        directory = self._job.output_directory
        if not end.state_kept:
            if directory is not None:
                self._output.warn("The sandbox was lost, and with it the files that the code wrote.")
            return
        listing = await sandbox.list_files(snapshot)
        written = listing.files
        if directory is None:
            if written:
                self._output.note(
                    f"The code wrote {_format_file_count(len(written))}; use --files-out DIR to save what it writes."
                )
            return
        bytes_left = _MAX_TOTAL_BYTES
        for entry in written:
            bytes_left -= await self._download_file(sandbox, directory, entry, bytes_left)
        if listing.truncated:
            self._skip_file(
                "…", "some files are not listed: too many, too deep, or with names that are not text"
            )
        self._print_file_summary(directory)

    async def _download_file(
        self, sandbox: Sandbox, directory: OutputDirectory, entry: FileEntry, bytes_left: int
    ) -> int:
        """Save one file; returns its size, or 0 if it was skipped."""
        limit = min(_MAX_FILE_BYTES, bytes_left)
        try:
            split_safe_path(entry.path)
            if entry.size > limit:
                what = "all files (1 GiB)" if bytes_left < _MAX_FILE_BYTES else "one file (256 MiB)"
                raise FileNotSaved(f"{entry.size} bytes, over the limit of {what}")
            content = await _read_file(sandbox, entry.path, limit)
            path = await asyncio.to_thread(directory.save, entry.path, content)
        except (FileNotSaved, FileRefused, SandboxFileNotFound, SandboxPayloadTooLarge) as error:
            self._skip_file(entry.path, str(error).removeprefix(f"{to_printable(entry.path)}: "))
            return 0
        self._saved_files.append(SavedFile(path=path, source=entry.path, size=len(content)))
        return len(content)

    def _skip_file(self, path: str, reason: str) -> None:
        self._skipped_files.append(SkippedFile(path=to_printable(path), reason=reason))

    def _print_file_summary(self, directory: OutputDirectory) -> None:
        lines: list[str] = []
        for file in self._saved_files:
            if file.source is not None:
                other = (
                    ""
                    if file.path == file.source
                    else f" ({to_printable(file.source)} exists with other content)"
                )
                lines.append(f"saved: {to_printable(str(directory.path / file.path))}{other}")
        for line in _limit_lines(lines):
            self._output.note(line)
        for line in _limit_lines([f"not saved: {file.path}: {file.reason}" for file in self._skipped_files]):
            self._output.warn(line)


async def _read_file(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """Read a file, which may have grown since it was listed. Raises FileNotSaved above the limit."""
    chunks: list[bytes] = []
    async with aclosing(sandbox.read_file(path)) as content:
        async for chunk in content:
            limit -= len(chunk)
            if limit < 0:
                raise FileNotSaved("it grew during the download")
            chunks.append(chunk)
    return b"".join(chunks)


async def _read_chunks(path: Path) -> AsyncGenerator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


def _format_file_count(number: int) -> str:
    return "one file" if number == 1 else f"{number} files"


def _limit_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"… and {more} more"]


def find_upload_problem(paths: Sequence[Path], spec: SandboxSpec) -> str | None:
    """Why these files cannot be uploaded to a sandbox; None if they can."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        return "two files have the same name"
    bytes_left = file_quota_bytes(spec.memory)
    for path in paths:
        if not path.is_file():
            return f"{path} is not a file"
        bytes_left -= path.stat().st_size
        if bytes_left < 0:
            return f"{path} does not fit: files may use half of the memory ({spec.memory})"
    return None


# --- sandboxes ---


@asynccontextmanager
async def open_local_sandbox(
    settings: "SandboxServerSettings", spec: SandboxSpec, show_step: ShowStep
) -> AsyncGenerator[Sandbox]:
    """Run a supervisor in this process. Raises IsolationUnavailable, SandboxError."""
    from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
    from fumehood.sandbox_server.supervisor.supervisor import Supervisor

    async with Supervisor(settings) as supervisor:
        yield InProcessSandbox(await supervisor.create(spec, show_step))


@asynccontextmanager
async def open_remote_sandbox(
    provider: "RemoteSandboxProvider", spec: SandboxSpec, show_step: ShowStep
) -> AsyncGenerator[Sandbox]:
    """Use a sandbox server. Raises what `SandboxProvider` raises."""
    # We choose the id, to destroy the sandbox even if we are cancelled before the response.
    ref = SandboxRef(f"exec-{secrets.token_hex(8)}")
    async with provider:
        if spec.requirements:
            show_step(f"installing {summarise(spec.requirements)}")
        try:
            await provider.create(spec, ref.id)
            yield await provider.attach(ref)
        except InvalidServerToken as error:
            raise InvalidServerToken(
                "The server requires its token; set the variable FUMEHOOD_SANDBOX_TOKEN."
            ) from error
        finally:
            await _destroy(provider, ref)


async def _destroy(provider: "RemoteSandboxProvider", ref: SandboxRef) -> None:
    try:
        async with asyncio.timeout(_DESTROY_TIMEOUT):
            await provider.destroy(ref)
    except (SandboxError, TimeoutError) as error:
        logger.debug("The sandbox %s may not be destroyed: %s", ref.id, error)


# --- logs ---


class _OutputLogHandler(logging.Handler):
    def __init__(self, output: ExecOutput) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(
            record, "fields"
        ):  # a log event of the sandbox server, which ExecOutput shows otherwise
            self._output.warn(record.getMessage())


def _redirect_logs(output: ExecOutput) -> None:
    """Send warnings of the sandbox server through `ExecOutput`: they may contain text from a sandbox."""
    logger = logging.getLogger("fumehood")
    logger.handlers = [_OutputLogHandler(output)]
    logger.propagate = False
