"""What the supervisor and its egress proxy tell each other; imports msgspec and siblings.

The proxy parses what hostile programs send, so the supervisor believes nothing of what it says beyond these types.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fumehood.sandboxd.egress.bounds import Bounds

type Verdict = Literal["allowed", "refused", "failed"]
type _Count = Annotated[int, Meta(ge=0, le=1 << 60)]
type _Text = Annotated[str, Meta(max_length=2000)]

LONGEST_ORDER = 16 << 20


# ---- what the proxy is told ---------------------------------------------------------------------------------------


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all sandboxes; comes on standard input.

    user: whom the proxy becomes, None to stay who it is.
    hosts: addresses of names that are not looked up; private: networks that may be reached although they are private.
    trust: certificates in PEM form to trust besides the system's.
    """

    user: int | None
    hosts: dict[str, str]
    private: list[str]
    connections_total: int
    bounds: Bounds
    trust: str = ""


class AuthorityKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate authority of one sandbox."""

    private: str
    certificate: str


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may reach; comes in a file in memory, with its listener.

    secrets: by domain, then by name.
    budget: bytes that it may move in all, None for no bound; spent: those that it has moved.
    """

    domains: list[str]
    ports: list[int]
    bounds: Bounds
    connections: int
    secrets: dict[str, dict[str, str]] = {}
    authority: AuthorityKeys | None = None
    budget: int | None = None
    spent: int = 0


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Begin to accept; two descriptors come along, those of the Door and of the listener."""

    number: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The sandbox is gone: so are its connections."""

    number: int


# ---- what it tells ------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It has given up its rights, and waits for doors."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
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


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """connections: at present, of all sandboxes; spent: bytes that were moved, by the numbers of doors."""

    connections: _Count
    spent: dict[int, _Count] = {}


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    """Something for the log."""

    level: Annotated[int, Meta(ge=0, le=50)]
    text: _Text


type Order = Open | Close
type Report = Ready | Event | Status | Problem

encode = msgspec.json.Encoder().encode
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Open | Close)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Ready | Event | Status | Problem)


def decode_order(body: bytes) -> Order:
    """Raises msgspec.MsgspecError."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """Raises msgspec.MsgspecError."""
    return _reports.decode(body)
