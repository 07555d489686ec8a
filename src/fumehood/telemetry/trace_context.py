"""W3C Trace Context: parents from callers, and headers for model servers.

A header that is malformed, repeated or too long is ignored without a log entry: it never fails a request.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from fumehood.http_server.asgi_exchange import Application, Receive, Scope, Send
from fumehood.protocol.model_turns import ModelRequest, TraceContext
from fumehood.protocol.openai.responses import CreateResponse
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
    """Trace headers in `client_metadata`: a WebSocket message has no headers of its own."""

    ws_request_header_traceparent: str = ""
    ws_request_header_tracestate: str = ""


_metadata_decoder = msgspec.json.Decoder(_TraceMetadata | None)


def get_caller_context() -> Context:
    """Return the parent named by the current HTTP request or WebSocket handshake; an empty context if there is none."""
    return _caller_context.get()


class TraceContextPropagator:
    """Extracts parents from requests and injects turns into model requests, unless `OTEL_PROPAGATORS` forbids it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        names = environ.get(PROPAGATORS_VARIABLE) or _DEFAULT_PROPAGATORS
        self._is_enabled = "tracecontext" in (name.strip() for name in names.split(","))

    def wrap_application(self, app: Application) -> Application:
        """Add middleware that makes each request's parent available to `get_caller_context`."""
        return _TraceContextMiddleware(app) if self._is_enabled else app

    def extract_parent(self, request: CreateResponse | None) -> Context:
        """Return the parent in the request's metadata, else that of its connection."""
        if request is None or not self._is_enabled or (metadata := bytes(request.client_metadata)) == b"null":
            return _caller_context.get()
        return _read_metadata(metadata) or _caller_context.get()

    def inject(self, request: ModelRequest, span: Span) -> ModelRequest:
        """Return the request with the span as the parent for the model server."""
        context = span.get_span_context()
        if not self._is_enabled or not context.is_valid:
            return request
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return msgspec.structs.replace(request, trace=TraceContext(parent, context.trace_state.to_header()))


class _TraceContextMiddleware:
    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parents = [value for name, value in scope["headers"] if name == b"traceparent"]
        # Set it in every case: on a reused connection the variable still holds the previous request's parent.
        _caller_context.set(_read_headers(parents, scope["headers"]) if parents else _NO_PARENT)
        await self._app(scope, receive, send)


def _read_headers(parents: Sequence[bytes], headers: Iterable[tuple[bytes, bytes]]) -> Context:
    if len(parents) > 1:
        return _NO_PARENT
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return _parse_traceparent(parents[0].decode("latin-1"), states) or _NO_PARENT


def _read_metadata(encoded: bytes) -> Context | None:
    try:
        metadata = _metadata_decoder.decode(encoded)
    except (ValueError, RecursionError):
        return None
    if metadata is None:
        return None
    return _parse_traceparent(metadata.ws_request_header_traceparent, [metadata.ws_request_header_tracestate])


def _parse_traceparent(parent: str, states: Sequence[str]) -> Context | None:
    match = None if len(parent) > _MAX_HEADER_LENGTH else _TRACEPARENT.fullmatch(parent.strip(" \t"))
    if match is None or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(
        int(match[2], 16),
        int(match[3], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[4], 16) & _KNOWN_FLAGS),
        trace_state=TraceState(_parse_tracestate(states)),
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def _parse_tracestate(states: Sequence[str]) -> list[tuple[str, str]]:
    """Return the members of all headers; none if one is malformed or repeated, or if there are too many."""
    header = ",".join(states)
    if len(header) > _MAX_HEADER_LENGTH:
        return []
    members: dict[str, str] = {}
    for member in header.split(","):
        if not (member := member.strip(" \t")):
            continue
        match = _TRACESTATE_MEMBER.fullmatch(member)
        if match is None or match[1] in members:
            return []
        members[match[1]] = match[2]
    return list(members.items()) if len(members) <= _MAX_STATE_MEMBERS else []
