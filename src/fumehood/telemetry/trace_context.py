"""Whose trace a request is part of, and how a model server is told.

As W3C Trace Context has it. A header that is malformed, too long or there twice is as good as none; what a request said
is nobody's business but the trace's, so it is not refused for that, and the log says nothing of it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from fumehood.http_server.asgi_request import Application, Receive, Scope, Send
from fumehood.protocol.model_turns import ModelRequest, TraceContext
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.telemetry.otlp_span_encoding import EncodableSpan
from fumehood.telemetry.semantic_conventions import PROPAGATORS_VARIABLE

_DEFAULT_PROPAGATORS = "tracecontext,baggage"

_MAX_HEADER_LENGTH = 512  # characters of either header
_MAX_STATE_MEMBERS = 32
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_TRACESTATE_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=([ !-+\--<>-~]{0,255}[!-+\--<>-~])"
)
_KNOWN_FLAGS = TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID

_NO_PARENT = Context()
_caller_context: ContextVar[Context] = ContextVar("fumehood_caller_context", default=_NO_PARENT)


class _TraceMetadata(msgspec.Struct):
    """What clients write into a message, where a WebSocket leaves no place for headers."""

    ws_request_header_traceparent: str = ""
    ws_request_header_tracestate: str = ""


_metadata_decoder = msgspec.json.Decoder(_TraceMetadata | None)


def get_caller_context() -> Context:
    """That of the request, or of the connection, that is being served; an empty one if it came with none."""
    return _caller_context.get()


class TraceContextPropagator:
    """Takes the trace of a caller, and tells a model's server of the turn's, unless the operator wants neither."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        wanted = environ.get(PROPAGATORS_VARIABLE) or _DEFAULT_PROPAGATORS
        self._is_enabled = "tracecontext" in (name.strip() for name in wanted.split(","))

    def wrap_application(self, app: Application) -> Application:
        """The application, with whatever it begins knowing the trace of its caller."""
        return _TraceContextMiddleware(app) if self._is_enabled else app

    def extract_parent(self, request: CreateResponse | None) -> Context:
        """What the message itself says goes before what its connection does."""
        if request is None or not self._is_enabled or (written := bytes(request.client_metadata)) == b"null":
            return _caller_context.get()
        return _read_metadata(written) or _caller_context.get()

    def inject(self, request: ModelRequest, span: EncodableSpan) -> ModelRequest:
        """The request of a turn, with the turn's span as the parent of whatever comes of it."""
        if not self._is_enabled or not span.trace_id:
            return request
        parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
        state = span.trace_state.to_header() if span.trace_state else ""
        return msgspec.structs.replace(request, trace=TraceContext(parent, state))


class _TraceContextMiddleware:
    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parents = [value for name, value in scope["headers"] if name == b"traceparent"]
        # Also where there is none: a request may be served in what another has left.
        _caller_context.set(_read_headers(parents, scope["headers"]) if parents else _NO_PARENT)
        await self._app(scope, receive, send)


def _read_headers(parents: Sequence[bytes], headers: Iterable[tuple[bytes, bytes]]) -> Context:
    if len(parents) > 1:
        return _NO_PARENT
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return _parse_traceparent(parents[0].decode("latin-1"), states) or _NO_PARENT


def _read_metadata(written: bytes) -> Context | None:
    try:
        told = _metadata_decoder.decode(written)
    except (ValueError, RecursionError):
        return None
    return (
        None
        if told is None
        else _parse_traceparent(told.ws_request_header_traceparent, [told.ws_request_header_tracestate])
    )


def _parse_traceparent(parent: str, states: Sequence[str]) -> Context | None:
    found = None if len(parent) > _MAX_HEADER_LENGTH else _TRACEPARENT.fullmatch(parent.strip(" \t"))
    if found is None or (found[1] == "00" and found[5]):
        return None
    context = SpanContext(
        int(found[2], 16),
        int(found[3], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(found[4], 16) & _KNOWN_FLAGS),
        trace_state=TraceState(_parse_tracestate(states)),
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def _parse_tracestate(states: Sequence[str]) -> list[tuple[str, str]]:
    """Of all headers together; none if one of them is malformed or there twice, or if they are too many."""
    written = ",".join(states)
    if len(written) > _MAX_HEADER_LENGTH:
        return []
    members: dict[str, str] = {}
    for member in written.split(","):
        if not (member := member.strip(" \t")):
            continue
        found = _TRACESTATE_MEMBER.fullmatch(member)
        if found is None or found[1] in members:
            return []
        members[found[1]] = found[2]
    return list(members.items()) if len(members) <= _MAX_STATE_MEMBERS else []
