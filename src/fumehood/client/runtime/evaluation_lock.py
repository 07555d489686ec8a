"""A lock on the conversation of a session: evaluations that continue it run one after another."""

import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from fumehood.client.deadlines import Deadline
from fumehood.client.errors import DeadlineExceededError, PromptEvaluationError
from fumehood.client.runtime.operations import AwaitLock, CallingTask, GetCallingTask, Steps, perform
from fumehood.client.runtime.session import SessionProtocol


class LockTicket:
    """A place in the queue for a lock. owner: what drives the evaluation."""

    def __init__(self, owner: CallingTask) -> None:
        self.owner = owner
        self._granted = threading.Event()
        self._mutex = threading.Lock()
        self._callback: Callable[[], object] | None = None

    def grant(self) -> None:
        with self._mutex:
            self._granted.set()
            callback = self._callback
        if callback is not None:
            callback()

    def wait(self, timeout: float | None) -> bool:
        """Block until it is granted; False if the timeout passes first."""
        return self._granted.wait(timeout)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call the callback when it is granted, in the thread that grants it, or now if it is granted already."""
        with self._mutex:
            self._callback = callback
            is_granted = self._granted.is_set()
        if is_granted:
            callback()


class EvaluationLock:
    """A fair lock for which threads and tasks can wait together."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[LockTicket] = deque()  # the first holds the lock

    def request(self, owner: CallingTask) -> LockTicket:
        ticket = LockTicket(owner)
        with self._mutex:
            self._queue.append(ticket)
            is_first = len(self._queue) == 1
        if is_first:
            ticket.grant()
        return ticket

    def waits_for(self, caller: CallingTask) -> bool:
        """Whether the evaluation that holds the lock cannot go on while this caller waits for it."""
        with self._mutex:
            holder = self._queue[0].owner if self._queue else None
        if holder is None or holder.thread != caller.thread:
            return False
        return caller.task is None or holder.task in (None, caller.task)

    def release(self, ticket: LockTicket) -> None:
        """Give up the lock, or the place in its queue."""
        with self._mutex:
            was_first = self._queue[0] is ticket
            self._queue.remove(ticket)
            following = self._queue[0] if was_first and self._queue else None
        if following is not None:
            following.grant()


_locks: WeakKeyDictionary[SessionProtocol, EvaluationLock] = WeakKeyDictionary()
_locks_mutex = threading.Lock()
# Handlers inherit it, also in other threads and tasks, and must not wait for the evaluation that waits for them.
_held_locks: ContextVar[tuple[EvaluationLock, ...]] = ContextVar("fumehood_held_locks", default=())


def hold_conversation[T](
    session: SessionProtocol, steps: Steps[T], *, deadline: Deadline | None, prompt_name: str
) -> Steps[T]:
    """Run steps while no other evaluation continues the session's conversation.

    Raises DeadlineExceededError if the lock is not free in time, and PromptEvaluationError if it never can be: the
    evaluation that holds it waits for this one.
    """
    with _locks_mutex:
        lock = _locks.setdefault(session, EvaluationLock())
    owner = yield from perform(GetCallingTask())
    if lock in _held_locks.get() or lock.waits_for(owner):
        raise PromptEvaluationError(
            "The evaluation that started this one, or a stream that is still open, continues the same conversation; "
            "give this evaluation a session of its own, or an adapter without compaction.",
            prompt_name=prompt_name,
        )
    ticket = lock.request(owner)
    try:
        timeout = None if deadline is None else deadline.remaining().total_seconds()
        if not (yield from perform(AwaitLock(ticket, timeout))):
            raise DeadlineExceededError(
                "The deadline passed while another evaluation continued the session's conversation.",
                prompt_name=prompt_name,
                phase="deadline",
            )
        before = _held_locks.set((*_held_locks.get(), lock))
        try:
            return (yield from steps)
        finally:
            _held_locks.reset(before)
    finally:
        lock.release(ticket)
