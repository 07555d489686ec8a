"""Creates, pools and ends the sandboxes of one host, within its capacity."""

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
from fumehood.sandbox_server.egress.proxy_control import EgressController, SandboxNetworkConfig
from fumehood.sandbox_server.host import host_exhaustion_watchdog, orphan_cleanup
from fumehood.sandbox_server.host.cgroups import open_join_fds
from fumehood.sandbox_server.host.disks import Disk
from fumehood.sandbox_server.host.jail_launcher import ZygoteLaunchConfig
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable
from fumehood.sandbox_server.host.resource_allocator import ResourceAllocator
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import requirements
from fumehood.sandbox_server.packages.installer import (
    NO_PROVISION,
    InstallResult,
    PackageInstaller,
    ProgressCallback,
)
from fumehood.sandbox_server.packages.installer_factory import open_installer, open_store
from fumehood.sandbox_server.packages.sandbox_package_manager import (
    NO_EGRESS_CONTAINER,
    NO_INSTALL_JAIL,
    NO_INSTALLER,
)
from fumehood.sandbox_server.pod.egress_connection import EgressConnection
from fumehood.sandbox_server.pod.pod_use import PodUse
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.managed_zygote import ManagedZygote, ZygoteStarter
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

logger = logging.getLogger(__name__)

_POOL_MEMORY: MemoryTier = "1g"
_MAX_REFILL_BACKOFF = 60.0
_ZYGOTE_EXIT_WAIT = 0.5  # seconds: the exit of a sandbox may be reported before that of its zygote
# Seconds. The caller's first execution should not share the CPU with the start of a replacement.
_REFILL_DELAY = 0.025


def _ignore_progress(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _StartRequest:
    """Which zygote to fork from, and what the sandbox starts with."""

    managed_zygote: ManagedZygote
    memory: MemoryTier = _POOL_MEMORY
    fresh_interpreter: bool = False
    on_disk: bool = False


class Supervisor:
    """Use as `async with Supervisor(settings) as supervisor:`; leaving ends every sandbox.

    Entering raises IsolationUnavailable.
    """

    def __init__(self, settings: SandboxServerSettings) -> None:
        self._settings = settings
        self._resource_allocator = ResourceAllocator(settings)
        self._shards: list[ManagedZygote] = []
        self._bare_zygote: ManagedZygote | None = None
        self.installer: PackageInstaller | None = None  # None if packages cannot be installed
        self.packages_unavailable = NO_INSTALLER  # why, then
        self._live: dict[int, SandboxInstance] = {}
        self._pool: deque[SandboxInstance] = deque()
        self._starting = 0  # neither live nor failed yet
        self._refilling = 0  # of these, the ones for the pool
        self._consecutive_refill_failures = 0
        self.pending_creations = 0  # callers waiting in `create`
        self.refills = self.refill_failures = 0  # of the pool, since the start
        self._refill_finished = asyncio.Event()
        self._refill_scheduled = False
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._egress_container: EgressConnection | None = None
        self.pod = PodUse(settings) if settings.mode == "pod" else None
        self.on_sandbox_exit: Callable[[SandboxInstance], None] | None = None
        self.on_pod_end: Callable[[], None] | None = None  # may be called more than once
        self.egress = EgressController(settings)

    # ---- start and end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise IsolationUnavailable(
                    f"This host refuses: {error}.", "Run `fumehood doctor`."
                ) from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self) -> None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # five descriptors per sandbox
        mode = self._settings.mode
        if mode == "unsafe-degraded":
            logger.warning(
                "Mode unsafe-degraded: no namespaces. All sandboxes share one kernel user on the host; only Landlock "
                "and the seccomp filter isolate the code."
            )
        if self.pod is not None:
            self.pod.open()
            await self._connect_egress_container()
        await asyncio.to_thread(orphan_cleanup.remove_orphans, self._settings)
        self._resource_allocator.open()
        self.egress.start(
            None
            if self._resource_allocator.uid_range is None
            else self._resource_allocator.uid_range.proxy_uid
        )
        starter = ZygoteStarter(self._settings, self._resource_allocator)
        if starter.launch_config is not None:
            self._open_installer(starter.launch_config)
        count = 1 if mode == "pod" else max(1, self._settings.shards)
        self._shards = [self._new_zygote_manager(starter.start_preloaded) for _ in range(count)]
        if mode == "namespaces":
            self._bare_zygote = self._new_zygote_manager(starter.start_bare)
        await asyncio.gather(*(shard.get_or_start() for shard in self._shards))
        if self.pod is not None:
            self.pod.choose_memory(self.zygote.info.memory_limit)
        self._refill()
        if mode != "pod":
            self._run_in_background(host_exhaustion_watchdog.watch_kernel_objects(self.claimed_sandboxes))
            if self._resource_allocator.cgroup_tree is not None:
                self._run_in_background(
                    host_exhaustion_watchdog.watch_memory(
                        self.claimed_sandboxes,
                        self._resource_allocator.cgroup_tree,
                        self._settings.total_memory_limit(),
                    )
                )

    async def _connect_egress_container(self) -> None:
        """Mode `pod`: let another container install packages and run the egress proxy, if there is one."""
        self.packages_unavailable = NO_EGRESS_CONTAINER if self._settings.packages else NO_INSTALLER
        if self._settings.egress_socket is None:
            return
        connection = await EgressConnection.connect(
            self._settings.egress_socket, install_timeout=self._settings.install_timeout
        )
        self._egress_container = connection
        self.egress.start_proxy = connection.start_proxy
        if self._settings.packages and not connection.problem:
            self.installer = connection
        elif connection.problem:
            self.packages_unavailable = f"Packages cannot be installed in this pod: {connection.problem}."

    def _open_installer(self, launch: ZygoteLaunchConfig) -> None:
        """Prepare package installs; if that fails, requests for packages are refused with the reason."""
        if not self._settings.packages:
            return
        if not launch.namespaces:
            self.packages_unavailable = NO_INSTALL_JAIL.format(mode=self._settings.mode)
            return
        users = self._resource_allocator.uid_range
        try:
            store = open_store(self._settings)
            self.installer = open_installer(
                self._settings,
                store,
                runtime=launch.runtime,
                uid=None if users is None else users.installer_uid,
                tree=self._resource_allocator.cgroup_tree,
            )
        except (OSError, PythonRuntimeUnavailable, IsolationUnavailable) as error:
            self.packages_unavailable = f"Packages cannot be installed on this server: {error}."
            logger.info("%s", self.packages_unavailable)
            return
        launch.layers_directory = store.layers_directory

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for sandbox in [*self._live.values()]:
            sandbox.kill("the supervisor is shutting down")
        if self.installer is not None:
            await self.installer.close()
        if self._egress_container is not None:
            await self._egress_container.close()
        for managed_zygote in self._zygote_managers():
            await managed_zygote.close()
        for sandbox in [*self._live.values()]:
            sandbox.handle_exit(-1)
        await self.egress.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # let the done callbacks of finished tasks run
        await self._resource_allocator.close()

    # ---- zygotes ----------------------------------------------------------------------------------------------

    def _new_zygote_manager(self, start: Callable[[], Awaitable[ZygoteConnection]]) -> ManagedZygote:
        return ManagedZygote(start, on_event=self._on_zygote_event, on_death=self._on_zygote_death)

    def _zygote_managers(self) -> list[ManagedZygote]:
        return self._shards if self._bare_zygote is None else [*self._shards, self._bare_zygote]

    def _choose_shard(self, tenant: str) -> ManagedZygote:
        """A tenant always gets the same shard, so that few share a zygote; without a tenant, the emptiest."""
        if len(self._shards) == 1:
            return self._shards[0]
        if tenant:
            return self._shards[zlib.crc32(tenant.encode()) % len(self._shards)]
        return min(self._shards, key=self._count_sandboxes)

    def _count_sandboxes(self, managed_zygote: ManagedZygote) -> int:
        return sum(sandbox.zygote is managed_zygote.zygote for sandbox in self._live.values())

    def _on_zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        sandbox = self._live.get(event["number"])
        if sandbox is not None:
            sandbox.handle_zygote_event(event, fds)
        for fd in fds:
            os.close(fd)

    def _on_zygote_death(self, managed_zygote: ManagedZygote, zygote: ZygoteConnection) -> None:
        """Report its sandboxes as lost, since the kernel killed them with it, and start another zygote."""
        lost = [sandbox for sandbox in self._live.values() if sandbox.zygote is zygote]
        last_line = zygote.last_log_line
        logger.error(
            "The zygote ended; %d sandboxes are lost with it.%s",
            len(lost),
            last_line and f" Its last log line: {last_line}",
        )
        for sandbox in lost:
            sandbox.handle_exit(-1)
        if self._settings.mode != "pod":
            self._run_in_background(self._restart_zygote(managed_zygote))
        elif self.on_pod_end is not None:
            self.on_pod_end()

    async def _restart_zygote(self, managed_zygote: ManagedZygote) -> None:
        """Restart without waiting for a request: a load balancer sends none until /health is ok again."""
        await asyncio.sleep(managed_zygote.backoff.delay())
        if managed_zygote is not self._bare_zygote:
            try:
                await managed_zygote.get_or_start()
            except SandboxError as error:
                logger.error("Restarting the zygote failed: %s", error)
                self._run_in_background(self._restart_zygote(managed_zygote))
                return
        self._refill()

    @property
    def zygote(self) -> ZygoteConnection:
        """The zygote of the first shard, for `doctor` and tests."""
        zygote = self._shards[0].zygote if self._shards else None
        if zygote is None:
            raise IsolationUnavailable("No zygote runs.", "Enter the supervisor first.")
        return zygote

    @property
    def can_create(self) -> bool:
        """Whether a zygote is alive to fork a sandbox from."""
        return any(shard.zygote is not None and shard.zygote.is_alive for shard in self._shards)

    @property
    def has_ended(self) -> bool:
        """Mode `pod`: whether its sandbox has ended, or the container of the code before it was used."""
        if self.pod is None or not self._shards:
            return False
        is_over = self.pod.is_used and not self._live and not self._starting
        return is_over or (self._shards[0].zygote is not None and not self._shards[0].zygote.is_alive)

    @property
    def zygote_restarts(self) -> int:
        return sum(max(shard.start_count - 1, 0) for shard in self._shards)

    # ---- sandboxes --------------------------------------------------------------------------------------------

    @property
    def live_count(self) -> int:
        """Number of sandboxes, pooled ones included."""
        return len(self._live)

    @property
    def pool_available(self) -> int:
        return len(self._pool)

    def memory_current(self) -> int | None:
        """Bytes used by all sandboxes and zygotes; None without cgroups."""
        try:
            return (
                None
                if self._resource_allocator.cgroup_tree is None
                else self._resource_allocator.cgroup_tree.memory_current()
            )
        except OSError:  # the cgroup is being removed
            return None

    def claimed_sandboxes(self) -> list[SandboxInstance]:
        pooled = set(self._pool)
        return [sandbox for sandbox in self._live.values() if sandbox not in pooled]

    async def create(
        self, spec: SandboxSpec | None = None, on_progress: ProgressCallback = _ignore_progress
    ) -> SandboxInstance:
        """A sandbox of the caller's own, claimed from the pool or started.

        on_progress: called with a line of text while packages are installed.
        Raises InvalidSandboxRequest, InstallFailed, SandboxServerAtCapacity, SandboxStartFailed, IsolationUnavailable.
        """
        self.pending_creations += 1
        try:
            return await self._create(spec or SandboxSpec(), on_progress)
        finally:
            self.pending_creations -= 1

    async def _create(self, spec: SandboxSpec, on_progress: ProgressCallback) -> SandboxInstance:
        if self.pod is not None:
            self.pod.check_spec(spec, has_network=self.zygote.info.has_network)
        grant = await self.egress.grant(spec.network)
        provision = await self._install_requirements(spec, on_progress)
        try:
            while True:
                sandbox = await self._claim_or_start(spec, provision)
                try:
                    return await self._configure_claimed(sandbox, spec, provision, grant)
                except SandboxStartFailed:
                    # It died in the pool or with its zygote: try the next one.
                    if not (sandbox.warm or await sandbox.zygote.wait_ended(_ZYGOTE_EXIT_WAIT)):
                        raise
        finally:
            provision.close()

    async def _install_requirements(self, spec: SandboxSpec, on_progress: ProgressCallback) -> InstallResult:
        """Install the packages that the sandbox starts with; raises InstallFailed."""
        if not spec.requirements:
            return NO_PROVISION
        if self.installer is None:
            raise InstallFailed(self.packages_unavailable, param="requirements")
        wanted = requirements.parse_requirements(spec.requirements)
        present = self.installer.versions
        if missing := requirements.find_unmet(wanted, present):
            on_progress(f"installing {requirements.summarise(missing)}")
        provision = await self.installer.provide(wanted, present, may_replace=True, tenant=spec.tenant)
        if provision.pins:
            on_progress(f"installed {requirements.summarise(provision.describe_pins())}")
        return provision

    async def _claim_or_start(self, spec: SandboxSpec, provision: InstallResult) -> SandboxInstance:
        shard = self._choose_shard(spec.tenant)
        disks = self._resource_allocator.disks
        on_disk = disks is not None and await disks.has_disk_for(spec.memory)
        # Modules that are already loaded cannot be replaced by other versions.
        bare = self._bare_zygote if provision.replaced and not spec.fresh_interpreter else None
        fresh = spec.fresh_interpreter or (self.pod is not None and bool(provision.replaced))
        # A pooled sandbox cannot get a disk: its mounts are locked, and Landlock knows the old ones.
        if not (fresh or on_disk or bare):
            pooled = await self._claim_from_pool(shard)
            if pooled is not None:
                pooled.warm = True
                self._schedule_refill()
                return pooled
        sandbox = await self._start_with_retry(
            _StartRequest(bare or shard, spec.memory, fresh_interpreter=fresh, on_disk=on_disk)
        )
        self._refill()
        return sandbox

    async def _start_with_retry(self, request: _StartRequest) -> SandboxInstance:
        """Start a sandbox; retry when the zygote ended meanwhile, which the caller did not cause."""
        while True:
            self._reserve_capacity()
            self._starting += 1
            zygote = request.managed_zygote.zygote
            try:
                return await self._start(request)
            except (SandboxStartFailed, IsolationUnavailable):
                if zygote is None or not await self._is_start_retryable(zygote, request.managed_zygote):
                    raise

    async def _is_start_retryable(self, zygote: ZygoteConnection, managed_zygote: ManagedZygote) -> bool:
        """Whether the zygote has ended and another one runs or may start at once."""
        if self._settings.mode == "pod" or self._closing:
            return False
        if managed_zygote.zygote is zygote and not await zygote.wait_ended(_ZYGOTE_EXIT_WAIT):
            return False
        latest = managed_zygote.zygote
        return (latest is not None and latest.is_alive) or managed_zygote.backoff.delay() == 0

    async def _configure_claimed(
        self,
        sandbox: SandboxInstance,
        spec: SandboxSpec,
        provision: InstallResult,
        grant: SandboxNetworkConfig | None,
    ) -> SandboxInstance:
        try:
            access = None if grant is None else self.egress.create_access(grant)
            await sandbox.claim(spec, access)
            await sandbox.packages.attach_provision(provision.share())
        except BaseException:  # also when the caller is cancelled: nobody else would end it
            self._run_in_background(sandbox.destroy())
            raise
        return sandbox

    def _reserve_capacity(self) -> None:
        if self.pod is not None:
            self.pod.reserve()
            return
        capacity = self._settings.capacity
        if len(self._live) + self._starting < capacity:
            return
        if not self._pool:
            raise SandboxServerAtCapacity(
                f"Capacity reached: {capacity} sandboxes are alive. Delete one, or retry later."
            )
        self._run_in_background(self._pool.popleft().destroy())

    # ---- the pool ---------------------------------------------------------------------------------------------

    async def _claim_from_pool(self, shard: ManagedZygote) -> SandboxInstance | None:
        """A pooled sandbox of this shard; at capacity, wait for one that is being started for the pool."""
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
        """Refill after a short delay, or at once if the pool is low."""
        if len(self._pool) < self._settings.pool // 2:
            self._refill()
        elif not self._refill_scheduled:
            self._refill_scheduled = True
            self._run_in_background(self._refill_after(_REFILL_DELAY))

    async def _refill_after(self, delay: float) -> None:
        await asyncio.sleep(delay)
        self._refill()

    def _refill(self) -> None:
        """Start sandboxes in the background until the pool has its size."""
        self._refill_scheduled = False
        if self._settings.mode == "pod" or self._closing:
            return
        wanted = self._settings.pool - len(self._pool) - self._refilling
        free = self._settings.capacity - len(self._live) - self._starting
        for number in range(min(wanted, free)):
            self._refilling += 1
            self._starting += 1
            self._run_in_background(self._add_to_pool(self._choose_shard_to_refill(number)))

    def _choose_shard_to_refill(self, number: int) -> ManagedZygote:
        """The shard that gets the `number`th of the sandboxes being started: the one with the fewest first."""

        def count_pooled(shard: ManagedZygote) -> int:
            return sum(sandbox.zygote is shard.zygote for sandbox in self._pool)

        return sorted(self._shards, key=count_pooled)[number % len(self._shards)]

    async def _add_to_pool(self, shard: ManagedZygote) -> None:
        try:
            sandbox = await self._start(_StartRequest(shard))
            if sandbox.end_reason is not None:  # it ended right after it was ready
                raise SandboxStartFailed(f"The sandbox ended: {sandbox.end_reason}")
            self._pool.append(sandbox)
            self.refills += 1
            self._consecutive_refill_failures = 0
        except SandboxError as error:
            logger.error("Starting a sandbox for the pool failed: %s", error)
            self.refill_failures += 1
            self._consecutive_refill_failures += 1
            delay = min(2.0 ** (self._consecutive_refill_failures - 1), _MAX_REFILL_BACKOFF)
            self._run_in_background(self._refill_after(max(delay, shard.backoff.delay())))
        finally:
            self._refilling -= 1
            self._refill_finished.set()

    # ---- one sandbox ------------------------------------------------------------------------------------------

    async def _start(self, request: _StartRequest) -> SandboxInstance:
        """Start a sandbox that the caller has counted in `_starting`."""
        disk = None
        disks = self._resource_allocator.disks
        try:
            if request.on_disk and disks is not None:
                disk = await disks.create(request.memory)
            zygote = await request.managed_zygote.get_or_start()
            if self._closing:
                raise SandboxStartFailed("The supervisor is shutting down.")
            sandbox = self._fork(zygote, next(self._numbers), request, disk)
            disk = None  # the sandbox owns it now
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
        self, zygote: ZygoteConnection, number: int, request: _StartRequest, disk: Disk | None
    ) -> SandboxInstance:
        """Ask the zygote for a sandbox; on OSError (no descriptors, no cgroup) everything is undone."""
        with contextlib.ExitStack() as undo:
            resources = self._resource_allocator.allocate(number, request.memory, disk, undo)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                undo.callback(mine.close)
                sandbox = SandboxInstance(
                    number,
                    zygote,
                    mine,
                    resources,
                    self._settings,
                    self._on_sandbox_exit,
                    self._enforce_output_limit,
                    self._numbers.__next__,
                )
                undo.callback(sandbox.close_connections)
                sandbox.offer_packages(
                    self.installer,
                    unavailable=self.packages_unavailable,
                    attach=None if self._egress_container is None else self._egress_container.attach_layers,
                )
                plan = self._resource_allocator.build_plan(
                    resources, memory=request.memory, fresh_interpreter=request.fresh_interpreter
                )
                sandbox.send_plan(plan.encode(), request.memory)
                with open_join_fds(resources.cgroup) as join:
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
        if self.pod is not None and self.on_pod_end is not None:
            self.on_pod_end()
        self._run_in_background(self._resource_allocator.release(sandbox.resources), even_when_closing=True)

    def _enforce_output_limit(self) -> None:
        """Kill the sandbox with most output if all running executions hold too much of this process's memory."""
        if (
            sum(sandbox.buffered_output_bytes for sandbox in self._live.values())
            > self._settings.total_output_limit()
        ):
            largest = max(self._live.values(), key=lambda sandbox: sandbox.buffered_output_bytes)
            largest.kill(
                "all running executions together exceeded the server's output limit, and it had most output"
            )

    def _run_in_background(self, coroutine: Any, *, even_when_closing: bool = False) -> None:
        if self._closing and not even_when_closing:
            coroutine.close()
            return
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
