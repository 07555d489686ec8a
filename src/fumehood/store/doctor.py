"""Examines a database and its blobs without changing them; imports the standard library, msgspec and siblings."""

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

from fumehood.store import row_checks, rows
from fumehood.store.blobs import blob_path
from fumehood.store.migrations import MIGRATIONS, StoreRefused, check_version

type State = Literal["ok", "warning", "damaged"]

_MOST_NAMED = 20  # of what is wrong, by name
_RESTORE = "Stop the gateway and restore a backup (docs/storage.md), or delete what is named."


class NoDatabase(Exception):
    """There is nothing to examine; says what was looked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`damaged` is for what is lost or wrong, `warning` for what a gateway will mend by itself."""

    name: str
    state: State
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    database: str
    blobs: str
    sound: bool
    findings: list[Finding]


def find_database(data: Path) -> Path:
    """The database of a data directory, or the path itself if it is a file; raises NoDatabase."""
    if data.is_file():
        return data
    usual = data / "fumehood.db"
    if usual.is_file():
        return usual
    found = sorted(data.glob("*.db")) if data.is_dir() else []
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found)
    raise NoDatabase(
        f"{data} has several databases ({names}): name one of them."
        if found
        else f"There is no database in {data}: neither fumehood.db nor another file that ends in .db."
    )


def examine(database: Path, blobs: Path) -> Report:
    """Everything that can be told without writing. A gateway may run meanwhile. Raises NoDatabase."""
    if not database.is_file():
        raise NoDatabase(f"There is no database {database}.")
    findings = [_lock(database), _permissions(database)]
    try:
        with closing(_open(database)) as connection:
            findings += _examine_open(connection, blobs)
    except sqlite3.Error as error:
        findings.append(Finding("database", "damaged", f"it cannot be read: {error}", _RESTORE))
    sound = all(finding.state != "damaged" for finding in findings)
    return Report(str(database), str(blobs), sound, findings)


def _open(database: Path) -> sqlite3.Connection:
    address = f"{database.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=10, isolation_level=None)


def _lock(database: Path) -> Finding:
    """Whether a gateway has the file open; only looked at."""
    try:
        lock = os.open(database.with_name(database.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Finding("gateway", "ok", "none is using it")
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        return Finding(
            "gateway",
            "ok",
            f"one is using it (process {holder}): what it changes meanwhile may be missed, and nothing is locked",
        )
    finally:
        os.close(lock)
    return Finding("gateway", "ok", "none is using it")


def _permissions(database: Path) -> Finding:
    beside = (database.with_name(database.name + suffix) for suffix in ("", "-wal", "-shm", ".keys"))
    open_ones = [path.name for path in beside if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    if open_ones:
        return Finding(
            "permissions",
            "warning",
            f"other users may read or write {', '.join(open_ones)}",
            "Give them mode 0600.",
        )
    return Finding("permissions", "ok", "only the owner may read and write the files")


def _examine_open(connection: sqlite3.Connection, blobs: Path) -> Iterator[Finding]:
    try:
        version = check_version(connection)
    except StoreRefused as error:
        yield Finding("schema", "damaged", str(error))
        return
    known = len(MIGRATIONS)
    yield (
        Finding("schema", "ok", f"its tables are at step {version} of {known}")
        if version >= known
        else Finding(
            "schema", "warning", f"its tables are at step {version} of {known}; the next start adds the rest"
        )
    )
    yield _integrity(connection)
    for table, read in row_checks.BY_TABLE.items():
        yield _rows(connection, table, read)
    yield from _blobs(connection, blobs)


def _integrity(connection: sqlite3.Connection) -> Finding:
    try:
        said = [line for (line,) in connection.execute(f"PRAGMA integrity_check({_MOST_NAMED})")]
    except sqlite3.Error as error:
        said = [str(error)]
    if said == ["ok"]:
        return Finding("pages", "ok", "SQLite finds every page and index in order")
    return Finding("pages", "damaged", _printable("; ".join(said)), _RESTORE)


def _rows(connection: sqlite3.Connection, table: str, read: row_checks.Check) -> Finding:
    number = 0
    wrong: list[str] = []
    try:
        for error in read(connection):
            number += 1
            if error is not None:
                wrong.append(f"{error.row} ({error.reason})")
    except sqlite3.Error as error:
        wrong.append(f"the rest cannot be read: {error}")
    if wrong:
        return Finding(table, "damaged", f"{len(wrong)} of {number} rows: {_listed(wrong)}", _RESTORE)
    return Finding(table, "ok", f"{number} rows")


# --- blobs --------------------------------------------------------------------------------------------


def _blobs(connection: sqlite3.Connection, directory: Path) -> Iterator[Finding]:
    try:
        referred = row_checks.referred_blobs(connection)
        (identity,) = connection.execute("SELECT id FROM identity").fetchone() or ("",)
    except sqlite3.Error as error:
        yield Finding("blobs", "damaged", f"what refers to them cannot be read: {error}", _RESTORE)
        return
    if not directory.is_dir():
        state: State = "damaged" if referred else "ok"
        yield Finding("blobs", state, f"there is no directory {directory}; {len(referred)} are referred to")
        return
    owner = directory / "owner"
    if owner.is_file() and owner.read_text(errors="replace").strip() != identity:
        yield Finding(
            "blobs", "damaged", f"{directory} belongs to another database", "Name the right one with --blobs."
        )
        return
    wrong = [
        f"{name}: {reason}"
        for name, size in referred.items()
        if (reason := _wrong_with(blob_path(directory, name), name, size)) and _is_referred(connection, name)
    ]
    if wrong:
        yield Finding("blobs", "damaged", f"{len(wrong)} of {len(referred)}: {_listed(wrong)}", _RESTORE)
    else:
        yield Finding("blobs", "ok", f"{len(referred)} are referred to, each there and whole")
    yield _leftovers(connection, directory)


def _wrong_with(path: str | None, name: str, size: int) -> str:
    if path is None:
        return "this is no name of a blob"
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if size not in (found, -1):
                return f"it has {found} bytes, and its record says {size}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "it is not there"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "" if digest == name else "its content is another one"


def _is_referred(connection: sqlite3.Connection, name: str) -> bool:
    """Still: a gateway that runs may have deleted it since."""
    return not rows.unused_blobs(connection, [name])


def _leftovers(connection: sqlite3.Connection, directory: Path) -> Finding:
    there = [path.name for path in directory.glob("??/??/*") if path.is_file()]
    orphans = rows.unused_blobs(connection, there)
    incoming = sum(1 for path in (directory / "incoming").glob("*") if path.is_file())
    if orphans or incoming:
        return Finding(
            "orphans",
            "warning",
            f"{len(orphans)} blobs that nothing refers to, {incoming} that are unfinished",
            "A gateway removes them when it starts, and every hour.",
        )
    return Finding("orphans", "ok", "every blob is referred to")


def _listed(names: list[str]) -> str:
    shown = "; ".join(names[:_MOST_NAMED])
    rest = len(names) - _MOST_NAMED
    return _printable(shown) + (f"; and {rest} more" if rest > 0 else "")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
