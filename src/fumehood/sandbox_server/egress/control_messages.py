"""What the supervisor and its egress proxy tell each other.

The proxy parses what hostile programs send, so the supervisor believes nothing of what it says beyond these types.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Seconds and bytes.

    head_seconds: for the whole head of a request or a TLS hello, so that nobody holds a connection by trickling one.
    keepalive_seconds: between two requests on one connection.
    idle_seconds: without a byte in either direction while a request or a tunnel is under way.
    half_closed_seconds: the same once the client has ended its side: it has most likely given up.
    total_seconds: the longest life of one connection.
    connect_seconds: for one address; addresses: how many of a name are tried.
    """

    head_seconds: float = 15.0
    keepalive_seconds: float = 30.0
    idle_seconds: float = 120.0
    half_closed_seconds: float = 10.0
    total_seconds: float = 3600.0
    resolve_seconds: float = 10.0
    connect_seconds: float = 10.0
    addresses: int = 4
    head_bytes: int = 64 * 1024


type Verdict = Literal["allowed", "refused", "failed"]


type _Count = Annotated[int, Meta(ge=0, le=1 << 60)]


type _Text = Annotated[str, Meta(max_length=2000)]


MAX_ORDER_BYTES = 16 << 20


# ---- what the proxy is told ---------------------------------------------------------------------------------------


class ProxyConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all sandboxes; comes on standard input.

    user: whom the proxy becomes, None to stay who it is.
    hosts: addresses of names that are not looked up; private: networks that may be reached although they are private.
    trust: certificates in PEM form to trust besides the system's.
    """

    user: int | None
    hosts: dict[str, str]
    private: list[str]
    connections_total: int
    limits: ProxyLimits
    trust: str = ""


class AuthorityKeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate authority of one sandbox."""

    private: str
    certificate: str


class SandboxAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may reach; comes in a file in memory, with its listener.

    secrets: by domain, then by name.
    budget: bytes that it may move in all, None for no bound; spent: those that it has moved.
    """

    domains: list[str]
    ports: list[int]
    limits: ProxyLimits
    connections: int
    secrets: dict[str, dict[str, str]] = {}
    authority: AuthorityKeyPair | None = None
    budget: int | None = None
    spent: int = 0


class OpenAccess(msgspec.Struct, frozen=True, tag="open"):
    """Begin to accept; two descriptors come along, those of the Door and of the listener."""

    number: int


class CloseAccess(msgspec.Struct, frozen=True, tag="close"):
    """The sandbox is gone: so are its connections."""

    number: int


# ---- what it tells ------------------------------------------------------------------------------------------------


class ProxyReady(msgspec.Struct, frozen=True, tag="ready"):
    """It has given up its rights, and waits for doors."""


class EgressEvent(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """What the proxy did for a sandbox: never a path, a header or a body.

    number: of its door; sandbox: its id, which the proxy does not know.
    port is 0 and domain empty where a request could not be understood.
    """

    domain: Annotated[str, Meta(max_length=253)]
    port: Annotated[int, Meta(ge=0, le=65535)]
    verdict: Verdict
    reason: _Text = ""
    sent: _Count = 0
    received: _Count = 0
    number: int = 0
    sandbox: str = ""


class ProxyStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """connections: at present, of all sandboxes; spent: bytes that were moved, by the numbers of doors."""

    connections: _Count
    spent: dict[int, _Count] = {}


class ProxyLogMessage(msgspec.Struct, frozen=True, tag="problem"):
    """Something for the log."""

    level: Annotated[int, Meta(ge=0, le=50)]
    text: _Text


type ControlOrder = OpenAccess | CloseAccess


type ProxyReport = ProxyReady | EgressEvent | ProxyStatus | ProxyLogMessage


encode = msgspec.json.Encoder().encode


_orders: msgspec.json.Decoder[ControlOrder] = msgspec.json.Decoder(OpenAccess | CloseAccess)


_reports: msgspec.json.Decoder[ProxyReport] = msgspec.json.Decoder(
    ProxyReady | EgressEvent | ProxyStatus | ProxyLogMessage
)


def decode_order(body: bytes) -> ControlOrder:
    """Raises msgspec.MsgspecError."""
    return _orders.decode(body)


def decode_report(body: bytes) -> ProxyReport:
    """Raises msgspec.MsgspecError."""
    return _reports.decode(body)
