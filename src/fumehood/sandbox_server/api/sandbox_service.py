"""Named sandboxes: created idempotently, within tenant quotas, reaped when idle.

The HTTP server adds nothing to it; it can also be used in process.
"""

import asyncio
import contextlib
import logging
import platform
import re
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal, NamedTuple, Self

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
    ExecuteRequest,
    ExecutionEnd,
    OneShotRequest,
    OneShotResponse,
    SandboxInfo,
    SandboxSpec,
    ServerHealth,
)
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.api import one_shot_execution
from fumehood.sandbox_server.api.sandbox_metrics import SandboxMetrics
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

type ServiceState = Literal["starting", "ok", "stopping"]

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VERSION = metadata.version("fumehood")
_PYTHON = platform.python_version()
_DELETED_REASON = "it was deleted"
_LARGE_OUTPUT_BYTES = 64 << 10
_DRAIN_SECONDS = 5.0  # after the code has been interrupted


@dataclass(slots=True)
class _TenantUsage:
    sandboxes: int = 0
    memory: int = 0


class TenantQuotas:
    """Counts sandboxes and memory per tenant: reserved before a sandbox starts, released when it has ended."""

    def __init__(self, settings: SandboxServerSettings) -> None:
        self._settings = settings
        self._usage: dict[str, _TenantUsage] = {}

    def reserve(self, spec: SandboxSpec) -> None:
        """Raises TenantQuotaExceeded, and then reserves nothing."""
        usage = self._usage.get(spec.tenant) or _TenantUsage()
        memory = usage.memory + MEMORY_TIERS[spec.memory]
        max_sandboxes, max_memory = self._settings.tenant_sandboxes, self._settings.tenant_memory
        owner = f"Tenant {spec.tenant!r}" if spec.tenant else "The caller"
        if max_sandboxes is not None and usage.sandboxes >= max_sandboxes:
            raise TenantQuotaExceeded(
                f"{owner} has reached its quota of {usage.sandboxes} sandboxes; delete one, or retry later.",
                param="tenant",
            )
        if max_memory is not None and memory > max_memory:
            raise TenantQuotaExceeded(
                f"{owner} has sandboxes of {usage.memory} bytes of memory, and {spec.memory} more would exceed "
                f"the {max_memory} that a tenant may have; delete one, wait, or ask for less.",
                param="memory",
            )
        usage.sandboxes += 1
        usage.memory = memory
        self._usage[spec.tenant] = usage

    def release(self, spec: SandboxSpec) -> None:
        usage = self._usage[spec.tenant]
        usage.sandboxes -= 1
        usage.memory -= MEMORY_TIERS[spec.memory]
        if not usage.sandboxes:
            del self._usage[spec.tenant]


class SandboxTombstones:
    """Ended sandboxes, the newest last; bounded in number, age and retained output."""

    def __init__(self, settings: SandboxServerSettings) -> None:
        self._settings = settings
        self._tombstones: dict[str, tuple[float, SandboxInstance]] = {}

    def add(self, sandbox: SandboxInstance) -> None:
        self.remove(sandbox.name)
        self._tombstones[sandbox.name] = (time.monotonic(), sandbox)
        self._expire()
        self._trim_output()

    def get(self, name: str) -> SandboxInstance | None:
        self._expire()
        found = self._tombstones.get(name)
        return None if found is None else found[1]

    def remove(self, name: str) -> None:
        self._tombstones.pop(name, None)

    def _expire(self) -> None:
        oldest = time.monotonic() - self._settings.tombstone_seconds
        while self._tombstones:
            name, (since, _) = next(iter(self._tombstones.items()))
            if since >= oldest and len(self._tombstones) <= self._settings.max_tombstones:
                return
            del self._tombstones[name]

    def _trim_output(self) -> None:
        """All tombstones together retain no more output than one live sandbox may."""
        room = self._settings.retained_output_bytes
        for _, sandbox in reversed(self._tombstones.values()):
            room -= sandbox.executions.retained_bytes
            if room < 0 and sandbox.executions.retained_bytes:
                room += sandbox.executions.retained_bytes
                sandbox.executions.evict_all()


class _PendingSandbox(NamedTuple):
    """A sandbox that is being created; several callers may wait for it."""

    spec: SandboxSpec
    task: asyncio.Task[SandboxInstance]


class SandboxService:
    """The sandboxes of the server: creates, finds, expires and deletes them, within its limits.

    Use as `async with SandboxService(settings) as service:`.

    Entering raises IsolationUnavailable. While it stops, new work raises SandboxServerUnreachable.
    """

    def __init__(self, settings: SandboxServerSettings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings)
        self.metrics = SandboxMetrics(
            self.supervisor, settings, count_running=lambda: len(self._running_executions())
        )
        self.state: ServiceState = "starting"
        self._sandboxes: dict[str, SandboxInstance] = {}
        self._pending: dict[str, _PendingSandbox] = {}
        self._tombstones = SandboxTombstones(settings)
        self._quotas = TenantQuotas(settings)
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
        self.supervisor.on_sandbox_exit = self._retire
        if self.settings.idle_seconds is not None:
            self._reaper = asyncio.ensure_future(self._reap_idle(self.settings.idle_seconds))
        if self.state == "starting":
            self.state = "ok"

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuse new work, wait up to `grace_seconds` for running executions, then interrupt them."""
        self.state = "stopping"
        await self._wait_until_idle(grace_seconds)
        for execution in self._running_executions():
            execution.interrupt()
        if self._running_executions() or self._one_shots:
            await self._wait_until_idle(self.settings.interrupt_grace + _DRAIN_SECONDS)

    async def _wait_until_idle(self, seconds: float) -> None:
        """Wait until nothing runs, or for `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for execution in self._running_executions():
                    while not execution.has_ended:
                        await execution.wait_for_events()
                if self._one_shots:
                    await asyncio.wait(self._one_shots)

    async def close(self) -> None:
        """End every sandbox; readers of executions get their ends."""
        self.state = "stopping"
        tasks: list[asyncio.Task[Any]] = [
            *self._one_shots,
            *(pending.task for pending in self._pending.values()),
        ]
        if self._reaper is not None:
            tasks.append(self._reaper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()

    def _check_accepting_work(self) -> None:
        if self.state == "starting":
            raise SandboxServerUnreachable("The sandbox server is starting; retry.")
        if self.state == "stopping":
            raise SandboxServerUnreachable("The sandbox server is stopping and accepts no new work.")

    def health(self) -> ServerHealth:
        status: Literal["starting", "ok", "stopping", "ended"] = self.state
        if self.state == "ok" and self.supervisor.has_ended:
            status = "ended"
        elif self.state == "ok" and not self.supervisor.can_create:
            status = "starting"
        return ServerHealth(
            status=status,
            mode=self.settings.mode,
            protocol=PROTOCOL_VERSION,
            version=_VERSION,
            python=_PYTHON,
            capacity=self.settings.capacity,
            live=self.supervisor.live_count,
            parked=self.supervisor.pool_available,
            running=len(self._running_executions()),
            uptime_seconds=round(time.monotonic() - self._started_at, 3),
        )

    # ---- sandboxes --------------------------------------------------------------------------------------------

    async def get_or_create(self, name: str, spec: SandboxSpec) -> tuple[SandboxInstance, bool]:
        """The sandbox of that name, and whether it is new; concurrent callers get the same one.

        Raises SandboxConflict if it exists with another spec, TenantQuotaExceeded, and what `Supervisor.create` raises.
        """
        self._check_accepting_work()
        validate_name(name, "id")
        sandbox = self._sandboxes.get(name)
        if sandbox is not None and sandbox.end_reason is None:
            _check_same_spec(sandbox.spec, spec)
            return sandbox, False
        pending = self._pending.get(name)
        if pending is not None:
            _check_same_spec(pending.spec, spec)
            return await asyncio.shield(pending.task), False
        self._quotas.reserve(spec)
        # A task of its own: other callers may still wait for it when the first one is cancelled.
        task = asyncio.ensure_future(self._create(name, spec))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._pending[name] = _PendingSandbox(spec, task)
        return await asyncio.shield(task), True

    async def _create(self, name: str, spec: SandboxSpec) -> SandboxInstance:
        started_at = time.monotonic()
        try:
            sandbox = await self.supervisor.create(spec)
        except BaseException as error:
            self._quotas.release(spec)
            if isinstance(error, SandboxStartFailed):
                structured_logging.log_event(
                    "sandbox_failed", level=logging.ERROR, sandbox=name, reason=error.message
                )
            raise
        finally:
            del self._pending[name]
        seconds = time.monotonic() - started_at
        sandbox.name = name
        sandbox.executions.on_end = partial(self._on_execution_end, sandbox)
        if (previous := self._sandboxes.get(name)) is not None:
            self._retire(previous)
        self._tombstones.remove(name)
        self._sandboxes[name] = sandbox
        if sandbox.end_reason is not None:
            self._retire(sandbox)
        self.metrics.record_created(warm=sandbox.warm, seconds=seconds, with_packages=bool(spec.requirements))
        structured_logging.log_event(
            "sandbox_created",
            sandbox=name,
            tenant=spec.tenant,
            memory=spec.memory,
            warm=sandbox.warm,
            duration_ms=round(seconds * 1000, 3),
            instance=sandbox.id,
        )
        return sandbox

    def get(self, name: str) -> SandboxInstance:
        """A live sandbox; raises SandboxGone with the reason for one that has ended, otherwise SandboxNotFound."""
        sandbox = self._sandboxes.get(name)
        if sandbox is None or sandbox.end_reason is not None:
            sandbox = self.get_live_or_ended(name)
            raise SandboxGone(f"Sandbox {name} is gone: {sandbox.end_reason}.")
        return sandbox

    def get_live_or_ended(self, name: str) -> SandboxInstance:
        """Also an ended sandbox that has a tombstone: its executions may still be read."""
        sandbox = self._sandboxes.get(name) or self._tombstones.get(name)
        if sandbox is None:
            raise SandboxNotFound(f"There is no sandbox {name}.")
        return sandbox

    async def delete(self, name: str) -> None:
        """End the sandbox of that name and wait for it; does nothing if there is none."""
        if (pending := self._pending.get(name)) is not None:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(pending.task)
        sandbox = self._sandboxes.get(name)
        if sandbox is not None:
            await self._destroy(sandbox, _DELETED_REASON)

    async def list_sandboxes(self, tenant: str | None = None) -> list[SandboxInfo]:
        return [
            sandbox.info()
            for sandbox in self._sandboxes.values()
            if sandbox.end_reason is None and tenant in (None, sandbox.spec.tenant)
        ]

    async def _destroy(self, sandbox: SandboxInstance, reason: str) -> None:
        started_at = time.monotonic()
        sandbox.kill(reason)
        await sandbox.destroy()
        self._retire(sandbox)
        self.metrics.record_destroyed(time.monotonic() - started_at)

    def _retire(self, sandbox: SandboxInstance) -> None:
        """Move an ended sandbox to the tombstones and release its quota; once, and no one-shots."""
        if self._sandboxes.get(sandbox.name) is not sandbox:
            return
        del self._sandboxes[sandbox.name]
        self._quotas.release(sandbox.spec)
        self._tombstones.add(sandbox)
        expected = sandbox.end_reason == _DELETED_REASON or self.state == "stopping"
        if not expected:
            self.metrics.record_lost()
        structured_logging.log_event(
            "sandbox_ended",
            level=logging.INFO if expected else logging.WARNING,
            sandbox=sandbox.name,
            tenant=sandbox.spec.tenant,
            reason=sandbox.end_reason,
            lived_seconds=round(time.time() - sandbox.created_at, 3),
        )

    async def _reap_idle(self, idle_seconds: float) -> None:
        """End sandboxes that have been idle for so long."""
        while True:
            await asyncio.sleep(min(idle_seconds / 4, 60.0))
            for sandbox in [*self._sandboxes.values()]:
                if sandbox.idle_seconds() >= idle_seconds:
                    await self._destroy(sandbox, f"it was idle for {idle_seconds:g} s")

    # ---- executions -------------------------------------------------------------------------------------------

    def _running_executions(self) -> list[SandboxExecution]:
        """Executions that run or are queued."""
        return [
            execution
            for sandbox in self.supervisor.claimed_sandboxes()
            for execution in sandbox.executions.pending.values()
        ]

    def start_execution(self, sandbox: SandboxInstance, request: ExecuteRequest) -> SandboxExecution:
        """Start an execution, or return the one that was started under the same id."""
        self._check_accepting_work()
        execution = sandbox.executions.start_or_get(request)
        sandbox.touch()
        return execution

    def _on_execution_end(
        self, sandbox: SandboxInstance, execution: SandboxExecution, end: ExecutionEnd
    ) -> None:
        # Only after those who wait for the end have been answered: writing the log takes a sixth of a short call.
        asyncio.get_running_loop().call_soon(self.record_execution_end, sandbox.name, execution, end)
        if execution.retained_bytes > _LARGE_OUTPUT_BYTES:
            self._evict_output(sandbox)

    def _evict_output(self, newest: SandboxInstance) -> None:
        """Drop retained output of the least recently used sandboxes: it is memory of this process."""
        excess = sum(sandbox.executions.retained_bytes for sandbox in self._sandboxes.values())
        excess -= self.settings.total_output_limit()
        if excess <= 0:
            return
        for sandbox in sorted(self._sandboxes.values(), key=lambda sandbox: sandbox.last_used_at):
            if excess > 0 and sandbox is not newest:
                excess -= sandbox.executions.retained_bytes
                sandbox.executions.evict_all()

    def record_execution_end(self, sandbox: str, execution: SandboxExecution, end: ExecutionEnd) -> None:
        self.metrics.record_execution(execution, end)
        structured_logging.log_event(
            "execution_ended",
            sandbox=sandbox,
            execution=execution.id,
            status=end.status,
            exit_code=end.exit_code,
            duration_ms=end.duration_ms,
        )

    async def execute_once(self, request: OneShotRequest) -> OneShotResponse:
        """Run code in a sandbox of its own, which ends with the call, also when the caller is cancelled."""
        self._check_accepting_work()
        uploads = one_shot_execution.decode_files(request, self.settings)
        spec = SandboxSpec(memory=request.memory, tenant=request.tenant, requirements=request.requirements)
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
    """Check the name of a sandbox or an execution, which appears in URLs, headers and logs."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidSandboxRequest(
            "A name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit.",
            param=parameter,
        )
    return name


def _check_same_spec(existing: SandboxSpec, requested: SandboxSpec) -> None:
    if existing != requested:
        raise SandboxConflict(
            "A sandbox of that name exists with another specification; choose another name, or delete it."
        )
