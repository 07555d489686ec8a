"""Starts zygotes, and restarts one that ended."""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fumehood.protocol.sandbox.sandbox_errors import SandboxStartFailed
from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.host.jail_launcher import ZygoteLaunchConfig
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable, discover_runtime
from fumehood.sandbox_server.host.resource_allocator import ResourceAllocator
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import bytecode_cache
from fumehood.sandbox_server.packages.installer_factory import packages_directory
from fumehood.sandbox_server.restart_backoff import RestartBackoff
from fumehood.sandbox_server.seccomp.syscall_policy import HELPER, POD_NETWORK, POLICY_OF_MODE
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.zygote_connection import SeccompPrograms, ZygoteConnection

logger = logging.getLogger(__name__)


class ManagedZygote:
    """Keeps one zygote running; calls `on_death` when it ends, and its sandboxes with it."""

    def __init__(
        self,
        start: Callable[[], Awaitable[ZygoteConnection]],
        *,
        on_event: Callable[[dict[str, Any], list[int]], None],
        on_death: Callable[["ManagedZygote", ZygoteConnection], None],
    ) -> None:
        self._start = start
        self._on_event = on_event
        self._on_death = on_death
        self._starting: asyncio.Task[ZygoteConnection] | None = None
        self._closing = False
        self.backoff = RestartBackoff()
        self.start_count = 0
        self.zygote: ZygoteConnection | None = None  # the last one, alive or not

    async def get_or_start(self) -> ZygoteConnection:
        """The live zygote, started if there is none; raises SandboxStartFailed, IsolationUnavailable.

        Cancelling a caller does not cancel the start: the next caller waits for the same one.
        """
        if self._starting is None:
            self._check_open()
            if self.zygote is not None and self.zygote.is_alive:
                return self.zygote
            self._starting = asyncio.create_task(self._start_after_backoff(), name="zygote: start")
            self._starting.add_done_callback(self._on_start_done)
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # by `close`, not the waiting caller
                self._check_open()
            raise

    def _on_start_done(self, starting: asyncio.Task[ZygoteConnection]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # retrieved, even if nobody waits; `backoff` has counted it

    def _check_open(self) -> None:
        if self._closing:
            raise SandboxStartFailed("The supervisor is shutting down.")

    async def _start_after_backoff(self) -> ZygoteConnection:
        if (delay := self.backoff.delay()) > 0:
            raise SandboxStartFailed(
                f"The zygote ended {self.backoff.recent_failures} times within a minute; the next start is in "
                f"{math.ceil(delay)} s. The server's log has the cause."
            )
        if self.zygote is not None:
            await self.zygote.close()
        return await self._start_and_watch()

    async def _start_and_watch(self) -> ZygoteConnection:
        try:
            zygote = self.zygote = await self._start()
        except IsolationUnavailable:
            self.backoff.record_failure()
            raise
        self.start_count += 1
        if not zygote.is_alive:  # before `on_death` was set
            self.backoff.record_failure()
            raise SandboxStartFailed("The zygote ended at once.")
        zygote.on_event = self._on_event
        zygote.on_death = lambda: self._on_zygote_death(zygote)
        return zygote

    def _on_zygote_death(self, zygote: ZygoteConnection) -> None:
        self.backoff.record_failure()
        self._on_death(self, zygote)

    async def close(self) -> None:
        """End the zygote, also one that is starting, and its sandboxes."""
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.zygote is not None:
            await self.zygote.close()


class ZygoteStarter:
    """Starts zygotes as the isolation mode requires."""

    def __init__(self, settings: SandboxServerSettings, resource_allocator: ResourceAllocator) -> None:
        self._settings = settings
        self._resource_allocator = resource_allocator
        self.launch_config = None if settings.mode == "pod" else self._build_launch_config()

    def _build_launch_config(self) -> ZygoteLaunchConfig:
        settings, resources = self._settings, self._resource_allocator
        namespaces = settings.mode == "namespaces"
        try:
            runtime = discover_runtime()
        except PythonRuntimeUnavailable as error:
            raise IsolationUnavailable(f"A part is missing: {error}.", "Run `fumehood doctor`.") from error
        environ: dict[str, str] = {}
        if resources.scratch_directory is not None:
            environ["MPLCONFIGDIR"] = f"{resources.scratch_directory}/cache"
            resources.create_directory(environ["MPLCONFIGDIR"])
        return ZygoteLaunchConfig(
            environ=environ,
            runtime=runtime,
            namespaces=namespaces,
            seccomp_program=self._load_seccomp_program(POLICY_OF_MODE[settings.mode]),
            helper_seccomp_program=self._load_seccomp_program(HELPER.name),
            preload=settings.preload,
            optimizes_forks=settings.capacity > 1,
            uid_range=resources.uid_range,
            cgroup=resources.zygote_cgroup,
            timeout=settings.start_timeout,
        )

    def _load_seccomp_program(self, policy: str) -> bytes:
        try:
            return seccomp.load_program(policy, os.uname().machine)
        except RuntimeError as error:
            raise IsolationUnavailable(f"{error}.", "Use x86_64 or aarch64.") from error

    async def start_preloaded(self) -> ZygoteConnection:
        """Start a zygote with the packages of `preload` imported."""
        if self.launch_config is None:
            return await self._connect_to_guest()
        zygote = await ZygoteConnection.launch(await self._with_bytecode(self.launch_config))
        if self._settings.mode == "unsafe-degraded" and not zygote.info.landlock:
            await zygote.close()
            raise IsolationUnavailable(
                "This kernel has no Landlock, which alone protects files in mode unsafe-degraded.",
                "Use Linux 5.13 or later with Landlock enabled (lsm=landlock,…), or another mode.",
            )
        if self._resource_allocator.scratch_directory is not None and os.geteuid() == 0:
            _chown_to_root(f"{self._resource_allocator.scratch_directory}/cache")
        return zygote

    async def start_bare(self) -> ZygoteConnection:
        """Start a zygote with nothing imported, for sandboxes with other versions of preloaded packages."""
        if self.launch_config is None:
            raise SandboxStartFailed("A pod has one zygote only.")
        return await ZygoteConnection.launch(
            replace(await self._with_bytecode(self.launch_config), preload=())
        )

    async def _with_bytecode(self, launch: ZygoteLaunchConfig) -> ZygoteLaunchConfig:
        """Add bytecode for packages that have none; without it imports are slower."""
        if not launch.namespaces:
            return launch
        directory = packages_directory(self._settings)
        try:
            tree = await asyncio.to_thread(bytecode_cache.prepare_bytecode, launch.runtime, directory)
        except bytecode_cache.BytecodeUnavailable as error:
            logger.warning("No bytecode for the packages of sandboxes; imports are slow: %s.", error)
            tree = None
        return replace(launch, bytecode=tree)

    async def _connect_to_guest(self) -> ZygoteConnection:
        if self._settings.guest_socket is None:
            raise IsolationUnavailable(
                "Mode pod needs a container that runs the code.",
                "Set guest_socket to the socket that it listens on: `python -m fumehood.sandbox_server.inside."
                "pod_entrypoint PATH`.",
            )
        return await ZygoteConnection.connect(
            self._settings.guest_socket,
            SeccompPrograms(
                self._load_seccomp_program(POLICY_OF_MODE[self._settings.mode]),
                self._load_seccomp_program(HELPER.name),
                self._load_seccomp_program(POD_NETWORK.name),
            ),
            self._settings.preload,
            self._settings.start_timeout,
        )


def _chown_to_root(tree: str) -> None:
    """Protect the font list that the zygote has written from sandboxes, which have the same uid."""
    for directory, _, names in os.walk(tree):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            os.chown(path, 0, 0)
            os.chmod(path, 0o755)  # noqa: S103 - sandboxes read it
