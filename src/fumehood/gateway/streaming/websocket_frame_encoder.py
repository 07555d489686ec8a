"""Encodes events and errors as WebSocket text frames.

Frames are built by hand, since every streamed token is one: the batch of a run is one write.
"""

from collections.abc import Collection, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.gateway.gateway_exchange import encode_json, error_headers
from fumehood.gateway.streaming.event_sender import NEEDS_PROJECTION
from fumehood.http_server.asgi_exchange import Headers
from fumehood.protocol.openai.api_errors import ApiError, ErrorDetail, to_error_detail
from fumehood.protocol.openai.response_projection import project_event
from fumehood.protocol.openai.stream_events import OutputTextDelta, StreamEvent

_encode_into = msgspec.json.Encoder().encode_into
# The header of a frame of 126 to 65535 bytes, as most are; the length is filled in afterwards.
_FRAME_HEADER = b"\x81\x7e\0\0"


class _ErrorMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """An error response to a request.

    headers: the headers that the HTTP response would have.
    """

    status: int
    error: ErrorDetail
    headers: dict[str, str] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


class WebSocketEncoder:
    """The `EventEncoder` of a WebSocket stream: one text message per event."""

    def __init__(self, stream_id: str | None = None) -> None:
        self._stream_id = UNSET if stream_id is None else stream_id
        self._stream_id_suffix = b"" if stream_id is None else b',"stream_id":%s}' % encode_json(stream_id)

    def encode_batch(
        self, events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
    ) -> tuple[bytearray, int]:
        buffer = bytearray()
        suffix = self._stream_id_suffix
        number = 0
        for event in events:
            number += 1
            start = len(buffer)
            buffer += _FRAME_HEADER
            if NEEDS_PROJECTION[type(event)] or (isinstance(event, OutputTextDelta) and event.logprobs):
                event = project_event(event, include)
            _encode_into(event, buffer, -1)
            if suffix:
                buffer[-1:] = suffix
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
        """`headers`: additional headers of the error."""
        detail = to_error_detail(error)
        if detail.code is None:  # required here
            detail = msgspec.structs.replace(detail, code=detail.type)
        all_headers = {
            name.decode(): value.decode() for name, value in (headers or []) + error_headers(error)
        }
        return encode_text_message(
            _ErrorMessage(
                status=error.status, error=detail, headers=all_headers or UNSET, stream_id=self._stream_id
            )
        )


def encode_text_message(value: object) -> bytearray:
    """Encode one text message."""
    body = encode_json(value)
    return bytearray(_frame_header(len(body)) + body)


def _frame_header(size: int) -> bytes:
    if size < 126:
        return bytes((0x81, size))
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2)
    return b"\x81\x7f" + size.to_bytes(8)
