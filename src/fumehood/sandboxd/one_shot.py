"""`POST /execute`: files in, code, files out, and the sandbox is no more; imports `fumehood.protocol` and siblings."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import batched
from typing import Protocol

from fumehood.protocol.sandbox import (
    AnyOutput,
    Display,
    End,
    FileEntry,
    Note,
    OneShotRequest,
    OneShotResponse,
    Raised,
    Result,
    SandboxSpec,
    Stderr,
    Stdout,
)
from fumehood.protocol.sandbox_bundles import WholeFile, bundled
from fumehood.protocol.sandbox_errors import (
    FileRefused,
    InstallFailed,
    NotThere,
    RequestRefused,
    SandboxError,
    TooLarge,
)
from fumehood.sandboxd import logs
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.files import printable
from fumehood.sandboxd.inside import files as paths
from fumehood.sandboxd.metrics import Metrics
from fumehood.sandboxd.places import data_quota
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

_NAME = "one-shot"  # what logs call a sandbox that nobody named
_AT_ONCE = 100


class Host(Protocol):
    """What a one-shot needs of the service that it runs in."""

    settings: Settings
    supervisor: Supervisor
    metrics: Metrics

    def started(self, execution: Execution, local: LocalSandbox) -> None: ...

    def ended(self, execution: Execution, end: End, *, sandbox: str, call_id: str) -> None: ...


def spec_of(request: OneShotRequest) -> SandboxSpec:
    return SandboxSpec(memory=request.memory, tenant=request.tenant, requirements=request.requirements)


def decoded(request: OneShotRequest, settings: Settings) -> dict[str, bytes]:
    """The files to put in place; FileRefused or TooLarge says what is wrong with which."""
    if len(request.files) > min(paths.MAX_ENTRIES, settings.inodes // 2):
        raise TooLarge(f"{len(request.files)} files are more than a sandbox takes at once.", param="files")
    room = data_quota(request.memory)
    if sum(map(len, request.files.values())) * 3 // 4 > room + 2 * len(request.files):
        raise TooLarge(
            f"The files do not fit: half of the memory ({request.memory}) may be files.", param="files"
        )
    contents: dict[str, bytes] = {}
    for name, text in request.files.items():
        try:
            paths.checked(name)
            contents[name] = base64.b64decode(text, validate=True)
        except paths.UnsafePath as error:
            raise FileRefused(f"{printable(name)}: {error}", param="files") from error
        except ValueError as error:
            raise FileRefused(f"{printable(name)}: its content is not base64", param="files") from error
    return contents


async def run(
    host: Host, request: OneShotRequest, spec: SandboxSpec, uploads: dict[str, bytes]
) -> OneShotResponse:
    began = time.monotonic()
    try:
        local = await host.supervisor.create(spec)
    except InstallFailed as error:
        seconds = time.monotonic() - began
        logs.event("install_failed", sandbox=_NAME, tenant=spec.tenant, duration_ms=round(seconds * 1000, 3))
        return _response(_Text(), None, round(seconds * 1000), {}, error.message)
    try:
        seconds = time.monotonic() - began
        host.metrics.created(warm=local.warm, seconds=seconds, with_packages=bool(spec.requirements))
        before = await _upload(local, uploads)
        host.metrics.moved("in", sum(map(len, uploads.values())))
        execution = local.start(request.code, timeout=request.timeout_seconds)
        execution.on_end = partial(host.ended, execution, sandbox=_NAME, call_id=secrets.token_hex(12))
        host.started(execution, local)
        text = _Text()
        end = await text.take_all(execution)
        produced, note, given = await _produced(local, end, before, host.settings)
        host.metrics.moved("out", given)
        return _response(text, end, end.duration_ms, produced, note)
    finally:
        ending = time.monotonic()
        await asyncio.shield(asyncio.ensure_future(local.destroy()))
        host.metrics.destroyed(time.monotonic() - ending)


async def _upload(local: LocalSandbox, uploads: dict[str, bytes]) -> dict[str, FileEntry]:
    if not uploads:
        return {}
    try:
        written = await local.files.receive(bundled(_batches(uploads)))
        if written.refused:
            raise FileRefused(written.reasons[0])
    except (RequestRefused, TooLarge, NotThere) as error:
        kind = TooLarge if isinstance(error, TooLarge) else FileRefused
        raise kind(error.message, param="files") from error
    return {entry.path: entry for entry in (await local.files.list()).files}


async def _batches(uploads: dict[str, bytes]) -> AsyncGenerator[Sequence[WholeFile]]:
    for some in batched(uploads.items(), _AT_ONCE):
        yield some


async def _produced(
    local: LocalSandbox, end: End, before: dict[str, FileEntry], settings: Settings
) -> tuple[dict[str, str], str, int]:
    """Files that are new or changed, as base64, a sentence about those that are left out, and how many bytes."""
    if not end.state_kept:
        return {}, "", 0
    produced: dict[str, str] = {}
    left_out = 0
    room = settings.produced_bytes
    try:
        listing = await local.files.list()
        for entry in listing.files:
            if before.get(entry.path) == entry:
                continue
            content = None
            if len(produced) < settings.produced_files and entry.size <= room:
                content = await _content(local, entry.path, room)
            if content is None:
                left_out += 1
            else:
                produced[entry.path] = base64.b64encode(content).decode()
                room -= len(content)
    except SandboxError as error:
        why = f"The files that the code wrote cannot be read: {error.message}"
        return produced, why, settings.produced_bytes - room
    given = settings.produced_bytes - room
    if not left_out and not listing.truncated:
        return produced, "", given
    some = f"{left_out} files" if left_out and not listing.truncated else "Some files"
    why = (
        f"{some} that the code wrote are left out: at most {settings.produced_files} files of "
        f"{settings.produced_bytes} bytes in all are given back, and none that lie too deep or have odd names."
    )
    return produced, why, given


async def _content(local: LocalSandbox, path: str, most: int) -> bytes | None:
    """The whole file, or None if it is gone, not to be read, or has grown beyond what is given back."""
    content = bytearray()
    try:
        async with await local.files.open(path) as opened:
            async for chunk in opened.chunks():
                content += chunk
                if len(content) > most:
                    return None
    except SandboxError:
        return None
    return bytes(content)


class _Text:
    """What a call printed and showed, as text."""

    def __init__(self) -> None:
        self.stdout: list[str] = []
        self.stderr: list[str] = []

    async def take_all(self, execution: Execution) -> End:
        async for event in execution.events():
            if isinstance(event, End):
                return event
            self._take(event)
        raise RuntimeError("an execution without an end")

    def _take(self, event: AnyOutput) -> None:
        match event:
            case Stdout(text):
                self.stdout.append(text)
            case Stderr(text):
                self.stderr.append(text)
            case Display(data) | Result(data):
                _add_line(self.stdout, data.get("text/plain", ""))
            case Raised(traceback=text) | Note(text=text):
                _add_line(self.stderr, text)
            case End():
                pass


def _add_line(parts: list[str], text: str) -> None:
    """Text that begins and ends its own lines, unlike what the code prints."""
    if not text:
        return
    if parts and not parts[-1].endswith("\n"):
        parts.append("\n")
    parts.append(text if text.endswith("\n") else text + "\n")


def _response(
    text: _Text, end: End | None, milliseconds: int, produced: dict[str, str], note: str
) -> OneShotResponse:
    """`end` is None where the code did not run; `note` is a last sentence for standard error."""
    if note and end is not None:
        _add_line(text.stderr, note)
    reason = note if end is None else end.reason
    _add_line(text.stderr, reason)
    return OneShotResponse(
        status="success" if end is not None and end.status == "ok" else "error",
        stdout="".join(text.stdout),
        stderr="".join(text.stderr),
        exit_code=-1 if end is None else end.exit_code,
        execution_time_ms=milliseconds,
        files_produced=produced,
    )
