"""IP addresses that the server never connects to."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.http_server.address_policy import (
    AddressPolicy,
    is_local_address,
    is_public_address,
    parse_networks,
)

PRIVATE_4 = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.1"),
    *("168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1"),
    *("192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9"),
    *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
)


@pytest.mark.parametrize("address", PRIVATE_4)
def test_not_public(address: str) -> None:
    assert not AddressPolicy().is_allowed(address)


@pytest.mark.parametrize("address", PRIVATE_4)
@pytest.mark.parametrize(
    "prefix", ["::ffff:", "::", "64:ff9b::", "64:ff9b:1::", "::ffff:0:", "2a00:1450::5efe:"]
)
def test_not_public_in_disguise(address: str, prefix: str) -> None:
    assert not AddressPolicy().is_allowed(prefix + address)
    six = int(ipaddress.IPv4Address(address))
    assert not AddressPolicy().is_allowed(f"2002:{six >> 16:x}:{six & 0xFFFF:x}::1")
    assert not AddressPolicy().is_allowed(f"2001:0:{six >> 16:x}:{six & 0xFFFF:x}::1")


@pytest.mark.parametrize(
    "address",
    [
        *("::", "::1", "fe80::1", "fe80::1%lo", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "100::1"),
        *("2001:db8::1", "3fff::1", "2001:2::1", "2001::1", "2002::1", "5f00::1", "4000::1", "64:ff9b:1::1"),
        *("", "localhost", "1.2.3", "0x7f.1", "1.2.3.4 "),
    ],
)
def test_no_address_to_connect_to(address: str) -> None:
    assert not AddressPolicy().is_allowed(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001::200e", "64:ff9b::101:101"]
)
def test_public(address: str) -> None:
    assert is_public_address(ipaddress.ip_address(address))


@given(st.ip_addresses())
def test_nothing_that_python_calls_private_is_public(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public_address(address) and address not in ipaddress.ip_network("64:ff9b::/96"):
        assert address.is_global
        assert not address.is_multicast


def test_this_machine_is_not_the_internet() -> None:
    assert is_local_address(ipaddress.ip_address("127.0.0.1"))
    assert not is_local_address(ipaddress.ip_address("192.0.2.1"))


def test_its_other_addresses_are_not_either() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback only")
        assert is_local_address(ipaddress.ip_address(probe.getsockname()[0]))


def test_what_the_operator_allows_besides() -> None:
    addresses = AddressPolicy(parse_networks(["10.1.0.0/16", "fd12::/16"]))
    assert addresses.is_allowed("10.1.2.3")
    assert addresses.is_allowed("fd12::5")
    assert not addresses.is_allowed("10.2.0.1")
    assert not addresses.is_allowed("::ffff:10.1.2.3")
    with pytest.raises(ValueError, match="host bits"):
        parse_networks(["10.1.0.1/16"])
