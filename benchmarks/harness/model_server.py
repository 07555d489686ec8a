"""A model server that answers at once and at next to no cost.

`POST /v1/chat/completions`, streamed or not. The name of the model says what it does:

    burst-200      a text of 200 chunks, all at once
    paced-200      the same, 50 chunks a second
    code-200       calls code_interpreter with code in 200 fragments; once it has the result, a short text
    function-200   the same with the function `lookup`

Every chunk is an HTTP chunk of its own, as model servers send them. What it sends is made once for each model.
`python -m benchmarks.harness.model_server` prints its address and serves until it is ended.
"""

import asyncio
import functools
import itertools
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

CHUNKS_PER_SECOND = 50
TEXT_AFTER_TOOL = 20  # chunks of the text that follows a tool's result
FUNCTION = "lookup"
INTERPRETER = "code_interpreter"
EXPECTED_OUTPUT = "1"  # what the code of code-… prints
_CHUNKS_PER_WRITE = 25
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_NAMES = ("model", "total", "value", "count", "state", "index")


def make_text(chunks: int) -> list[str]:
    """The text of an answer as it is streamed, in pieces about as long as tokens are."""
    return [f"{_NAMES[number % len(_NAMES)]}{number % 10} " for number in range(chunks)]


def make_code(fragments: int) -> list[str]:
    """A program in as many pieces as wanted (a multiple of four, at least eight), a line every four; prints 1."""
    if fragments < 8 or fragments % 4:
        raise ValueError(f"code comes in fours and in no less than eight fragments, not in {fragments}")
    return ["total", " =", " 1", "\n"] * (fragments // 4 - 1) + ["print", "(", "total", ")"]


def make_query(fragments: int) -> list[str]:
    """What a function is asked for."""
    return [f"term {number % 10} " for number in range(fragments)]


class _Message(msgspec.Struct):
    role: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
    model: str
    messages: list[_Message]
    stream: bool = False
    stream_options: _StreamOptions | None = None


class ModelBehaviour(NamedTuple):
    """What the name of a model says."""

    kind: str
    chunks: int

    @classmethod
    def parse(cls, model: str) -> "ModelBehaviour":
        kind, _, number = model.partition("-")
        if kind not in ("burst", "paced", "code", "function") or not number.isdigit():
            raise ValueError(
                f"there is no model {model!r}; there are burst-N, paced-N, code-N and function-N"
            )
        return cls(kind, int(number))

    def for_turn(self, last_role: str) -> "ModelBehaviour":
        """With a tool's result in hand the model has only to say something."""
        calls = self.kind in ("code", "function")
        return ModelBehaviour("burst", TEXT_AFTER_TOOL) if calls and last_role == "tool" else self


class ScriptedToolCall(NamedTuple):
    """The call of a tool: its arguments are one string, in fragments."""

    name: str
    argument: str
    fragments: Sequence[str]

    @classmethod
    def for_behaviour(cls, behaviour: ModelBehaviour) -> "ScriptedToolCall | None":
        match behaviour.kind:
            case "code":
                return cls(INTERPRETER, "code", make_code(behaviour.chunks))
            case "function":
                return cls(FUNCTION, "query", make_query(behaviour.chunks))
            case _:
                return None

    def arguments(self) -> Iterator[str]:
        """The JSON text of the arguments, piece by piece: the fragments, before and after them what is around them."""
        yield f'{{"{self.argument}":"'
        for fragment in self.fragments:
            yield json.dumps(fragment)[1:-1]
        yield '"}'


def _completion(model: str, kind: str, choices: Sequence[Any], **more: Any) -> bytes:
    told = {"id": "chatcmpl-benchmark", "object": kind, "created": 1_700_000_000, "model": model}
    return json.dumps({**told, "choices": choices, **more}, separators=(",", ":")).encode()


def _usage(chunks: int) -> dict[str, int]:
    return {"prompt_tokens": 20, "completion_tokens": chunks, "total_tokens": 20 + chunks}


def _chunk(model: str, delta: Any, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return _event(_completion(model, "chat.completion.chunk", [choice]))


def _event(data: bytes) -> bytes:
    return _http_chunk(b"data: " + data + b"\n\n")


def _http_chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def _call(call_id: str, tool: ScriptedToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": tool.name, "arguments": arguments}}


@functools.cache
def _streamed(model: str, behaviour: ModelBehaviour, *, usage: bool) -> list[bytes]:
    """All that is streamed but for the first chunk, each chunk apart; the end is with the last."""
    tool = ScriptedToolCall.for_behaviour(behaviour)
    if tool is None:
        deltas: list[Any] = [{"content": word} for word in make_text(behaviour.chunks)]
    else:
        parts = tool.arguments()
        deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts]
    told = [_chunk(model, delta) for delta in deltas]
    last = _chunk(model, {}, "stop" if tool is None else "tool_calls")
    if usage:
        last += _event(_completion(model, "chat.completion.chunk", [], usage=_usage(behaviour.chunks)))
    return [*told, last + _http_chunk(_DONE) + b"0\r\n\r\n"]


def _opening(model: str, behaviour: ModelBehaviour, call_id: str) -> bytes:
    """The first chunk; that of a call has an id of its own."""
    delta: dict[str, Any] = {"role": "assistant", "content": ""}
    if (tool := ScriptedToolCall.for_behaviour(behaviour)) is not None:
        delta = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"index": 0, **_call(call_id, tool, "")}],
        }
    return _chunk(model, delta)


@functools.cache
def _text_opening(model: str) -> bytes:
    return _opening(model, ModelBehaviour("burst", 0), "")


def _whole(model: str, behaviour: ModelBehaviour, call_id: str) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(make_text(behaviour.chunks))}
    if (tool := ScriptedToolCall.for_behaviour(behaviour)) is not None:
        call = _call(call_id, tool, "".join(tool.arguments()))
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "stop" if tool is None else "tool_calls"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return _completion(model, "chat.completion", [choice], usage=_usage(behaviour.chunks))


@functools.cache
def _whole_text(model: str, behaviour: ModelBehaviour) -> bytes:
    return _whole(model, behaviour, "")


_decode = msgspec.json.Decoder(_Request).decode
_call_ids = (f"call_{number:016x}" for number in itertools.count())


class ModelConnection(asyncio.Protocol):
    """One connection that is kept open; a request is answered before the next is read."""

    def __init__(self, *, chunks_a_second: float = CHUNKS_PER_SECOND) -> None:
        self._interval = 1 / chunks_a_second
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue] - uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            whole = end + 4 + _content_length(head)
            if len(self._buffer) < whole:
                return
            body = bytes(self._buffer[end + 4 : whole])
            del self._buffer[:whole]
            self._answer(head.partition(b"\r\n")[0], body)

    def _answer(self, line: bytes, body: bytes) -> None:
        if line.startswith(b"GET /v1/models"):
            self._send(200, b'{"object":"list","data":[]}')
        elif not line.startswith(b"POST /v1/chat/completions"):
            self._send(404, b'{"error":{"message":"there is only /v1/chat/completions"}}')
        else:
            try:
                request = _decode(body)
                behaviour = ModelBehaviour.parse(request.model).for_turn(request.messages[-1].role)
            except (ValueError, IndexError) as error:
                self._send(400, json.dumps({"error": {"message": str(error)}}).encode())
            else:
                self._complete(request, behaviour)

    def _send(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _complete(self, request: _Request, behaviour: ModelBehaviour) -> None:
        text = behaviour.kind in ("burst", "paced")
        if not request.stream:
            whole = _whole_text(request.model, behaviour) if text else None
            self._send(200, whole or _whole(request.model, behaviour, next(_call_ids)))
            return
        options = request.stream_options
        chunks = _streamed(request.model, behaviour, usage=options is not None and options.include_usage)
        opening = (
            _text_opening(request.model) if text else _opening(request.model, behaviour, next(_call_ids))
        )
        self._write(_STREAM_HEAD + opening)
        if behaviour.kind == "paced":
            self._pace(chunks, 0, self._loop.time() + self._interval)
        else:
            self._burst(chunks, 0)

    def _burst(self, chunks: list[bytes], first: int) -> None:
        """A few writes, each in a turn of the loop of its own, or they would become one."""
        self._write(b"".join(chunks[first : first + _CHUNKS_PER_WRITE]))
        if first + _CHUNKS_PER_WRITE < len(chunks) and self._transport is not None:
            self._loop.call_soon(self._burst, chunks, first + _CHUNKS_PER_WRITE)

    def _pace(self, chunks: list[bytes], number: int, due: float) -> None:
        """On a schedule of its own for every stream: who comes late does not delay the rest."""
        self._write(chunks[number])
        if number + 1 < len(chunks) and self._transport is not None:
            self._loop.call_at(due, self._pace, chunks, number + 1, due + self._interval)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def _serve() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = await asyncio.get_running_loop().create_server(ModelConnection, sock=listening)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    import uvloop

    uvloop.run(_serve())


if __name__ == "__main__":
    main()
