"""Containers that two processes use on one store: neither ends what the other is using; imports fumehood."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.errors import ContainerExpired, RateLimited
from fumehood.protocol.listing import Window
from fumehood.sandbox.container import ContainerSettings
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobs, ScriptedSandboxes
from tests.support.containers import SOMEBODY, Host, host

ROOT = Path(__file__).resolve().parents[2]
ONE = ContainerSettings(containers_per_tenant=1)

type Tell = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def another_process(path: Path) -> AsyncGenerator[Tell]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.container_holder",
        str(path),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    writer, reader = process.stdin, process.stdout

    async def tell(line: str) -> str:
        writer.write(f"{line}\n".encode())
        async with asyncio.timeout(60):
            return (await reader.readline()).decode().strip()

    try:
        yield tell
    finally:
        writer.close()
        await process.wait()


async def test_what_another_process_holds_makes_no_room_and_does_not_expire(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock, store = FakeClock(), await SqliteStore.open(path, shared=True)
    here = SandboxContainers(ScriptedSandboxes(), store, ReferredBlobs(MemoryBlobs(), store), clock, ONE)

    async def begin() -> bool:
        try:
            (await here.open(SOMEBODY, here.reserve(), ContainerSpec())).leave()
        except RateLimited:
            return False
        return True

    async with another_process(path) as tell:
        name = here.reserve()
        (await here.open(SOMEBODY, name, ContainerSpec())).leave()
        assert await tell(f"open {name}") == "done"
        assert not await begin()  # although it was used last by this process, as far as that knows
        for _ in range(30):  # longer than an idle one lives
            clock.advance(60)
            assert await tell("advance 60") == "done"
            assert await tell("sweep") == "done"
            assert not await begin()
            await here.sweep()
        assert await tell("leave") == "done"
        clock.advance(121)
        assert await begin()
        assert await tell(f"open {name}") == "ContainerExpired"
    await store.close()


@pytest.mark.parametrize("over", [False, True], ids=["makes room", "expires"])
async def test_what_another_process_opens_at_the_last_moment_does_not_end(
    over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host(settings=ONE) as here:
        idle = await here.open()
        idle.leave()
        here.clock.advance(20 * 60 if over else 121)
        other = here.beside()
        files = here.kept.files

        async def meanwhile(container_id: str, window: Window | None = None) -> Sequence[ContainerFileRecord]:
            monkeypatch.setattr(here.kept, "files", files)
            # As a process that has looked at it a moment before would.
            record = await here.record(idle)
            await other.containers._used(record)  # pyright: ignore[reportPrivateUsage]
            return await files(container_id, window)

        monkeypatch.setattr(here.kept, "files", meanwhile)
        if over:
            await here.containers.sweep()
        else:
            with pytest.raises(RateLimited):
                await here.open()
        assert (await here.record(idle)).status == "running"
        (await here.open(idle.id)).leave()  # which knows it as well as before


@pytest.mark.parametrize("settings", [ONE, ContainerSettings(containers_per_tenant=2)], ids=["one", "two"])
async def test_what_another_process_begins_at_the_same_moment_counts(
    settings: ContainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host(settings=settings) as here:
        other = here.beside()
        containers = here.kept.containers

        async def meanwhile(tenant: str | None = None, *, running: bool = False) -> Sequence[ContainerRecord]:
            monkeypatch.setattr(here.kept, "containers", containers)
            found = await containers(tenant, running=running)
            await other.open()
            return found

        monkeypatch.setattr(here.kept, "containers", meanwhile)
        if settings is ONE:
            with pytest.raises(RateLimited):
                await here.open()
            assert here.figures.refused == 1
        else:
            await here.open()
            assert (here.figures.begun, other.figures.begun) == (1, 1)
        assert len(await here.kept.containers(running=True)) == settings.containers_per_tenant


async def test_one_that_is_over_and_still_used_does_not_count() -> None:
    """Users are shown that it has expired, though the store says that it runs."""
    async with host(settings=ONE) as here:
        old = await here.open()
        here.clock.advance(24 * 3600)
        (await here.open()).leave()
        assert len(await here.kept.containers(running=True)) == 2
        old.leave()


async def test_what_ends_at_the_last_moment_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with host(settings=ONE) as here:
        idle = await here.open()
        idle.leave()
        here.clock.advance(121)
        other = here.beside()
        change = here.kept.change_container

        async def meanwhile(record: ContainerRecord, *args: object, **options: object) -> bool:
            monkeypatch.setattr(here.kept, "change_container", change)
            await _expire(other, record.id)
            return await change(record)

        monkeypatch.setattr(here.kept, "change_container", meanwhile)
        with pytest.raises(ContainerExpired):
            await here.open(idle.id)
        assert (await here.record(idle)).status == "expired"


async def _expire(process: Host, container_id: str) -> None:
    """By making room for another."""
    (await process.open()).leave()
    record = await process.kept.container(container_id)
    assert record is not None
    assert record.status == "expired"
