"""API keys in the SQLite store. Functions run inside the caller's transaction."""

import sqlite3
from contextlib import suppress

import msgspec

from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.store.row_integrity import DamagedRow, decode, encode

_api_key_decoder = msgspec.json.Decoder(ApiKeyRecord)


def insert(db: sqlite3.Connection, key: ApiKeyRecord) -> None:
    db.execute(
        "INSERT INTO keys (id, digest, created_at, revoked_at, record) VALUES (?, ?, ?, ?, ?)",
        (key.id, key.digest, key.created_at, key.revoked_at, encode(key)),
    )


def revoke(db: sqlite3.Connection, key_id: str, now: float) -> bool:
    found = db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, key_id))
    return found.rowcount > 0


def list_all(db: sqlite3.Connection) -> list[ApiKeyRecord]:
    found = db.execute("SELECT id, record, revoked_at FROM keys ORDER BY created_at, id")
    keys: list[ApiKeyRecord] = []
    for key_id, record, revoked in found:
        with suppress(DamagedRow):  # logged; the other keys stay usable
            keys.append(
                msgspec.structs.replace(decode(_api_key_decoder, record, "keys", key_id), revoked_at=revoked)
            )
    return keys


def get_revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT count(*) + count(revoked_at) FROM keys").fetchone()
    return revision
