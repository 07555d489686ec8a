"""Which web pages may ask: CORS, off unless origins were named.

A browser asks first, without a key, whether a page may send what it wants to send; so that is answered before anybody
is identified. About a WebSocket and about a form it does not ask: it only says from which page it comes.
"""

import re

from fumehood.gateway.authentication import PermissionDenied
from fumehood.gateway.request_context import RequestContext
from fumehood.http_server.asgi_request import Headers
from fumehood.http_server.cross_site_protection import decode_header, is_same_origin

ANY_ORIGIN = "*"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_EXPOSED_HEADERS = (
    b"content-disposition, content-range, etag, fumehood-version, idempotent-replayed, openai-processing-ms, "
    b"retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-request-id, x-should-retry"
)
_PREFLIGHT_MAX_AGE = b"600"  # seconds that a browser need not ask again


class CorsPolicy:
    """Which web pages may ask the gateway.

    `allowed`: as browsers write them, such as https://app.example or http://localhost:3000; `*` for every page.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self._allows_any = ANY_ORIGIN in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def allows(self, origin: bytes | None) -> bool:
        """Whether such a page may ask; programs that are no pages name no origin."""
        return origin is None or self._allows_any or origin in self._allowed

    def check_origin(self, context: RequestContext) -> None:
        """Raises Forbidden for a page of another site that was not named. Programs that are no browsers say nothing."""
        origin = context.headers.get(b"origin")
        if origin is None or self.allows(origin):
            return
        if is_same_origin(origin, context.headers.get(b"host", b"")):
            return
        shown = decode_header(origin)[:100]
        raise PermissionDenied(
            f"Web pages of {shown!r} may not use this server, unless server.cors_origins names them."
        )

    def response_headers(self, context: RequestContext) -> Headers:
        """What a browser has to be told in every answer to a page; nothing, if the page may not ask."""
        origin = context.headers[b"origin"]
        if not self._allowed:
            return []
        if self._allows_any:
            return [
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", _EXPOSED_HEADERS),
            ]
        varies = (b"vary", b"origin")
        if origin not in self._allowed:
            return [varies]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
            varies,
        ]

    def is_preflight(self, context: RequestContext) -> bool:
        """Whether this is a browser's question before a page sends something."""
        return (
            bool(self._allowed)
            and context.method == "OPTIONS"
            and b"access-control-request-method" in context.headers
        )

    async def send_preflight_response(self, context: RequestContext, methods: str) -> None:
        """Say what a page may do at a path with these methods. One that may not ask is told nothing, which is a no."""
        headers: Headers = []
        if self.allows(context.headers.get(b"origin")):
            headers = [
                (b"access-control-allow-methods", methods.encode()),
                (b"access-control-max-age", _PREFLIGHT_MAX_AGE),
            ]
            # Repeated, since browsers do not take `*` for Authorization, and SDKs have headers of their own.
            names = context.headers.get(b"access-control-request-headers")
            if names is not None and _HEADER_NAMES.fullmatch(names):
                headers.append((b"access-control-allow-headers", names))
        await context.start_response(204, headers)
        await context.send(b"", more=False)
