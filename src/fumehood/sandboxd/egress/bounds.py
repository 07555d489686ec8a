"""Bounds of the proxy, told once; imports only the standard library."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds and bytes.

    head_seconds: for the whole head of a request or a TLS hello, so that nobody holds a connection by trickling one.
    rest_seconds: between two requests on one connection.
    idle_seconds: without a byte in either direction while a request or a tunnel is under way.
    left_seconds: the same once the client has ended its side: it has most likely given up.
    total_seconds: the longest life of one connection.
    connect_seconds: for one address; addresses: how many of a name are tried.
    """

    head_seconds: float = 15.0
    rest_seconds: float = 30.0
    idle_seconds: float = 120.0
    left_seconds: float = 10.0
    total_seconds: float = 3600.0
    resolve_seconds: float = 10.0
    connect_seconds: float = 10.0
    addresses: int = 4
    head_bytes: int = 64 * 1024
