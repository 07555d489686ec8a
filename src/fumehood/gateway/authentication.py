"""Authenticates requests by API key, and checks key scopes and the Host header.

All keys are in memory, so authenticating awaits nothing. They are reloaded every few seconds, and when an unknown key
arrives.
"""

import asyncio
import logging
from types import TracebackType
from typing import Protocol, Self

from fumehood.http_server.cross_site_protection import AllowedHosts, decode_header
from fumehood.interfaces import ApiKeyStore, Caller, Clock
from fumehood.protocol.api_keys import ALL_SCOPES, ApiKeyScope, hash_secret
from fumehood.protocol.openai.api_errors import ApiError, NotAuthenticated

KEY_REFRESH_SECONDS = 2.0
"""Seconds for which a revoked key may still be accepted."""

_BEARER_PREFIX = b"bearer "
_MISSING_KEY_MESSAGE = "Missing API key; send it as Authorization: Bearer KEY."
_UNKNOWN_KEY_MESSAGE = "Unknown or revoked API key; `fumehood keys create` creates one."

logger = logging.getLogger(__name__)


class PermissionDenied(ApiError):
    status = 403
    code = "forbidden"


class MissingScope(PermissionDenied):
    code = "missing_scope"


def check_scope(caller: Caller, scope: ApiKeyScope) -> None:
    """Raises MissingScope if the caller's key lacks the scope."""
    if scope not in caller.scopes:
        raise MissingScope(
            f"You have insufficient permissions for this operation. Missing scopes: {scope}. This key has "
            f"{', '.join(sorted(caller.scopes))}; `fumehood keys create --scope {scope}` creates one with this scope."
        )


class Authenticator(Protocol):
    """Identifies the caller of a request."""

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        """The caller with these Authorization and Host headers. Raises NotAuthenticated or PermissionDenied."""
        ...

    async def refresh_if_stale(self) -> bool:
        """Reload the keys unless that was done recently; return whether they changed."""
        ...


async def authenticate_or_refresh(
    authenticator: Authenticator, authorization: bytes | None, host: bytes
) -> Caller:
    """As `Authenticator.authenticate`, but also accepts a key that was created a moment ago."""
    try:
        return authenticator.authenticate(authorization, host)
    except NotAuthenticated:
        if not await authenticator.refresh_if_stale():
            raise
    return authenticator.authenticate(authorization, host)


class AnonymousAuthenticator:
    """Accepts every request, as one tenant, if its Host header names this server.

    The Host check stops DNS rebinding: a web page whose own name resolves to this machine sends that name as Host.

    hosts: names of this server besides localhost and IP addresses.
    """

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._caller = Caller(scopes=frozenset(ALL_SCOPES))
        self._hosts = AllowedHosts(hosts)

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        del authorization
        if not self._hosts.matches(host):
            raise PermissionDenied(
                f"Unknown host {decode_header(host).strip().lower()[:100]!r}; to serve it, add it to "
                "server.allowed_hosts."
            )
        return self._caller

    async def refresh_if_stale(self) -> bool:
        return False


class ApiKeyAuthenticator:
    """Requires an API key once the store has ever had one; until then, delegates to `anonymous`.

    With keys, the Host header is not checked: no web page can make a browser send a key.
    `async with` reloads the keys in the background.
    """

    def __init__(self, store: ApiKeyStore, clock: Clock, anonymous: AnonymousAuthenticator) -> None:
        self._store = store
        self._clock = clock
        self._anonymous: AnonymousAuthenticator | None = anonymous
        self._callers_by_digest: dict[bytes, Caller] = {}
        self._revision = -1
        self._refresh_task: asyncio.Task[None] | None = None
        self._refreshed_at = 0.0

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._refresh_task = asyncio.create_task(self._refresh_periodically(), name="keys")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)

    @property
    def key_count(self) -> int:
        """The number of valid keys."""
        return len(self._callers_by_digest)

    @property
    def allows_anonymous(self) -> bool:
        """Whether no key is needed."""
        return self._anonymous is not None

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        if self._anonymous is not None:
            return self._anonymous.authenticate(authorization, host)
        if authorization is None or authorization[:7].lower() != _BEARER_PREFIX:
            raise NotAuthenticated(_MISSING_KEY_MESSAGE)
        # A lookup by hash: its duration reveals nothing about any secret.
        caller = self._callers_by_digest.get(hash_secret(authorization[7:].strip()))
        if caller is None:
            raise NotAuthenticated(_UNKNOWN_KEY_MESSAGE)
        return caller

    async def refresh_if_stale(self) -> bool:
        """Rate limited, so that unknown keys cannot flood the store with queries."""
        if self._clock.monotonic() < self._refreshed_at + KEY_REFRESH_SECONDS / 4:
            return False
        return await self._try_refresh()

    async def refresh(self) -> bool:
        """Load the keys if they changed; return whether they did. Raises ServiceUnavailable."""
        self._refreshed_at = self._clock.monotonic()
        revision = await self._store.get_api_keys_revision()
        if revision == self._revision:
            return False
        keys = await self._store.list_api_keys()
        self._callers_by_digest = {
            key.digest: Caller(key.tenant, key.id, key.limits, key.scopes)
            for key in keys
            if key.revoked_at is None
        }
        self._revision = revision
        if revision:  # also when all keys were revoked: a closed gateway does not open by itself
            self._anonymous = None
        return True

    async def _refresh_periodically(self) -> None:
        while True:
            await self._clock.sleep(KEY_REFRESH_SECONDS)
            await self._try_refresh()

    async def _try_refresh(self) -> bool:
        try:
            return await self.refresh()
        except Exception as error:  # known keys stay valid; the next attempt may succeed
            expected = isinstance(error, ApiError)
            logger.warning("cannot load the API keys: %s", error, exc_info=not expected)
            return False
