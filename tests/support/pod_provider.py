"""The seam `SandboxProvider` on pods: each sandbox gets a pod of its own, as a cluster's claims give it."""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    SandboxError,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import SandboxInfo, SandboxSpec
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider


class StartedPod(Protocol):
    """A pod that is ready: its address, and its end."""

    @property
    def url(self) -> str: ...

    async def stop(self) -> None: ...


_LINGERING_PODS = 3


async def _stop(remote: RemoteSandboxProvider, pod: StartedPod) -> None:
    await remote.close()
    await pod.stop()


class PodProvider:
    """Keeps `warm` pods ready; a pod is deleted together with its sandbox."""

    def __init__(self, start_pod: Callable[[], Awaitable[StartedPod]], token: str, *, warm: int = 1) -> None:
        self._start_pod = start_pod
        self._token = token
        self._is_closed = False
        self._used: dict[str, tuple[RemoteSandboxProvider, StartedPod]] = {}
        self._ended: deque[tuple[RemoteSandboxProvider, StartedPod]] = deque()
        self._lock = asyncio.Lock()
        self._warm: deque[asyncio.Task[StartedPod]] = deque()
        for _ in range(warm):
            self._refill()

    def _refill(self) -> None:
        self._warm.append(asyncio.ensure_future(self._start_pod()))

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxServerUnreachable("The provider is closed.")

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        self._check_open()
        name = secrets.token_hex(8) if name is None else name
        async with self._lock:
            if name not in self._used:
                pod = await self._warm.popleft()
                self._used[name] = (RemoteSandboxProvider(pod.url, self._token), pod)
                self._refill()
            try:
                return await self._used[name][0].create(spec, name)
            except SandboxError:
                if not await self._used[name][0].list_sandboxes():
                    await _stop(*self._used.pop(name))
                raise

    async def attach(self, ref: SandboxRef) -> Sandbox:
        if ref.id not in self._used:
            raise SandboxNotFound(f"There is no sandbox {ref.id!r}.")
        return await self._used[ref.id][0].attach(ref)

    async def destroy(self, ref: SandboxRef) -> None:
        if ref.id not in self._used:
            return
        remote, pod = self._used.pop(ref.id)
        # The server of a pod answers for a while, so that others can read how the last execution ended.
        self._ended.append((remote, pod))
        await remote.destroy(ref)
        while len(self._ended) > _LINGERING_PODS:
            await _stop(*self._ended.popleft())

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        """Do nothing: these pods end with their sandboxes, not at an age."""

    async def list_sandboxes(self) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        for remote, _ in [*self._used.values()]:
            found += await remote.list_sandboxes()
        return found

    async def close(self) -> None:
        self._is_closed = True
        for used in [*self._used.values(), *self._ended]:
            await _stop(*used)
        self._used.clear()
        self._ended.clear()
        for starting in self._warm:
            await (await starting).stop()
        self._warm.clear()
