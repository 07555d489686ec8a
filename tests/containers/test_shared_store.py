"""Containers that two processes use on one store: neither ends what the other is using."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fumehood.containers.container_handle import AcquiredSandbox, ContainerHandle
from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings
from fumehood.protocol.openai.api_errors import ContainerExpired, RateLimited
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, SandboxSpec, make_execution_end
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness

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
    harness = SandboxContainerService(
        ScriptedSandboxProvider(), store, GarbageCollectedBlobs(MemoryBlobStore(), store), clock, ONE
    )

    async def begin() -> bool:
        try:
            (await harness.open_container(SOMEBODY, harness.reserve_id(), ContainerSpec())).release()
        except RateLimited:
            return False
        return True

    async with another_process(path) as tell:
        name = harness.reserve_id()
        (await harness.open_container(SOMEBODY, name, ContainerSpec())).release()
        assert await tell(f"open {name}") == "done"
        assert not await begin()  # although it was used last by this process, as far as that knows
        for _ in range(30):  # longer than an idle one lives
            clock.advance(60)
            assert await tell("advance 60") == "done"
            assert await tell("sweep") == "done"
            assert not await begin()
            await harness.sweep()
        assert await tell("leave") == "done"
        clock.advance(121)
        assert await begin()
        assert await tell(f"open {name}") == "ContainerExpired"
    await store.close()


@pytest.mark.parametrize("over", [False, True], ids=["makes room", "expires"])
async def test_what_another_process_opens_at_the_last_moment_does_not_end(
    over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with container_harness(settings=ONE) as harness:
        idle = await harness.open()
        idle.release()
        harness.clock.advance(20 * 60 if over else 121)
        other = harness.second_process()
        files = harness.store.list_container_files

        async def meanwhile(
            container_id: str, window: PageQuery | None = None
        ) -> Sequence[ContainerFileRecord]:
            monkeypatch.setattr(harness.store, "list_container_files", files)
            # As a process that has looked at it a moment before would.
            record = await harness.record(idle)
            await other.containers._mark_used(record)  # pyright: ignore[reportPrivateUsage]
            return await files(container_id, window)

        monkeypatch.setattr(harness.store, "list_container_files", meanwhile)
        if over:
            await harness.containers.sweep()
        else:
            with pytest.raises(RateLimited):
                await harness.open()
        assert (await harness.record(idle)).status == "running"
        (await harness.open(idle.id)).release()  # which knows it as well as before


@pytest.mark.parametrize("settings", [ONE, ContainerSettings(containers_per_tenant=2)], ids=["one", "two"])
async def test_what_another_process_begins_at_the_same_moment_counts(
    settings: ContainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with container_harness(settings=settings) as harness:
        other = harness.second_process()
        containers = harness.store.find_containers

        async def meanwhile(tenant: str | None = None, *, running: bool = False) -> Sequence[ContainerRecord]:
            monkeypatch.setattr(harness.store, "find_containers", containers)
            found = await containers(tenant, running=running)
            await other.open()
            return found

        monkeypatch.setattr(harness.store, "find_containers", meanwhile)
        if settings is ONE:
            with pytest.raises(RateLimited):
                await harness.open()
            assert harness.stats.rejected == 1
        else:
            await harness.open()
            assert (harness.stats.created, other.stats.created) == (1, 1)
        assert len(await harness.store.find_containers(running=True)) == settings.containers_per_tenant


async def test_one_that_is_over_and_still_used_does_not_count() -> None:
    """Users are shown that it has expired, though the store says that it runs."""
    async with container_harness(settings=ONE) as harness:
        old = await harness.open()
        harness.clock.advance(24 * 3600)
        (await harness.open()).release()
        assert len(await harness.store.find_containers(running=True)) == 2
        old.release()


async def test_what_ends_at_the_last_moment_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with container_harness(settings=ONE) as harness:
        idle = await harness.open()
        idle.release()
        harness.clock.advance(121)
        other = harness.second_process()
        change = harness.store.update_container

        async def meanwhile(record: ContainerRecord, *args: object, **options: object) -> bool:
            monkeypatch.setattr(harness.store, "update_container", change)
            await _expire(other, record.id)
            return await change(record)

        monkeypatch.setattr(harness.store, "update_container", meanwhile)
        with pytest.raises(ContainerExpired):
            await harness.open(idle.id)
        assert (await harness.record(idle)).status == "expired"


# --- what another process has written -----------------------------------------------------------------------


@asynccontextmanager
async def moved_container(
    *further: ScriptedExecution,
) -> AsyncGenerator[tuple[ContainerHarness, ContainerHarness, ContainerHandle]]:
    """Two processes, and a container that is open in the first, with the code `x` run in it, to which the second has
    given another sandbox since, with the code `y` and `z` run there.
    """
    steps = (
        ScriptedExecution("x"),
        ScriptedExecution("y"),
        ScriptedExecution("z", [WriteFile("z.txt", b"z")]),
    )
    async with container_harness(*steps, *further) as harness:
        other = harness.second_process()
        container = await harness.open()
        assert [event async for event in container.execute(ExecuteRequest(code="x"))]
        await other.run(await other.open(container.id), "y")
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        await other.run(await other.open(container.id), "z")
        await assert_bound(harness, container, 2)
        yield harness, other, container
        container.release()


async def assert_bound(harness: ContainerHarness, container: ContainerHandle, incarnation: int) -> None:
    """Check which sandbox the store names."""
    found = await harness.record(container)
    assert (found.sandbox, found.incarnation) == (f"{container.id}-{incarnation}", incarnation)


async def test_a_process_that_comes_late_does_not_bring_back_an_older_sandbox() -> None:
    async with moved_container(ScriptedExecution("after")) as (harness, _, container):
        harness.clock.advance(61)
        await harness.containers.sweep()  # which writes down that it is in use
        await assert_bound(harness, container, 2)
        assert (await harness.record(container)).last_active_at == harness.clock.now()
        await harness.sweep_after(301)
        assert [info.id for info in await harness.scripted.list_sandboxes()] == [f"{container.id}-2"]
        outcome = await harness.run(container, "after")
        assert (outcome.end.status, outcome.notes) == ("ok", [])
        assert (await harness.record(container)).incarnation == 2


@pytest.mark.parametrize("knows", [False, True])
async def test_a_loss_that_is_told_late_takes_no_other_sandbox_away(knows: bool) -> None:
    """The call was in the sandbox before."""
    async with moved_container() as (harness, _, container):
        if knows:
            await harness.sweep_after(61)
        lost = make_execution_end("lost", "it was killed", state_kept=False)
        sandbox = ScriptedSandbox(harness.scripted, f"{container.id}-1", SandboxSpec())
        await container._finish_call(AcquiredSandbox(sandbox), lost)  # pyright: ignore[reportPrivateUsage]
        await assert_bound(harness, container, 2)


async def test_a_process_that_closes_late_does_not_make_a_container_older() -> None:
    async with moved_container() as (harness, other, container):
        container.release()
        harness.clock.advance(600)
        (await other.open(container.id)).release()
        used = await harness.record(container)
        assert used.last_active_at == harness.clock.now()
        await harness.containers.close()
        assert await harness.record(container) == used


async def test_who_deletes_a_container_ends_the_sandbox_that_it_has_now() -> None:
    async with moved_container() as (harness, _, container):
        await harness.containers.delete_container(SOMEBODY, container.id)
        assert list(await harness.scripted.list_sandboxes()) == []


async def test_a_sandbox_that_another_process_has_made_is_not_filled_once_more() -> None:
    async with moved_container(
        ScriptedExecution("again", [WriteFile("z.txt", b"again")]), ScriptedExecution("after")
    ) as (harness, other, container):
        container.release()
        opened = await harness.open(container.id)
        await harness.scripted.end_sandbox(f"{container.id}-2", "it was killed")
        await other.run(await other.open(container.id), "again")
        third = await harness.sandbox(container)
        assert third.id == f"{container.id}-3"
        third.files.write_file("z.txt", b"just being written")
        outcome = await harness.run(opened, "after")
        assert (outcome.end.status, outcome.notes, outcome.paths) == ("ok", [], ["z.txt"])
        assert third.files.read_file("z.txt") == b"just being written"
        assert await harness.content(container, "z.txt") == b"just being written"


async def test_two_processes_that_find_a_sandbox_gone_share_the_next_one() -> None:
    async with container_harness(
        ScriptedExecution("x"), ScriptedExecution("y"), ScriptedExecution("z")
    ) as harness:
        other = harness.second_process()
        container = await harness.open()
        await harness.run(container, "x")
        theirs, ours = await other.open(container.id), await harness.open(container.id)
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        both = await asyncio.gather(other.run(theirs, "y"), harness.run(ours, "z"))
        assert [outcome.end.status for outcome in both] == ["ok", "ok"]
        assert [info.id for info in await harness.scripted.list_sandboxes()] == [f"{container.id}-2"]
        await assert_bound(harness, container, 2)


@pytest.mark.parametrize("number", [1, 3], ids=["lost", "further"])
async def test_who_was_faster_while_a_sandbox_was_made(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has only heard of the loss, or is one sandbox ahead already."""
    async with container_harness(ScriptedExecution("x"), ScriptedExecution("y")) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        await harness.scripted.end_sandbox(f"{container.id}-1", "it was killed")
        found = await harness.record(container)
        name = ""
        if number == 3:
            name = (await harness.scripted.create(SandboxSpec(), f"{container.id}-3")).id
        theirs = msgspec.structs.replace(found, sandbox=name, incarnation=number, mark="")
        change = harness.store.update_container

        async def meanwhile(record: ContainerRecord, *args: object, **options: Any) -> bool:
            monkeypatch.setattr(harness.store, "update_container", change)
            assert await change(theirs)
            return await change(record, **options)

        again = await harness.open(container.id)
        monkeypatch.setattr(harness.store, "update_container", meanwhile)
        outcome = await harness.run(again, "y")
        now = await harness.record(container)
        number = max(number, 2)
        assert (outcome.end.status, now.sandbox, now.incarnation) == (
            "ok",
            f"{container.id}-{number}",
            number,
        )
        assert [info.id for info in await harness.scripted.list_sandboxes()] == [now.sandbox]


async def _expire(process: ContainerHarness, container_id: str) -> None:
    """By making room for another."""
    (await process.open()).release()
    record = await process.store.get_container(container_id)
    assert record is not None
    assert record.status == "expired"
