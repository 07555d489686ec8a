"""`SqliteStore` behaves as `MemoryStore` under random operations."""

import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from fumehood.interfaces import ResponseLease, ResponseLeaseLost, Store
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.responses import Response
from fumehood.store import response_rows
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from fumehood.testing.conformance_kits.store_fixtures import (
    make_assistant_message,
    make_model_item,
    make_response,
    make_user_item,
)

TENANTS = ("one", "two")
DEEPEST_FORK = response_rows.MAX_FORK_DEPTH
# No process is killed here, so fsync is not needed.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

type Name = tuple[str, str]
type Running = tuple[Name, Response, list[ResponseLease]]

words = st.lists(st.text(max_size=5), max_size=2)


class Stores(RuleBasedStateMachine):
    """Both stores. A name is a tenant and the id of a response."""

    names = Bundle("names")
    running = Bundle("running")

    @initialize(cache=st.sampled_from([0, 3_000, 1 << 20]), deepest=st.integers(0, 2))
    def open(self, cache: int, deepest: int) -> None:
        response_rows.MAX_FORK_DEPTH = deepest  # so that short histories copy prefixes too
        self.directory = tempfile.TemporaryDirectory(prefix="fumehood-store-", dir=MEMORY)
        self.path = Path(self.directory.name) / "store.db"
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.memory = MemoryStore(self.clock)
        self.cache = cache
        self.sqlite = self.runner.run(SqliteStore.open(self.path, cache_bytes=cache))
        self.known: list[Name] = []
        self.entries: list[ConversationEntry] = []

    @property
    def both(self) -> tuple[Store, Store]:
        return self.memory, self.sqlite

    @rule(target=names, previous=names, words=words, items=st.integers(0, 2))
    def continue_conversation(self, previous: Name, words: list[str], items: int) -> Name:
        return self._commit(self._begin(previous[0], previous, written=False), words, items)

    @rule(target=names, tenant=st.sampled_from(TENANTS), words=words)
    def start_conversation(self, tenant: str, words: list[str]) -> Name:
        return self._commit(self._begin(tenant, None, written=False), words, 1)

    @rule(target=running, tenant=st.sampled_from(TENANTS), previous=st.none() | names, written=st.booleans())
    def begin(self, tenant: str, previous: Name | None, written: bool) -> Running:
        return self._begin(tenant, previous, written)

    def _begin(self, tenant: str, previous: Name | None, written: bool) -> Running:
        response = make_response(self.memory).response
        response.previous_response_id = previous[1] if previous else None
        response.output = []
        self.known.append((tenant, response.id))

        async def begin() -> list[ResponseLease]:
            leases = [await store.begin_response(tenant, response) for store in self.both]
            if written:
                assert await self.sqlite.fail_orphaned_responses() == 0
            return leases

        return (tenant, response.id), response, self.runner.run(begin())

    @rule(target=names, running=consumes(running), words=words, items=st.integers(0, 2))
    def commit(self, running: Running, words: list[str], items: int) -> Name:
        return self._commit(running, words, items)

    def _commit(self, running: Running, words: list[str], items: int) -> Name:
        name, response, leases = running
        response.output = [make_assistant_message(f"answer {number}") for number in range(items)]
        entries = [
            *(make_user_item(word) for word in words),
            *(make_model_item(item) for item in response.output),
        ]
        response.status = "completed"
        self.entries += entries

        async def is_lease_lost(store: Store, lease: ResponseLease) -> bool:
            try:
                await store.commit_response(lease, name[0], response, entries)
            except ResponseLeaseLost:
                return True
            return False

        async def commit() -> list[bool]:
            return [await is_lease_lost(store, lease) for store, lease in zip(self.both, leases, strict=True)]

        assert len(set(self.runner.run(commit()))) == 1
        return name

    @rule(name=names, stranger=st.booleans())
    def delete(self, name: Name, stranger: bool) -> None:
        self._delete(name, stranger)

    def _delete(self, name: Name, stranger: bool) -> None:
        tenant = TENANTS[1 - TENANTS.index(name[0])] if stranger else name[0]

        async def delete() -> list[bool]:
            return [await store.delete_response(tenant, name[1]) for store in self.both]

        assert len(set(self.runner.run(delete()))) == 1

    @rule(running=running)
    def delete_running(self, running: Running) -> None:
        self._delete(running[0], stranger=False)

    @rule(target=names, running=running)
    def remember_running(self, running: Running) -> Name:
        return running[0]

    @rule()
    def restart(self) -> None:
        """Restart both stores; running responses fail."""

        async def restart() -> None:
            await self.sqlite.close()
            self.sqlite = await SqliteStore.open(self.path, cache_bytes=self.cache)
            self.clock.advance(31)
            assert await self.memory.fail_orphaned_responses() == await self.sqlite.fail_orphaned_responses()

        self.runner.run(restart())

    @invariant()
    def assert_equal(self) -> None:
        one, other = self.runner.run(self._read_everything())
        assert one == other

    async def _read_everything(self) -> list[list[object]]:
        """Read everything from both stores."""
        item_ids = [entry.id for entry in self.entries if entry.id]
        results: list[list[object]] = []
        for store in self.both:
            results.append(found := [])
            for tenant, response_id in self.known:
                response = await store.get_response(tenant, response_id)
                conversation = await store.get_conversation(tenant, response_id)
                found += [
                    (tenant, response_id),
                    msgspec.json.encode(response),
                    conversation if conversation is None else [segment.entries for segment in conversation],
                    await store.list_input_items(tenant, response_id),
                ]
            found += [await store.find_items(tenant, item_ids) for tenant in TENANTS]
        return results

    def teardown(self) -> None:
        response_rows.MAX_FORK_DEPTH = DEEPEST_FORK
        if not hasattr(self, "runner"):
            return

        async def delete_all() -> None:
            for tenant, response_id in self.known:
                await self.sqlite.delete_response(tenant, response_id)
            await self.sqlite.close()

        self.runner.run(delete_all())
        self.runner.close()
        with closing(sqlite3.connect(self.path)) as connection:
            for table in ("responses", "items", "threads", "running_responses"):
                assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        self.directory.cleanup()


@pytest.mark.timeout(300)  # its many small steps wait for threads: on a busy machine, for a minute
class TestStores(Stores.TestCase):
    settings = settings(max_examples=15, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestStoresLong(Stores.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50)
