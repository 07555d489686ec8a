"""Checks of every row of a database, table by table, for `fumehood doctor --data`."""

import sqlite3
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.store.response_rows import attachment_decoder, exchange_decoder, response_decoder
from fumehood.store.row_integrity import DamagedRow, decode, verify_checksum

type TableCheck = Callable[[sqlite3.Connection], Iterator[DamagedRow | None]]
"""Yields None for each good row, and the damage for each other."""


def _select_columns(db: sqlite3.Connection, table: str, *names: str) -> str:
    """Return a column list with NULL for columns that a file of an older release does not have."""
    existing = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    return ", ".join(name if name in existing else f"NULL AS {name}" for name in names)


def _catch_damage(read: Callable[[], object]) -> DamagedRow | None:
    try:
        read()
    except DamagedRow as error:
        return error
    return None


def _check_responses(db: sqlite3.Connection) -> Iterator[DamagedRow | None]:
    columns = _select_columns(db, "responses", "id", "body", "checksum", "thread", "start_pos", "end_pos")
    for name, body, total, thread, start, end in db.execute(f"SELECT {columns} FROM responses"):  # noqa: S608
        yield _catch_damage(partial(_check_response, name, body, total)) or _catch_damage(
            partial(_check_item_count, db, name, thread, start, end)
        )


def _check_response(name: str, body: bytes, total: int | None) -> None:
    verify_checksum("responses", name, total, body)
    decode(response_decoder, body, "responses", name)


def _check_item_count(db: sqlite3.Connection, name: str, thread: int | None, start: int, end: int) -> None:
    """Check that no item of the response is missing."""
    (found,) = db.execute(
        "SELECT count(*) FROM items WHERE thread IS ? AND pos >= ? AND pos < ?", (thread, start, end)
    ).fetchone()
    if found != end - start:
        raise DamagedRow("responses", name, f"it has {found} of {end - start} items")


def _check_items(db: sqlite3.Connection) -> Iterator[DamagedRow | None]:
    columns = _select_columns(db, "items", "thread", "pos", "raw", "exchange", "attachments", "checksum")
    for thread, pos, raw, exchange, attachments, total in db.execute(f"SELECT {columns} FROM items"):  # noqa: S608
        yield _catch_damage(partial(_check_item, f"{thread}/{pos}", raw, exchange, attachments, total))


def _check_item(
    row: str, raw: bytes, exchange: bytes | None, attachments: bytes | None, total: int | None
) -> None:
    verify_checksum("items", row, total, raw, exchange, attachments)
    verify_checksum("items", row, None, raw)  # JSON
    if exchange is not None:
        decode(exchange_decoder, exchange, "items", row)
    if attachments is not None:
        decode(attachment_decoder, attachments, "items", row)


def _check_threads(db: sqlite3.Connection) -> Iterator[DamagedRow | None]:
    for thread, parent, found in db.execute(
        "SELECT t.id, t.parent, p.id FROM threads t LEFT JOIN threads p ON p.id = t.parent"
    ):
        lost = parent is not None and (found is None or parent >= thread)
        yield DamagedRow("threads", str(thread), f"its parent {parent} is missing") if lost else None


def _check_records[T](table: str, record: type[T], db: sqlite3.Connection) -> Iterator[DamagedRow | None]:
    decoder = msgspec.json.Decoder(record)
    for name, content in db.execute(f"SELECT id, record FROM {table}"):  # noqa: S608
        yield _catch_damage(partial(decode, decoder, content, table, str(name)))


CHECKS_BY_TABLE: dict[str, TableCheck] = {
    "responses": _check_responses,
    "items": _check_items,
    "threads": _check_threads,
    "containers": partial(_check_records, "containers", ContainerRecord),
    "files": partial(_check_records, "files", ContainerFileRecord),
    "uploads": partial(_check_records, "uploads", UploadedFileRecord),
    "keys": partial(_check_records, "keys", ApiKeyRecord),
}


class _SizedRecord(msgspec.Struct):
    bytes: int


def list_referenced_blobs(db: sqlite3.Connection) -> dict[str, int]:
    """Return the blobs that records refer to, with the recorded sizes; -1 if the record is damaged."""
    decoder = msgspec.json.Decoder(_SizedRecord)
    found: dict[str, int] = {}
    for table in ("files", "uploads"):
        for blob, record in db.execute(f"SELECT blob, record FROM {table} WHERE blob <> ''"):  # noqa: S608
            try:
                found[str(blob)] = decoder.decode(record).bytes
            except (msgspec.MsgspecError, TypeError, ValueError):
                found.setdefault(str(blob), -1)
    return found
