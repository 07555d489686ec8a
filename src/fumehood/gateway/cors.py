"""CORS: which web pages may use the gateway. Off unless the configuration names origins.

Browsers send preflight requests without a key, so they are answered before authentication. WebSockets and form posts
have no preflight: for these, only the Origin header tells which page sent them.
"""

import re

from fumehood.gateway.authentication import PermissionDenied
from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.http_server.asgi_exchange import Headers
from fumehood.http_server.cross_site_protection import decode_header, is_same_origin

ANY_ORIGIN = "*"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_EXPOSED_HEADERS = (
    b"content-disposition, content-range, etag, fumehood-version, fumehood-warning, idempotent-replayed, "
    b"openai-processing-ms, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-request-id, x-should-retry"
)
_PREFLIGHT_MAX_AGE = b"600"  # seconds


class CorsPolicy:
    """The origins that may use the gateway.

    allowed: origins as browsers send them (https://app.example, http://localhost:3000), or `*` for all.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self._allows_any = ANY_ORIGIN in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def allows(self, origin: bytes | None) -> bool:
        """Whether this Origin is allowed; None, from a client that is not a browser, is."""
        return origin is None or self._allows_any or origin in self._allowed

    def check_origin(self, exchange: GatewayExchange) -> None:
        """Raises PermissionDenied if the request comes from a page of another site that is not allowed."""
        origin = exchange.headers.get(b"origin")
        if origin is None or self.allows(origin):
            return
        if is_same_origin(origin, exchange.headers.get(b"host", b"")):
            return
        shown = decode_header(origin)[:100]
        raise PermissionDenied(
            f"Web pages of {shown!r} may not use this server; to allow them, add the origin to server.cors_origins."
        )

    def response_headers(self, exchange: GatewayExchange) -> Headers:
        """The CORS headers of a response; no permissions for an origin that is not allowed."""
        origin = exchange.headers[b"origin"]
        if not self._allowed:
            return []
        if self._allows_any:
            return [
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", _EXPOSED_HEADERS),
            ]
        vary = (b"vary", b"origin")
        if origin not in self._allowed:
            return [vary]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
            vary,
        ]

    def is_preflight(self, exchange: GatewayExchange) -> bool:
        """Whether this is a CORS preflight request."""
        return (
            bool(self._allowed)
            and exchange.method == "OPTIONS"
            and b"access-control-request-method" in exchange.headers
        )

    async def send_preflight_response(self, exchange: GatewayExchange, methods: str) -> None:
        """Allow these methods, without any permission if the origin is not allowed."""
        headers: Headers = []
        if self.allows(exchange.headers.get(b"origin")):
            headers = [
                (b"access-control-allow-methods", methods.encode()),
                (b"access-control-max-age", _PREFLIGHT_MAX_AGE),
            ]
            # Echoed: `*` does not cover Authorization, and SDKs send headers of their own.
            names = exchange.headers.get(b"access-control-request-headers")
            if names is not None and _HEADER_NAMES.fullmatch(names):
                headers.append((b"access-control-allow-headers", names))
        await exchange.start_response(204, headers)
        await exchange.send(b"", more=False)
