"""Makes, hands out and ends sandboxes, within limits; imports only `fumehood.protocol.sandbox` and siblings."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import secrets
import socket
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Self

from fumehood.protocol.sandbox import MEMORY_TIERS, MemoryTier, SandboxSpec
from fumehood.protocol.sandbox_errors import AtCapacity, InstallFailed, SandboxError, SandboxStartFailed
from fumehood.sandboxd import cgroups, seccomp
from fumehood.sandboxd.cgroups import Cgroup, CgroupLimits, CgroupTree, CgroupUnavailable, joining
from fumehood.sandboxd.egress.proxy import Egress, Grant
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.inside import jail, layout
from fumehood.sandboxd.launching import Launch, root_entries
from fumehood.sandboxd.packages import requirements
from fumehood.sandboxd.packages.attached import NO_JAIL, NOT_OFFERED
from fumehood.sandboxd.packages.installer import NOTHING, Installer, Provision
from fumehood.sandboxd.packages.opening import open_installer, open_store
from fumehood.sandboxd.runtime import RuntimeUnavailable, discover_bubblewrap, discover_runtime
from fumehood.sandboxd.sandbox import LocalSandbox, Place, data_quota
from fumehood.sandboxd.seccomp.policy import POLICY_OF_MODE
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.users import UserRange, reserve_users, subordinate_users
from fumehood.sandboxd.zygotes import Zygote

logger = logging.getLogger(__name__)

_PARKED_MEMORY: MemoryTier = "1g"
_NOWHERE = Place(uid=0, cgroup=None, scratch=None, directly_readable=False)
_LIMITS_ADVICE = (
    "Or set limits to best-effort, which runs code without a bound on memory: one program can then use up the "
    "host's."
)


class Supervisor:
    """Use as `async with Supervisor(settings) as supervisor:`; leaving ends every sandbox.

    create raises RequestRefused, AtCapacity, SandboxStartFailed, IsolationUnavailable; entering raises the last.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tree: CgroupTree | None = None
        self._users: UserRange | None = None
        self._free_uids: deque[int] = deque()
        self._zygote: Zygote | None = None
        self._zygote_lock = asyncio.Lock()
        self._zygote_cgroup: Cgroup | None = None
        self._launch: Launch | None = None
        self._bare: Zygote | None = None  # with nothing loaded; see _bare_zygote
        self._bare_lock = asyncio.Lock()
        self._installer: Installer | None = None
        self._no_packages = NOT_OFFERED
        self._live: dict[int, LocalSandbox] = {}
        self._parked: deque[LocalSandbox] = deque()
        self._starting = 0  # asked for, and neither alive nor failed yet
        self._parking = 0  # those of them that are meant for the pool
        self._park_ended = asyncio.Event()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._scratch: str | None = None
        self._closing = False
        self._pod_used = False
        self.on_gone: Callable[[LocalSandbox], None] | None = None  # told of every sandbox that has ended
        self.zygote_starts = 0
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
        if self._settings.mode == "unsafe-degraded":
            logger.warning(
                "Mode unsafe-degraded: no namespaces. All sandboxes share one kernel user on the host; only Landlock "
                "and the system-call filter hold the code."
            )
        if self._settings.mode != "namespaces" and self._settings.packages:
            self._no_packages = NO_JAIL.format(mode=self._settings.mode)
        if self._settings.mode != "pod":
            self._open_cgroups()
            self._users = self._find_users()
            if self._settings.mode == "unsafe-degraded":
                self._scratch = tempfile.mkdtemp(prefix="fumehood-degraded-")
                os.chmod(self._scratch, 0o711)  # noqa: S103 - sandboxes may enter, not list it
            self._launch = self._prepare_launch()
            self._open_packages(self._launch)
        await self._living_zygote()
        self._refill()

    def _open_cgroups(self) -> None:
        cgroups.sweep_stale()
        try:
            self._tree = cgroups.open_tree(
                memory_total=self._settings.aggregate_memory(),
                cpus=self._settings.cpus_total,
                pids_total=self._settings.aggregate_processes(),
            )
        except CgroupUnavailable as error:
            if self._settings.limits == "enforced":
                raise IsolationUnavailable(error.reason, f"{error.advice} {_LIMITS_ADVICE}") from error
            logger.warning(
                "Limits are best-effort: %s The memory of sandboxes is not bounded, and processors are shared "
                "without a limit.",
                error.reason,
            )
            return
        self._zygote_cgroup = self._tree.leaf("zygote")

    def _find_users(self) -> UserRange | None:
        """Kernel users for sandboxes: as root a block of our own, else what /etc/subuid grants, else none."""
        if os.geteuid() == 0:
            users = reserve_users(self._settings.uid_base)
        elif self._settings.mode == "namespaces":
            users = subordinate_users()
        else:
            return None
        if users is not None:
            self._free_uids.extend(range(1, users.count))
        return users

    def _prepare_launch(self) -> Launch:
        namespaces = self._settings.mode == "namespaces"
        try:
            runtime = discover_runtime()
            bubblewrap = discover_bubblewrap(self._settings.bubblewrap) if namespaces else None
        except RuntimeUnavailable as error:
            raise IsolationUnavailable(f"A part is missing: {error}.", "Run `fumehood doctor`.") from error
        environ: dict[str, str] = {}
        if self._scratch is not None:
            environ["MPLCONFIGDIR"] = f"{self._scratch}/cache"
            self._make_directory(environ["MPLCONFIGDIR"])
        return Launch(
            environ=environ,
            runtime=runtime,
            bubblewrap=bubblewrap,
            program=self._program(),
            preload=self._settings.preload,
            users=self._users,
            cgroup=self._zygote_cgroup,
            timeout=self._settings.start_timeout,
            common=self._plan(_NOWHERE, fresh_interpreter=False) if namespaces else None,
        )

    def _open_packages(self, launch: Launch) -> None:
        """Get ready to install packages; where that cannot be, whoever asks for some is told why."""
        if not self._settings.packages or launch.bubblewrap is None:
            return
        try:
            store = open_store(self._settings)
            self._installer = open_installer(
                self._settings,
                store,
                runtime=launch.runtime,
                bubblewrap=launch.bubblewrap,
                uid=None if self._users is None else self._users.installer,
                tree=self._tree,
            )
        except (OSError, RuntimeUnavailable, IsolationUnavailable) as error:
            self._no_packages = f"Packages cannot be installed on this server: {error}."
            logger.info("%s", self._no_packages)
            return
        launch.layers = store.layers

    def _program(self) -> bytes:
        try:
            return seccomp.load_blob(POLICY_OF_MODE[self._settings.mode], os.uname().machine)
        except RuntimeError as error:
            raise IsolationUnavailable(f"{error}.", "Use x86_64 or aarch64.") from error

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for sandbox in [*self._live.values()]:
            sandbox.kill("the supervisor is shutting down")
        if self._installer is not None:
            await self._installer.close()
        async with self._bare_lock:
            if self._bare is not None:
                await self._bare.close()
                self._bare = None
        async with self._zygote_lock:  # one that is just being started is ended as well
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None
        for sandbox in [*self._live.values()]:
            sandbox.exited(-1)
        await self.egress.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tree is not None:
            await asyncio.to_thread(self._tree.close)
            self._tree = None
        if self._users is not None:
            self._users.close()
            self._users = None
        if self._scratch is not None:
            await _remove_tree(self._scratch)

    # ---- the zygote -------------------------------------------------------------------------------------------

    async def _living_zygote(self) -> Zygote:
        async with self._zygote_lock:
            if self._closing:
                raise SandboxStartFailed("The supervisor is shutting down.")
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            if self._zygote is not None:
                await self._zygote.close()
            self._zygote = await self._start_zygote()
            self._zygote.on_event = self._zygote_event
            self._zygote.on_death = self._zygote_died
            self.zygote_starts += 1
            if not self._zygote.alive:  # before there was anybody to tell
                raise SandboxStartFailed("The process that makes sandboxes ended at once.")
            return self._zygote

    async def _bare_zygote(self) -> Zygote:
        """One with nothing loaded, for sandboxes that get other versions of what the usual one has loaded."""
        async with self._bare_lock:
            if self._closing or self._launch is None:
                raise SandboxStartFailed("The supervisor is shutting down.")
            if self._bare is None or not self._bare.alive:
                if self._bare is not None:
                    await self._bare.close()
                bare = self._bare = await Zygote.launch(replace(self._launch, preload=()))
                bare.on_event = self._zygote_event
                bare.on_death = lambda: self._lose_sandboxes(bare)
            return self._bare

    async def _start_zygote(self) -> Zygote:
        if self._launch is not None:
            zygote = await Zygote.launch(self._launch)
            if self._settings.mode == "unsafe-degraded" and not zygote.about.landlock:
                await zygote.close()
                raise IsolationUnavailable(
                    "This kernel has no Landlock, the only wall around files in mode unsafe-degraded.",
                    "Use Linux 5.13 or later with Landlock enabled (lsm=landlock,…), or another mode.",
                )
            if self._scratch is not None and os.geteuid() == 0:
                _give_to_root(f"{self._scratch}/cache")
            return zygote
        if self._settings.guest_socket is None:
            raise IsolationUnavailable(
                "Mode pod needs a container that runs the code.",
                "Set guest_socket to the socket on which it listens (`python -m fumehood.sandboxd.inside.guest`).",
            )
        return await Zygote.connect(
            self._settings.guest_socket,
            self._program(),
            self._settings.preload,
            self._settings.start_timeout,
        )

    def _zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        sandbox = self._live.get(event["number"])
        if sandbox is not None:
            sandbox.zygote_event(event, fds)
        for fd in fds:
            os.close(fd)

    def _zygote_died(self) -> None:
        """Its sandboxes died with it, by the kernel's doing; the next request starts another one."""
        if self._zygote is not None:
            self._lose_sandboxes(self._zygote)
        if self._settings.mode != "pod":
            self._refill()

    def _lose_sandboxes(self, zygote: Zygote) -> None:
        lost = [sandbox for sandbox in self._live.values() if sandbox.made_by(zygote)]
        logger.error("The zygote ended; %d sandboxes are lost with it.", len(lost))
        for sandbox in lost:
            sandbox.exited(-1)

    @property
    def zygote(self) -> Zygote:
        """For `doctor`, tests and metrics: the zygote that is running."""
        if self._zygote is None:
            raise IsolationUnavailable("No zygote runs.", "Enter the supervisor first.")
        return self._zygote

    # ---- sandboxes --------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """How many there are, those that wait for a caller included."""
        return len(self._live)

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def sandboxes(self) -> dict[str, LocalSandbox]:
        """Those that were handed out and live."""
        parked = set(self._parked)
        return {sandbox.id: sandbox for sandbox in self._live.values() if sandbox not in parked}

    async def create(self, spec: SandboxSpec | None = None) -> LocalSandbox:
        """A sandbox of one's own: a parked one with the limits asked for, or a new one."""
        spec = spec or SandboxSpec()
        grant = await self.egress.grant(spec.network)
        provision = await self._provide(spec)
        try:
            return await self._create(spec, provision, grant)
        finally:
            provision.close()

    async def _provide(self, spec: SandboxSpec) -> Provision:
        """The packages that a sandbox is to begin with; raises InstallFailed."""
        if not spec.requirements:
            return NOTHING
        if self._installer is None:
            raise InstallFailed(self._no_packages, param="requirements")
        wanted = requirements.parse(spec.requirements)
        return await self._installer.provide(wanted, self._installer.base.versions, may_replace=True)

    async def _create(self, spec: SandboxSpec, provision: Provision, grant: Grant | None) -> LocalSandbox:
        bare = bool(provision.replaced) and not spec.fresh_interpreter
        parkable = not spec.fresh_interpreter and not bare
        while parkable and (parked := await self._take_parked()) is not None:
            self._refill()
            parked.warm = True
            with contextlib.suppress(SandboxStartFailed):  # it died while it waited: the next one
                return await self._hand_over(parked, spec, provision, grant)
        self._make_room()
        self._starting += 1
        sandbox = await self._start(fresh_interpreter=spec.fresh_interpreter, bare=bare)
        self._refill()
        return await self._hand_over(sandbox, spec, provision, grant)

    async def _hand_over(
        self, sandbox: LocalSandbox, spec: SandboxSpec, provision: Provision, grant: Grant | None
    ) -> LocalSandbox:
        try:
            access = None if grant is None else self.egress.access(grant)
            await sandbox.hand_over(spec.memory, access)
            await sandbox.packages.take(provision.share())
        except BaseException:  # whoever asked may have gone away: nobody else would end it
            self._background(sandbox.destroy())
            raise
        return sandbox

    async def _take_parked(self) -> LocalSandbox | None:
        """One that is ready; at capacity also one that is just being made for the pool."""
        while True:
            while self._parked:
                candidate = self._parked.popleft()
                if candidate.gone is None:
                    return candidate
            if not self._parking or len(self._live) + self._starting < self._settings.capacity:
                return None
            self._park_ended.clear()
            await self._park_ended.wait()

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

    def _refill(self) -> None:
        """Bring the pool back to its size behind the callers' backs."""
        if self._settings.mode == "pod" or self._closing:
            return
        wanted = self._settings.pool - len(self._parked) - self._parking
        room = self._settings.capacity - len(self._live) - self._starting
        for _ in range(min(wanted, room)):
            self._parking += 1
            self._starting += 1
            self._background(self._park())

    async def _park(self) -> None:
        try:
            self._parked.append(await self._start(fresh_interpreter=False))
        except SandboxError as error:
            logger.error("A sandbox for the pool could not be made: %s", error)
        finally:
            self._parking -= 1
            self._park_ended.set()

    async def _start(self, *, fresh_interpreter: bool, bare: bool = False) -> LocalSandbox:
        """Make one; the caller has counted it in `_starting`."""
        try:
            zygote = await (self._bare_zygote() if bare else self._living_zygote())
            if self._closing:
                raise SandboxStartFailed("The supervisor is shutting down.")
            sandbox = self._fork(zygote, next(self._numbers), fresh_interpreter=fresh_interpreter)
        except OSError as error:
            raise SandboxStartFailed(f"The sandbox could not be made: {error}.") from error
        finally:
            self._starting -= 1
        try:
            await sandbox.wait_ready(self._settings.start_timeout)
        except BaseException:
            self._background(sandbox.destroy())
            raise
        return sandbox

    def _fork(self, zygote: Zygote, number: int, *, fresh_interpreter: bool) -> LocalSandbox:
        """Ask the zygote for a sandbox; on OSError (no descriptors, no cgroup) nothing is left of it."""
        with contextlib.ExitStack() as undo:
            place = self._take_place(number, undo)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                undo.callback(mine.close)
                sandbox = LocalSandbox(
                    number, zygote, mine, place, self._settings, self._sandbox_gone, self._numbers.__next__
                )
                undo.callback(sandbox.release)
                sandbox.offer_packages(self._installer, unavailable=self._no_packages)
                sandbox.tell_plan(json.dumps(asdict(self._plan(place, fresh_interpreter=fresh_interpreter))))
                with joining(place.cgroup) as join:
                    zygote.request({"op": "spawn", "number": number}, [theirs.fileno(), *join])
            undo.pop_all()
        self._live[number] = sandbox
        return sandbox

    def _take_place(self, number: int, undo: contextlib.ExitStack) -> Place:
        uid = 0
        if self._users is not None and self._settings.mode == "namespaces":
            if not self._free_uids:  # never two sandboxes under one user where each can have its own
                raise AtCapacity(f"All {self._users.count - 1} users for sandboxes are taken.")
            uid = self._free_uids.popleft()
            undo.callback(self._free_uids.append, uid)
        cgroup = None
        if self._tree is not None:
            limits = CgroupLimits(
                memory=MEMORY_TIERS[_PARKED_MEMORY], pids=self._settings.processes, cpus=self._settings.cpus
            )
            cgroup = self._tree.create(f"sb-{number}", limits)
            undo.callback(cgroup.remove)
        readable = os.geteuid() == 0 or (self._users is None and self._settings.mode != "pod")
        scratch = None
        if self._scratch is not None:
            # Sandboxes share a user in this mode: that they do not know the name keeps them out of each other's.
            scratch = self._make_scratch(f"{self._scratch}/{secrets.token_hex(16)}")
        return Place(uid=uid, cgroup=cgroup, scratch=scratch, directly_readable=readable)

    def _make_scratch(self, path: str) -> str:
        """A host directory in place of the private file system that degraded mode does not have."""
        for directory in (path, *(f"{path}/{name}" for name in ("data", "tmp", "home"))):
            self._make_directory(directory)
        return path

    def _make_directory(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self._users is not None:
            os.chown(path, self._users.zygote, self._users.zygote)

    def _plan(self, place: Place, *, fresh_interpreter: bool) -> jail.Plan:
        namespaces = self._settings.mode == "namespaces"
        read_only = layout.READ_ONLY if namespaces else layout.POD_READ_ONLY
        writable = layout.WRITABLE
        if place.scratch is not None:
            read_only = ("/usr", *root_entries(), f"{self._scratch}/cache")
            writable = (place.scratch,)
        return jail.Plan(
            walls="namespaces" if namespaces else "process",
            uid=place.uid,
            data_bytes=data_quota(_PARKED_MEMORY),
            data_inodes=self._settings.inodes,
            processes=self._settings.processes,
            open_files=self._settings.open_files,
            fresh_interpreter=fresh_interpreter,
            writable=list(writable),
            read_only=list(read_only),
            deny_tcp=self._settings.mode == "unsafe-degraded",
            needs_landlock=self._settings.mode == "unsafe-degraded",
            work_directory=place.work_directory,
        )

    def _sandbox_gone(self, sandbox: LocalSandbox) -> None:
        self._live.pop(sandbox.number, None)
        with contextlib.suppress(ValueError):
            self._parked.remove(sandbox)
        sandbox.release()
        if self.on_gone is not None:
            self.on_gone(sandbox)
        self._background(self._give_back(sandbox), even_when_closing=True)

    async def _give_back(self, sandbox: LocalSandbox) -> None:
        place = sandbox.place
        if place.cgroup is not None:
            for _ in range(500):
                if place.cgroup.try_remove():
                    break
                await asyncio.sleep(0.01)
            else:
                logger.error("The cgroup of sandbox %s could not be removed.", sandbox.id)
        if place.scratch is not None:
            await _remove_tree(place.scratch)
        if place.uid:
            self._free_uids.append(place.uid)

    def _background(self, work: Any, *, even_when_closing: bool = False) -> None:
        if self._closing and not even_when_closing:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _remove_tree(path: str) -> None:
    """Remove what code has built, however deep: rm does not recurse by name, Python's rmtree does."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        process = await asyncio.create_subprocess_exec(
            *command, "--", path, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await process.wait()


def _give_to_root(tree: str) -> None:
    """The zygote has written its font list; the sandboxes, of the same user, are to leave it alone."""
    for directory, _, names in os.walk(tree):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            os.chown(path, 0, 0)
            os.chmod(path, 0o755)  # noqa: S103 - to be read by the sandboxes
