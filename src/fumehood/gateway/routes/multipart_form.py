"""Parses multipart/form-data with one file, as a stream.

The file is passed on in chunks while it arrives. Fields may precede and follow it. An incomplete form is an error.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.http_server.cross_site_protection import content_media_type
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest

MAX_OVERHEAD_BYTES = 1 << 20
"""Size limit of a form without its file."""

_MULTIPART = b"multipart/form-data"
_MAX_PARTS = 64
_MAX_HEADERS = 16
_MAX_HEADER_BYTES = 8 << 10
_MAX_FIELD_BYTES = 256 << 10  # of all fields together
_IDENTITY_ENCODINGS = (b"", b"7bit", b"8bit", b"binary")

# Client errors do not belong in the log.
_disabled_logger = logging.getLogger(f"{__name__}.parser")
_disabled_logger.disabled = True


def is_multipart_form(exchange: GatewayExchange) -> bool:
    """Whether the Content-Type is multipart/form-data."""
    return content_media_type(exchange.headers) == _MULTIPART


class MultipartForm:
    """A form with at most one file, in the part `file`. Reading raises InvalidRequest, BodyTooLarge, BodyTimeout,
    ClientDisconnected.

    fields: the fields read so far; all of them once the file was read.
    filename: the client's name of the file; None until its part starts.
    is_complete: whether the whole form was read.
    """

    def __init__(self, exchange: GatewayExchange, file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._body = exchange.iter_chunks(file_bytes + MAX_OVERHEAD_BYTES)
        self._parser = self._make_parser(exchange.headers.get(b"content-type", b""))
        self._file_chunks: deque[bytes] = deque()
        self._part_count = 0
        self._field_bytes_left = _MAX_FIELD_BYTES
        self._header_name = self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._in_file = False
        self._field: str = ""
        self._value = bytearray()

    async def read_to_file(self) -> bool:
        """Read up to the file; False if the form ends without one."""
        while self.filename is None and await self._parse_next():
            pass
        return self.filename is not None

    async def iter_file(self) -> AsyncGenerator[bytes]:
        """Yield the file in chunks, then read the rest of the form."""
        async with aclosing(self._body):
            while True:
                while self._file_chunks:
                    yield self._file_chunks.popleft()
                if not await self._parse_next():
                    return

    async def _parse_next(self) -> bool:
        """Parse the next chunk of the body; False at its end."""
        chunk = await anext(self._body, None)
        try:
            if chunk is not None:
                self._parser.write(chunk)
                return True
        except FormParserError as error:
            raise InvalidRequest(f"Invalid form: {sanitize_name(str(error))}.") from None
        if not self.is_complete:
            raise InvalidRequest("Incomplete form: the final boundary is missing.")
        return False

    # ---- parser callbacks --------------------------------------------------------------------------------

    def _make_parser(self, content_type: bytes) -> MultipartParser:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != _MULTIPART or not boundary:
            raise InvalidRequest("Expected a form with Content-Type: multipart/form-data; boundary=….")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_begin": self._on_header_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise InvalidRequest(f"Invalid form: {error}.") from None
        parser.logger = _disabled_logger
        return parser

    def _on_part_begin(self) -> None:
        self._part_count += 1
        if self._part_count > _MAX_PARTS:
            raise InvalidRequest(f"The form has more than {_MAX_PARTS} parts.")
        self._headers = {}

    def _on_header_begin(self) -> None:
        self._header_name = self._header_value = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("Every part of a form needs Content-Disposition: form-data; name=….")
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in _IDENTITY_ENCODINGS:
            raise InvalidRequest("Content-Transfer-Encoding is not supported in forms; send parts unencoded.")
        self._field = options[b"name"].decode("utf-8", "replace")
        self._in_file = b"filename" in options
        if self._in_file:
            self._start_file(options[b"filename"].decode("utf-8", "replace"))
        elif self._field in self.fields:
            raise self._invalid_field("was sent twice")

    def _start_file(self, filename: str) -> None:
        if self._field != "file":
            raise self._invalid_field("must not be a file; send the file as 'file'")
        if self.filename is not None:
            raise self._invalid_field("was sent twice; send one file per request")
        self.filename = filename

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_chunks.append(data[start:end])
            return
        self._field_bytes_left -= end - start
        if self._field_bytes_left < 0:
            raise self._invalid_field("is too long")
        self._value += data[start:end]

    def _on_part_end(self) -> None:
        if self._in_file:
            return
        try:
            self.fields[self._field] = self._value.decode()
        except UnicodeDecodeError:
            raise self._invalid_field("is not UTF-8 text") from None
        self._value.clear()

    def _on_end(self) -> None:
        self.is_complete = True

    def _invalid_field(self, what: str) -> InvalidRequest:
        name = sanitize_name(self._field, 80)
        return InvalidRequest(f"'{name}' {what}.", param=name, code="invalid_value")
