"""The sandbox in a claimed pod, and how its loss is noticed."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidServerToken,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    SandboxInfo,
)
from fumehood.sandbox_client.kubernetes.claim_objects import SandboxClaim
from fumehood.sandbox_client.kubernetes.credentials import bracket_host
from fumehood.sandbox_client.remote_provider import RemoteSandbox, RemoteSandboxProvider

_ANSWER_TIMEOUT = 2.0
_PROBE_BACKOFF = 0.1
_MAX_PROBE_BACKOFF = 1.0
_LOST = "The sandbox is gone: its pod has ended."


class ClaimedPod:
    """One pod, used for one sandbox: its claim and the connection to its sandbox server.

    remote: the sandbox server. release: deletes the claim, in the background. is_current: whether the claim still has
        this pod. ending: the last request to the sandbox server.
    """

    def __init__(
        self,
        claim: SandboxClaim,
        remote: RemoteSandboxProvider,
        release: Callable[[SandboxClaim], object],
        is_current: Callable[["ClaimedPod"], Awaitable[bool]],
        probe_seconds: float,
    ) -> None:
        self.claim = claim
        self.remote = remote
        self.remote.connection.explain = self._explain
        self.has_ended = False
        self.ending: asyncio.Task[None] | None = None
        self._release = release
        self._is_current = is_current
        self._probe_seconds = probe_seconds

    def __repr__(self) -> str:
        return f"<ClaimedPod {self.claim.name} at {self.url}>"

    @property
    def url(self) -> str:
        return self.remote.connection.url

    @property
    def sandbox(self) -> str:
        return self.claim.sandbox_name

    def end(self) -> None:
        """Note that the pod is gone, or is being deleted."""
        self.has_ended = True

    def lose(self) -> None:
        """Give the pod up: its sandbox has ended, and it is not used for another one."""
        self.end()
        self._release(self.claim)

    def _explain(self, error: SandboxServerUnreachable) -> SandboxError:
        return SandboxGone(_LOST) if self.has_ended else error

    async def read_info(self) -> SandboxInfo:
        """Return what the sandbox server says of the sandbox. Raises SandboxError, TimeoutError."""
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            return await self.remote.get_info(self.sandbox)

    async def is_lost(self) -> bool:
        """Find out whether the sandbox has ended: its pod is replaced or does not answer any more.

        A sandbox that answers is not lost. One that does not is given some seconds.
        """
        deadline = asyncio.get_running_loop().time() + self._probe_seconds
        backoff = _PROBE_BACKOFF
        while not self.has_ended:
            try:
                await self.read_info()
                return False
            except (SandboxGone, SandboxNotFound, InvalidServerToken):
                return True
            except (SandboxError, TimeoutError):
                pass
            if not await self._is_current(self) or asyncio.get_running_loop().time() > deadline:
                return True
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _MAX_PROBE_BACKOFF)
        return True


class PodSandbox(RemoteSandbox):
    """A `Sandbox` in a pod. Once it is lost, its claim is deleted."""

    def __init__(self, pod: ClaimedPod) -> None:
        super().__init__(pod.remote.connection, pod.sandbox)
        self._pod = pod

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        return self._notice_loss(super().execute(request))

    def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        return self._notice_loss(super().follow(execution_id, after=after))

    async def _notice_loss(self, events: AsyncGenerator[ExecutionEvent]) -> AsyncGenerator[ExecutionEvent]:
        async with aclosing(events):
            try:
                async for event in events:
                    if isinstance(event, ExecutionEnd) and not event.state_kept:
                        self._pod.lose()
                    yield event
            except (SandboxGone, SandboxNotFound):
                self._pod.lose()
                raise
            except SandboxServerUnreachable as error:
                if not await self._pod.is_lost():
                    raise
                self._pod.lose()
                gone = SandboxGone(_LOST)
                gone.nothing_started, gone.disconnected_at = error.nothing_started, error.disconnected_at
                raise gone from error


def make_pod_url(address: str, port: int) -> str:
    return f"http://{bracket_host(address)}:{port}"
