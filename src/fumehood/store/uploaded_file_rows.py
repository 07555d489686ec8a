"""Uploads in the SQLite store. Functions run inside the caller's transaction."""

import sqlite3
from collections.abc import Sequence

import msgspec

from fumehood.interfaces import FileTotals
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.store import pagination
from fumehood.store.row_integrity import decode, decode_readable, encode

_upload_decoder = msgspec.json.Decoder(UploadedFileRecord)


def insert(db: sqlite3.Connection, record: UploadedFileRecord, quota: FileTotals | None) -> bool:
    if quota is not None:
        totals = get_totals(db, record.tenant)
        if totals.files >= quota.files or totals.bytes + record.bytes > quota.bytes:
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
            encode(record),
        ),
    )
    return True


def get_totals(db: sqlite3.Connection, tenant: str) -> FileTotals:
    return FileTotals(
        *db.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM uploads WHERE tenant = ?", (tenant,)
        ).fetchone()
    )


def get(db: sqlite3.Connection, tenant: str, file_id: str) -> UploadedFileRecord | None:
    found = db.execute("SELECT record FROM uploads WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
    return decode(_upload_decoder, found[0], "uploads", file_id) if found else None


def list_page(
    db: sqlite3.Connection, tenant: str, query: PageQuery, purpose: str | None, now: float
) -> list[UploadedFileRecord]:
    """Raises InvalidRequest if the cursor is unknown."""
    where = "tenant = :tenant AND (expires_at IS NULL OR expires_at > :now)"
    if purpose is not None:
        where += " AND purpose = :purpose"
    values = {"tenant": tenant, "now": now, "purpose": purpose}
    found = pagination.select_page(db, "uploads", where, values, query)
    return [decode(_upload_decoder, record, "uploads", name) for name, record in found]


def delete(db: sqlite3.Connection, tenant: str, file_id: str) -> UploadedFileRecord | None:
    found = db.execute(
        "DELETE FROM uploads WHERE id = ? AND tenant = ? RETURNING record", (file_id, tenant)
    ).fetchall()
    return decode(_upload_decoder, found[0][0], "uploads", file_id) if found else None


def list_expired(db: sqlite3.Connection, now: float, limit: int) -> Sequence[UploadedFileRecord]:
    found = db.execute(
        "SELECT id, record FROM uploads WHERE expires_at <= ? ORDER BY expires_at, id LIMIT ?", (now, limit)
    )
    return decode_readable(_upload_decoder, found, "uploads")
