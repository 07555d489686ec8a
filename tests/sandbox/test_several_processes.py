"""Containers that two processes use on one store: neither ends what the other is using; imports fumehood."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.errors import ContainerExpired, RateLimited
from fumehood.protocol.listing import Window
from fumehood.protocol.sandbox import End, ExecuteRequest, SandboxSpec
from fumehood.sandbox.container import ContainerSettings, SandboxContainer
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import (
    FakeClock,
    MemoryBlobs,
    ScriptedSandbox,
    ScriptedSandboxes,
    Step,
    WriteFile,
)
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


# --- what another process has written -----------------------------------------------------------------------


async def moved_on(here: Host, other: Host) -> SandboxContainer:
    """A container that is open here, with the code `x` run in it, and to which the other process has given another
    sandbox since, with the code `y` and `z` run there.
    """
    container = await here.open()
    assert [event async for event in container.execute(ExecuteRequest(code="x"))]
    await other.run(await other.open(container.id), "y")
    await here.scripted.end(f"{container.id}-1", "it was killed")
    await other.run(await other.open(container.id), "z")
    bound = await here.record(container)
    assert (bound.sandbox, bound.incarnation) == (f"{container.id}-2", 2)
    return container


MOVING = (Step("x"), Step("y"), Step("z", [WriteFile("z.txt", b"z")]))


async def test_a_process_that_comes_late_does_not_bring_back_an_older_sandbox() -> None:
    async with host(*MOVING, Step("after")) as here:
        other = here.beside()
        container = await moved_on(here, other)
        here.clock.advance(61)
        await here.containers.sweep()  # which writes down that it is in use
        found = await here.record(container)
        assert (found.sandbox, found.incarnation) == (f"{container.id}-2", 2)
        assert found.last_active_at == here.clock.now()
        here.clock.advance(301)
        await here.containers.sweep()
        assert [info.id for info in await here.scripted.sandboxes()] == [f"{container.id}-2"]
        ran = await here.run(container, "after")
        assert (ran.end.status, ran.notes) == ("ok", [])
        assert (await here.record(container)).incarnation == 2


@pytest.mark.parametrize("knows", [False, True])
async def test_a_loss_that_is_told_late_takes_no_other_sandbox_away(knows: bool) -> None:
    """The call was in the sandbox before."""
    async with host(*MOVING) as here:
        other = here.beside()
        container = await moved_on(here, other)
        if knows:
            here.clock.advance(61)
            await here.containers.sweep()
        lost = End(status="lost", exit_code=-1, duration_ms=1, state_kept=False, reason="it was killed")
        sandbox = ScriptedSandbox(here.scripted, f"{container.id}-1", SandboxSpec())
        await container._after(sandbox, lost)  # pyright: ignore[reportPrivateUsage]
        found = await here.record(container)
        assert (found.sandbox, found.incarnation) == (f"{container.id}-2", 2)
        container.leave()


async def test_a_process_that_closes_late_does_not_make_a_container_older() -> None:
    async with host(*MOVING) as here:
        other = here.beside()
        container = await moved_on(here, other)
        container.leave()
        here.clock.advance(600)
        (await other.open(container.id)).leave()
        used = await here.record(container)
        assert used.last_active_at == here.clock.now()
        await here.containers.close()
        assert await here.record(container) == used


async def test_who_deletes_a_container_ends_the_sandbox_that_it_has_now() -> None:
    async with host(*MOVING) as here:
        other = here.beside()
        container = await moved_on(here, other)
        await here.containers.delete(SOMEBODY, container.id)
        assert list(await here.scripted.sandboxes()) == []
        container.leave()


async def test_a_sandbox_that_another_process_has_made_is_not_filled_once_more() -> None:
    async with host(*MOVING, Step("again", [WriteFile("z.txt", b"again")]), Step("after")) as here:
        other = here.beside()
        container = await moved_on(here, other)
        container.leave()
        opened = await here.open(container.id)
        await here.scripted.end(f"{container.id}-2", "it was killed")
        await other.run(await other.open(container.id), "again")
        third = await here.sandbox(container)
        assert third.id == f"{container.id}-3"
        third.files.write("z.txt", b"just being written")
        ran = await here.run(opened, "after")
        assert (ran.end.status, ran.notes, ran.paths) == ("ok", [], ["z.txt"])
        assert third.files.read("z.txt") == b"just being written"
        assert await here.content(container, "z.txt") == b"just being written"


async def test_two_processes_that_find_a_sandbox_gone_share_the_next_one() -> None:
    async with host(Step("x"), Step("y"), Step("z")) as here:
        other = here.beside()
        container = await here.open()
        await here.run(container, "x")
        theirs, ours = await other.open(container.id), await here.open(container.id)
        await here.scripted.end(f"{container.id}-1", "it was killed")
        both = await asyncio.gather(other.run(theirs, "y"), here.run(ours, "z"))
        assert [ran.end.status for ran in both] == ["ok", "ok"]
        assert [info.id for info in await here.scripted.sandboxes()] == [f"{container.id}-2"]
        found = await here.record(container)
        assert (found.sandbox, found.incarnation) == (f"{container.id}-2", 2)


@pytest.mark.parametrize("number", [1, 3], ids=["lost", "further"])
async def test_who_was_faster_while_a_sandbox_was_made(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has only heard of the loss, or is one sandbox ahead already."""
    async with host(Step("x"), Step("y")) as here:
        container = await here.open()
        await here.run(container, "x")
        await here.scripted.end(f"{container.id}-1", "it was killed")
        found = await here.record(container)
        name = ""
        if number == 3:
            name = (await here.scripted.create(SandboxSpec(), f"{container.id}-3")).id
        theirs = msgspec.structs.replace(found, sandbox=name, incarnation=number, mark="")
        change = here.kept.change_container

        async def meanwhile(record: ContainerRecord, *args: object, **options: Any) -> bool:
            monkeypatch.setattr(here.kept, "change_container", change)
            assert await change(theirs)
            return await change(record, **options)

        again = await here.open(container.id)
        monkeypatch.setattr(here.kept, "change_container", meanwhile)
        ran = await here.run(again, "y")
        now = await here.record(container)
        number = max(number, 2)
        assert (ran.end.status, now.sandbox, now.incarnation) == ("ok", f"{container.id}-{number}", number)
        assert [info.id for info in await here.scripted.sandboxes()] == [now.sandbox]


async def _expire(process: Host, container_id: str) -> None:
    """By making room for another."""
    (await process.open()).leave()
    record = await process.kept.container(container_id)
    assert record is not None
    assert record.status == "expired"
