"""The events of a run, and refusals, as messages of a WebSocket.

What they look like is said here down to the bytes of the frames: every streamed token is one of these.
"""

from collections.abc import Collection, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.gateway.request_context import encode_json, error_headers
from fumehood.gateway.streaming.event_sender import NEEDS_PROJECTION
from fumehood.http_server.asgi_request import Headers
from fumehood.protocol.openai.api_errors import ApiError, ErrorDetail, to_error_detail
from fumehood.protocol.openai.response_projection import project_event
from fumehood.protocol.openai.stream_events import OutputTextDelta, StreamEvent

_encode_into = msgspec.json.Encoder().encode_into
# The head of a text message of 126 to 65535 bytes, which most are; the length is written when it is known.
_FRAME_HEADER = b"\x81\x7e\0\0"


class _ErrorMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """An error that is the whole answer to a request.

    headers: what would have stood in the head of an HTTP answer, for clients that mind it.
    """

    status: int
    error: ErrorDetail
    headers: dict[str, str] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


class WebSocketEncoder:
    """The `Wire` of a lane: every event a text message, all of a batch in one piece."""

    def __init__(self, stream_id: str | None = None) -> None:
        self._stream_id = UNSET if stream_id is None else stream_id
        self._stream_id_suffix = b"" if stream_id is None else b',"stream_id":%s}' % encode_json(stream_id)

    def encode_batch(
        self, events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
    ) -> tuple[bytearray, int]:
        buffer = bytearray()
        tail = self._stream_id_suffix
        number = 0
        for event in events:
            number += 1
            start = len(buffer)
            buffer += _FRAME_HEADER
            if NEEDS_PROJECTION[type(event)] or (isinstance(event, OutputTextDelta) and event.logprobs):
                event = project_event(event, include)
            _encode_into(event, buffer, -1)
            if tail:
                buffer[-1:] = tail
            size = len(buffer) - start - 4
            if 126 <= size < 65536:
                buffer[start + 2] = size >> 8
                buffer[start + 3] = size & 255
            else:
                buffer[start : start + 4] = _frame_header(size)
            if len(buffer) >= max_bytes:
                break
        return buffer, number

    def append_end(self, last: bytearray) -> bytearray:
        return last

    def encode_error(self, error: ApiError, headers: Headers | None = None) -> bytearray:
        """`headers`: besides those that belong to the error."""
        detail = to_error_detail(error)
        if detail.code is None:  # there has to be one
            detail = msgspec.structs.replace(detail, code=detail.type)
        told = {name.decode(): value.decode() for name, value in (headers or []) + error_headers(error)}
        return encode_text_message(
            _ErrorMessage(status=error.status, error=detail, headers=told or UNSET, stream_id=self._stream_id)
        )


def encode_text_message(value: object) -> bytearray:
    """One text message."""
    body = encode_json(value)
    return bytearray(_frame_header(len(body)) + body)


def _frame_header(size: int) -> bytes:
    if size < 126:
        return bytes((0x81, size))
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2)
    return b"\x81\x7f" + size.to_bytes(8)
