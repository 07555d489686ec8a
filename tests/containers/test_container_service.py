"""Containers over sandboxes that follow a script."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from inline_snapshot import snapshot

from fumehood.containers.container_handle import ContainerHandle
from fumehood.containers.container_settings import ContainerSettings
from fumehood.interfaces import Caller, ExecutionStarted, SandboxRef
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import NotFound, RateLimited
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    SandboxError,
    SandboxGone,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    NetworkAllowlist,
    SandboxSpec,
    Stdout,
)
from fumehood.testing import ScriptedExecution, ScriptedSandbox, WriteFile
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness, settle

EXECUTION = ContainerSettings(isolation="execution")
KILLED = ExecutionEnd(
    status="timeout", exit_code=-1, duration_ms=1, state_kept=False, reason="It was killed."
)


# --- the sandbox of a container -----------------------------------------------------------------------------


async def test_the_sandbox_is_what_the_container_is_to_be() -> None:
    network = NetworkAllowlist(allowed_domains=["example.com"])
    settings = ContainerSettings(allowed_domains=frozenset({"example.com"}))
    async with container_harness(ScriptedExecution("x"), settings=settings) as harness:
        container = await harness.open(spec=ContainerSpec(memory="4g", network=network))
        assert harness.scripted.specs == {}
        await harness.run(container, "x")
        wanted = SandboxSpec(memory="4g", network=network, tenant="somebody")
        assert harness.scripted.specs == {f"{container.id}-1": wanted}
        record = await harness.record(container)
        assert (record.sandbox, record.incarnation) == (f"{container.id}-1", 1)


async def test_tenants_are_spelt_as_sandbox_servers_do() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        caller = Caller("tenant with spaces / and more")
        container = await harness.containers.open_container(
            caller, harness.containers.reserve_id(), ContainerSpec()
        )
        await harness.run(container, "x")
        (spec,) = harness.scripted.specs.values()
        assert len(spec.tenant) == 64


async def test_a_sandbox_that_is_there_already_is_not_made_twice() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        container = await harness.open()
        # As if a process had died between making it and writing it down.
        await harness.scripted.create(SandboxSpec(tenant="somebody"), f"{container.id}-1")
        assert (await harness.run(container, "x")).notes == []
        assert list(harness.scripted.specs) == [f"{container.id}-1"]


async def test_after_a_kill_the_next_call_has_another_one() -> None:
    steps = [
        ScriptedExecution("a", [WriteFile("a.txt", b"a")]),
        ScriptedExecution("b", [WriteFile("b.txt", b"b"), KILLED]),
        ScriptedExecution("c"),
    ]
    async with container_harness(*steps) as harness:
        container = await harness.open()
        await harness.run(container, "a")
        outcome = await harness.run(container, "b")
        assert outcome.end.reason == (
            "It was killed. Variables are gone: the next call begins in a new sandbox, with the files of earlier calls."
        )
        assert outcome.paths == []
        assert (await harness.record(container)).sandbox == ""
        outcome = await harness.run(container, "c")
        (note,) = outcome.notes
        assert note == snapshot(
            "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
        )
        assert outcome.paths == []
        assert list(harness.scripted.specs) == [f"{container.id}-2"]
        assert [file.path for file in (await harness.sandbox(container)).files.list_files().files] == [
            "a.txt"
        ]


async def test_a_sandbox_in_use_is_not_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with container_harness(
        ScriptedExecution("a"), ScriptedExecution("b"), ScriptedExecution("c")
    ) as harness:
        asked: list[str] = []
        attach = harness.scripted.attach

        async def counted(ref: SandboxRef) -> ScriptedSandbox:
            asked.append(ref.id)
            return await attach(ref)

        monkeypatch.setattr(harness.scripted, "attach", counted)
        container = await harness.open()
        for code in ("a", "b", "c"):
            assert (await harness.run(await harness.open(container.id), code)).notes == []
        assert asked == [f"{container.id}-1"]


async def test_another_process_goes_on_with_the_same_sandbox() -> None:
    async with container_harness(
        ScriptedExecution("a", [WriteFile("a.txt", b"a")]), ScriptedExecution("b", [WriteFile("b.txt", b"b")])
    ) as harness:
        container = await harness.open()
        await harness.run(container, "a")
        there = harness.second_process()
        outcome = await there.run(await there.open(container.id), "b")
        assert (outcome.notes, outcome.paths) == ([], ["b.txt"])
        assert await there.paths(container) == ["a.txt", "b.txt"]
        with pytest.raises(NotFound):
            await there.open(harness.containers.reserve_id())


# --- when there is none to be had ---------------------------------------------------------------------------


async def advance(harness: ContainerHarness, running: asyncio.Task[object]) -> float:
    """Let time pass until it is done; how much it took."""
    began = harness.clock.monotonic()
    while not running.done():
        for _ in range(5):
            await asyncio.sleep(0)
        harness.clock.advance(0.25)
    return harness.clock.monotonic() - began


async def test_waiting_for_a_sandbox() -> None:
    async with container_harness(ScriptedExecution("x"), ScriptedExecution("y"), capacity=1) as harness:
        first, second = await harness.open(), await harness.open()
        await harness.run(first, "x")
        waiting = asyncio.ensure_future(harness.run(second, "y"))
        for _ in range(3):
            await asyncio.sleep(0)
            harness.clock.advance(1)
        assert not waiting.done()
        await harness.scripted.end_sandbox(f"{first.id}-1", "it was not needed any more")
        await advance(harness, waiting)
        assert (await waiting).end.status == "ok"


async def test_nobody_waits_for_ever() -> None:
    async with container_harness(
        ScriptedExecution("x"),
        ScriptedExecution("y"),
        capacity=1,
        settings=ContainerSettings(claim_timeout=5),
    ) as harness:
        first, second = await harness.open(), await harness.open()
        await harness.run(first, "x")
        waiting = asyncio.ensure_future(harness.run(second, "nothing"))
        assert 3 < await advance(harness, waiting) < 8
        end = (await waiting).end
        assert (end.status, end.exit_code) == ("lost", -1)
        assert end.reason.startswith(
            "No sandbox is free at the moment, try again later: Sandbox limit reached (1)"
        )
        await harness.scripted.end_sandbox(f"{first.id}-1", "it was not needed any more")
        assert (await harness.run(second, "y")).end.status == "ok"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (
            InvalidSandboxRequest("This server allows no network.", param="network"),
            "The sandbox refused: This server",
        ),
        (
            SandboxServerUnreachable("http://10.0.0.1:8080 is away"),
            "The sandboxes cannot be reached at the moment; try again later. The code did not run.",
        ),
    ],
)
async def test_a_server_that_refuses_is_asked_once(trouble: SandboxServerUnreachable, reason: str) -> None:
    async with container_harness() as harness:
        container = await harness.open()
        harness.scripted.error = trouble
        end = (await harness.run(container, "x")).end
        assert end.reason.startswith(reason)
        assert "10.0.0.1" not in end.reason
        harness.scripted.error = None


@pytest.mark.parametrize("error", [SandboxStartFailed("not this one"), SandboxGone("its server has ended")])
async def test_a_sandbox_that_fails_to_start_is_tried_again(error: SandboxError) -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        container = await harness.open()
        harness.scripted.error = error
        waiting = asyncio.ensure_future(harness.run(container, "x"))
        await settle()
        harness.scripted.error = None
        await advance(harness, waiting)
        assert (await waiting).end.status == "ok"


async def test_as_many_containers_as_a_tenant_may_have() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=2)) as harness:
        opened = await asyncio.gather(*(harness.open() for _ in range(4)), return_exceptions=True)
        refused = [one for one in opened if isinstance(one, RateLimited)]
        assert len(refused) == 2
        assert refused[0].message == snapshot(
            "Container limit reached (2): delete a container, or wait for one to expire."
        )
        await harness.containers.open_container(
            Caller("other"), harness.containers.reserve_id(), ContainerSpec()
        )
        for one in opened:
            if isinstance(one, ContainerHandle):
                one.release()
        await harness.open()


async def test_the_one_that_was_idle_longest_makes_room() -> None:
    steps = (ScriptedExecution("a"), ScriptedExecution("b"), ScriptedExecution("a"), ScriptedExecution("c"))
    async with container_harness(*steps, settings=ContainerSettings(containers_per_tenant=2)) as harness:
        first, second = await harness.open(), await harness.open()
        for container, code in ((first, "a"), (second, "b"), (await harness.open(first.id), "a")):
            harness.clock.advance(1)
            await harness.run(container, code)
        third = await harness.open()
        assert (await harness.run(third, "c")).end.status == "ok"
        states = [(await harness.record(one)).status for one in (first, second, third)]
        assert states == ["running", "expired", "running"]
        assert len(await harness.scripted.list_sandboxes()) == 2


async def test_a_lower_bound_holds_for_those_that_are_there() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=4)) as harness:
        opened = [await harness.open() for _ in range(4)]
        for container in opened:
            harness.clock.advance(1)
            container.release()
        few = Caller(SOMEBODY.tenant, limits=ApiKeyLimits(containers=2))
        await harness.containers.open_container(few, harness.containers.reserve_id(), ContainerSpec())
        states = [(await harness.record(one)).status for one in opened]
        assert states == ["expired", "expired", "expired", "running"]


async def test_what_was_asked_for_and_what_is_in_use_make_no_room() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=3)) as harness:
        asked = await harness.containers.create_container(SOMEBODY, ContainerSpec())
        working = await harness.open()
        idle = await harness.open()
        idle.release()
        await harness.containers.create_container(SOMEBODY, ContainerSpec())
        with pytest.raises(RateLimited):
            await harness.open()
        assert (await harness.record(idle)).status == "expired"
        assert (await harness.record(working)).status == "running"
        assert (await harness.containers.check_active(SOMEBODY, asked.id)).status == "running"
        stats = harness.stats
        assert (stats.created, stats.rejected, stats.ended, stats.live_containers) == (
            4,
            1,
            {"evicted": 1},
            3,
        )


async def test_what_is_opened_while_it_is_looked_at_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (ScriptedExecution("a"), ScriptedExecution("b"))
    async with container_harness(*steps, settings=ContainerSettings(containers_per_tenant=1)) as harness:
        idle = await harness.open()
        await harness.run(idle, "a")
        looking, opened = asyncio.Event(), asyncio.Event()
        files = harness.store.list_container_files

        async def slowly(container_id: str, window: PageQuery | None = None) -> Sequence[ContainerFileRecord]:
            looking.set()
            await opened.wait()
            return await files(container_id, window)

        monkeypatch.setattr(harness.store, "list_container_files", slowly)
        newcomer = asyncio.create_task(harness.open())
        await looking.wait()
        again = await harness.open(idle.id)
        opened.set()
        with pytest.raises(RateLimited):
            await newcomer
        assert (await harness.run(again, "b")).end.status == "ok"
        assert (await harness.record(idle)).status == "running"


async def test_what_another_process_may_be_using_makes_no_room_yet() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=1)) as harness:
        (await harness.open()).release()
        other = harness.second_process()
        with pytest.raises(RateLimited):
            await other.open()
        harness.clock.advance(121)
        await other.open()


async def test_a_tenant_whose_containers_are_slow_to_end_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with container_harness(
        ScriptedExecution("x"), settings=ContainerSettings(containers_per_tenant=1)
    ) as harness:
        await harness.run(await harness.open(), "x")
        harness.clock.advance(20 * 60)
        ending, ended = asyncio.Event(), asyncio.Event()
        destroy = harness.scripted.destroy

        async def slowly(ref: SandboxRef) -> None:
            ending.set()
            await ended.wait()
            await destroy(ref)

        monkeypatch.setattr(harness.scripted, "destroy", slowly)
        waiting = asyncio.create_task(harness.open())
        await ending.wait()
        async with asyncio.timeout(5):
            await harness.containers.create_container(Caller("other"), ContainerSpec())
        assert not waiting.done()
        ended.set()
        await waiting


# --- the end of a container ---------------------------------------------------------------------------------


async def test_the_sweeper_ends_what_nobody_uses() -> None:
    steps = [
        ScriptedExecution("x", [WriteFile("a.txt", b"a")]),
        ScriptedExecution("y", [WriteFile("b.txt", b"b")]),
    ]
    async with container_harness(*steps) as harness, harness.containers:
        idle, used = await harness.open(), await harness.open()
        await harness.run(idle, "x")
        await settle()
        harness.clock.advance(15 * 60)
        await settle()
        await harness.run(used, "y")
        harness.clock.advance(6 * 60)
        await settle()
        assert (await harness.record(idle)).status == "expired"
        assert (await harness.record(used)).status == "running"
        assert list(harness.scripted.specs) == [f"{used.id}-1"]
        assert await harness.paths(idle) == []
        assert list(harness.blobs.contents.values()) == [b"b"]


async def test_a_container_does_not_expire_while_its_code_runs() -> None:
    done = asyncio.Event()
    async with container_harness(ScriptedExecution("x", [done])) as harness:
        container = await harness.open()
        running = asyncio.ensure_future(harness.run(container, "x"))
        await settle()
        for _ in range(5):
            await harness.sweep_after(15 * 60)
            await harness.second_process().containers.sweep()  # which does not know that it runs
        done.set()
        assert (await running).end.status == "ok"
        assert (await harness.record(container)).status == "running"


async def test_a_sweep_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    async with container_harness(ScriptedExecution("x")) as harness, harness.containers:
        container = await harness.open()
        await harness.run(container, "x")
        await settle()
        await harness.store.close()
        harness.clock.advance(20 * 60)
        await settle()
        assert "Sweeping containers failed." in caplog.text
        harness.store._closed = False  # pyright: ignore[reportPrivateUsage]
        harness.clock.advance(60)
        await settle()
        assert (await harness.record(container)).status == "expired"


async def test_closing_ends_the_sweeper_and_leaves_the_sandboxes() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        async with harness.containers:
            await harness.run(await harness.open(), "x")
        await harness.containers.close()
        assert len(harness.scripted.specs) == 1


async def test_sandboxes_that_belong_to_nobody_are_ended() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        harness.clock.advance(1000)  # the sandboxes' clock stands still
        container = await harness.open()
        await harness.run(container, "x")
        lost = SandboxSpec(tenant="somebody")
        for name in (f"{container.id}-77", "cntr_of_another_gateway-1", "something-else"):
            await harness.scripted.create(lost, name)
        await harness.containers.sweep()
        assert sorted(harness.scripted.specs) == sorted(
            [f"{container.id}-1", "cntr_of_another_gateway-1", "something-else"]
        )


@pytest.mark.parametrize("is_shared", [False, True])
async def test_what_a_killed_process_left_is_ended_when_the_next_one_starts(is_shared: bool) -> None:
    """At once, also what still runs; unless there are other processes that it may belong to."""
    settings = ContainerSettings(isolation="execution")
    never = asyncio.Event()
    async with container_harness(
        ScriptedExecution("x", [never]), ScriptedExecution("y"), settings=settings
    ) as harness:
        container = await harness.open()
        call = asyncio.ensure_future(harness.run(container, "x"))
        while not [one for one in await harness.scripted.list_sandboxes() if one.running]:
            await asyncio.sleep(0)
        (left,) = harness.scripted.specs
        await harness.scripted.create(SandboxSpec(), "cntr_of_another_gateway-1")
        after = harness.second_process()
        harness.store.is_shared = is_shared
        async with after.containers:
            await settle()
            assert (left in harness.scripted.specs) == is_shared
            assert "cntr_of_another_gateway-1" in harness.scripted.specs
            assert (await after.run(await after.open(container.id), "y")).end.status == "ok"
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_start_leaves_alone_what_is_used_meanwhile() -> None:
    settings = ContainerSettings(isolation="execution")
    done = asyncio.Event()
    async with container_harness(ScriptedExecution("x", [done]), settings=settings) as harness:
        container = await harness.open()
        call = asyncio.ensure_future(harness.run(container, "x"))
        while not [one for one in await harness.scripted.list_sandboxes() if one.running]:
            await asyncio.sleep(0)
        async with harness.containers:
            await settle()
            done.set()
            assert (await call).end.status == "ok"


async def test_a_server_that_cannot_be_asked_does_not_stop_the_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with container_harness(ScriptedExecution("x")) as harness:
        container = await harness.open()
        await harness.run(container, "x")
        harness.scripted.error = SandboxServerUnreachable("away")
        await harness.containers.sweep()
        await harness.sweep_after(20 * 60)
        assert (await harness.record(container)).status == "expired"
        harness.scripted.error = None
        await harness.open()
        await harness.sweep_after(1000)
        assert list(harness.scripted.specs) == []


# --- a sandbox for every call -------------------------------------------------------------------------------


async def test_parallel_calls_each_have_their_own_sandbox() -> None:
    began = [asyncio.Event(), asyncio.Event()]

    def step(number: int) -> ScriptedExecution:
        async def tell(_: object) -> None:
            began[number].set()

        write = WriteFile(f"{number}.txt", b"x")
        shared = WriteFile("shared.txt", str(number).encode())
        # Each waits for the other: one after another they would never end.
        return ScriptedExecution(str(number), [tell, began[1 - number], write, shared])

    async with container_harness(step(0), step(1), settings=EXECUTION) as harness:
        container = await harness.open()
        one, other = await harness.open(container.id), await harness.open(container.id)
        first, second = await asyncio.gather(harness.run(one, "0"), harness.run(other, "1"))
        assert first.paths == ["0.txt", "shared.txt"]
        assert second.paths == ["1.txt", "shared.txt"]
        assert await harness.paths(container) == ["0.txt", "1.txt", "shared.txt"]
        assert await harness.content(container, "shared.txt") in (b"0", b"1")
        assert len({name for name, _ in harness.scripted.requests}) == 2
        assert harness.scripted.specs == {}


async def test_what_another_call_has_changed_is_not_deleted() -> None:
    changed = asyncio.Event()

    async def delete_all(sandbox: ScriptedSandbox) -> None:
        await changed.wait()
        for name in ("a.txt", "b.txt"):
            sandbox.files.delete_file(name)

    steps = [
        ScriptedExecution("make", [WriteFile("a.txt", b"old"), WriteFile("b.txt", b"old")]),
        ScriptedExecution("delete", [delete_all]),
        ScriptedExecution("change", [WriteFile("a.txt", b"new")]),
    ]
    async with container_harness(*steps, settings=EXECUTION) as harness:
        container = await harness.open()
        await harness.run(container, "make")
        deleting = asyncio.ensure_future(harness.run(await harness.open(container.id), "delete"))
        await settle()
        await harness.run(await harness.open(container.id), "change")
        changed.set()
        await deleting
        assert await harness.paths(container) == ["a.txt"]
        assert await harness.content(container, "a.txt") == b"new"


async def test_leaving_a_call_ends_its_sandbox() -> None:
    async with container_harness(
        ScriptedExecution("x", [Stdout("x"), WriteFile("a.txt", b"a"), asyncio.Event()]), settings=EXECUTION
    ) as harness:
        container = await harness.open()
        async with aclosing(container.execute(ExecuteRequest(code="x"))) as events:
            assert await anext(events) == ExecutionStarted()
            assert await anext(events) == Stdout("x")
            assert len(harness.scripted.specs) == 1
            assert harness.stats.running_calls == 1
        assert harness.scripted.specs == {}
        assert (harness.stats.running_calls, harness.stats.ended_calls) == (0, {"abandoned": 1})
        assert await harness.paths(container) == []


async def test_a_hundred_calls_leave_no_sandbox() -> None:
    steps = [
        ScriptedExecution(None, [SandboxGone("gone")] if number % 3 == 0 else [Stdout("x")])
        for number in range(100)
    ]
    async with container_harness(*steps, settings=EXECUTION) as harness:
        container = await harness.open()
        for _ in range(100):
            await harness.run(container, "x")
        assert harness.scripted.specs == {}


async def test_calls_alone_cannot_be_had_either() -> None:
    async with container_harness(
        capacity=0, settings=ContainerSettings(isolation="execution", claim_timeout=0)
    ) as harness:
        end = (await harness.run(await harness.open(), "x")).end
        assert (end.status, end.exit_code) == ("lost", -1)
