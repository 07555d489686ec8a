"""Turns requirements into layers to be attached, building each once; imports siblings and the sandbox's errors."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood.protocol.sandbox_errors import InstallFailed
from fumehood.sandboxd.packages import requirements, resolving, trees
from fumehood.sandboxd.packages.jail import TookTooLong, TookTooMuch
from fumehood.sandboxd.packages.resolving import Resolver, Unresolved
from fumehood.sandboxd.packages.store import Layer, Pin, Request, Store
from fumehood.sandboxd.packages.trees import UnfitTree
from fumehood.sandboxd.packages.turns import Turns

logger = logging.getLogger(__name__)

_FRESH_SECONDS = 24 * 3600  # for so long a request leads to the same versions without asking the index
_AT_ONCE, _OF_ONE_TENANT = 3, 2
_POLL = 0.05
_SMALL = "iniconfig"  # on most indexes, and not among the usual packages of sandboxes
_NEW_CONTAINER = "A new container is needed for other versions."


@dataclass(frozen=True, slots=True)
class Provision:
    """What a request needs: a layer to attach, held; None when nothing is missing.

    replaced: name -> version of packages in the layer that sandboxes have in another version.
    """

    layer: Layer | None
    pins: tuple[Pin, ...]
    replaced: Mapping[str, str]

    def share(self) -> "Provision":
        return Provision(None if self.layer is None else self.layer.share(), self.pins, self.replaced)

    def close(self) -> None:
        if self.layer is not None:
            self.layer.close()


NOTHING = Provision(None, (), {})


class _Build:
    """One build and those who wait for it: the last to go closes what it made."""

    def __init__(self, task: asyncio.Task[Provision]) -> None:
        self.task = task
        self._waiting = 0
        task.add_done_callback(lambda _: self._close_if_unwanted())

    async def share(self) -> Provision:
        self._waiting += 1
        try:
            # Whoever stops waiting does not stop it for the others, nor for the next one who asks.
            return (await asyncio.shield(self.task)).share()
        except asyncio.CancelledError:
            if self.task.cancelled():  # not whoever waits, but the installer
                raise requirements.refused("The server is shutting down.") from None
            raise
        finally:
            self._waiting -= 1
            self._close_if_unwanted()

    def _close_if_unwanted(self) -> None:
        done = self.task.done() and not self.task.cancelled()
        if done and not self._waiting and self.task.exception() is None:
            self.task.result().close()


class Installer:
    """One for a supervisor; equal requests at the same time lead to one build."""

    def __init__(self, store: Store, resolver: Resolver) -> None:
        self.store = store
        self.base = resolver.base
        self._resolver = resolver
        self._builds: dict[str, _Build] = {}
        self.installed = self.failed = 0  # requests for what was not there already
        self._turns = Turns(_AT_ONCE, _OF_ONE_TENANT)

    async def close(self) -> None:
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def provide(
        self, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str = ""
    ) -> Provision:
        """A layer with what is missing for these requirements, already parsed; raises InstallFailed.

        may_replace: other versions than the present ones may be taken where nothing else will do.
        tenant: on whose account it is built, if nobody else is having it built already.
        """
        if not requirements.unmet(wanted, present):
            return NOTHING
        about = [
            self.base.key,
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
            build = self._builds[key] = _Build(task)
            task.add_done_callback(lambda _: self._builds.pop(key, None))
        try:
            provision = await build.share()
        except InstallFailed:
            self.failed += 1
            raise
        self.installed += 1
        return provision

    async def reach_index(self, seconds: float) -> None:
        """Ask the index for something small; raises InstallFailed that says why nothing new can be had.

        An index that does not have it has answered all the same.
        """
        jail = replace(self._resolver.jail, timeout=seconds)
        try:
            async with self._staging() as staging:
                await Resolver(jail, self.base).resolve([_SMALL], {}, staging, fixed=False, offline=False)
        except Unresolved as problem:
            if not resolving.is_unknown(problem.said):
                raise self._explained([_SMALL], problem.said) from None
        except TookTooLong:
            raise _failed([_SMALL], f"the package index did not answer within {seconds:g} s") from None
        except (TookTooMuch, OSError) as error:
            raise _failed([_SMALL], f"the server could not try: {error or 'no space is left'}") from error

    async def _build(
        self, key: str, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str
    ) -> Provision:
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._turn(key, stack)
                if found := self._recall(key, fresh=True):
                    return found
                async with self._turns.place(tenant):
                    staging = await stack.enter_async_context(self._staging())
                    return await self._make(key, wanted, present, staging, may_replace=may_replace)
        except (TookTooLong, TimeoutError):
            seconds = self._resolver.jail.timeout
            raise _failed(wanted, f"it took longer than {seconds:g} s and was stopped") from None
        except TookTooMuch:
            raise _failed(wanted, "the server has too little space left for them") from None
        except UnfitTree as error:
            raise _failed(wanted, f"what they unpack to is refused: {error}") from None
        except OSError as error:
            logger.error("Packages could not be installed: %s", error)
            raise _failed(wanted, f"the server could not store them: {error}") from error

    @contextlib.asynccontextmanager
    async def _staging(self) -> AsyncGenerator[Path]:
        work = contextlib.ExitStack()
        path = work.enter_context(self.store.staging())
        try:
            yield path
        finally:
            await asyncio.to_thread(work.close)  # a failed build may have left much

    async def _turn(self, key: str, stack: contextlib.AsyncExitStack) -> None:
        """Wait while another supervisor works on the same request."""
        async with asyncio.timeout(2 * self._resolver.jail.timeout):
            while True:
                turn = contextlib.ExitStack()
                if turn.enter_context(self.store.turn(key)):
                    stack.push(turn)
                    return
                turn.close()
                await asyncio.sleep(_POLL)

    def _recall(self, key: str, *, fresh: bool) -> Provision | None:
        request = self.store.recall(key)
        if request is None or (fresh and time.time() - request.made_at > _FRESH_SECONDS):
            return None
        layer = None
        if request.layer is not None:
            layer = self.store.find(request.layer)
            if layer is None:
                return None
        return Provision(layer, tuple(request.pins), request.replaced)

    async def _make(
        self,
        key: str,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
    ) -> Provision:
        offline = False
        try:
            pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=False)
        except Unresolved as problem:
            if not problem.network:
                raise self._explained(wanted, problem.said) from None
            if found := self._recall(key, fresh=False):
                return found
            said = self._resolver.jail.index.scrub(problem.said)
            logger.warning("The package index cannot be reached; trying what was fetched before. %s", said)
            offline = True
            try:
                pins = await self._resolve(wanted, present, staging, may_replace=may_replace, offline=True)
            except Unresolved:
                raise _failed(
                    wanted, "the package index cannot be reached, and not all of it was fetched before"
                ) from None
        missing = [pin for pin in pins if present.get(pin.name) != pin.version]
        replaced = {pin.name: pin.version for pin in missing if pin.name in present}
        layer = await self._layer(wanted, missing, staging, offline=offline) if missing else None
        name = None if layer is None else layer.key
        self.store.remember(key, Request(missing, name, replaced, time.time()))
        return Provision(layer, tuple(missing), replaced)

    async def _resolve(
        self,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        may_replace: bool,
        offline: bool,
    ) -> list[Pin]:
        """With what is present as it is; if that cannot be, with other versions, or an error that says which."""
        try:
            return await self._resolver.resolve(wanted, present, staging, fixed=True, offline=offline)
        except Unresolved as failure:
            if not failure.no_solution:
                raise
            problem = failure
            try:
                other = await self._resolver.resolve(wanted, present, staging, fixed=False, offline=offline)
            except Unresolved as further:
                # Without the constraint of what is present the reason is the true one.
                raise (further if further.no_solution or further.network else problem) from None
        if may_replace:
            return other
        conflicts = [
            f"{pin.name} {pin.version} is needed, and {pin.name} {present[pin.name]} is there"
            for pin in other
            if pin.name in present and present[pin.name] != pin.version
        ]
        if not conflicts:
            raise problem
        raise _failed(wanted, f"{'; '.join(conflicts[:5])}. {_NEW_CONTAINER}".rstrip("."))

    async def _layer(self, wanted: Sequence[str], pins: list[Pin], staging: Path, *, offline: bool) -> Layer:
        about = [self.base.key, [[pin.name, pin.version, pin.hashes] for pin in pins]]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        if layer := self.store.find(key):
            return layer
        jail = self._resolver.jail
        output = staging / "out"
        output.mkdir(mode=0o755)
        if jail.uid is not None:
            os.chown(output, jail.uid, jail.uid)
        finished = await self._resolver.install(pins, staging, output, offline=offline)
        if finished.code != 0:
            raise self._explained(wanted, finished.stderr)
        (output / ".lock").unlink(missing_ok=True)  # uv's
        layer = await asyncio.to_thread(self.store.adopt, output, key, pins)
        await asyncio.to_thread(self.store.evict)
        # uv keeps what it fetched for ever; past the bound it starts afresh.
        if await asyncio.to_thread(trees.used_bytes, jail.cache) > jail.most_bytes:
            await self._resolver.empty_cache(staging)
        return layer

    def _explained(self, wanted: Sequence[str], said: str) -> InstallFailed:
        scrub: Callable[[str], str] = self._resolver.jail.index.scrub
        return _failed(wanted, resolving.explain(scrub(said)))


def _failed(wanted: Sequence[str], reason: str) -> InstallFailed:
    shown = ", ".join(wanted[:5]) + (", …" if len(wanted) > 5 else "")
    return requirements.refused(f"{shown} cannot be installed: {reason}.")
