"""Model servers that send without end, each in its own way, as fast as the gateway takes it.

The name of a way is the first part of the path: `base_url` is `{url}/comments/v1`.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from tests.support import responses_events
from tests.support.raw_model_server import chunk

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
_STREAM = _HEAD % b"text/event-stream" + b"\r\n"
_DOCUMENT = _HEAD % b"application/json" + b"\r\n"
_BLOCK = 256 << 10  # bytes of one write


def _fill(piece: bytes) -> bytes:
    return piece * max(1, _BLOCK // len(piece))


def _repeat(start: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    block = _fill(piece)

    def send() -> Iterator[bytes]:
        yield start
        while True:
            yield block

    return send


def _once(answer: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([answer])


def _call_start() -> bytes:
    function = {"name": "f", "arguments": '{"a":"'}
    return chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]})


def _arguments() -> bytes:
    return chunk({"tool_calls": [{"index": 0, "function": {"arguments": "x" * 1000}}]})


_BARE_DELTA = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
_GZIP_BOMB = bytes.fromhex("1f8b0800000000000003") + b"\x00" * 1000

HOSTILE: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "comments": _repeat(_STREAM, b": x\n\n"),
    "comments-after-text": _repeat(_STREAM + chunk({"content": "a"}), b":\n"),
    "deltas": _repeat(_STREAM, chunk({"content": "and on "})),
    "bare-deltas": _repeat(_STREAM, _BARE_DELTA),
    "thoughts": _repeat(_STREAM, chunk({"reasoning_content": "hm "})),
    "empty-events": _repeat(_STREAM, b"data: {}\n\n"),
    "fields": _repeat(_STREAM, b"event: x\nid: 1\n\n"),
    "line": _repeat(_STREAM + b'data: {"choices":[{"delta":{"content":"', b"x"),
    "blank-lines": _repeat(_STREAM, b"\n"),
    "spaces": _repeat(_STREAM, b" "),
    "headers": _repeat(_HEAD % b"text/event-stream", b"x-header: and on\r\n"),
    "gzip": _repeat(_HEAD % b"text/event-stream" + b"Content-Encoding: gzip\r\n\r\n", _GZIP_BOMB),
    "arguments": _repeat(_STREAM + _call_start(), _arguments()),
    "whitespace": _repeat(_DOCUMENT + b"{", b" "),
    "document": _repeat(_DOCUMENT + b'{"choices":[{"message":{"content":"', b"x"),
    "items": _repeat(_DOCUMENT + b'{"choices":[', b'{"index":1},'),
    "whole-document": _once(_DOCUMENT + b'{"choices":[' + b"{}," * (10 << 20) + b"{}]}"),
    "whole-line": _once(_STREAM + b'data: {"choices":[' + b"{}," * (10 << 20) + b"{}]}\n\n"),
    "small-chunks": _repeat(
        _HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n: \r\n"
    ),
    "odd-data": _repeat(_STREAM, b"data: [\n"),
}
"""By name: what a chat completions server sends."""

HOSTILE_RESPONSES: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "responses-comments": HOSTILE["comments"],
    "responses-deltas": _repeat(
        _STREAM
        + responses_events.created()
        + responses_events.added(0, type="message", id="msg_theirs", content=[]),
        responses_events.delta("output_text", 0, "and on "),
    ),
    "responses-unknown-events": _repeat(
        _STREAM + responses_events.created(), responses_events.event("response.of_no_use")
    ),
    "responses-document": HOSTILE["document"],
}
"""By name: what a server of the Responses API sends."""


class HostileModels:
    """Serves all of them, each connection in a thread; `sent` counts the bytes by name."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._ways = {**HOSTILE, **HOSTILE_RESPONSES}
        self.sent = dict.fromkeys(self._ways, 0)
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def settings(self, **more: object) -> list[dict[str, object]]:
        """An entry of `models` for each."""
        return [
            {
                "match": name,
                "backend": "responses" if name in HOSTILE_RESPONSES else "chat_completions",
                "base_url": f"{self.url}/{name}/v1",
                "retries": 0,
                **more,
            }
            for name in self._ways
        ]

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._accepting.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(300)
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            name = head.split(b" ", 2)[1].split(b"/")[1].decode()
            for block in self._ways[name]():
                connection.sendall(block)
                self.sent[name] += len(block)
        self._connections.discard(connection)
