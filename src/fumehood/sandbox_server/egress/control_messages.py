"""Messages between the supervisor and the egress proxy, and the limits of the proxy.

The proxy parses untrusted input, so the supervisor accepts from it nothing but these types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Timeouts and sizes of proxied connections.

    head_seconds: for the whole head of a request or a TLS ClientHello.
    keepalive_seconds: between two requests on one connection.
    idle_seconds: without a byte in either direction during a request or a tunnel.
    half_closed_seconds: the same after the client has closed its side.
    total_seconds: the lifetime of one connection.
    connect_seconds: for one address. addresses: how many of a name are tried.
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


# ---- supervisor -> proxy ------------------------------------------------------------------------------------------


class ProxyConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration for all sandboxes, sent on standard input.

    user: the uid that the proxy switches to, None to keep its own.
    hosts: fixed addresses of names, instead of DNS. private: private networks that sandboxes may reach.
    ca_certificates: certificate authorities in PEM form besides the system's.
    """

    user: int | None
    hosts: dict[str, str]
    private: list[str]
    connections_total: int
    limits: ProxyLimits
    ca_certificates: str = ""


class AuthorityKeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate authority of one sandbox."""

    private: str
    certificate: str


class SandboxEgressConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may reach; sent in a memory file, with the sandbox's listener.

    secrets: by domain, then by name.
    budget: bytes that it may transfer in total, None for no limit. bytes_used: bytes transferred so far.
    """

    domains: list[str]
    ports: list[int]
    limits: ProxyLimits
    connections: int
    secrets: dict[str, dict[str, str]] = {}
    authority: AuthorityKeyPair | None = None
    budget: int | None = None
    bytes_used: int = 0


class OpenAccessOrder(msgspec.Struct, frozen=True, tag="open"):
    """Start to accept connections; carries the descriptors of the SandboxEgressConfig file and of the listener."""

    number: int


class CloseAccessOrder(msgspec.Struct, frozen=True, tag="close"):
    """The sandbox has ended: close its connections."""

    number: int


# ---- proxy -> supervisor ------------------------------------------------------------------------------------------


class ProxyReady(msgspec.Struct, frozen=True, tag="ready"):
    """The proxy has dropped its privileges and accepts orders."""


class EgressEvent(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """What the proxy did for a sandbox; without paths, headers and bodies.

    number: of the access. sandbox: its id, which the supervisor fills in.
    port is 0 and domain empty if the request could not be parsed.
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
    """connections: open ones of all sandboxes. bytes_used: bytes transferred, by number of the access."""

    connections: _Count
    bytes_used: dict[int, _Count] = {}


class ProxyLogMessage(msgspec.Struct, frozen=True, tag="log"):
    """A record for the supervisor's log."""

    level: Annotated[int, Meta(ge=0, le=50)]
    text: _Text


type ControlOrder = OpenAccessOrder | CloseAccessOrder
type ProxyReport = ProxyReady | EgressEvent | ProxyStatus | ProxyLogMessage

# The decoders raise msgspec.MsgspecError.
encode = msgspec.json.Encoder().encode
decode_order: Callable[[bytes], ControlOrder] = msgspec.json.Decoder(
    OpenAccessOrder | CloseAccessOrder
).decode
decode_report: Callable[[bytes], ProxyReport] = msgspec.json.Decoder(
    ProxyReady | EgressEvent | ProxyStatus | ProxyLogMessage
).decode
