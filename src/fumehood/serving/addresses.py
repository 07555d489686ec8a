"""Which addresses others may have us connect to; imports only the standard library."""

import ipaddress
import socket
from collections.abc import Iterable

type Address = ipaddress.IPv4Address | ipaddress.IPv6Address
type Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Told in full instead of asked of `ipaddress`, whose idea of "global" changed between versions of Python.
_REFUSED_4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT; some clouds' metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's metadata has a public address
        "169.254.0.0/16",  # link-local, clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")  # everything else is local, multicast or unassigned
_REFUSED_6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: carries an IPv4 address
        "3fff::/20",  # documentation
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)


def networks(written: Iterable[str]) -> tuple[Network, ...]:
    """An operator's list; ValueError names what is no network."""
    return tuple(ipaddress.ip_network(entry) for entry in written)


class Addresses:
    """Public addresses that are not this machine's, and what the operator allows besides."""

    def __init__(self, private: tuple[Network, ...] = ()) -> None:
        self._private = private

    def allowed(self, text: str) -> bool:
        if "%" in text:  # a scope: link-local
            return False
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if any(address in network for network in self._private):
            return True
        return is_public(address) and not is_own(address)


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _REFUSED_4)
    if address in _NAT64:  # where DNS64 is in use, every IPv4 address looks like this
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address not in _UNICAST_6 or any(address in network for network in _REFUSED_6):
        return False
    return (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP


def is_own(address: Address) -> bool:
    """Whether this machine answers there itself: the kernel would then send from that very address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # a datagram socket: nothing is sent
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # no way there at all: connecting will say so
