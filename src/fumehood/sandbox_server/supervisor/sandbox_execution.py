"""One execution: its event log and its readers."""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from sys import getsizeof
from typing import Annotated

import msgspec

from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionNote,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.sandbox_server.inside import framing, output_packets
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.inside.runner import output_limits
from fumehood.sandbox_server.settings import SandboxServerSettings


class ProtocolViolation(Exception):
    """The sandbox sent what the runner never sends: code inside controls the channel."""


class _RunnerError(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: str
    traceback: str


class _RunnerEnd(msgspec.Struct, forbid_unknown_fields=True):
    """The runner's end message. The supervisor does not rely on `interrupted`."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    interrupted: bool


_decode_bundle = msgspec.json.Decoder(dict[str, str]).decode
_decode_error = msgspec.json.Decoder(_RunnerError).decode
_decode_end = msgspec.json.Decoder(_RunnerEnd).decode

_MAX_MIME_TYPES = 64
_EVENT_OVERHEAD_BYTES = 100  # beyond an event's text
_MAX_CHARACTER_BYTES = 4
_BATCH_BYTES = 256 << 10


def _decode_mime_bundle(body: bytes) -> dict[str, str]:
    """MIME types and their data; bounds their number before decoding."""
    if body.count(b'"') - body.count(b'\\"') > 4 * _MAX_MIME_TYPES:
        raise ProtocolViolation("a display with more MIME types than the runner ever sends")
    return _decode_bundle(body)


def estimate_memory(event: ExecutionEvent) -> int:
    """Approximate bytes of memory of an event; one non-Latin character makes its whole text up to four times larger."""
    match event:
        case Stdout(text) | Stderr(text) | ExecutionNote(text):
            return _EVENT_OVERHEAD_BYTES + getsizeof(text)
        case DisplayData(data) | ExpressionResult(data):
            return _EVENT_OVERHEAD_BYTES + sum(
                getsizeof(kind) + getsizeof(content) for kind, content in data.items()
            )
        case ExceptionRaised(value=value, traceback=traceback):
            return _EVENT_OVERHEAD_BYTES + getsizeof(value) + getsizeof(traceback)
        case ExecutionEnd():
            return _EVENT_OVERHEAD_BYTES


class SandboxExecution:
    """From the request to its `ExecutionEnd`; events stay readable from any point.

    The supervisor alone decides on the end: the sandbox's own report only supplies the exit code. The runner applies
    the output limits of the settings, too: a peer that sends more is not the runner.
    """

    def __init__(self, request: ExecuteRequest, settings: SandboxServerSettings) -> None:
        self.id = request.execution_id or secrets.token_hex(12)
        self.request = request
        self.call_id = os.urandom(framing.CALL_ID_BYTES)  # earlier code cannot guess it
        self.event_log: list[ExecutionEvent] = []
        self.reported_end: asyncio.Future[_RunnerEnd] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Done when the code is to be interrupted now.
        self.interrupt_requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.interrupted_by_caller = False
        self.on_end: Callable[[SandboxExecution, ExecutionEnd], None] | None = None
        self.install_seconds: float | None = None
        self.seconds_to_first_event: float | None = None  # from the start of the code
        self.log_bytes = 0  # approximate memory of the log, while it grows
        self.retained_bytes = 0  # memory of code and log, once it has ended
        self._bytes_left = output_limits.max_body_bytes(settings.output_bytes, settings.display_bytes)
        self._batched_events_left = output_limits.max_batched_events(settings.output_bytes)
        self._messages_left = output_limits.max_message_burst(settings.output_bytes)
        self._started_at = 0.0
        self._log_changed = asyncio.Event()

    def start_clock(self) -> None:
        self.seconds_to_first_event = None
        self._started_at = asyncio.get_running_loop().time()

    @property
    def elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at

    @property
    def has_ended(self) -> bool:
        return bool(self.event_log) and isinstance(self.event_log[-1], ExecutionEnd)

    def interrupt(self) -> None:
        """Stop it as Ctrl-C would; one that is queued never starts."""
        if not self.has_ended:
            self.interrupted_by_caller = True
            if not self.interrupt_requested.done():
                self.interrupt_requested.set_result(None)

    def accept(self, message: framing.ChannelMessage) -> None:
        """Append one message of the sandbox; raises ProtocolViolation for what the runner would not send."""
        if message.call != self.call_id:
            raise ProtocolViolation("a message for a call that is not running")
        if self.reported_end.done():
            raise ProtocolViolation("a message after the end of its call")
        self._messages_left -= 1
        if self._messages_left + output_limits.MAX_MESSAGES_PER_SECOND * self.elapsed < 0:
            raise ProtocolViolation("more messages than the runner ever sends")
        self._bytes_left -= len(message.body)
        if self._bytes_left < 0:
            raise ProtocolViolation("more output than the runner ever sends")
        try:
            self._append_message(message)
        except (msgspec.MsgspecError, framing.FrameError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolViolation(f"a malformed {message.kind.name} message") from error

    def _append_message(self, message: framing.ChannelMessage) -> None:
        match message.kind:
            case MessageKind.STDOUT:
                self.append(Stdout(message.body.decode()))
            case MessageKind.STDERR:
                self.append(Stderr(message.body.decode()))
            case MessageKind.OUTPUT:
                self._append_batch(message.body)
            case MessageKind.DISPLAY:
                self.append(DisplayData(_decode_mime_bundle(message.body)))
            case MessageKind.RESULT:
                self.append(ExpressionResult(_decode_mime_bundle(message.body)))
            case MessageKind.ERROR:
                body = _decode_error(message.body)
                self.append(ExceptionRaised(body.name, body.value, body.traceback))
            case MessageKind.END:
                self.reported_end.set_result(_decode_end(message.body))
            case unexpected:
                raise ProtocolViolation(f"a {unexpected.name} message during a call")

    def _append_batch(self, body: bytes) -> None:
        outputs = output_packets.unpack_output(body)
        self._batched_events_left -= len(outputs)
        if self._batched_events_left < 0:
            raise ProtocolViolation("more output events than the runner ever sends")
        # An upper bound: measuring each text takes time.
        self.log_bytes += _EVENT_OVERHEAD_BYTES * len(outputs) + _MAX_CHARACTER_BYTES * len(body)
        for kind, text in outputs:
            self.append(Stdout(text) if kind is MessageKind.STDOUT else Stderr(text), size=0)

    def append(self, event: ExecutionEvent, size: int | None = None) -> None:
        """Append an event for all readers. size: in bytes; None measures it, 0 is for one of a counted batch."""
        self.log_bytes += estimate_memory(event) if size is None else size
        if self.seconds_to_first_event is None and self._started_at:
            self.seconds_to_first_event = self.elapsed
        self.event_log.append(event)
        self._log_changed.set()
        if self.on_end is not None and isinstance(event, ExecutionEnd):
            self.on_end(self, event)

    def append_note(self, text: str) -> None:
        self.append(ExecutionNote(text))

    async def event_batches(
        self, after: int = -1, *, timeout: float | None = None
    ) -> AsyncGenerator[list[ExecutionEvent]]:
        """The events after number `after` in batches, as they come; an empty batch after `timeout` idle seconds."""
        number = after + 1
        while True:
            if number < len(self.event_log):
                batch = self.next_batch(number)
                number += len(batch)
                yield batch
            elif self.has_ended:
                return
            else:
                await self.wait_for_events(timeout)
                if number >= len(self.event_log) and not self.has_ended:
                    yield []

    def next_batch(self, number: int) -> list[ExecutionEvent]:
        """The log from this number on, up to a bound: a slow reader gets it bit by bit."""
        size = 0
        for last in range(number, len(self.event_log)):
            size += estimate_memory(self.event_log[last])
            if size > _BATCH_BYTES:
                return self.event_log[number : last + 1]
        return self.event_log[number:]

    async def wait_for_events(self, timeout: float | None = None) -> None:
        """Wait for the next event, or `timeout` seconds; the caller reads the log again either way."""
        self._log_changed.clear()
        if timeout is None:
            await self._log_changed.wait()
            return
        alarm = asyncio.get_running_loop().call_later(timeout, self._log_changed.set)
        try:
            await self._log_changed.wait()
        finally:
            alarm.cancel()

    def notify_readers(self) -> None:
        """Wake everybody in `wait_for_events`."""
        self._log_changed.set()
