"""`POST /execute`: upload files, run code, return the files it wrote, end the sandbox."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import batched
from typing import TYPE_CHECKING

from fumehood.protocol.sandbox.bundle_encoding import BundledFile, encode_bundle
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    InstallFailed,
    InvalidSandboxRequest,
    SandboxError,
    SandboxPayloadTooLarge,
    SandboxResourceNotFound,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionNote,
    ExpressionResult,
    FileEntry,
    OneShotRequest,
    OneShotResponse,
    SandboxSpec,
    Stderr,
    Stdout,
)
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.host.resource_allocator import file_quota_bytes
from fumehood.sandbox_server.inside.files import untrusted_files
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.sandbox_server.supervisor.sandbox_files import to_printable
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance

if TYPE_CHECKING:
    from fumehood.sandbox_server.api.sandbox_service import SandboxService

_LOG_NAME = "one-shot"  # the name of the sandbox in logs
_FILES_PER_BATCH = 100


def decode_files(request: OneShotRequest, settings: SandboxServerSettings) -> dict[str, bytes]:
    """The files to upload; raises FileRefused or SandboxPayloadTooLarge, which name the file."""
    if len(request.files) > min(untrusted_files.MAX_ENTRIES, settings.inodes // 2):
        raise SandboxPayloadTooLarge(
            f"{len(request.files)} files are more than a sandbox takes at once.", param="files"
        )
    room = file_quota_bytes(request.memory)
    if sum(map(len, request.files.values())) * 3 // 4 > room + 2 * len(request.files):
        raise SandboxPayloadTooLarge(
            f"The files do not fit: half of the memory ({request.memory}) may be files.", param="files"
        )
    contents: dict[str, bytes] = {}
    for name, text in request.files.items():
        try:
            untrusted_files.check_path(name)
            contents[name] = base64.b64decode(text, validate=True)
        except untrusted_files.UnsafePath as error:
            raise FileRefused(f"{to_printable(name)}: {error}", param="files") from error
        except ValueError as error:
            raise FileRefused(f"{to_printable(name)}: its content is not base64", param="files") from error
    return contents


async def run_one_shot(
    service: "SandboxService", request: OneShotRequest, spec: SandboxSpec, uploads: dict[str, bytes]
) -> OneShotResponse:
    started_at = time.monotonic()
    try:
        instance = await service.supervisor.create(spec)
    except InstallFailed as error:
        seconds = time.monotonic() - started_at
        structured_logging.log_event(
            "install_failed", sandbox=_LOG_NAME, tenant=spec.tenant, duration_ms=round(seconds * 1000, 3)
        )
        return _build_response(_OutputText(), None, round(seconds * 1000), {}, error.message)
    try:
        seconds = time.monotonic() - started_at
        service.metrics.record_created(
            warm=instance.warm, seconds=seconds, with_packages=bool(spec.requirements)
        )
        before = await _upload_files(instance, uploads)
        service.metrics.record_file_bytes("in", sum(map(len, uploads.values())))
        instance.executions.on_end = partial(service.record_execution_end, _LOG_NAME)
        text = _OutputText()
        execution = ExecuteRequest(code=request.code, timeout_seconds=request.timeout_seconds)
        end = await text.collect(InProcessSandbox(instance).execute(execution))
        produced, note, size = await _collect_produced_files(instance, end, before, service.settings)
        service.metrics.record_file_bytes("out", size)
        return _build_response(text, end, end.duration_ms, produced, note)
    finally:
        destroying_since = time.monotonic()
        await asyncio.shield(asyncio.ensure_future(instance.destroy()))
        service.metrics.record_destroyed(time.monotonic() - destroying_since)


async def _upload_files(instance: SandboxInstance, uploads: dict[str, bytes]) -> dict[str, FileEntry]:
    if not uploads:
        return {}
    try:
        written = await instance.files.write_bundle(encode_bundle(_iter_batches(uploads)))
        if written.refused:
            raise FileRefused(written.reasons[0])
    except (InvalidSandboxRequest, SandboxPayloadTooLarge, SandboxResourceNotFound) as error:
        kind = SandboxPayloadTooLarge if isinstance(error, SandboxPayloadTooLarge) else FileRefused
        raise kind(error.message, param="files") from error
    return {entry.path: entry for entry in (await instance.files.list()).files}


async def _iter_batches(uploads: dict[str, bytes]) -> AsyncGenerator[Sequence[BundledFile]]:
    for batch in batched(uploads.items(), _FILES_PER_BATCH):
        yield batch


async def _collect_produced_files(
    instance: SandboxInstance,
    end: ExecutionEnd,
    before: dict[str, FileEntry],
    settings: SandboxServerSettings,
) -> tuple[dict[str, str], str, int]:
    """New and changed files as base64, a note about those left out, and the number of bytes."""
    if not end.state_kept:
        return {}, "", 0
    produced: dict[str, str] = {}
    left_out = 0
    room = settings.produced_bytes
    try:
        listing = await instance.files.list()
        for entry in listing.files:
            if before.get(entry.path) == entry:
                continue
            content = None
            if len(produced) < settings.produced_files and entry.size <= room:
                content = await _read_file(instance, entry.path, room)
            if content is None:
                left_out += 1
            else:
                produced[entry.path] = base64.b64encode(content).decode()
                room -= len(content)
    except SandboxError as error:
        note = f"The files that the code wrote cannot be read: {error.message}"
        return produced, note, settings.produced_bytes - room
    size = settings.produced_bytes - room
    if not left_out and not listing.truncated:
        return produced, "", size
    count = f"{left_out} files" if left_out and not listing.truncated else "Some files"
    note = (
        f"{count} that the code wrote are left out: at most {settings.produced_files} files of "
        f"{settings.produced_bytes} bytes in total are returned, none with invalid names or in too deep directories."
    )
    return produced, note, size


async def _read_file(instance: SandboxInstance, path: str, limit: int) -> bytes | None:
    """The whole file, or None if it is gone, unreadable or larger than `limit`."""
    content = bytearray()
    try:
        async with await instance.files.open(path) as opened:
            async for chunk in opened.chunks():
                content += chunk
                if len(content) > limit:
                    return None
    except SandboxError:
        return None
    return bytes(content)


class _OutputText:
    """The output of an execution as text."""

    def __init__(self) -> None:
        self.stdout: list[str] = []
        self.stderr: list[str] = []

    async def collect(self, events: AsyncGenerator[ExecutionEvent]) -> ExecutionEnd:
        async for event in events:
            if isinstance(event, ExecutionEnd):
                return event
            self._append(event)
        raise RuntimeError("an execution without an end")

    def _append(self, event: ExecutionEvent) -> None:
        match event:
            case Stdout(text):
                self.stdout.append(text)
            case Stderr(text):
                self.stderr.append(text)
            case DisplayData(data) | ExpressionResult(data):
                _append_line(self.stdout, data.get("text/plain", ""))
            case ExceptionRaised(traceback=text) | ExecutionNote(text=text):
                _append_line(self.stderr, text)
            case ExecutionEnd():
                pass


def _append_line(parts: list[str], text: str) -> None:
    """Append text that starts and ends on its own line, unlike printed output."""
    if not text:
        return
    if parts and not parts[-1].endswith("\n"):
        parts.append("\n")
    parts.append(text if text.endswith("\n") else text + "\n")


def _build_response(
    text: _OutputText, end: ExecutionEnd | None, milliseconds: int, produced: dict[str, str], note: str
) -> OneShotResponse:
    """`end` is None if the code did not run; `note` is appended to standard error."""
    if note and end is not None:
        _append_line(text.stderr, note)
    reason = note if end is None else end.reason
    _append_line(text.stderr, reason)
    return OneShotResponse(
        status="success" if end is not None and end.status == "ok" else "error",
        stdout="".join(text.stdout),
        stderr="".join(text.stderr),
        exit_code=-1 if end is None else end.exit_code,
        execution_time_ms=milliseconds,
        files_produced=produced,
    )
