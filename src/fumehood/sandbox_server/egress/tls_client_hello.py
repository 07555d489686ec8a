"""Reads the server name from a TLS ClientHello.

Strict on purpose: whatever the server might parse differently is refused.
"""

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_MAX_RECORD = 1 << 14
_MAX_HELLO = 1 << 15
_MAX_RECORDS = 16
RECORD_HEADER = 5
_SERVER_NAME = 0
_HOST_NAME = 0
# The outer name of an encrypted ClientHello is not the real one. GREASE looks the same, by design.
_ECH_EXTENSIONS = {0xFE0D, 0xFFCE}


class InvalidClientHello(Exception):
    """Not a ClientHello that names its server; the text says why."""


def parse_server_name(data: bytes) -> str | None:
    """Return the server name as sent, or None if more bytes are needed. Raises InvalidClientHello."""
    message = _join_records(data)
    return None if message is None else _parse_client_hello(message)


def _join_records(data: bytes) -> bytes | None:
    """Return the body of the first handshake message, joined from its records, or None if it is incomplete."""
    message = bytearray()
    start = 0
    for _ in range(_MAX_RECORDS + 1):
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise InvalidClientHello("the first message is not a ClientHello")
            length = 4 + int.from_bytes(message[1:4])
            if length > _MAX_HELLO:
                raise InvalidClientHello("the ClientHello is too long")
            if len(message) > length:
                raise InvalidClientHello("something follows the ClientHello in its record")
            if len(message) == length:
                return bytes(message[4:])
        header = data[start : start + RECORD_HEADER]
        if len(header) < RECORD_HEADER:
            return None
        start += RECORD_HEADER
        length = parse_record_length(header)
        fragment = data[start : start + length]
        if len(fragment) < length:
            return None
        message += fragment
        start += length
    raise InvalidClientHello("the ClientHello has too many records")


def parse_record_length(header: bytes) -> int:
    """Return how many bytes follow the header of a handshake record. Raises InvalidClientHello."""
    if header[0] != _HANDSHAKE or header[1] != 3 or header[2] not in (1, 2, 3):
        raise InvalidClientHello("it is not TLS")
    length = int.from_bytes(header[3:5])
    if not 0 < length <= _MAX_RECORD:
        raise InvalidClientHello("a record has an invalid length")
    return length


class _FieldReader:
    """Reads fields one after another. Raises InvalidClientHello for an incomplete field."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def read(self, count: int) -> bytes:
        field = self._data[self._at : self._at + count]
        if len(field) < count:
            raise InvalidClientHello("the ClientHello is truncated")
        self._at += count
        return field

    def read_number(self, size: int) -> int:
        return int.from_bytes(self.read(size))

    def read_vector(self, size: int) -> bytes:
        return self.read(self.read_number(size))


def _parse_client_hello(hello: bytes) -> str:
    reader = _FieldReader(hello)
    reader.read(2 + 32)  # version, random
    session, ciphers, compression = reader.read_vector(1), reader.read_vector(2), reader.read_vector(1)
    if len(session) > 32 or not ciphers or len(ciphers) % 2 or not compression:
        raise InvalidClientHello("the ClientHello is malformed")
    if not reader:
        raise InvalidClientHello("the ClientHello names no server")
    extensions = _parse_extensions(reader.read_vector(2))
    if reader:
        raise InvalidClientHello("something follows the extensions")
    if _ECH_EXTENSIONS & extensions.keys():
        raise InvalidClientHello("the ClientHello is encrypted (ECH)")
    if _SERVER_NAME not in extensions:
        raise InvalidClientHello("the ClientHello names no server")
    return _parse_host_name(extensions[_SERVER_NAME])


def _parse_extensions(data: bytes) -> dict[int, bytes]:
    reader = _FieldReader(data)
    found: dict[int, bytes] = {}
    while reader:
        kind, body = reader.read_number(2), reader.read_vector(2)
        if kind in found:
            raise InvalidClientHello("an extension appears twice")
        found[kind] = body
    return found


def _parse_host_name(extension: bytes) -> str:
    outer = _FieldReader(extension)
    names = _FieldReader(outer.read_vector(2))
    if outer or names.read_number(1) != _HOST_NAME:
        raise InvalidClientHello("the server's name is malformed")
    name = names.read_vector(2)
    if names or not name:
        raise InvalidClientHello("the ClientHello does not name one server")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise InvalidClientHello("the server's name is not ASCII") from None
