"""Relays the body of a chat completions stream in whole events, within the limits of every model response."""

import re

import msgspec
from msgspec import Raw

from fumehood.models.upstream.stream_parser import (
    EVENT_COST,
    MAX_BYTES_WITHOUT_EVENT,
    MAX_IGNORED_BYTES,
    MAX_LINE_BYTES,
    MAX_RESPONSE_BYTES,
    make_usage,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.responses import Usage

_EVENT_END = b"\n\n"
_DONE = b"[DONE]"
_DONE_EVENT = b"data: [DONE]\n\n"
_DATA_LINE = re.compile(rb"^data:(.*)$", re.MULTILINE)  # finds them without a step for every other line
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"')


class _ReportedUsage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    total_tokens: float | None = None


class _Payload(msgspec.Struct):
    """What the gateway reads of a chunk or a document. Both fields may be any JSON value."""

    error: Raw = Raw(b"null")
    usage: Raw = Raw(b"null")


_payload_decoder = msgspec.json.Decoder(_Payload)
_usage_decoder = msgspec.json.Decoder(_ReportedUsage)
_raw_decoder = msgspec.json.Decoder(Raw)
_NO_ERROR = (b"null", b'""', b"false", b"{}")


def read_payload(payload: bytes, errors: UpstreamErrorFactory) -> tuple[Usage | None, ModelError | None]:
    """The usage of a chunk or a document, and its error. One that cannot be decoded is an error."""
    try:
        decoded = _payload_decoder.decode(payload)
    except (ValueError, RecursionError):
        return None, errors.invalid_response("it sent JSON that cannot be decoded")
    error = None if bytes(decoded.error) in _NO_ERROR else errors.from_event(payload)
    return read_usage(bytes(decoded.usage)), error


def read_usage(usage: bytes) -> Usage | None:
    """The usage in a JSON object of token counts; None for anything else."""
    try:
        reported = _usage_decoder.decode(usage)
    except (ValueError, RecursionError):
        return None
    return make_usage(reported.prompt_tokens, reported.completion_tokens, reported.total_tokens, None, None)


def _is_whole_event(event: bytes) -> bool:
    """Whether the data of an event without its blank line is complete."""
    payload = b"\n".join(_DATA_LINE.findall(event)).strip()
    try:
        return payload == _DONE or bool(_raw_decoder.decode(payload))
    except (ValueError, RecursionError):
        return False


class EventStreamRelay:
    """Splits a stream into whole events. Call `feed` with each chunk of the body, then `finish`.

    Both return bytes that can be sent in one write. Payloads are not changed; an error of the server is not relayed but
    becomes `failure`.

    failure: the error that ended the stream; earlier events are valid.
    is_over: whether the server has sent [DONE], or failed.
    usage: the last one that the server has reported.
    """

    def __init__(self, errors: UpstreamErrorFactory) -> None:
        self.failure: ModelError | None = None
        self.usage: Usage | None = None
        self._errors = errors
        self._buffer: list[bytes] = []  # an incomplete event
        self._buffer_bytes = 0
        self._ends_with_return = False  # the last chunk ended between CR and LF, or with CR
        self._bytes_left = MAX_RESPONSE_BYTES
        self._bytes_without_event = 0
        self._ignored_bytes = 0
        self._has_event = False
        self._has_finish_reason = False
        self._is_done = False

    @property
    def is_over(self) -> bool:
        return self._is_done or self.failure is not None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for the end of their event."""
        return self._buffer_bytes

    def feed(self, chunk: bytes) -> bytes:
        """The events that this chunk completes."""
        if self.is_over:
            return b""
        self._bytes_left -= len(chunk)
        if self._bytes_left < 0:
            self.failure = self._errors.response_too_large()
            return b""
        if b"\r" in chunk or self._ends_with_return:
            chunk = self._normalize_line_ends(chunk)
        # An event may end with a line break of the last chunk and one of this.
        overlap = 1 if self._buffer and self._buffer[-1].endswith(b"\n") and chunk.startswith(b"\n") else 0
        cut = chunk.rfind(_EVENT_END)
        cut = cut + 2 if cut >= 0 else overlap
        if not cut:
            self._append_to_buffer(chunk)
            return b""
        block = b"".join([*self._buffer, chunk[:cut]])
        self._buffer, self._buffer_bytes = [], 0
        self._append_to_buffer(chunk[cut:])
        return self._check_events(block)

    def finish(self) -> bytes:
        """What is left at the end of the body, completed; nothing if it was cut off."""
        if self.is_over:
            return b""
        rest = b"".join(self._buffer).strip(b"\n")
        events = self._check_events(rest + _EVENT_END) if _is_whole_event(rest) else b""
        if self.is_over:
            return events
        if self._has_finish_reason:
            return events + _DONE_EVENT
        self.failure = (
            self._errors.disconnected()
            if self._has_event
            else self._errors.invalid_response("its response is empty or no stream of events")
        )
        return events

    def _normalize_line_ends(self, chunk: bytes) -> bytes:
        """Make LF of CRLF and CR. A CR at the end of a chunk waits for the next."""
        if self._ends_with_return:
            chunk = b"\r" + chunk
        self._ends_with_return = chunk.endswith(b"\r")
        if self._ends_with_return:
            chunk = chunk[:-1]
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _append_to_buffer(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._buffer.append(chunk)
        self._buffer_bytes += len(chunk)
        if self._buffer_bytes > MAX_LINE_BYTES:
            self._buffer, self._buffer_bytes = [], 0
            self.failure = self._errors.invalid_response(
                f"it sent an event of more than {MAX_LINE_BYTES} bytes"
            )

    def _check_events(self, block: bytes) -> bytes:
        """The events of the block, up to [DONE] or to an error of the server."""
        data_bytes = 0
        for line in _DATA_LINE.finditer(block):
            self._check_payload(line[1])
            if self._is_done:
                return block[: line.start()] + _DONE_EVENT
            if self.failure is not None:
                end = block.rfind(_EVENT_END, 0, line.start())
                return block[: end + 2] if end >= 0 else b""
            data_bytes += line.end() - line.start()
        self._count_without_event(len(block) - data_bytes)
        return block

    def _check_payload(self, payload: bytes) -> None:
        if b'"choices"' in payload:
            self._has_event = True
            self._bytes_without_event = self._ignored_bytes = 0
            if not self._has_finish_reason:
                self._has_finish_reason = _FINISH_REASON.search(payload) is not None
        elif payload.strip() == _DONE:
            self._is_done = self._has_event
            if not self._has_event:
                self.failure = self._errors.invalid_response("its stream has no events")
            return
        else:
            self._count_ignored(payload)
        if b'"error"' in payload:
            usage, error = read_payload(payload, self._errors)
            self.failure = self.failure or error
        elif b'"usage"' in payload:
            usage, _ = read_payload(payload, self._errors)
        else:
            return
        self.usage = usage or self.usage

    def _count_without_event(self, size: int) -> None:
        """Limit data without events: it resets the read timeout, so a server could send it forever."""
        self._bytes_without_event += size
        if self._bytes_without_event > MAX_BYTES_WITHOUT_EVENT:
            self.failure = self._errors.no_progress(
                f"more than {MAX_BYTES_WITHOUT_EVENT} bytes without an event"
            )

    def _count_ignored(self, payload: bytes) -> None:
        self._ignored_bytes += len(payload) + EVENT_COST
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            self.failure = self._errors.no_progress("too many events of unknown types")
