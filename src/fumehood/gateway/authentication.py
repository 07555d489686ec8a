"""Who a request is from, and whether it may be from there.

To recognise a key nothing is awaited and no database asked: a gateway knows all of them, and looks every few seconds,
and when somebody shows one that it does not know, whether there are others. What it is told of a request are two
headers, so any kind of connection can be asked about.
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
"""How long a key that was revoked may still be taken for a good one."""

_BEARER_PREFIX = b"bearer "
_MISSING_KEY_MESSAGE = "No API key was given; send one as Authorization: Bearer KEY."
_UNKNOWN_KEY_MESSAGE = "The API key is not known here, or was revoked; `fumehood keys create` makes one."

logger = logging.getLogger(__name__)


class PermissionDenied(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class MissingScope(PermissionDenied):
    code = "missing_scope"


def check_scope(caller: Caller, scope: ApiKeyScope) -> None:
    """Raises MissingScope, in OpenAI's words, for a key that is not for this."""
    if scope not in caller.scopes:
        raise MissingScope(
            f"You have insufficient permissions for this operation. Missing scopes: {scope}. This key is for "
            f"{', '.join(sorted(caller.scopes))}; `fumehood keys create --scope {scope}` makes one for this."
        )


class Authenticator(Protocol):
    """Knows who may ask."""

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        """Who it is that sends these two headers; raises ApiError for somebody who may not ask."""
        ...

    async def refresh_if_stale(self) -> bool:
        """Whether somebody who was not known may be known now."""
        ...


async def authenticate_or_refresh(
    authenticator: Authenticator, authorization: bytes | None, host: bytes
) -> Caller:
    """As `Callers.identify`, but a key that was made a moment ago is known too."""
    try:
        return authenticator.authenticate(authorization, host)
    except NotAuthenticated:
        if not await authenticator.refresh_if_stale():
            raise
    return authenticator.authenticate(authorization, host)


class AnonymousAuthenticator:
    """Lets everybody in who reaches the server, and gives all of them one tenant.

    A web page that has its own name resolve to this machine would be such a caller too; it gives itself away by the
    Host header. `hosts` are names by which the server may be called besides localhost and addresses.
    """

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._caller = Caller(scopes=frozenset(ALL_SCOPES))
        self._hosts = AllowedHosts(hosts)

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        del authorization
        if not self._hosts.matches(host):
            raise PermissionDenied(
                f"This server is not called {decode_header(host).strip().lower()[:100]!r}; if it should be, add the "
                "name to server.allowed_hosts."
            )
        return self._caller

    async def refresh_if_stale(self) -> bool:
        return False


class ApiKeyAuthenticator:
    """Lets those in who have a key; while there has never been one, everybody.

    A key protects better than the Host header does, so where there are keys, that is not looked at.
    `async with` looks for changes meanwhile.
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
        """How many keys are good."""
        return len(self._callers_by_digest)

    @property
    def allows_anonymous(self) -> bool:
        """Whether no key is needed."""
        return self._anonymous is not None

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        if self._anonymous is not None:
            return self._anonymous.authenticate(authorization, host)
        if authorization is None:
            raise NotAuthenticated(_MISSING_KEY_MESSAGE)
        if authorization[:7].lower() != _BEARER_PREFIX:
            raise NotAuthenticated(_MISSING_KEY_MESSAGE)
        # Found by a hash that the caller cannot steer: how long the search takes tells nothing about any secret.
        caller = self._callers_by_digest.get(hash_secret(authorization[7:].strip()))
        if caller is None:
            raise NotAuthenticated(_UNKNOWN_KEY_MESSAGE)
        return caller

    async def refresh_if_stale(self) -> bool:
        """Strangers cannot make it ask the database more often than every so often."""
        if self._clock.monotonic() < self._refreshed_at + KEY_REFRESH_SECONDS / 4:
            return False
        return await self._try_refresh()

    async def refresh(self) -> bool:
        """Take note of what has changed in the store, if anything has; raises Unavailable."""
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
        if (
            revision
        ):  # also when all were revoked, or none can be read: what was closed does not open by itself
            self._anonymous = None
        return True

    async def _refresh_periodically(self) -> None:
        while True:
            await self._clock.sleep(KEY_REFRESH_SECONDS)
            await self._try_refresh()

    async def _try_refresh(self) -> bool:
        try:
            return await self.refresh()
        except Exception as error:  # those who are known stay so, and the next look may succeed
            expected = isinstance(error, ApiError)
            logger.warning("keys could not be read: %s", error, exc_info=not expected)
            return False
