"""Conformance tests of `ContainerService`: lifecycle of containers, and files of users."""

import asyncio

import pytest

from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEvent, NetworkAllowlist
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.container_subject import (
    SOMEBODY,
    STRANGER,
    ContainerSubject,
    collect_stdout,
    get_end,
)
from fumehood.testing.conformance_kits.payloads import SourceError, build_archive, fail_midway, stream_chunks


class ContainerLifecycleKit:
    """Containers are created before use, listed, and deleted or expired."""

    async def test_one_that_is_created_is_there_at_once(self, subject: ContainerSubject) -> None:
        spec = ContainerSpec(name="mine", memory="4g", idle_minutes=7)
        record = await subject.containers.create_container(SOMEBODY, spec)
        assert record.id.startswith("cntr_")
        assert len(record.id) <= 64
        assert (record.tenant, record.status, record.spec) == ("somebody", "running", spec)
        assert (await subject.containers.get_container(SOMEBODY, record.id)).spec == spec
        assert await subject.list_paths(record.id) == []
        assert (
            collect_stdout(await subject.run(await subject.open_container(record.id), "prints hello"))
            == "hello\n"
        )

    async def test_what_no_container_may_have(self, subject: ContainerSubject) -> None:
        network = NetworkAllowlist(allowed_domains=["not-allowed.example"])
        for param, spec in (
            ("network_policy", ContainerSpec(network=network)),
            ("expires_after.minutes", ContainerSpec(idle_minutes=0)),
            ("expires_after.minutes", ContainerSpec(idle_minutes=10**9)),
            ("name", ContainerSpec(name="")),
            ("name", ContainerSpec(name="a\nb")),
            ("file_ids", ContainerSpec(file_ids=("file-unknown",))),
        ):
            if param != "file_ids":
                with pytest.raises(InvalidRequest) as refused:
                    subject.containers.validate_spec(spec)
                assert refused.value.param == param
            before = await subject.containers.list_containers(SOMEBODY, PageQuery(limit=100))
            with pytest.raises(InvalidRequest) as refused:
                await subject.containers.create_container(SOMEBODY, spec)
            assert refused.value.param == param
            assert len(await subject.containers.list_containers(SOMEBODY, PageQuery(limit=100))) == len(
                before
            )
        assert subject.containers.validate_spec(ContainerSpec()).idle_minutes

    async def test_containers_in_windows(self, subject: ContainerSubject) -> None:
        ids = [await subject.create_container(name=f"listed {number % 2}") for number in range(5)]
        theirs = await subject.containers.create_container(STRANGER, ContainerSpec(name="listed 0"))
        for name, wanted in (("listed 0", {ids[0], ids[2], ids[4]}), ("listed 1", {ids[1], ids[3]})):
            found: list[str] = []
            while True:
                window = PageQuery(limit=1, after=found[-1] if found else None)
                page = [one.id for one in await subject.containers.list_containers(SOMEBODY, window, name)]
                found += page[:1]
                if len(page) < 2:
                    break
            assert len(found) == len(wanted)
            assert set(found) == wanted
        (only,) = await subject.containers.list_containers(STRANGER, PageQuery(), "listed 0")
        assert only.id == theirs.id
        with pytest.raises(InvalidRequest):
            await subject.containers.list_containers(SOMEBODY, PageQuery(after=theirs.id))

    async def test_one_that_is_deleted_is_gone(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        record = (await subject.run_and_collect(container, "writes out.txt"))["out.txt"]
        with pytest.raises(NotFound):
            await subject.containers.delete_container(STRANGER, container.id)
        await subject.containers.delete_container(SOMEBODY, container.id)
        await assert_each_raises(
            NotFound,
            subject.containers.delete_container(SOMEBODY, container.id),
            subject.containers.get_container(SOMEBODY, container.id),
            subject.open_container(container.id),
            subject.containers.list_files(SOMEBODY, container.id),
            subject.read_content(container.id, record.id),
            subject.containers.write_file(SOMEBODY, container.id, "a.txt", b"a"),
        )
        listed = await subject.containers.list_containers(SOMEBODY, PageQuery(limit=100))
        assert container.id not in {one.id for one in listed}
        end = get_end(await subject.run(container, "prints hello"))
        assert (end.status, end.exit_code) == ("lost", -1)

    async def test_deleting_it_stops_what_runs(self, subject: ContainerSubject) -> None:
        container = await subject.open_container()
        collected: list[ExecutionEvent] = []
        async for event in subject.stream_events(container, "waits to be interrupted"):
            if not collected:
                await subject.containers.delete_container(SOMEBODY, container.id)
            collected.append(event)
        end = get_end(collected)
        assert (end.status, end.exit_code, end.state_kept) == ("lost", -1, False)

    async def test_every_use_keeps_it_alive(self, subject: ContainerSubject) -> None:
        name = await subject.create_container(idle_minutes=5)
        await subject.pass_time(4 * 60)
        file = await subject.containers.write_file(SOMEBODY, name, "a.txt", b"a")
        await subject.pass_time(4 * 60)
        await subject.containers.list_files(SOMEBODY, name)
        await subject.pass_time(4 * 60)
        assert await subject.read_content(name, file.id) == b"a"
        await subject.pass_time(4 * 60)
        await subject.containers.get_container(SOMEBODY, name)
        await subject.pass_time(4 * 60)
        await subject.run(await subject.open_container(name), "prints hello")
        await subject.pass_time(4 * 60)
        await subject.containers.delete_file(SOMEBODY, name, file.id)
        await subject.pass_time(4 * 60)
        assert (await subject.containers.check_active(SOMEBODY, name)).status == "running"
        await subject.pass_time(60)  # `check_active` is no use
        assert (await subject.containers.get_container(SOMEBODY, name)).status == "expired"

    async def test_no_container_lives_for_ever(self, subject: ContainerSubject) -> None:
        name = await subject.create_container(idle_minutes=20)
        for _ in range(10_000):
            if (await subject.containers.get_container(SOMEBODY, name)).status == "expired":
                return
            await subject.pass_time(19 * 60)
        pytest.fail("it has been used for half a year, and is still there")

    async def test_the_heir_of_an_expired_one_has_what_the_user_put_there(
        self, subject: ContainerSubject
    ) -> None:
        name = await subject.create_container()
        await subject.containers.write_file(SOMEBODY, name, "given/a.txt", b"given")
        await subject.run(await subject.open_container(name), "writes out.txt")
        await subject.pass_time(60 * 60)
        spec = ContainerSpec()
        foreign = subject.containers.reserve_id()
        await subject.containers.open_container(STRANGER, foreign, spec, name)
        assert list(await subject.containers.list_files(STRANGER, foreign)) == []
        replacement = await subject.containers.open_container(
            SOMEBODY, subject.containers.reserve_id(), spec, name
        )
        (record,) = await subject.containers.list_files(SOMEBODY, replacement.id)
        assert (record.path, record.source, record.container_id) == ("given/a.txt", "user", replacement.id)
        assert await subject.read_content(replacement.id, record.id) == b"given"
        assert get_end(await subject.run(replacement, "prints hello")).status == "ok"


class ContainerUserFilesKit:
    """Code reads the files that users write, and they stay files of the user."""

    @pytest.mark.parametrize("used", [False, True])
    async def test_what_is_put_there_is_there_for_the_code(
        self, subject: ContainerSubject, used: bool
    ) -> None:
        name = await subject.create_container()
        if used:
            await subject.run(await subject.open_container(name), "prints hello")
        record = await subject.containers.write_file(SOMEBODY, name, "/mnt/data/out.txt", b"given")
        assert record.id.startswith("cfile_")
        assert len(record.id) <= 64
        assert (record.container_id, record.path, record.bytes, record.source) == (
            name,
            "out.txt",
            5,
            "user",
        )
        assert await subject.containers.get_file(SOMEBODY, name, record.id) == record
        assert await subject.read_content(name, record.id) == b"given"
        container = await subject.open_container(name)
        assert collect_stdout(await subject.run(container, "prints out.txt")) == "given\n"
        assert list((await container.collect_files()).files) == []  # the code has not changed it

    async def test_a_file_of_the_users_stays_the_users(self, subject: ContainerSubject) -> None:
        name = await subject.create_container()
        written = await subject.containers.write_file(SOMEBODY, name, "out.txt", b"given")
        files = await subject.run_and_collect(await subject.open_container(name), "changes out.txt")
        changed = files["out.txt"]
        assert (changed.id, changed.source, changed.bytes) == (written.id, "user", 7)
        assert await subject.read_content(name, written.id) == b"changed"
        again = await subject.containers.write_file(SOMEBODY, name, "out.txt", b"anew")
        assert (again.id, again.created_at) == (written.id, written.created_at)
        assert (
            collect_stdout(await subject.run(await subject.open_container(name), "prints out.txt"))
            == "anew\n"
        )

    async def test_a_part_of_a_file(self, subject: ContainerSubject) -> None:
        name = await subject.create_container()
        record = await subject.containers.write_file(SOMEBODY, name, "a.txt", b"0123456789")
        for start, end, wanted in (
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (2, 5, b"234"),
            (9, 99, b"9"),
        ):
            assert await subject.read_content(name, record.id, start=start, end=end) == wanted

    async def test_a_file_in_chunks(self, subject: ContainerSubject) -> None:
        chunks = [bytes([number]) * 1000 for number in range(100)]
        name = await subject.create_container()
        record = await subject.containers.write_file(SOMEBODY, name, "a.bin", stream_chunks(*chunks))
        assert record.bytes == 100_000
        assert len(await subject.read_content(name, record.id)) == 100_000
        await assert_each_raises(
            SourceError,
            subject.containers.write_file(SOMEBODY, name, "a.bin", fail_midway()),
            subject.containers.write_file(SOMEBODY, name, "b.bin", fail_midway()),
        )
        assert await subject.list_paths(name) == ["a.bin"]
        assert len(await subject.read_content(name, record.id)) == 100_000

    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/etc/passwd",
            "../a",
            "a/../b",
            "a//b",
            "a/",
            "a\0b",
            "a\nb",
            "x" * 256,
            "/".join(["x" * 200] * 32),
            ".fumehood-x",
            "\ud800",
        ],
    )
    async def test_names_that_no_file_can_have(self, subject: ContainerSubject, path: str) -> None:
        name = await subject.create_container()
        with pytest.raises(InvalidRequest) as refused:
            await subject.containers.write_file(SOMEBODY, name, path, b"x")
        assert refused.value.param == "file"
        assert await subject.list_paths(name) == []

    @pytest.mark.parametrize("used", [False, True])
    async def test_a_file_is_no_directory(self, subject: ContainerSubject, used: bool) -> None:
        name = await subject.create_container()
        if used:
            await subject.run(await subject.open_container(name), "prints hello")
        await subject.containers.write_file(SOMEBODY, name, "a/b.txt", b"x")
        for path in ("a", "a/b.txt/c"):
            with pytest.raises(InvalidRequest):
                await subject.containers.write_file(SOMEBODY, name, path, b"x")
        assert await subject.list_paths(name) == ["a/b.txt"]

    async def test_a_hidden_file_of_the_users_is_a_file(self, subject: ContainerSubject) -> None:
        name = await subject.create_container()
        await subject.containers.write_file(SOMEBODY, name, ".config/x.tmp", b"x")
        await subject.run(await subject.open_container(name), "prints hello")
        assert await subject.list_paths(name) == [".config/x.tmp"]

    @pytest.mark.parametrize("used", [False, True])
    async def test_a_file_that_is_deleted(self, subject: ContainerSubject, used: bool) -> None:
        name = await subject.create_container()
        if used:
            await subject.run(await subject.open_container(name), "prints hello")
        record = await subject.containers.write_file(SOMEBODY, name, "out.txt", b"given")
        with pytest.raises(NotFound):
            await subject.containers.delete_file(STRANGER, name, record.id)
        outcomes = await asyncio.gather(
            *(subject.containers.delete_file(SOMEBODY, name, record.id) for _ in range(2)),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in outcomes} == {type(None), NotFound}
        with pytest.raises(NotFound):
            await subject.read_content(name, record.id)
        container = await subject.open_container(name)
        files = await subject.run_and_collect(container, "writes out.txt")
        assert files["out.txt"].source == "assistant"

    async def test_uploads_are_placed(self, subject: ContainerSubject) -> None:
        if subject.upload is None:
            pytest.skip("the adapter has no uploads")
        first, second = await subject.upload("out.txt", b"one"), await subject.upload("out.txt", b"two")
        name = await subject.create_container(file_ids=(first,))
        (record,) = await subject.containers.list_files(SOMEBODY, name)
        assert (record.path, record.bytes, record.source) == ("out.txt", 3, "user")
        assert (
            collect_stdout(await subject.run(await subject.open_container(name), "prints out.txt")) == "one\n"
        )
        assert list(await subject.containers.copy_uploads(SOMEBODY, name, [first])) == list(
            await subject.containers.list_files(SOMEBODY, name)
        )
        (other,) = await subject.containers.copy_uploads(SOMEBODY, name, [second])
        assert (other.path, await subject.read_content(name, other.id)) == ("out-2.txt", b"two")
        both = await subject.containers.copy_uploads(SOMEBODY, name, [second, first, second])
        assert {record.path for record in both} == {"out.txt", "out-2.txt"}
        with pytest.raises(NotFound):
            await subject.containers.copy_uploads(SOMEBODY, name, ["file-unknown"])
        assert await subject.list_paths(name) == ["out-2.txt", "out.txt"]

    async def test_uploads_of_other_tenants_are_absent(self, subject: ContainerSubject) -> None:
        if subject.upload is None:
            pytest.skip("the adapter has no uploads")
        file_id = await subject.upload("out.txt", b"one")
        with pytest.raises(InvalidRequest) as refused:
            await subject.containers.create_container(STRANGER, ContainerSpec(file_ids=(file_id,)))
        assert refused.value.param == "file_ids"
        theirs = await subject.containers.create_container(STRANGER, ContainerSpec())
        with pytest.raises(NotFound):
            await subject.containers.copy_uploads(STRANGER, theirs.id, [file_id])

    @pytest.mark.parametrize("used", [False, True])
    async def test_an_archive_is_unpacked(self, subject: ContainerSubject, used: bool) -> None:
        name = await subject.create_container()
        if used:
            await subject.run(await subject.open_container(name), "writes out.txt")
        records = await subject.containers.unpack_archive(
            SOMEBODY, name, build_archive("zip", {"out.txt": b"packed", "d/e.txt": b"e"}), "zip"
        )
        assert {(record.path, record.source, record.bytes) for record in records} == {
            ("out.txt", "user", 6),
            ("d/e.txt", "user", 1),
        }
        await subject.containers.unpack_archive(
            SOMEBODY, name, build_archive("tar.gz", {"f.txt": b"f"}), "tar.gz", "d"
        )
        assert await subject.list_paths(name) == ["d/e.txt", "d/f.txt", "out.txt"]
        container = await subject.open_container(name)
        assert collect_stdout(await subject.run(container, "prints out.txt")) == "packed\n"
        assert list((await container.collect_files()).files) == []

    async def test_an_archive_that_is_refused_leaves_nothing(self, subject: ContainerSubject) -> None:
        name = await subject.create_container()
        await subject.containers.write_file(SOMEBODY, name, "d", b"a file")
        for content in (
            b"no archive",
            build_archive("zip", {"a.txt": b"a", "../b.txt": b"b"}),
            build_archive("zip", {"d/e.txt": b"e"}),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await subject.containers.unpack_archive(SOMEBODY, name, content, "zip")
            assert refused.value.param == "file"
        assert await subject.list_paths(name) == ["d"]
