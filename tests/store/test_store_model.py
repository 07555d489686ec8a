"""The SQLite store does what the store in memory does, whatever happens to them; imports hypothesis and fumehood."""

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

from fumehood.interfaces import Fenced, Lease, Store
from fumehood.protocol.conversation import Entry
from fumehood.protocol.responses import Response
from fumehood.store import rows
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from fumehood.testing.turns import answered, made, said, turn

TENANTS = ("one", "two")

type Running = tuple[str, Response, tuple[Lease, Lease]]


class Stores(RuleBasedStateMachine):
    """Two stores side by side."""

    ids = Bundle("ids")
    running = Bundle("running")

    @initialize(cache=st.sampled_from([0, 3_000, 1 << 20]))
    def open(self, cache: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="fumehood-store-")
        self.path = Path(self.directory.name) / "store.db"
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.memory = MemoryStore(self.clock)
        self.cache = cache
        self.sqlite = self.runner.run(SqliteStore.open(self.path, cache_bytes=cache))
        self.names: set[tuple[str, str]] = set()
        self.entries: dict[str, list[Entry]] = {tenant: [] for tenant in TENANTS}
        self.lost = False

    @property
    def both(self) -> tuple[Store, Store]:
        return self.memory, self.sqlite

    @rule(
        target=running,
        tenant=st.sampled_from(TENANTS),
        previous=st.none() | ids,
        flush=st.booleans(),
    )
    def begin(self, tenant: str, previous: str | None, flush: bool) -> Running:
        response = turn(self.memory, tenant=tenant).response
        response.previous_response_id = previous
        response.output = []
        self.names.add((tenant, response.id))

        async def begin() -> tuple[Lease, Lease]:
            leases = await self.memory.begin(tenant, response), await self.sqlite.begin(tenant, response)
            if flush:
                assert await self.sqlite.renew([leases[1]]) == [leases[1]]
                await self.sqlite.recover()
            return leases

        return tenant, response, self.runner.run(begin())

    @rule(
        target=ids,
        running=consumes(running),
        words=st.lists(st.text(max_size=5), max_size=3),
        made_=st.integers(0, 2),
    )
    def commit(self, running: Running, words: list[str], made_: int) -> str:
        tenant, response, leases = running
        response.output = [answered(f"answer {number}") for number in range(made_)]
        entries = [*(said(word) for word in words), *(made(item) for item in response.output)]
        response.status = "completed"
        self.entries[tenant] += entries

        async def commit() -> list[bool]:
            fenced: list[bool] = []
            for store, lease in zip(self.both, leases, strict=True):
                try:
                    await store.commit(lease, tenant, response, entries)
                    fenced.append(False)
                except Fenced:
                    fenced.append(True)
            return fenced

        assert len(set(self.runner.run(commit()))) == 1
        return response.id

    @rule(tenant=st.sampled_from(TENANTS), response_id=ids)
    def delete(self, tenant: str, response_id: str) -> None:
        self._same("delete_response", tenant, response_id)

    @rule(tenant=st.sampled_from(TENANTS), running=running)
    def delete_running(self, tenant: str, running: Running) -> None:
        self._same("delete_response", tenant, running[1].id)

    @rule(target=ids, running=consumes(running))
    def leave_running(self, running: Running) -> str:
        return running[1].id

    @rule()
    def restart(self) -> None:
        """All that ran is lost."""

        async def restart() -> None:
            await self.sqlite.close()
            self.sqlite = await SqliteStore.open(self.path, cache_bytes=self.cache)
            self.clock.advance(31)
            assert await self.memory.recover() == await self.sqlite.recover()

        self.runner.run(restart())

    @invariant()
    def equal(self) -> None:
        for tenant, response_id in sorted(self.names):
            for method in ("response", "conversation", "input_entries"):
                self._same(method, tenant, response_id)
        for tenant in TENANTS:
            self._same(
                "entries", tenant, [entry.id for entries in self.entries.values() for entry in entries]
            )

    def _same(self, method: str, *arguments: object) -> None:
        async def ask() -> list[object]:
            return [_plain(await getattr(store, method)(*arguments)) for store in self.both]

        one, other = self.runner.run(ask())
        assert one == other, method

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return

        async def delete_all() -> None:
            for tenant, response_id in self.names:
                await self.sqlite.delete_response(tenant, response_id)
            await self.sqlite.close()

        self.runner.run(delete_all())
        self.runner.close()
        with closing(sqlite3.connect(self.path)) as connection:
            for table in ("responses", "items", "threads", "leases"):
                assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        self.directory.cleanup()


def _plain(found: object) -> object:
    if isinstance(found, Response):
        return msgspec.json.encode(found)
    if isinstance(found, list):
        return [getattr(one, "entries", one) for one in found]  # pyright: ignore[reportUnknownVariableType]
    return found


@pytest.fixture(autouse=True)
def shallow_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short histories get to copies too."""
    monkeypatch.setattr(rows, "DEEPEST_FORK", 1)


class TestStores(Stores.TestCase):
    settings = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestStoresLong(Stores.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60)
