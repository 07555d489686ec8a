"""A chat completions server that answers as it is told, byte by byte."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fumehood.models.model_settings import ModelSettings, Secret
from fumehood.models.upstream.http1_client import PooledHttpClient

UPSTREAM_KEY = "sk-upstream-secret-0123456789"
BREAK_CONNECTION = object()  # in a stream: the connection breaks
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


type Responder = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[bool]]


@dataclass(slots=True)
class RawModelServer:
    """url: what `base_url` is to be; requests: those that came.

    client_disconnected: set when a client hung up before its answer's end.
    model_list: the answer to GET /models, and other GETs get 404; None takes answers of the script.
    """

    responders: deque[Responder]
    model_list: bytes | None = None
    url: str = ""
    requests: list[ReceivedRequest] = field(default_factory=list[ReceivedRequest])
    client_disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        connection = self.connections
        try:
            while (asked := await _read(reader, connection)) is not None:
                if self.model_list is not None and asked.method == "GET":
                    is_known = asked.path.endswith("/models")
                    answer = document(self.model_list) if is_known else document(b"", "404 Not Found")
                    await answer(asked, writer)
                    continue
                self.requests.append(asked)
                answering = asyncio.ensure_future(self.responders.popleft()(asked, writer))
                # A client that hangs up is noticed while the answer waits.
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    self.client_disconnected.set()
                    return
                gone.cancel()
                with suppress(asyncio.CancelledError):
                    await gone
                if not answering.result():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.client_disconnected.set()
        finally:
            self.writers.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader, connection: int) -> ReceivedRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method, path, headers, body, connection)


def stream(
    *pieces: object, status: str = "200 OK", kind: str = "text/event-stream", end: bool = True
) -> Responder:
    """Each piece of bytes is a write, an HTTP chunk of its own; an asyncio.Event is waited for; CUT breaks off."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for piece in pieces:
            if piece is BREAK_CONNECTION:
                await writer.drain()
                writer.transport.abort()
                return False
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            elif isinstance(piece, bytes) and piece:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
        if end:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return end

    return answer


def document(body: bytes, status: str = "200 OK", *, headers: Mapping[str, str] | None = None) -> Responder:
    """An answer in one piece."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)
        await writer.drain()
        return True

    return answer


def error(status: str, body: object, *, headers: Mapping[str, str] | None = None) -> Responder:
    return document(msgspec.json.encode(body), status, headers=headers)


def disconnect() -> Responder:
    """Close the connection without an answer."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        writer.transport.abort()
        return False

    return answer


@asynccontextmanager
async def open_raw_model_server(*answers: Responder) -> AsyncGenerator[RawModelServer]:
    chat = RawModelServer(deque(answers))
    server = await asyncio.start_server(chat.serve, "127.0.0.1", 0)
    chat.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        try:
            yield chat
        finally:
            for writer in chat.writers:
                writer.transport.abort()


@asynccontextmanager
async def open_backend[Backend](
    backend_class: Callable[[ModelSettings, PooledHttpClient, Secret], Backend],
    *answers: Responder,
    tokenize_path: str | None = None,
    **settings: Any,
) -> AsyncGenerator[tuple[Backend, RawModelServer]]:
    """A backend whose server answers with these, and that server."""
    async with open_raw_model_server(*answers) as server:
        client = PooledHttpClient()
        tokenize_url = None if tokenize_path is None else server.url + tokenize_path
        chosen = ModelSettings(base_url=server.url, tokenize_url=tokenize_url, **settings)
        try:
            yield backend_class(chosen, client, Secret(UPSTREAM_KEY)), server
        finally:
            await client.close()


# --- what such servers say ----------------------------------------------------------------------------


def data(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def chunk(delta: Mapping[str, object] | None = None, finish: str | None = None, **more: object) -> bytes:
    """One event of a stream; some servers send an `id` and the `model`, too."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return data({"object": "chat.completion.chunk", "choices": [choice], **more})


def says(*texts: str, finish: str = "stop") -> bytes:
    """A whole answer."""
    return b"".join([*(chunk({"content": text}) for text in texts), chunk(finish=finish), DONE])
