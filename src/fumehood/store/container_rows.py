"""Containers and their files in the SQLite store. Functions run inside the caller's transaction."""

import sqlite3
from collections.abc import Collection, Sequence

import msgspec

from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.store import pagination
from fumehood.store.row_integrity import decode, decode_readable, encode

_container_decoder = msgspec.json.Decoder(ContainerRecord)
_file_decoder = msgspec.json.Decoder(ContainerFileRecord)

_MAX_ENDED = 100


# --- containers ---------------------------------------------------------------------------------------


def put(db: sqlite3.Connection, record: ContainerRecord, known_running: Collection[str] | None) -> bool:
    if known_running is not None:
        # The plus selects the index of running containers, which are few; a tenant may have had thousands.
        running = db.execute("SELECT id FROM containers WHERE running AND +tenant = ?", (record.tenant,))
        if not {record.id, *known_running}.issuperset(name for (name,) in running):
            return False
    db.execute(
        "INSERT OR REPLACE INTO containers"
        " (id, tenant, created_at, running, listed, name, ended_at, retained, record)"
        " VALUES (:id, :tenant, :created_at, :running, :listed, :name, :ended_at, :retained, :record)",
        _make_row(record),
    )
    return True


def update(
    db: sqlite3.Connection,
    record: ContainerRecord,
    deleted_files: Sequence[str],
    expected: ContainerRecord | None = None,
) -> bool:
    if expected is not None and get(db, record.id) != expected:
        return False
    changed = db.execute(
        "UPDATE containers SET running = :running, listed = :listed, name = :name, ended_at = :ended_at,"
        " retained = :retained, record = :record"
        " WHERE id = :id AND running >= :running AND listed >= :listed",
        _make_row(record),
    )
    if changed.rowcount:
        _delete_files(db, deleted_files)
    return changed.rowcount > 0


def _make_row(record: ContainerRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "tenant": record.tenant,
        "created_at": record.created_at,
        "running": record.status == "running",
        "listed": record.status != "deleted",
        "name": record.spec.name,
        "ended_at": record.ended_at,
        "retained": record.retained,
        "record": encode(record),
    }


def get(db: sqlite3.Connection, container_id: str) -> ContainerRecord | None:
    found = db.execute("SELECT record FROM containers WHERE id = ?", (container_id,)).fetchone()
    return decode(_container_decoder, found[0], "containers", container_id) if found else None


def find_all(db: sqlite3.Connection, tenant: str | None, running: bool) -> list[ContainerRecord]:
    condition = "running AND " if running else ""
    found = db.execute(
        f"SELECT id, record FROM containers WHERE {condition}tenant = coalesce(?, tenant) ORDER BY created_at, id",  # noqa: S608
        (tenant,),
    )
    return decode_readable(_container_decoder, found, "containers")


def list_page(
    db: sqlite3.Connection, tenant: str, query: PageQuery, name: str | None
) -> list[ContainerRecord]:
    """Raises InvalidRequest if the cursor is unknown."""
    where = "tenant = :tenant AND listed"
    if name is not None:
        where += " AND name = :name"
    values = {"tenant": tenant, "name": name}
    found = pagination.select_page(db, "containers", where, values, query)
    return [decode(_container_decoder, record, "containers", name) for name, record in found]


def list_ended(db: sqlite3.Connection, expired_before: float, deleted_before: float) -> list[ContainerRecord]:
    found = db.execute(
        "SELECT id, record FROM containers WHERE NOT running AND ended_at <= iif(listed, ?, ?)"
        " ORDER BY ended_at LIMIT ?",
        (expired_before, deleted_before, _MAX_ENDED),
    )
    return decode_readable(_container_decoder, found, "containers")


def list_retaining(db: sqlite3.Connection, tenant: str) -> list[ContainerRecord]:
    found = db.execute(
        "SELECT id, record FROM containers WHERE tenant = ? AND retained > 0 ORDER BY ended_at, id", (tenant,)
    )
    return decode_readable(_container_decoder, found, "containers")


def delete(db: sqlite3.Connection, container_id: str) -> None:
    db.execute("DELETE FROM containers WHERE id = ?", (container_id,))
    db.execute("DELETE FROM files WHERE container = ?", (container_id,))


# --- files --------------------------------------------------------------------------------------------


def put_files(db: sqlite3.Connection, changed: Sequence[ContainerFileRecord], deleted: Sequence[str]) -> bool:
    running = "SELECT 1 FROM containers WHERE id = ? AND running"
    for container_id in {record.container_id for record in changed}:
        if db.execute(running, (container_id,)).fetchone() is None:
            return False
    db.executemany(
        "INSERT OR REPLACE INTO files (id, container, created_at, blob, record) VALUES (?, ?, ?, ?, ?)",
        [(file.id, file.container_id, file.created_at, file.blob, encode(file)) for file in changed],
    )
    _delete_files(db, deleted)
    return True


def _delete_files(db: sqlite3.Connection, file_ids: Sequence[str]) -> None:
    db.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])


def get_file(db: sqlite3.Connection, container_id: str, file_id: str) -> ContainerFileRecord | None:
    found = db.execute(
        "SELECT record FROM files WHERE id = ? AND container = ?", (file_id, container_id)
    ).fetchone()
    return decode(_file_decoder, found[0], "files", file_id) if found else None


def list_files(
    db: sqlite3.Connection, container_id: str, query: PageQuery | None
) -> list[ContainerFileRecord]:
    """Raises InvalidRequest if the cursor is unknown."""
    if query is not None:
        found = pagination.select_page(
            db, "files", "container = :container", {"container": container_id}, query
        )
    else:
        found = db.execute(
            "SELECT id, record FROM files WHERE container = ? ORDER BY created_at, id", (container_id,)
        )
    return [decode(_file_decoder, record, "files", name) for name, record in found]
