"""Provides layers for requirements; equal requests at the same time share a build."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.packages import installed_tree_check, requirements, uv_client
from fumehood.sandbox_server.packages.install_jail import DiskSpaceExhausted, InstallTimeout
from fumehood.sandbox_server.packages.installed_tree_check import InvalidInstallTree
from fumehood.sandbox_server.packages.layer_store import (
    InstallCacheEntry,
    LayerStore,
    PackageLayerHandle,
    PinnedPackage,
)
from fumehood.sandbox_server.packages.uv_client import ResolutionFailed, UvClient

logger = logging.getLogger(__name__)

type ProgressCallback = Callable[[str], None]

_CACHE_SECONDS = 24 * 3600  # how long a request gets the same versions without asking the index
_MAX_BUILDS, _MAX_BUILDS_PER_TENANT = 3, 2
_PROBE_PACKAGE = "iniconfig"  # small, on most indexes, and not among the packages of sandboxes
_NEW_CONTAINER = "A new container is needed for other versions."


class LayerHandle(Protocol):
    """A layer in use; it stays until `close`."""

    @property
    def key(self) -> str: ...

    def share(self) -> "LayerHandle": ...

    def close(self) -> None: ...


class PackageInstaller(Protocol):
    """Provides layers: `Installer` on a host, `PodInstaller` in a pod."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Name and version of the packages that every sandbox has."""
        ...

    @property
    def installed_count(self) -> int: ...
    @property
    def failed_count(self) -> int: ...

    async def provide(
        self, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str = ""
    ) -> "InstallResult":
        """As `Installer.provide`."""
        ...

    async def close(self) -> None: ...


class TenantLimiter:
    """Limits concurrent work: `total` slots, `per_tenant` of one tenant; waiting tenants take turns.

    With `per_tenant` below `total`, one tenant cannot occupy all slots.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._free = total
        self._per_tenant = per_tenant
        self._slots_held: Counter[str] = Counter()
        # In the order of the tenants' turns; a tenant that had a slot goes to the end.
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncGenerator[None]:
        """Wait for a slot and hold it within the context."""
        granted = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(tenant, deque()).append(granted)
        self._grant_slots()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += 1
                self._slots_held[tenant] -= 1
                self._slots_held += Counter()  # drops zero counts
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
            granted = waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                self._free -= 1
                self._slots_held[tenant] += 1
                break
        if waiting:
            self._waiters[tenant] = waiting


@dataclass(frozen=True, slots=True)
class InstallResult:
    """The answer to a request: a layer to attach, locked while this is open; None if nothing is missing.

    replaced: name -> version of packages in the layer that sandboxes have in another version.
    """

    layer: LayerHandle | None
    pins: tuple[PinnedPackage, ...]
    replaced: Mapping[str, str]

    def share(self) -> "InstallResult":
        """Return another provision of the same layer, to be closed separately."""
        return InstallResult(None if self.layer is None else self.layer.share(), self.pins, self.replaced)

    def describe_pins(self) -> list[str]:
        """Name and version of each package in the layer."""
        return [f"{pin.name} {pin.version}" for pin in self.pins]

    def close(self) -> None:
        if self.layer is not None:
            self.layer.close()


NO_PROVISION = InstallResult(None, (), {})


class _SharedBuild:
    """A build and its waiters; the last waiter closes the result."""

    def __init__(self, task: asyncio.Task[InstallResult]) -> None:
        self.task = task
        self._waiters = 0
        task.add_done_callback(lambda _: self._close_if_unused())

    async def share(self) -> InstallResult:
        self._waiters += 1
        try:
            # A cancelled waiter does not cancel the build for others.
            return (await asyncio.shield(self.task)).share()
        except asyncio.CancelledError:
            if self.task.cancelled():  # by the installer, not by the waiter
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
    """The installer of a supervisor; equal requests at the same time share a build."""

    def __init__(self, store: LayerStore, resolver: UvClient) -> None:
        self.store = store
        self.base = resolver.base
        self._resolver = resolver
        self._builds: dict[str, _SharedBuild] = {}
        self.installed_count = self.failed_count = 0  # requests for missing packages
        self._limiter = TenantLimiter(_MAX_BUILDS, _MAX_BUILDS_PER_TENANT)

    @property
    def versions(self) -> Mapping[str, str]:
        return self.base.versions

    async def close(self) -> None:
        """Cancel all builds."""
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def provide(
        self, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str = ""
    ) -> InstallResult:
        """Return a layer with what is missing for these parsed requirements. Raises InstallFailed.

        present: name -> version of the packages in the sandbox.
        may_replace: the layer may have other versions of present packages if there is no other solution.
        tenant: counts against its limit, unless the build is running already.
        """
        if not requirements.find_unmet(wanted, present):
            return NO_PROVISION
        facts = [
            self.base.fingerprint,
            self._resolver.jail.index.identity,
            wanted,
            sorted(present.items()),
            may_replace,
        ]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        build = self._builds.get(key)
        if build is None:
            task = asyncio.create_task(
                self._build(key, wanted, present, may_replace=may_replace, tenant=tenant)
            )
            build = self._builds[key] = _SharedBuild(task)
            task.add_done_callback(lambda _: self._builds.pop(key, None))
        try:
            provision = await build.share()
        except InstallFailed as error:
            self.failed_count += 1
            structured_logging.log_event(
                "packages_failed", level=logging.WARNING, reason=error.message, tenant=tenant
            )
            raise
        self.installed_count += 1
        return provision

    async def check_index(self, seconds: float) -> None:
        """Resolve a small package to test the index. Raises InstallFailed.

        An index that does not have the package has answered, which is enough.
        """
        jail = self._resolver.jail.with_timeout(seconds)
        try:
            async with self._staging() as staging:
                await UvClient(jail, self.base).resolve(
                    [_PROBE_PACKAGE], {}, staging, fixed=False, offline=False
                )
        except ResolutionFailed as failure:
            if not uv_client.is_unknown_package(failure.uv_output):
                raise self._explain_error([_PROBE_PACKAGE], failure.uv_output) from None
        except InstallTimeout:
            raise _install_error(
                [_PROBE_PACKAGE], f"the package index did not answer within {seconds:g} s"
            ) from None
        except (DiskSpaceExhausted, OSError) as error:
            raise _install_error(
                [_PROBE_PACKAGE], f"the server could not check the index: {error or 'no space is left'}"
            ) from error

    async def _build(
        self, key: str, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str
    ) -> InstallResult:
        try:
            if found := self._find_cached(key, fresh=True):
                return found
            async with self._limiter.slot(tenant), self._staging() as staging:
                started_at = time.monotonic()
                names = requirements.summarise(requirements.find_unmet(wanted, present))
                structured_logging.log_event("packages_installing", requirements=names, tenant=tenant)
                result = await self._resolve_and_install(
                    key, wanted, present, staging, may_replace=may_replace
                )
                structured_logging.log_event(
                    "packages_installed",
                    packages=requirements.summarise(result.describe_pins()),
                    tenant=tenant,
                    duration_ms=round((time.monotonic() - started_at) * 1000),
                )
                return result
        except InstallTimeout:
            seconds = self._resolver.jail.timeout
            raise _install_error(wanted, f"it took longer than {seconds:g} s and was stopped") from None
        except DiskSpaceExhausted:
            raise _install_error(wanted, "the server has too little disk space left") from None
        except InvalidInstallTree as error:
            raise _install_error(wanted, f"the unpacked files are refused: {error}") from None
        except OSError as error:
            logger.error("Packages could not be installed: %s", error)
            raise _install_error(wanted, f"the server could not store them: {error}") from error

    @contextlib.asynccontextmanager
    async def _staging(self) -> AsyncGenerator[Path]:
        stack = contextlib.ExitStack()
        path = stack.enter_context(self.store.make_staging_directory())
        try:
            yield path
        finally:
            await asyncio.to_thread(stack.close)  # removing a failed build may take long

    def _find_cached(self, key: str, *, fresh: bool) -> InstallResult | None:
        record = self.store.load_record(key)
        if record is None or (fresh and time.time() - record.made_at > _CACHE_SECONDS):
            return None
        layer = None
        if record.layer is not None:
            layer = self.store.open_layer(record.layer)
            if layer is None:
                return None
        return InstallResult(layer, tuple(record.pins), record.replaced)

    async def _resolve_and_install(
        self,
        key: str,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
    ) -> InstallResult:
        offline = False
        try:
            pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=False)
        except ResolutionFailed as failure:
            if not failure.is_network_error:
                raise self._explain_error(wanted, failure.uv_output) from None
            if found := self._find_cached(key, fresh=False):
                return found
            uv_output = self._resolver.jail.index.redact(failure.uv_output)
            logger.warning("The package index cannot be reached; using uv's cache. %s", uv_output)
            offline = True
            try:
                pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=True)
            except ResolutionFailed:
                raise _install_error(
                    wanted, "the package index cannot be reached, and not all packages are cached"
                ) from None
        missing = [pin for pin in pins if present.get(pin.name) != pin.version]
        replaced = {pin.name: pin.version for pin in missing if pin.name in present}
        layer = await self._build_layer(wanted, missing, staging, offline=offline) if missing else None
        layer_key = None if layer is None else layer.key
        self.store.save_record(key, InstallCacheEntry(missing, layer_key, replaced, time.time()))
        return InstallResult(layer, tuple(missing), replaced)

    async def _resolve(
        self,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
        offline: bool,
    ) -> list[PinnedPackage]:
        """Resolve with the present versions; if there is no solution, with other versions.

        Without `may_replace`, raises InstallFailed that names the conflicts. Raises ResolutionFailed.
        """
        try:
            return await self._resolver.resolve(wanted, present, staging, fixed=True, offline=offline)
        except ResolutionFailed as failure:
            if not failure.has_no_solution:
                raise
            fixed_failure = failure
            try:
                pins = await self._resolver.resolve(wanted, present, staging, fixed=False, offline=offline)
            except ResolutionFailed as free_failure:
                # Without the present versions as constraints, the reason is the real one.
                is_reason = free_failure.has_no_solution or free_failure.is_network_error
                raise (free_failure if is_reason else fixed_failure) from None
        if may_replace:
            return pins
        conflicts = [
            f"{pin.name} {pin.version} is needed, but {pin.name} {present[pin.name]} is installed"
            for pin in pins
            if pin.name in present and present[pin.name] != pin.version
        ]
        if not conflicts:
            raise fixed_failure
        raise _install_error(wanted, f"{'; '.join(conflicts[:5])}. {_NEW_CONTAINER}".rstrip("."))

    async def _build_layer(
        self, wanted: Sequence[str], pins: list[PinnedPackage], staging: Path, *, offline: bool
    ) -> PackageLayerHandle:
        facts = [self.base.fingerprint, [[pin.name, pin.version, pin.hashes] for pin in pins]]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if layer := self.store.open_layer(key):
            return layer
        jail = self._resolver.jail
        output = staging / "out"
        output.mkdir(mode=0o755)
        if jail.uid is not None:
            os.chown(output, jail.uid, jail.uid)
        result = await self._resolver.install(pins, staging, output, offline=offline)
        if result.exit_code != 0:
            raise self._explain_error(wanted, result.stderr)
        (output / ".lock").unlink(missing_ok=True)  # of uv
        layer = await asyncio.to_thread(self.store.add_layer, output, key, pins)
        await asyncio.to_thread(self.store.evict)
        # uv never removes anything from its cache; empty it at the limit.
        if await asyncio.to_thread(installed_tree_check.measure_disk_usage, jail.cache) > jail.max_bytes:
            await self._resolver.empty_cache(staging)
        return layer

    def _explain_error(self, wanted: Sequence[str], uv_output: str) -> InstallFailed:
        redacted = self._resolver.jail.index.redact(uv_output)
        return _install_error(wanted, uv_client.explain_failure(redacted))


def _install_error(wanted: Sequence[str], reason: str) -> InstallFailed:
    names = ", ".join(wanted[:5]) + (", …" if len(wanted) > 5 else "")
    return requirements.requirements_error(f"{names} cannot be installed: {reason}.")
