"""Work side by side of which the first failure ends the rest."""

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
_JOIN_SECONDS = 1.0  # for those that are at work when another has failed


@dataclass(frozen=True, slots=True)
class _Completed[R]:
    """What came of one, which may itself be an error."""

    result: R


type _Outcome[R] = tuple[int, _Completed[R] | BaseException]


class CancelledWork(Exception):
    """Another one has failed; never leaves `side_by_side`."""


class CancellationToken:
    """Tells those who work side by side that it is over, and lets none of them finish a file after that."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._partial_files: set[Path] = set()

    def check(self) -> None:
        """Raises Halted."""
        if self._cancelled.is_set():
            raise CancelledWork

    def sleep(self, seconds: float) -> None:
        """Raises Halted, as soon as it is over."""
        if self._cancelled.wait(seconds):
            raise CancelledWork

    @contextmanager
    def partial_file(self, target: Path) -> Generator[Path]:
        """An empty file to write to, which takes its place when the block has ended well: half of a file is worse than
        none. If it is not there any more, nobody wants it any more.
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
        """Of those whom nothing can wake now, and who will not write any more when something does."""
        with self._lock:
            for part in [*self._partial_files]:
                with suppress(OSError):
                    part.unlink(missing_ok=True)


def run_parallel[T, R](
    work: Callable[[T], R], items: Sequence[T], token: CancellationToken, *, max_workers: int, name: str
) -> list[R]:
    """What comes of each, in their order. The first error is raised, and nothing further begins then.

    Those that are at work are told to stop. One that waits for somebody who says nothing is left behind: its thread
    ends when it is answered, or with the program, and does nothing any more. name: of the threads.
    """
    outcomes: SimpleQueue[_Outcome[R]] = SimpleQueue()
    waiting, lock = iter(enumerate(items)), threading.Lock()
    threads = [
        threading.Thread(
            # Each with a context like the caller's: whoever traces requests finds his there.
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
    """Looks up now and then: a signal that comes just before it begins to wait does not wake it."""
    while True:
        with suppress(Empty):
            return outcomes.get(timeout=_POLL_SECONDS)


def _run_worker[T, R](
    work: Callable[[T], R],
    waiting: Iterator[tuple[int, T]],
    lock: threading.Lock,
    token: CancellationToken,
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
