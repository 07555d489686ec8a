"""Fumehood as a benchmark target: create a sandbox, run code in it, delete it."""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from benchmarks.harness.raw_http_client import RawHttpClient, RawResponse
from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    OneShotRequest,
    OneShotResponse,
    SandboxSpec,
    ServerHealth,
    Stdout,
)
from fumehood.sandbox_client import RemoteSandboxProvider
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor


@dataclass(frozen=True)
class TimedCall:
    """One execution: times of its first output and its end, printed text, status."""

    first_output_at: float
    ended_at: float
    text: str
    status: str
    state_kept: bool


class SandboxTarget(ABC):
    """A way to create sandboxes and run code in them; `pid` is the root of its process tree."""

    name: str
    pid: int
    counts_towards_goals = True  # otherwise for information only

    @abstractmethod
    async def create(self) -> Any:
        """A fresh sandbox."""

    @abstractmethod
    async def run(self, sandbox: Any, code: str, *, timeout: float = 60.0) -> TimedCall:
        """Run code to its end."""

    @abstractmethod
    async def delete(self, sandbox: Any) -> None:
        """End the sandbox."""

    @abstractmethod
    async def pool_available(self) -> int:
        """Number of sandboxes ready in the pool."""

    @abstractmethod
    async def close(self) -> None:
        """End everything."""


class InProcessTarget(SandboxTarget):
    """The supervisor in this process, without HTTP."""

    name = "in-process"

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.pid = os.getpid()

    @classmethod
    async def start(cls, settings: SandboxServerSettings) -> Self:
        return cls(await Supervisor(settings).__aenter__())

    async def create(self) -> SandboxInstance:
        return await self.supervisor.create()

    async def run(self, sandbox: SandboxInstance, code: str, *, timeout: float = 60.0) -> TimedCall:
        return await _time_events(
            InProcessSandbox(sandbox).execute(ExecuteRequest(code=code, timeout_seconds=timeout))
        )

    async def delete(self, sandbox: SandboxInstance) -> None:
        await sandbox.destroy()

    async def pool_available(self) -> int:
        return len(self.supervisor._pool)

    async def close(self) -> None:
        await self.supervisor.close()


_decode_event = msgspec.json.Decoder(ExecutionEvent).decode
_decode_health = msgspec.json.Decoder(ServerHealth).decode
_decode_one_shot = msgspec.json.Decoder(OneShotResponse).decode
_encode = msgspec.json.Encoder().encode


class HttpTarget(SandboxTarget):
    """A separate server, through its HTTP API; a sandbox is its id."""

    def __init__(self, name: str, url: str, client: RawHttpClient, pid: int) -> None:
        self.name = name
        self.url = url
        self.pid = pid
        self._client = client
        self._numbers = itertools.count()
        self._prefix = f"bench-{os.urandom(4).hex()}"

    async def create(self) -> str:
        sandbox = f"{self._prefix}-{next(self._numbers)}"
        _check_status(await self._client.request("PUT", f"/sandboxes/{sandbox}"), 201)
        return sandbox

    async def run(self, sandbox: str, code: str, *, timeout: float = 60.0) -> TimedCall:
        first = 0.0

        def on_chunk(chunk: bytes) -> None:
            nonlocal first
            if not first and b'"stdout"' in chunk:
                first = time.perf_counter()

        body = _encode(ExecuteRequest(code=code, timeout_seconds=timeout))
        response = await self._client.request("POST", f"/sandboxes/{sandbox}/execute", body, on_chunk)
        ended = time.perf_counter()
        _check_status(response, 200)
        events = [_decode_event(line) for line in bytes(response.body).splitlines() if line]
        end = events[-1]
        if not isinstance(end, ExecutionEnd):
            raise RuntimeError("the execution had no end")
        text = "".join(event.text for event in events if isinstance(event, Stdout))
        return TimedCall(first, ended, text, end.status, end.state_kept)

    async def run_once(self, code: str) -> TimedCall:
        """Create, use and delete in one request; the first output comes with the end."""
        response = await self._client.request("POST", "/execute", _encode(OneShotRequest(code=code)))
        ended = time.perf_counter()
        answer = _decode_one_shot(_check_status(response, 200).body)
        status = "ok" if answer.status == "success" else answer.status
        return TimedCall(ended, ended, answer.stdout, status, state_kept=False)

    async def delete(self, sandbox: str) -> None:
        _check_status(await self._client.request("DELETE", f"/sandboxes/{sandbox}"), 204)

    async def pool_available(self) -> int:
        return _decode_health(_check_status(await self._client.request("GET", "/health"), 200).body).parked

    async def close(self) -> None:
        self._client.close()


class RemoteClientTarget(SandboxTarget):
    """The same server through the client that a gateway uses; the pool is read through `http_target`."""

    name = "shipped client"
    counts_towards_goals = False

    def __init__(self, http_target: HttpTarget) -> None:
        self.pid = http_target.pid
        self._http_target = http_target
        self._provider = RemoteSandboxProvider(http_target.url)

    async def create(self) -> Any:
        return await self._provider.attach(await self._provider.create(SandboxSpec()))

    async def run(self, sandbox: Any, code: str, *, timeout: float = 60.0) -> TimedCall:
        return await _time_events(sandbox.execute(ExecuteRequest(code=code, timeout_seconds=timeout)))

    async def delete(self, sandbox: Any) -> None:
        await self._provider.destroy(SandboxRef(sandbox.id))

    async def pool_available(self) -> int:
        return await self._http_target.pool_available()

    async def close(self) -> None:
        await self._provider.close()


async def _time_events(events: AsyncIterable[ExecutionEvent]) -> TimedCall:
    first, text, end = 0.0, "", None
    async for event in events:
        if isinstance(event, Stdout):
            first = first or time.perf_counter()
            text += event.text
        elif isinstance(event, ExecutionEnd):
            end = event
    if end is None:
        raise RuntimeError("the execution had no end")
    return TimedCall(first, time.perf_counter(), text, end.status, end.state_kept)


def _check_status(response: RawResponse, status: int) -> RawResponse:
    if response.status != status:
        raise RuntimeError(f"the server answered {response.status}: {bytes(response.body).decode()}")
    return response
