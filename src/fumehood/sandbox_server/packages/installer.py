"""Turns requirements into layers to be attached, building each once."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server.packages import install_verification, requirements, uv_resolver
from fumehood.sandbox_server.packages.install_jail import DiskSpaceExhausted, InstallTimeout
from fumehood.sandbox_server.packages.install_verification import InvalidInstallTree
from fumehood.sandbox_server.packages.layer_store import (
    InstallRecord,
    LayerStore,
    PackageLayer,
    PinnedPackage,
)
from fumehood.sandbox_server.packages.uv_resolver import ResolutionFailed, UvResolver


class TenantLimiter:
    """At most `places` at once, `each` of one tenant; those who wait come in turn, a tenant after another.

    With `each` below `places`, somebody else's long work never takes the last place from a tenant that has none.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._free = total
        self._per_tenant = per_tenant
        self._slots_held: Counter[str] = Counter()
        # The tenant whose turn is next comes first; whoever had a place goes to the end.
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncGenerator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(tenant, deque()).append(turn)
        self._grant_slots()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._slots_held[tenant] -= 1
                self._slots_held += Counter()  # forgets who holds nothing
                if waiting := self._waiters.pop(tenant, None):
                    self._waiters[tenant] = waiting
            self._grant_slots()

    def _grant_slots(self) -> None:
        for tenant in [*self._waiters]:
            if not self._free:
                return
            if self._slots_held[tenant] < self._per_tenant:
                self._grant_slot(tenant)

    def _grant_slot(self, tenant: str) -> None:
        waiting = self._waiters.pop(tenant)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
                self._slots_held[tenant] += 1
                break
        if waiting:
            self._waiters[tenant] = waiting


logger = logging.getLogger(__name__)


_CACHE_SECONDS = 24 * 3600  # for so long a request leads to the same versions without asking the index


_MAX_BUILDS, _MAX_BUILDS_PER_TENANT = 3, 2


_POLL_SECONDS = 0.05


_PROBE_PACKAGE = "iniconfig"  # on most indexes, and not among the usual packages of sandboxes


_NEW_CONTAINER = "A new container is needed for other versions."


@dataclass(frozen=True, slots=True)
class PackageProvision:
    """What a request needs: a layer to attach, held; None when nothing is missing.

    replaced: name -> version of packages in the layer that sandboxes have in another version.
    """

    layer: PackageLayer | None
    pins: tuple[PinnedPackage, ...]
    replaced: Mapping[str, str]

    def share(self) -> "PackageProvision":
        return PackageProvision(None if self.layer is None else self.layer.share(), self.pins, self.replaced)

    def close(self) -> None:
        if self.layer is not None:
            self.layer.close()


NO_PROVISION = PackageProvision(None, (), {})


class _SharedBuild:
    """One build and those who wait for it: the last to go closes what it made."""

    def __init__(self, task: asyncio.Task[PackageProvision]) -> None:
        self.task = task
        self._waiters = 0
        task.add_done_callback(lambda _: self._close_if_unused())

    async def share(self) -> PackageProvision:
        self._waiters += 1
        try:
            # Whoever stops waiting does not stop it for the others, nor for the next one who asks.
            return (await asyncio.shield(self.task)).share()
        except asyncio.CancelledError:
            if self.task.cancelled():  # not whoever waits, but the installer
                raise requirements.requirements_error("The server is shutting down.") from None
            raise
        finally:
            self._waiters -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        done = self.task.done() and not self.task.cancelled()
        if done and not self._waiters and self.task.exception() is None:
            self.task.result().close()


class Installer:
    """One for a supervisor; equal requests at the same time lead to one build."""

    def __init__(self, store: LayerStore, resolver: UvResolver) -> None:
        self.store = store
        self.base = resolver.base
        self._resolver = resolver
        self._builds: dict[str, _SharedBuild] = {}
        self.installed_count = self.failed_count = 0  # requests for what was not there already
        self._limiter = TenantLimiter(_MAX_BUILDS, _MAX_BUILDS_PER_TENANT)

    async def close(self) -> None:
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def provide(
        self, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str = ""
    ) -> PackageProvision:
        """A layer with what is missing for these requirements, already parsed; raises InstallFailed.

        may_replace: other versions than the present ones may be taken where nothing else will do.
        tenant: on whose account it is built, if nobody else is having it built already.
        """
        if not requirements.find_unmet(wanted, present):
            return NO_PROVISION
        about = [
            self.base.fingerprint,
            self._resolver.jail.index.identity,
            wanted,
            sorted(present.items()),
            may_replace,
        ]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        build = self._builds.get(key)
        if build is None:
            work = self._build(key, wanted, present, may_replace=may_replace, tenant=tenant)
            task = asyncio.create_task(work)
            build = self._builds[key] = _SharedBuild(task)
            task.add_done_callback(lambda _: self._builds.pop(key, None))
        try:
            provision = await build.share()
        except InstallFailed:
            self.failed_count += 1
            raise
        self.installed_count += 1
        return provision

    async def check_index(self, seconds: float) -> None:
        """Ask the index for something small; raises InstallFailed that says why nothing new can be had.

        An index that does not have it has answered all the same.
        """
        jail = replace(self._resolver.jail, timeout=seconds)
        try:
            async with self._staging() as staging:
                await UvResolver(jail, self.base).resolve(
                    [_PROBE_PACKAGE], {}, staging, fixed=False, offline=False
                )
        except ResolutionFailed as problem:
            if not uv_resolver.is_unknown_package(problem.uv_output):
                raise self._explain_error([_PROBE_PACKAGE], problem.uv_output) from None
        except InstallTimeout:
            raise _install_error(
                [_PROBE_PACKAGE], f"the package index did not answer within {seconds:g} s"
            ) from None
        except (DiskSpaceExhausted, OSError) as error:
            raise _install_error(
                [_PROBE_PACKAGE], f"the server could not try: {error or 'no space is left'}"
            ) from error

    async def _build(
        self, key: str, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str
    ) -> PackageProvision:
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._lock_request(key, stack)
                if found := self._find_cached(key, fresh=True):
                    return found
                async with self._limiter.slot(tenant):
                    staging = await stack.enter_async_context(self._staging())
                    return await self._resolve_and_install(
                        key, wanted, present, staging, may_replace=may_replace
                    )
        except (InstallTimeout, TimeoutError):
            seconds = self._resolver.jail.timeout
            raise _install_error(wanted, f"it took longer than {seconds:g} s and was stopped") from None
        except DiskSpaceExhausted:
            raise _install_error(wanted, "the server has too little space left for them") from None
        except InvalidInstallTree as error:
            raise _install_error(wanted, f"what they unpack to is refused: {error}") from None
        except OSError as error:
            logger.error("Packages could not be installed: %s", error)
            raise _install_error(wanted, f"the server could not store them: {error}") from error

    @contextlib.asynccontextmanager
    async def _staging(self) -> AsyncGenerator[Path]:
        work = contextlib.ExitStack()
        path = work.enter_context(self.store.make_staging_directory())
        try:
            yield path
        finally:
            await asyncio.to_thread(work.close)  # a failed build may have left much

    async def _lock_request(self, key: str, stack: contextlib.AsyncExitStack) -> None:
        """Wait while another supervisor works on the same request."""
        async with asyncio.timeout(2 * self._resolver.jail.timeout):
            while True:
                turn = contextlib.ExitStack()
                if turn.enter_context(self.store.try_lock_request(key)):
                    stack.push(turn)
                    return
                turn.close()
                await asyncio.sleep(_POLL_SECONDS)

    def _find_cached(self, key: str, *, fresh: bool) -> PackageProvision | None:
        request = self.store.load_record(key)
        if request is None or (fresh and time.time() - request.made_at > _CACHE_SECONDS):
            return None
        layer = None
        if request.layer is not None:
            layer = self.store.open_layer(request.layer)
            if layer is None:
                return None
        return PackageProvision(layer, tuple(request.pins), request.replaced)

    async def _resolve_and_install(
        self,
        key: str,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
    ) -> PackageProvision:
        offline = False
        try:
            pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=False)
        except ResolutionFailed as problem:
            if not problem.is_network_error:
                raise self._explain_error(wanted, problem.uv_output) from None
            if found := self._find_cached(key, fresh=False):
                return found
            said = self._resolver.jail.index.redact(problem.uv_output)
            logger.warning("The package index cannot be reached; trying what was fetched before. %s", said)
            offline = True
            try:
                pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=True)
            except ResolutionFailed:
                raise _install_error(
                    wanted, "the package index cannot be reached, and not all of it was fetched before"
                ) from None
        missing = [pin for pin in pins if present.get(pin.name) != pin.version]
        replaced = {pin.name: pin.version for pin in missing if pin.name in present}
        layer = await self._build_layer(wanted, missing, staging, offline=offline) if missing else None
        name = None if layer is None else layer.key
        self.store.save_record(key, InstallRecord(missing, name, replaced, time.time()))
        return PackageProvision(layer, tuple(missing), replaced)

    async def _resolve(
        self,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
        offline: bool,
    ) -> list[PinnedPackage]:
        """With what is present as it is; if that cannot be, with other versions, or an error that says which."""
        try:
            return await self._resolver.resolve(wanted, present, staging, fixed=True, offline=offline)
        except ResolutionFailed as failure:
            if not failure.has_no_solution:
                raise
            problem = failure
            try:
                other = await self._resolver.resolve(wanted, present, staging, fixed=False, offline=offline)
            except ResolutionFailed as further:
                # Without the constraint of what is present the reason is the true one.
                raise (further if further.has_no_solution or further.is_network_error else problem) from None
        if may_replace:
            return other
        conflicts = [
            f"{pin.name} {pin.version} is needed, and {pin.name} {present[pin.name]} is there"
            for pin in other
            if pin.name in present and present[pin.name] != pin.version
        ]
        if not conflicts:
            raise problem
        raise _install_error(wanted, f"{'; '.join(conflicts[:5])}. {_NEW_CONTAINER}".rstrip("."))

    async def _build_layer(
        self, wanted: Sequence[str], pins: list[PinnedPackage], staging: Path, *, offline: bool
    ) -> PackageLayer:
        about = [self.base.fingerprint, [[pin.name, pin.version, pin.hashes] for pin in pins]]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        if layer := self.store.open_layer(key):
            return layer
        jail = self._resolver.jail
        output = staging / "out"
        output.mkdir(mode=0o755)
        if jail.uid is not None:
            os.chown(output, jail.uid, jail.uid)
        finished = await self._resolver.install(pins, staging, output, offline=offline)
        if finished.exit_code != 0:
            raise self._explain_error(wanted, finished.stderr)
        (output / ".lock").unlink(missing_ok=True)  # uv's
        layer = await asyncio.to_thread(self.store.add_layer, output, key, pins)
        await asyncio.to_thread(self.store.evict)
        # uv keeps what it fetched for ever; past the bound it starts afresh.
        if await asyncio.to_thread(install_verification.measure_disk_usage, jail.cache) > jail.max_bytes:
            await self._resolver.empty_cache(staging)
        return layer

    def _explain_error(self, wanted: Sequence[str], said: str) -> InstallFailed:
        scrub: Callable[[str], str] = self._resolver.jail.index.redact
        return _install_error(wanted, uv_resolver.explain_failure(scrub(said)))


def _install_error(wanted: Sequence[str], reason: str) -> InstallFailed:
    shown = ", ".join(wanted[:5]) + (", …" if len(wanted) > 5 else "")
    return requirements.requirements_error(f"{shown} cannot be installed: {reason}.")
