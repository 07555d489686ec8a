"""Reads the server's name out of a TLS ClientHello, or says why not; imports only the standard library.

Strict on purpose: whatever the far end might read in another way than this module is refused.
"""

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_LONGEST_RECORD = 1 << 14
_LONGEST_HELLO = 1 << 15
_MOST_RECORDS = 16
RECORD_HEADER = 5
_SERVER_NAME = 0
_HOST_NAME = 0
# The name in front of an encrypted hello is not the one that is meant. Random filling looks the same, by design.
_ENCRYPTED = {0xFE0D, 0xFFCE}


class BadHello(Exception):
    """What came is no ClientHello that tells whom it is for; the text says why."""


def server_name(data: bytes) -> str | None:
    """The name, as sent, or None while more bytes are needed; BadHello otherwise."""
    message = _handshake_message(data)
    return None if message is None else _name_in(message)


def _handshake_message(data: bytes) -> bytes | None:
    """The body of the first handshake message, put together from the records it was cut into."""
    message = bytearray()
    start = 0
    for _ in range(_MOST_RECORDS + 1):
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise BadHello("the first message is not a ClientHello")
            length = 4 + int.from_bytes(message[1:4])
            if length > _LONGEST_HELLO:
                raise BadHello("the ClientHello is too long")
            if len(message) > length:
                raise BadHello("something follows the ClientHello in its record")
            if len(message) == length:
                return bytes(message[4:])
        header = data[start : start + RECORD_HEADER]
        if len(header) < RECORD_HEADER:
            return None
        start += RECORD_HEADER
        length = record_length(header)
        fragment = data[start : start + length]
        if len(fragment) < length:
            return None
        message += fragment
        start += length
    raise BadHello("the ClientHello comes in too many records")


def record_length(header: bytes) -> int:
    """How many bytes follow the header of a handshake record."""
    if header[0] != _HANDSHAKE or header[1] != 3 or header[2] not in (1, 2, 3):
        raise BadHello("it is not TLS")
    length = int.from_bytes(header[3:5])
    if not 0 < length <= _LONGEST_RECORD:
        raise BadHello("a record has an impossible length")
    return length


class _Reader:
    """Takes fields off the front; a field that is not there in full is an error."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise BadHello("the ClientHello is cut short")
        self._at += count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))


def _name_in(hello: bytes) -> str:
    reader = _Reader(hello)
    reader.take(2 + 32)  # version, random
    session, ciphers, compression = reader.vector(1), reader.vector(2), reader.vector(1)
    if len(session) > 32 or not ciphers or len(ciphers) % 2 or not compression:
        raise BadHello("the ClientHello is malformed")
    if not reader:
        raise BadHello("the ClientHello names no server")
    extensions = _extensions(reader.vector(2))
    if reader:
        raise BadHello("something follows the extensions")
    if _ENCRYPTED & extensions.keys():
        raise BadHello("the ClientHello is encrypted (ECH)")
    if _SERVER_NAME not in extensions:
        raise BadHello("the ClientHello names no server")
    return _host_name(extensions[_SERVER_NAME])


def _extensions(data: bytes) -> dict[int, bytes]:
    reader = _Reader(data)
    found: dict[int, bytes] = {}
    while reader:
        kind, body = reader.number(2), reader.vector(2)
        if kind in found:
            raise BadHello("an extension comes twice")
        found[kind] = body
    return found


def _host_name(extension: bytes) -> str:
    outer = _Reader(extension)
    names = _Reader(outer.vector(2))
    if outer or names.number(1) != _HOST_NAME:
        raise BadHello("the server's name is malformed")
    name = names.vector(2)
    if names or not name:
        raise BadHello("the ClientHello does not name one server")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise BadHello("the server's name is not ASCII") from None
