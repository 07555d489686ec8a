"""What the SQLite store reads and writes of containers, in a transaction of its caller; imports msgspec, siblings."""

import sqlite3
from collections.abc import Collection, Sequence

import msgspec

from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord
from fumehood.protocol.listing import Window
from fumehood.store import windows
from fumehood.store.integrity import decode, decode_readable

_containers = msgspec.json.Decoder(ContainerRecord)
_files = msgspec.json.Decoder(ContainerFileRecord)
_encode = msgspec.json.Encoder().encode

_MOST_ENDED = 100


# --- containers ---------------------------------------------------------------------------------------


def put(db: sqlite3.Connection, record: ContainerRecord, beside: Collection[str] | None) -> bool:
    if beside is not None:
        # By the index of those that run (hence the plus), which are few; a tenant may have had thousands.
        running = db.execute("SELECT id FROM containers WHERE running AND +tenant = ?", (record.tenant,))
        if not {record.id, *beside}.issuperset(name for (name,) in running):
            return False
    db.execute(
        "INSERT OR REPLACE INTO containers"
        " (id, tenant, created_at, running, listed, name, ended_at, retained, record)"
        " VALUES (:id, :tenant, :created_at, :running, :listed, :name, :ended_at, :retained, :record)",
        _row(record),
    )
    return True


def change(
    db: sqlite3.Connection,
    record: ContainerRecord,
    deleted_files: Sequence[str],
    seen: ContainerRecord | None = None,
) -> bool:
    if seen is not None and one(db, record.id) != seen:
        return False
    changed = db.execute(
        "UPDATE containers SET running = :running, listed = :listed, name = :name, ended_at = :ended_at,"
        " retained = :retained, record = :record"
        " WHERE id = :id AND running >= :running AND listed >= :listed",
        _row(record),
    )
    if changed.rowcount:
        _delete_files(db, deleted_files)
    return changed.rowcount > 0


def _row(record: ContainerRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "tenant": record.tenant,
        "created_at": record.created_at,
        "running": record.status == "running",
        "listed": record.status != "deleted",
        "name": record.spec.name,
        "ended_at": record.ended_at,
        "retained": record.retained,
        "record": _encode(record),
    }


def one(db: sqlite3.Connection, container_id: str) -> ContainerRecord | None:
    found = db.execute("SELECT record FROM containers WHERE id = ?", (container_id,)).fetchone()
    return decode(_containers, found[0], "containers", container_id) if found else None


def all_of(db: sqlite3.Connection, tenant: str | None, running: bool) -> list[ContainerRecord]:
    those = "running AND " if running else ""
    found = db.execute(
        f"SELECT id, record FROM containers WHERE {those}tenant = coalesce(?, tenant) ORDER BY created_at, id",  # noqa: S608
        (tenant,),
    )
    return decode_readable(_containers, found, "containers")


def some(db: sqlite3.Connection, tenant: str, window: Window, name: str | None) -> list[ContainerRecord]:
    """Raises InvalidRequest."""
    where = "tenant = :tenant AND listed"
    if name is not None:
        where += " AND name = :name"
    values = {"tenant": tenant, "name": name}
    found = windows.records(db, "containers", where, values, window)
    return [decode(_containers, record, "containers", name) for name, record in found]


def ended(db: sqlite3.Connection, expired_before: float, deleted_before: float) -> list[ContainerRecord]:
    found = db.execute(
        "SELECT id, record FROM containers WHERE NOT running AND ended_at <= iif(listed, ?, ?)"
        " ORDER BY ended_at LIMIT ?",
        (expired_before, deleted_before, _MOST_ENDED),
    )
    return decode_readable(_containers, found, "containers")


def retaining(db: sqlite3.Connection, tenant: str) -> list[ContainerRecord]:
    found = db.execute(
        "SELECT id, record FROM containers WHERE tenant = ? AND retained > 0 ORDER BY ended_at, id", (tenant,)
    )
    return decode_readable(_containers, found, "containers")


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
        [(one.id, one.container_id, one.created_at, one.blob, _encode(one)) for one in changed],
    )
    _delete_files(db, deleted)
    return True


def _delete_files(db: sqlite3.Connection, file_ids: Sequence[str]) -> None:
    db.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])


def file(db: sqlite3.Connection, container_id: str, file_id: str) -> ContainerFileRecord | None:
    found = db.execute(
        "SELECT record FROM files WHERE id = ? AND container = ?", (file_id, container_id)
    ).fetchone()
    return decode(_files, found[0], "files", file_id) if found else None


def files(db: sqlite3.Connection, container_id: str, window: Window | None) -> list[ContainerFileRecord]:
    """Raises InvalidRequest."""
    if window is not None:
        found = windows.records(db, "files", "container = :container", {"container": container_id}, window)
    else:
        found = db.execute(
            "SELECT id, record FROM files WHERE container = ? ORDER BY created_at, id", (container_id,)
        )
    return [decode(_files, record, "files", name) for name, record in found]
