"""A model server that answers every request by rules: chat completions, streamed or not, tool calls and embeddings.

Its model repeats the question, calls the first tool that it is offered, fills a schema or the fields that it is
given, and sees whether a message has a picture.
"""

import json
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

KEY = "sk-small-model-server-0123456789"
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}

type Flavor = Literal["plain", "vllm", "llama.cpp", "ollama", "lm-studio"]


@dataclass(frozen=True)
class SmallRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class SmallModelServer:
    """url: what `base_url` is to be.

    flavor: whose additional endpoints it has, with its context size.
    needs_key: whether it rejects requests without `KEY`.
    calls_tools, sees_images: what its model can do. rejects_images: whether a picture is a 400.
    broken: a status that every chat completion gets.
    """

    flavor: Flavor = "plain"
    models: list[str] = field(default_factory=lambda: ["small-chat", "small-embed"])
    context: int = 32_768
    needs_key: bool = True
    calls_tools: bool = True
    sees_images: bool = True
    rejects_images: bool = False
    broken: int | None = None
    url: str = ""
    requests: list[SmallRequest] = field(default_factory=list[SmallRequest])

    def answer(self, request: SmallRequest) -> tuple[int, Any]:
        """Status and body; an iterator is a stream."""
        self.requests.append(request)
        if self.needs_key and request.headers.get("authorization") != f"Bearer {KEY}":
            return 401, _error("Incorrect API key provided.")
        match request.method, request.path:
            case "GET", "/v1/models":
                return 200, {"object": "list", "data": [self._model_entry(name) for name in self.models]}
            case "POST", "/v1/embeddings":
                return self._embed(request.body)
            case "POST", "/v1/chat/completions":
                return self._complete(request.body)
            case _:
                return self._answer_as_flavor(request)

    def _model_entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": name, "object": "model", "created": 1, "owned_by": "small"}
        return {**entry, "max_model_len": self.context} if self.flavor == "vllm" else entry

    def _answer_as_flavor(self, request: SmallRequest) -> tuple[int, Any]:
        match self.flavor, request.path:
            case "llama.cpp", "/props":
                return 200, {"default_generation_settings": {"n_ctx": self.context}}
            case "ollama", "/api/show":
                # As Ollama: what the model was trained with, and what this server gives it.
                parameters = f'num_ctx                        {self.context}\nstop    "<|im_end|>"'
                return 200, {"parameters": parameters, "model_info": {"qwen3.context_length": 262_144}}
            case "lm-studio", "/api/v0/models":
                listed = [
                    {"id": name, "max_context_length": 131_072, "loaded_context_length": self.context}
                    for name in self.models
                ]
                return 200, {"object": "list", "data": listed}
            case "lm-studio", path:
                return 200, {"error": f"Unexpected endpoint or method. ({request.method} {path})"}
            case _:
                return 404, {"detail": "Not Found"}

    def _embed(self, asked: dict[str, Any]) -> tuple[int, Any]:
        if asked["model"] not in self.models:
            return 404, _error(f"The model `{asked['model']}` does not exist.", "model_not_found")
        given: Any = asked["input"]
        inputs = cast("list[Any]", given) if isinstance(given, list) else [given]
        data = [
            {"object": "embedding", "index": number, "embedding": _embedding(text, asked)}
            for number, text in enumerate(inputs)
        ]
        usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
        return 200, {"object": "list", "model": asked["model"], "data": data, "usage": usage}

    def _complete(self, asked: dict[str, Any]) -> tuple[int, Any]:
        if self.broken is not None:
            return self.broken, _error("It is broken.")
        if asked["model"] not in self.models:
            return 404, _error(f"The model `{asked['model']}` does not exist.", "model_not_found")
        has_image = "image_url" in json.dumps(asked["messages"])
        if has_image and self.rejects_images:
            return 400, _error("This model does not support image input.")
        message, reason = self._write(asked, has_image)
        if asked.get("stream"):
            return 200, _stream(asked, message, reason)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return 200, {**_frame(asked, "chat.completion"), "choices": [choice], "usage": USAGE}

    def _write(self, asked: dict[str, Any], has_image: bool) -> tuple[dict[str, Any], str]:
        last = asked["messages"][-1]
        if asked.get("tools") and last["role"] != "tool" and self.calls_tools:
            function = asked["tools"][0]["function"]
            arguments = json.dumps(fill_schema(function["parameters"]))
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
            return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        form: dict[str, Any] = asked.get("response_format") or {}
        if form.get("type") == "json_schema":
            content = json.dumps(fill_schema(form["json_schema"]["schema"]))
        elif has_image:
            content = "red" if self.sees_images else "I see no picture."
        else:
            text = _read_text(last["content"])
            content = _fill_marked_fields(text) or f"You said: {text}"
        return {"role": "assistant", "content": content}, "stop"


def fill_schema(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """A value that fits a JSON schema."""
    root = root or schema
    if "$ref" in schema:
        return fill_schema(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    match schema.get("type"):
        case "object":
            properties = cast("dict[str, dict[str, Any]]", schema.get("properties", {}))
            return {name: fill_schema(inner, root) for name, inner in properties.items()}
        case "integer" | "number":
            return 42
        case "boolean":
            return True
        case "array":
            return [fill_schema(schema["items"], root)]
        case _:
            return cast("list[str]", schema.get("enum", ["Ann"]))[0]


def _read_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = cast("list[dict[str, str]]", content)
    return " ".join(part.get("text", "") for part in parts)


def _fill_marked_fields(text: str) -> str:
    """The answer to a prompt of DSPy, which names the fields that it wants between markers; else nothing."""
    _, asked, wanted = text.partition("Respond with the corresponding output fields")
    names = re.findall(r"\[\[ ## (\w+) ## \]\]", wanted)
    return "\n\n".join(f"[[ ## {name} ## ]]\n42" for name in names) if asked else ""


def _embedding(text: Any, asked: dict[str, Any]) -> Any:
    import base64
    import struct

    vector = [float(len(str(text))), 0.5, -1.0]
    if asked.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack("<3f", *vector)).decode()
    return vector


def _frame(asked: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": asked["model"]}


def _stream(asked: dict[str, Any], message: dict[str, Any], reason: str) -> Iterator[bytes]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"] is not None:
        text = message["content"]
        deltas += [{"content": text[start : start + 4]} for start in range(0, len(text), 4)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    for delta in deltas:
        yield _event(asked, [{"index": 0, "delta": delta, "finish_reason": None}])
    yield _event(asked, [{"index": 0, "delta": {}, "finish_reason": reason}])
    options: dict[str, Any] = asked.get("stream_options") or {}
    if options.get("include_usage"):
        yield _event(asked, [], usage=USAGE)
    yield b"data: [DONE]\n\n"


def _event(asked: dict[str, Any], choices: list[Any], **more: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({**_frame(asked, "chat.completion.chunk"), "choices": choices, **more}).encode()
        + b"\n\n"
    )


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@contextmanager
def run_small_model_server(port: int = 0, **options: Any) -> Generator[SmallModelServer]:
    """One on this port, or on a free one."""
    server = SmallModelServer(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def _serve(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = json.loads(content) if content else None
            status, reply = server.answer(SmallRequest(self.command, self.path, headers, body))
            self.send_response(status)
            if isinstance(reply, dict):
                payload = json.dumps(reply).encode()
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
                return
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for event in reply:
                self.wfile.write(event)
                self.wfile.flush()

        do_GET = do_POST = _serve  # noqa: N815 - their names are fixed

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
