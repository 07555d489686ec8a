"""Parses the response body of a model server: server-sent events, or one JSON document.

The parsers of the two APIs derive from this one and interpret the events.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.json_limits import MAX_VALUES, has_too_many_values
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelReasoningDelta,
    ModelTextDelta,
)
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.ids import MAX_ID_LENGTH
from fumehood.protocol.openai.responses import InputTokensDetails, OutputTokensDetails, Usage

MAX_LINE_BYTES = 1 << 25  # also the longest response that is not streamed
MAX_RESPONSE_BYTES = 1 << 29
MAX_CALLS = 128  # in one turn
MAX_TOKEN_COUNT = 1 << 48  # larger counts are clamped
# Limits between two events that the parser understands: comments, blank lines and fields other than `data`; and
# payloads of unknown events, which may be images.
MAX_BYTES_WITHOUT_EVENT = 1 << 20
MAX_IGNORED_BYTES = 1 << 26

_MAX_DELTA_CHARS = 1 << 16
_MAX_LENIENT_BYTES = 1 << 20  # the lenient decoder is slow
EVENT_COST = 1 << 10  # what an ignored event counts in addition to its bytes
_LINE_COST = 1 << 6  # what a line of an event counts in addition to its bytes
_BOM = b"\xef\xbb\xbf"
_short_text_decoder = msgspec.json.Decoder(Annotated[str, Meta(min_length=1, max_length=256)])


class MalformedOutput(ValueError):
    """Output that cannot be interpreted; the text says why."""


_MALFORMED = (MalformedOutput, msgspec.DecodeError, RecursionError)


class UpstreamStreamParser[Event](ABC):
    """Parses one turn. Call `feed` with each chunk of the body, then `finish`; both return the turn's events.

    failure: the error that ended the turn; earlier events are valid.
    has_ended: the turn is complete and its end was returned.
    awaits_usage: the model has stopped, and at most the usage is still to come.
    """

    def __init__(
        self,
        errors: UpstreamErrorFactory,
        decoder: msgspec.json.Decoder[Event],
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
        self._buffer: list[bytes] = []  # an incomplete line, or a document
        self._buffer_bytes = 0
        self._format_known = False
        self._is_document = False
        self._data_lines: list[bytes] = []  # of an event with several data lines
        self._data_bytes = 0
        self._bytes_without_event = 0  # since the last event
        self._ignored_bytes = 0
        self._has_event = False
        self._body_ended = False

    @property
    def awaits_usage(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        """Whether the turn has ended or failed."""
        return self.has_ended or self.failure is not None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for the end of their line or document."""
        return self._buffer_bytes + self._data_bytes

    # ---- for subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _handle_event(self, event: Event, payload: bytes, events: list[AnyModelEvent]) -> bool:
        """Append the events of one decoded payload. True if `_parse_block` must start again with the rest.

        Raises MalformedOutput, msgspec.DecodeError.
        """

    @abstractmethod
    def _finish_turn(self, events: list[AnyModelEvent]) -> None:
        """Append the end of the turn: the server sent [DONE], or closed the connection after a complete turn.

        Raises MalformedOutput.
        """

    @property
    @abstractmethod
    def _is_turn_complete(self) -> bool:
        """Whether the turn is complete if the body ends now."""

    def _is_ignorable(self, payload: bytes) -> bool:  # noqa: ARG002 - for subclasses
        """Whether an undecodable payload may be skipped."""
        return False

    # ---- bytes ------------------------------------------------------------------------------------------------

    def feed(self, chunk: bytes) -> list[AnyModelEvent]:
        """Parse the complete lines of the next chunk and buffer the rest."""
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
        try:
            self._parse_block(block, events)
        except _MALFORMED as error:
            self.failure = self._errors.invalid_response(str(error))
        if events:
            self._bytes_without_event = self._ignored_bytes = 0
        elif not self.is_over:
            self._count_eventless_block(block)
        return events

    def finish(self) -> list[AnyModelEvent]:
        """Parse the rest at the end of the body, and end the turn or fail."""
        events: list[AnyModelEvent] = []
        if self.is_over:
            return events
        self._body_ended = True
        rest = b"".join(self._buffer)
        try:
            if self._is_document:
                self._parse_leniently(rest, events)
            else:
                self._parse_lines(rest + b"\n\n", events)
            if not self.is_over and self._is_turn_complete:
                self._finish_turn(events)
        except _MALFORMED as error:
            self.failure = self._errors.invalid_response(str(error))
        if not self.is_over:
            self.failure = (
                self._errors.disconnected()
                if self._has_event
                else self._errors.invalid_response("its response is empty or of another kind")
            )
        return events

    def _detect_format(self, chunk: bytes) -> bytes:
        """Tell a stream from a document by the first bytes; returns the bytes still to be parsed."""
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
        """Limit data without events: it resets the read timeout, so a server could send it forever."""
        if self._is_document:
            return
        payloads = [line for line in block.split(b"\n") if line.startswith(b"data:")]
        size = sum(map(len, payloads))
        self._ignored_bytes += size + EVENT_COST * len(payloads)
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            self.failure = self._errors.no_progress("too many events of unknown types")
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
        """Parse complete lines."""
        while block and not self.is_over:
            block = self._parse_lines(block, events)

    def _parse_lines(self, block: bytes, events: list[AnyModelEvent]) -> bytes:
        """Parse lines until `_handle_event` asks for a restart; returns the lines not parsed."""
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
            event = self._decoder.decode(payload)
        except (ValueError, RecursionError):  # includes msgspec's errors
            if payload.strip() == b"[DONE]" and self._has_event:
                self._finish_turn(events)
            else:
                self._append_data_line(payload)  # the payload may go on in the next data line
            return False
        return self._handle_event(event, payload, events)

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
        """Parse a payload that may have wrong types, invalid UTF-8 or lone surrogates."""
        if len(payload) >= WORKER_THRESHOLD_BYTES and self._exceeds_value_limit(payload):
            return
        try:
            try:
                event = self._decoder.decode(payload)
            except (ValueError, RecursionError):
                event = _decode_leniently(payload, self._decoder)
        except (ValueError, RecursionError) as error:
            if not self._body_ended and not self._is_ignorable(
                payload
            ):  # at the end, it may have been cut off
                self.failure = self._errors.invalid_response(str(error))
            return
        self._handle_event(event, b"", events)


def _decode_leniently[Event](payload: bytes, decoder: msgspec.json.Decoder[Event]) -> Event:
    """Decode JSON with wrong types, invalid UTF-8 or NaN. Raises ValueError."""
    if len(payload) > _MAX_LENIENT_BYTES:
        raise ValueError("it is not valid JSON")
    value = json.loads(
        payload.decode(errors="replace"),
        parse_float=_parse_finite_number,
        parse_int=_parse_finite_number,
        parse_constant=_parse_constant,
    )
    cleaned = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return msgspec.json.decode(cleaned, type=decoder.type, strict=False)


def _parse_finite_number(digits: str) -> float | None:
    number = float(digits) if len(digits) > 18 or not digits.lstrip("-").isdigit() else int(digits)
    return number if math.isfinite(number) else None


def _parse_constant(_: str) -> None:
    return None


def split_large_deltas(events: Sequence[AnyModelEvent]) -> Iterator[Sequence[AnyModelEvent]]:
    """Yield the events one by one, with long deltas split."""
    for event in events:
        if (
            isinstance(event, ModelTextDelta | ModelReasoningDelta | ModelCallArgumentsDelta)
            and len(event.delta) > _MAX_DELTA_CHARS
        ):
            logprobs = event.logprobs if isinstance(event, ModelTextDelta) else []
            for start in range(0, len(event.delta), _MAX_DELTA_CHARS):
                part = replace(event, delta=event.delta[start : start + _MAX_DELTA_CHARS])
                yield [part if not start or not logprobs else replace(part, logprobs=[])]
        else:
            yield [event]


def decode_short_text(raw: msgspec.Raw) -> str | None:
    """A short text that a server reports, such as an id; None for anything else."""
    try:
        return _short_text_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None


class InputTokenDetails(msgspec.Struct):
    cached_tokens: float | None = None
    cache_write_tokens: float | None = None


class OutputTokenDetails(msgspec.Struct):
    reasoning_tokens: float | None = None


def make_usage(
    input_tokens: float | None,
    output_tokens: float | None,
    total_tokens: float | None,
    input_details: InputTokenDetails | None,
    output_details: OutputTokenDetails | None,
) -> Usage:
    """The usage that a server reports, with missing and impossible counts as 0."""
    read, written = _clamp_token_count(input_tokens), _clamp_token_count(output_tokens)
    input_details, output_details = (
        input_details or InputTokenDetails(),
        output_details or OutputTokenDetails(),
    )
    return Usage(
        input_tokens=read,
        input_tokens_details=InputTokensDetails(
            cached_tokens=_clamp_token_count(input_details.cached_tokens),
            cache_write_tokens=_clamp_token_count(input_details.cache_write_tokens),
        ),
        output_tokens=written,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=_clamp_token_count(output_details.reasoning_tokens)
        ),
        total_tokens=max(_clamp_token_count(total_tokens), read + written),
    )


def _clamp_token_count(reported: float | None) -> int:
    return (
        min(max(0, int(reported)), MAX_TOKEN_COUNT) if reported is not None and math.isfinite(reported) else 0
    )


class CallIdChooser:
    """Chooses the ids of the calls of a turn: the server's, or new ones if those are missing, too long or used.

    used_ids: of earlier turns.
    """

    def __init__(self, used_ids: Container[str], make_id: Callable[[str], str]) -> None:
        self._used_ids = used_ids
        self._make_id = make_id
        self._chosen_ids: set[str] = set()

    @property
    def count(self) -> int:
        """How many ids were chosen."""
        return len(self._chosen_ids)

    def choose(self, server_id: str | None) -> str:
        call_id = server_id
        if (
            not call_id
            or len(call_id) > MAX_ID_LENGTH
            or call_id in self._chosen_ids
            or call_id in self._used_ids
        ):
            call_id = self._make_id("call")
        self._chosen_ids.add(call_id)
        return call_id


def arguments_to_json(arguments: str | dict[str, object] | None) -> str:
    """The arguments of a call as text; some servers send an object."""
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""
