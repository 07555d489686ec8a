"""Parallel work in threads; the first failure cancels the rest."""

import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from uuid import uuid4

_POLL_SECONDS = 0.25
_JOIN_SECONDS = 1.0  # for running workers to stop after a failure


@dataclass(frozen=True, slots=True)
class _Completed[R]:
    """The result of one item, which may be an error."""

    result: R


type _Outcome[R] = tuple[int, _Completed[R] | BaseException]


class WorkerCancelled(Exception):
    """Raised in workers after another one has failed; never leaves `run_parallel`."""


class WorkerCancellation:
    """Cancels parallel workers, and prevents them from completing files afterwards."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._partial_files: set[Path] = set()

    def check(self) -> None:
        """Raise WorkerCancelled if cancelled."""
        if self._cancelled.is_set():
            raise WorkerCancelled

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises WorkerCancelled as soon as it is cancelled."""
        if self._cancelled.wait(seconds):
            raise WorkerCancelled

    @contextmanager
    def partial_file(self, target: Path) -> Generator[Path]:
        """Yield an empty temporary file that replaces the target at the end of the block, so that no partial file
        remains.

        After cancellation the temporary file is gone, and the target is not replaced.
        """
        part = target.with_name(f".{uuid4().hex}.part")
        with self._lock:
            self.check()
            part.touch()
            self._partial_files.add(part)
        try:
            yield part
            with self._lock:
                self.check()
                part.replace(target)
        finally:
            with self._lock:
                part.unlink(missing_ok=True)
                self._partial_files.discard(part)

    def cancel(self) -> None:
        self._cancelled.set()

    def remove_partial_files(self) -> None:
        """Remove temporary files of workers that are blocked and cannot clean up themselves."""
        with self._lock:
            for part in [*self._partial_files]:
                with suppress(OSError):
                    part.unlink(missing_ok=True)


def run_parallel[T, R](
    work: Callable[[T], R], items: Sequence[T], token: WorkerCancellation, *, max_workers: int, name: str
) -> list[R]:
    """Run `work` for all items in threads and return the results in order.

    The first error is raised; no further item starts then, and running workers are cancelled. A worker that is blocked
    is left behind: its thread ends when it wakes up, or with the process, and has no further effect.

    name: of the threads.
    """
    outcomes: SimpleQueue[_Outcome[R]] = SimpleQueue()
    waiting, lock = iter(enumerate(items)), threading.Lock()
    threads = [
        threading.Thread(
            # Copy the caller's context, so that requests find its trace.
            target=contextvars.copy_context().run,
            args=(_run_worker, work, waiting, lock, token, outcomes),
            name=f"{name} {number}",
            daemon=True,
        )
        for number in range(min(max_workers, len(items)))
    ]
    done: dict[int, R] = {}
    try:
        for thread in threads:
            thread.start()
        while len(done) < len(items):
            number, outcome = _next_outcome(outcomes)
            if isinstance(outcome, BaseException):
                raise outcome
            done[number] = outcome.result
    finally:
        token.cancel()
        until = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        token.remove_partial_files()
    return [done[number] for number in range(len(items))]


def _next_outcome[R](outcomes: "SimpleQueue[_Outcome[R]]") -> _Outcome[R]:
    """Wait with a timeout: a signal that arrives just before waiting would not wake it."""
    while True:
        with suppress(Empty):
            return outcomes.get(timeout=_POLL_SECONDS)


def _run_worker[T, R](
    work: Callable[[T], R],
    waiting: Iterator[tuple[int, T]],
    lock: threading.Lock,
    token: WorkerCancellation,
    outcomes: "SimpleQueue[_Outcome[R]]",
) -> None:
    while True:
        with lock:
            following = next(waiting, None)
        if following is None:
            return
        number, item = following
        try:
            token.check()
            outcomes.put((number, _Completed(work(item))))
        except BaseException as error:
            outcomes.put((number, error))
            return
