"""Where `fumehood exec` has its sandbox: in this process or on a server."""

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
    """Gives one sandbox, which ends with the context; raises SandboxError."""

    def open_sandbox(self, spec: SandboxSpec) -> "AbstractAsyncContextManager[Sandbox]": ...


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LocalExecBackend:
    """On this machine, by a supervisor in this process; entering raises IsolationUnavailable."""

    settings: "Settings"

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        from fumehood.sandbox_server.api.api_sandbox import ApiSandbox
        from fumehood.sandbox_server.supervisor.supervisor import Supervisor

        async with Supervisor(self.settings) as supervisor:
            local = await supervisor.create(spec)
            # The service around it would count, log and remember, for which there is no use here.
            yield ApiSandbox(
                local.id,
                spec,
                local,
                self.settings,
                check_accepting_work=lambda: None,
                on_execution_start=_ignore,
                on_execution_end=_ignore,
                on_file_bytes=_ignore,
            )


@dataclass(frozen=True, slots=True)
class RemoteExecBackend:
    """On a sandbox server; raises Unreachable, NotAllowed and what else `SandboxProvider` says."""

    provider: "RemoteSandboxProvider"

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        # Named before it is asked for: it is ended also if we leave before the answer comes.
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
                "The server wants its token; the variable FUMEHOOD_SANDBOX_TOKEN has to hold it."
            ) from error

    async def _destroy(self, ref: SandboxRef) -> None:
        try:
            async with asyncio.timeout(_DESTROY_TIMEOUT):
                await self.provider.destroy(ref)
        except (SandboxError, TimeoutError) as error:
            logger.debug("The sandbox %s may still be there: %s", ref.id, error)
