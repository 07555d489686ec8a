"""Which IP addresses the server may connect to on behalf of users."""

import ipaddress
import socket
from collections.abc import Iterable

type IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
type IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Listed here since `ipaddress.is_global` differs between Python versions.
_NON_PUBLIC_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; metadata of some clouds
        "127.0.0.0/8",
        "168.63.129.16/32",  # metadata of Azure
        "169.254.0.0/16",  # link-local; cloud metadata
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
_GLOBAL_UNICAST_IPV6 = ipaddress.IPv6Network("2000::/3")  # everything else is local, multicast or unassigned
_NON_PUBLIC_IPV6 = tuple(
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


def parse_networks(entries: Iterable[str]) -> tuple[IpNetwork, ...]:
    """Parse configured networks. Raises ValueError."""
    return tuple(ipaddress.ip_network(entry) for entry in entries)


class AddressPolicy:
    """Allows public addresses that are not this machine's, and `allowed_networks`."""

    def __init__(self, allowed_networks: tuple[IpNetwork, ...] = ()) -> None:
        self._allowed_networks = allowed_networks

    def is_allowed(self, text: str) -> bool:
        if "%" in text:  # a scope: link-local
            return False
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if any(address in network for network in self._allowed_networks):
            return True
        return is_public_address(address) and not is_local_address(address)


def is_public_address(address: IpAddress) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NON_PUBLIC_IPV4)
    if address in _NAT64:  # DNS64 embeds IPv4 addresses
        return is_public_address(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address not in _GLOBAL_UNICAST_IPV6 or any(address in network for network in _NON_PUBLIC_IPV6):
        return False
    return (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP


def is_local_address(address: IpAddress) -> bool:
    """Whether the address belongs to this machine: the kernel would then use it as the source address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # a datagram socket: nothing is sent
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # no route: connecting will fail
