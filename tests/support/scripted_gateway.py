"""A gateway on a real socket with scripted runs."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from fumehood.containers.container_service import SandboxContainerService
from fumehood.engine.run_event_log import EventLog, ReaderLagLimits
from fumehood.files.upload_file_service import UploadFileService
from fumehood.gateway.app import Gateway
from fumehood.gateway.gateway_web_server import GatewayWebServer
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.http_server.listening_sockets import ListenAddress, listen
from fumehood.interfaces import Caller, ReserveMemory
from fumehood.models.registry import ModelRegistry
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import ModelCard
from fumehood.protocol.openai.api_errors import NotFound
from fumehood.protocol.openai.container_objects import ContainerFileRecord
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    CodeInterpreterLogs,
    ExecutionDetails,
    OutputMessage,
    OutputText,
)
from fumehood.protocol.openai.pagination import PageQuery, find_page
from fumehood.protocol.openai.responses import CreateResponse, Response, Usage
from fumehood.protocol.openai.stream_events import (
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseIncomplete,
    ResponseInProgress,
    StreamEvent,
)
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import FakeClock, MemoryBlobStore, MemoryStore, ScriptedSandboxProvider
from tests.support.multipart_bodies import form, form_type, part, quoted

TIMEOUT = 30
TEXT = ("Hello", ", ", "world")


# --- what a run says ----------------------------------------------------------------------------------


def text_events(response: Response, pieces: Sequence[str] = TEXT) -> list[StreamEvent]:
    """A message that comes in pieces, from `created` to `completed`."""
    message = f"msg_{response.id.removeprefix('resp_')}"
    part = OutputText(text="".join(pieces))
    done = OutputMessage(id=message, status="completed", content=[part])
    place: Any = {"item_id": message, "output_index": 0, "content_index": 0}
    ended = msgspec.structs.replace(response, status="completed", output=[done], usage=Usage(output_tokens=3))
    return number_events(
        [
            ResponseCreated(response=response),
            ResponseInProgress(response=response),
            OutputItemAdded(output_index=0, item=OutputMessage(id=message)),
            ContentPartAdded(part=OutputText(), **place),
            *(OutputTextDelta(delta=piece, **place) for piece in pieces),
            OutputTextDone(text=part.text, **place),
            ContentPartDone(part=part, **place),
            OutputItemDone(output_index=0, item=done),
            ResponseCompleted(response=ended),
        ]
    )


def code_events(response: Response, code: str = "print(6 * 7)") -> list[StreamEvent]:
    """One call of the code interpreter, with everything that can be asked for."""
    call = CodeInterpreterCall(id="ci_1", container_id="cntr_1")
    done = CodeInterpreterCall(
        id="ci_1",
        status="completed",
        code=code,
        container_id="cntr_1",
        outputs=[CodeInterpreterLogs(logs="42\n")],
        execution=ExecutionDetails(stdout="42\n", stderr="", exit_code=0, duration_ms=5),
    )
    place: Any = {"item_id": "ci_1", "output_index": 0}
    ended = msgspec.structs.replace(response, status="completed", output=[done], usage=Usage())
    return number_events(
        [
            ResponseCreated(response=response),
            ResponseInProgress(response=response),
            OutputItemAdded(output_index=0, item=call),
            CodeInterpreterCallInProgress(**place),
            *(CodeInterpreterCallCodeDelta(delta=char, **place) for char in code),
            CodeInterpreterCallCodeDone(code=code, **place),
            CodeInterpreterCallInterpreting(**place),
            CodeInterpreterCallCompleted(**place),
            OutputItemDone(output_index=0, item=done),
            ResponseCompleted(response=ended),
        ]
    )


def number_events(events: Sequence[StreamEvent]) -> list[StreamEvent]:
    for number, event in enumerate(events):
        event.sequence_number = number
    return [*events]


# --- the doubles --------------------------------------------------------------------------------------


class _FallibleLog(EventLog):
    """An event log that can fail for those who read it."""

    fault: Exception | None = None

    def read_from(self, position: int) -> Sequence[StreamEvent]:
        if self.fault is not None and position:
            raise self.fault
        return super().read_from(position)


class ScriptedRun:
    """A `Run` that emits the given batches one after another, then what a test emits, until that ends it."""

    def __init__(
        self,
        response: Response,
        batches: Sequence[Sequence[StreamEvent]],
        lag_limits: ReaderLagLimits | None = None,
        retain_bytes: int = 0,
    ) -> None:
        self.response = response
        self.warnings: Sequence[str] = response.warnings or ()
        self.cancelled: str | None = None
        self.ended = asyncio.Event()
        self._emitted_count = 0
        self.log = _FallibleLog(
            recording=True,
            limits=lag_limits or ReaderLagLimits(),
            monotonic=perf_counter,
            on_overrun=lambda: self.cancel("its events were not read"),
            retain_bytes=retain_bytes,
        )
        self.open_reader = self.log.open_reader
        self._result: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        for batch in batches[:1]:
            self.emit(*batch)
        self._later_batches = asyncio.create_task(self._emit_batches(batches[1:]))

    async def _emit_batches(self, batches: Sequence[Sequence[StreamEvent]]) -> None:
        for batch in batches:
            if self.ended.is_set():
                break
            self.emit(*batch)
            await asyncio.sleep(0)

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def holds_all_events(self) -> bool:
        return self.log.holds_all_events

    def emit(self, *events: StreamEvent) -> None:
        self.log.append(events)
        self._emitted_count += len(events)
        last = events[-1]
        if isinstance(last, ResponseCompleted | ResponseIncomplete):
            self._result.set_result(last.response)
            self._end()

    def finish(self) -> None:
        """Emit what `text_events` has after the events that were emitted."""
        self.emit(*text_events(self.response)[self._emitted_count :])

    def fail(self, fault: Exception) -> None:
        self.log.fault = fault
        self._result.set_exception(fault)
        self._result.exception()  # retrieved: perhaps nobody waits
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self.log.close()

    async def wait(self) -> Response:
        return await asyncio.shield(self._result)

    def add_done_callback(self, callback: Callable[[Response | BaseException], None]) -> None:
        raise AssertionError("the gateway waits")

    def get_conversation(self) -> Sequence[ConversationSegment]:
        return ()

    def cancel(self, reason: str) -> None:
        self.cancelled = self.cancelled or reason
        if not self.ended.is_set():
            self.emit(ResponseIncomplete(response=msgspec.structs.replace(self.response, status="cancelled")))


type Script = Callable[[Response], Sequence[Sequence[StreamEvent]]]


def _hello(response: Response) -> Sequence[Sequence[StreamEvent]]:
    return [text_events(response)]


class ScriptedRuns:
    """Answers every request by the script that was put in last."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests: list[CreateResponse] = []
        self.runs: list[ScriptedRun] = []
        self.script: Script = _hello
        self.rejection: Exception | None = None
        self.refers_to = 0  # bytes that every request makes us read
        self.lag_limits = ReaderLagLimits()
        self.started = asyncio.Event()
        self.stubborn = False  # drains only when it is cancelled
        self.draining = asyncio.Event()
        self.drained: float | None = None

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[ConversationSegment] | None = None,
        reserve_memory: ReserveMemory | None = None,
        retain_bytes: int = 0,
    ) -> ScriptedRun:
        if self.rejection is not None:
            raise self.rejection
        if reserve_memory is not None:
            reserve_memory(self.refers_to)
        self.requests.append(request)
        response = Response(id=response_id or new_id("resp"), created_at=1, model=request.model or "?")
        if request.tools:
            response.tools = request.tools
        run = ScriptedRun(response, self.script(response), self.lag_limits, retain_bytes)
        self.runs.append(run)
        self.started.set()
        return run

    async def drain(self, grace_seconds: float) -> None:
        self.drained = grace_seconds
        self.draining.set()
        if self.stubborn:
            await asyncio.Event().wait()
        for run in self.runs:
            if not run.ended.is_set():
                run.cancel("the server stops")


class ScriptedContainerFiles(SandboxContainerService):
    """Containers, of which `cntr_1` has the files that a test says."""

    def __init__(self, store: MemoryStore, clock: FakeClock) -> None:
        blobs = GarbageCollectedBlobs(MemoryBlobStore(), store)
        super().__init__(
            ScriptedSandboxProvider(), store, blobs, clock, uploads=UploadFileService(store, blobs, clock)
        )
        self.reset()

    def reset(self) -> None:
        self.records: list[ContainerFileRecord] = []
        self.contents: dict[str, list[bytes]] = {}

    def add(self, file_id: str, path: str, *pieces: bytes) -> None:
        self.contents[file_id] = [*pieces]
        self.records.append(
            ContainerFileRecord(
                id=file_id,
                container_id="cntr_1",
                path=path,
                bytes=sum(map(len, pieces)),
                created_at=1.5,
                modified_ns=0,
                source="assistant",
            )
        )

    async def get_file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        if container_id != "cntr_1":
            return await super().get_file(caller, container_id, file_id)
        for record in self.records:
            if record.id == file_id:
                return record
        raise NotFound("No such file.", param="file_id")

    async def list_files(
        self, caller: Caller, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        if container_id != "cntr_1":
            return await super().list_files(caller, container_id, query)
        if query is None:
            return self.records
        return find_page(query, self.records)

    def read_file(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        if container_id != "cntr_1":
            return super().read_file(caller, container_id, file_id, start, end)
        return self._find_content(file_id)

    async def _find_content(self, file_id: str) -> AsyncGenerator[bytes]:
        for piece in self.contents[file_id]:
            yield piece


class ListedModels:
    """The part of models that the gateway reads."""

    async def list_models(self) -> Sequence[ModelCard]:
        return [ModelCard(id=name, created=1, owned_by="tests") for name in ("small", "org/large")]


# --- the server ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HttpResponse:
    """What came back, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str | None, str | None]:
        """Status, code and parameter of a refusal, which has exactly OpenAI's fields."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "code", "param"}
        return self.status, found["code"], found["param"]


@dataclass
class ScriptedGateway:
    """A gateway that runs in this process, and all that is behind it."""

    base: str
    port: int
    session: aiohttp.ClientSession
    server: GatewayWebServer
    app: Gateway
    runs: ScriptedRuns
    store: MemoryStore
    files: ScriptedContainerFiles
    task: asyncio.Task[None] = field(repr=False)

    def url(self, path: str) -> Any:
        import yarl

        return yarl.URL(self.base + path, encoded=True)

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> HttpResponse:
        """`body` is sent as it is if it is bytes, else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        async with self.session.request(
            method, self.url(path), data=data, headers=headers, **options
        ) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            return HttpResponse(response.status, found, await response.read())

    async def upload(
        self,
        name: str,
        content: bytes,
        purpose: str = "user_data",
        *,
        headers: dict[str, str] | None = None,
        **fields: str,
    ) -> HttpResponse:
        """The fields first, as most clients do it."""
        named = {"purpose": purpose, **fields}
        body = form(
            [
                *(part(key, value.encode()) for key, value in named.items()),
                part("file", content, quoted(name)),
            ]
        )
        return await self.request("POST", "/v1/files", body, headers={**form_type(), **(headers or {})})

    async def create_response(self, headers: dict[str, str] | None = None, **request: Any) -> HttpResponse:
        body = {"model": "small", "input": "hi", **request}
        return await self.request("POST", "/v1/responses", body, headers=headers or {})

    @asynccontextmanager
    async def open_connection(self) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection without anything between, until the block is left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        try:
            async with asyncio.timeout(TIMEOUT):
                yield reader, writer
        finally:
            writer.close()

    @asynccontextmanager
    async def post_response(
        self, headers: dict[str, str] | None = None, **request: Any
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection on which a request for a response was just sent."""
        body = json.dumps({"model": "small", "input": "hi", **request}).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
        async with self.open_connection() as (reader, writer):
            writer.write(
                b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"%scontent-length: %d\r\n\r\n%s" % (more, len(body), body)
            )
            yield reader, writer


@asynccontextmanager
async def run_gateway(
    *, body_bytes: int | None = None, max_concurrent: int = 512, **options: Any
) -> AsyncGenerator[ScriptedGateway]:
    """A gateway on a free port until the block is left; `options` are those of `Gateway`."""
    runs, clock = ScriptedRuns(), FakeClock()
    store = MemoryStore(clock)
    files = ScriptedContainerFiles(store, clock)
    behind: dict[str, Any] = {
        "runs": runs,
        "store": store,
        "models": ListedModels(),
        "passthrough": ModelRegistry([], clock),
        "containers": files,
        "files": UploadFileService(store, GarbageCollectedBlobs(MemoryBlobStore(), store), FakeClock()),
    }
    options.setdefault(
        "limits", RequestLimiter(ApiKeyLimits(body_bytes=body_bytes), max_concurrent=max_concurrent)
    )
    app = Gateway(**(behind | options))
    listener = listen(ListenAddress(port=0))
    server = GatewayWebServer(
        app, listener.sock, lambda: runs.drain(1.0), on_stalled=app.metrics.record_stalled_reader
    )
    ready = asyncio.Event()
    task = asyncio.ensure_future(server.serve(ready.set))
    await ready.wait()
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT), connector=aiohttp.TCPConnector(limit=0)
    )
    port: int = listener.sock.getsockname()[1]
    try:
        yield ScriptedGateway(listener.url, port, session, server, app, runs, store, files, task)
    finally:
        await session.close()
        server.stop()
        await task
        listener.close()


async def send_slowly(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send it byte by byte, slowly, until the other side has gone."""
    with suppress(ConnectionError):
        for byte in content:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.02)


def raw_items(*items: dict[str, Any]) -> list[ConversationEntry]:
    return [
        ConversationEntry(type=item["type"], id=item.get("id"), turn=0, raw=json.dumps(item).encode())
        for item in items
    ]
