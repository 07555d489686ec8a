"""What is left of containers, and for how long."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import override

import msgspec
import pytest
from inline_snapshot import snapshot

from fumehood.containers import user_file_writer
from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.interfaces import Caller
from fumehood.protocol.name_sanitizing import candidate_names
from fumehood.protocol.openai.api_errors import (
    BodyTooLarge,
    ContainerExpired,
    InvalidRequest,
    NotFound,
    RateLimited,
)
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_errors import SandboxServerUnreachable
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, NetworkAllowlist, SandboxSpec
from fumehood.store.aes_gcm_sealer import KEY_BYTES, AesGcmSealer
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandboxProvider,
    WriteFile,
)
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness, settle
from tests.support.memory_uploads import InMemoryUploads

HOUR = 3600
SECRET = "s3cret-value"
NETWORK = NetworkAllowlist(
    allowed_domains=["api.example.com"],
    domain_secrets=[DomainSecret(domain="API.example.com", name="TOKEN", value=SECRET)],
)
OPEN = ContainerSettings(allowed_domains=frozenset({"*"}))


async def create_container(harness: ContainerHarness, **chosen: object) -> str:
    return (await harness.containers.create_container(SOMEBODY, msgspec.convert(chosen, ContainerSpec))).id


async def write_file(harness: ContainerHarness, name: str, path: str, content: bytes) -> str:
    return (await harness.containers.write_file(SOMEBODY, name, path, content)).id


async def get_record(harness: ContainerHarness, name: str) -> ContainerRecord:
    record = await harness.store.get_container(name)
    assert record is not None
    return record


# --- what expires -------------------------------------------------------------------------------------------


async def test_only_what_the_user_put_there_outlives_an_expired_container() -> None:
    async with container_harness(ScriptedExecution("x", [WriteFile("made.txt", b"made")])) as harness:
        name = await create_container(harness)
        await write_file(harness, name, "user.txt", b"given")
        await harness.run(await harness.open(name), "x")
        await harness.sweep_after(20 * 60)
        assert [file.path for file in await harness.store.list_container_files(name)] == ["user.txt"]
        assert list(harness.blobs.contents.values()) == [b"given"]
        assert harness.scripted.specs == {}
        assert (await get_record(harness, name)).retained == 5
        await harness.sweep_after(168 * HOUR)
        assert await harness.store.get_container(name) is None
        assert list(await harness.store.list_container_files(name)) == []
        assert harness.blobs.contents == {}
        with pytest.raises(NotFound):
            await harness.containers.get_container(SOMEBODY, name)


async def test_so_much_is_kept_of_expired_containers_and_the_oldest_goes_first() -> None:
    async with container_harness(settings=ContainerSettings(retained_bytes=10)) as harness:
        names: list[str] = []
        for number in range(4):
            names.append(await create_container(harness))
            await write_file(harness, names[-1], "a.txt", bytes([number]) * 4)
            await harness.sweep_after(20 * 60)
        assert [len(await harness.store.list_container_files(name)) for name in names] == [0, 0, 1, 1]
        assert sorted(harness.blobs.contents.values()) == [bytes([2]) * 4, bytes([3]) * 4]
        statuses = [(await harness.containers.get_container(SOMEBODY, name)).status for name in names]
        assert statuses == ["expired"] * 4
        assert harness.stats.purged == 2


async def test_without_retention_nothing_outlives_a_container() -> None:
    async with container_harness(settings=ContainerSettings(retention_hours=0)) as harness:
        name = await create_container(harness)
        await write_file(harness, name, "a.txt", b"a")
        await harness.sweep_after(20 * 60)
        assert harness.blobs.contents == {}
        await harness.containers.sweep()
        assert await harness.store.get_container(name) is None


async def test_a_container_lives_so_long_however_much_it_is_used() -> None:
    running = asyncio.Event()
    async with container_harness(
        ScriptedExecution("x", [running]),
        ScriptedExecution("y"),
        settings=ContainerSettings(max_lifetime_hours=1, idle_minutes=60),
    ) as harness:
        name = await create_container(harness)
        call = asyncio.ensure_future(harness.run(await harness.open(name), "x"))
        await asyncio.sleep(0)
        harness.clock.advance(HOUR)
        with pytest.raises(ContainerExpired):  # nobody new comes in,
            await harness.open(name)
        await harness.containers.sweep()
        running.set()
        assert (await call).end.status == "ok"  # what runs may end,
        assert (await get_record(harness, name)).status == "running"
        await harness.containers.sweep()
        assert (await get_record(harness, name)).status == "expired"  # and then it is over
        assert harness.scripted.specs == {}
        await harness.run(await harness.open(), "y")


async def test_nobody_keeps_a_container_for_ever_by_an_upload_that_does_not_end() -> None:
    arriving = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        yield b"x"
        arriving.set()
        await asyncio.Event().wait()

    async with container_harness(
        ScriptedExecution("x"), settings=ContainerSettings(max_lifetime_hours=1)
    ) as harness:
        name = await create_container(harness)
        await harness.run(await harness.open(name), "x")
        upload = asyncio.ensure_future(harness.containers.write_file(SOMEBODY, name, "a.txt", endless()))
        await arriving.wait()
        await harness.sweep_after(2 * HOUR - 1)
        assert (await get_record(harness, name)).status == "running"
        await harness.sweep_after(1)
        assert (await get_record(harness, name)).status == "expired"
        assert harness.scripted.specs == {}
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert harness.blobs.contents == {}


async def test_all_that_ended_long_ago_are_forgotten_in_one_sweep() -> None:
    """Else whoever makes and deletes containers faster than one sweep forgets them fills the disk."""

    class FewAtOnce(MemoryStore):
        @override
        async def list_ended_containers(
            self, *, expired_before: float, deleted_before: float
        ) -> Sequence[ContainerRecord]:
            found = await super().list_ended_containers(
                expired_before=expired_before, deleted_before=deleted_before
            )
            return found[:2]

    async with ScriptedSandboxProvider() as provider:
        clock = FakeClock()
        harness = ContainerHarness(provider, clock=clock, shared_store=FewAtOnce(clock))
        for _ in range(5):
            await harness.containers.delete_container(SOMEBODY, await create_container(harness))
        await harness.sweep_after(HOUR)
        assert list(await harness.store.find_containers()) == []


async def test_those_whose_server_is_gone_have_expired() -> None:
    settings = ContainerSettings(sandboxes_survive_restart=False)
    async with container_harness(
        ScriptedExecution("x", [WriteFile("made.txt", b"made")]), ScriptedExecution("y"), settings=settings
    ) as harness:
        bound, fresh = await create_container(harness), await create_container(harness)
        await write_file(harness, bound, "user.txt", b"given")
        await harness.run(await harness.open(bound), "x")
        await harness.scripted.end_sandbox(f"{bound}-1", "its server ended")
        there = harness.second_process()
        async with there.containers as containers:
            assert (there.stats.ended, there.stats.live_containers) == ({"lost": 1}, 1)
            assert (await containers.get_container(SOMEBODY, bound)).status == "expired"
            assert (await containers.get_container(SOMEBODY, fresh)).status == "running"
            successor = await containers.open_container(
                SOMEBODY, containers.reserve_id(), ContainerSpec(), bound
            )
            await there.run(successor, "y")
            assert await there.paths(successor) == ["user.txt"]


# --- what is deleted ----------------------------------------------------------------------------------------


async def test_nothing_is_left_of_a_deleted_container() -> None:
    async with container_harness(ScriptedExecution("x", [WriteFile("made.txt", b"made")])) as harness:
        name = await create_container(harness)
        await write_file(harness, name, "user.txt", b"given")
        await harness.run(await harness.open(name), "x")
        await harness.containers.delete_container(SOMEBODY, name)
        assert harness.scripted.specs == {}
        assert harness.blobs.contents == {}
        assert list(await harness.store.list_container_files(name)) == []
        assert list(await harness.containers.list_containers(SOMEBODY, PageQuery())) == []
        await harness.sweep_after(HOUR)
        assert list(await harness.store.find_containers()) == []


async def test_a_sandbox_that_could_not_be_ended_is_ended_later() -> None:
    async with container_harness(ScriptedExecution("x")) as harness:
        name = await create_container(harness)
        await harness.run(await harness.open(name), "x")
        harness.scripted.error = SandboxServerUnreachable("away")
        await harness.containers.delete_container(SOMEBODY, name)
        harness.scripted.error = None
        assert len(harness.scripted.specs) == 1
        await create_container(harness)
        await harness.sweep_after(1000)
        assert harness.scripted.specs == {}


async def test_a_call_that_was_waiting_for_its_sandbox_leaves_none() -> None:
    async with container_harness(ScriptedExecution("x"), capacity=1) as harness:
        first, name = await create_container(harness), await create_container(harness)
        await harness.run(await harness.open(first), "x")
        waiting = asyncio.ensure_future(harness.run(await harness.open(name), "y"))
        await settle()
        await harness.containers.delete_container(SOMEBODY, name)
        await harness.containers.delete_container(SOMEBODY, first)
        while not waiting.done():
            await asyncio.sleep(0)
            harness.clock.advance(0.25)
        end = (await waiting).end
        assert (end.status, end.reason) == snapshot(
            ("lost", "The container is not there any more: it has expired, or was deleted.")
        )
        assert harness.scripted.specs == {}
        assert (await get_record(harness, name)).status == "deleted"


async def test_what_a_call_left_is_not_recorded_for_a_deleted_container() -> None:
    writing = asyncio.Event()
    settings = ContainerSettings(isolation="execution")
    async with container_harness(
        ScriptedExecution("x", [writing, WriteFile("a.txt", b"a")]), settings=settings
    ) as harness:
        name = await create_container(harness)
        other = harness.second_process()  # which knows nothing of the call
        call = asyncio.ensure_future(harness.run(await harness.open(name), "x"))
        await settle()
        await other.containers.delete_container(SOMEBODY, name)
        writing.set()
        assert not (await call).files
        assert harness.blobs.contents == {}
        assert list(await harness.store.list_container_files(name)) == []
        assert (await get_record(harness, name)).status == "deleted"


# --- how much ------------------------------------------------------------------------------------------------


async def test_containers_that_are_created_count() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=2)) as harness:
        names = [await create_container(harness), await create_container(harness)]
        with pytest.raises(RateLimited) as refused:
            await create_container(harness)
        assert (refused.value.status, refused.value.wire_code) == (429, "container_limit_exceeded")
        assert len(await harness.store.find_containers()) == 2
        await harness.containers.create_container(Caller("other"), ContainerSpec())
        await harness.containers.delete_container(SOMEBODY, names[0])
        await create_container(harness)
        harness.clock.advance(20 * 60)
        await create_container(harness)


async def test_a_user_may_put_so_much_into_a_container() -> None:
    limits = ContainerSettings(file_limits=ContainerFileLimits(file_bytes=3, container_bytes=10, files=3))
    async with container_harness(settings=limits) as harness:
        name = await create_container(harness)
        await write_file(harness, name, "a", bytes(8))
        with pytest.raises(BodyTooLarge):
            await write_file(harness, name, "b", bytes(3))
        await write_file(harness, name, "a", bytes(10))  # in place of the other
        await write_file(harness, name, "b", b"")
        await write_file(harness, name, "c", b"")
        with pytest.raises(BodyTooLarge):
            await write_file(harness, name, "d", b"")
        both = await asyncio.gather(
            write_file(harness, name, "a", b"12345"),
            write_file(harness, name, "b", b"123456"),
            return_exceptions=True,
        )
        assert sum(isinstance(one, BodyTooLarge) for one in both) == 1
        kept = sum(file.bytes for file in await harness.store.list_container_files(name))
        assert kept == sum(map(len, harness.blobs.contents.values())) <= 10


async def test_no_name_is_tried_twice_however_many_uploads_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def noted(path: str) -> Iterator[str]:
        for name in candidate_names(path):
            tried.append(name)
            yield name

    monkeypatch.setattr(user_file_writer, "candidate_names", noted)
    store, uploads = MemoryStore(), InMemoryUploads()
    ids = [uploads.add("a.txt", str(number).encode(), SOMEBODY.tenant) for number in range(200)]
    async with ScriptedSandboxProvider() as provider:
        blobs = GarbageCollectedBlobs(uploads.blobs, store)
        containers = SandboxContainerService(provider, store, blobs, FakeClock(), uploads=uploads)
        record = await containers.create_container(SOMEBODY, ContainerSpec(file_ids=tuple(ids)))
        paths = {file.path for file in await containers.list_files(SOMEBODY, record.id)}
    assert paths == {"a.txt", *(f"a-{number}.txt" for number in range(2, 201))}
    assert len(tried) == 200


# --- what is secret ------------------------------------------------------------------------------------------


async def test_secrets_are_sealed_where_they_are_kept_and_given_to_sandboxes_alone() -> None:
    store, blobs = MemoryStore(), MemoryBlobStore()
    async with container_harness(ScriptedExecution("x"), settings=OPEN) as harness:
        containers = SandboxContainerService(
            harness.scripted,
            store,
            GarbageCollectedBlobs(blobs, store),
            harness.clock,
            OPEN,
            sealer=AesGcmSealer([bytes(KEY_BYTES)]),
        )
        record = await containers.create_container(SOMEBODY, ContainerSpec(network=NETWORK))
        assert SECRET not in msgspec.json.encode(await store.find_containers()).decode()
        assert SECRET not in repr(record)
        await harness.run(await containers.open_container(SOMEBODY, record.id, ContainerSpec()), "x")
        (spec,) = harness.scripted.specs.values()
        assert spec.network == NETWORK
        shown = await containers.get_container(SOMEBODY, record.id)
        assert shown.spec.network == NetworkAllowlist(allowed_domains=["api.example.com"])
        assert SECRET not in msgspec.json.encode(await store.find_containers()).decode()
        await containers.delete_container(SOMEBODY, record.id)
        ended = await store.get_container(record.id)
        assert ended is not None
        assert ended.secrets == ""


async def test_secrets_of_another_key_or_container_cannot_be_opened() -> None:
    async with container_harness(settings=OPEN) as harness:
        first, second = [
            await harness.containers.create_container(SOMEBODY, ContainerSpec(network=NETWORK))
            for _ in range(2)
        ]
        await harness.store.put_container(msgspec.structs.replace(first, secrets=second.secrets))
        end = (await harness.run(await harness.open(first.id), "x")).end
        assert (end.status, end.exit_code) == ("lost", -1)
        assert end.reason.startswith(
            "The sandbox refused: The domain_secrets of this container cannot be decrypted"
        )
        assert SECRET not in end.reason
        assert harness.scripted.specs == {}


async def test_without_a_sealer_nothing_secret_is_taken() -> None:
    async with container_harness(settings=OPEN) as harness:
        containers = SandboxContainerService(
            harness.scripted,
            harness.store,
            GarbageCollectedBlobs(harness.blobs, harness.store),
            harness.clock,
            OPEN,
        )
        with pytest.raises(InvalidRequest):
            await containers.create_container(SOMEBODY, ContainerSpec(network=NETWORK))
        assert list(await harness.store.find_containers()) == []


@pytest.mark.parametrize(
    ("ceiling", "domains", "allowed"),
    [
        ({"*"}, ["anything.example"], True),
        ({"api.example.com"}, ["api.example.com"], True),
        ({"API.example.com."}, ["api.EXAMPLE.com"], True),
        ({"api.example.com"}, ["www.api.example.com"], False),
        ({"api.example.com"}, ["api.example.com", "other.example"], False),
        ({"example.com"}, ["*"], False),
        (set[str](), ["api.example.com"], False),
    ],
)
async def test_the_ceiling_on_networks(ceiling: set[str], domains: list[str], allowed: bool) -> None:
    async with container_harness(settings=ContainerSettings(allowed_domains=frozenset(ceiling))) as harness:
        spec = ContainerSpec(network=NetworkAllowlist(allowed_domains=domains))
        if allowed:
            assert (await harness.containers.create_container(SOMEBODY, spec)).spec.network == spec.network
            return
        for attempt in (harness.containers.create_container(SOMEBODY, spec), harness.open(spec=spec)):
            with pytest.raises(InvalidRequest) as refused:
                await attempt
            assert refused.value.param == "network_policy"
        assert list(await harness.store.find_containers()) == []


async def test_a_secret_is_for_a_domain_that_may_be_reached() -> None:
    network = msgspec.structs.replace(NETWORK, allowed_domains=["other.example"])
    async with container_harness(settings=OPEN) as harness:
        with pytest.raises(InvalidRequest) as refused:
            harness.containers.validate_spec(ContainerSpec(network=network))
        assert refused.value.message == snapshot(
            "network_policy: the secret TOKEN is for a domain that is not in allowed_domains."
        )


def test_the_page_tells_the_bounds() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/containers.md").read_text(encoding="utf-8")
    settings = ContainerSettings()
    assert f"1 to `max_idle_minutes` ({settings.max_idle_minutes})" in page
    assert f"| {settings.idle_minutes} minutes (`idle_minutes`) |" in page
    assert f"| {settings.max_lifetime_hours:g} hours (`max_lifetime_hours`) |" in page
    assert f"`retention_hours` ({settings.retention_hours:g})" in page
    assert f"`retained_bytes` ({settings.retained_bytes >> 30} GiB)" in page
    assert f"`limits.containers_per_tenant` ({settings.containers_per_tenant})" in page
    assert f"at most {settings.file_limits.files:,} files (`container_files`)" in page
    assert f"of {settings.file_limits.container_bytes >> 30} GiB together (`container_bytes`)" in page


async def test_uploads_wait_for_each_other() -> None:
    """So that what is on its way cannot fill the disk; another tenant's do not wait."""
    arriving: list[str] = []
    go_on = asyncio.Event()

    async def content(name: str) -> AsyncGenerator[bytes]:
        arriving.append(name)
        await go_on.wait()
        yield b"x"

    async with container_harness(settings=ContainerSettings(concurrent_uploads=2)) as harness:
        names = [await create_container(harness) for _ in range(4)]
        other = (await harness.containers.create_container(Caller("other"), ContainerSpec())).id
        uploads = [
            asyncio.ensure_future(harness.containers.write_file(SOMEBODY, name, "a", content(name)))
            for name in names
        ]
        uploads.append(
            asyncio.ensure_future(harness.containers.write_file(Caller("other"), other, "a", content(other)))
        )
        await settle()
        assert sorted(arriving) == sorted([*names[:2], other])
        uploads[0].cancel()
        go_on.set()
        done = await asyncio.gather(*uploads, return_exceptions=True)
        assert [isinstance(one, BaseException) for one in done] == [True, False, False, False, False]


async def test_a_sandbox_that_was_made_and_not_written_down_goes_with_its_container() -> None:
    async with container_harness() as harness:
        deleted, expired = await create_container(harness), await create_container(harness)
        for name in (deleted, expired):  # as if a process had died before it could write
            await harness.scripted.create(SandboxSpec(tenant="somebody"), f"{name}-1")
        await harness.containers.delete_container(SOMEBODY, deleted)
        assert list(harness.scripted.specs) == [f"{expired}-1"]
        await harness.sweep_after(20 * 60)
        assert harness.scripted.specs == {}


@pytest.mark.parametrize("used", [False, True])
async def test_a_ceiling_that_was_lowered_holds_for_containers_from_before(used: bool) -> None:
    async with container_harness(ScriptedExecution("x"), settings=OPEN) as harness:
        name = await create_container(harness, network=NetworkAllowlist(allowed_domains=["api.example.com"]))
        if used:
            await harness.run(await harness.open(name), "x")
        there = ContainerHarness(
            harness.scripted, ContainerSettings(), harness.clock, harness.store, harness.blobs
        )
        outcome = await there.run(await there.open(name), "x")
        assert (outcome.end.status, outcome.end.reason) == snapshot(
            (
                "lost",
                "The sandbox refused: The network of this container is not allowed any more; create another one.",
            )
        )
        if not used:
            assert harness.scripted.specs == {}
            await harness.run(await harness.open(name), "x")
