"""Examines a database and its blobs without changing them, for `fumehood doctor --data`."""

import fcntl
import hashlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.store import response_rows, table_checks
from fumehood.store.disk_blob_store import blob_path
from fumehood.store.migrations import MIGRATIONS, StoreOpenError, check_version

type DatabaseFindingState = Literal["ok", "warning", "damaged"]

_MAX_NAMED = 20  # damaged rows or blobs to name
_RESTORE_ADVICE = "Stop the gateway and restore a backup (docs/storage.md), or delete the objects named."


class DatabaseNotFound(Exception):
    """There is no database to examine."""


@dataclass(frozen=True, slots=True)
class DatabaseFinding:
    """Result of one check. `damaged`: data is lost or wrong. `warning`: the next start of the gateway repairs it."""

    name: str
    state: DatabaseFindingState
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    database: str
    blobs: str
    sound: bool
    findings: list[DatabaseFinding]


def find_database(data: Path) -> Path:
    """Return the database of a data directory, or the path itself if it is a file. Raises DatabaseNotFound."""
    if data.is_file():
        return data
    usual = data / "fumehood.db"
    if usual.is_file():
        return usual
    found = sorted(data.glob("*.db")) if data.is_dir() else []
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found)
    raise DatabaseNotFound(
        f"{data} has several databases ({names}): name one of them."
        if found
        else f"There is no database in {data}: neither fumehood.db nor another file that ends in .db."
    )


def examine_database(database: Path, blobs: Path) -> DatabaseReport:
    """Run all checks. A gateway may use the database meanwhile. Raises DatabaseNotFound."""
    if not database.is_file():
        raise DatabaseNotFound(f"There is no database {database}.")
    findings = [_check_lock(database), _check_permissions(database)]
    try:
        with closing(_open_read_only(database)) as connection:
            findings += _check_contents(connection, blobs)
    except sqlite3.Error as error:
        findings.append(
            DatabaseFinding("database", "damaged", f"it cannot be read: {error}", _RESTORE_ADVICE)
        )
    sound = all(finding.state != "damaged" for finding in findings)
    return DatabaseReport(str(database), str(blobs), sound, findings)


def _open_read_only(database: Path) -> sqlite3.Connection:
    address = f"{database.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=10, isolation_level=None)


def _check_lock(database: Path) -> DatabaseFinding:
    """Report whether a gateway has the file open."""
    try:
        lock = os.open(database.with_name(database.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return DatabaseFinding("gateway", "ok", "none is using it")
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        return DatabaseFinding(
            "gateway",
            "ok",
            f"one is using it (process {holder}); its changes during the check may be missed",
        )
    finally:
        os.close(lock)
    return DatabaseFinding("gateway", "ok", "none is using it")


def _check_permissions(database: Path) -> DatabaseFinding:
    files = (database.with_name(database.name + suffix) for suffix in ("", "-wal", "-shm", ".keys"))
    exposed = [path.name for path in files if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    if exposed:
        return DatabaseFinding(
            "permissions",
            "warning",
            f"other users may read or write {', '.join(exposed)}",
            "Set their mode to 0600.",
        )
    return DatabaseFinding("permissions", "ok", "only the owner may read and write the files")


def _check_contents(connection: sqlite3.Connection, blobs: Path) -> Iterator[DatabaseFinding]:
    try:
        version = check_version(connection)
    except StoreOpenError as error:
        yield DatabaseFinding("schema", "damaged", str(error))
        return
    known = len(MIGRATIONS)
    yield (
        DatabaseFinding("schema", "ok", f"migration {version} of {known}")
        if version >= known
        else DatabaseFinding(
            "schema", "warning", f"migration {version} of {known}; the next start applies the rest"
        )
    )
    yield _check_pages(connection)
    for table, read in table_checks.CHECKS_BY_TABLE.items():
        yield _check_rows(connection, table, read)
    yield from _check_blobs(connection, blobs)


def _check_pages(connection: sqlite3.Connection) -> DatabaseFinding:
    try:
        messages = [line for (line,) in connection.execute(f"PRAGMA integrity_check({_MAX_NAMED})")]
    except sqlite3.Error as error:
        messages = [str(error)]
    if messages == ["ok"]:
        return DatabaseFinding("pages", "ok", "SQLite finds every page and index in order")
    return DatabaseFinding("pages", "damaged", _replace_unprintable("; ".join(messages)), _RESTORE_ADVICE)


def _check_rows(connection: sqlite3.Connection, table: str, read: table_checks.TableCheck) -> DatabaseFinding:
    number = 0
    damaged: list[str] = []
    try:
        for error in read(connection):
            number += 1
            if error is not None:
                damaged.append(f"{error.row} ({error.reason})")
    except sqlite3.Error as error:
        damaged.append(f"the rest cannot be read: {error}")
    if damaged:
        return DatabaseFinding(
            table, "damaged", f"{len(damaged)} of {number} rows: {_format_list(damaged)}", _RESTORE_ADVICE
        )
    return DatabaseFinding(table, "ok", f"{number} rows")


# --- blobs --------------------------------------------------------------------------------------------


def _check_blobs(connection: sqlite3.Connection, directory: Path) -> Iterator[DatabaseFinding]:
    try:
        referenced = table_checks.list_referenced_blobs(connection)
        (identity,) = connection.execute("SELECT id FROM identity").fetchone() or ("",)
    except sqlite3.Error as error:
        yield DatabaseFinding(
            "blobs", "damaged", f"the records that refer to them cannot be read: {error}", _RESTORE_ADVICE
        )
        return
    if not directory.is_dir():
        state: DatabaseFindingState = "damaged" if referenced else "ok"
        yield DatabaseFinding(
            "blobs", state, f"there is no directory {directory}; {len(referenced)} blobs are referenced"
        )
        return
    owner = directory / "owner"
    if owner.is_file() and owner.read_text(errors="replace").strip() != identity:
        yield DatabaseFinding(
            "blobs", "damaged", f"{directory} belongs to another database", "Name the right one with --blobs."
        )
        return
    damaged = [
        f"{name}: {reason}"
        for name, size in referenced.items()
        if (reason := _describe_damage(blob_path(directory, name), name, size))
        and _is_referenced(connection, name)
    ]
    if damaged:
        yield DatabaseFinding(
            "blobs",
            "damaged",
            f"{len(damaged)} of {len(referenced)}: {_format_list(damaged)}",
            _RESTORE_ADVICE,
        )
    else:
        yield DatabaseFinding("blobs", "ok", f"all {len(referenced)} referenced blobs are intact")
    yield _check_orphaned_blobs(connection, directory)


def _describe_damage(path: str | None, name: str, size: int) -> str:
    if path is None:
        return "invalid name"
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if size not in (found, -1):
                return f"it has {found} bytes, its record says {size}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "" if digest == name else "its content does not match its name"


def _is_referenced(connection: sqlite3.Connection, name: str) -> bool:
    """Whether a record still refers to it; a running gateway may have deleted it since."""
    return not response_rows.find_unreferenced_blobs(connection, [name])


def _check_orphaned_blobs(connection: sqlite3.Connection, directory: Path) -> DatabaseFinding:
    existing = [path.name for path in directory.glob("??/??/*") if path.is_file()]
    orphans = response_rows.find_unreferenced_blobs(connection, existing)
    incoming = len([*(directory / "incoming").glob("*")])
    if orphans or incoming:
        return DatabaseFinding(
            "orphans",
            "warning",
            f"{len(orphans)} unreferenced blobs, {incoming} incomplete ones",
            "The gateway deletes them at its start and every hour.",
        )
    return DatabaseFinding("orphans", "ok", "every blob is referenced")


def _format_list(names: list[str]) -> str:
    named = "; ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return _replace_unprintable(named) + (f"; and {rest} more" if rest > 0 else "")


def _replace_unprintable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
