"""An SQLite file with one writer thread and some reader threads.

A job is a function of a connection. All waiting writes become one transaction with one fsync (group commit). If it
fails, each job is retried alone, so that only the faulty one fails. Soon after a job that deletes, the write-ahead log
is checkpointed and truncated, so that no deleted content stays in it.
"""

import asyncio
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from fumehood.gateway_stats import StoreStats
from fumehood.protocol.openai.api_errors import StorageCorrupted, StorageUnavailable
from fumehood.store.migrations import StoreOpenError, is_up_to_date, migrate
from fumehood.store.temporary_blob_files import fsync_path

logger = logging.getLogger(__name__)

_READER_THREADS = 2
_MAX_GROUP_JOBS = 256
_BUSY_SECONDS = 10.0
_WRITER_CACHE_KIB = 8 << 10
_READER_CACHE_KIB = 2 << 10  # each; the kernel caches the file as well
_MAX_IDLE_WAL_BYTES = 64 << 20
_MIN_FREE_BYTES = 1 << 20  # on the disk, to begin a response
_RETRY_SECONDS = 5.0
_CHECKPOINT_DELAY = 0.5  # after a deletion; several share one
_MAX_CHECKPOINT_DELAY = 30.0
_CHECKPOINT_SHARE = 20  # checkpoints use at most 1/20 of the writer's time

type Work[T] = Callable[[sqlite3.Connection], T]


class DatabaseJob[T]:
    """A function to run in a transaction, and the future of its result.

    waiter: the future, if anybody waits.
    on_done: called with the result on the event loop, before the waiter and also without one.
    deletes: whether it deletes content that must not stay in the write-ahead log.
    subject: what it reads or writes, for the log.
    is_applied: whether later jobs see its changes; only they may read it.
    error: why it failed, if it did.
    """

    __slots__ = (
        "_on_done",
        "_result",
        "_waiter",
        "_work",
        "deletes",
        "error",
        "is_applied",
        "subject",
    )
    _result: T

    def __init__(
        self,
        work: Work[T],
        waiter: asyncio.Future[T] | None = None,
        on_done: Callable[[T], None] | None = None,
        *,
        deletes: bool = False,
        subject: str = "",
    ) -> None:
        self.deletes = deletes
        self.subject = subject
        self._work = work
        self._waiter = waiter
        self._on_done = on_done
        self.error: BaseException | None = None
        self.is_applied = False

    def run(self, connection: sqlite3.Connection) -> None:
        self._result = self._work(connection)
        self.is_applied = True

    @property
    def is_database_error(self) -> bool:
        """Whether it failed because of the database."""
        return isinstance(self.error, sqlite3.OperationalError)

    def deliver(self) -> None:
        """Call `on_done` and resolve the waiter. Runs on the event loop."""
        if self.error is None and self._on_done is not None:
            try:
                self._on_done(self._result)
            except Exception:  # a bug: the job is committed, and others wait behind it
                logger.exception("Callback of a database job failed (%s).", self.subject)
        if self._waiter is None or self._waiter.done():
            return
        if self.error is None:
            self._waiter.set_result(self._result)
        else:
            self._waiter.set_exception(_translate_error(self.error, self.subject))


def _translate_error(error: BaseException, subject: str) -> BaseException:
    """Return a database error as callers get it; other errors are bugs and stay as they are."""
    if not isinstance(error, sqlite3.DatabaseError):
        return error
    if _is_corruption(error):
        logger.error(
            "storage_corrupted", extra={"fields": {"row": subject or "unknown", "reason": repr(error)}}
        )
        translated: Exception = StorageCorrupted(
            f"The gateway's database is damaged{subject and f' ({subject})'}. Its operator can run "
            "`fumehood doctor --data`."
        )
    elif isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
        translated = StorageUnavailable(
            f"The gateway's database cannot be used now: {error}. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
    else:
        return error
    translated.__cause__ = error
    return translated


def _is_corruption(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is damaged, so that a retry is useless."""
    code = getattr(error, "sqlite_errorcode", None)  # errors of the Python module have none
    if code is None:
        return "decode to UTF-8" in str(error)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _run_jobs(connection: sqlite3.Connection, begin: str, jobs: Sequence[DatabaseJob[object]]) -> None:
    """Run all jobs in one transaction; if that fails, each in its own."""
    try:
        connection.execute(begin)
        for job in jobs:
            job.run(connection)
        connection.execute("COMMIT")
    except Exception as error:
        for job in jobs:
            job.is_applied = False
        with suppress(sqlite3.Error):
            connection.rollback()
        if len(jobs) == 1:
            jobs[0].error = error
            return
        for job in jobs:
            _run_jobs(connection, begin, [job])


class _WriterThread:
    """The only connection that writes. While it waits for the disk, jobs gather for the next transaction.

    is_failing: whether the last transaction failed.
    """

    def __init__(
        self, connection: sqlite3.Connection, loop: asyncio.AbstractEventLoop, stats: StoreStats
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._stats = stats
        self._jobs = SimpleQueue[DatabaseJob[object] | None]()
        self._checkpoint_at = math.inf  # monotonic time of the next checkpoint; used by the thread alone
        self._checkpoint_delay = _CHECKPOINT_DELAY
        self.is_failing = False
        self._thread = threading.Thread(target=self._process_jobs, name="store-writer", daemon=True)
        self._thread.start()

    def post(self, job: DatabaseJob[object]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Stop the thread after all jobs."""
        self._jobs.put(None)

    def join(self) -> None:
        self._thread.join()

    def _finish_group(self, jobs: Sequence[DatabaseJob[object]], seconds: float) -> None:
        self._stats.batch_sizes.observe(len(jobs))
        self._stats.write_seconds.observe(seconds)
        self.is_failing = any(job.is_database_error for job in jobs)
        for job in jobs:
            job.deliver()

    # ---- on the thread ----------------------------------------------------------------------------------------

    def _process_jobs(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._take_group()
            if jobs:
                self._run_group(jobs)
            if time.monotonic() >= self._checkpoint_at:
                self._checkpoint()
        self._connection.close()

    def _take_group(self) -> tuple[list[DatabaseJob[object]], bool]:
        """Wait for jobs, or until a checkpoint is due; return those that wait, and whether more may come."""
        jobs: list[DatabaseJob[object]] = []
        seconds = max(0.0, self._checkpoint_at - time.monotonic())
        with suppress(Empty):
            job = self._jobs.get(timeout=None if seconds == math.inf else seconds)
            while job is not None:
                jobs.append(job)
                if len(jobs) == _MAX_GROUP_JOBS:
                    return jobs, True
                job = self._jobs.get_nowait()
            return jobs, False
        return jobs, True

    def _run_group(self, jobs: Sequence[DatabaseJob[object]]) -> None:
        started_at = time.monotonic()
        _run_jobs(self._connection, "BEGIN IMMEDIATE", jobs)
        ended_at = time.monotonic()
        if any(job.deletes for job in jobs):
            self._checkpoint_at = min(self._checkpoint_at, ended_at + self._checkpoint_delay)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._finish_group, jobs, ended_at - started_at)

    def _checkpoint(self) -> None:
        started_at = time.monotonic()
        emptied = truncate_wal(self._connection)
        ended_at = time.monotonic()
        if emptied:
            self._checkpoint_delay = max(_CHECKPOINT_DELAY, (ended_at - started_at) * _CHECKPOINT_SHARE)
            self._checkpoint_at = math.inf
        else:  # a reader is active, or the disk is full
            self._checkpoint_delay = min(self._checkpoint_delay * 2, _MAX_CHECKPOINT_DELAY)
            self._checkpoint_at = ended_at + self._checkpoint_delay


def truncate_wal(connection: sqlite3.Connection) -> bool:
    """Checkpoint and truncate the write-ahead log; False if a reader is active or the disk is full."""
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        logger.warning("Could not truncate the write-ahead log: %s", error)
        return False
    return not busy


class Database:
    """An open database. `write` and `read` return futures of what their jobs return."""

    def __init__(
        self,
        writer: sqlite3.Connection,
        readers: Sequence[sqlite3.Connection],
        lock: int | None,
        stats: StoreStats | None = None,
        directory: Path | None = None,
    ) -> None:
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._reads = SimpleQueue[DatabaseJob[object] | None]()
        self._writer = _WriterThread(writer, self._loop, stats or StoreStats())
        self._readers = [
            threading.Thread(target=self._process_reads, args=(reader,), name="store-reader", daemon=True)
            for reader in readers
        ]
        for thread in self._readers:
            thread.start()
        self.is_closed = False

    @classmethod
    async def open(cls, path: Path, *, shared: bool = False, stats: StoreStats | None = None) -> "Database":
        """Open the file, and create it if it does not exist. Raises StoreOpenError.

        shared: do not lock out other processes, and do not migrate while another process holds the lock.
        """
        return cls(*await asyncio.to_thread(_open_connections, path, shared), stats, path.parent)

    def write[T](
        self,
        work: Work[T],
        on_done: Callable[[T], None] | None = None,
        *,
        deletes: bool = False,
        subject: str = "",
    ) -> asyncio.Future[T]:
        """Queue a write. Arguments as of `DatabaseJob`."""
        waiter: asyncio.Future[T] = self._loop.create_future()
        self.post(DatabaseJob(work, waiter, on_done, deletes=deletes, subject=subject))
        return waiter

    def post[T](self, job: DatabaseJob[T]) -> None:
        """Queue a write. Raises StorageUnavailable if the database is closed."""
        self.check_open()
        self._writer.post(job)  # pyright: ignore[reportArgumentType]

    def read[T](
        self, work: Work[T], on_done: Callable[[T], None] | None = None, *, subject: str = ""
    ) -> asyncio.Future[T]:
        """Queue a read. Arguments as of `DatabaseJob`."""
        self.check_open()
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._reads.put(DatabaseJob(work, waiter, on_done, subject=subject))  # pyright: ignore[reportArgumentType]
        return waiter

    def _process_reads(self, connection: sqlite3.Connection) -> None:
        """Run reads one after another, on a reader thread."""
        while (job := self._reads.get()) is not None:
            _run_jobs(connection, "BEGIN", [job])
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(job.deliver)
        connection.close()

    async def check_writable(self) -> None:
        """Raises StorageUnavailable if the disk is full, or the last write failed and a small one still does."""
        self.check_open()
        if self._directory is not None and _free_bytes(self._directory) < _MIN_FREE_BYTES:
            raise StorageUnavailable(
                "The gateway's disk is full. Try again later.",
                retry_after=_RETRY_SECONDS,
            )
        if self._writer.is_failing:
            await self.write(_write_nothing)

    async def close(self) -> None:
        """Finish queued jobs and close the file."""
        if self.is_closed:
            return
        self.is_closed = True
        for _ in self._readers:
            self._reads.put(None)
        for reader in self._readers:
            await asyncio.to_thread(reader.join)
        # The last connection to close checkpoints the log; of two that close at once, neither would.
        self._writer.close()
        await asyncio.to_thread(self._writer.join)
        if self._lock is not None:
            os.close(self._lock)

    def check_open(self) -> None:
        """Raises StorageUnavailable if it is closed."""
        if self.is_closed:
            raise StorageUnavailable("The gateway's database is closed.")


def _write_nothing(db: sqlite3.Connection) -> None:
    db.execute("UPDATE identity SET id = id")


def _free_bytes(directory: Path) -> float:
    try:
        disk = os.statvfs(directory)
    except OSError:  # the write will report it
        return math.inf
    return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize


# --- opening ------------------------------------------------------------------------------------------


def _open_connections(
    path: Path, shared: bool
) -> tuple[sqlite3.Connection, Sequence[sqlite3.Connection], int | None]:
    try:
        with ExitStack() as stack:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = None if shared else _lock_database(path)
            if lock is not None:
                stack.callback(os.close, lock)
            _make_private(path)
            writer = _connect(path, _WRITER_CACHE_KIB, stack)
            writer.execute("PRAGMA journal_mode = WAL")
            if shared:
                _migrate_if_unlocked(path, writer)
            else:
                migrate(writer)
                truncate_wal(writer)  # a killed process may have left deleted content in it
            readers = [_connect(path, _READER_CACHE_KIB, stack) for _ in range(_READER_THREADS)]
            for reader in readers:
                reader.execute("PRAGMA query_only = ON")
            stack.pop_all()
            return writer, readers, lock
    except (OSError, sqlite3.Error, StoreOpenError) as error:
        raise StoreOpenError(f"The database {path} cannot be opened: {error}") from error


def _migrate_if_unlocked(path: Path, connection: sqlite3.Connection) -> None:
    """Migrate, but not while a gateway, perhaps of another release, uses the file."""
    if is_up_to_date(connection):
        return
    lock = _lock_database(
        path,
        "a gateway of another release is using it (process {holder}). Stop it, or use its release.",
    )
    try:
        migrate(connection)
    finally:
        os.close(lock)


_IN_USE = "another gateway is using it (process {holder}). Stop it, or configure another file."


def _lock_database(path: Path, refusal: str = _IN_USE) -> int:
    """Take a lock that the kernel releases when this process ends. Raises StoreOpenError."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StoreOpenError(refusal.format(holder=holder)) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _make_private(path: Path) -> None:
    """Create the file with mode 0600, which SQLite uses for its other files too, and sync its directory."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
    fsync_path(str(path.parent))


def _connect(path: Path, cache_kib: int, stack: ExitStack) -> sqlite3.Connection:
    """Connect; the stack closes the connection if opening fails."""
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    stack.callback(connection.close)
    for setting in (
        "synchronous = FULL",
        "secure_delete = ON",  # overwrite deleted content
        "trusted_schema = OFF",
        f"cache_size = -{cache_kib}",
        f"journal_size_limit = {_MAX_IDLE_WAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {setting}")
    return connection
