"""What the SQLite store reads and writes, inside a transaction of its caller.

A response stands on a prefix of a thread: the items before its `end_pos`, and before them those of the threads that
this one continues. Whoever continues the tip of a thread appends to it; whoever comes too late begins a thread of his
own, a fork. Items go with the last response that stood on them.
"""

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import msgspec

from fumehood.interfaces import IdempotencyClaim
from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.items import AuthoredItem, OutputItem
from fumehood.protocol.openai.responses import RUN_LOST_ERROR, Response
from fumehood.store.conversation_cache import ThreadPosition
from fumehood.store.database import require_worker_thread
from fumehood.store.row_integrity import DamagedRow, compute_checksum, decode, verify_checksum

# A fork of a fork of …: every level is a step of each read, so a deeper one gets a copy of what it stands on.
MAX_FORK_DEPTH = 8

# Bytes that one read brings into memory; conversations that may go on are smaller.
MAX_READ_BYTES = 256 << 20

_response_decoder = msgspec.json.Decoder(Response)
_exchange_decoder = msgspec.json.Decoder(ToolExchange)
_attachment_decoder = msgspec.json.Decoder(tuple[Attachment, ...])
_authored_decoder: msgspec.json.Decoder[AuthoredItem] = msgspec.json.Decoder(AuthoredItem)
_ITEM_COLUMNS = "tenant, thread, pos, start, turn, ours, type, id, raw, exchange, attachments, checksum"
_api_key_decoder = msgspec.json.Decoder(ApiKeyRecord)
_encode = msgspec.json.Encoder().encode


class ResponseRow(NamedTuple):
    """A response as its row holds it: all of it but its output."""

    id: str
    tenant: str
    created_at: int
    previous_id: str | None
    body: bytes


class CompletedResponse(NamedTuple):
    """How a response ended.

    foreign: the numbers of those output items that stay the bytes they came as.
    weight: about how many bytes all of it is.
    """

    row: ResponseRow
    entries: Sequence[ConversationEntry]
    passthrough_items: Collection[int]
    memory_bytes: int


class ThreadPrefix(NamedTuple):
    """What a response stands on: the items of a thread before a position, and those before them."""

    thread: int | None
    end: int


class StoredTurn(NamedTuple):
    """What one response added, and where."""

    position: ThreadPosition
    entries: Sequence[ConversationEntry]


def make_response_row(tenant: str, response: Response) -> ResponseRow:
    body = _encode(msgspec.structs.replace(response, output=[]))
    return ResponseRow(response.id, tenant, response.created_at, response.previous_response_id, body)


def make_completed_response(
    tenant: str, response: Response, entries: Sequence[ConversationEntry]
) -> CompletedResponse:
    foreign = [number for number, item in enumerate(response.output) if isinstance(item, msgspec.Raw)]
    head = make_response_row(tenant, response)
    return CompletedResponse(
        head, tuple(entries), foreign, len(head.body) + sum(entry.memory_bytes for entry in entries)
    )


# --- leases -------------------------------------------------------------------------------------------


def insert_running(db: sqlite3.Connection, row: ResponseRow, owner: str, epoch: int, seconds: float) -> None:
    """From now on it stands on what it continues, so that this is not removed under it."""
    base = _find_prefix(db, row)
    _insert_response(db, row, base.thread, base.end, base.end)
    db.execute(
        "INSERT INTO leases (response, owner, epoch, expires) VALUES (?, ?, ?, julianday('now', ?))",
        (row.id, owner, epoch, f"{seconds} seconds"),
    )


def get_epoch(db: sqlite3.Connection, tenant: str, response_id: str) -> int | None:
    """None unless it runs."""
    found = db.execute(
        "SELECT epoch FROM leases JOIN responses ON id = response WHERE response = ? AND tenant = ?",
        (response_id, tenant),
    ).fetchone()
    return found[0] if found else None


def renew_lease(db: sqlite3.Connection, response_id: str, epoch: int, seconds: float) -> bool:
    renewed = db.execute(
        "UPDATE leases SET expires = julianday('now', ?) WHERE response = ? AND epoch = ?",
        (f"{seconds} seconds", response_id, epoch),
    )
    return renewed.rowcount > 0


def fail_orphaned(db: sqlite3.Connection, only_owner: str | None) -> list[str]:
    """Fail what runs under an expired lease, or under that of anybody but the only owner; their ids."""
    lost: list[tuple[str, bytes]] = db.execute(
        "SELECT id, body FROM leases JOIN responses ON id = response"
        " WHERE expires <= julianday('now') OR owner <> coalesce(?, owner)",
        (only_owner,),
    ).fetchall()
    for response_id, body in lost:
        with suppress(DamagedRow):  # it is logged, and whoever reads it is told
            response = decode(_response_decoder, body, "responses", response_id)
            response.status, response.error = "failed", RUN_LOST_ERROR
            _update_body(db, response_id, _encode(response))
        db.execute("DELETE FROM leases WHERE response = ?", (response_id,))
    return [response_id for response_id, _ in lost]


# --- responses that end -------------------------------------------------------------------------------


def complete_running(db: sqlite3.Connection, completed: CompletedResponse) -> ThreadPosition | None:
    """The end of a response that `begin` has written; where its items are, if it has any."""
    head, entries = completed.row, completed.entries
    thread, start = db.execute("SELECT thread, start_pos FROM responses WHERE id = ?", (head.id,)).fetchone()
    place = _append_items(db, completed, ThreadPrefix(thread, start))
    db.execute(
        "UPDATE responses SET thread = ?, end_pos = ? WHERE id = ?",
        (place.thread if place else thread, start + len(entries), head.id),
    )
    _update_body(db, head.id, head.body)
    db.execute("DELETE FROM leases WHERE response = ?", (head.id,))
    return place


def insert_completed(db: sqlite3.Connection, completed: CompletedResponse) -> ThreadPosition | None:
    """As `end_begun`, for a response whose beginning was never written."""
    base = _find_prefix(db, completed.row)
    place = _append_items(db, completed, base)
    thread = place.thread if place else base.thread
    _insert_response(db, completed.row, thread, base.end, base.end + len(completed.entries))
    return place


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


def _find_prefix(db: sqlite3.Connection, row: ResponseRow) -> ThreadPrefix:
    """The end of the previous response; nothing, if that is gone or was never there for this tenant."""
    if row.previous_id is None:
        return ThreadPrefix(None, 0)
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE response = id)",
        (row.previous_id, row.tenant),
    ).fetchone()
    return ThreadPrefix(*found) if found else ThreadPrefix(None, 0)


def _append_items(
    db: sqlite3.Connection, completed: CompletedResponse, prefix: ThreadPrefix
) -> ThreadPosition | None:
    if not completed.entries:
        return None
    place = ThreadPosition(
        _extend_or_fork_thread(db, completed.row.tenant, prefix, prefix.end + len(completed.entries)),
        prefix.end,
    )
    db.executemany(
        f"INSERT INTO items ({_ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        _make_item_rows(place, completed),
    )
    return place


def _make_item_rows(position: ThreadPosition, completed: CompletedResponse) -> list[tuple[object, ...]]:
    made = 0
    rows: list[tuple[object, ...]] = []
    for pos, entry in enumerate(completed.entries, position.start):
        ours = entry.turn > 0 and made not in completed.passthrough_items
        made += entry.turn > 0
        seen = _encode(entry.exchange) if entry.exchange is not None else None
        files = _encode(entry.attachments) if entry.attachments else None
        total = compute_checksum(entry.raw, seen, files)
        item = (entry.turn, ours, entry.type, entry.id, entry.raw, seen, files, total)
        rows.append((completed.row.tenant, position.thread, pos, position.start, *item))
    return rows


# --- threads and forks --------------------------------------------------------------------------------


def _extend_or_fork_thread(db: sqlite3.Connection, tenant: str, prefix: ThreadPrefix, tip: int) -> int:
    """The thread to write to, from the end of the base up to the new tip, which is then ours."""
    if prefix.thread is None:
        return _insert_thread(db, tenant, ThreadPrefix(None, 0), 0, tip)
    moved = db.execute(
        "UPDATE threads SET tip = ? WHERE id = ? AND tip = ?", (tip, prefix.thread, prefix.end)
    )
    if moved.rowcount:
        return prefix.thread
    (depth,) = db.execute("SELECT depth FROM threads WHERE id = ?", (prefix.thread,)).fetchone()
    if depth < MAX_FORK_DEPTH:
        return _insert_thread(db, tenant, prefix, depth + 1, tip)
    require_worker_thread()
    copy = _insert_thread(db, tenant, ThreadPrefix(None, 0), 0, tip)
    for part in _list_ancestors(db, prefix):
        db.execute(
            f"INSERT INTO items ({_ITEM_COLUMNS}) SELECT {_ITEM_COLUMNS.replace('thread', '?')} FROM items"  # noqa: S608
            " WHERE thread = ? AND pos < ?",
            (copy, *part),
        )
    return copy


def _list_ancestors(db: sqlite3.Connection, prefix: ThreadPrefix) -> list[tuple[int, int]]:
    """The threads of which it consists, each with its end, oldest first."""
    path: list[tuple[int, int]] = []
    thread, end = prefix
    while thread is not None:
        path.append((thread, end))
        found = db.execute("SELECT parent, parent_end FROM threads WHERE id = ?", (thread,)).fetchone()
        if found is None or (found[0] is not None and found[0] >= thread):  # a parent is always older
            raise DamagedRow("threads", str(thread), "what it continues is not there")
        thread, end = found
    return path[::-1]


def _insert_thread(db: sqlite3.Connection, tenant: str, prefix: ThreadPrefix, depth: int, tip: int) -> int:
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
    db.execute("DELETE FROM leases WHERE response = ?", (response_id,))
    _delete_unreachable_items(db, found[0][0])
    return True


def _delete_unreachable_items(db: sqlite3.Connection, thread: int | None) -> None:
    """Remove what nobody stands on any more: the end of this thread, or all of it and then of its parent."""
    while thread is not None:
        (kept,) = db.execute(
            "SELECT max(stop) FROM (SELECT max(end_pos) AS stop FROM responses WHERE thread = :thread"
            " UNION ALL SELECT max(parent_end) FROM threads WHERE parent = :thread)",
            {"thread": thread},
        ).fetchone()
        db.execute("DELETE FROM items WHERE thread = ? AND pos >= ?", (thread, kept or 0))
        if kept is not None:
            return
        ((thread,),) = db.execute("DELETE FROM threads WHERE id = ? RETURNING parent", (thread,)).fetchall()


# --- reading ------------------------------------------------------------------------------------------


class _StoredItem(NamedTuple):
    """An item where it stands."""

    position: ThreadPosition
    pos: int
    entry: ConversationEntry


class _ReadBudget:
    """What one read may still bring into memory."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._remaining = MAX_READ_BYTES

    def spend(self, *columns: bytes | None) -> None:
        """Raises InvalidRequest."""
        self._remaining -= sum([len(column or b"") for column in columns])
        if self._remaining < 0:
            raise InvalidRequest(
                f"The items that are asked for are more than {MAX_READ_BYTES:,} bytes, which cannot be read at once."
                f" Refer to less, or begin a new conversation.",
                param=self._param,
            )


def _iter_items(db: sqlite3.Connection, prefix: ThreadPrefix) -> Iterator[_StoredItem]:
    """All that stands there, oldest first; raises InvalidRequest beyond the largest read."""
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
    seen = decode(_exchange_decoder, exchange, "items", row) if exchange is not None else None
    files = decode(_attachment_decoder, attachments, "items", row) if attachments is not None else ()
    return ConversationEntry(type=kind, id=item_id, turn=turn, raw=raw, exchange=seen, attachments=files)


def _decode_output_item(ours: int, raw: bytes, row: str) -> OutputItem:
    """One that another release wrote and this one cannot read stays what it is. Raises DamagedRow."""
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
    body, expected, *place = found
    verify_checksum("responses", response_id, expected, body)
    whole = decode(_response_decoder, body, "responses", response_id)
    items = db.execute(
        "SELECT pos, ours, raw, exchange, attachments, checksum FROM items"
        " WHERE thread = ? AND pos >= ? AND pos < ? AND turn > 0 ORDER BY pos",
        place,
    )
    whole.output = []
    for pos, ours, raw, exchange, attachments, total in items:
        row = f"{place[0]}/{pos}"
        verify_checksum("items", row, total, raw, exchange, attachments)
        whole.output.append(_decode_output_item(ours, raw, row))
    return whole


def list_turns(db: sqlite3.Connection, tenant: str, response_id: str) -> list[StoredTurn] | None:
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE response = id)",
        (response_id, tenant),
    ).fetchone()
    if found is None:
        return None
    kept = groupby(_iter_items(db, ThreadPrefix(*found)), lambda one: one.position)
    return [StoredTurn(place, [one.entry for one in turn]) for place, turn in kept]


def list_input_items(db: sqlite3.Connection, tenant: str, response_id: str) -> list[ConversationEntry] | None:
    found = db.execute(
        "SELECT thread, end_pos, start_pos FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
    ).fetchone()
    if found is None:
        return None
    thread, end, start = found
    return [
        one.entry
        for one in _iter_items(db, ThreadPrefix(thread, end))
        if one.pos < start or one.entry.turn == 0
    ]


_SELECT_BY_ID = """
    SELECT turn, type, id, raw, exchange, attachments, checksum FROM items
    WHERE tenant = ? AND id = ? ORDER BY turn = 0, thread, pos LIMIT 1
"""


def find_items(
    db: sqlite3.Connection, tenant: str, item_ids: Collection[str]
) -> dict[str, ConversationEntry]:
    """What a model made comes before what a client gave back under the same id; raises InvalidRequest."""
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


# --- claims -------------------------------------------------------------------------------------------


def claim_idempotency_key(
    db: sqlite3.Connection, tenant: str, key: str, wanted: IdempotencyClaim, seconds: float
) -> IdempotencyClaim | None:
    db.execute("DELETE FROM claims WHERE expires <= julianday('now')")
    found = get_idempotency_claim(db, tenant, key)
    if found is None:
        db.execute(
            "INSERT INTO claims (tenant, key, digest, response, expires) VALUES (?, ?, ?, ?, julianday('now', ?))",
            (tenant, key, wanted.digest, wanted.response_id, f"{seconds} seconds"),
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


# --- keys ---------------------------------------------------------------------------------------------


def insert_api_key(db: sqlite3.Connection, key: ApiKeyRecord) -> None:
    db.execute(
        "INSERT INTO keys (id, digest, created_at, revoked_at, record) VALUES (?, ?, ?, ?, ?)",
        (key.id, key.digest, key.created_at, key.revoked_at, _encode(key)),
    )


def revoke_api_key(db: sqlite3.Connection, key_id: str, now: float) -> bool:
    found = db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, key_id))
    return found.rowcount > 0


def list_api_keys(db: sqlite3.Connection) -> list[ApiKeyRecord]:
    found = db.execute("SELECT id, record, revoked_at FROM keys ORDER BY created_at, id")
    keys: list[ApiKeyRecord] = []
    for key_id, record, revoked in found:
        with suppress(DamagedRow):  # it is logged, and must not keep the others from being revoked
            keys.append(
                msgspec.structs.replace(decode(_api_key_decoder, record, "keys", key_id), revoked_at=revoked)
            )
    return keys


def get_api_keys_revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT count(*) + count(revoked_at) FROM keys").fetchone()
    return revision
