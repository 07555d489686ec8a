"""The tables of the SQLite store, step by step.

A step is never changed once it was released. A change of the tables is made in two releases: one adds what is new and
leaves the old in place (the release before can still work with that), a later one takes the old away.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

APPLICATION_ID = 0x46554D45  # "FUME", in the header of the file


class StoreOpenError(Exception):
    """The store cannot be opened; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step; `breaks` if the release before cannot work with what it leaves."""

    statements: str
    is_breaking: bool = False


MIGRATIONS: Sequence[Migration] = (
    Migration(
        is_breaking=True,
        statements="""
        -- The newest step that older releases cannot work with.
        CREATE TABLE compatibility (since INTEGER NOT NULL);
        INSERT INTO compatibility VALUES (0);

        -- A line of a conversation. It continues another one, `parent`, after the items before `parent_end`.
        -- tip: the next free position; it never falls, so a position never means two things.
        CREATE TABLE threads (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            tenant TEXT NOT NULL,
            parent INTEGER,
            parent_end INTEGER,
            depth INTEGER NOT NULL,
            tip INTEGER NOT NULL
        );
        CREATE INDEX threads_by_parent ON threads (parent, parent_end) WHERE parent IS NOT NULL;

        -- Positions count from the beginning of the conversation, through all its threads.
        -- start: the first position of what the same response added.
        -- ours: whether the item is read as one of our own types.
        CREATE TABLE items (
            thread INTEGER NOT NULL,
            pos INTEGER NOT NULL,
            start INTEGER NOT NULL,
            turn INTEGER NOT NULL,
            ours INTEGER NOT NULL,
            type TEXT NOT NULL,
            id TEXT,
            raw BLOB NOT NULL,
            exchange BLOB,
            PRIMARY KEY (thread, pos)
        ) WITHOUT ROWID;
        CREATE INDEX items_by_id ON items (id) WHERE id IS NOT NULL;

        -- It stands on the items of its thread before `end_pos`, and added those from `start_pos` on.
        -- body: the response without its output, which is in the items.
        CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            thread INTEGER,
            start_pos INTEGER NOT NULL,
            end_pos INTEGER NOT NULL,
            body BLOB NOT NULL
        );
        CREATE INDEX responses_by_thread ON responses (thread, end_pos) WHERE thread IS NOT NULL;

        -- One for each response that runs; it expires by julianday(), the clock that all processes share.
        CREATE TABLE leases (
            response TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            epoch INTEGER NOT NULL,
            expires REAL NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE containers (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at REAL NOT NULL,
            running INTEGER NOT NULL,
            record BLOB NOT NULL
        );
        CREATE INDEX containers_by_tenant ON containers (tenant, created_at, id);
        CREATE INDEX containers_running ON containers (created_at, id) WHERE running;

        CREATE TABLE files (
            id TEXT PRIMARY KEY,
            container TEXT NOT NULL,
            created_at REAL NOT NULL,
            blob TEXT NOT NULL,
            record BLOB NOT NULL
        );
        CREATE INDEX files_by_container ON files (container, created_at, id);
        CREATE INDEX files_by_blob ON files (blob);
        """,
    ),
    Migration(
        """
        -- No row is ever deleted, so that the numbers of all and of revoked ones tell whether anything changed.
        CREATE TABLE keys (
            id TEXT PRIMARY KEY,
            digest BLOB NOT NULL UNIQUE,
            created_at REAL NOT NULL,
            revoked_at REAL,
            record BLOB NOT NULL
        );

        -- What requests with an Idempotency-Key have become; they expire by julianday().
        CREATE TABLE claims (
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            digest BLOB NOT NULL,
            response TEXT NOT NULL,
            expires REAL NOT NULL,
            PRIMARY KEY (tenant, key)
        ) WITHOUT ROWID;
        CREATE INDEX claims_by_expiry ON claims (expires);
        """
    ),
    Migration(
        # The release before would take the blobs of uploads for unused.
        is_breaking=True,
        statements="""
        CREATE TABLE uploads (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at REAL NOT NULL,
            purpose TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            expires_at REAL,
            blob TEXT NOT NULL,
            record BLOB NOT NULL
        );
        CREATE INDEX uploads_by_tenant ON uploads (tenant, created_at, id);
        CREATE INDEX uploads_by_purpose ON uploads (tenant, purpose, created_at, id);
        CREATE INDEX uploads_by_size ON uploads (tenant, bytes);
        CREATE INDEX uploads_by_expiry ON uploads (expires_at, id) WHERE expires_at IS NOT NULL;
        CREATE INDEX uploads_by_blob ON uploads (blob);

        -- By which a directory of blobs knows whose it is.
        CREATE TABLE identity (id TEXT NOT NULL);
        INSERT INTO identity VALUES (lower(hex(randomblob(16))));
        """,
    ),
    Migration(
        # The release before would not say whose items are.
        is_breaking=True,
        statements="""
        ALTER TABLE items ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
        UPDATE items SET tenant = (SELECT tenant FROM threads WHERE threads.id = thread);
        DROP INDEX items_by_id;
        -- Those that were made here come before those that a client gave, whose turn is 0.
        CREATE INDEX items_by_id ON items (tenant, id, turn = 0) WHERE id IS NOT NULL;
        """,
    ),
    Migration(
        # The release before would not know what is deleted.
        is_breaking=True,
        statements="""
        -- listed: not deleted. retained: bytes of files that outlive their container.
        ALTER TABLE containers ADD COLUMN listed INTEGER NOT NULL DEFAULT 1;
        ALTER TABLE containers ADD COLUMN name TEXT NOT NULL DEFAULT 'auto';
        ALTER TABLE containers ADD COLUMN ended_at REAL NOT NULL DEFAULT 0;
        ALTER TABLE containers ADD COLUMN retained INTEGER NOT NULL DEFAULT 0;
        CREATE INDEX containers_ended ON containers (ended_at) WHERE NOT running;
        CREATE INDEX containers_retaining ON containers (tenant, ended_at, id) WHERE retained > 0;
        """,
    ),
    Migration(
        """
        -- What the files and pictures of an input were when its response began.
        ALTER TABLE items ADD COLUMN attachments BLOB;
        """
    ),
    Migration(
        # The release before would change rows and leave their checksums as they were.
        is_breaking=True,
        statements="""
        -- Of what the row holds, see `integrity`; older rows have none.
        ALTER TABLE responses ADD COLUMN checksum INTEGER;
        ALTER TABLE items ADD COLUMN checksum INTEGER;
        """,
    ),
)


def is_up_to_date(connection: sqlite3.Connection) -> bool:
    """Whether no step is missing; raises StoreOpenError."""
    return check_version(connection, len(MIGRATIONS)) >= len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Take the steps that are missing, all of them or none; raises StoreOpenError."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = check_version(connection, len(migrations))
        for number, migration in enumerate(migrations[version:], version + 1):
            for statement in _split_statements(migration.statements):
                connection.execute(statement)
            if migration.is_breaking:
                connection.execute("UPDATE compatibility SET since = ?", (number,))
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def check_version(connection: sqlite3.Connection, known: int = len(MIGRATIONS)) -> int:
    """How many steps the file has seen; raises StoreOpenError if this release cannot work with it."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreOpenError("it is a database of another program. Give the store a file of its own.")
    if version > known:
        (since,) = connection.execute("SELECT since FROM compatibility").fetchone()
        if since > known:
            raise StoreOpenError(
                f"it was written by a newer release (its tables are at step {version}, this release knows {known}). "
                f"Start the newer release, or restore a backup from before the update."
            )
    return version


def _split_statements(script: str) -> list[str]:
    """One by one: executescript would end the transaction."""
    found: list[str] = []
    begun = ""
    for piece in script.split(";"):
        begun += piece + ";"
        if sqlite3.complete_statement(begun):
            found.append(begun)
            begun = ""
    return found
