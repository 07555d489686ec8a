"""Damaged rows and pages raise an error that names them."""

import logging
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fumehood.protocol.openai.api_errors import StorageCorrupted
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.openai.responses import Response
from fumehood.store.sqlite_store import SqliteStore, StoreOpenError
from fumehood.testing.conformance_kits.store_fixtures import make_response, store_response

PAGE = 4096


async def _make_store(path: Path, number: int = 1) -> list[Response]:
    """Create a store with responses of one conversation each, and close it."""
    store = await SqliteStore.open(path)
    made = [await store_response(store, f"text {one} " + "abc" * 400) for one in range(number)]
    await store.close()
    return made


def _execute_sql(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount > 0


async def _read_corrupted(path: Path, response: Response) -> list[StorageCorrupted]:
    """Read a response in every way, and return the errors."""
    store = await SqliteStore.open(path)
    errors: list[StorageCorrupted] = []
    for reading in (
        store.get_response("tenant", response.id),
        store.get_conversation("tenant", response.id),
        store.list_input_items("tenant", response.id),
    ):
        try:
            await reading
        except StorageCorrupted as error:
            errors.append(error)
    await store.close()
    return errors


def _read_log_events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.msg == "storage_corrupted"]
    assert all(record.levelno == logging.ERROR for record in found)
    return [getattr(record, "fields", {}) for record in found]


_NO_TEXT = "UPDATE items SET raw = CAST(x'7bff80fe' || raw AS BLOB)"
_NO_CHECKSUMS = (
    "UPDATE items SET checksum = NULL",
    "UPDATE responses SET checksum = NULL",
)  # an older release
_OTHER_LETTER = "UPDATE items SET raw = CAST(replace(raw, 'abcabc', 'abcabd') AS BLOB)"  # still valid JSON
_OTHER_STATUS = "UPDATE responses SET body = CAST(replace(body, 'completed', 'cancelled') AS BLOB)"
_OWN_PARENT = "UPDATE threads SET parent = id, parent_end = 1"


@pytest.mark.parametrize(
    ("damage", "error_count", "row"),
    [
        ([_NO_TEXT], 3, "items 1/"),
        ([_NO_TEXT, *_NO_CHECKSUMS], 3, "items 1/"),
        ([_OTHER_LETTER], 2, "items 1/0"),  # the output is intact
        ([_OTHER_STATUS], 1, "responses {id}"),  # its items can be read
        ([_OWN_PARENT], 2, "threads 1"),
        (_NO_CHECKSUMS, 0, ""),
    ],
)
async def test_damage_is_noticed_and_named(
    path: Path, caplog: pytest.LogCaptureFixture, damage: list[str], error_count: int, row: str
) -> None:
    (response,) = await _make_store(path)
    for statement in damage:
        _execute_sql(path, statement)
    errors = await _read_corrupted(path, response)
    row = row.format(id=response.id)
    assert [(error.status, error.wire_code) for error in errors] == [(500, "storage_corrupted")] * error_count
    assert all(row in error.message for error in errors)
    logged = [f"{line['table']} {line['row']}" for line in _read_log_events(caplog)]
    assert bool(logged) == bool(errors)
    assert all(line.startswith(row) for line in logged)


async def test_a_damaged_response_that_was_running_does_not_keep_the_store_from_opening(
    path: Path, store: SqliteStore
) -> None:
    running = make_response(store, "text")
    await running.begin()
    other = make_response(store, "text")
    await other.begin()
    await store.close()
    _execute_sql(path, "UPDATE responses SET body = x'00' WHERE id = ?", running.response.id)
    again = await SqliteStore.open(path)
    assert await again.fail_orphaned_responses() == 2
    found = await again.get_response("tenant", other.response.id)
    assert found is not None
    assert found.status == "failed"
    with pytest.raises(StorageCorrupted):
        await again.get_response("tenant", running.response.id)
    assert await again.delete_response("tenant", running.response.id)
    await again.close()


async def test_a_damaged_container_is_named_and_does_not_hide_the_others(
    path: Path, store: SqliteStore
) -> None:
    for name in ("cntr_1", "cntr_2"):
        await store.put_container(
            ContainerRecord(
                id=name, tenant="tenant", spec=ContainerSpec(), created_at=1.0, last_active_at=1.0
            )
        )
    await store.close()
    _execute_sql(path, "UPDATE containers SET record = x'7b22ff' WHERE id = 'cntr_1'")
    again = await SqliteStore.open(path)
    with pytest.raises(StorageCorrupted, match="containers cntr_1"):
        await again.get_container("cntr_1")
    with pytest.raises(StorageCorrupted, match="containers cntr_1"):
        await again.list_containers("tenant", PageQuery())
    # Sweeps skip damaged rows.
    assert [record.id for record in await again.find_containers(running=True)] == ["cntr_2"]
    await again.close()


async def test_whatever_page_is_damaged_nothing_wrong_is_read(path: Path, tmp_path: Path) -> None:
    made = await _make_store(path, 20)
    expected = {response.id: response for response in made}
    whole = path.read_bytes()
    chance = random.Random(17)
    outcomes: dict[str, int] = {"right": 0, "missing": 0, "damaged": 0, "unopened": 0}
    for page in range(len(whole) // PAGE):
        broken = tmp_path / f"page{page}" / "store.db"
        broken.parent.mkdir()
        content = bytearray(whole)
        start = page * PAGE + chance.randrange(PAGE - 200)
        content[start : start + 200] = chance.randbytes(200)
        broken.write_bytes(content)
        await _read_all(broken, expected, outcomes)
        shutil.rmtree(broken.parent)
    assert outcomes["damaged"] > 0
    assert outcomes["right"] > outcomes["damaged"]


async def _read_all(path: Path, expected: dict[str, Response], outcomes: dict[str, int]) -> None:
    try:
        store = await SqliteStore.open(path)
    except StoreOpenError:
        outcomes["unopened"] += 1
        return
    for response_id, response in expected.items():
        try:
            found = await store.get_response("tenant", response_id)
        except StorageCorrupted:
            outcomes["damaged"] += 1
            continue
        if found is None:
            outcomes["missing"] += 1
        else:
            assert found == response
            outcomes["right"] += 1
    await store.close()
