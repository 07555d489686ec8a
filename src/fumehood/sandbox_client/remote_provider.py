"""The client of a sandbox server: provider and sandboxes over HTTP."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Self

import aiohttp
import msgspec

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.bundle_encoding import (
    BundleContent,
    BundledFile,
    InvalidBundle,
    ReadFilesResponseDecoder,
    encode_bundle,
)
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    FileRefused,
    InvalidSandboxRequest,
    SandboxError,
    SandboxFileNotFound,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    FileEntry,
    FileListing,
    InterruptResponse,
    ReadFilesRequest,
    ResourceName,
    SandboxInfo,
    SandboxList,
    SandboxSpec,
    ServerHealth,
    UnpackSummary,
    WriteFilesSummary,
)
from fumehood.sandbox_client.server_connection import (
    BYTES_TYPE,
    RequestRetryState,
    SandboxConnectError,
    SandboxConnectionLost,
    SandboxConnectionTimeouts,
    SandboxReadTimeout,
    SandboxServerConnection,
    quote_path_segment,
)

_MAX_LINE_BYTES = 256 << 20
_DRAIN_TIMEOUT = 1.0

_STREAM_FAILURES = (SandboxConnectError, SandboxConnectionLost, SandboxReadTimeout)

_decode_event = msgspec.json.Decoder(ExecutionEvent).decode


class LineTooLong(ValueError):
    """A line exceeds the maximum length."""


class LineSplitter:
    """Splits chunks into complete lines without their newline.

    The work is linear: a long line that arrives in small chunks is joined once, at its end.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._pending: list[bytes] = []
        self._length = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        first, *rest = chunk.split(b"\n")
        self._append(first)
        lines: list[bytes] = []
        for part in rest:
            lines.append(b"".join(self._pending))
            self._pending.clear()
            self._length = 0
            self._append(part)
        return lines

    def _append(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self._max_length:
            raise LineTooLong(f"a line of more than {self._max_length} bytes")
        if part:
            self._pending.append(part)


class RemoteSandboxProvider:
    """A `SandboxProvider` for one server; `async with` closes its connection.

    Closing leaves the sandboxes running; another provider or process can attach to them.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeouts: SandboxConnectionTimeouts | None = None,
        explain: Callable[[SandboxServerUnreachable], SandboxError] | None = None,
    ) -> None:
        self.connection = SandboxServerConnection(
            url, token, timeouts or SandboxConnectionTimeouts(), explain
        )

    def __repr__(self) -> str:
        return f"<RemoteSandboxProvider {self.connection.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        # Named here, so that a retried request makes no second sandbox.
        name = secrets.token_hex(12) if name is None else name
        if not _is_valid_name(name):
            raise InvalidSandboxRequest(f"{name!r} cannot be the name of a sandbox.", param="name")
        info = await self.connection.request_json("PUT", _sandbox_path(name), SandboxInfo, body=_encode(spec))
        return SandboxRef(info.id, from_warm_pool=info.warm)

    async def attach(self, ref: SandboxRef) -> "RemoteSandbox":
        return RemoteSandbox(self.connection, (await self.get_info(ref.id)).id)

    async def get_info(self, name: str) -> SandboxInfo:
        """Return the state of a running sandbox. Raises SandboxError."""
        if not _is_valid_name(name):
            raise SandboxNotFound(f"There is no sandbox {name!r}.")
        return await self.connection.request_json("GET", _sandbox_path(name), SandboxInfo)

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        """Do nothing: the server ends sandboxes that are idle, not those of some age."""

    async def destroy(self, ref: SandboxRef) -> None:
        if _is_valid_name(ref.id):
            await self.connection.request("DELETE", _sandbox_path(ref.id))

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return (await self.connection.request_json("GET", "/sandboxes", SandboxList)).sandboxes

    @property
    def failures(self) -> int:
        """Count of requests that did not reach the server."""
        return self.connection.failures

    async def health(self) -> ServerHealth:
        """Return the server's health. Raises SandboxServerUnreachable, also while it starts or stops."""
        return await self.connection.request_json("GET", "/health", ServerHealth)

    async def metrics(self) -> bytes:
        """Return the server's metrics in Prometheus text format."""
        async with (
            self.connection.open_response("GET", "/metrics") as response,
            self.connection.wait_for_server(),
        ):
            return await response.read()

    async def close(self) -> None:
        await self.connection.close()


class RemoteSandbox:
    """A `Sandbox` on a server, from `RemoteSandboxProvider.attach`."""

    def __init__(self, connection: SandboxServerConnection, sandbox_id: str) -> None:
        self._connection = connection
        self._id = sandbox_id

    def __repr__(self) -> str:
        return f"<RemoteSandbox {self._id} at {self._connection.url}>"

    @property
    def id(self) -> str:
        return self._id

    # ---- calls --------------------------------------------------------------------------------------------------

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        execution_id = request.execution_id or secrets.token_hex(12)
        body = _encode(msgspec.structs.replace(request, execution_id=execution_id))
        return self._stream_events(execution_id, -1, body)

    def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        if not _is_valid_name(execution_id):
            raise ExecutionNotFound(f"There is no execution {execution_id!r} of this sandbox.")
        return self._stream_events(execution_id, after, None)

    async def _stream_events(
        self, execution_id: str, after: int, start: bytes | None
    ) -> AsyncGenerator[ExecutionEvent]:
        """Yield the events after number `after`, each once, over as many connections as it takes.

        start: the body that starts the execution, None to follow one.
        """
        is_follow = may_have_started = start is None
        received = 0
        reconnect = RequestRetryState(
            self._connection.timeouts, _STREAM_FAILURES, self._connection.timeouts.resume
        )
        while True:
            try:
                async with self._open_events(execution_id, after + received, start) as response:
                    start, may_have_started = None, True  # accepted: from now on it is followed
                    lines = LineSplitter(_MAX_LINE_BYTES)
                    while chunk := await self._read_chunk(response):
                        for line in lines.feed(chunk):
                            reconnect.progress()
                            if not line:  # keepalive
                                continue
                            event = _decode_event(line)
                            received += 1
                            if isinstance(event, ExecutionEnd):
                                await self._drain(response)
                                yield event
                                return
                            yield event
                if is_follow and not received:
                    return  # the caller asked for what comes after the end
                raise self._connection.record_failure(
                    SandboxConnectionLost(
                        f"The sandbox server at {self._connection.url} ended an event stream early."
                    )
                )
            except (LineTooLong, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise self._connection.protocol_violation(f"cannot decode an event: {error}") from error
            except SandboxError as error:
                may_have_started = may_have_started or not error.nothing_started
                error.nothing_started = not may_have_started
                await reconnect.wait(error)

    def _open_events(
        self, execution_id: str, after: int, start: bytes | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        read_timeout = self._connection.timeouts.read
        if start is not None:
            return self._connection.open_response(
                "POST", self._url_path("execute"), body=start, read_timeout=read_timeout
            )
        path = self._url_path("executions", quote_path_segment(execution_id))
        return self._connection.open_response(
            "GET", path, query={"after": str(after)}, read_timeout=read_timeout
        )

    async def _drain(self, response: aiohttp.ClientResponse) -> None:
        """Read the end of the response, so that the connection can be reused."""
        with suppress(TimeoutError, SandboxServerUnreachable):
            async with asyncio.timeout(_DRAIN_TIMEOUT):
                await self._read_chunk(response)

    async def interrupt(self, execution_id: str | None = None) -> bool:
        query = None if execution_id is None else {"execution_id": execution_id}
        path = self._url_path("interrupt")
        return (await self._connection.request_json("POST", path, InterruptResponse, query=query)).interrupted

    # ---- files --------------------------------------------------------------------------------------------------

    async def list_files(self, since: str | None = None) -> FileListing:
        query = None if since is None else {"since": since}
        return await self._connection.request_json("GET", self._url_path("files"), FileListing, query=query)

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        async with self._connection.open_response("GET", self._file_url_path(path)) as response:
            while chunk := await self._read_chunk(response):
                yield chunk

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        reader = ReadFilesResponseDecoder(paths)
        body = _encode(ReadFilesRequest(paths=[path if _is_utf8(path) else "" for path in paths]))
        try:
            async with self._connection.open_response("POST", self._url_path("read"), body=body) as response:
                while chunk := await self._read_chunk(response):
                    yield reader.feed(chunk)
            reader.finish()
        except InvalidBundle as error:
            raise self._connection.protocol_violation(str(error)) from error

    async def _read_chunk(self, response: aiohttp.ClientResponse) -> bytes:
        async with self._connection.wait_for_server():
            return await response.content.readany()

    async def write_files(
        self, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        return await self._connection.request_json(
            "POST",
            self._url_path("write"),
            WriteFilesSummary,
            body=lambda: encode_bundle(files()),
            content_type=BYTES_TYPE,
        )

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        query = {"executable": "true"} if executable else None
        return await self._connection.request_json(
            "PUT", self._file_url_path(path), FileEntry, query=query, body=content, content_type=BYTES_TYPE
        )

    async def delete_file(self, path: str) -> None:
        try:
            await self._connection.request("DELETE", self._file_url_path(path))
        except SandboxFileNotFound as error:
            if error.disconnected_at is None:  # else the response to the first request was lost
                raise

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        query = {"kind": kind, "into": _check_utf8(into)}
        return await self._connection.request_json(
            "POST",
            self._url_path("unpack"),
            UnpackSummary,
            query=query,
            body=content,
            content_type=BYTES_TYPE,
        )

    # ---- URLs ----------------------------------------------------------------------------------------------

    def _url_path(self, *parts: str) -> str:
        return "/".join((_sandbox_path(self._id), *parts))

    def _file_url_path(self, path: str) -> str:
        if not path:
            raise FileRefused("The path of the file is empty; name a file below /mnt/data.", param="path")
        return self._url_path(
            "files", "/".join(quote_path_segment(part) for part in _check_utf8(path).split("/"))
        )


def _sandbox_path(sandbox_id: str) -> str:
    return f"/sandboxes/{quote_path_segment(sandbox_id)}"


def _is_valid_name(text: str) -> bool:
    try:
        msgspec.convert(text, ResourceName)
    except msgspec.ValidationError:
        return False
    return True


def _encode(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidSandboxRequest(f"The request is not valid text: {error.reason}.") from error


def _check_utf8(path: str) -> str:
    if not _is_utf8(path):
        raise FileRefused("The path is not valid text: it cannot be written as UTF-8.", param="path")
    return path


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
