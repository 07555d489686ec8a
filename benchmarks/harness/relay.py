"""The least that turns chat completions into responses.

No authentication, no storage, no metrics, no tools. Streamed, an event is decoded once and encoded once and sent by
itself; under `/joined` the events that came with one read are sent together. Asked without a stream it asks without
one. `python -m benchmarks.harness.relay URL` prints its address and serves until it is ended.
"""

import itertools
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import aiohttp
import msgspec

_PATHS = ("/v1/responses", "/joined/v1/responses")


class _Request(msgspec.Struct):
    model: str
    input: str
    stream: bool = False


class _Delta(msgspec.Struct):
    content: str | None = None


class _StreamChoice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice]
    usage: _Usage | None = None


class _Choice(msgspec.Struct):
    message: _Delta


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _TextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0
    content_index: int = 0
    logprobs: list[Any] = []


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_encode = msgspec.json.Encoder().encode


def _response(model: str, identity: str, text: str | None, usage: _Usage | None) -> dict[str, Any]:
    done = text is not None
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if done else "in_progress",
        "model": model,
        "output": [_message(identity, text)] if done else [],
        "usage": usage,
    }


def _message(identity: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    return {
        "id": f"msg_{identity}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Writer:
    """The events of one response, numbered, each as the bytes of an SSE event."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._identity = secrets.token_hex(16)
        self._item = f"msg_{self._identity}"
        self._numbers = itertools.count()

    def opening(self) -> Iterator[bytes]:
        response = _response(self._model, self._identity, None, None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        yield self._event("response.output_item.added", output_index=0, item=_message(self._identity, None))
        yield self._of_part("response.content_part.added", part=_part(""))

    def delta(self, text: str) -> bytes:
        event = _TextDelta(next(self._numbers), self._item, text)
        return b"event: response.output_text.delta\ndata: %b\n\n" % _encode(event)

    def closing(self, text: str, usage: _Usage | None) -> Iterator[bytes]:
        response = _response(self._model, self._identity, text, usage)
        yield self._of_part("response.output_text.done", text=text, logprobs=[])
        yield self._of_part("response.content_part.done", part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=_message(self._identity, text))
        yield self._event("response.completed", response=response)
        yield b"data: [DONE]\n\n"

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event))


class ReferenceRelay:
    """The ASGI application."""

    def __init__(self, upstream: str) -> None:
        self._url = f"{upstream}/v1/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._serve_lifespan(receive, send)
        elif scope["type"] == "http" and scope["path"] in _PATHS:
            request = _decode_request(await _body(receive))
            if request.stream:
                await self._stream(request, send, joined=scope["path"] != _PATHS[0])
            else:
                await self._block(request, send)
        else:
            await _answer(send, 404, b'{"error":{"message":"there is only /v1/responses"}}')

    async def _serve_lifespan(self, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "lifespan.startup":
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
            await send({"type": "lifespan.startup.complete"})
        if message["type"] == "lifespan.shutdown" and self._session is not None:
            await self._session.close()
            await send({"type": "lifespan.shutdown.complete"})

    def _ask(self, request: _Request, **more: Any) -> Any:
        assert self._session is not None
        asked = {"model": request.model, "messages": [{"role": "user", "content": request.input}], **more}
        headers = {"content-type": "application/json"}
        return self._session.post(self._url, data=_encode(asked), headers=headers)

    async def _stream(self, request: _Request, send: Any, *, joined: bool) -> None:
        writer = _Writer(request.model)
        texts: list[str] = []
        usage: _Usage | None = None
        async with self._ask(request, stream=True, stream_options={"include_usage": True}) as upstream:
            await _begin(send, upstream.status, b"text/event-stream; charset=utf-8")
            await _send(send, b"".join(writer.opening()))
            async for lines in _events(upstream):
                told: list[bytes] = []
                for line in lines:
                    if line == b"data: [DONE]":
                        continue
                    chunk = _decode_chunk(line[6:])
                    usage = chunk.usage or usage
                    if chunk.choices and (text := chunk.choices[0].delta.content):
                        texts.append(text)
                        event = writer.delta(text)
                        if joined:
                            told.append(event)
                        else:
                            await _send(send, event)
                if told:
                    await _send(send, b"".join(told))
        await _send(send, b"".join(writer.closing("".join(texts), usage)), more=False)

    async def _block(self, request: _Request, send: Any) -> None:
        async with self._ask(request) as upstream:
            completion = _decode_completion(await upstream.read())
            text = completion.choices[0].message.content or ""
            told = _response(request.model, secrets.token_hex(16), text, completion.usage)
            await _answer(send, upstream.status, _encode(told))


async def _events(upstream: aiohttp.ClientResponse) -> AsyncGenerator[list[bytes]]:
    """What came with one read, event by event; what is not whole waits for the next."""
    rest = b""
    async for piece in upstream.content.iter_any():
        *whole, rest = (rest + piece).split(b"\n\n")
        yield whole


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _begin(send: Any, status: int, kind: bytes, *more: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})


async def _send(send: Any, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _answer(send: Any, status: int, body: bytes) -> None:
    await _begin(send, status, b"application/json", (b"content-length", str(len(body)).encode()))
    await _send(send, body, more=False)


def main() -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        ReferenceRelay(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=120,  # a round of the other side must not cost this one its connections
    )
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
