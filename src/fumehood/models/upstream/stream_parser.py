"""Reads the body of an answer, be it a stream of events or one document.

What the events mean is said by the parsers of the two kinds of servers, which inherit from this one.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from fumehood.models.upstream.think_tags import ThinkTagFilter
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.json_limits import MAX_VALUES, has_too_many_values
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelReasoningDelta,
    ModelTextDelta,
)
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.worker_threads import WORKER_THRESHOLD_BYTES

MAX_LINE_BYTES = 1 << 25  # and the longest answer that is not streamed
MAX_RESPONSE_BYTES = 1 << 29  # in all, whatever it says or does not say
MAX_TOKEN_COUNT = 1 << 48  # that are believed
# What may come in a row without saying anything: comments, blank lines and fields that are no data; and events of which
# nobody here knows what to do with them, which may be pictures.
MAX_BYTES_WITHOUT_EVENT = 1 << 20
MAX_IGNORED_BYTES = 1 << 26

_MAX_DELTA_CHARS = 1 << 16  # characters
_MAX_LENIENT_BYTES = 1 << 20  # bytes that are worth the slow way of reading what is not quite JSON
_EVENT_COST = 1 << 10  # of one more event, in bytes of a long one
_LINE_COST = 1 << 6  # of one more line of an event
_BOM = b"\xef\xbb\xbf"


class TurnParser(Protocol):
    """One turn. Give it what each read brought, then `finish` at the end of the body; take the events.

    failure: set once the answer cannot go on; the events before it were given. ended: `TurnEnded` was given; over: one
    of the two. closing: the model has said why it stopped, and at most the usage is still to come. held: the bytes that
    have yet to be read, since their line or document is not complete.
    """

    @property
    def failure(self) -> ModelError | None: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def awaits_usage(self) -> bool: ...

    @property
    def buffered_bytes(self) -> int: ...

    def feed(self, chunk: bytes) -> list[AnyModelEvent]: ...

    def finish(self) -> list[AnyModelEvent]: ...


class UpstreamStreamParser[Told](ABC):
    """A `TurnReader`, but for what the events mean; `decoder` reads one."""

    def __init__(
        self,
        errors: UpstreamErrorFactory,
        decoder: msgspec.json.Decoder[Told],
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self.failure: ModelError | None = None
        self.has_ended = False
        self._errors = errors
        self._decoder = decoder
        self._max_line_bytes = max_line_bytes
        self._bytes_left = max_bytes
        self._buffer: list[bytes] = []  # an unfinished line, or an answer that is not a stream
        self._buffer_bytes = 0
        self._format_known = False
        self._is_document = False
        self._data_lines: list[bytes] = []  # lines of an event that goes on over several
        self._data_bytes = 0
        self._bytes_without_event = 0  # since the last event that said something
        self._ignored_bytes = 0
        self._has_event = False
        self._body_ended = False
        self._think_tags: ThinkTagFilter | None = (
            None  # where reasoning may be part of the text, until that is known
        )

    @property
    def awaits_usage(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.failure is not None

    @property
    def buffered_bytes(self) -> int:
        return self._buffer_bytes + self._data_bytes

    # ---- what the servers differ in ---------------------------------------------------------------------------

    @abstractmethod
    def _handle_event(self, event: Told, payload: bytes, events: list[AnyModelEvent]) -> bool:
        """Add the events; whether the lines after it are to be read in another way."""

    @abstractmethod
    def _finish_turn(self, events: list[AnyModelEvent]) -> None:
        """The server says that it is done, or has said enough and is gone."""

    @property
    @abstractmethod
    def _is_turn_complete(self) -> bool:
        """Whether a body that is over is a whole turn, as far as one can know."""

    def _is_ignorable(self, payload: bytes) -> bool:  # noqa: ARG002 - some servers tell many things
        """Whether what cannot be read need not be."""
        return False

    # ---- bytes ------------------------------------------------------------------------------------------------

    def feed(self, chunk: bytes) -> list[AnyModelEvent]:
        """What one read brought, as far as its lines are complete."""
        events: list[AnyModelEvent] = []
        if self.is_over:
            return events
        self._bytes_left -= len(chunk)
        if self._bytes_left < 0:
            self.failure = self._errors.response_too_large()
            return events
        if not self._format_known:
            chunk = self._detect_format(chunk)
        cut = 0 if self._is_document else chunk.rfind(b"\n") + 1
        if not cut:
            self._append_to_buffer(chunk)
            return events
        block = chunk[:cut] if cut < len(chunk) else chunk
        if self._buffer:
            block = b"".join([*self._buffer, block])
            self._buffer.clear()
            self._buffer_bytes = 0
        if cut < len(chunk):
            self._append_to_buffer(chunk[cut:])
        self._parse_block(block, events)
        if events:
            self._bytes_without_event = self._ignored_bytes = 0
        elif not self.is_over:
            self._count_eventless_block(block)
        return events if self._think_tags is None else self._filter_think_tags(events)

    def finish(self) -> list[AnyModelEvent]:
        """The body is over: the rest, and the end of the turn if it may be one."""
        events: list[AnyModelEvent] = []
        if self.is_over:
            return events
        self._body_ended = True
        rest = b"".join(self._buffer)
        if self._is_document:
            self._parse_leniently(rest, events)
        else:
            self._parse_lines(rest + b"\n\n", events)
        if not self.is_over:
            if self._is_turn_complete:
                self._finish_turn(events)
            elif self._has_event:
                self.failure = self._errors.disconnected()
            else:
                self.failure = self._errors.invalid_response("its answer is empty, or not an answer to this")
        return self._filter_think_tags(events)

    def _filter_think_tags(self, events: list[AnyModelEvent]) -> list[AnyModelEvent]:
        if self._think_tags is None:
            return events
        events = self._think_tags.filter_events(events)
        if self._think_tags.is_done:
            self._think_tags = None
        return events

    def _detect_format(self, chunk: bytes) -> bytes:
        """The very first bytes tell a stream from an answer in one piece."""
        start = b"".join([*self._buffer, chunk])
        self._buffer.clear()
        self._buffer_bytes = 0
        if _BOM.startswith(start) and start != _BOM:
            return start
        size = len(start)
        start = start.removeprefix(_BOM).lstrip()
        if start:
            self._format_known = True
            self._is_document = start.startswith(b"{")
        else:
            self._count_eventless_bytes(size)
        return start

    def _append_to_buffer(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._buffer.append(chunk)
        self._buffer_bytes += len(chunk)
        if self._buffer_bytes > self._max_line_bytes:
            self._buffer.clear()
            self.failure = self._errors.invalid_response(
                f"it sent a line of more than {self._max_line_bytes} bytes"
            )

    def _count_eventless_block(self, block: bytes) -> None:
        """Bound what says nothing: a server may send it for as long as it likes, and a stream of it times out never."""
        if self._is_document:
            return
        payloads = [line for line in block.split(b"\n") if line.startswith(b"data:")]
        size = sum(map(len, payloads))
        self._ignored_bytes += size + _EVENT_COST * len(payloads)
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            self.failure = self._errors.no_progress("too many events that say nothing")
        else:
            self._count_eventless_bytes(len(block) - size)

    def _count_eventless_bytes(self, size: int) -> None:
        self._bytes_without_event += size
        if self._bytes_without_event > MAX_BYTES_WITHOUT_EVENT:
            self.failure = self._errors.no_progress(
                f"more than {MAX_BYTES_WITHOUT_EVENT} bytes without an event"
            )

    # ---- lines ------------------------------------------------------------------------------------------------

    def _parse_block(self, block: bytes, events: list[AnyModelEvent]) -> None:
        """Complete lines."""
        while block and not self.is_over:
            block = self._parse_lines(block, events)

    def _parse_lines(self, block: bytes, events: list[AnyModelEvent]) -> bytes:
        """Read until the end, or until the rest is to be read in another way; that rest."""
        lines = block.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(b"data:"):
                if self._parse_data(line[5:], events):
                    return b"\n".join(lines[number + 1 :]).lstrip(b"\n")
                if self.is_over:
                    break
            elif self._data_lines and not line.strip() and number + 1 < len(lines):
                data, self._data_lines, self._data_bytes = b"\n".join(self._data_lines), [], 0
                self._parse_leniently(data, events)
        return b""

    def _parse_data(self, payload: bytes, events: list[AnyModelEvent]) -> bool:
        if self._data_lines:
            self._append_data_line(payload)
            return False
        if len(payload) >= WORKER_THRESHOLD_BYTES and self._exceeds_value_limit(payload):
            return False
        try:
            told = self._decoder.decode(payload)
        except (ValueError, RecursionError):  # also every error of msgspec
            if payload.strip() == b"[DONE]" and self._has_event:
                self._finish_turn(events)
            else:
                self._append_data_line(payload)  # more of it may be on the next line
            return False
        return self._handle_event(told, payload, events)

    def _append_data_line(self, payload: bytes) -> None:
        self._data_lines.append(payload)
        self._data_bytes += len(payload) + _LINE_COST
        if self._data_bytes > self._max_line_bytes:
            self._data_lines, self._data_bytes = [], 0
            self.failure = self._errors.invalid_response(
                f"it sent an event of more than {self._max_line_bytes} bytes"
            )

    def _exceeds_value_limit(self, payload: bytes) -> bool:
        if not has_too_many_values(payload):
            return False
        self.failure = self._errors.invalid_response(f"it sent more than {MAX_VALUES} values at once")
        return True

    def _parse_leniently(self, payload: bytes, events: list[AnyModelEvent]) -> None:
        """A payload that was not easy to read: odd types, bytes that are not UTF-8, halves of surrogate pairs."""
        if len(payload) >= WORKER_THRESHOLD_BYTES and self._exceeds_value_limit(payload):
            return
        try:
            try:
                told = self._decoder.decode(payload)
            except (ValueError, RecursionError):
                told = _decode_leniently(payload, self._decoder)
        except (ValueError, RecursionError) as error:
            if not self._body_ended and not self._is_ignorable(payload):  # it may also have been cut off
                self.failure = self._errors.invalid_response(str(error))
            return
        self._handle_event(told, b"", events)


def _decode_leniently[Told](payload: bytes, decoder: msgspec.json.Decoder[Told]) -> Told:
    """What can be read of it; raises ValueError."""
    if len(payload) > _MAX_LENIENT_BYTES:
        raise ValueError("it is too long for something that is not quite JSON")
    value = json.loads(
        payload.decode(errors="replace"),
        parse_float=_parse_finite_number,
        parse_int=_parse_finite_number,
        parse_constant=_parse_constant,
    )
    whole = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return msgspec.json.decode(whole, type=decoder.type, strict=False)


def _parse_finite_number(digits: str) -> float | None:
    number = float(digits) if len(digits) > 18 or not digits.lstrip("-").isdigit() else int(digits)
    return number if math.isfinite(number) else None


def _parse_constant(_: str) -> None:
    return None


def split_large_deltas(events: Sequence[AnyModelEvent]) -> Iterator[Sequence[AnyModelEvent]]:
    """The same events in batches of which none is long: what came at once is told bit by bit."""
    for event in events:
        if (
            isinstance(event, ModelTextDelta | ModelReasoningDelta | ModelCallArgumentsDelta)
            and len(event.delta) > _MAX_DELTA_CHARS
        ):
            logprobs = event.logprobs if isinstance(event, ModelTextDelta) else []
            for start in range(0, len(event.delta), _MAX_DELTA_CHARS):
                piece = replace(event, delta=event.delta[start : start + _MAX_DELTA_CHARS])
                yield [piece if not start or not logprobs else replace(piece, logprobs=[])]
        else:
            yield [event]


def clamp_token_count(reported: float | None) -> int:
    """A number of tokens as it was told, if it can be one."""
    return (
        min(max(0, int(reported)), MAX_TOKEN_COUNT) if reported is not None and math.isfinite(reported) else 0
    )


def arguments_to_json(arguments: str | dict[str, object] | None) -> str:
    """The arguments of a call, which some servers give as an object."""
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""
