"""Makes, hands out and ends sandboxes, within limits."""

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import socket
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from fumehood.protocol.sandbox.sandbox_errors import (
    InstallFailed,
    SandboxError,
    SandboxServerAtCapacity,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier, SandboxSpec
from fumehood.sandbox_server.egress.proxy_control import EgressController, NetworkGrant
from fumehood.sandbox_server.host import orphan_cleanup, resource_watchdog
from fumehood.sandbox_server.host.cgroups import open_join_fds
from fumehood.sandbox_server.host.disks import Disk
from fumehood.sandbox_server.host.host_resources import HostResources
from fumehood.sandbox_server.host.jail_launcher import ZygoteLaunchConfig
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import requirements
from fumehood.sandbox_server.packages.installer import NO_PROVISION, Installer, PackageProvision
from fumehood.sandbox_server.packages.installer_factory import open_installer, open_store
from fumehood.sandbox_server.packages.sandbox_packages import NO_INSTALL_JAIL, NO_INSTALLER
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection
from fumehood.sandbox_server.supervisor.zygote_manager import ZygoteManager, ZygoteStarter

logger = logging.getLogger(__name__)

_POOL_MEMORY: MemoryTier = "1g"
_MAX_REFILL_BACKOFF = 60.0
_ZYGOTE_EXIT_WAIT = 0.5  # seconds: of the end of a zygote one may hear after that of its sandboxes
# Seconds, so that the caller's first call need not share the processor with a replacement's start.
_REFILL_DELAY = 0.025


@dataclass(frozen=True, slots=True)
class _StartRequest:
    """What is to be made: where from, and with what from the beginning."""

    zygote_manager: ZygoteManager
    memory: MemoryTier = _POOL_MEMORY
    fresh_interpreter: bool = False
    on_disk: bool = False


class Supervisor:
    """Use as `async with Supervisor(settings) as supervisor:`; leaving ends every sandbox.

    create raises RequestRefused, AtCapacity, SandboxStartFailed, IsolationUnavailable; entering raises the last.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host_resources = HostResources(settings)
        self._shards: list[ZygoteManager] = []
        self._bare_zygote: ZygoteManager | None = None
        self._installer: Installer | None = None
        self._packages_unavailable = NO_INSTALLER
        self._live: dict[int, SandboxInstance] = {}
        self._pool: deque[SandboxInstance] = deque()
        self._starting = 0  # asked for, and neither alive nor failed yet
        self._refilling = 0  # those of them that are meant for the pool
        self._consecutive_refill_failures = 0  # in a row
        self.pending_creations = 0  # callers who asked for a sandbox and have none yet
        self.refills = self.refill_failures = 0  # of the pool, since it was opened
        self._refill_finished = asyncio.Event()
        self._refill_scheduled = False
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._pod_used = False
        self.on_sandbox_exit: Callable[[SandboxInstance], None] | None = (
            None  # told of every sandbox that has ended
        )
        self.egress = EgressController(settings)

    # ---- start and end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self) -> None:
        try:
            await self._prepare()
        except OSError as error:
            raise IsolationUnavailable(f"This host refuses: {error}.", "Run `fumehood doctor`.") from error

    async def _prepare(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a sandbox takes five descriptors here
        mode = self._settings.mode
        if mode == "unsafe-degraded":
            logger.warning(
                "Mode unsafe-degraded: no namespaces. All sandboxes share one kernel user on the host; only Landlock "
                "and the system-call filter hold the code."
            )
        await asyncio.to_thread(orphan_cleanup.remove_orphans, self._settings)
        self._host_resources.open()
        self.egress.start(
            None if self._host_resources.uid_range is None else self._host_resources.uid_range.proxy_uid
        )
        starter = ZygoteStarter(self._settings, self._host_resources)
        if starter.launch_config is not None:
            self._open_installer(starter.launch_config)
        count = 1 if mode == "pod" else max(1, self._settings.shards)
        self._shards = [self._new_zygote_manager(starter.start_preloaded) for _ in range(count)]
        if mode == "namespaces":
            self._bare_zygote = self._new_zygote_manager(starter.start_bare)
        await asyncio.gather(*(shard.get_or_start() for shard in self._shards))
        self._refill()
        if mode != "pod":
            self._run_in_background(resource_watchdog.watch_kernel_objects(self._claimed_sandboxes))
            if self._host_resources.cgroup_tree is not None:
                most = self._settings.total_memory_limit()
                self._run_in_background(
                    resource_watchdog.watch_memory(
                        self._claimed_sandboxes, self._host_resources.cgroup_tree, most
                    )
                )

    def _open_installer(self, launch: ZygoteLaunchConfig) -> None:
        """Get ready to install packages; where that cannot be, whoever asks for some is told why."""
        if not self._settings.packages:
            return
        if not launch.namespaces:
            self._packages_unavailable = NO_INSTALL_JAIL.format(mode=self._settings.mode)
            return
        users = self._host_resources.uid_range
        try:
            store = open_store(self._settings)
            self._installer = open_installer(
                self._settings,
                store,
                runtime=launch.runtime,
                uid=None if users is None else users.installer_uid,
                tree=self._host_resources.cgroup_tree,
            )
        except (OSError, PythonRuntimeUnavailable, IsolationUnavailable) as error:
            self._packages_unavailable = f"Packages cannot be installed on this server: {error}."
            logger.info("%s", self._packages_unavailable)
            return
        launch.layers_directory = store.layers_directory

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for sandbox in [*self._live.values()]:
            sandbox.kill("the supervisor is shutting down")
        if self._installer is not None:
            await self._installer.close()
        for nursery in self._zygote_managers():
            await nursery.close()
        for sandbox in [*self._live.values()]:
            sandbox.handle_exit(-1)
        await self.egress.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # of tasks that were done already, the loop has to hear as well
        await self._host_resources.close()

    @property
    def installer(self) -> Installer | None:
        """Who installs packages; without one, `no_packages` says why."""
        return self._installer

    @property
    def packages_unavailable(self) -> str:
        return self._packages_unavailable

    # ---- zygotes ----------------------------------------------------------------------------------------------

    def _new_zygote_manager(self, start: Callable[[], Awaitable[ZygoteConnection]]) -> ZygoteManager:
        return ZygoteManager(start, on_event=self._on_zygote_event, on_death=self._on_zygote_death)

    def _zygote_managers(self) -> list[ZygoteManager]:
        return self._shards if self._bare_zygote is None else [*self._shards, self._bare_zygote]

    def _choose_shard(self, tenant: str) -> ZygoteManager:
        """Tenants keep to their shard, so that few share a zygote; without one, where the fewest are."""
        if len(self._shards) == 1:
            return self._shards[0]
        if tenant:
            return self._shards[zlib.crc32(tenant.encode()) % len(self._shards)]
        return min(self._shards, key=self._count_sandboxes)

    def _count_sandboxes(self, zygote_manager: ZygoteManager) -> int:
        return sum(sandbox.zygote is zygote_manager.zygote for sandbox in self._live.values())

    def _on_zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        sandbox = self._live.get(event["number"])
        if sandbox is not None:
            sandbox.handle_zygote_event(event, fds)
        for fd in fds:
            os.close(fd)

    def _on_zygote_death(self, zygote_manager: ZygoteManager, zygote: ZygoteConnection) -> None:
        """Its sandboxes died with it, by the kernel's doing; another one follows, asked for or not."""
        lost = [sandbox for sandbox in self._live.values() if sandbox.zygote is zygote]
        said = zygote.last_log_line
        logger.error(
            "The zygote ended; %d sandboxes are lost with it.%s", len(lost), said and f" It said: {said}"
        )
        for sandbox in lost:
            sandbox.handle_exit(-1)
        if self._settings.mode != "pod":
            self._run_in_background(self._restart_zygote(zygote_manager))

    async def _restart_zygote(self, zygote_manager: ZygoteManager) -> None:
        """Whoever looks at /health, and sends nobody here until it is ok again, must not wait for a first request."""
        await asyncio.sleep(zygote_manager.backoff.delay())
        if zygote_manager is not self._bare_zygote:
            try:
                await zygote_manager.get_or_start()
            except SandboxError as error:
                logger.error("Another zygote could not be started: %s", error)
                self._run_in_background(self._restart_zygote(zygote_manager))
                return
        self._refill()

    @property
    def zygote(self) -> ZygoteConnection:
        """For `doctor`, tests and metrics: the zygote of the first shard."""
        zygote = self._shards[0].zygote if self._shards else None
        if zygote is None:
            raise IsolationUnavailable("No zygote runs.", "Enter the supervisor first.")
        return zygote

    @property
    def can_create(self) -> bool:
        """Whether a sandbox could be made now: where no zygote lives, another one has to start first."""
        return any(shard.zygote is not None and shard.zygote.is_alive for shard in self._shards)

    @property
    def zygote_restarts(self) -> int:
        return sum(max(shard.start_count - 1, 0) for shard in self._shards)

    # ---- sandboxes --------------------------------------------------------------------------------------------

    @property
    def live_count(self) -> int:
        """How many there are, those that wait for a caller included."""
        return len(self._live)

    @property
    def pool_available(self) -> int:
        return len(self._pool)

    def memory_current(self) -> int | None:
        """Bytes that all of them use, with what they were forked from; None where nobody counts."""
        try:
            return (
                None
                if self._host_resources.cgroup_tree is None
                else self._host_resources.cgroup_tree.memory_current()
            )
        except OSError:  # it is being taken down
            return None

    @property
    def sandboxes(self) -> dict[str, SandboxInstance]:
        """Those that were handed out and live."""
        parked = set(self._pool)
        return {sandbox.id: sandbox for sandbox in self._live.values() if sandbox not in parked}

    def _claimed_sandboxes(self) -> list[SandboxInstance]:
        return [*self.sandboxes.values()]

    async def create(self, spec: SandboxSpec | None = None) -> SandboxInstance:
        """A sandbox of one's own: a parked one with the limits asked for, or a new one."""
        self.pending_creations += 1
        try:
            return await self._create(spec or SandboxSpec())
        finally:
            self.pending_creations -= 1

    async def _create(self, spec: SandboxSpec) -> SandboxInstance:
        grant = await self.egress.grant(spec.network)
        provision = await self._install_requirements(spec)
        try:
            while True:
                sandbox = await self._claim_or_start(spec, provision)
                try:
                    return await self._configure_claimed(sandbox, spec, provision, grant)
                except SandboxStartFailed:
                    # One that died while it waited, or with its zygote: the next one.
                    if not (sandbox.warm or await sandbox.zygote.wait_ended(_ZYGOTE_EXIT_WAIT)):
                        raise
        finally:
            provision.close()

    async def _install_requirements(self, spec: SandboxSpec) -> PackageProvision:
        """The packages that a sandbox is to begin with; raises InstallFailed."""
        if not spec.requirements:
            return NO_PROVISION
        if self._installer is None:
            raise InstallFailed(self._packages_unavailable, param="requirements")
        wanted = requirements.parse_requirements(spec.requirements)
        return await self._installer.provide(
            wanted, self._installer.base.versions, may_replace=True, tenant=spec.tenant
        )

    async def _claim_or_start(self, spec: SandboxSpec, provision: PackageProvision) -> SandboxInstance:
        shard = self._choose_shard(spec.tenant)
        disks = self._host_resources.disks
        on_disk = disks is not None and await disks.has_disk_for(spec.memory)
        # One with nothing loaded, since what is loaded could not be replaced any more.
        bare = self._bare_zygote if provision.replaced and not spec.fresh_interpreter else None
        # A disk cannot be given to one that is finished: its mounts are locked, Landlock knows the old places.
        if not (spec.fresh_interpreter or on_disk or bare):
            parked = await self._claim_from_pool(shard)
            if parked is not None:
                parked.warm = True
                self._schedule_refill()
                return parked
        sandbox = await self._start_with_retry(
            _StartRequest(
                bare or shard, spec.memory, fresh_interpreter=spec.fresh_interpreter, on_disk=on_disk
            )
        )
        self._refill()
        return sandbox

    async def _start_with_retry(self, order: _StartRequest) -> SandboxInstance:
        """A new one; again whenever the zygote ended meanwhile, which was not this caller's doing."""
        while True:
            self._reserve_capacity()
            self._starting += 1
            zygote = order.zygote_manager.zygote
            try:
                return await self._start(order)
            except (SandboxStartFailed, IsolationUnavailable):
                if zygote is None or not await self._is_start_retryable(zygote, order.zygote_manager):
                    raise

    async def _is_start_retryable(self, zygote: ZygoteConnection, zygote_manager: ZygoteManager) -> bool:
        """Whether a zygote has ended and there is another one, or may be at once."""
        if self._settings.mode == "pod" or self._closing:
            return False
        if zygote_manager.zygote is zygote and not await zygote.wait_ended(_ZYGOTE_EXIT_WAIT):
            return False
        latest = zygote_manager.zygote
        return (latest is not None and latest.is_alive) or zygote_manager.backoff.delay() == 0

    async def _configure_claimed(
        self,
        sandbox: SandboxInstance,
        spec: SandboxSpec,
        provision: PackageProvision,
        grant: NetworkGrant | None,
    ) -> SandboxInstance:
        try:
            access = None if grant is None else self.egress.create_access(grant)
            await sandbox.claim(spec.memory, access)
            sandbox.packages.tenant = spec.tenant
            await sandbox.packages.attach_provision(provision.share())
        except BaseException:  # whoever asked may have gone away: nobody else would end it
            self._run_in_background(sandbox.destroy())
            raise
        return sandbox

    def _reserve_capacity(self) -> None:
        if self._settings.mode == "pod":
            if self._pod_used:
                raise SandboxServerAtCapacity(
                    "A pod holds one sandbox, once; the next one needs another pod."
                )
            self._pod_used = True
            return
        capacity = self._settings.capacity
        if len(self._live) + self._starting < capacity:
            return
        if not self._pool:
            raise SandboxServerAtCapacity(
                f"{capacity} sandboxes are alive, as many as are allowed; delete one or wait."
            )
        self._run_in_background(self._pool.popleft().destroy())

    # ---- the pool ---------------------------------------------------------------------------------------------

    async def _claim_from_pool(self, shard: ZygoteManager) -> SandboxInstance | None:
        """One of this shard that is ready; at capacity also one that is just being made for the pool."""
        while True:
            for candidate in [*self._pool]:
                if candidate.end_reason is not None:
                    self._pool.remove(candidate)
                elif candidate.zygote is shard.zygote:
                    self._pool.remove(candidate)
                    return candidate
            if not self._refilling or len(self._live) + self._starting < self._settings.capacity:
                return None
            self._refill_finished.clear()
            await self._refill_finished.wait()

    def _schedule_refill(self) -> None:
        """Not at once, unless the pool is low."""
        if len(self._pool) < self._settings.pool // 2:
            self._refill()
        elif not self._refill_scheduled:
            self._refill_scheduled = True
            self._run_in_background(self._refill_after(_REFILL_DELAY))

    async def _refill_after(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self._refill()

    def _refill(self) -> None:
        """Bring the pool back to its size behind the callers' backs."""
        self._refill_scheduled = False
        if self._settings.mode == "pod" or self._closing:
            return
        wanted = self._settings.pool - len(self._pool) - self._refilling
        room = self._settings.capacity - len(self._live) - self._starting
        for number in range(min(wanted, room)):
            self._refilling += 1
            self._starting += 1
            self._run_in_background(self._add_to_pool(self._choose_shard_to_refill(number)))

    def _choose_shard_to_refill(self, number: int) -> ZygoteManager:
        """The shard that is to get the next one of several that are being made."""

        def parked(shard: ZygoteManager) -> int:
            return sum(sandbox.zygote is shard.zygote for sandbox in self._pool)

        return sorted(self._shards, key=parked)[number % len(self._shards)]

    async def _add_to_pool(self, shard: ZygoteManager) -> None:
        try:
            sandbox = await self._start(_StartRequest(shard))
            if sandbox.end_reason is not None:  # it ended between being ready and our hearing of it
                raise SandboxStartFailed(f"The sandbox ended: {sandbox.end_reason}")
            self._pool.append(sandbox)
            self.refills += 1
            self._consecutive_refill_failures = 0
        except SandboxError as error:
            logger.error("A sandbox for the pool could not be made: %s", error)
            self.refill_failures += 1
            self._consecutive_refill_failures += 1
            pause = min(2.0 ** (self._consecutive_refill_failures - 1), _MAX_REFILL_BACKOFF)
            self._run_in_background(self._refill_after(max(pause, shard.backoff.delay())))
        finally:
            self._refilling -= 1
            self._refill_finished.set()

    # ---- one sandbox ------------------------------------------------------------------------------------------

    async def _start(self, order: _StartRequest) -> SandboxInstance:
        """Make one; the caller has counted it in `_starting`."""
        disk = None
        disks = self._host_resources.disks
        try:
            if order.on_disk and disks is not None:
                disk = await disks.create(order.memory)
            zygote = await order.zygote_manager.get_or_start()
            if self._closing:
                raise SandboxStartFailed("The supervisor is shutting down.")
            sandbox = self._fork(zygote, next(self._numbers), order, disk)
            disk = None  # now it is the sandbox's
        except OSError as error:
            raise SandboxStartFailed(f"The sandbox could not be made: {error}.") from error
        finally:
            self._starting -= 1
            if disk is not None and disks is not None:
                await disks.release(disk)
        try:
            await sandbox.wait_ready(self._settings.start_timeout)
        except BaseException:
            self._run_in_background(sandbox.destroy())
            raise
        return sandbox

    def _fork(
        self, zygote: ZygoteConnection, number: int, order: _StartRequest, disk: Disk | None
    ) -> SandboxInstance:
        """Ask the zygote for a sandbox; on OSError (no descriptors, no cgroup) nothing is left of it."""
        with contextlib.ExitStack() as undo:
            place = self._host_resources.allocate(number, order.memory, disk, undo)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                undo.callback(mine.close)
                sandbox = SandboxInstance(
                    number,
                    zygote,
                    mine,
                    place,
                    self._settings,
                    self._on_sandbox_exit,
                    self._enforce_output_limit,
                    self._numbers.__next__,
                )
                undo.callback(sandbox.close_connections)
                sandbox.offer_packages(self._installer, unavailable=self._packages_unavailable)
                plan = self._host_resources.build_plan(
                    place, memory=order.memory, fresh_interpreter=order.fresh_interpreter
                )
                told = (
                    plan.encode_overrides() if self._settings.mode == "namespaces" else plan.encode().encode()
                )
                sandbox.send_plan(told, order.memory)
                with open_join_fds(place.cgroup) as join:
                    zygote.send_request({"op": "spawn", "number": number}, [theirs.fileno(), *join])
            undo.pop_all()
        self._live[number] = sandbox
        return sandbox

    def _on_sandbox_exit(self, sandbox: SandboxInstance) -> None:
        self._live.pop(sandbox.number, None)
        with contextlib.suppress(ValueError):
            self._pool.remove(sandbox)
        sandbox.close_connections()
        if self.on_sandbox_exit is not None:
            self.on_sandbox_exit(sandbox)
        self._run_in_background(self._host_resources.release(sandbox.resources), even_when_closing=True)

    def _enforce_output_limit(self) -> None:
        """Until a call ends nothing of its output can be let go, and it is memory of this process."""
        if (
            sum(sandbox.buffered_output_bytes for sandbox in self._live.values())
            > self._settings.total_output_limit()
        ):
            greedy = max(self._live.values(), key=lambda sandbox: sandbox.buffered_output_bytes)
            greedy.kill(
                "the output of all calls that run was more than the server keeps, and it had most of it"
            )

    def _run_in_background(self, coroutine: Any, *, even_when_closing: bool = False) -> None:
        if self._closing and not even_when_closing:
            coroutine.close()
            return
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
