"""An SQLite file behind threads: one that writes in groups, some that read; imports the standard library and siblings.

A job is a function of a connection. Whatever waits when the writer is free becomes one transaction with one sync of
the disk. If that fails, each job is tried alone, so that a bad one does not take its neighbours with it.
"""

import asyncio
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from fumehood.protocol.errors import Unavailable
from fumehood.store.migrations import StoreRefused, is_current, migrate

_READERS = 2
_LARGEST_GROUP = 256
_BUSY_SECONDS = 10.0
_PAGE_CACHE_KIB = 16 << 10
_LARGEST_IDLE_LOG = 64 << 20

type Work[T] = Callable[[sqlite3.Connection], T]


class Job[T]:
    """One piece of work, and who waits for it.

    applied: whether what it did is in the database, as the jobs after it see it; for them alone to look at.
    """

    __slots__ = ("_error", "_on_done", "_result", "_waiter", "_work", "applied")
    _result: T

    def __init__(
        self,
        work: Work[T],
        waiter: asyncio.Future[T] | None = None,
        on_done: Callable[[T], None] | None = None,
    ) -> None:
        self._work = work
        self._waiter = waiter
        self._on_done = on_done
        self._error: BaseException | None = None
        self.applied = False

    def run(self, connection: sqlite3.Connection) -> None:
        self._result = self._work(connection)
        self.applied = True

    def undo(self) -> None:
        self.applied = False

    def fail(self, error: BaseException) -> None:
        self._error = error

    def deliver(self) -> None:
        """On the event loop: `on_done` hears of it first, also if nobody waits any more."""
        if self._error is None and self._on_done is not None:
            self._on_done(self._result)
        if self._waiter is None or self._waiter.done():
            return
        if self._error is None:
            self._waiter.set_result(self._result)
        else:
            self._waiter.set_exception(_for_callers(self._error))


def _for_callers(error: BaseException) -> BaseException:
    """Only a mistake of ours stays what it is."""
    if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
        unavailable = Unavailable(f"The gateway's database cannot be used now: {error}. Try again later.")
        unavailable.__cause__ = error
        return unavailable
    return error


class _Worker:
    """A thread and its connection."""

    def __init__(
        self,
        name: str,
        connection: sqlite3.Connection,
        begin: str,
        jobs: "SimpleQueue[Job[object] | None]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connection = connection
        self._begin = begin
        self._jobs = jobs
        self._loop = loop
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        going_on = True
        while going_on:
            group, going_on = self._take()
            if group:
                self._run(group)
                with suppress(RuntimeError):  # the loop ended without closing us
                    self._loop.call_soon_threadsafe(_deliver, group)
        self._connection.close()

    def _take(self) -> tuple[list[Job[object]], bool]:
        """What there is, at least one; and whether more may come."""
        group: list[Job[object]] = []
        job = self._jobs.get()
        while job is not None:
            group.append(job)
            if len(group) == _LARGEST_GROUP:
                return group, True
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _run(self, group: Sequence[Job[object]]) -> None:
        try:
            self._transact(group)
        except Exception as error:
            if len(group) == 1:
                group[0].fail(error)
                return
            for job in group:
                self._run([job])

    def _transact(self, group: Sequence[Job[object]]) -> None:
        try:
            self._connection.execute(self._begin)
            for job in group:
                job.run(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            for job in group:
                job.undo()
            with suppress(sqlite3.Error):
                self._connection.rollback()
            raise


def _deliver(group: Sequence[Job[object]]) -> None:
    for job in group:
        job.deliver()


class Database:
    """The file, open; `write` and `read` return futures of what their jobs return."""

    def __init__(
        self, writer: sqlite3.Connection, readers: Sequence[sqlite3.Connection], lock: int | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._writes = SimpleQueue[Job[object] | None]()
        self._reads = SimpleQueue[Job[object] | None]()
        self._writer = _Worker("store-writer", writer, "BEGIN IMMEDIATE", self._writes, self._loop)
        self._readers = [
            _Worker("store-reader", connection, "BEGIN", self._reads, self._loop) for connection in readers
        ]
        self.closed = False

    @classmethod
    async def open(cls, path: Path, *, shared: bool = False) -> "Database":
        """Make it if it is not there; raises StoreRefused. `shared` leaves out the lock against other processes, and
        the file's tables as they are while somebody else holds that lock.
        """
        return cls(*await asyncio.to_thread(_open, path, shared))

    def write[T](self, work: Work[T], on_done: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        waiter: asyncio.Future[T] = self._loop.create_future()
        self.post(Job(work, waiter, on_done))
        return waiter

    def post[T](self, job: Job[T]) -> None:
        """A write that nobody waits for, or that brings its own waiter."""
        self.check()
        self._writes.put(job)  # pyright: ignore[reportArgumentType]

    def read[T](self, work: Work[T], on_done: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        self.check()
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._reads.put(Job(work, waiter, on_done))  # pyright: ignore[reportArgumentType]
        return waiter

    async def close(self) -> None:
        """Do what was asked for until now, and let go of the file."""
        if self.closed:
            return
        self.closed = True
        for _ in self._readers:
            self._reads.put(None)
        self._writes.put(None)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        # The writer last: the last connection to close folds the log into the file.
        for worker in (*self._readers, self._writer):
            worker.join()
        if self._lock is not None:
            os.close(self._lock)

    def check(self) -> None:
        """Raises Unavailable once it is closed."""
        if self.closed:
            raise Unavailable("The gateway's database is closed.")


# --- opening ------------------------------------------------------------------------------------------


def _open(path: Path, shared: bool) -> tuple[sqlite3.Connection, Sequence[sqlite3.Connection], int | None]:
    opened: list[sqlite3.Connection] = []
    lock: int | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = None if shared else _locked(path)
        _make_private(path)
        writer = _connect(path)
        opened.append(writer)
        writer.execute("PRAGMA journal_mode = WAL")
        if shared:
            _migrate_if_alone(path, writer)
        else:
            migrate(writer)
        for _ in range(_READERS):
            opened.append(_connect(path))
            opened[-1].execute("PRAGMA query_only = ON")
        return writer, opened[1:], lock
    except BaseException as error:
        for connection in opened:
            connection.close()
        if lock is not None:
            os.close(lock)
        if isinstance(error, (OSError, sqlite3.Error, StoreRefused)):
            raise StoreRefused(f"The database {path} cannot be opened: {error}") from error
        raise


def _migrate_if_alone(path: Path, connection: sqlite3.Connection) -> None:
    """Whoever only visits a file must not change its tables under a gateway that may be of another release."""
    if is_current(connection):
        return
    lock = _locked(
        path,
        "a gateway of another release is using it (process {holder}). Stop that one, or use its release.",
    )
    try:
        migrate(connection)
    finally:
        os.close(lock)


_SECOND = "another gateway is using it (process {holder}). Stop that one, or give this one a file of its own."


def _locked(path: Path, refusal: str = _SECOND) -> int:
    """A lock that ends with this process, however that ends."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StoreRefused(refusal.format(holder=holder)) from None
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


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    for setting in (
        "synchronous = FULL",
        "secure_delete = ON",  # what was deleted is not to be found in the file
        "trusted_schema = OFF",
        f"cache_size = -{_PAGE_CACHE_KIB}",
        f"journal_size_limit = {_LARGEST_IDLE_LOG}",
    ):
        connection.execute(f"PRAGMA {setting}")
    return connection
