"""Named sandboxes over a supervisor: idempotent, within quotas, ended when forgotten.

Everything the HTTP server offers is here, and can be used without it, in the process of the caller.
"""

import asyncio
import contextlib
import logging
import platform
import re
import secrets
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, NamedTuple, Protocol, Self

from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    SandboxConflict,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
    SandboxStartFailed,
    TenantQuotaExceeded,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    PROTOCOL_VERSION,
    ExecutionEnd,
    OneShotRequest,
    OneShotResponse,
    SandboxInfo,
    SandboxSpec,
    ServerHealth,
)
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.api import one_shot_execution
from fumehood.sandbox_server.api.api_sandbox import ApiSandbox, SandboxTombstones
from fumehood.sandbox_server.api.sandbox_metrics import SandboxMetrics
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.execution_registry import RegisteredExecution
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor


@dataclass(slots=True)
class _TenantUsage:
    sandboxes: int = 0
    memory: int = 0


class TenantQuotas:
    """Taken before a sandbox is made and given back when it has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._usage: dict[str, _TenantUsage] = {}

    def reserve(self, spec: SandboxSpec) -> None:
        """Raises QuotaExceeded, and then nothing is taken."""
        share = self._usage.get(spec.tenant) or _TenantUsage()
        memory = share.memory + MEMORY_TIERS[spec.memory]
        most, most_memory = self._settings.tenant_sandboxes, self._settings.tenant_memory
        whose = f"Tenant {spec.tenant!r}" if spec.tenant else "The caller"
        if most is not None and share.sandboxes >= most:
            raise TenantQuotaExceeded(
                f"{whose} has {share.sandboxes} sandboxes, as many as a tenant may have; delete one or wait.",
                param="tenant",
            )
        if most_memory is not None and memory > most_memory:
            raise TenantQuotaExceeded(
                f"{whose} has sandboxes of {share.memory} bytes of memory, and {spec.memory} more would exceed "
                f"the {most_memory} that a tenant may have; delete one, wait, or ask for less.",
                param="memory",
            )
        share.sandboxes += 1
        share.memory = memory
        self._usage[spec.tenant] = share

    def release(self, spec: SandboxSpec) -> None:
        share = self._usage[spec.tenant]
        share.sandboxes -= 1
        share.memory -= MEMORY_TIERS[spec.memory]
        if not share.sandboxes:
            del self._usage[spec.tenant]


type ServiceState = Literal["starting", "ok", "stopping"]


NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


_VERSION = metadata.version("fumehood")


_PYTHON = platform.python_version()


_DELETED_REASON = "it was deleted"


_LARGE_OUTPUT_BYTES = 64 << 10


_DRAIN_SECONDS = 5.0  # seconds for what remains to be done after the code has stopped


class HasSandboxId(Protocol):
    """Whatever names a sandbox."""

    @property
    def id(self) -> str: ...


class _PendingSandbox(NamedTuple):
    """A sandbox that somebody asked for and that is not there yet; others may wait for it too."""

    spec: SandboxSpec
    task: asyncio.Task[ApiSandbox]


class SandboxService:
    """Use as `async with Service(settings) as service:`; has the shape of the seam `SandboxProvider`.

    Entering raises IsolationUnavailable. While it stops, everything that would be new work raises Unreachable.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings)
        self.metrics = SandboxMetrics(
            self.supervisor, settings, count_running=lambda: len(self._running_executions)
        )
        self.state: ServiceState = "starting"
        self._sandboxes: dict[str, ApiSandbox] = {}
        self._by_instance: dict[SandboxInstance, ApiSandbox] = {}
        self._pending: dict[str, _PendingSandbox] = {}
        self._tombstones = SandboxTombstones(settings)
        self._quotas = TenantQuotas(settings)
        self._running_executions: dict[SandboxExecution, SandboxInstance] = {}
        self._one_shots: set[asyncio.Task[OneShotResponse]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._started_at = time.monotonic()

    # ---- start and end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        await self.supervisor.__aenter__()
        self.supervisor.on_sandbox_exit = self._on_instance_exit
        if self.settings.idle_seconds is not None:
            self._reaper = asyncio.ensure_future(self._reap_idle(self.settings.idle_seconds))
        if self.state == "starting":
            self.state = "ok"

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no new work, give what runs some seconds to end, interrupt what then still runs."""
        self.state = "stopping"
        await self._wait_until_idle(grace_seconds)
        for execution, local in [*self._running_executions.items()]:
            local.interrupt(execution)
        if self._running_executions or self._one_shots:
            await self._wait_until_idle(self.settings.interrupt_grace + _DRAIN_SECONDS)

    async def _wait_until_idle(self, seconds: float) -> None:
        """Wait until nothing runs any more, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for execution in [*self._running_executions]:
                    while not execution.has_ended:
                        await execution.wait_for_events()
                if self._one_shots:
                    await asyncio.wait(self._one_shots)

    async def close(self) -> None:
        """End every sandbox; whoever still reads an execution gets its end."""
        self.state = "stopping"
        tasks: list[asyncio.Task[Any]] = [
            *self._one_shots,
            *(making.task for making in self._pending.values()),
        ]
        if self._reaper is not None:
            tasks.append(self._reaper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()

    def _check_accepting_work(self) -> None:
        if self.state == "starting":
            raise SandboxServerUnreachable("The sandbox server is starting; ask again.")
        if self.state == "stopping":
            raise SandboxServerUnreachable("The sandbox server is stopping and takes no new work.")

    def health(self) -> ServerHealth:
        unable = self.state == "ok" and not self.supervisor.can_create
        return ServerHealth(
            status="starting" if unable else self.state,
            mode=self.settings.mode,
            protocol=PROTOCOL_VERSION,
            version=_VERSION,
            python=_PYTHON,
            capacity=self.settings.capacity,
            live=self.supervisor.live_count,
            parked=self.supervisor.pool_available,
            running=len(self._running_executions),
            uptime_seconds=round(time.monotonic() - self._started_at, 3),
        )

    # ---- sandboxes --------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, name: str | None = None) -> ApiSandbox:
        """A new sandbox, or the one of that name that lives with an equal spec."""
        sandbox, _ = await self.get_or_create(secrets.token_hex(8) if name is None else name, spec)
        return sandbox

    async def get_or_create(self, name: str, spec: SandboxSpec) -> tuple[ApiSandbox, bool]:
        """The sandbox of that name, and whether it is new; callers who ask at once get the same one."""
        self._check_accepting_work()
        validate_name(name, "id")
        served = self._sandboxes.get(name)
        if served is not None and served.end_reason is None:
            _check_same_spec(served.spec, spec)
            return served, False
        making = self._pending.get(name)
        if making is not None:
            _check_same_spec(making.spec, spec)
            return await asyncio.shield(making.task), False
        self._quotas.reserve(spec)
        # A task of its own: others may wait for it when the first caller has gone.
        task = asyncio.ensure_future(self._create(name, spec))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._pending[name] = _PendingSandbox(spec, task)
        return await asyncio.shield(task), True

    async def _create(self, name: str, spec: SandboxSpec) -> ApiSandbox:
        began = time.monotonic()
        try:
            local = await self.supervisor.create(spec)
        except BaseException as error:
            self._quotas.release(spec)
            if isinstance(error, SandboxStartFailed):
                structured_logging.log_event(
                    "sandbox_failed", level=logging.ERROR, sandbox=name, reason=error.message
                )
            raise
        finally:
            del self._pending[name]
        seconds = time.monotonic() - began
        served = ApiSandbox(
            name,
            spec,
            local,
            self.settings,
            check_accepting_work=self._check_accepting_work,
            on_execution_start=self.track_execution,
            on_execution_end=self._on_execution_end,
            on_file_bytes=self.metrics.record_file_bytes,
        )
        if (previous := self._sandboxes.get(name)) is not None:
            self._retire(previous)
        self._tombstones.remove(name)
        self._sandboxes[name] = self._by_instance[local] = served
        if local.end_reason is not None:
            self._retire(served)
        self.metrics.record_created(warm=local.warm, seconds=seconds, with_packages=bool(spec.requirements))
        structured_logging.log_event(
            "sandbox_created",
            sandbox=name,
            tenant=spec.tenant,
            memory=spec.memory,
            warm=local.warm,
            duration_ms=round(seconds * 1000, 3),
            instance=local.id,
        )
        return served

    def get(self, name: str) -> ApiSandbox:
        """The one that lives; raises SandboxGone with the reason for one that did, else SandboxNotFound."""
        served = self._sandboxes.get(name)
        if served is None or served.end_reason is not None:
            served = self.get_live_or_ended(name)
            raise SandboxGone(f"Sandbox {name} is gone: {served.end_reason}.")
        return served

    def get_live_or_ended(self, name: str) -> ApiSandbox:
        """Also one that has ended, as long as it is remembered: its calls may still be read."""
        served = self._sandboxes.get(name) or self._tombstones.get(name)
        if served is None:
            raise SandboxNotFound(f"There is no sandbox {name}.")
        return served

    async def attach(self, ref: HasSandboxId) -> ApiSandbox:
        return self.get(ref.id)

    async def destroy(self, ref: HasSandboxId) -> None:
        if (making := self._pending.get(ref.id)) is not None:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(making.task)
        served = self._sandboxes.get(ref.id)
        if served is not None:
            await self._destroy(served, _DELETED_REASON)

    async def list_sandboxes(self, tenant: str | None = None) -> list[SandboxInfo]:
        return [
            served.info()
            for served in self._sandboxes.values()
            if served.end_reason is None and tenant in (None, served.spec.tenant)
        ]

    async def _destroy(self, served: ApiSandbox, reason: str) -> None:
        began = time.monotonic()
        served.instance.kill(reason)
        await served.instance.destroy()
        self._retire(served)
        self.metrics.record_destroyed(time.monotonic() - began)

    def _on_instance_exit(self, local: SandboxInstance) -> None:
        served = self._by_instance.get(local)
        if served is not None:
            self._retire(served)

    def _retire(self, served: ApiSandbox) -> None:
        """Remember why it ended, and that its owner has one less; once."""
        if self._by_instance.pop(served.instance, None) is None:
            return
        if self._sandboxes.get(served.id) is served:
            del self._sandboxes[served.id]
        self._quotas.release(served.spec)
        self._tombstones.add(served)
        asked = served.end_reason == _DELETED_REASON or self.state == "stopping"
        if not asked:
            self.metrics.record_lost()
        structured_logging.log_event(
            "sandbox_ended",
            level=logging.INFO if asked else logging.WARNING,
            sandbox=served.id,
            tenant=served.spec.tenant,
            reason=served.end_reason,
            lived_seconds=round(time.time() - served.created_at, 3),
        )

    async def _reap_idle(self, idle_seconds: float) -> None:
        """End what nobody has used for so long."""
        while True:
            await asyncio.sleep(min(idle_seconds / 4, 60.0))
            for served in [*self._sandboxes.values()]:
                if served.idle_seconds() >= idle_seconds:
                    await self._destroy(served, f"nobody used it for {idle_seconds:g} s")

    # ---- calls ------------------------------------------------------------------------------------------------

    def track_execution(self, execution: SandboxExecution, local: SandboxInstance) -> None:
        """Something runs that stopping has to wait for."""
        self._running_executions[execution] = local

    def _on_execution_end(self, served: ApiSandbox, call: RegisteredExecution, end: ExecutionEnd) -> None:
        self.record_execution_end(call.execution, end, sandbox=served.id, call_id=call.id)
        served.touch()
        if call.cost > _LARGE_OUTPUT_BYTES:
            self._evict_output(served)

    def _evict_output(self, newest: ApiSandbox) -> None:
        """Output is this process's memory, not the sandbox's: of those that were not used for longest it is let go."""
        excess = sum(served.executions.retained_bytes for served in self._sandboxes.values())
        excess -= self.settings.total_output_limit()
        if excess <= 0:
            return
        for served in sorted(self._sandboxes.values(), key=lambda served: served.last_used_at):
            if excess > 0 and served is not newest:
                excess -= served.executions.retained_bytes
                served.executions.evict_all()

    def record_execution_end(
        self, execution: SandboxExecution, end: ExecutionEnd, *, sandbox: str, call_id: str
    ) -> None:
        self._running_executions.pop(execution, None)
        self.metrics.record_execution(execution, end)
        structured_logging.log_event(
            "execution_ended",
            sandbox=sandbox,
            execution=call_id,
            status=end.status,
            exit_code=end.exit_code,
            duration_ms=end.duration_ms,
        )

    async def execute_once(self, request: OneShotRequest) -> OneShotResponse:
        """Code in a sandbox of its own, which ends with it, also when the caller is cancelled."""
        self._check_accepting_work()
        uploads = one_shot_execution.decode_files(request, self.settings)
        spec = one_shot_execution.build_spec(request)
        self._quotas.reserve(spec)
        work = asyncio.ensure_future(one_shot_execution.run_one_shot(self, request, spec, uploads))
        self._one_shots.add(work)
        work.add_done_callback(self._one_shots.discard)
        try:
            return await work
        except asyncio.CancelledError:
            if work.cancelled() and self.state == "stopping":
                raise SandboxServerUnreachable(
                    "The sandbox server stopped before the code had ended."
                ) from None
            raise
        finally:
            self._quotas.release(spec)


def validate_name(name: str, parameter: str) -> str:
    """What a caller may call a sandbox or an execution: it comes back in URLs, headers and logs."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidSandboxRequest(
            "A name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit.",
            param=parameter,
        )
    return name


def _check_same_spec(its: SandboxSpec, wanted: SandboxSpec) -> None:
    if its != wanted:
        raise SandboxConflict(
            "A sandbox of that name lives, with another specification; choose another name, or delete it."
        )
