"""Makes, hands out and ends sandboxes, within limits; imports only `fumehood.protocol.sandbox` and siblings."""

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

from fumehood.protocol.sandbox import MemoryTier, SandboxSpec
from fumehood.protocol.sandbox_errors import AtCapacity, InstallFailed, SandboxError, SandboxStartFailed
from fumehood.sandboxd import hoards, remains
from fumehood.sandboxd.cgroups import joining
from fumehood.sandboxd.disks import Disk
from fumehood.sandboxd.egress.control import Egress, Grant
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.launching import Launch
from fumehood.sandboxd.nurseries import Nursery, ZygoteStarter
from fumehood.sandboxd.packages import requirements
from fumehood.sandboxd.packages.attached import NO_JAIL, NOT_OFFERED
from fumehood.sandboxd.packages.installer import NOTHING, Installer, Provision
from fumehood.sandboxd.packages.opening import open_installer, open_store
from fumehood.sandboxd.places import Places
from fumehood.sandboxd.runtime import RuntimeUnavailable
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.zygotes import Zygote

logger = logging.getLogger(__name__)

_PARKED_MEMORY: MemoryTier = "1g"
_LONGEST_PARK_PAUSE = 60.0
_LAST_WORD = 0.5  # seconds: of the end of a zygote one may hear after that of its sandboxes
# Seconds, so that the caller's first call need not share the processor with a replacement's start.
_REFILL_PAUSE = 0.025


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be made: where from, and with what from the beginning."""

    nursery: Nursery
    memory: MemoryTier = _PARKED_MEMORY
    fresh_interpreter: bool = False
    on_disk: bool = False


class Supervisor:
    """Use as `async with Supervisor(settings) as supervisor:`; leaving ends every sandbox.

    create raises RequestRefused, AtCapacity, SandboxStartFailed, IsolationUnavailable; entering raises the last.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._places = Places(settings)
        self._shards: list[Nursery] = []
        self._bare: Nursery | None = None
        self._installer: Installer | None = None
        self._no_packages = NOT_OFFERED
        self._live: dict[int, LocalSandbox] = {}
        self._parked: deque[LocalSandbox] = deque()
        self._starting = 0  # asked for, and neither alive nor failed yet
        self._parking = 0  # those of them that are meant for the pool
        self._park_failures = 0  # in a row
        self.waiting = 0  # callers who asked for a sandbox and have none yet
        self.refills = self.refill_failures = 0  # of the pool, since it was opened
        self._park_ended = asyncio.Event()
        self._refill_planned = False
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._pod_used = False
        self.on_gone: Callable[[LocalSandbox], None] | None = None  # told of every sandbox that has ended
        self.egress = Egress(settings)

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
        await asyncio.to_thread(remains.sweep, self._settings)
        self._places.open()
        self.egress.start(None if self._places.users is None else self._places.users.proxy)
        starter = ZygoteStarter(self._settings, self._places)
        if starter.launch is not None:
            self._open_packages(starter.launch)
        count = 1 if mode == "pod" else max(1, self._settings.shards)
        self._shards = [self._nursery(starter.warm) for _ in range(count)]
        if mode == "namespaces":
            self._bare = self._nursery(starter.bare)
        await asyncio.gather(*(shard.living() for shard in self._shards))
        self._refill()
        if mode != "pod":
            self._background(hoards.watch(self._handed_out))
            if self._places.tree is not None:
                most = self._settings.aggregate_memory()
                self._background(hoards.watch_memory(self._handed_out, self._places.tree, most))

    def _open_packages(self, launch: Launch) -> None:
        """Get ready to install packages; where that cannot be, whoever asks for some is told why."""
        if not self._settings.packages:
            return
        if not launch.namespaces:
            self._no_packages = NO_JAIL.format(mode=self._settings.mode)
            return
        users = self._places.users
        try:
            store = open_store(self._settings)
            self._installer = open_installer(
                self._settings,
                store,
                runtime=launch.runtime,
                uid=None if users is None else users.installer,
                tree=self._places.tree,
            )
        except (OSError, RuntimeUnavailable, IsolationUnavailable) as error:
            self._no_packages = f"Packages cannot be installed on this server: {error}."
            logger.info("%s", self._no_packages)
            return
        launch.layers = store.layers

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for sandbox in [*self._live.values()]:
            sandbox.kill("the supervisor is shutting down")
        if self._installer is not None:
            await self._installer.close()
        for nursery in self._nurseries():
            await nursery.close()
        for sandbox in [*self._live.values()]:
            sandbox.exited(-1)
        await self.egress.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # of tasks that were done already, the loop has to hear as well
        await self._places.close()

    @property
    def installer(self) -> Installer | None:
        """Who installs packages; without one, `no_packages` says why."""
        return self._installer

    @property
    def no_packages(self) -> str:
        return self._no_packages

    # ---- zygotes ----------------------------------------------------------------------------------------------

    def _nursery(self, start: Callable[[], Awaitable[Zygote]]) -> Nursery:
        return Nursery(start, on_event=self._zygote_event, on_death=self._zygote_died)

    def _nurseries(self) -> list[Nursery]:
        return self._shards if self._bare is None else [*self._shards, self._bare]

    def _shard_of(self, tenant: str) -> Nursery:
        """Tenants keep to their shard, so that few share a zygote; without one, where the fewest are."""
        if len(self._shards) == 1:
            return self._shards[0]
        if tenant:
            return self._shards[zlib.crc32(tenant.encode()) % len(self._shards)]
        return min(self._shards, key=self._population)

    def _population(self, nursery: Nursery) -> int:
        return sum(sandbox.zygote is nursery.zygote for sandbox in self._live.values())

    def _zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        sandbox = self._live.get(event["number"])
        if sandbox is not None:
            sandbox.zygote_event(event, fds)
        for fd in fds:
            os.close(fd)

    def _zygote_died(self, nursery: Nursery, zygote: Zygote) -> None:
        """Its sandboxes died with it, by the kernel's doing; another one follows, asked for or not."""
        lost = [sandbox for sandbox in self._live.values() if sandbox.zygote is zygote]
        said = zygote.last_words
        logger.error(
            "The zygote ended; %d sandboxes are lost with it.%s", len(lost), said and f" It said: {said}"
        )
        for sandbox in lost:
            sandbox.exited(-1)
        if self._settings.mode != "pod":
            self._background(self._revive(nursery))

    async def _revive(self, nursery: Nursery) -> None:
        """Whoever looks at /health, and sends nobody here until it is ok again, must not wait for a first request."""
        await asyncio.sleep(nursery.restarts.pause())
        if nursery is not self._bare:
            try:
                await nursery.living()
            except SandboxError as error:
                logger.error("Another zygote could not be started: %s", error)
                self._background(self._revive(nursery))
                return
        self._refill()

    @property
    def zygote(self) -> Zygote:
        """For `doctor`, tests and metrics: the zygote of the first shard."""
        zygote = self._shards[0].zygote if self._shards else None
        if zygote is None:
            raise IsolationUnavailable("No zygote runs.", "Enter the supervisor first.")
        return zygote

    @property
    def can_start(self) -> bool:
        """Whether a sandbox could be made now: where no zygote lives, another one has to start first."""
        return any(shard.zygote is not None and shard.zygote.alive for shard in self._shards)

    @property
    def zygote_restarts(self) -> int:
        return sum(max(shard.starts - 1, 0) for shard in self._shards)

    # ---- sandboxes --------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """How many there are, those that wait for a caller included."""
        return len(self._live)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def memory(self) -> int | None:
        """Bytes that all of them use, with what they were forked from; None where nobody counts."""
        try:
            return None if self._places.tree is None else self._places.tree.memory_current()
        except OSError:  # it is being taken down
            return None

    @property
    def sandboxes(self) -> dict[str, LocalSandbox]:
        """Those that were handed out and live."""
        parked = set(self._parked)
        return {sandbox.id: sandbox for sandbox in self._live.values() if sandbox not in parked}

    def _handed_out(self) -> list[LocalSandbox]:
        return [*self.sandboxes.values()]

    async def create(self, spec: SandboxSpec | None = None) -> LocalSandbox:
        """A sandbox of one's own: a parked one with the limits asked for, or a new one."""
        self.waiting += 1
        try:
            return await self._create(spec or SandboxSpec())
        finally:
            self.waiting -= 1

    async def _create(self, spec: SandboxSpec) -> LocalSandbox:
        grant = await self.egress.grant(spec.network)
        provision = await self._provide(spec)
        try:
            while True:
                sandbox = await self._find(spec, provision)
                try:
                    return await self._hand_over(sandbox, spec, provision, grant)
                except SandboxStartFailed:
                    # One that died while it waited, or with its zygote: the next one.
                    if not (sandbox.warm or await sandbox.zygote.ends_within(_LAST_WORD)):
                        raise
        finally:
            provision.close()

    async def _provide(self, spec: SandboxSpec) -> Provision:
        """The packages that a sandbox is to begin with; raises InstallFailed."""
        if not spec.requirements:
            return NOTHING
        if self._installer is None:
            raise InstallFailed(self._no_packages, param="requirements")
        wanted = requirements.parse(spec.requirements)
        return await self._installer.provide(
            wanted, self._installer.base.versions, may_replace=True, tenant=spec.tenant
        )

    async def _find(self, spec: SandboxSpec, provision: Provision) -> LocalSandbox:
        shard = self._shard_of(spec.tenant)
        disks = self._places.disks
        on_disk = disks is not None and await disks.serve(spec.memory)
        # One with nothing loaded, since what is loaded could not be replaced any more.
        bare = self._bare if provision.replaced and not spec.fresh_interpreter else None
        # A disk cannot be given to one that is finished: its mounts are locked, Landlock knows the old places.
        if not (spec.fresh_interpreter or on_disk or bare):
            parked = await self._take_parked(shard)
            if parked is not None:
                parked.warm = True
                self._refill_soon()
                return parked
        sandbox = await self._start_for(
            _Order(bare or shard, spec.memory, fresh_interpreter=spec.fresh_interpreter, on_disk=on_disk)
        )
        self._refill()
        return sandbox

    async def _start_for(self, order: _Order) -> LocalSandbox:
        """A new one; again whenever the zygote ended meanwhile, which was not this caller's doing."""
        while True:
            self._make_room()
            self._starting += 1
            zygote = order.nursery.zygote
            try:
                return await self._start(order)
            except (SandboxStartFailed, IsolationUnavailable):
                if zygote is None or not await self._followed(zygote, order.nursery):
                    raise

    async def _followed(self, zygote: Zygote, nursery: Nursery) -> bool:
        """Whether a zygote has ended and there is another one, or may be at once."""
        if self._settings.mode == "pod" or self._closing:
            return False
        if nursery.zygote is zygote and not await zygote.ends_within(_LAST_WORD):
            return False
        latest = nursery.zygote
        return (latest is not None and latest.alive) or nursery.restarts.pause() == 0

    async def _hand_over(
        self, sandbox: LocalSandbox, spec: SandboxSpec, provision: Provision, grant: Grant | None
    ) -> LocalSandbox:
        try:
            access = None if grant is None else self.egress.access(grant)
            await sandbox.hand_over(spec.memory, access)
            sandbox.packages.tenant = spec.tenant
            await sandbox.packages.take(provision.share())
        except BaseException:  # whoever asked may have gone away: nobody else would end it
            self._background(sandbox.destroy())
            raise
        return sandbox

    def _make_room(self) -> None:
        if self._settings.mode == "pod":
            if self._pod_used:
                raise AtCapacity("A pod holds one sandbox, once; the next one needs another pod.")
            self._pod_used = True
            return
        capacity = self._settings.capacity
        if len(self._live) + self._starting < capacity:
            return
        if not self._parked:
            raise AtCapacity(f"{capacity} sandboxes are alive, as many as are allowed; delete one or wait.")
        self._background(self._parked.popleft().destroy())

    # ---- the pool ---------------------------------------------------------------------------------------------

    async def _take_parked(self, shard: Nursery) -> LocalSandbox | None:
        """One of this shard that is ready; at capacity also one that is just being made for the pool."""
        while True:
            for candidate in [*self._parked]:
                if candidate.gone is not None:
                    self._parked.remove(candidate)
                elif candidate.zygote is shard.zygote:
                    self._parked.remove(candidate)
                    return candidate
            if not self._parking or len(self._live) + self._starting < self._settings.capacity:
                return None
            self._park_ended.clear()
            await self._park_ended.wait()

    def _refill_soon(self) -> None:
        """Not at once, unless the pool is low."""
        if len(self._parked) < self._settings.pool // 2:
            self._refill()
        elif not self._refill_planned:
            self._refill_planned = True
            self._background(self._refill_after(_REFILL_PAUSE))

    async def _refill_after(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self._refill()

    def _refill(self) -> None:
        """Bring the pool back to its size behind the callers' backs."""
        self._refill_planned = False
        if self._settings.mode == "pod" or self._closing:
            return
        wanted = self._settings.pool - len(self._parked) - self._parking
        room = self._settings.capacity - len(self._live) - self._starting
        for number in range(min(wanted, room)):
            self._parking += 1
            self._starting += 1
            self._background(self._park(self._poorest(number)))

    def _poorest(self, number: int) -> Nursery:
        """The shard that is to get the next one of several that are being made."""

        def parked(shard: Nursery) -> int:
            return sum(sandbox.zygote is shard.zygote for sandbox in self._parked)

        return sorted(self._shards, key=parked)[number % len(self._shards)]

    async def _park(self, shard: Nursery) -> None:
        try:
            sandbox = await self._start(_Order(shard))
            if sandbox.gone is not None:  # it ended between being ready and our hearing of it
                raise SandboxStartFailed(f"The sandbox ended: {sandbox.gone}")
            self._parked.append(sandbox)
            self.refills += 1
            self._park_failures = 0
        except SandboxError as error:
            logger.error("A sandbox for the pool could not be made: %s", error)
            self.refill_failures += 1
            self._park_failures += 1
            pause = min(2.0 ** (self._park_failures - 1), _LONGEST_PARK_PAUSE)
            self._background(self._refill_after(max(pause, shard.restarts.pause())))
        finally:
            self._parking -= 1
            self._park_ended.set()

    # ---- one sandbox ------------------------------------------------------------------------------------------

    async def _start(self, order: _Order) -> LocalSandbox:
        """Make one; the caller has counted it in `_starting`."""
        disk = None
        disks = self._places.disks
        try:
            if order.on_disk and disks is not None:
                disk = await disks.make(order.memory)
            zygote = await order.nursery.living()
            if self._closing:
                raise SandboxStartFailed("The supervisor is shutting down.")
            sandbox = self._fork(zygote, next(self._numbers), order, disk)
            disk = None  # now it is the sandbox's
        except OSError as error:
            raise SandboxStartFailed(f"The sandbox could not be made: {error}.") from error
        finally:
            self._starting -= 1
            if disk is not None and disks is not None:
                await disks.give_back(disk)
        try:
            await sandbox.wait_ready(self._settings.start_timeout)
        except BaseException:
            self._background(sandbox.destroy())
            raise
        return sandbox

    def _fork(self, zygote: Zygote, number: int, order: _Order, disk: Disk | None) -> LocalSandbox:
        """Ask the zygote for a sandbox; on OSError (no descriptors, no cgroup) nothing is left of it."""
        with contextlib.ExitStack() as undo:
            place = self._places.take(number, order.memory, disk, undo)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                undo.callback(mine.close)
                sandbox = LocalSandbox(
                    number,
                    zygote,
                    mine,
                    place,
                    self._settings,
                    self._sandbox_gone,
                    self._output_grew,
                    self._numbers.__next__,
                )
                undo.callback(sandbox.release)
                sandbox.offer_packages(self._installer, unavailable=self._no_packages)
                plan = self._places.plan(
                    place, memory=order.memory, fresh_interpreter=order.fresh_interpreter
                )
                told = plan.particulars() if self._settings.mode == "namespaces" else plan.encode().encode()
                sandbox.begin(told, order.memory)
                with joining(place.cgroup) as join:
                    zygote.request({"op": "spawn", "number": number}, [theirs.fileno(), *join])
            undo.pop_all()
        self._live[number] = sandbox
        return sandbox

    def _sandbox_gone(self, sandbox: LocalSandbox) -> None:
        self._live.pop(sandbox.number, None)
        with contextlib.suppress(ValueError):
            self._parked.remove(sandbox)
        sandbox.release()
        if self.on_gone is not None:
            self.on_gone(sandbox)
        self._background(self._places.give_back(sandbox.place), even_when_closing=True)

    def _output_grew(self) -> None:
        """Until a call ends nothing of its output can be let go, and it is memory of this process."""
        if sum(sandbox.output_held for sandbox in self._live.values()) > self._settings.aggregate_output():
            greedy = max(self._live.values(), key=lambda sandbox: sandbox.output_held)
            greedy.kill(
                "the output of all calls that run was more than the server keeps, and it had most of it"
            )

    def _background(self, work: Any, *, even_when_closing: bool = False) -> None:
        if self._closing and not even_when_closing:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
