"""What the SQLite store reads and writes of uploads, inside a transaction of its caller; imports msgspec, siblings."""

import sqlite3
from collections.abc import Sequence

import msgspec

from fumehood.interfaces import Amount
from fumehood.protocol.files import FileRecord
from fumehood.protocol.listing import Window
from fumehood.store import windows
from fumehood.store.integrity import decode, decode_readable

_uploads = msgspec.json.Decoder(FileRecord)
_encode = msgspec.json.Encoder().encode


def add(db: sqlite3.Connection, record: FileRecord, most: Amount | None) -> bool:
    if most is not None:
        has = total(db, record.tenant)
        if has.files >= most.files or has.bytes + record.bytes > most.bytes:
            return False
    db.execute(
        "INSERT INTO uploads (id, tenant, created_at, purpose, bytes, expires_at, blob, record)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.id,
            record.tenant,
            record.created_at,
            record.purpose,
            record.bytes,
            record.expires_at,
            record.blob,
            _encode(record),
        ),
    )
    return True


def total(db: sqlite3.Connection, tenant: str) -> Amount:
    return Amount(
        *db.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM uploads WHERE tenant = ?", (tenant,)
        ).fetchone()
    )


def one(db: sqlite3.Connection, tenant: str, file_id: str) -> FileRecord | None:
    found = db.execute("SELECT record FROM uploads WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
    return decode(_uploads, found[0], "uploads", file_id) if found else None


def some(
    db: sqlite3.Connection, tenant: str, window: Window, purpose: str | None, now: float
) -> list[FileRecord]:
    """Raises InvalidRequest."""
    where = "tenant = :tenant AND (expires_at IS NULL OR expires_at > :now)"
    if purpose is not None:
        where += " AND purpose = :purpose"
    values = {"tenant": tenant, "now": now, "purpose": purpose}
    found = windows.records(db, "uploads", where, values, window)
    return [decode(_uploads, record, "uploads", name) for name, record in found]


def delete(db: sqlite3.Connection, tenant: str, file_id: str) -> FileRecord | None:
    found = db.execute(
        "DELETE FROM uploads WHERE id = ? AND tenant = ? RETURNING record", (file_id, tenant)
    ).fetchall()
    return decode(_uploads, found[0][0], "uploads", file_id) if found else None


def expired(db: sqlite3.Connection, now: float, limit: int) -> Sequence[FileRecord]:
    found = db.execute(
        "SELECT id, record FROM uploads WHERE expires_at <= ? ORDER BY expires_at, id LIMIT ?", (now, limit)
    )
    return decode_readable(_uploads, found, "uploads")
