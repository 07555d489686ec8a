"""Conformance tests of `ContainerService` and `Container`.

`ContainerServiceKit` needs a fixture `subject` of type `ContainerSubject`; docs/testing.md has an example.
"""

import asyncio
from contextlib import aclosing

import pytest

from fumehood.interfaces import CollectedFiles
from fumehood.protocol.openai.api_errors import ContainerExpired, NotFound
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import (
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionNote,
    Stdout,
)
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.container_lifecycle_kit import (
    ContainerLifecycleKit,
    ContainerUserFilesKit,
)
from fumehood.testing.conformance_kits.container_subject import (
    PYTHON_PROGRAMS,
    SECONDS,
    SOMEBODY,
    STRANGER,
    ContainerProgram,
    ContainerSubject,
    collect_stdout,
    get_end,
)

__all__ = [
    "PYTHON_PROGRAMS",
    "SOMEBODY",
    "STRANGER",
    "ContainerProgram",
    "ContainerServiceKit",
    "ContainerSubject",
    "collect_stdout",
    "get_end",
]


class ContainerIdentityKit:
    """Containers are created when opened, belong to one tenant, and expire when idle."""

    async def test_ids(self, subject: ContainerSubject) -> None:
        ids = {subject.containers.reserve_id() for _ in range(20)}
        assert len(ids) == 20
        assert all(name.startswith("cntr_") and len(name) <= 64 for name in ids)

    async def test_what_is_only_reserved_is_not_there(self, subject: ContainerSubject) -> None:
        name = subject.containers.reserve_id()
        await assert_each_raises(
            NotFound,
            subject.containers.check_active(SOMEBODY, name),
            subject.containers.list_files(SOMEBODY, name),
        )

    @pytest.mark.parametrize("name", ["cntr_" + 48 * "0", "cntr_", "", "x", "cntr_\N{SNOWMAN}", "a" * 10_000])
    async def test_what_was_never_reserved_cannot_be_opened(
        self, subject: ContainerSubject, name: str
    ) -> None:
        await assert_each_raises(
            NotFound,
            subject.containers.check_active(SOMEBODY, name),
            subject.open_container(name),
        )

    async def test_opening_begins_it(self, subject: ContainerSubject) -> None:
        spec = ContainerSpec(name="mine", memory="4g")
        container = await subject.open_container(spec=spec)
        record = await subject.containers.check_active(SOMEBODY, container.id)
        assert (record.id, record.tenant, record.status) == (container.id, "somebody", "running")
        assert record.spec == subject.containers.validate_spec(spec)
        assert (await subject.open_container(container.id)).id == container.id
        assert await subject.containers.list_files(SOMEBODY, container.id) == []

    async def test_nothing_of_it_exists_for_another_tenant(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        files = await subject.run_and_collect(container, "writes out.txt")
        await assert_each_raises(
            NotFound,
            subject.containers.check_active(STRANGER, container.id),
            subject.containers.open_container(STRANGER, container.id, ContainerSpec()),
            subject.containers.list_files(STRANGER, container.id),
            subject.containers.get_file(STRANGER, container.id, files["out.txt"].id),
            subject.read_content(container.id, files["out.txt"].id, STRANGER),
        )

    async def test_an_idle_container_expires(self, subject: ContainerSubject) -> None:
        container = await subject.open_container(spec=ContainerSpec(idle_minutes=20))
        file = (await subject.run_and_collect(container, "writes out.txt"))["out.txt"]
        await subject.pass_time(20 * 60 - 1)
        assert (await subject.containers.check_active(SOMEBODY, container.id)).status == "running"
        await subject.pass_time(1)
        assert (await subject.containers.get_container(SOMEBODY, container.id)).status == "expired"
        await assert_each_raises(
            ContainerExpired,
            subject.containers.check_active(SOMEBODY, container.id),
            subject.containers.check_active(SOMEBODY, container.id),
            subject.open_container(container.id),
        )
        await assert_each_raises(
            NotFound,
            subject.containers.list_files(SOMEBODY, container.id),
            subject.containers.get_file(SOMEBODY, container.id, file.id),
            subject.read_content(container.id, file.id),
            subject.containers.write_file(SOMEBODY, container.id, "b.txt", b"b"),
            subject.containers.delete_file(SOMEBODY, container.id, file.id),
        )
        assert get_end(await subject.run(container, "prints hello")).status == "lost"
        await subject.containers.delete_container(SOMEBODY, container.id)
        await assert_each_raises(NotFound, subject.containers.get_container(SOMEBODY, container.id))

    async def test_one_that_was_opened_and_not_left_stays(self, subject: ContainerSubject) -> None:
        container = await subject.open_container(spec=ContainerSpec(idle_minutes=20))
        again = await subject.open_container(container.id)
        for _ in range(2):  # once is enough
            again.release()
        await subject.pass_time(21 * 60)
        assert (await subject.containers.check_active(SOMEBODY, container.id)).status == "running"
        container.release()
        await subject.pass_time(19 * 60)
        assert (await subject.containers.check_active(SOMEBODY, container.id)).status == "running"
        await subject.pass_time(61)
        with pytest.raises(ContainerExpired):
            await subject.containers.check_active(SOMEBODY, container.id)


class ContainerExecutionKit:
    """Code runs, and the next call gets a sandbox whatever happened to the last one."""

    async def test_events_and_their_end(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        events = await subject.run(container, "prints hello")
        assert collect_stdout(events) == "hello\n"
        assert (get_end(events).status, get_end(events).exit_code) == ("ok", 0)

    async def test_code_that_raises(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        events = await subject.run(container, "raises ValueError")
        assert [event.name for event in events if isinstance(event, ExceptionRaised)] == ["ValueError"]
        assert (get_end(events).status, get_end(events).exit_code) == ("error", 1)

    async def test_closing_the_events_interrupts_the_code(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        async with asyncio.timeout(SECONDS):
            async with aclosing(subject.stream_events(container, "waits to be interrupted")) as events:
                async for event in events:
                    if isinstance(event, Stdout):
                        break
            # Unless the first is interrupted, it waits behind it for ever.
            again = await subject.open_container(container.id)
            assert get_end(await subject.run(again, "prints hello")).status == "ok"

    async def test_a_call_ends_in_time(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        request = ExecuteRequest(code=subject.programs["waits to be interrupted"])
        async with asyncio.timeout(SECONDS):
            *_, last = [event async for event in container.execute(request, 1.0)]
        assert isinstance(last, ExecutionEnd)
        assert last.status == "timeout"
        assert get_end(await subject.run(container, "prints hello")).status == "ok"

    async def test_calls_at_once(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        handles = [await subject.open_container(container.id) for _ in range(3)]
        done = await asyncio.gather(*(subject.run(handle, "prints hello") for handle in handles))
        assert [collect_stdout(events) for events in done] == ["hello\n"] * 3

    async def test_a_lost_sandbox_is_replaced_with_its_files(self, subject: ContainerSubject) -> None:
        if subject.destroy_sandbox is None or not subject.keeps_variables:
            pytest.skip("there is no sandbox between calls, or the adapter cannot end it")
        container = await subject.open_container()
        await subject.run(container, "writes out.txt")
        await subject.destroy_sandbox(container.id)
        events = await subject.run(await subject.open_container(container.id), "prints out.txt")
        (note,) = [event.text for event in events if isinstance(event, ExecutionNote)]
        assert "variables" in note
        assert collect_stdout(events) == "made\n"
        events = await subject.run(await subject.open_container(container.id), "prints out.txt")
        assert not [event for event in events if isinstance(event, ExecutionNote)]

    async def test_a_sandbox_lost_while_code_runs_ends_the_call(self, subject: ContainerSubject) -> None:
        if subject.destroy_sandbox is None:
            pytest.skip("the adapter cannot end a sandbox")
        container = await subject.open_container()
        ended = False
        collected: list[ExecutionEvent] = []
        async with asyncio.timeout(SECONDS):
            async for event in subject.stream_events(container, "waits to be interrupted"):
                collected.append(event)
                if not ended:
                    ended = True
                    await subject.destroy_sandbox(container.id)
        end = get_end(collected)
        assert (end.status, end.exit_code, end.state_kept) == ("lost", -1, False)
        assert end.reason
        assert get_end(await subject.run(container, "prints hello")).status == "ok"


class ContainerFilesKit:
    """Files that code writes are collected once, keep their ids, and can be read."""

    async def test_files_are_carried_from_call_to_call(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        await subject.run(container, "writes out.txt")
        assert (
            collect_stdout(await subject.run(await subject.open_container(container.id), "prints out.txt"))
            == "made\n"
        )

    async def test_a_file_is_found_once(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        assert await container.collect_files() == CollectedFiles()
        files = await subject.run_and_collect(container, "writes out.txt")
        record = files["out.txt"]
        assert list(files) == ["out.txt"]
        assert record.id.startswith("cfile_")
        assert len(record.id) <= 64
        assert (record.container_id, record.bytes, record.source) == (container.id, 4, "assistant")
        assert await container.collect_files() == CollectedFiles()
        assert await subject.run_and_collect(container, "prints hello") == {}
        assert await subject.containers.list_files(SOMEBODY, container.id) == [record]
        assert await subject.containers.get_file(SOMEBODY, container.id, record.id) == record
        assert await subject.read_content(container.id, record.id) == b"made"

    async def test_a_file_that_changes_keeps_its_id(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        old = (await subject.run_and_collect(container, "writes out.txt"))["out.txt"]
        new = (await subject.run_and_collect(container, "changes out.txt"))["out.txt"]
        assert (new.id, new.created_at, new.bytes) == (old.id, old.created_at, 7)
        assert await subject.read_content(container.id, new.id) == b"changed"

    async def test_a_file_that_is_deleted_is_gone(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        record = (await subject.run_and_collect(container, "writes out.txt"))["out.txt"]
        assert await subject.run_and_collect(container, "deletes out.txt") == {}
        assert await subject.containers.list_files(SOMEBODY, container.id) == []
        await assert_each_raises(
            NotFound,
            subject.containers.get_file(SOMEBODY, container.id, record.id),
            subject.read_content(container.id, record.id),
        )
        again = (await subject.run_and_collect(container, "writes out.txt"))["out.txt"]
        assert again.id == record.id

    async def test_the_same_path_elsewhere_is_another_file(self, subject: ContainerSubject) -> None:
        one, other = await subject.open_container(), await subject.open_container()
        mine = (await subject.run_and_collect(one, "writes out.txt"))["out.txt"]
        theirs = (await subject.run_and_collect(other, "changes out.txt"))["out.txt"]
        assert mine.id != theirs.id
        with pytest.raises(NotFound):
            await subject.containers.get_file(SOMEBODY, one.id, theirs.id)
        assert await subject.read_content(one.id, mine.id) == b"made"
        assert await subject.read_content(other.id, theirs.id) == b"changed"

    async def test_the_same_content_twice_is_deleted_once(self, subject: ContainerSubject) -> None:
        one, other = await subject.open_container(), await subject.open_container()
        await subject.run_and_collect(one, "writes out.txt", "deletes out.txt")
        record = (await subject.run_and_collect(other, "writes out.txt"))["out.txt"]
        await subject.run_and_collect(one, "writes out.txt", "deletes out.txt")
        assert await subject.read_content(other.id, record.id) == b"made"

    async def test_hidden_files_count_and_temporary_ones_do_not(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        found = await subject.run_and_collect(container, "writes hidden and temporary files")
        assert list(found) == [".hidden"]
        listed = ["__pycache__/x.pyc", "backup~", "half.tmp", ".hidden"]
        assert sorted(await subject.list_paths(container.id)) == sorted(listed)
        assert not (await subject.containers.find_unlisted_files(SOMEBODY, container.id)).paths

    async def test_what_is_saved_is_a_file_of_the_container(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        await subject.run(container, "prints hello")
        first = await container.save_file("figure.png", b"one")
        second = await container.save_file("figure.png", b"two")
        assert (first.path, second.path) == ("figure.png", "figure-2.png")
        assert first.id != second.id
        assert {first.source, second.source} == {"assistant"}
        assert await subject.read_content(container.id, first.id) == b"one"
        assert await subject.read_content(container.id, second.id) == b"two"
        # The next call does not collect it.
        assert await subject.run_and_collect(container, "prints hello") == {}
        await container.save_file("out.txt", b"saved")
        assert collect_stdout(await subject.run(container, "prints out.txt")) == "saved\n"


class ContainerServiceKit(
    ContainerIdentityKit,
    ContainerExecutionKit,
    ContainerFilesKit,
    ContainerLifecycleKit,
    ContainerUserFilesKit,
):
    """All tests of both seams."""
