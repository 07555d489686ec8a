"""Pods for tests: addresses of their own on 127.x, behind each a real sandbox server."""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tests.support.relay import Relay
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import RunningServer, run_server

POD_TOKEN = "a-token-that-all-pods-share"
_numbers = itertools.count(2)


def free_port() -> int:
    """Return a port that is free on all addresses of the loopback network."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]


def next_address() -> str:
    """Return an address that no pod of this process has had."""
    number = next(_numbers)
    return f"127.{100 + os.getpid() % 100}.{number >> 8 & 255}.{number & 255}"


class Pod(Protocol):
    """One pod. stop: as kubelet does when it is deleted. kill: its processes die, and nobody says so."""

    address: str

    async def stop(self, sandbox: str) -> None: ...

    async def kill(self, sandbox: str) -> None: ...


class PodHost(Protocol):
    """Starts pods. port: on which their sandbox servers listen."""

    port: int

    async def start_pod(self) -> Pod: ...


# ---- nothing but an address ------------------------------------------------------------------------------------


@dataclass
class IdlePod:
    """A pod in which nothing listens."""

    address: str

    async def stop(self, sandbox: str) -> None:
        pass

    async def kill(self, sandbox: str) -> None:
        pass


class IdlePods:
    """Pods for tests of claims alone."""

    def __init__(self) -> None:
        self.port = free_port()

    async def start_pod(self) -> Pod:
        return IdlePod(next_address())


@asynccontextmanager
async def run_idle_pods() -> AsyncGenerator[IdlePods]:
    yield IdlePods()


# ---- many pods, one server --------------------------------------------------------------------------------------


class RelayedPod:
    """An address whose connections end at a server that other pods share; sandboxes are separate there."""

    def __init__(
        self,
        address: str,
        relay: Relay,
        listener: asyncio.Server,
        server: RunningServer,
        waiting: set[asyncio.Task[None]],
    ) -> None:
        self.address = address
        self._relay = relay
        self._waiting = waiting
        self._listener = listener
        self._server = server

    async def stop(self, sandbox: str) -> None:
        await self.kill(sandbox)

    async def kill(self, sandbox: str) -> None:
        self._listener.close()
        for task in self._waiting:
            task.cancel()
        await self._relay.stop()
        if sandbox:
            await self._server.service.delete(sandbox)


class RelayedPods:
    """Pods that cost nothing but an address. delay: seconds until a new connection is served."""

    def __init__(self, server: RunningServer) -> None:
        self.port = free_port()
        self.delay = 0.0
        self._relays: list[Relay] = []
        self._server = server
        self._target = int(server.where.rpartition(":")[2])

    async def start_pod(self) -> Pod:
        relay = Relay(self._target, [])
        address = next_address()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            waiting.add(task)
            try:
                await asyncio.sleep(self.delay)
            except asyncio.CancelledError:
                writer.transport.abort()
                return
            finally:
                waiting.discard(task)
            await relay.serve(reader, writer)

        waiting = set[asyncio.Task[None]]()

        listener = await asyncio.start_server(serve, address, self.port)
        self._relays.append(relay)
        return RelayedPod(address, relay, listener, self._server, waiting)

    @property
    def running_executions(self) -> int:
        return self._server.service.health().running

    def cut_connections(self) -> None:
        """Cut all connections to all pods."""
        for relay in self._relays:
            relay.drop()


@asynccontextmanager
async def run_relayed_pods() -> AsyncGenerator[RelayedPods]:
    async with run_server(settings(preload=(), capacity=200), token=POD_TOKEN) as server:
        yield RelayedPods(server)
