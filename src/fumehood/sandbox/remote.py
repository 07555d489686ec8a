"""Sandboxes on a sandbox server, over TCP or a unix socket; imports `interfaces`, `protocol` and siblings."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Self

import aiohttp
import msgspec

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox import (
    AnyOutput,
    ArchiveFormat,
    End,
    ExecuteRequest,
    FileEntry,
    FileListing,
    Health,
    Name,
    ReadRequest,
    SandboxInfo,
    SandboxSpec,
    Unpacked,
    Written,
)
from fumehood.protocol.sandbox_bundles import Answers, Content, NotABundle, WholeFile, bundled
from fumehood.protocol.sandbox_errors import (
    ExecutionNotFound,
    FileNotFound,
    FileRefused,
    RequestRefused,
    SandboxError,
    SandboxNotFound,
    Unreachable,
)
from fumehood.sandbox.http import BYTES_TYPE, Connection, Interrupted, NotConnected, Patience, Silent, segment
from fumehood.sandbox.lines import LineSplitter, LineTooLong

_LONGEST_LINE = 256 << 20
_LAST_WORD_SECONDS = 1.0

_decode_event = msgspec.json.Decoder(AnyOutput).decode


class _Sandboxes(msgspec.Struct):
    sandboxes: list[SandboxInfo]


class _InterruptAnswer(msgspec.Struct):
    interrupted: bool


class RemoteSandboxes:
    """The sandboxes of one server: a `SandboxProvider`, and `async with` closes it.

    Sandboxes stay when it is closed; another one, also in another process, can attach to them.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        patience: Patience | None = None,
        explain: Callable[[Unreachable], SandboxError] | None = None,
    ) -> None:
        self.connection = Connection(url, token, patience or Patience(), explain)

    def __repr__(self) -> str:
        return f"<RemoteSandboxes {self.connection.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        # Chosen here, so that a request that has to be repeated makes no second sandbox.
        chosen = secrets.token_hex(12) if name is None else name
        if not _is_name(chosen):
            raise RequestRefused(f"{chosen!r} cannot be the name of a sandbox.", param="name")
        info = await self.connection.ask("PUT", _path(chosen), SandboxInfo, body=_encoded(spec))
        return SandboxRef(info.id, warm=info.warm)

    async def attach(self, ref: SandboxRef) -> "RemoteSandbox":
        if not _is_name(ref.id):
            raise SandboxNotFound(f"There is no sandbox {ref.id!r}.")
        info = await self.connection.ask("GET", _path(ref.id), SandboxInfo)
        return RemoteSandbox(self.connection, info.id)

    async def destroy(self, ref: SandboxRef) -> None:
        if _is_name(ref.id):
            await self.connection.repeated(lambda: self.connection.tell("DELETE", _path(ref.id)))

    async def sandboxes(self) -> list[SandboxInfo]:
        return (await self.connection.ask("GET", "/sandboxes", _Sandboxes)).sandboxes

    @property
    def failures(self) -> int:
        """How often the server could not be asked; only ever more."""
        return self.connection.failures

    async def health(self) -> Health:
        """What the server tells of itself; raises Unreachable also while it starts or stops."""
        return await self.connection.ask("GET", "/health", Health)

    async def metrics(self) -> bytes:
        """The server's own figures, as it tells them to Prometheus."""
        async with self.connection.open("GET", "/metrics") as response:
            with self.connection.translating():
                return await response.read()

    async def close(self) -> None:
        await self.connection.close()


class RemoteSandbox:
    """One sandbox of a server: a `Sandbox`, made by `RemoteSandboxes.attach`."""

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._id = sandbox_id

    def __repr__(self) -> str:
        return f"<RemoteSandbox {self._id} at {self._connection.url}>"

    @property
    def id(self) -> str:
        return self._id

    # ---- calls ------------------------------------------------------------------------------------------------

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[AnyOutput]:
        execution_id = request.execution_id or secrets.token_hex(12)
        body = _encoded(msgspec.structs.replace(request, execution_id=execution_id))
        async with aclosing(self._events(execution_id, -1, body)) as events:
            async for event in events:
                yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[AnyOutput]:
        if not _is_name(execution_id):
            raise ExecutionNotFound(f"There is no execution {execution_id!r} of this sandbox.")
        async with aclosing(self._events(execution_id, after, None)) as events:
            async for event in events:
                yield event

    async def _events(
        self, execution_id: str, after: int, request: bytes | None
    ) -> AsyncGenerator[AnyOutput]:
        """The events after number `after`, each once; a stream that breaks is taken up again where it broke.

        request: what starts the call, until the server has taken it.
        """
        stream = _Stream(self._connection, self._path("executions", segment(execution_id)), after)
        if request is not None:
            stream.start_with(self._path("execute"), request)
        while True:
            try:
                async with aclosing(stream.read()) as events:
                    async for event in events:
                        yield event
                return
            except (NotConnected, Interrupted, Silent) as error:
                pause = stream.pause_before_retry(error)
                if pause is None:
                    raise
            except SandboxError as error:
                # After a connection that broke, the first request may have begun the call.
                error.refused = error.refused and not stream.failures
                error.broke_at = stream.broke_at
                raise
            stream.failures += 1
            await asyncio.sleep(pause)

    async def interrupt(self, execution_id: str | None = None) -> bool:
        query = None if execution_id is None else {"execution_id": execution_id}
        path = self._path("interrupt")
        return (await self._connection.ask("POST", path, _InterruptAnswer, query=query)).interrupted

    # ---- files ------------------------------------------------------------------------------------------------

    async def list(self, since: str | None = None) -> FileListing:
        query = None if since is None else {"since": since}
        return await self._connection.ask("GET", self._path("files"), FileListing, query=query)

    async def read(self, path: str) -> AsyncGenerator[bytes]:
        async with self._connection.open("GET", self._file(path)) as response:
            while piece := await self._piece(response):
                yield piece

    async def read_all(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[Content]]:
        answers = Answers(paths)
        body = _encoded(ReadRequest(paths=[path if _is_text(path) else "" for path in paths]))
        try:
            async with self._connection.open("POST", self._path("read"), body=body) as response:
                while piece := await self._piece(response):
                    yield answers.feed(piece)
            answers.end()
        except NotABundle as error:
            raise self._connection.broken(str(error)) from error

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        with self._connection.translating():
            return await response.content.readany()

    async def write_all(self, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        return await self._connection.ask(
            "POST", self._path("write"), Written, body=bundled(files), kind=BYTES_TYPE
        )

    async def write(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        query = {"executable": "true"} if executable else None
        return await self._connection.ask(
            "PUT", self._file(path), FileEntry, query=query, body=content, kind=BYTES_TYPE
        )

    async def delete(self, path: str) -> None:
        address = self._file(path)
        tries = 0

        async def once() -> None:
            nonlocal tries
            tries += 1
            try:
                await self._connection.tell("DELETE", address)
            except FileNotFound:
                if tries == 1:  # else the answer to the first request was lost
                    raise

        await self._connection.repeated(once)

    async def unpack(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> Unpacked:
        query = {"kind": kind, "into": _text(into)}
        return await self._connection.ask(
            "POST", self._path("unpack"), Unpacked, query=query, body=content, kind=BYTES_TYPE
        )

    # ---- addresses --------------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return "/".join((_path(self._id), *parts))

    def _file(self, path: str) -> str:
        if not path:
            raise FileRefused("The path of the file is empty; name a file below /mnt/data.", param="path")
        return self._path("files", "/".join(segment(part) for part in _text(path).split("/")))


class _Stream:
    """Where one is in the events of one call, over as many connections as it takes.

    after: the number of the last event that has come.
    accepted: whether the server has taken the request.
    failures: connections in a row that brought nothing.
    broke_at: when the first of them broke, by the event loop's clock.
    """

    def __init__(self, connection: Connection, path: str, after: int) -> None:
        self.after = self._asked_after = after
        self.accepted = False
        self.failures = 0
        self.broke_at: float | None = None
        self._connection = connection
        self._path = path
        self._start: tuple[str, bytes] | None = None
        self._started = False

    def start_with(self, path: str, request: bytes) -> None:
        self._start = (path, request)
        self._started = True

    async def read(self) -> AsyncGenerator[AnyOutput]:
        """The events of one connection, up to the `End`; raises Interrupted if it ends before."""
        async with self._open() as response:
            self.accepted = True
            self._start = None
            splitter = LineSplitter(_LONGEST_LINE)
            while piece := await self._piece(response):
                for line in self._lines(splitter, piece):
                    self.failures = 0
                    self.broke_at = None
                    if not line:  # a sign of life
                        continue
                    event = self._decoded(line)
                    self.after += 1
                    yield event
                    if isinstance(event, End):
                        await self._rest(response)
                        return
        if self.after == self._asked_after and not self._started:
            return  # somebody asked for what comes after the end
        raise self._connection.explained(
            Interrupted(
                f"The sandbox server at {self._connection.url} ended a call's events before their end."
            )
        )

    def pause_before_retry(self, error: NotConnected | Interrupted | Silent) -> float | None:
        """How long to wait before the next connection; None when it is not worth another one, and then the error
        tells what whoever gets it has to know.
        """
        if isinstance(error, NotConnected) and not self.accepted and not self.failures:
            return None  # nothing has begun
        patience = self._connection.patience
        now = asyncio.get_running_loop().time()
        if self.broke_at is None:
            self.broke_at = now
        left = self.broke_at + patience.resume - now
        if self.failures < patience.retries and left > 0:
            return min(patience.pause(self.failures + 1), left)
        error.refused = False
        error.given_up = True
        error.broke_at = self.broke_at
        return None

    def _open(self) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        silence = self._connection.patience.silence
        if self._start is not None:
            path, request = self._start
            return self._connection.open("POST", path, body=request, silence=silence)
        return self._connection.open("GET", self._path, query={"after": str(self.after)}, silence=silence)

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        with self._connection.translating():
            return await response.content.readany()

    def _lines(self, splitter: LineSplitter, piece: bytes) -> list[bytes]:
        try:
            return splitter.feed(piece)
        except LineTooLong as error:
            raise self._connection.broken(str(error)) from error

    def _decoded(self, line: bytes) -> AnyOutput:
        try:
            return _decode_event(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._connection.broken(f"an event cannot be read: {error}") from error

    async def _rest(self, response: aiohttp.ClientResponse) -> None:
        """Hear the stream's own end, so that the connection can be used again."""
        with suppress(TimeoutError, Unreachable):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await self._piece(response)


def _path(sandbox_id: str) -> str:
    return f"/sandboxes/{segment(sandbox_id)}"


def _is_name(text: str) -> bool:
    try:
        msgspec.convert(text, Name)
    except msgspec.ValidationError:
        return False
    return True


def _encoded(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise RequestRefused(f"The request is not valid text: {error.reason}.") from error


def _text(path: str) -> str:
    if not _is_text(path):
        raise FileRefused("The path is not valid text: it cannot be written as UTF-8.", param="path")
    return path


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
