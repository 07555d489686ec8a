"""One call of code in a sandbox: its log of events and who waits for it; imports `inside` and the sandbox protocol."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from sys import getsizeof
from typing import Annotated

import msgspec

from fumehood.protocol.sandbox import (
    AnyOutput,
    Display,
    End,
    Language,
    Note,
    Raised,
    Result,
    Stderr,
    Stdout,
)
from fumehood.sandboxd.inside import batches, bounds, wire
from fumehood.sandboxd.inside.wire import Kind


class ProtocolBroken(Exception):
    """The sandbox sent what the runner never sends: code inside has taken hold of the channel."""


class _ErrorBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: str
    traceback: str


class _EndBody(msgspec.Struct, forbid_unknown_fields=True):
    """What the runner says of an end. Whether it was interrupted, the supervisor knows better."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    interrupted: bool


_decode_bundle = msgspec.json.Decoder(dict[str, str]).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode
_decode_end = msgspec.json.Decoder(_EndBody).decode

_MIME_TYPES = 64
_EVENT_COST = 100  # bytes of memory beyond an event's texts
_WIDEST = 4  # bytes of memory that a character takes at most


def _bundle(body: bytes) -> dict[str, str]:
    """MIME types and their data; how many there are is bounded before time is spent on decoding them."""
    if body.count(b'"') - body.count(b'\\"') > 4 * _MIME_TYPES:
        raise ProtocolBroken("a display in more forms than the runner ever sends")
    return _decode_bundle(body)


def weight(event: AnyOutput) -> int:
    """About how much memory an event takes: one odd character makes all of its text take four times as much."""
    match event:
        case Stdout(text) | Stderr(text) | Note(text):
            return _EVENT_COST + getsizeof(text)
        case Display(data) | Result(data):
            return _EVENT_COST + sum(getsizeof(kind) + getsizeof(content) for kind, content in data.items())
        case Raised(value=value, traceback=traceback):
            return _EVENT_COST + getsizeof(value) + getsizeof(traceback)
        case End():
            return _EVENT_COST


class Execution:
    """A call from the moment it is asked for until its `End`; events stay readable from any point.

    The `End` is always the supervisor's: what the sandbox claims about its own end only fills in the exit code.
    `output_bytes` and `display_bytes` are what the runner was told: a peer that sends more than the runner would
    is not the runner any more.
    """

    def __init__(
        self,
        code: str,
        timeout: float,
        *,
        output_bytes: int,
        display_bytes: int,
        language: Language = "python",
    ) -> None:
        self.call = os.urandom(wire.CALL_ID_BYTES)  # cannot be guessed by code that runs before the call
        self.code = code
        self.language: Language = language
        self.timeout = timeout
        self.requirements: Sequence[str] = ()  # to be installed before the code runs
        self.log: list[AnyOutput] = []
        self.claimed_end: asyncio.Future[_EndBody] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Done when the deadline has moved to now.
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.interrupted_by_caller = False
        self.on_end: Callable[[End], None] | None = None
        self.install_seconds: float | None = None
        self.first_event_after: float | None = None  # seconds from its turn to its first event
        self.held = 0  # bytes of memory that its log takes, about
        self._bytes_left = bounds.body_bytes(output_bytes, display_bytes)
        self._batched_left = bounds.batched_events(output_bytes)
        self._messages_left = bounds.messages_at_once(output_bytes)
        self._began = 0.0
        self._grown = asyncio.Event()

    def begin(self) -> None:
        self.first_event_after = None
        self._began = asyncio.get_running_loop().time()

    @property
    def noun(self) -> str:
        """What runs, for sentences."""
        return "command" if self.language == "shell" else "code"

    @property
    def elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    @property
    def ended(self) -> bool:
        return bool(self.log) and isinstance(self.log[-1], End)

    def accept(self, message: wire.Message) -> None:
        """Take one message of the sandbox; raises ProtocolBroken for anything the runner would not send."""
        if message.call != self.call:
            raise ProtocolBroken("a message for a call that is not running")
        if self.claimed_end.done():
            raise ProtocolBroken("a message after the end of its call")
        self._messages_left -= 1
        if self._messages_left + bounds.MESSAGES_PER_SECOND * self.elapsed < 0:
            raise ProtocolBroken("more messages than the runner ever sends")
        self._bytes_left -= len(message.body)
        if self._bytes_left < 0:
            raise ProtocolBroken("more output than the runner ever sends")
        try:
            self._take(message)
        except (msgspec.MsgspecError, wire.FrameError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolBroken(f"a malformed {message.kind.name} message") from error

    def _take(self, message: wire.Message) -> None:
        match message.kind:
            case Kind.STDOUT:
                self._keep(Stdout(message.body.decode()))
            case Kind.STDERR:
                self._keep(Stderr(message.body.decode()))
            case Kind.OUTPUT:
                self._take_batch(message.body)
            case Kind.DISPLAY:
                self._keep(Display(_bundle(message.body)))
            case Kind.RESULT:
                self._keep(Result(_bundle(message.body)))
            case Kind.ERROR:
                body = _decode_error(message.body)
                self._keep(Raised(body.name, body.value, body.traceback))
            case Kind.END:
                self.claimed_end.set_result(_decode_end(message.body))
            case unexpected:
                raise ProtocolBroken(f"a {unexpected.name} message during a call")

    def _take_batch(self, body: bytes) -> None:
        pieces = batches.split(body)
        self._batched_left -= len(pieces)
        if self._batched_left < 0:
            raise ProtocolBroken("more pieces of output than the runner ever sends")
        self.held += _EVENT_COST * len(pieces) + _WIDEST * len(body)  # at most: to look at each takes time
        for kind, text in pieces:
            self.append(Stdout(text) if kind is Kind.STDOUT else Stderr(text))

    def _keep(self, event: AnyOutput) -> None:
        self.held += weight(event)
        self.append(event)

    def append(self, event: AnyOutput) -> None:
        if self.first_event_after is None and self._began:
            self.first_event_after = self.elapsed
        self.log.append(event)
        self._grown.set()
        if self.on_end is not None and isinstance(event, End):
            self.on_end(event)

    def note(self, text: str) -> None:
        self.append(Note(text))

    async def events(self, after: int = -1) -> AsyncIterator[AnyOutput]:
        """Everything from the event after number `after` up to the `End`, waiting for what is to come."""
        number = after + 1
        while True:
            while number < len(self.log):
                event = self.log[number]
                number += 1
                yield event
            if self.ended:
                return
            await self.wait_for_more()

    async def wait_for_more(self, patience: float | None = None) -> None:
        """Wait for the next event, or for so many seconds; whoever waits looks at the log again either way."""
        self._grown.clear()
        if patience is None:
            await self._grown.wait()
            return
        alarm = asyncio.get_running_loop().call_later(patience, self._grown.set)
        try:
            await self._grown.wait()
        finally:
            alarm.cancel()

    def wake_readers(self) -> None:
        """Have everybody who waits look again."""
        self._grown.set()
