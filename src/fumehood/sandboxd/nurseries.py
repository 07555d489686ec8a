"""Keeps a zygote running, and follows one that ended by another; imports only `fumehood.protocol` and siblings."""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fumehood.protocol.sandbox_errors import SandboxStartFailed
from fumehood.sandboxd import bytecode, seccomp
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.launching import Launch
from fumehood.sandboxd.packages.opening import packages_directory
from fumehood.sandboxd.places import Places
from fumehood.sandboxd.restarts import Restarts
from fumehood.sandboxd.runtime import RuntimeUnavailable, discover_runtime
from fumehood.sandboxd.seccomp.policy import HELPER, POLICY_OF_MODE
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.zygotes import Zygote

logger = logging.getLogger(__name__)


class Nursery:
    """Where sandboxes of one kind come from. `on_death` hears of each zygote that ended, with its sandboxes."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Zygote]],
        *,
        on_event: Callable[[dict[str, Any], list[int]], None],
        on_death: Callable[["Nursery", Zygote], None],
    ) -> None:
        self._start = start
        self._on_event = on_event
        self._on_death = on_death
        self._starting: asyncio.Task[Zygote] | None = None
        self._closing = False
        self.restarts = Restarts()
        self.starts = 0
        self.zygote: Zygote | None = None  # the last one, alive or not

    async def living(self) -> Zygote:
        """Its zygote, started if there is none; raises SandboxStartFailed, IsolationUnavailable.

        A start is a task of its own: a caller that is cancelled stops waiting for it, and the next caller waits for
        the same one.
        """
        if self._starting is None:
            self._check_open()
            if self.zygote is not None and self.zygote.alive:
                return self.zygote
            self._starting = asyncio.create_task(self._start_next(), name="zygote: start")
            self._starting.add_done_callback(self._started)
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # not whoever waits, but `close`
                self._check_open()
            raise

    def _started(self, starting: asyncio.Task[Zygote]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # perhaps nobody waits any more; `restarts` has counted it

    def _check_open(self) -> None:
        if self._closing:
            raise SandboxStartFailed("The supervisor is shutting down.")

    async def _start_next(self) -> Zygote:
        if (pause := self.restarts.pause()) > 0:
            raise SandboxStartFailed(
                f"The process that makes sandboxes ended {self.restarts.recent} times within a minute; the next "
                f"one is started in {math.ceil(pause)} s. The server's log says more."
            )
        if self.zygote is not None:
            await self.zygote.close()
        return await self._replace()

    async def _replace(self) -> Zygote:
        try:
            zygote = self.zygote = await self._start()
        except IsolationUnavailable:
            self.restarts.died()
            raise
        self.starts += 1
        if not zygote.alive:  # before there was anybody to tell
            self.restarts.died()
            raise SandboxStartFailed("The process that makes sandboxes ended at once.")
        zygote.on_event = self._on_event
        zygote.on_death = lambda: self._died(zygote)
        return zygote

    def _died(self, zygote: Zygote) -> None:
        self.restarts.died()
        self._on_death(self, zygote)

    async def close(self) -> None:
        """End the zygote, also one that is just being started, and with it its sandboxes."""
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.zygote is not None:
            await self.zygote.close()


class ZygoteStarter:
    """How zygotes are started in the mode of the settings."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._settings = settings
        self._places = places
        self.launch = None if settings.mode == "pod" else self._prepare()

    def _prepare(self) -> Launch:
        settings, places = self._settings, self._places
        namespaces = settings.mode == "namespaces"
        try:
            runtime = discover_runtime()
        except RuntimeUnavailable as error:
            raise IsolationUnavailable(f"A part is missing: {error}.", "Run `fumehood doctor`.") from error
        environ: dict[str, str] = {}
        if places.scratch is not None:
            environ["MPLCONFIGDIR"] = f"{places.scratch}/cache"
            places.make_directory(environ["MPLCONFIGDIR"])
        return Launch(
            environ=environ,
            runtime=runtime,
            namespaces=namespaces,
            program=self._program(POLICY_OF_MODE[settings.mode]),
            helper_program=self._program(HELPER.name),
            preload=settings.preload,
            thorough=settings.capacity > 1,
            users=places.users,
            cgroup=places.zygote_cgroup,
            timeout=settings.start_timeout,
            common=places.plan() if namespaces else None,
        )

    def _program(self, policy: str) -> bytes:
        try:
            return seccomp.load_blob(policy, os.uname().machine)
        except RuntimeError as error:
            raise IsolationUnavailable(f"{error}.", "Use x86_64 or aarch64.") from error

    async def warm(self) -> Zygote:
        """One with the packages of the settings loaded."""
        if self.launch is None:
            return await self._connect()
        zygote = await Zygote.launch(await self._with_bytecode(self.launch))
        if self._settings.mode == "unsafe-degraded" and not zygote.about.landlock:
            await zygote.close()
            raise IsolationUnavailable(
                "This kernel has no Landlock, the only wall around files in mode unsafe-degraded.",
                "Use Linux 5.13 or later with Landlock enabled (lsm=landlock,…), or another mode.",
            )
        if self._places.scratch is not None and os.geteuid() == 0:
            _give_to_root(f"{self._places.scratch}/cache")
        return zygote

    async def bare(self) -> Zygote:
        """One with nothing loaded, for sandboxes that get other versions of what the usual ones have loaded."""
        if self.launch is None:
            raise SandboxStartFailed("A pod has one zygote only.")
        return await Zygote.launch(replace(await self._with_bytecode(self.launch), preload=()))

    async def _with_bytecode(self, launch: Launch) -> Launch:
        """Lay bytecode over packages that have none; without it all works, only slower."""
        if not launch.namespaces:
            return launch
        directory = packages_directory(self._settings)
        try:
            tree = await asyncio.to_thread(bytecode.prepare, launch.runtime, directory)
        except bytecode.BytecodeUnavailable as error:
            logger.warning("Sandboxes have no bytecode of their packages and import them slowly: %s.", error)
            tree = None
        return replace(launch, bytecode=tree)

    async def _connect(self) -> Zygote:
        if self._settings.guest_socket is None:
            raise IsolationUnavailable(
                "Mode pod needs a container that runs the code.",
                "Set guest_socket to the socket on which it listens (`python -m fumehood.sandboxd.inside.guest`).",
            )
        return await Zygote.connect(
            self._settings.guest_socket,
            (self._program(POLICY_OF_MODE[self._settings.mode]), self._program(HELPER.name)),
            self._settings.preload,
            self._settings.start_timeout,
        )


def _give_to_root(tree: str) -> None:
    """The zygote has written its font list; the sandboxes, of the same user, are to leave it alone."""
    for directory, _, names in os.walk(tree):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            os.chown(path, 0, 0)
            os.chmod(path, 0o755)  # noqa: S103 - to be read by the sandboxes
