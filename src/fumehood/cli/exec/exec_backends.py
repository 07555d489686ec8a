"""Where `fumehood exec` gets its sandbox: from this process or from a sandbox server."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import InvalidServerToken, SandboxError
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from fumehood.sandbox_client import RemoteSandboxProvider
    from fumehood.sandbox_server.settings import Settings

_DESTROY_TIMEOUT = 5.0

logger = logging.getLogger(__name__)


class ExecBackend(Protocol):
    """Opens one sandbox, which is destroyed with the context. Raises SandboxError."""

    def open_sandbox(self, spec: SandboxSpec) -> "AbstractAsyncContextManager[Sandbox]": ...


@dataclass(frozen=True, slots=True)
class LocalExecBackend:
    """Runs a supervisor in this process. Entering raises IsolationUnavailable."""

    settings: "Settings"

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
        from fumehood.sandbox_server.supervisor.supervisor import Supervisor

        async with Supervisor(self.settings) as supervisor:
            yield InProcessSandbox(await supervisor.create(spec))


@dataclass(frozen=True, slots=True)
class RemoteExecBackend:
    """Uses a sandbox server. Raises what `SandboxProvider` raises."""

    provider: "RemoteSandboxProvider"

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        # We choose the id, to destroy the sandbox even if we are cancelled before the response.
        ref = SandboxRef(f"exec-{secrets.token_hex(8)}")
        async with self.provider:
            try:
                await self._create(spec, ref)
                yield await self.provider.attach(ref)
            finally:
                await self._destroy(ref)

    async def _create(self, spec: SandboxSpec, ref: SandboxRef) -> None:
        try:
            await self.provider.create(spec, ref.id)
        except InvalidServerToken as error:
            raise InvalidServerToken(
                "The server requires its token; set the variable FUMEHOOD_SANDBOX_TOKEN."
            ) from error

    async def _destroy(self, ref: SandboxRef) -> None:
        try:
            async with asyncio.timeout(_DESTROY_TIMEOUT):
                await self.provider.destroy(ref)
        except (SandboxError, TimeoutError) as error:
            logger.debug("The sandbox %s may not be destroyed: %s", ref.id, error)
