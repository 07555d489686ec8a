"""The messages between a sandbox server and the container `egress` of its pod."""

import msgspec


class ProvideRequest(msgspec.Struct, frozen=True, kw_only=True, tag="provide"):
    """Build a layer with what is missing, as `Installer.provide`."""

    number: int
    wanted: list[str]
    present: dict[str, str]
    may_replace: bool


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Make the files of a layer visible to the code."""

    number: int
    layer: str


class ProxyRequest(msgspec.Struct, frozen=True, kw_only=True, tag="proxy"):
    """Start an egress proxy; with it come its configuration in a memory file and its control socket."""

    number: int


type EgressRequest = ProvideRequest | AttachRequest | ProxyRequest


class EgressReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first message. versions: of the packages in the image. problem: why no packages can be installed."""

    versions: dict[str, str]
    problem: str = ""


class ProvideResult(msgspec.Struct, frozen=True, kw_only=True, tag="provided"):
    """layer: None if nothing is missing. pins: name and version."""

    number: int
    layer: str | None
    pins: list[tuple[str, str]]
    replaced: dict[str, str]


class RequestDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The answer to the other requests."""

    number: int


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Any request failed; `message` is for the caller."""

    number: int
    message: str


type EgressAnswer = EgressReady | ProvideResult | RequestDone | RequestFailed

encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(EgressRequest).decode
decode_answer = msgspec.json.Decoder(EgressAnswer).decode
