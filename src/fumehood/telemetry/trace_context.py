"""W3C Trace Context: parents from callers, and headers for model servers.

A header that is malformed, repeated or too long is ignored without a log entry: it never fails a request.
"""

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fumehood.http_server.asgi_exchange import Headers
from fumehood.protocol.model_turns import ModelRequest, TraceContext
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.telemetry.semantic_conventions import propagates_trace_context

# They log malformed headers, with the caller's text.
_HEADER_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")

_W3C = TraceContextTextMapPropagator()
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
        self._is_enabled = propagates_trace_context(environ)
        for name in _HEADER_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)

    def enter_request(self, headers: Headers) -> None:
        """Make the parent that a request's headers name available to `get_caller_context`."""
        # Set it in every case: on a reused connection the variable still holds the previous request's parent.
        _caller_context.set(_read_headers(headers) if self._is_enabled else _NO_PARENT)

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


def set_caller_context(context: Context) -> None:
    """Let spans of the current request be below this context, which is that of the request's own span."""
    _caller_context.set(context)


def _read_headers(headers: Headers) -> Context:
    parents = [value.decode("latin-1") for name, value in headers if name == b"traceparent"]
    if not parents:
        return _NO_PARENT
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return _extract_context(parents, states)


def _read_metadata(encoded: bytes) -> Context:
    try:
        metadata = _metadata_decoder.decode(encoded) or _TraceMetadata()
    except (ValueError, RecursionError):
        return _NO_PARENT
    return _extract_context([metadata.ws_request_header_traceparent], [metadata.ws_request_header_tracestate])


def _extract_context(parents: Sequence[str], states: Sequence[str]) -> Context:
    """Return the parent named by the headers; an empty context if there is none, or more than one."""
    if len(parents) != 1:
        return _NO_PARENT
    return _W3C.extract({"traceparent": parents, "tracestate": states}, Context())
