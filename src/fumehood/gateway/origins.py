"""Which web pages may ask: CORS, off unless origins were named; imports `serving` and siblings.

A browser asks first, without a key, whether a page may send what it wants to send; so that is answered before anybody
is identified. About a WebSocket and about a form it does not ask: it only says from which page it comes.
"""

import re

from fumehood.gateway.auth import Forbidden
from fumehood.gateway.exchange import Exchange
from fumehood.serving.browsers import decode_header, is_own_origin
from fumehood.serving.exchange import Headers

ANY = "*"
_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_EXPOSED = (
    b"content-disposition, content-range, etag, fumehood-version, idempotent-replayed, openai-processing-ms, "
    b"retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-request-id, x-should-retry"
)
_REMEMBERED = b"600"  # seconds that a browser need not ask again


class Origins:
    """Which web pages may ask the gateway.

    `allowed`: as browsers write them, such as https://app.example or http://localhost:3000; `*` for every page.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def permits(self, origin: bytes | None) -> bool:
        """Whether such a page may ask; programs that are no pages name no origin."""
        return origin is None or self._any or origin in self._allowed

    def check_page(self, exchange: Exchange) -> None:
        """Raises Forbidden for a page of another site that was not named. Programs that are no browsers say nothing."""
        origin = exchange.headers.get(b"origin")
        if origin is None or self.permits(origin):
            return
        if is_own_origin(origin, exchange.headers.get(b"host", b"")):
            return
        shown = decode_header(origin)[:100]
        raise Forbidden(
            f"Web pages of {shown!r} may not use this server, unless server.cors_origins names them."
        )

    def headers(self, exchange: Exchange) -> Headers:
        """What a browser has to be told in every answer to a page; nothing, if the page may not ask."""
        origin = exchange.headers[b"origin"]
        if not self._allowed:
            return []
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        varies = (b"vary", b"origin")
        if origin not in self._allowed:
            return [varies]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            varies,
        ]

    def is_asked(self, exchange: Exchange) -> bool:
        """Whether this is a browser's question before a page sends something."""
        return (
            bool(self._allowed)
            and exchange.method == "OPTIONS"
            and b"access-control-request-method" in exchange.headers
        )

    async def answer(self, exchange: Exchange, methods: str) -> None:
        """Say what a page may do at a path with these methods. One that may not ask is told nothing, which is a no."""
        headers: Headers = []
        if self.permits(exchange.headers.get(b"origin")):
            headers = [
                (b"access-control-allow-methods", methods.encode()),
                (b"access-control-max-age", _REMEMBERED),
            ]
            # Repeated, since browsers do not take `*` for Authorization, and SDKs have headers of their own.
            names = exchange.headers.get(b"access-control-request-headers")
            if names is not None and _NAMES.fullmatch(names):
                headers.append((b"access-control-allow-headers", names))
        await exchange.begin(204, headers)
        await exchange.send(b"", more=False)
