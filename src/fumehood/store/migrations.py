"""Schema of the SQLite store, as numbered migrations.

A released migration never changes. A schema change takes two releases: the first adds the new and keeps the old, so
that the release before still works with the file; a later one removes the old.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

APPLICATION_ID = 0x46554D45  # "FUME", in the file header


class StoreOpenError(Exception):
    """The store cannot be opened. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step. `is_breaking`: the release before cannot use the file any more."""

    statements: str
    is_breaking: bool = False


MIGRATIONS: Sequence[Migration] = (
    Migration(
        is_breaking=True,
        statements="""
        -- The newest breaking migration.
        CREATE TABLE compatibility (since INTEGER NOT NULL);
        INSERT INTO compatibility VALUES (0);

        -- A thread of a conversation. It continues the thread `parent` after the items before `parent_end`.
        -- tip: the next free position; it never decreases, so no position is used twice.
        CREATE TABLE threads (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            tenant TEXT NOT NULL,
            parent INTEGER,
            parent_end INTEGER,
            depth INTEGER NOT NULL,
            tip INTEGER NOT NULL
        );
        CREATE INDEX threads_by_parent ON threads (parent, parent_end) WHERE parent IS NOT NULL;

        -- pos: counted from the beginning of the conversation, across all its threads.
        -- start: the first position of the same response.
        -- ours: whether the item is decoded as one of our own types.
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

        -- It refers to the items of its thread before `end_pos`, and added those from `start_pos` on.
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

        -- One for each running response; expires by julianday(), the clock that all processes share.
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
        -- Rows are never deleted, so that the number of all and of revoked keys is a revision.
        CREATE TABLE keys (
            id TEXT PRIMARY KEY,
            digest BLOB NOT NULL UNIQUE,
            created_at REAL NOT NULL,
            revoked_at REAL,
            record BLOB NOT NULL
        );

        -- Idempotency keys and their responses; they expire by julianday().
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
        # The release before would delete the blobs of uploads as unreferenced.
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

        -- Names the database to its directory of blobs.
        CREATE TABLE identity (id TEXT NOT NULL);
        INSERT INTO identity VALUES (lower(hex(randomblob(16))));
        """,
    ),
    Migration(
        # The release before would not write the tenant of items.
        is_breaking=True,
        statements="""
        ALTER TABLE items ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
        UPDATE items SET tenant = (SELECT tenant FROM threads WHERE threads.id = thread);
        DROP INDEX items_by_id;
        -- Items that a model made precede items that a client sent, whose turn is 0.
        CREATE INDEX items_by_id ON items (tenant, id, turn = 0) WHERE id IS NOT NULL;
        """,
    ),
    Migration(
        # The release before would list deleted containers.
        is_breaking=True,
        statements="""
        -- listed: not deleted. retained: bytes of files kept after the container has ended.
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
        -- Files and images of an input, as they were when its response began.
        ALTER TABLE items ADD COLUMN attachments BLOB;
        """
    ),
    Migration(
        # The release before would change rows without their checksums.
        is_breaking=True,
        statements="""
        -- See `row_integrity`; older rows have none.
        ALTER TABLE responses ADD COLUMN checksum INTEGER;
        ALTER TABLE items ADD COLUMN checksum INTEGER;
        """,
    ),
    Migration(
        # The release before would look for leases.
        is_breaking=True,
        statements="""
        -- Leases are in the memory of the only process that runs responses.
        CREATE TABLE running_responses (id TEXT PRIMARY KEY) WITHOUT ROWID;
        INSERT INTO running_responses SELECT response FROM leases;
        DROP TABLE leases;
        """,
    ),
)


def is_up_to_date(connection: sqlite3.Connection) -> bool:
    """Whether no migration is missing. Raises StoreOpenError as `check_version`."""
    return check_version(connection, len(MIGRATIONS)) >= len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Apply the missing migrations in one transaction. Raises StoreOpenError as `check_version`."""
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
    """Return the number of applied migrations. Raises StoreOpenError if this release cannot use the file."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreOpenError("it is a database of another program. Configure another file.")
    if version > known:
        (since,) = connection.execute("SELECT since FROM compatibility").fetchone()
        if since > known:
            raise StoreOpenError(
                f"it was written by a newer release (its tables are at step {version}, this release knows {known}). "
                f"Start the newer release, or restore a backup from before the update."
            )
    return version


def _split_statements(script: str) -> list[str]:
    """Split a script; `executescript` would end the transaction."""
    statements: list[str] = []
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            statements.append(statement)
            statement = ""
    return statements
