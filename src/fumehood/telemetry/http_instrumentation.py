"""ASGI middleware that records HTTP requests, as parents of the responses that they create.

A streamed event costs nothing here: the gateway reports status and route in the scope when the request has ended.
"""

import re

from fumehood.http_server.asgi_exchange import (
    REQUEST_OUTCOME,
    Application,
    Headers,
    Receive,
    RequestOutcome,
    Scope,
    Send,
)
from fumehood.telemetry.operation_records import HttpRequestRecord, RecordDispatcher
from fumehood.telemetry.trace_context import TraceContextPropagator, set_caller_context

_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"}
)
# Polled by probes and scrapers; a span for each would hide the others.
_UNRECORDED_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\[[^\]]+\]|[^:]+)(?::(\d{1,5}))?")


class HttpServerMiddleware:
    """Continues the caller's trace and records each request. A WebSocket has no span: it may last for days."""

    def __init__(
        self, app: Application, dispatcher: RecordDispatcher, propagator: TraceContextPropagator
    ) -> None:
        self._app = app
        self._dispatcher = dispatcher
        self._propagator = propagator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        self._propagator.enter_request(headers)
        if scope["type"] != "http" or scope["path"] in _UNRECORDED_PATHS:
            await self._app(scope, receive, send)
            return
        record = _start_record(scope, headers)
        self._dispatcher.start(record)
        if record.span.get_span_context().is_valid:
            set_caller_context(record.as_context())
        error = ""
        try:
            await self._app(scope, receive, send)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            _set_outcome(record, scope.get(REQUEST_OUTCOME), error)
            self._dispatcher.end(record)


def _start_record(scope: Scope, headers: Headers) -> HttpRequestRecord:
    method: str = scope["method"]
    scheme: str = scope.get("scheme", "http")
    return HttpRequestRecord(
        method=method if method in _METHODS else "_OTHER",
        path=scope["path"],
        scheme=scheme,
        server=_read_host(headers, scheme),
    )


def _read_host(headers: Headers, scheme: str) -> tuple[str, int] | None:
    """Return the host and port that the client asked for."""
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1], int(found[2] or _DEFAULT_PORTS.get(scheme, 80)))


def _set_outcome(record: HttpRequestRecord, outcome: RequestOutcome | None, error: str) -> None:
    if outcome is not None:
        record.route, record.status = outcome.route, outcome.status
    if error:
        record.error = error
    elif record.status >= 500:
        record.error = str(record.status)
    elif not record.status:
        record.error = "client_disconnected"
