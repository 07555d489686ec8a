"""`fumehood serve` as a process, and a scripted model server."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from tests.support.raw_model_server import (
    DONE,
    RawModelServer,
    ReceivedRequest,
    Responder,
    chunk,
    data,
    stream,
)

_ADDRESS = re.compile(r"Serving the Responses API on (http://[^/]+)/v1")
_PLAIN = {"FUMEHOOD_SANDBOX_PRELOAD": ""}


@dataclass
class GatewayProcess:
    """A gateway that runs; `url` is its base URL."""

    process: subprocess.Popen[str]
    url: str
    directory: Path
    output: list[str] = field(default_factory=list[str])
    drain: threading.Thread | None = None

    def kill(self) -> None:
        """As the kernel would: nothing is said, nothing is tidied up."""
        self.process.kill()
        self.wait_for_exit()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait_for_exit()

    def wait_for_exit(self) -> int:
        """Its exit code, once it is gone and all that it said is in `output`."""
        code = self.process.wait(60)
        if self.drain is not None:
            self.drain.join()
        return code


def start_gateway(
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "fumehood"),
    *,
    loaded: bool = False,
) -> GatewayProcess:
    """One with its files in this directory, once it answers.

    program: what Python is to run.
    loaded: whether its sandboxes begin with what they have loaded by default, which takes most of the start.
    """
    tree: dict[str, Any] = {
        "storage": {"url": f"sqlite:///{directory}/gateway.db", "blobs": str(directory / "blobs")},
        "telemetry": {"log_format": "json"},
    }
    tree |= settings or {}
    file = directory / "config.json"  # JSON is YAML
    file.write_bytes(msgspec.json.encode(tree))
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--config", str(file), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **({} if loaded else _PLAIN), **(environment or {})},
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if found := _ADDRESS.search(line):
            gateway = GatewayProcess(process, found[1] + "/v1", directory, lines)
            gateway.drain = threading.Thread(target=_drain, args=(gateway,), daemon=True)
            gateway.drain.start()
            return gateway
    process.stdout.close()
    process.wait()
    raise AssertionError("it did not serve:\n" + "".join(lines))


def _drain(gateway: GatewayProcess) -> None:
    """Nobody waits for what it says; but a full pipe would stop it."""
    assert gateway.process.stdout is not None
    with gateway.process.stdout as said:
        gateway.output.extend(said)


@contextlib.contextmanager
def run_gateway(
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "fumehood"),
    *,
    loaded: bool = False,
) -> Generator[GatewayProcess]:
    gateway = start_gateway(directory, settings, environment, program, loaded=loaded)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.stop()


class ScriptedModelServer:
    """A chat completions server in a thread of its own; `script` is what it answers with, one after another.

    model_list: what a gateway gets that asks for its models, at the start. host: the address that it serves on.
    """

    def __init__(self, model_list: bytes = b'{"object":"list","data":[]}', host: str = "127.0.0.1") -> None:
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._chat = RawModelServer(deque(), model_list)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._chat.serve, self._host, 0))
        self._chat.url = f"http://{self._host}:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        self._loop.run_forever()
        for writer in list(self._chat.writers):
            writer.transport.abort()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._loop.close()

    @property
    def url(self) -> str:
        return self._chat.url

    @property
    def requests(self) -> Sequence[ReceivedRequest]:
        return self._chat.requests

    @property
    def unused_answers(self) -> int:
        """How many answers nobody came for."""
        return len(self._chat.responders)

    def script(self, *answers: Responder) -> None:
        self._chat.requests.clear()
        self._chat.responders.clear()
        self._chat.responders.extend(answers)

    def wait_for_disconnect(self) -> None:
        """Wait until a client hangs up before the end of its answer, and forget it."""

        async def wait() -> None:
            await asyncio.wait_for(self._chat.client_disconnected.wait(), 20)
            self._chat.client_disconnected.clear()

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def event(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """Something for an answer to wait for, and what lets it go on."""
        event = asyncio.Event()
        return event, lambda: self._loop.call_soon_threadsafe(event.set) and None


# --- what the model says ------------------------------------------------------------------------------

IDENTITY = {"id": "chatcmpl-1", "model": "scripted-2026"}
USAGE = data({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}})


def text_answer(*texts: str) -> Responder:
    pieces = [chunk({"role": "assistant", "content": text}, **IDENTITY) for text in texts]
    return stream(*pieces, chunk(finish="stop"), USAGE, DONE)


def reasoning_answer(reasoning: str, text: str) -> Responder:
    """The model thinks before it answers."""
    half = len(reasoning) // 2
    pieces = [chunk({"reasoning_content": piece}) for piece in (reasoning[:half], reasoning[half:])]
    return stream(*pieces, chunk({"content": text}), chunk(finish="stop"), USAGE, DONE)


def tool_call(
    name: str, arguments: object, *, call_id: str = "call_1", pieces: int = 5, index: int = 0
) -> list[bytes]:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    size = max(1, -(-len(text) // pieces))
    fragments = [text[start : start + size] for start in range(0, len(text), size)]
    head = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    return [
        chunk({"tool_calls": [head]}, **IDENTITY),
        *(chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]}) for part in fragments),
    ]


def tool_calls(*written: list[bytes], prompt_tokens: int | None = None) -> Responder:
    usage = USAGE
    if prompt_tokens is not None:
        figures = {"prompt_tokens": prompt_tokens, "completion_tokens": 7, "total_tokens": prompt_tokens + 7}
        usage = data({"choices": [], "usage": figures})
    return stream(*(piece for one in written for piece in one), chunk(finish="tool_calls"), usage, DONE)


def code_call(code: str, *, prompt_tokens: int | None = None, **more: Any) -> Responder:
    """The model calls the code interpreter."""
    return tool_calls(tool_call("code_interpreter", {"code": code, **more}), prompt_tokens=prompt_tokens)
