"""Responses, threads and items in the SQLite store. Functions run inside the caller's transaction.

A response refers to a prefix of a thread: the items before its `end_pos`, and those of the threads that this thread
continues. A response that continues the tip of a thread appends to it; one that continues an earlier position forks a
new thread. Items are deleted with the last response that refers to them.
"""

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import msgspec

from fumehood.interfaces import IdempotencyClaim
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.items import AuthoredItem, OutputItem
from fumehood.protocol.openai.responses import RUN_LOST_ERROR, Response
from fumehood.store.conversation_cache import ThreadPosition
from fumehood.store.row_integrity import DamagedRow, compute_checksum, decode, encode, verify_checksum

MAX_FORK_DEPTH = 8
"""Every fork adds a step to each read; a deeper one copies its prefix instead."""

MAX_READ_BYTES = 256 << 20
"""Of one read; conversations that can be continued are smaller."""

response_decoder = msgspec.json.Decoder(Response)
exchange_decoder = msgspec.json.Decoder(ToolExchange)
attachment_decoder = msgspec.json.Decoder(tuple[Attachment, ...])
_authored_decoder: msgspec.json.Decoder[AuthoredItem] = msgspec.json.Decoder(AuthoredItem)
_ITEM_COLUMNS = "tenant, thread, pos, start, turn, ours, type, id, raw, exchange, attachments, checksum"


class ResponseRow(NamedTuple):
    """A response without its output, which is in the items."""

    id: str
    tenant: str
    created_at: int
    previous_id: str | None
    body: bytes


class CompletedResponseRecord(NamedTuple):
    """A finished response with its entries.

    passthrough_items: indices of output items that are stored as the bytes in which they came.
    """

    row: ResponseRow
    entries: Sequence[ConversationEntry]
    passthrough_items: Collection[int]


class ThreadPrefixRef(NamedTuple):
    """The conversation before a position: items of the thread and of the threads that it continues."""

    thread: int | None
    end: int


class StoredTurn(NamedTuple):
    """The entries that one response added, and their position."""

    position: ThreadPosition
    entries: Sequence[ConversationEntry]


def make_response_row(tenant: str, response: Response) -> ResponseRow:
    body = encode(msgspec.structs.replace(response, output=[]))
    return ResponseRow(response.id, tenant, response.created_at, response.previous_response_id, body)


def make_completed_response(
    tenant: str, response: Response, entries: Sequence[ConversationEntry]
) -> CompletedResponseRecord:
    passthrough = [index for index, item in enumerate(response.output) if isinstance(item, msgspec.Raw)]
    return CompletedResponseRecord(make_response_row(tenant, response), tuple(entries), passthrough)


# --- running responses ----------------------------------------------------------------------------------


def insert_running(db: sqlite3.Connection, row: ResponseRow) -> None:
    """Insert a response that runs. From now on it protects what it continues from deletion."""
    prefix = _find_prefix(db, row)
    _insert_response(db, row, prefix.thread, prefix.end, prefix.end)
    db.execute("INSERT INTO running_responses (id) VALUES (?)", (row.id,))


def is_running(db: sqlite3.Connection, response_id: str) -> bool:
    found = db.execute("SELECT 1 FROM running_responses WHERE id = ?", (response_id,))
    return found.fetchone() is not None


def fail_orphaned(db: sqlite3.Connection, leased: Collection[str]) -> int:
    """Fail the running responses that nobody holds a lease of, and return their number."""
    running = db.execute("SELECT id FROM running_responses").fetchall()
    orphaned = [response_id for (response_id,) in running if response_id not in leased]
    for response_id in orphaned:
        (body,) = db.execute("SELECT body FROM responses WHERE id = ?", (response_id,)).fetchone()
        with suppress(DamagedRow):  # logged, and reported to its readers
            response = decode(response_decoder, body, "responses", response_id)
            response.status, response.error = "failed", RUN_LOST_ERROR
            _update_body(db, response_id, encode(response))
        _delete_running(db, response_id)
    return len(orphaned)


def _delete_running(db: sqlite3.Connection, response_id: str) -> None:
    db.execute("DELETE FROM running_responses WHERE id = ?", (response_id,))


# --- completion ---------------------------------------------------------------------------------------


def complete_running(db: sqlite3.Connection, completed: CompletedResponseRecord) -> ThreadPosition | None:
    """Complete a response that `insert_running` has written; return the position of its items, if it has any."""
    row, entries = completed.row, completed.entries
    thread, start = db.execute("SELECT thread, start_pos FROM responses WHERE id = ?", (row.id,)).fetchone()
    position = _append_items(db, completed, ThreadPrefixRef(thread, start))
    db.execute(
        "UPDATE responses SET thread = ?, end_pos = ? WHERE id = ?",
        (position.thread if position else thread, start + len(entries), row.id),
    )
    _update_body(db, row.id, row.body)
    _delete_running(db, row.id)
    return position


def insert_completed(db: sqlite3.Connection, completed: CompletedResponseRecord) -> ThreadPosition | None:
    """As `complete_running`, for a response whose beginning was never written."""
    prefix = _find_prefix(db, completed.row)
    position = _append_items(db, completed, prefix)
    thread = position.thread if position else prefix.thread
    _insert_response(db, completed.row, thread, prefix.end, prefix.end + len(completed.entries))
    return position


def _insert_response(
    db: sqlite3.Connection, row: ResponseRow, thread: int | None, start: int, end: int
) -> None:
    db.execute(
        "INSERT INTO responses (id, tenant, created_at, thread, start_pos, end_pos, body, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (row.id, row.tenant, row.created_at, thread, start, end, row.body, compute_checksum(row.body)),
    )


def _update_body(db: sqlite3.Connection, response_id: str, body: bytes) -> None:
    db.execute(
        "UPDATE responses SET body = ?, checksum = ? WHERE id = ?",
        (body, compute_checksum(body), response_id),
    )


def _find_prefix(db: sqlite3.Connection, row: ResponseRow) -> ThreadPrefixRef:
    """Return the conversation up to the previous response; empty if the tenant has no such response."""
    if row.previous_id is None:
        return ThreadPrefixRef(None, 0)
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND id NOT IN (SELECT id FROM running_responses)",
        (row.previous_id, row.tenant),
    ).fetchone()
    return ThreadPrefixRef(*found) if found else ThreadPrefixRef(None, 0)


def _append_items(
    db: sqlite3.Connection, completed: CompletedResponseRecord, prefix: ThreadPrefixRef
) -> ThreadPosition | None:
    if not completed.entries:
        return None
    tip = prefix.end + len(completed.entries)
    position = ThreadPosition(_extend_or_fork_thread(db, completed.row.tenant, prefix, tip), prefix.end)
    db.executemany(
        f"INSERT INTO items ({_ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        _make_item_rows(position, completed),
    )
    return position


def _make_item_rows(position: ThreadPosition, completed: CompletedResponseRecord) -> list[tuple[object, ...]]:
    output_index = 0
    rows: list[tuple[object, ...]] = []
    for pos, entry in enumerate(completed.entries, position.start):
        ours = entry.turn > 0 and output_index not in completed.passthrough_items
        output_index += entry.turn > 0
        exchange = encode(entry.exchange) if entry.exchange is not None else None
        attachments = encode(entry.attachments) if entry.attachments else None
        checksum = compute_checksum(entry.raw, exchange, attachments)
        item = (entry.turn, ours, entry.type, entry.id, entry.raw, exchange, attachments, checksum)
        rows.append((completed.row.tenant, position.thread, pos, position.start, *item))
    return rows


# --- threads and forks --------------------------------------------------------------------------------


def _extend_or_fork_thread(db: sqlite3.Connection, tenant: str, prefix: ThreadPrefixRef, tip: int) -> int:
    """Reserve the positions from the end of the prefix up to the new tip, and return their thread."""
    if prefix.thread is None:
        return _insert_thread(db, tenant, ThreadPrefixRef(None, 0), 0, tip)
    moved = db.execute(
        "UPDATE threads SET tip = ? WHERE id = ? AND tip = ?", (tip, prefix.thread, prefix.end)
    )
    if moved.rowcount:
        return prefix.thread
    (depth,) = db.execute("SELECT depth FROM threads WHERE id = ?", (prefix.thread,)).fetchone()
    if depth < MAX_FORK_DEPTH:
        return _insert_thread(db, tenant, prefix, depth + 1, tip)
    copy = _insert_thread(db, tenant, ThreadPrefixRef(None, 0), 0, tip)
    for ancestor in _list_ancestors(db, prefix):
        db.execute(
            f"INSERT INTO items ({_ITEM_COLUMNS}) SELECT {_ITEM_COLUMNS.replace('thread', '?')} FROM items"  # noqa: S608
            " WHERE thread = ? AND pos < ?",
            (copy, *ancestor),
        )
    return copy


def _list_ancestors(db: sqlite3.Connection, prefix: ThreadPrefixRef) -> list[tuple[int, int]]:
    """Return the threads of a prefix, each with its end, oldest first. Raises DamagedRow."""
    path: list[tuple[int, int]] = []
    thread, end = prefix
    while thread is not None:
        path.append((thread, end))
        found = db.execute("SELECT parent, parent_end FROM threads WHERE id = ?", (thread,)).fetchone()
        if found is None or (found[0] is not None and found[0] >= thread):  # a parent is always older
            raise DamagedRow("threads", str(thread), "its parent is missing")
        thread, end = found
    return path[::-1]


def _insert_thread(db: sqlite3.Connection, tenant: str, prefix: ThreadPrefixRef, depth: int, tip: int) -> int:
    parent_end = prefix.end if prefix.thread is not None else None
    made = db.execute(
        "INSERT INTO threads (tenant, parent, parent_end, depth, tip) VALUES (?, ?, ?, ?, ?)",
        (tenant, prefix.thread, parent_end, depth, tip),
    )
    return made.lastrowid or 0


def delete(db: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    found = db.execute(
        "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING thread", (response_id, tenant)
    ).fetchall()
    if not found:
        return False
    _delete_running(db, response_id)
    _delete_unreachable_items(db, found[0][0])
    return True


def _delete_unreachable_items(db: sqlite3.Connection, thread: int | None) -> None:
    """Delete items that no response refers to: the end of this thread, or all of it and then of its parent."""
    while thread is not None:
        (end,) = db.execute(
            "SELECT max(stop) FROM (SELECT max(end_pos) AS stop FROM responses WHERE thread = :thread"
            " UNION ALL SELECT max(parent_end) FROM threads WHERE parent = :thread)",
            {"thread": thread},
        ).fetchone()
        db.execute("DELETE FROM items WHERE thread = ? AND pos >= ?", (thread, end or 0))
        if end is not None:
            return
        ((thread,),) = db.execute("DELETE FROM threads WHERE id = ? RETURNING parent", (thread,)).fetchall()


# --- reading ------------------------------------------------------------------------------------------


class _StoredItem(NamedTuple):
    """An entry and where it is stored."""

    position: ThreadPosition
    pos: int
    entry: ConversationEntry


class _ReadBudget:
    """The bytes that one read may still load. `param` names the parameter to blame."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._remaining = MAX_READ_BYTES

    def spend(self, *columns: bytes | None) -> None:
        """Raises InvalidRequest if the budget is exceeded."""
        self._remaining -= sum([len(column or b"") for column in columns])
        if self._remaining < 0:
            raise InvalidRequest(
                f"The items have more than {MAX_READ_BYTES:,} bytes, which is the limit of one read."
                " Refer to fewer items, or start a new conversation.",
                param=self._param,
            )


def _iter_items(db: sqlite3.Connection, prefix: ThreadPrefixRef) -> Iterator[_StoredItem]:
    """Yield the items of a prefix, oldest first. Raises InvalidRequest above `MAX_READ_BYTES`, DamagedRow."""
    budget = _ReadBudget("previous_response_id")
    for thread, end in _list_ancestors(db, prefix):
        for start, pos, *entry in db.execute(
            "SELECT start, pos, turn, type, id, raw, exchange, attachments, checksum FROM items"
            " WHERE thread = ? AND pos < ? ORDER BY pos",
            (thread, end),
        ):
            budget.spend(*entry[3:6])
            yield _StoredItem(ThreadPosition(thread, start), pos, _decode_item(f"{thread}/{pos}", *entry))


def _decode_item(
    row: str,
    turn: int,
    kind: str,
    item_id: str | None,
    raw: bytes,
    exchange: bytes | None,
    attachments: bytes | None,
    expected: int | None,
) -> ConversationEntry:
    """Raises DamagedRow."""
    verify_checksum("items", row, expected, raw, exchange, attachments)
    return ConversationEntry(
        type=kind,
        id=item_id,
        turn=turn,
        raw=raw,
        exchange=None if exchange is None else decode(exchange_decoder, exchange, "items", row),
        attachments=() if attachments is None else decode(attachment_decoder, attachments, "items", row),
    )


def _decode_output_item(ours: int, raw: bytes, row: str) -> OutputItem:
    """Decode an output item; an item of another release stays raw. Raises DamagedRow."""
    try:
        return _authored_decoder.decode(raw) if ours else msgspec.Raw(raw)
    except msgspec.ValidationError:
        return msgspec.Raw(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedRow("items", row, str(error)) from error


def get_response(db: sqlite3.Connection, tenant: str, response_id: str) -> Response | None:
    """Raises DamagedRow."""
    found = db.execute(
        "SELECT body, checksum, thread, start_pos, end_pos FROM responses WHERE id = ? AND tenant = ?",
        (response_id, tenant),
    ).fetchone()
    if found is None:
        return None
    body, expected, *position = found
    verify_checksum("responses", response_id, expected, body)
    response = decode(response_decoder, body, "responses", response_id)
    items = db.execute(
        "SELECT pos, ours, raw, exchange, attachments, checksum FROM items"
        " WHERE thread = ? AND pos >= ? AND pos < ? AND turn > 0 ORDER BY pos",
        position,
    )
    response.output = []
    for pos, ours, raw, exchange, attachments, total in items:
        row = f"{position[0]}/{pos}"
        verify_checksum("items", row, total, raw, exchange, attachments)
        response.output.append(_decode_output_item(ours, raw, row))
    return response


def list_turns(db: sqlite3.Connection, tenant: str, response_id: str) -> list[StoredTurn] | None:
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND id NOT IN (SELECT id FROM running_responses)",
        (response_id, tenant),
    ).fetchone()
    if found is None:
        return None
    turns = groupby(_iter_items(db, ThreadPrefixRef(*found)), lambda item: item.position)
    return [StoredTurn(position, [item.entry for item in items]) for position, items in turns]


def list_input_items(db: sqlite3.Connection, tenant: str, response_id: str) -> list[ConversationEntry] | None:
    found = db.execute(
        "SELECT thread, end_pos, start_pos FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
    ).fetchone()
    if found is None:
        return None
    thread, end, start = found
    return [
        item.entry
        for item in _iter_items(db, ThreadPrefixRef(thread, end))
        if item.pos < start or item.entry.turn == 0
    ]


_SELECT_BY_ID = """
    SELECT turn, type, id, raw, exchange, attachments, checksum FROM items
    WHERE tenant = ? AND id = ? ORDER BY turn = 0, thread, pos LIMIT 1
"""


def find_items(
    db: sqlite3.Connection, tenant: str, item_ids: Collection[str]
) -> dict[str, ConversationEntry]:
    """Return items by id; one that a model made precedes one that a client sent. Raises InvalidRequest."""
    budget = _ReadBudget("input")
    found: dict[str, ConversationEntry] = {}
    for item_id in item_ids:
        row = db.execute(_SELECT_BY_ID, (tenant, item_id)).fetchone()
        if row is not None:
            budget.spend(*row[3:6])
            found[item_id] = _decode_item(item_id, *row)
    return found


# --- blobs --------------------------------------------------------------------------------------------


def find_unreferenced_blobs(db: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    used = (
        "SELECT 1 WHERE EXISTS (SELECT 1 FROM files WHERE blob = :name)"
        " OR EXISTS (SELECT 1 FROM uploads WHERE blob = :name)"
    )
    return [name for name in names if db.execute(used, {"name": name}).fetchone() is None]


def get_database_id(db: sqlite3.Connection) -> str:
    (found,) = db.execute("SELECT id FROM identity").fetchone()
    return found


# --- idempotency keys -------------------------------------------------------------------------------------------


def claim_idempotency_key(
    db: sqlite3.Connection, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
) -> IdempotencyClaim | None:
    db.execute("DELETE FROM claims WHERE expires <= julianday('now')")
    found = get_idempotency_claim(db, tenant, key)
    if found is None:
        db.execute(
            "INSERT INTO claims (tenant, key, digest, response, expires) VALUES (?, ?, ?, ?, julianday('now', ?))",
            (tenant, key, claim.digest, claim.response_id, f"{seconds} seconds"),
        )
    return found


def get_idempotency_claim(db: sqlite3.Connection, tenant: str, key: str) -> IdempotencyClaim | None:
    found = db.execute(
        "SELECT digest, response FROM claims WHERE tenant = ? AND key = ? AND expires > julianday('now')",
        (tenant, key),
    ).fetchone()
    return None if found is None else IdempotencyClaim(*found)


def release_idempotency_key(db: sqlite3.Connection, tenant: str, key: str, response_id: str) -> None:
    db.execute("DELETE FROM claims WHERE tenant = ? AND key = ? AND response = ?", (tenant, key, response_id))
