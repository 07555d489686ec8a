"""Named sandboxes over a supervisor: idempotent, within quotas, ended when forgotten; imports siblings.

Everything the HTTP server offers is here, and can be used without it, in the process of the caller.
"""

import asyncio
import contextlib
import logging
import platform
import re
import secrets
import time
from importlib import metadata
from typing import Any, Literal, NamedTuple, Protocol, Self

from fumehood.protocol.sandbox import (
    PROTOCOL_VERSION,
    End,
    Health,
    OneShotRequest,
    OneShotResponse,
    SandboxInfo,
    SandboxSpec,
)
from fumehood.protocol.sandbox_errors import (
    Conflict,
    RequestRefused,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxStartFailed,
    Unreachable,
)
from fumehood.sandboxd import logs, one_shot
from fumehood.sandboxd.calls import Call
from fumehood.sandboxd.departed import Departed
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.metrics import Metrics
from fumehood.sandboxd.quotas import Quotas
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.served import ServedSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

type State = Literal["starting", "ok", "stopping"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VERSION = metadata.version("fumehood")
_PYTHON = platform.python_version()
_DELETED = "it was deleted"
_WORTH_A_LOOK = 64 << 10
_LAST_WORDS = 5.0  # seconds for what remains to be done after the code has stopped


class Ref(Protocol):
    """Whatever names a sandbox."""

    @property
    def id(self) -> str: ...


class _Making(NamedTuple):
    """A sandbox that somebody asked for and that is not there yet; others may wait for it too."""

    spec: SandboxSpec
    task: asyncio.Task[ServedSandbox]


class Service:
    """Use as `async with Service(settings) as service:`; has the shape of the seam `SandboxProvider`.

    Entering raises IsolationUnavailable. While it stops, everything that would be new work raises Unreachable.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings)
        self.metrics = Metrics(self.supervisor, settings, running=lambda: len(self._executing))
        self.state: State = "starting"
        self._served: dict[str, ServedSandbox] = {}
        self._by_local: dict[LocalSandbox, ServedSandbox] = {}
        self._making: dict[str, _Making] = {}
        self._departed = Departed(settings)
        self._quotas = Quotas(settings)
        self._executing: dict[Execution, LocalSandbox] = {}
        self._one_shots: set[asyncio.Task[OneShotResponse]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._began = time.monotonic()

    # ---- start and end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        await self.supervisor.__aenter__()
        self.supervisor.on_gone = self._local_gone
        if self.settings.idle_seconds is not None:
            self._reaper = asyncio.ensure_future(self._reap(self.settings.idle_seconds))
        if self.state == "starting":
            self.state = "ok"

    async def stop(self, grace: float = 0.0) -> None:
        """Take no new work, give what runs some seconds to end, interrupt what then still runs."""
        self.state = "stopping"
        await self._quiet(grace)
        for execution, local in [*self._executing.items()]:
            local.interrupt(execution)
        if self._executing or self._one_shots:
            await self._quiet(self.settings.interrupt_grace + _LAST_WORDS)

    async def _quiet(self, seconds: float) -> None:
        """Wait until nothing runs any more, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for execution in [*self._executing]:
                    while not execution.ended:
                        await execution.wait_for_more()
                if self._one_shots:
                    await asyncio.wait(self._one_shots)

    async def close(self) -> None:
        """End every sandbox; whoever still reads an execution gets its end."""
        self.state = "stopping"
        tasks: list[asyncio.Task[Any]] = [
            *self._one_shots,
            *(making.task for making in self._making.values()),
        ]
        if self._reaper is not None:
            tasks.append(self._reaper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()

    def _check_open(self) -> None:
        if self.state == "starting":
            raise Unreachable("The sandbox server is starting; ask again.")
        if self.state == "stopping":
            raise Unreachable("The sandbox server is stopping and takes no new work.")

    def health(self) -> Health:
        unable = self.state == "ok" and not self.supervisor.can_start
        return Health(
            status="starting" if unable else self.state,
            mode=self.settings.mode,
            protocol=PROTOCOL_VERSION,
            version=_VERSION,
            python=_PYTHON,
            capacity=self.settings.capacity,
            live=self.supervisor.live,
            parked=self.supervisor.parked,
            running=len(self._executing),
            uptime_seconds=round(time.monotonic() - self._began, 3),
        )

    # ---- sandboxes --------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, name: str | None = None) -> ServedSandbox:
        """A new sandbox, or the one of that name that lives with an equal spec."""
        sandbox, _ = await self.put(secrets.token_hex(8) if name is None else name, spec)
        return sandbox

    async def put(self, name: str, spec: SandboxSpec) -> tuple[ServedSandbox, bool]:
        """The sandbox of that name, and whether it is new; callers who ask at once get the same one."""
        self._check_open()
        check_name(name, "id")
        served = self._served.get(name)
        if served is not None and served.gone is None:
            _check_same(served.spec, spec)
            return served, False
        making = self._making.get(name)
        if making is not None:
            _check_same(making.spec, spec)
            return await asyncio.shield(making.task), False
        self._quotas.take(spec)
        # A task of its own: others may wait for it when the first caller has gone.
        task = asyncio.ensure_future(self._make(name, spec))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._making[name] = _Making(spec, task)
        return await asyncio.shield(task), True

    async def _make(self, name: str, spec: SandboxSpec) -> ServedSandbox:
        began = time.monotonic()
        try:
            local = await self.supervisor.create(spec)
        except BaseException as error:
            self._quotas.give_back(spec)
            if isinstance(error, SandboxStartFailed):
                logs.event("sandbox_failed", level=logging.ERROR, sandbox=name, reason=error.message)
            raise
        finally:
            del self._making[name]
        seconds = time.monotonic() - began
        served = ServedSandbox(
            name,
            spec,
            local,
            self.settings,
            check=self._check_open,
            on_begin=self.started,
            on_end=self._call_ended,
            on_bytes=self.metrics.moved,
        )
        if (previous := self._served.get(name)) is not None:
            self._bury(previous)
        self._departed.forget(name)
        self._served[name] = self._by_local[local] = served
        if local.gone is not None:
            self._bury(served)
        self.metrics.created(warm=local.warm, seconds=seconds, with_packages=bool(spec.requirements))
        logs.event(
            "sandbox_created",
            sandbox=name,
            tenant=spec.tenant,
            memory=spec.memory,
            warm=local.warm,
            duration_ms=round(seconds * 1000, 3),
            instance=local.id,
        )
        return served

    def find(self, name: str) -> ServedSandbox:
        """The one that lives; raises SandboxGone with the reason for one that did, else SandboxNotFound."""
        served = self._served.get(name)
        if served is None or served.gone is not None:
            served = self.find_any(name)
            raise SandboxGone(f"Sandbox {name} is gone: {served.gone}.")
        return served

    def find_any(self, name: str) -> ServedSandbox:
        """Also one that has ended, as long as it is remembered: its calls may still be read."""
        served = self._served.get(name) or self._departed.get(name)
        if served is None:
            raise SandboxNotFound(f"There is no sandbox {name}.")
        return served

    async def attach(self, ref: Ref) -> ServedSandbox:
        return self.find(ref.id)

    async def destroy(self, ref: Ref) -> None:
        if (making := self._making.get(ref.id)) is not None:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(making.task)
        served = self._served.get(ref.id)
        if served is not None:
            await self._end(served, _DELETED)

    async def sandboxes(self, tenant: str | None = None) -> list[SandboxInfo]:
        return [
            served.info()
            for served in self._served.values()
            if served.gone is None and tenant in (None, served.spec.tenant)
        ]

    async def _end(self, served: ServedSandbox, reason: str) -> None:
        began = time.monotonic()
        served.local.kill(reason)
        await served.local.destroy()
        self._bury(served)
        self.metrics.destroyed(time.monotonic() - began)

    def _local_gone(self, local: LocalSandbox) -> None:
        served = self._by_local.get(local)
        if served is not None:
            self._bury(served)

    def _bury(self, served: ServedSandbox) -> None:
        """Remember why it ended, and that its owner has one less; once."""
        if self._by_local.pop(served.local, None) is None:
            return
        if self._served.get(served.id) is served:
            del self._served[served.id]
        self._quotas.give_back(served.spec)
        self._departed.add(served)
        asked = served.gone == _DELETED or self.state == "stopping"
        if not asked:
            self.metrics.lost()
        logs.event(
            "sandbox_ended",
            level=logging.INFO if asked else logging.WARNING,
            sandbox=served.id,
            tenant=served.spec.tenant,
            reason=served.gone,
            lived_seconds=round(time.time() - served.created_at, 3),
        )

    async def _reap(self, idle_seconds: float) -> None:
        """End what nobody has used for so long."""
        while True:
            await asyncio.sleep(min(idle_seconds / 4, 60.0))
            for served in [*self._served.values()]:
                if served.idle_for() >= idle_seconds:
                    await self._end(served, f"nobody used it for {idle_seconds:g} s")

    # ---- calls ------------------------------------------------------------------------------------------------

    def started(self, execution: Execution, local: LocalSandbox) -> None:
        """Something runs that stopping has to wait for."""
        self._executing[execution] = local

    def _call_ended(self, served: ServedSandbox, call: Call, end: End) -> None:
        self.ended(call.execution, end, sandbox=served.id, call_id=call.id)
        served.touch()
        if call.cost > _WORTH_A_LOOK:
            self._make_room_for_output(served)

    def _make_room_for_output(self, newest: ServedSandbox) -> None:
        """Output is this process's memory, not the sandbox's: of those that were not used for longest it is let go."""
        excess = sum(served.calls.kept_bytes for served in self._served.values())
        excess -= self.settings.aggregate_output()
        if excess <= 0:
            return
        for served in sorted(self._served.values(), key=lambda served: served.last_used_at):
            if excess > 0 and served is not newest:
                excess -= served.calls.kept_bytes
                served.calls.forget_all()

    def ended(self, execution: Execution, end: End, *, sandbox: str, call_id: str) -> None:
        self._executing.pop(execution, None)
        self.metrics.ended(execution, end)
        logs.event(
            "execution_ended",
            sandbox=sandbox,
            execution=call_id,
            status=end.status,
            exit_code=end.exit_code,
            duration_ms=end.duration_ms,
        )

    async def execute_once(self, request: OneShotRequest) -> OneShotResponse:
        """Code in a sandbox of its own, which ends with it, also when the caller is cancelled."""
        self._check_open()
        uploads = one_shot.decoded(request, self.settings)
        spec = one_shot.spec_of(request)
        self._quotas.take(spec)
        work = asyncio.ensure_future(one_shot.run(self, request, spec, uploads))
        self._one_shots.add(work)
        work.add_done_callback(self._one_shots.discard)
        try:
            return await work
        except asyncio.CancelledError:
            if work.cancelled() and self.state == "stopping":
                raise Unreachable("The sandbox server stopped before the code had ended.") from None
            raise
        finally:
            self._quotas.give_back(spec)


def check_name(name: str, parameter: str) -> str:
    """What a caller may call a sandbox or an execution: it comes back in URLs, headers and logs."""
    if NAME.fullmatch(name) is None:
        raise RequestRefused(
            "A name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit.",
            param=parameter,
        )
    return name


def _check_same(its: SandboxSpec, wanted: SandboxSpec) -> None:
    if its != wanted:
        raise Conflict(
            "A sandbox of that name lives, with another specification; choose another name, or delete it."
        )
