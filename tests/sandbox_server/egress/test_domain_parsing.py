"""Normalised domain names; IP addresses are not domains."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.egress.domain_parsing import (
    InvalidDomainName,
    RequestTarget,
    parse_authority,
    parse_domain_name,
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("example.org", "example.org"),
        ("EXAMPLE.Org.", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("a_b.example", "a_b.example"),
        ("1and1.com", "1and1.com"),
        ("localhost", "localhost"),
        ("ｅｘａｍｐｌｅ.org", "example.org"),  # noqa: RUF001 - what a browser makes of it, too
    ],
)
def test_spellings(written: str, meant: str) -> None:
    assert parse_domain_name(written) == meant


@pytest.mark.parametrize(
    "written",
    [
        *("", ".", "..", "a..b", ".example.org", "example.org..", "*.example.org", "*", "-a.org", "a-.org"),
        *(
            "a b.org",
            "a\n.org",
            "a\0.org",
            "a/b.org",
            "a@b.org",
            "a:80",
            "a%2e.org",
            "a" * 64 + ".org",
            "a." * 128,
        ),
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "1.2.3.4.", "a.1", "0x"),
        *("[::1]", "::1", "::ffff:127.0.0.1", "[fe80::1%25lo]"),
        *("straße.example", "a\u200db.example", "１２７.0.0.1"),  # noqa: RUF001 - full width
    ],
)
def test_no_domain(written: str) -> None:
    with pytest.raises(InvalidDomainName):
        parse_domain_name(written)


@given(st.text(max_size=80))
def test_what_is_accepted_is_final(text: str) -> None:
    try:
        name = parse_domain_name(text)
    except InvalidDomainName:
        return
    assert parse_domain_name(name) == name
    assert parse_domain_name(name.upper() + ".") == name
    assert name.isascii()
    assert name == name.lower()
    assert not set(name) & set("/:@%[]*?# \r\n\0")


@given(st.ip_addresses())
def test_no_address_is_a_domain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    for spelling in (
        str(address),
        hex(int(address)),
        str(int(address)),
        f"0{int(address):o}",
        f"[{address}]",
    ):
        with pytest.raises(InvalidDomainName):
            parse_domain_name(spelling)


@given(st.from_regex(r"[0-9a-fx.]{1,20}", fullmatch=True))
def test_what_the_resolver_reads_as_an_address_is_none(text: str) -> None:
    try:
        socket.inet_aton(text)
    except OSError:
        return
    with pytest.raises(InvalidDomainName):
        parse_domain_name(text)


def test_authorities() -> None:
    assert parse_authority("Example.org:8443", default_port=None) == RequestTarget("example.org", 8443)
    assert parse_authority("example.org", default_port=80) == RequestTarget("example.org", 80)


@pytest.mark.parametrize(
    "written",
    [
        *("a.org", "a.org:", "a.org:0", "a.org:65536", "a.org:+80", "a.org:8 0", "a.org:٨٠", "a.org:80:80"),
        *("user@a.org:80", "[::1]:80", ":80", "a.org:080000", "ä.org:80"),
    ],
)
def test_no_authority(written: str) -> None:
    with pytest.raises(InvalidDomainName):
        parse_authority(written, default_port=None)
