"""Containers over sandboxes: who owns them, how long they live, which files they have; imports `interfaces`,
`figures`, `protocol` and siblings.

docs/containers.md tells what users may expect of them.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Self
from weakref import WeakValueDictionary

import msgspec

from fumehood.figures import ContainerFigures
from fumehood.interfaces import Blobs, Caller, Clock, Files, Kept, Sandbox, SandboxProvider, Sealer, Store
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.errors import ContainerExpired, InvalidRequest, NotFound, RateLimited, Unavailable
from fumehood.protocol.listing import Window
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import ArchiveFormat
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.sandbox.admission import approved, name_for, path_of
from fumehood.sandbox.container import ContainerSettings, House, Living, SandboxContainer, attached
from fumehood.sandbox.domain_secrets import DomainSecrets
from fumehood.sandbox.endings import ACTIVE_SECONDS, Endings
from fumehood.sandbox.given_files import GivenFiles
from fumehood.sandbox.kept_files import KeptFiles
from fumehood.sandbox.transfers import Given

logger = logging.getLogger(__name__)

_PREFIX = "cntr_"
_RANDOM_DIGITS = 32
_SEAL_DIGITS = 16
_MOST_KNOWN = 4096


class SandboxContainers:
    """`Containers` whose sandboxes come from a provider. `async with` sweeps meanwhile; the provider stays open.

    sealer: for what is secret about a container; without one, nothing secret is taken.
    uploads: where files are found by their ids; without them there are none.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        store: Store,
        blobs: Blobs,
        clock: Clock,
        settings: ContainerSettings | None = None,
        *,
        sealer: Sealer | None = None,
        uploads: Files | None = None,
        figures: ContainerFigures | None = None,
    ) -> None:
        chosen = settings or ContainerSettings()
        files = KeptFiles(store, blobs, clock, chosen.files)
        self._figures = figures or ContainerFigures()
        self._house = House(provider, store, files, clock, chosen, DomainSecrets(sealer), self._figures)
        self._uploads = uploads
        self._given = GivenFiles(self._house, blobs)
        self._living: OrderedDict[str, Living] = OrderedDict()  # those used last at the end
        self._endings = Endings(self._house, self._living)
        self._seal = secrets.token_bytes(32)
        self._beginning = WeakValueDictionary[str, asyncio.Lock]()
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._figures.live = len(await self._house.store.containers(running=True))
        if not self._house.settings.sandboxes_outlive:
            await self._endings.lose_sandboxes()
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="containers: sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write down what is not written yet; sandboxes stay."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        for living in list(self._living.values()):
            await living.write(self._house.store)

    async def _sweep_forever(self) -> None:
        settings = self._house.settings
        if settings.alone and settings.sandboxes_outlive:
            await self._try(self._endings.end_strays)
        while True:
            await self._house.clock.sleep(settings.sweep_seconds)
            await self._try(self.sweep)

    async def _try(self, sweep: Callable[[], Awaitable[None]]) -> None:
        try:
            await sweep()
        except Exception:
            logger.exception("Containers could not be swept.")

    async def sweep(self) -> None:
        """End what nobody uses any more."""
        await self._endings.sweep()

    # ---- containers -----------------------------------------------------------------------------------------------

    def reserve(self) -> str:
        """Nothing is kept of it: the id says itself, to this process alone, that it was given out here."""
        digits = secrets.token_hex(_RANDOM_DIGITS // 2)
        return f"{_PREFIX}{digits}{self._sealed(digits)}"

    def _sealed(self, digits: str) -> str:
        return hmac.new(self._seal, digits.encode(), hashlib.sha256).hexdigest()[:_SEAL_DIGITS]

    def _was_reserved(self, container_id: str) -> bool:
        digits = container_id.removeprefix(_PREFIX)
        body, seal = digits[:_RANDOM_DIGITS], digits[_RANDOM_DIGITS:]
        return hmac.compare_digest(seal.encode(), self._sealed(body).encode())

    def approve(self, spec: ContainerSpec) -> ContainerSpec:
        return approved(spec, self._house.settings)

    async def create(self, caller: Caller, spec: ContainerSpec) -> ContainerRecord:
        spec = self.approve(spec)
        try:
            wanted = await self._found(caller, spec.file_ids)
        except NotFound as error:
            raise InvalidRequest(error.message, param="file_ids", code="invalid_value") from None
        record = await self._begun(caller, self.reserve(), spec)
        try:
            await self._given.place(self._known(record), wanted)
        except BaseException:
            await self._endings.delete(record)
            raise
        return record

    async def check(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._current(await self._owned(caller, container_id))
        if record.status == "expired":
            raise ContainerExpired("Container is expired.")
        return record

    async def open(
        self, caller: Caller, container_id: str, spec: ContainerSpec, heir_of: str | None = None
    ) -> SandboxContainer:
        try:
            record = await self.check(caller, container_id)
        except NotFound:
            if not self._was_reserved(container_id):
                raise
            record = await self._begun(caller, container_id, self.approve(spec), automatic=True)
        else:
            heir_of = None
        container = SandboxContainer(self._house, self._known(record))
        try:
            if heir_of is not None and not record.incarnation:
                await self._inherit(caller, record, heir_of)
            if (await self._used(record)).over:
                raise ContainerExpired("Container is expired.")  # at this very moment
        except BaseException:
            container.leave()
            raise
        return container

    async def container(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._current(await self._owned(caller, container_id))
        return record if record.status == "expired" else (await self._used(record)).record

    async def containers(
        self, caller: Caller, window: Window, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        found = await self._house.store.list_containers(caller.tenant, window, name)
        return [self._shown(record) for record in found]

    async def delete(self, caller: Caller, container_id: str) -> None:
        await self._endings.delete(await self._owned(caller, container_id))

    async def _owned(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._house.store.container(container_id)
        if record is None or record.tenant != caller.tenant or record.status == "deleted":
            raise NotFound(f"Container with id '{clean_name(container_id, 80)}' not found.")
        return record

    async def _current(self, record: ContainerRecord) -> ContainerRecord:
        """What is over ends now, or as soon as nobody is in it any more."""
        if record.status != "running" or not self._endings.is_over(record):
            return record
        if not await self._endings.expire(record):
            latest = await self._house.store.container(record.id)
            if latest is not None and not self._endings.is_over(latest):
                return latest  # another process was faster, and uses it
        return msgspec.structs.replace(record, status="expired")

    def _shown(self, record: ContainerRecord) -> ContainerRecord:
        """The record as things stand at this moment, whether or not somebody has ended yet what is over."""
        if self._endings.is_over(record):
            return msgspec.structs.replace(record, status="expired")
        return msgspec.structs.replace(record, last_active_at=self._endings.active_at(record))

    async def _used(self, record: ContainerRecord) -> Living:
        """What this process knows of a container that is used now."""
        living = self._known(record)
        now = self._house.clock.now()
        living.change(last_active_at=now)
        if now - living.stored.last_active_at > ACTIVE_SECONDS and not living.users:
            await living.write(self._house.store)
        return living

    def _known(self, record: ContainerRecord) -> Living:
        living = self._living.get(record.id)
        if living is None:
            living = self._living[record.id] = Living(record, record)
        elif living.stored != record and not living.users:
            living.learn(record)
        self._living.move_to_end(record.id)
        if len(self._living) > _MOST_KNOWN:
            idle = next((name for name, one in self._living.items() if not one.in_use), record.id)
            del self._living[idle]
        return living

    async def _begun(
        self, caller: Caller, container_id: str, spec: ContainerSpec, *, automatic: bool = False
    ) -> ContainerRecord:
        store, tenant = self._house.store, caller.tenant
        async with self._turn(tenant):  # so that those of this process need not try again
            while True:
                if await store.container(container_id) is not None:
                    return await self.check(caller, container_id)
                running = await store.containers(tenant, running=True)
                await self._make_room(caller, running)
                now = self._house.clock.now()
                public, sealed = self._house.secrets.sealed(tenant, container_id, spec)
                record = ContainerRecord(
                    id=container_id,
                    tenant=tenant,
                    spec=public,
                    secrets=sealed,
                    automatic=automatic,
                    created_at=now,
                    last_active_at=now,
                )
                # Where another process has begun one since they were counted, there may be one too many.
                if await store.put_container(record, beside=[one.id for one in running]):
                    self._figures.begun += 1
                    self._figures.live += 1
                    return record

    async def _make_room(self, caller: Caller, running: Sequence[ContainerRecord]) -> None:
        """For one more; raises RateLimited."""
        most = caller.limits.containers or self._house.settings.containers_per_tenant
        if len(running) >= most:
            running = [one for one in running if (await self._current(one)).status == "running"]
        if len(running) >= most and not await self._endings.make_room(running, most):
            self._figures.refused += 1
            raise RateLimited(
                f"As many containers are running as are allowed ({most}): delete one, or wait for one to expire.",
                code="container_limit_exceeded",
            )

    def _turn(self, tenant: str) -> asyncio.Lock:
        """A tenant's own: what is in the way may have to be ended first, and that can take its time."""
        turn = self._beginning.get(tenant)
        if turn is None:
            turn = self._beginning[tenant] = asyncio.Lock()
        return turn

    async def _inherit(self, caller: Caller, record: ContainerRecord, earlier_id: str) -> None:
        """Give it what users had put into a container that has expired."""
        try:
            earlier = await self._current(await self._owned(caller, earlier_id))
        except NotFound:
            return
        if earlier.status != "expired":
            return
        files = [
            file for file in await self._house.store.files(earlier_id) if file.source == "user" and file.blob
        ]
        wanted = [Given(file.path, Kept(file.blob, file.bytes), file.executable) for file in files]
        try:
            await self._given.place(self._known(record), wanted)
        except NotFound:  # let go of at this very moment
            logger.warning("The files of %s could not be given to %s.", earlier_id, record.id)

    # ---- files ----------------------------------------------------------------------------------------------------

    async def put(
        self, caller: Caller, container_id: str, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        path = path_of(path)
        living = await self._with_files(caller, container_id)
        with living.used():
            return await self._given.put(living, path, content)

    async def place(
        self, caller: Caller, container_id: str, file_ids: Sequence[str]
    ) -> Sequence[ContainerFileRecord]:
        living = await self._with_files(caller, container_id)
        with living.used():
            return await self._given.place(living, await self._found(caller, file_ids))

    async def unpack(
        self,
        caller: Caller,
        container_id: str,
        content: bytes | AsyncIterable[bytes],
        kind: ArchiveFormat,
        into: str = "",
    ) -> Sequence[ContainerFileRecord]:
        into = path_of(into) if into else ""
        living = await self._with_files(caller, container_id)
        with living.used():
            return await self._given.unpack(living, content, kind, into)

    async def _found(self, caller: Caller, file_ids: Sequence[str]) -> list[Given]:
        """Uploads of the caller's; raises NotFound."""
        if file_ids and self._uploads is None:
            raise NotFound("This server keeps no uploads.")
        uploads = [
            await self._uploads.file(caller, file_id) for file_id in dict.fromkeys(file_ids) if self._uploads
        ]
        return [
            Given(name_for(upload.filename, upload.id), Kept(upload.blob, upload.bytes)) for upload in uploads
        ]

    async def file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        await self._with_files(caller, container_id)
        record = await self._house.store.file(container_id, file_id)
        if record is None:
            raise _no_file(container_id, file_id)
        return record

    async def files(
        self, caller: Caller, container_id: str, window: Window | None = None
    ) -> Sequence[ContainerFileRecord]:
        await self._with_files(caller, container_id)
        return await self._house.store.files(container_id, window)

    async def read(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        living = await self._with_files(caller, container_id)
        record = await self._house.store.file(container_id, file_id)
        if record is None:
            raise _no_file(container_id, file_id)

        async def find_sandbox() -> Sandbox | None:
            return await attached(self._house.provider, living.record)

        with living.used():
            try:
                async with aclosing(self._house.files.read(record, find_sandbox, start, end)) as pieces:
                    async for piece in pieces:
                        yield piece
            except KeyError:
                raise _no_file(container_id, file_id) from None
            except SandboxError as error:
                raise Unavailable("The container's sandbox cannot be reached; try again later.") from error

    async def delete_file(self, caller: Caller, container_id: str, file_id: str) -> None:
        living = await self._with_files(caller, container_id)
        with living.used():
            if not await self._given.delete(living, file_id):
                raise _no_file(container_id, file_id)

    async def _with_files(self, caller: Caller, container_id: str) -> Living:
        try:
            return await self._used(await self.check(caller, container_id))
        except ContainerExpired:
            raise NotFound("Container is expired; its files are gone.") from None


def _no_file(container_id: str, file_id: str) -> NotFound:
    return NotFound(
        f"There is no file '{clean_name(file_id, 80)}' in container '{clean_name(container_id, 80)}'."
    )
