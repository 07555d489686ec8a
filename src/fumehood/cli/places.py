"""Where `fumehood exec` has its sandbox: in this process or on a server; imports `interfaces`, sandbox, sandboxd."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox import SandboxSpec
from fumehood.protocol.sandbox_errors import NotAllowed, SandboxError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from fumehood.sandbox.remote import RemoteSandboxes
    from fumehood.sandboxd.settings import Settings

_LEAVE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Place(Protocol):
    """Gives one sandbox, which ends with the context; raises SandboxError."""

    def sandbox(self, spec: SandboxSpec) -> "AbstractAsyncContextManager[Sandbox]": ...


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Here:
    """On this machine, by a supervisor in this process; entering raises IsolationUnavailable."""

    settings: "Settings"

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        from fumehood.sandboxd.served import ServedSandbox
        from fumehood.sandboxd.supervisor import Supervisor

        async with Supervisor(self.settings) as supervisor:
            local = await supervisor.create(spec)
            # The service around it would count, log and remember, for which there is no use here.
            yield ServedSandbox(
                local.id,
                spec,
                local,
                self.settings,
                check=lambda: None,
                on_begin=_ignore,
                on_end=_ignore,
                on_bytes=_ignore,
            )


@dataclass(frozen=True, slots=True)
class There:
    """On a sandbox server; raises Unreachable, NotAllowed and what else `SandboxProvider` says."""

    provider: "RemoteSandboxes"

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        # Named before it is asked for: it is ended also if we leave before the answer comes.
        ref = SandboxRef(f"exec-{secrets.token_hex(8)}")
        async with self.provider:
            try:
                await self._create(spec, ref)
                yield await self.provider.attach(ref)
            finally:
                await self._end(ref)

    async def _create(self, spec: SandboxSpec, ref: SandboxRef) -> None:
        try:
            await self.provider.create(spec, ref.id)
        except NotAllowed as error:
            raise NotAllowed(
                "The server wants its token; the variable FUMEHOOD_SANDBOX_TOKEN has to hold it."
            ) from error

    async def _end(self, ref: SandboxRef) -> None:
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self.provider.destroy(ref)
        except (SandboxError, TimeoutError) as error:
            logger.debug("The sandbox %s may still be there: %s", ref.id, error)
