"""Forms with a file in them, read as they come; imports python_multipart, `protocol` and siblings.

Nothing of a file is held here: its pieces are passed on while it arrives. Fields may stand before and after it, are
few and small, and a form that does not end as it has to is refused, however much of it was good.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fumehood.gateway.exchange import Exchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name
from fumehood.serving.browsers import media_type

OVERHEAD = 1 << 20
"""How many bytes of a form may be something else than its file."""

_MULTIPART = b"multipart/form-data"
_MOST_PARTS = 64
_MOST_HEADERS = 16
_LONGEST_HEADER = 8 << 10
_FIELD_BYTES = 256 << 10  # of all fields together
_AS_THEY_ARE = (b"", b"7bit", b"8bit", b"binary")

# What is wrong with a form is its sender's affair, and no line of a log.
_silence = logging.getLogger(f"{__name__}.parser")
_silence.disabled = True


def is_form(exchange: Exchange) -> bool:
    """Whether the body says that it is one."""
    return media_type(exchange.headers) == _MULTIPART


class Form:
    """A form that may have one file, in the part `file`. What reads it raises InvalidRequest, BodyTooLarge,
    BodyTooSlow, CallerLeft.

    fields: those that have come so far; all of them, once the content was read to its end.
    filename: what the client calls the file; None until it has come.
    ended: whether all of it was there.
    """

    def __init__(self, exchange: Exchange, file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.ended = False
        self._body = exchange.pieces(file_bytes + OVERHEAD)
        self._parser = self._made(exchange.headers.get(b"content-type", b""))
        self._content: deque[bytes] = deque()
        self._parts = 0
        self._room = _FIELD_BYTES
        self._header_name = self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._in_file = False
        self._field: str = ""
        self._value = bytearray()

    async def reach_file(self) -> bool:
        """Read up to the file; False if the form ends without one."""
        while self.filename is None and await self._read():
            pass
        return self.filename is not None

    async def content(self) -> AsyncGenerator[bytes]:
        """The file as it comes; then the rest of the form was read, too."""
        async with aclosing(self._body):
            while True:
                while self._content:
                    yield self._content.popleft()
                if not await self._read():
                    return

    async def _read(self) -> bool:
        """One more piece of the body; False if there is none, and the form was whole."""
        piece = await anext(self._body, None)
        try:
            if piece is not None:
                self._parser.write(piece)
                return True
        except FormParserError as error:
            raise InvalidRequest(f"The form cannot be read: {clean_name(str(error))}.") from None
        if not self.ended:
            raise InvalidRequest("The form breaks off: there is no boundary at its end.")
        return False

    # ---- what the parser tells --------------------------------------------------------------------------------

    def _made(self, content_type: bytes) -> MultipartParser:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != _MULTIPART or not boundary:
            raise InvalidRequest("Send a form: Content-Type: multipart/form-data; boundary=….")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_begin": self._header_begins,
                    "on_header_field": self._header_name_comes,
                    "on_header_value": self._header_value_comes,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data_comes,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
                max_header_count=_MOST_HEADERS,
                max_header_size=_LONGEST_HEADER,
            )
        except FormParserError as error:
            raise InvalidRequest(f"The form cannot be read: {error}.") from None
        parser.logger = _silence
        return parser

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidRequest(f"A form has at most {_MOST_PARTS} parts.")
        self._headers = {}

    def _header_begins(self) -> None:
        self._header_name = self._header_value = b""

    def _header_name_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("Every part of a form says Content-Disposition: form-data; name=….")
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in _AS_THEY_ARE:
            raise InvalidRequest("The parts of a form are sent as they are, without an encoding.")
        self._field = options[b"name"].decode("utf-8", "replace")
        self._in_file = b"filename" in options
        if self._in_file:
            self._file_begins(options[b"filename"].decode("utf-8", "replace"))
        elif self._field in self.fields:
            raise self._refused("is there twice")

    def _file_begins(self, filename: str) -> None:
        if self._field != "file":
            raise self._refused("is no file; that is called 'file'")
        if self.filename is not None:
            raise self._refused("is there twice; send one file at a time")
        self.filename = filename

    def _data_comes(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._content.append(data[start:end])
            return
        self._room -= end - start
        if self._room < 0:
            raise self._refused("is too long")
        self._value += data[start:end]

    def _part_ends(self) -> None:
        if self._in_file:
            return
        try:
            self.fields[self._field] = self._value.decode()
        except UnicodeDecodeError:
            raise self._refused("is not UTF-8 text") from None
        self._value.clear()

    def _form_ends(self) -> None:
        self.ended = True

    def _refused(self, what: str) -> InvalidRequest:
        name = clean_name(self._field, 80)
        return InvalidRequest(f"'{name}' {what}.", param=name, code="invalid_value")
