"""A server as OpenAI would have it: responses by a script, containers that unpack nothing."""

import itertools
import json
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from openai import AsyncOpenAI, OpenAI

from tests.support.streamed_response import encode_stream


@dataclass(frozen=True)
class Reply:
    """What a request is answered with; `closes`: nothing is said and the connection ends.

    A request for a stream gets the events of the body, or a tuple of chunks, and of functions to call
    between them. breaks_after: so many of them, and then the connection ends.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    closes: bool = False
    breaks_after: int | None = None


type Script = Reply | Callable[[dict[str, Any]], Reply]


def error(status: int, message: str, code: str | None = None, **headers: str) -> Reply:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}
    return Reply(body, status, {name.replace("_", "-"): value for name, value in headers.items()})


def response(*output: Mapping[str, Any], **fields: Any) -> Reply:
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    body = {"id": "resp_1", "object": "response", "model": "gpt-4.1", "status": "completed", "usage": usage}
    return Reply({**body, "output": output, **fields}, headers={"x-request-id": "req_1"})


def message(text: str, *annotations: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [*annotations]}
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [part],
        **fields,
    }


@dataclass
class Container:
    id: str
    memory_limit: str
    status: str = "running"
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict[str, tuple[str, bytes]])


class OpenAIServer:
    """asked: the bodies of requests for responses and compactions, without `stream`; streamed: which of them had it;
    calls: every request as `POST /v1/…`.

    broken: what every request is answered with, if it is set.
    """

    def __init__(self) -> None:
        self.replies: list[Script] = []
        self.asked: list[dict[str, Any]] = []
        self.streamed: list[bool] = []
        self.headers: list[dict[str, str]] = []
        self.calls: list[str] = []
        self.containers: dict[str, Container] = {}
        self.no_more_containers = False
        self.broken: Reply | None = None
        self.url = ""
        self._ids = itertools.count(1)

    def script(self, *replies: Script) -> None:
        self.replies = [*replies]
        self.asked.clear()
        self.headers.clear()
        self.streamed.clear()
        self.calls.clear()

    def expire(self) -> None:
        """All containers, as if nobody had used them for long."""
        for container in self.containers.values():
            container.status = "expired"
            container.files.clear()

    def answer(self, method: str, target: str, kind: str, body: bytes) -> Reply:
        path, _, query = target.partition("?")
        self.calls.append(f"{method} {path}")
        if self.broken is not None:
            return self.broken
        if found := re.fullmatch(r"/v1/containers(?:/(\w+)(?:/files(?:/(\w+)(/content)?)?)?)?", path):
            if method == "GET" and path.endswith("/files"):
                return self._files(found[1], query)
            return self._container(method, path, kind, body, *found.groups())
        if path in ("/v1/responses", "/v1/responses/compact"):
            asked: dict[str, Any] = json.loads(body)
            self.streamed.append(bool(asked.pop("stream", False)))
            self.asked.append(asked)
            if not self.replies:
                return error(400, "This request is beyond the script.")
            reply = self.replies.pop(0)
            return reply if isinstance(reply, Reply) else reply(asked)
        return Reply({"object": "list", "data": []}) if path == "/v1/models" else error(404, "Not found.")

    def _container(
        self,
        method: str,
        path: str,
        kind: str,
        body: bytes,
        name: str | None,
        file: str | None,
        content: str | None,
    ) -> Reply:
        if name is None:
            if self.no_more_containers:
                return error(403, "You may not have any more containers.")
            wanted: dict[str, Any] = json.loads(body)
            made = Container(f"cntr_{next(self._ids)}", wanted.get("memory_limit", "1g"))
            self.containers[made.id] = made
            return Reply(_container_body(made))
        container = self.containers.get(name)
        if container is None:
            return _no_container(name)
        if "/files" not in path:
            if method == "DELETE":
                del self.containers[name]
            return Reply(_container_body(container))
        if container.status == "expired":
            return _expired()
        if file is None:
            number = next(self._ids)
            filename, sent = _upload(kind, body)
            # As OpenAI's does: whatever directory it was to go to, and with something before its name.
            container.files[f"cfile_{number}"] = (f"{number:032x}-{filename.rpartition('/')[2]}", sent)
            return Reply(_file_body(container, f"cfile_{number}"))
        if file not in container.files:
            return error(404, f"Container file with id '{file}' not found.")
        if method == "DELETE":
            del container.files[file]
            return Reply({"id": file, "deleted": True})
        return Reply(container.files[file][1]) if content else Reply(_file_body(container, file))

    def _files(self, name: str, query: str) -> Reply:
        """All on one page, the newest first unless somebody wants it otherwise."""
        container = self.containers.get(name)
        if container is None:
            return _no_container(name)
        if container.status == "expired":
            return _expired()
        listed = [_file_body(container, one) for one in container.files]
        data = listed if "order=asc" in query else listed[::-1]
        return Reply({"object": "list", "data": data, "has_more": False, "first_id": None, "last_id": None})


def _no_container(name: str) -> Reply:
    return error(404, f"Container with id '{name}' not found.")


def _expired() -> Reply:
    return error(404, "Container is expired.")


def _container_body(container: Container) -> dict[str, Any]:
    return {
        "id": container.id,
        "object": "container",
        "created_at": 1,
        "name": "n",
        "status": container.status,
        "memory_limit": container.memory_limit,
    }


def _file_body(container: Container, file_id: str) -> dict[str, Any]:
    path, content = container.files[file_id]
    return {
        "id": file_id,
        "object": "container.file",
        "bytes": len(content),
        "container_id": container.id,
        "created_at": 1,
        "path": f"/mnt/data/{path}",
        "source": "user",
    }


def _upload(kind: str, body: bytes) -> tuple[str, bytes]:
    """Name and content of an uploaded file, or of one that was uploaded before."""
    if kind.startswith("application/json"):
        return f"{json.loads(body)['file_id']}.txt", b"attached"
    boundary = kind.partition("boundary=")[2].encode()
    for part in body.split(b"--" + boundary):
        head, _, content = part.partition(b"\r\n\r\n")
        if found := re.search(rb'filename="([^"]*)"', head):
            return found[1].decode().replace("\\\\", "\\"), content.removesuffix(b"\r\n")
        if b'name="file_id"' in head:  # as old SDKs send it
            return f"{content.strip().decode()}.txt", b"attached"
    raise AssertionError("no file was sent")


def _list_chunks(body: object) -> list[Any]:
    return [*cast("tuple[Any, ...]", body)] if isinstance(body, tuple) else encode_stream(body)


def _wants_stream(path: str, body: bytes) -> bool:
    return path == "/v1/responses" and json.loads(body).get("stream") is True


@contextmanager
def run_openai_server() -> Generator[OpenAIServer]:
    server = OpenAIServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: the second of two would wait for an acknowledgement

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.startswith("/v1/responses"):
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = server.answer(self.command, self.path, self.headers.get("content-type") or "", body)
            if reply.closes:
                self.close_connection = True
                return
            if reply.status == 200 and not isinstance(reply.body, bytes) and _wants_stream(self.path, body):
                self._stream(reply)
                return
            payload = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(payload)),
                **reply.headers,
            }
            self._send_head(reply.status, headers)
            self.wfile.write(payload)

        def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _stream(self, reply: Reply) -> None:
            events = _list_chunks(reply.body)
            headers = {"content-type": "text/event-stream", "transfer-encoding": "chunked", **reply.headers}
            self._send_head(200, headers)
            for event in events[: reply.breaks_after]:
                if callable(event):
                    self.wfile.flush()
                    event()
                    continue
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            if reply.breaks_after is None:
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.close_connection = True

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - their names are filename

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def make_client(server: OpenAIServer) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="sk-secret", max_retries=0, timeout=30)


def make_async_client(server: OpenAIServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url, api_key="sk-secret", max_retries=0, timeout=30)
