"""What the SQLite store reads and writes, inside a transaction of its caller; imports msgspec, `protocol`, siblings.

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
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import Entry, ToolExchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.items import AuthoredItem, OutputItem
from fumehood.protocol.keys import ApiKey
from fumehood.protocol.responses import INTERRUPTED, Response
from fumehood.store.cached import Place
from fumehood.store.database import leave_event_loop
from fumehood.store.integrity import DamagedRow, check, checksum, decode

# A fork of a fork of …: every level is a step of each read, so a deeper one gets a copy of what it stands on.
DEEPEST_FORK = 8

# Bytes that one read brings into memory; conversations that may go on are smaller.
LARGEST_READ = 256 << 20

_responses = msgspec.json.Decoder(Response)
_exchanges = msgspec.json.Decoder(ToolExchange)
_attachments = msgspec.json.Decoder(tuple[Attachment, ...])
_authored: msgspec.json.Decoder[AuthoredItem] = msgspec.json.Decoder(AuthoredItem)
_COLUMNS = "tenant, thread, pos, start, turn, ours, type, id, raw, exchange, attachments, checksum"
_keys = msgspec.json.Decoder(ApiKey)
_encode = msgspec.json.Encoder().encode


class Head(NamedTuple):
    """A response as its row holds it: all of it but its output."""

    id: str
    tenant: str
    created_at: int
    previous: str | None
    body: bytes


class Ending(NamedTuple):
    """How a response ended.

    foreign: the numbers of those output items that stay the bytes they came as.
    weight: about how many bytes all of it is.
    """

    head: Head
    entries: Sequence[Entry]
    foreign: Collection[int]
    weight: int


class Base(NamedTuple):
    """What a response stands on: the items of a thread before a position, and those before them."""

    thread: int | None
    end: int


class Turn(NamedTuple):
    """What one response added, and where."""

    place: Place
    entries: Sequence[Entry]


def head_of(tenant: str, response: Response) -> Head:
    body = _encode(msgspec.structs.replace(response, output=[]))
    return Head(response.id, tenant, response.created_at, response.previous_response_id, body)


def ending_of(tenant: str, response: Response, entries: Sequence[Entry]) -> Ending:
    foreign = [number for number, item in enumerate(response.output) if isinstance(item, msgspec.Raw)]
    head = head_of(tenant, response)
    return Ending(head, tuple(entries), foreign, len(head.body) + sum(entry.weight for entry in entries))


# --- leases -------------------------------------------------------------------------------------------


def begin(db: sqlite3.Connection, head: Head, owner: str, epoch: int, seconds: float) -> None:
    """From now on it stands on what it continues, so that this is not removed under it."""
    base = _base(db, head)
    _insert(db, head, base.thread, base.end, base.end)
    db.execute(
        "INSERT INTO leases (response, owner, epoch, expires) VALUES (?, ?, ?, julianday('now', ?))",
        (head.id, owner, epoch, f"{seconds} seconds"),
    )


def epoch(db: sqlite3.Connection, tenant: str, response_id: str) -> int | None:
    """None unless it runs."""
    found = db.execute(
        "SELECT epoch FROM leases JOIN responses ON id = response WHERE response = ? AND tenant = ?",
        (response_id, tenant),
    ).fetchone()
    return found[0] if found else None


def renew(db: sqlite3.Connection, response_id: str, epoch: int, seconds: float) -> bool:
    renewed = db.execute(
        "UPDATE leases SET expires = julianday('now', ?) WHERE response = ? AND epoch = ?",
        (f"{seconds} seconds", response_id, epoch),
    )
    return renewed.rowcount > 0


def recover(db: sqlite3.Connection, only_owner: str | None) -> list[str]:
    """Fail what runs under an expired lease, or under that of anybody but the only owner; their ids."""
    lost: list[tuple[str, bytes]] = db.execute(
        "SELECT id, body FROM leases JOIN responses ON id = response"
        " WHERE expires <= julianday('now') OR owner <> coalesce(?, owner)",
        (only_owner,),
    ).fetchall()
    for response_id, body in lost:
        with suppress(DamagedRow):  # it is logged, and whoever reads it is told
            response = decode(_responses, body, "responses", response_id)
            response.status, response.error = "failed", INTERRUPTED
            _set_body(db, response_id, _encode(response))
        db.execute("DELETE FROM leases WHERE response = ?", (response_id,))
    return [response_id for response_id, _ in lost]


# --- responses that end -------------------------------------------------------------------------------


def end_begun(db: sqlite3.Connection, ending: Ending) -> Place | None:
    """The end of a response that `begin` has written; where its items are, if it has any."""
    head, entries = ending.head, ending.entries
    thread, start = db.execute("SELECT thread, start_pos FROM responses WHERE id = ?", (head.id,)).fetchone()
    place = _append(db, ending, Base(thread, start))
    db.execute(
        "UPDATE responses SET thread = ?, end_pos = ? WHERE id = ?",
        (place.thread if place else thread, start + len(entries), head.id),
    )
    _set_body(db, head.id, head.body)
    db.execute("DELETE FROM leases WHERE response = ?", (head.id,))
    return place


def end_at_once(db: sqlite3.Connection, ending: Ending) -> Place | None:
    """As `end_begun`, for a response whose beginning was never written."""
    base = _base(db, ending.head)
    place = _append(db, ending, base)
    thread = place.thread if place else base.thread
    _insert(db, ending.head, thread, base.end, base.end + len(ending.entries))
    return place


def _insert(db: sqlite3.Connection, head: Head, thread: int | None, start: int, end: int) -> None:
    db.execute(
        "INSERT INTO responses (id, tenant, created_at, thread, start_pos, end_pos, body, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (head.id, head.tenant, head.created_at, thread, start, end, head.body, checksum(head.body)),
    )


def _set_body(db: sqlite3.Connection, response_id: str, body: bytes) -> None:
    db.execute(
        "UPDATE responses SET body = ?, checksum = ? WHERE id = ?", (body, checksum(body), response_id)
    )


def _base(db: sqlite3.Connection, head: Head) -> Base:
    """The end of the previous response; nothing, if that is gone or was never there for this tenant."""
    if head.previous is None:
        return Base(None, 0)
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE response = id)",
        (head.previous, head.tenant),
    ).fetchone()
    return Base(*found) if found else Base(None, 0)


def _append(db: sqlite3.Connection, ending: Ending, base: Base) -> Place | None:
    if not ending.entries:
        return None
    place = Place(_thread(db, ending.head.tenant, base, base.end + len(ending.entries)), base.end)
    db.executemany(
        f"INSERT INTO items ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        _item_rows(place, ending),
    )
    return place


def _item_rows(place: Place, ending: Ending) -> list[tuple[object, ...]]:
    made = 0
    rows: list[tuple[object, ...]] = []
    for pos, entry in enumerate(ending.entries, place.start):
        ours = entry.turn > 0 and made not in ending.foreign
        made += entry.turn > 0
        seen = _encode(entry.exchange) if entry.exchange is not None else None
        files = _encode(entry.attachments) if entry.attachments else None
        total = checksum(entry.raw, seen, files)
        item = (entry.turn, ours, entry.type, entry.id, entry.raw, seen, files, total)
        rows.append((ending.head.tenant, place.thread, pos, place.start, *item))
    return rows


# --- threads and forks --------------------------------------------------------------------------------


def _thread(db: sqlite3.Connection, tenant: str, base: Base, tip: int) -> int:
    """The thread to write to, from the end of the base up to the new tip, which is then ours."""
    if base.thread is None:
        return _new_thread(db, tenant, Base(None, 0), 0, tip)
    moved = db.execute("UPDATE threads SET tip = ? WHERE id = ? AND tip = ?", (tip, base.thread, base.end))
    if moved.rowcount:
        return base.thread
    (depth,) = db.execute("SELECT depth FROM threads WHERE id = ?", (base.thread,)).fetchone()
    if depth < DEEPEST_FORK:
        return _new_thread(db, tenant, base, depth + 1, tip)
    leave_event_loop()
    copy = _new_thread(db, tenant, Base(None, 0), 0, tip)
    for part in _path(db, base):
        db.execute(
            f"INSERT INTO items ({_COLUMNS}) SELECT {_COLUMNS.replace('thread', '?')} FROM items"  # noqa: S608
            " WHERE thread = ? AND pos < ?",
            (copy, *part),
        )
    return copy


def _path(db: sqlite3.Connection, base: Base) -> list[tuple[int, int]]:
    """The threads of which it consists, each with its end, oldest first."""
    path: list[tuple[int, int]] = []
    thread, end = base
    while thread is not None:
        path.append((thread, end))
        found = db.execute("SELECT parent, parent_end FROM threads WHERE id = ?", (thread,)).fetchone()
        if found is None or (found[0] is not None and found[0] >= thread):  # a parent is always older
            raise DamagedRow("threads", str(thread), "what it continues is not there")
        thread, end = found
    return path[::-1]


def _new_thread(db: sqlite3.Connection, tenant: str, base: Base, depth: int, tip: int) -> int:
    parent_end = base.end if base.thread is not None else None
    made = db.execute(
        "INSERT INTO threads (tenant, parent, parent_end, depth, tip) VALUES (?, ?, ?, ?, ?)",
        (tenant, base.thread, parent_end, depth, tip),
    )
    return made.lastrowid or 0


def delete(db: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    found = db.execute(
        "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING thread", (response_id, tenant)
    ).fetchall()
    if not found:
        return False
    db.execute("DELETE FROM leases WHERE response = ?", (response_id,))
    _release(db, found[0][0])
    return True


def _release(db: sqlite3.Connection, thread: int | None) -> None:
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


class _Kept(NamedTuple):
    """An item where it stands."""

    place: Place
    pos: int
    entry: Entry


class _Budget:
    """What one read may still bring into memory."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._left = LARGEST_READ

    def spend(self, *columns: bytes | None) -> None:
        """Raises InvalidRequest."""
        self._left -= sum([len(column or b"") for column in columns])
        if self._left < 0:
            raise InvalidRequest(
                f"The items that are asked for are more than {LARGEST_READ:,} bytes, which cannot be read at once."
                f" Refer to less, or begin a new conversation.",
                param=self._param,
            )


def _kept(db: sqlite3.Connection, base: Base) -> Iterator[_Kept]:
    """All that stands there, oldest first; raises InvalidRequest beyond the largest read."""
    budget = _Budget("previous_response_id")
    for thread, end in _path(db, base):
        for start, pos, *entry in db.execute(
            "SELECT start, pos, turn, type, id, raw, exchange, attachments, checksum FROM items"
            " WHERE thread = ? AND pos < ? ORDER BY pos",
            (thread, end),
        ):
            budget.spend(*entry[3:6])
            yield _Kept(Place(thread, start), pos, _entry(f"{thread}/{pos}", *entry))


def _entry(
    row: str,
    turn: int,
    kind: str,
    item_id: str | None,
    raw: bytes,
    exchange: bytes | None,
    attachments: bytes | None,
    expected: int | None,
) -> Entry:
    """Raises DamagedRow."""
    check("items", row, expected, raw, exchange, attachments)
    seen = decode(_exchanges, exchange, "items", row) if exchange is not None else None
    files = decode(_attachments, attachments, "items", row) if attachments is not None else ()
    return Entry(type=kind, id=item_id, turn=turn, raw=raw, exchange=seen, attachments=files)


def _item(ours: int, raw: bytes, row: str) -> OutputItem:
    """One that another release wrote and this one cannot read stays what it is. Raises DamagedRow."""
    try:
        return _authored.decode(raw) if ours else msgspec.Raw(raw)
    except msgspec.ValidationError:
        return msgspec.Raw(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedRow("items", row, str(error)) from error


def response(db: sqlite3.Connection, tenant: str, response_id: str) -> Response | None:
    """Raises DamagedRow."""
    found = db.execute(
        "SELECT body, checksum, thread, start_pos, end_pos FROM responses WHERE id = ? AND tenant = ?",
        (response_id, tenant),
    ).fetchone()
    if found is None:
        return None
    body, expected, *place = found
    check("responses", response_id, expected, body)
    whole = decode(_responses, body, "responses", response_id)
    items = db.execute(
        "SELECT pos, ours, raw, exchange, attachments, checksum FROM items"
        " WHERE thread = ? AND pos >= ? AND pos < ? AND turn > 0 ORDER BY pos",
        place,
    )
    whole.output = []
    for pos, ours, raw, exchange, attachments, total in items:
        row = f"{place[0]}/{pos}"
        check("items", row, total, raw, exchange, attachments)
        whole.output.append(_item(ours, raw, row))
    return whole


def conversation(db: sqlite3.Connection, tenant: str, response_id: str) -> list[Turn] | None:
    found = db.execute(
        "SELECT thread, end_pos FROM responses WHERE id = ? AND tenant = ?"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE response = id)",
        (response_id, tenant),
    ).fetchone()
    if found is None:
        return None
    kept = groupby(_kept(db, Base(*found)), lambda one: one.place)
    return [Turn(place, [one.entry for one in turn]) for place, turn in kept]


def input_entries(db: sqlite3.Connection, tenant: str, response_id: str) -> list[Entry] | None:
    found = db.execute(
        "SELECT thread, end_pos, start_pos FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
    ).fetchone()
    if found is None:
        return None
    thread, end, start = found
    return [one.entry for one in _kept(db, Base(thread, end)) if one.pos < start or one.entry.turn == 0]


_BY_ID = """
    SELECT turn, type, id, raw, exchange, attachments, checksum FROM items
    WHERE tenant = ? AND id = ? ORDER BY turn = 0, thread, pos LIMIT 1
"""


def entries(db: sqlite3.Connection, tenant: str, item_ids: Collection[str]) -> dict[str, Entry]:
    """What a model made comes before what a client gave back under the same id; raises InvalidRequest."""
    budget = _Budget("input")
    found: dict[str, Entry] = {}
    for item_id in item_ids:
        row = db.execute(_BY_ID, (tenant, item_id)).fetchone()
        if row is not None:
            budget.spend(*row[3:6])
            found[item_id] = _entry(item_id, *row)
    return found


# --- blobs --------------------------------------------------------------------------------------------


def unused_blobs(db: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    used = (
        "SELECT 1 WHERE EXISTS (SELECT 1 FROM files WHERE blob = :name)"
        " OR EXISTS (SELECT 1 FROM uploads WHERE blob = :name)"
    )
    return [name for name in names if db.execute(used, {"name": name}).fetchone() is None]


def identity(db: sqlite3.Connection) -> str:
    (found,) = db.execute("SELECT id FROM identity").fetchone()
    return found


# --- claims -------------------------------------------------------------------------------------------


def claim(
    db: sqlite3.Connection, tenant: str, key: str, wanted: IdempotencyClaim, seconds: float
) -> IdempotencyClaim | None:
    db.execute("DELETE FROM claims WHERE expires <= julianday('now')")
    found = claimed(db, tenant, key)
    if found is None:
        db.execute(
            "INSERT INTO claims (tenant, key, digest, response, expires) VALUES (?, ?, ?, ?, julianday('now', ?))",
            (tenant, key, wanted.digest, wanted.response_id, f"{seconds} seconds"),
        )
    return found


def claimed(db: sqlite3.Connection, tenant: str, key: str) -> IdempotencyClaim | None:
    found = db.execute(
        "SELECT digest, response FROM claims WHERE tenant = ? AND key = ? AND expires > julianday('now')",
        (tenant, key),
    ).fetchone()
    return None if found is None else IdempotencyClaim(*found)


def release(db: sqlite3.Connection, tenant: str, key: str, response_id: str) -> None:
    db.execute("DELETE FROM claims WHERE tenant = ? AND key = ? AND response = ?", (tenant, key, response_id))


# --- keys ---------------------------------------------------------------------------------------------


def put_key(db: sqlite3.Connection, key: ApiKey) -> None:
    db.execute(
        "INSERT INTO keys (id, digest, created_at, revoked_at, record) VALUES (?, ?, ?, ?, ?)",
        (key.id, key.digest, key.created_at, key.revoked_at, _encode(key)),
    )


def revoke_key(db: sqlite3.Connection, key_id: str, now: float) -> bool:
    found = db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, key_id))
    return found.rowcount > 0


def keys(db: sqlite3.Connection) -> list[ApiKey]:
    found = db.execute("SELECT id, record, revoked_at FROM keys ORDER BY created_at, id")
    keys: list[ApiKey] = []
    for key_id, record, revoked in found:
        with suppress(DamagedRow):  # it is logged, and must not keep the others from being revoked
            keys.append(msgspec.structs.replace(decode(_keys, record, "keys", key_id), revoked_at=revoked))
    return keys


def keys_revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT count(*) + count(revoked_at) FROM keys").fetchone()
    return revision
