"""An SQLite file behind threads: one that writes in groups, some that read.

A job is a function of a connection. Whatever waits when the disk is free becomes one transaction with one sync of it.
If that fails, each job is tried alone, so that a bad one does not take its neighbours with it. Soon after a job that
deletes, the log is folded into the file and emptied, so that nothing of what was deleted stays there.
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from fumehood.metrics import StoreStats
from fumehood.protocol.openai.api_errors import ServiceUnavailable, StorageCorrupted, StorageUnavailable
from fumehood.store.migrations import StoreOpenError, is_up_to_date, migrate

logger = logging.getLogger(__name__)

_READER_THREADS = 2
_MAX_GROUP_JOBS = 256
_BUSY_SECONDS = 10.0
_BUSY_PAUSE = 0.01
_MAX_INLINE_BYTES = 256 << 10  # that one transaction may write on the event loop
_MAX_INLINE_STEPS = 20_000  # of SQLite's machine in one statement there: about a millisecond
UNKNOWN_SIZE = math.inf
_WRITER_CACHE_KIB = 8 << 10
_READER_CACHE_KIB = 2 << 10  # each; the kernel has the file in memory as well
_MAX_IDLE_WAL_BYTES = 64 << 20
_MIN_FREE_BYTES = 1 << 20  # bytes of the disk below which nothing is begun that has to be written
_RETRY_SECONDS = 5.0
_CHECKPOINT_DELAY = 0.5  # after a deletion, so that several share one
_MAX_CHECKPOINT_DELAY = 30.0
_CHECKPOINT_SHARE = 20  # it takes at most one part in so many of the writer's time

type Work[T] = Callable[[sqlite3.Connection], T]


class DatabaseJob[T]:
    """One piece of work, and who waits for it.

    size: about how many bytes it writes.
    deletes: whether it takes something away that must not stay in the log.
    about: what it reads or writes, for the log.
    applied: whether what it did is in the database, as the jobs after it see it; for them alone to look at.
    """

    __slots__ = (
        "_error",
        "_on_done",
        "_result",
        "_waiter",
        "_work",
        "deletes",
        "is_applied",
        "size",
        "subject",
    )
    _result: T

    def __init__(
        self,
        work: Work[T],
        waiter: asyncio.Future[T] | None = None,
        on_done: Callable[[T], None] | None = None,
        size: float = UNKNOWN_SIZE,
        *,
        deletes: bool = False,
        subject: str = "",
    ) -> None:
        self.size = size
        self.deletes = deletes
        self.subject = subject
        self._work = work
        self._waiter = waiter
        self._on_done = on_done
        self._error: BaseException | None = None
        self.is_applied = False

    def run(self, connection: sqlite3.Connection) -> None:
        self._result = self._work(connection)
        self.is_applied = True

    def mark_rolled_back(self) -> None:
        self.is_applied = False

    def fail(self, error: BaseException) -> None:
        self._error = error

    @property
    def is_database_error(self) -> bool:
        """Whether the database could not do it."""
        return isinstance(self._error, sqlite3.OperationalError)

    def deliver(self) -> None:
        """On the event loop: `on_done` hears of it first, also if nobody waits any more."""
        if self._error is None and self._on_done is not None:
            try:
                self._on_done(self._result)
            except Exception:  # a mistake of ours: what was done stays done, and others wait behind it
                logger.exception("what follows a job of the database failed")
        if self._waiter is None or self._waiter.done():
            return
        if self._error is None:
            self._waiter.set_result(self._result)
        else:
            self._waiter.set_exception(_translate_error(self._error, self.subject))


class _BlocksEventLoop(Exception):
    """Work on the event loop that belongs to the writer's thread."""


def require_worker_thread() -> None:
    """A job calls this before long work of which its size does not tell; on the event loop it raises, and the thread
    begins the job anew.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise _BlocksEventLoop


def _translate_error(error: BaseException, subject: str) -> BaseException:
    """The error as callers get it: what the database says is theirs, a mistake of ours stays what it is."""
    if not isinstance(error, sqlite3.DatabaseError):
        return error
    if _is_corruption(error):
        logger.error(
            "storage_corrupted", extra={"fields": {"row": subject or "unknown", "reason": repr(error)}}
        )
        told: Exception = StorageCorrupted(
            f"What is stored cannot be read{subject and f' ({subject})'}: the gateway's database is damaged. "
            "`fumehood doctor --data` tells its operator more."
        )
    elif isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
        told = StorageUnavailable(
            f"The gateway's database cannot be used now: {error}. Try again later.",
            retry_after=_RETRY_SECONDS,
        )
    else:
        return error
    told.__cause__ = error
    return told


def _is_corruption(error: sqlite3.DatabaseError) -> bool:
    """Whether the file itself is at fault, and trying again would be in vain."""
    code = getattr(error, "sqlite_errorcode", None)  # the module's own errors have none
    if code is None:
        return "decode to UTF-8" in str(error)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _run_jobs(
    connection: sqlite3.Connection, begin: Work[object], jobs: Sequence[DatabaseJob[object]]
) -> None:
    """All in one transaction, or each in its own."""
    try:
        _apply(connection, begin, jobs)
        _commit(connection, jobs)
    except Exception as error:
        if len(jobs) == 1:
            jobs[0].fail(error)
            return
        for job in jobs:
            _run_jobs(connection, begin, [job])


def _apply(connection: sqlite3.Connection, begin: Work[object], jobs: Sequence[DatabaseJob[object]]) -> None:
    try:
        begin(connection)
        for job in jobs:
            job.run(connection)
    except BaseException:
        _roll_back(connection, jobs)
        raise


def _commit(connection: sqlite3.Connection, jobs: Sequence[DatabaseJob[object]]) -> None:
    try:
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection, jobs)
        raise


def _roll_back(connection: sqlite3.Connection, jobs: Sequence[DatabaseJob[object]]) -> None:
    for job in jobs:
        job.mark_rolled_back()
    with suppress(sqlite3.Error):
        connection.rollback()


def _begin_reading(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")


def _begin_writing(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_writing_with_retry(connection: sqlite3.Connection) -> None:
    """Another process may be writing, if only to repair something."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return _begin_writing(connection)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(_BUSY_PAUSE)


class _ReaderThread:
    """A thread that reads, one job after another."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        jobs: "SimpleQueue[DatabaseJob[object] | None]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connection = connection
        self._jobs = jobs
        self._loop = loop
        self._thread = threading.Thread(target=self._process_jobs, name="store-reader", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _process_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run_jobs(self._connection, _begin_reading, [job])
            with suppress(RuntimeError):  # the loop ended without closing us
                self._loop.call_soon_threadsafe(job.deliver)
        self._connection.close()


class _WriterThread:
    """The one connection that writes. While a thread waits for the disk, jobs gather for the next transaction.

    Small jobs are done on the event loop: in memory that takes less than handing them over, and the thread has only to
    commit. What is not small, or turns out not to be, or fails, is the thread's.

    failing: whether the last transaction was refused.
    """

    def __init__(
        self, connection: sqlite3.Connection, loop: asyncio.AbstractEventLoop, stats: StoreStats
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._stats = stats
        self._started_at = 0.0
        self._waiting: list[DatabaseJob[object]] = []
        self._busy = False
        self._closing = False
        self.is_failing = False
        self._checkpoint_timer: asyncio.TimerHandle | None = None
        self._checkpoint_due = False
        self._checkpoint_delay = _CHECKPOINT_DELAY
        self._groups = SimpleQueue[tuple[list[DatabaseJob[object]], bool] | float | None]()
        here = threading.get_ident()
        connection.execute("PRAGMA busy_timeout = 0")  # nobody waits for a lock on the event loop
        connection.set_progress_handler(lambda: threading.get_ident() == here, _MAX_INLINE_STEPS)
        self._thread = threading.Thread(target=self._process_groups, name="store-writer", daemon=True)
        self._thread.start()

    def post(self, job: DatabaseJob[object]) -> None:
        self._waiting.append(job)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._start_group)  # and not at once: there may be more

    def close(self) -> None:
        """The thread ends when everything is done."""
        self._closing = True
        if self._checkpoint_timer is not None:
            self._checkpoint_timer.cancel()
        if not self._busy:
            self._groups.put(None)

    def join(self) -> None:
        self._thread.join()

    def _start_group(self) -> None:
        self._started_at = time.monotonic()
        if self._checkpoint_due:
            self._checkpoint_due = False
            self._groups.put(self._started_at)
            return
        jobs, self._waiting = self._waiting[:_MAX_GROUP_JOBS], self._waiting[_MAX_GROUP_JOBS:]
        self._stats.batch_sizes.observe(len(jobs))
        self._groups.put((jobs, self._apply_on_event_loop(jobs)))

    def _apply_on_event_loop(self, jobs: Sequence[DatabaseJob[object]]) -> bool:
        if sum(job.size for job in jobs) > _MAX_INLINE_BYTES:
            return False
        try:
            _apply(self._connection, _begin_writing, jobs)
        except Exception:  # the thread will find out what it is
            return False
        return True

    def _finish_group(self, jobs: Sequence[DatabaseJob[object]]) -> None:
        self._stats.write_seconds.observe(time.monotonic() - self._started_at)
        self.is_failing = any(job.is_database_error for job in jobs)
        if any(job.deletes for job in jobs):
            self._schedule_checkpoint()
        for job in jobs:
            job.deliver()
        self._start_next()

    def _start_next(self) -> None:
        if self._waiting or self._checkpoint_due:
            self._start_group()
        elif self._closing:
            self._groups.put(None)
        else:
            self._busy = False

    def _schedule_checkpoint(self) -> None:
        if self._checkpoint_timer is None and not self._closing:
            self._checkpoint_timer = self._loop.call_later(self._checkpoint_delay, self._begin_checkpoint)

    def _begin_checkpoint(self) -> None:
        self._checkpoint_timer = None
        self._checkpoint_due = not self._closing
        if self._checkpoint_due and not self._busy:
            self._busy = True
            self._start_group()

    def _finish_checkpoint(self, emptied: bool, seconds: float) -> None:
        if emptied:
            self._checkpoint_delay = max(_CHECKPOINT_DELAY, seconds * _CHECKPOINT_SHARE)
        else:  # somebody reads, or the disk is full
            self._checkpoint_delay = min(self._checkpoint_delay * 2, _MAX_CHECKPOINT_DELAY)
            self._schedule_checkpoint()
        self._start_next()

    # ---- in the thread ----------------------------------------------------------------------------------------

    def _process_groups(self) -> None:
        while (group := self._groups.get()) is not None:
            if isinstance(group, tuple):
                jobs, applied = group
                self._commit_group(jobs, applied)
                told: Callable[[], None] = partial(self._finish_group, jobs)
            else:
                emptied = truncate_wal(self._connection)
                told = partial(self._finish_checkpoint, emptied, time.monotonic() - group)
            with suppress(RuntimeError):  # the loop ended without closing us
                self._loop.call_soon_threadsafe(told)
        self._connection.close()

    def _commit_group(self, jobs: Sequence[DatabaseJob[object]], applied: bool) -> None:
        if applied:
            with suppress(sqlite3.Error):
                _commit(self._connection, jobs)
                return
        _run_jobs(self._connection, _begin_writing_with_retry, jobs)


def truncate_wal(connection: sqlite3.Connection) -> bool:
    """Fold the log into the file and leave nothing in it; False if somebody reads meanwhile, or the disk is full."""
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        logger.warning("The log of the database could not be emptied: %s", error)
        return False
    return not busy


class Database:
    """The file, open; `write` and `read` return futures of what their jobs return."""

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
        self._inline_reader, *others = readers
        self._inline_reader.execute("PRAGMA busy_timeout = 0")  # as the writer's: this is the event loop
        self._readers = [_ReaderThread(connection, self._reads, self._loop) for connection in others]
        self.is_closed = False

    @classmethod
    async def open(cls, path: Path, *, shared: bool = False, stats: StoreStats | None = None) -> "Database":
        """Make it if it is not there; raises StoreOpenError. `shared` leaves out the lock against other processes, and
        the file's tables as they are while somebody else holds that lock.
        """
        return cls(*await asyncio.to_thread(_open_connections, path, shared), stats, path.parent)

    def write[T](
        self,
        work: Work[T],
        on_done: Callable[[T], None] | None = None,
        size: float = UNKNOWN_SIZE,
        *,
        deletes: bool = False,
        subject: str = "",
    ) -> asyncio.Future[T]:
        """`size`: about how many bytes are written. `deletes`, `about`: see `Job`."""
        waiter: asyncio.Future[T] = self._loop.create_future()
        self.post(DatabaseJob(work, waiter, on_done, size, deletes=deletes, subject=subject))
        return waiter

    def post[T](self, job: DatabaseJob[T]) -> None:
        """A write that nobody waits for, or that brings its own waiter."""
        self.check_open()
        self._writer.post(job)  # pyright: ignore[reportArgumentType]

    def read[T](
        self, work: Work[T], on_done: Callable[[T], None] | None = None, *, subject: str = ""
    ) -> asyncio.Future[T]:
        self.check_open()
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._reads.put(DatabaseJob(work, waiter, on_done, subject=subject))  # pyright: ignore[reportArgumentType]
        return waiter

    async def read_inline[T](self, work: Work[T], *, subject: str = "") -> T:
        """As `read`, for a row by its key: to find it takes a fraction of what it takes to ask a thread."""
        self.check_open()
        try:
            return work(self._inline_reader)
        except sqlite3.Error:  # the thread will find out what it is
            return await self.read(work, subject=subject)

    async def check_writable(self) -> None:
        """Raises StorageUnavailable while the disk is full, or nothing could be written last time and still cannot."""
        self.check_open()
        if self._directory is not None and _free_bytes(self._directory) < _MIN_FREE_BYTES:
            raise StorageUnavailable(
                "The gateway's disk is full, so nothing can be stored. Try again later.",
                retry_after=_RETRY_SECONDS,
            )
        if self._writer.is_failing:
            await self.write(_write_nothing)

    async def close(self) -> None:
        """Do what was asked for until now, and let go of the file."""
        if self.is_closed:
            return
        self.is_closed = True
        self._inline_reader.close()
        for _ in self._readers:
            self._reads.put(None)
        for reader in self._readers:
            await asyncio.to_thread(reader.join)
        # The last connection to close folds the log into the file; of two that close at once, neither would.
        self._writer.close()
        await asyncio.to_thread(self._writer.join)
        if self._lock is not None:
            os.close(self._lock)

    def check_open(self) -> None:
        """Raises Unavailable once it is closed."""
        if self.is_closed:
            raise ServiceUnavailable("The gateway's database is closed.")


def _write_nothing(db: sqlite3.Connection) -> None:
    """A write that changes nothing."""
    db.execute("UPDATE identity SET id = id")


def _free_bytes(directory: Path) -> float:
    try:
        disk = os.statvfs(directory)
    except OSError:  # whoever writes will say what it is
        return math.inf
    return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize


# --- opening ------------------------------------------------------------------------------------------


def _open_connections(
    path: Path, shared: bool
) -> tuple[sqlite3.Connection, Sequence[sqlite3.Connection], int | None]:
    opened: list[sqlite3.Connection] = []
    lock: int | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = None if shared else _lock_database(path)
        _make_private(path)
        writer = _connect(path, _WRITER_CACHE_KIB)
        opened.append(writer)
        writer.execute("PRAGMA journal_mode = WAL")
        if shared:
            _migrate_if_unlocked(path, writer)
        else:
            migrate(writer)
            truncate_wal(writer)  # a process that was killed may have left what it had deleted
        for _ in range(1 + _READER_THREADS):
            opened.append(_connect(path, _READER_CACHE_KIB))
            opened[-1].execute("PRAGMA query_only = ON")
        return writer, opened[1:], lock
    except BaseException as error:
        for connection in opened:
            connection.close()
        if lock is not None:
            os.close(lock)
        if isinstance(error, (OSError, sqlite3.Error, StoreOpenError)):
            raise StoreOpenError(f"The database {path} cannot be opened: {error}") from error
        raise


def _migrate_if_unlocked(path: Path, connection: sqlite3.Connection) -> None:
    """Whoever only visits a file must not change its tables under a gateway that may be of another release."""
    if is_up_to_date(connection):
        return
    lock = _lock_database(
        path,
        "a gateway of another release is using it (process {holder}). Stop that one, or use its release.",
    )
    try:
        migrate(connection)
    finally:
        os.close(lock)


_IN_USE = "another gateway is using it (process {holder}). Stop that one, or give this one a file of its own."


def _lock_database(path: Path, refusal: str = _IN_USE) -> int:
    """A lock that ends with this process, however that ends."""
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
    """The file and its name on the disk, for the owner alone; SQLite gives its other files the same mode."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _connect(path: Path, cache_kib: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        for setting in (
            "synchronous = FULL",
            "secure_delete = ON",  # what was deleted is not to be found in the file
            "trusted_schema = OFF",
            f"cache_size = -{cache_kib}",
            f"journal_size_limit = {_MAX_IDLE_WAL_BYTES}",
        ):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:  # a file that is no database is noticed here
        connection.close()
        raise
    return connection
