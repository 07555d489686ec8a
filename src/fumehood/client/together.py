"""Work side by side of which the first failure ends the rest; imports only the standard library."""

import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from uuid import uuid4

_LOOKS_UP_SECONDS = 0.25
_LAST_SECONDS = 1.0  # for those that are at work when another has failed


@dataclass(frozen=True, slots=True)
class _Done[R]:
    """What came of one, which may itself be an error."""

    result: R


type _Outcome[R] = tuple[int, _Done[R] | BaseException]


class Halted(Exception):
    """Another one has failed; never leaves `side_by_side`."""


class Halt:
    """Tells those who work side by side that it is over, and lets none of them finish a file after that."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._parts: set[Path] = set()

    def check(self) -> None:
        """Raises Halted."""
        if self._over.is_set():
            raise Halted

    def sleep(self, seconds: float) -> None:
        """Raises Halted, as soon as it is over."""
        if self._over.wait(seconds):
            raise Halted

    @contextmanager
    def part_of(self, place: Path) -> Generator[Path]:
        """An empty file to write to, which takes its place when the block has ended well: half of a file is worse than
        none. If it is not there any more, nobody wants it any more.
        """
        part = place.with_name(f".{uuid4().hex}.part")
        with self._lock:
            self.check()
            part.touch()
            self._parts.add(part)
        try:
            yield part
            with self._lock:
                self.check()
                part.replace(place)
        finally:
            with self._lock:
                part.unlink(missing_ok=True)
                self._parts.discard(part)

    def end(self) -> None:
        self._over.set()

    def remove_parts(self) -> None:
        """Of those whom nothing can wake now, and who will not write any more when something does."""
        with self._lock:
            for part in [*self._parts]:
                with suppress(OSError):
                    part.unlink(missing_ok=True)


def side_by_side[T, R](
    work: Callable[[T], R], items: Sequence[T], halt: Halt, *, at_once: int, name: str
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
            args=(_work, work, waiting, lock, halt, outcomes),
            name=f"{name} {number}",
            daemon=True,
        )
        for number in range(min(at_once, len(items)))
    ]
    done: dict[int, R] = {}
    try:
        for thread in threads:
            thread.start()
        while len(done) < len(items):
            number, outcome = _next(outcomes)
            if isinstance(outcome, BaseException):
                raise outcome
            done[number] = outcome.result
    finally:
        halt.end()
        until = time.monotonic() + _LAST_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        halt.remove_parts()
    return [done[number] for number in range(len(items))]


def _next[R](outcomes: "SimpleQueue[_Outcome[R]]") -> _Outcome[R]:
    """Looks up now and then: a signal that comes just before it begins to wait does not wake it."""
    while True:
        with suppress(Empty):
            return outcomes.get(timeout=_LOOKS_UP_SECONDS)


def _work[T, R](
    work: Callable[[T], R],
    waiting: Iterator[tuple[int, T]],
    lock: threading.Lock,
    halt: Halt,
    outcomes: "SimpleQueue[_Outcome[R]]",
) -> None:
    while True:
        with lock:
            following = next(waiting, None)
        if following is None:
            return
        number, item = following
        try:
            halt.check()
            outcomes.put((number, _Done(work(item))))
        except BaseException as error:
            outcomes.put((number, error))
            return
