"""TLS ClientHellos: real, fragmented, and invalid ones."""

import itertools
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.egress.tls_client_hello import (
    InvalidClientHello,
    parse_record_length,
    parse_server_name,
)


def real_hello(name: str | None, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> bytes:
    """What Python's own client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = minimum
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def vector(size: int, body: bytes) -> bytes:
    return len(body).to_bytes(size) + body


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2) + vector(2, body)


def name_extension(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def hello(
    extensions: bytes, *, session: bytes = b"", ciphers: bytes = b"\x13\x01", after: bytes = b""
) -> bytes:
    return (
        b"\x03\x03"
        + bytes(32)
        + vector(1, session)
        + vector(2, ciphers)
        + vector(1, b"\0")
        + vector(2, extensions)
        + after
    )


def records(body: bytes, *cuts: int, kind: int = 1) -> bytes:
    """The message in records that end at these places."""
    message = bytes([kind]) + vector(3, body)
    edges = [0, *cuts, len(message)]
    pieces = [message[a:b] for a, b in itertools.pairwise(edges)]
    return b"".join(b"\x16\x03\x01" + vector(2, piece) for piece in pieces)


GOOD = hello(extension(10, b"\0\0") + name_extension(b"example.org") + extension(16, b"\0\0"))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_real_one(version: ssl.TLSVersion) -> None:
    data = real_hello("example.org", version)
    assert parse_server_name(data) == "example.org"
    assert parse_server_name(data + b"\x14\x03\x03\x00\x01\x01") == "example.org"
    for cut in range(len(data)):
        assert parse_server_name(data[:cut]) is None


def test_a_real_one_without_a_name() -> None:
    with pytest.raises(InvalidClientHello, match="names no server"):
        parse_server_name(real_hello(None))


@given(st.sets(st.integers(1, len(GOOD) + 3), max_size=15))
def test_in_several_records(cuts: set[int]) -> None:
    assert parse_server_name(records(GOOD, *sorted(cuts))) == "example.org"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (records(hello(b"")), "names no server"),
        (records(hello(name_extension(b"a.org", b"b.org"))), "does not name one server"),
        (records(hello(name_extension(b"a.org") + name_extension(b"b.org"))), "appears twice"),
        (records(hello(name_extension(b""))), "does not name one server"),
        (records(hello(name_extension(b"a.org", kind=1))), "malformed"),
        (records(hello(name_extension("ä.org".encode()))), "not ASCII"),
        (records(hello(name_extension(b"a.org") + extension(0xFE0D, b"\1"))), "ECH"),
        (records(hello(name_extension(b"a.org") + extension(0xFFCE, b""))), "ECH"),
        (records(hello(name_extension(b"a.org"), after=b"x")), "follows the extensions"),
        (records(hello(name_extension(b"a.org"), session=bytes(33))), "malformed"),
        (records(hello(name_extension(b"a.org"), ciphers=b"\x13")), "malformed"),
        (records(hello(name_extension(b"a.org"))[:-1]), "truncated"),
        (records(GOOD, kind=2), "not a ClientHello"),
        (records(GOOD, *range(1, 40)), "too many records"),
        (b"\x16\x03\x01\x00\x00" * 4, "invalid length"),
        (b"\x16\x03\x01\x40\x01", "invalid length"),
        (b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", "too long"),
        (b"GET / HTTP/1.1\r\n\r\n", "not TLS"),
        (b"SSH-2.0-x\r\n", "not TLS"),
        (b"\x80\x2e\x01\x00\x02" + bytes(40), "not TLS"),  # as SSL 2 began
        (b"\x17\x03\x03\x00\x05hello", "not TLS"),
        (b"\x16\x02\x00\x00\x05hello", "not TLS"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidClientHello, match=reason):
        parse_server_name(data)


def test_something_after_the_hello_in_its_record() -> None:
    message = b"\x01" + vector(3, GOOD) + b"\x0b"
    with pytest.raises(InvalidClientHello, match="follows the ClientHello"):
        parse_server_name(b"\x16\x03\x01" + vector(2, message))


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    """A name, more bytes, or BadHello: nothing else."""
    for candidate in (data, records(data), b"\x16\x03\x01" + data):
        try:
            name = parse_server_name(candidate)
        except InvalidClientHello:
            continue
        assert name is None or (name and name.isascii())


@given(st.data())
def test_a_changed_byte_never_yields_another_name_by_accident(data: st.DataObject) -> None:
    """With one byte changed outside of the name, the answer is the name or a refusal."""
    whole = bytearray(records(GOOD))
    place = data.draw(st.integers(0, len(whole) - 1))
    start = whole.index(b"example.org")
    whole[place] = data.draw(st.integers(0, 255))
    try:
        name = parse_server_name(bytes(whole))
    except InvalidClientHello:
        return
    if not start <= place < start + 11:
        assert name in ("example.org", None)


def test_the_length_of_a_record() -> None:
    assert parse_record_length(b"\x16\x03\x01\x01\x02") == 258
