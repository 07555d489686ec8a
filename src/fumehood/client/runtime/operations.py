"""Operations: what the client's core asks a shell to do, because the core does no I/O itself.

The core consists of generators that yield operations and continue with their results. A shell performs the operations:
`BlockingShell` in the calling thread, `AsyncShell` in an event loop.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fumehood.client.runtime.evaluation_lock import LockTicket


class Operation[T]:
    """Something that a shell does for the core; `T` is its result. The shell raises its errors in the core."""


type Steps[T] = Generator[Operation[Any], Any, T]


def perform[T](operation: Operation[T]) -> Steps[T]:
    """Have the shell perform an operation, and return its result."""
    result: T = yield operation
    return result


@dataclass(frozen=True)
class ServerReply:
    """A whole reply of the server; of a stream, `content` is the response that its last event has."""

    content: bytes
    headers: Mapping[str, str]
    request_id: str | None


@dataclass(frozen=True)
class OpenedStream:
    """A reply whose body is read in chunks. source: the shell's own."""

    headers: Mapping[str, str]
    request_id: str | None
    source: Any = field(repr=False)


@dataclass(frozen=True)
class SendRequest(Operation[ServerReply]):
    """Call a method of the SDK, such as "responses.create", and read its whole reply. timeout: in seconds."""

    method: str
    arguments: Mapping[str, Any]
    timeout: float | None = None


@dataclass(frozen=True)
class OpenStream(Operation[OpenedStream]):
    """As SendRequest, but read only the head of the reply."""

    method: str
    arguments: Mapping[str, Any]
    timeout: float | None = None


@dataclass(frozen=True)
class ReadStream(Operation[bytes]):
    """Read the next chunk; none of it is left if the chunk is empty."""

    stream: OpenedStream
    timeout: float | None = None


@dataclass(frozen=True)
class CloseStream(Operation[None]):
    stream: OpenedStream


@dataclass(frozen=True)
class ProbeServer(Operation[None]):
    """Get a path of the server."""

    path: str
    timeout: float


@dataclass(frozen=True)
class CallFunction[T](Operation[T]):
    """Call a function that may block, such as the handler of a tool. is_async: it returns an awaitable at once."""

    function: "Callable[[], T | Awaitable[T]]"
    is_async: bool = False


@dataclass(frozen=True)
class Sleep(Operation[None]):
    seconds: float


@dataclass(frozen=True)
class CallingTask:
    """What drives the core. task: None in the blocking shell."""

    thread: int
    task: object = None


@dataclass(frozen=True)
class GetCallingTask(Operation[CallingTask]):
    pass


@dataclass(frozen=True)
class AwaitLock(Operation[bool]):
    """Wait until the ticket is granted; False if the timeout passes first."""

    ticket: "LockTicket"
    timeout: float | None = None


@dataclass(frozen=True)
class EmitEvent(Operation[None]):
    """Give an event to the consumer of a stream."""

    event: Any


class StepsRunner[T]:
    """Runs steps from one operation to the next. result: theirs, once they have ended."""

    result: T

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def resume(self, result: object = None, error: BaseException | None = None) -> Operation[Any] | None:
        """Continue with the result or the error of the last operation. Returns the next operation, None at the end."""
        try:
            return self._steps.send(result) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.result = end.value
            return None

    def close(self) -> None:
        """End the steps where they are."""
        self._steps.close()
