"""Who a request is from, and whether it may be from there; imports `interfaces`, `protocol` and `serving`.

To recognise a key nothing is awaited and no database asked: a gateway knows all of them, and looks every few seconds,
and when somebody shows one that it does not know, whether there are others. What it is told of a request are two
headers, so any kind of connection can be asked about.
"""

import asyncio
import logging
from types import TracebackType
from typing import Protocol, Self

from fumehood.interfaces import Caller, Clock, Store
from fumehood.protocol.errors import ApiError, NotAuthenticated
from fumehood.protocol.keys import SCOPES, KeyScope, digest_of
from fumehood.serving.browsers import HostNames, decode_header

LOOK_SECONDS = 2.0
"""How long a key that was revoked may still be taken for a good one."""

_SCHEME = b"bearer "
_NO_KEY = "No API key was given; send one as Authorization: Bearer KEY."
_WRONG_KEY = "The API key is not known here, or was revoked; `fumehood keys create` makes one."

logger = logging.getLogger(__name__)


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class MissingScope(Forbidden):
    code = "missing_scope"


def check_scope(caller: Caller, scope: KeyScope) -> None:
    """Raises MissingScope, in OpenAI's words, for a key that is not for this."""
    if scope not in caller.scopes:
        raise MissingScope(
            f"You have insufficient permissions for this operation. Missing scopes: {scope}. This key is for "
            f"{', '.join(sorted(caller.scopes))}; `fumehood keys create --scope {scope}` makes one for this."
        )


class Callers(Protocol):
    """Knows who may ask."""

    def identify(self, authorization: bytes | None, host: bytes) -> Caller:
        """Who it is that sends these two headers; raises ApiError for somebody who may not ask."""
        ...

    async def look_again(self) -> bool:
        """Whether somebody who was not known may be known now."""
        ...


async def identified(callers: Callers, authorization: bytes | None, host: bytes) -> Caller:
    """As `Callers.identify`, but a key that was made a moment ago is known too."""
    try:
        return callers.identify(authorization, host)
    except NotAuthenticated:
        if not await callers.look_again():
            raise
    return callers.identify(authorization, host)


class Everybody:
    """Lets everybody in who reaches the server, and gives all of them one tenant.

    A web page that has its own name resolve to this machine would be such a caller too; it gives itself away by the
    Host header. `hosts` are names by which the server may be called besides localhost and addresses.
    """

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._caller = Caller(scopes=frozenset(SCOPES))
        self._hosts = HostNames(hosts)

    def identify(self, authorization: bytes | None, host: bytes) -> Caller:
        del authorization
        if not self._hosts.include(host):
            raise Forbidden(
                f"This server is not called {decode_header(host).strip().lower()[:100]!r}; if it should be, add the "
                "name to server.hosts."
            )
        return self._caller

    async def look_again(self) -> bool:
        return False


class KeyHolders:
    """Lets those in who have a key; while there has never been one, everybody.

    A key protects better than the Host header does, so where there are keys, that is not looked at.
    `async with` looks for changes meanwhile.
    """

    def __init__(self, store: Store, clock: Clock, everybody: Everybody) -> None:
        self._store = store
        self._clock = clock
        self._everybody: Everybody | None = everybody
        self._callers: dict[bytes, Caller] = {}
        self._revision = -1
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._looking = asyncio.create_task(self._look_forever(), name="keys")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @property
    def number(self) -> int:
        """How many keys are good."""
        return len(self._callers)

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return self._everybody is not None

    def identify(self, authorization: bytes | None, host: bytes) -> Caller:
        if self._everybody is not None:
            return self._everybody.identify(authorization, host)
        if authorization is None:
            raise NotAuthenticated(_NO_KEY)
        if authorization[:7].lower() != _SCHEME:
            raise NotAuthenticated(_NO_KEY)
        # Found by a hash that the caller cannot steer: how long the search takes tells nothing about any secret.
        caller = self._callers.get(digest_of(authorization[7:].strip()))
        if caller is None:
            raise NotAuthenticated(_WRONG_KEY)
        return caller

    async def look_again(self) -> bool:
        """Strangers cannot make it ask the database more often than every so often."""
        if self._clock.monotonic() < self._looked_at + LOOK_SECONDS / 4:
            return False
        return await self._look()

    async def refresh(self) -> bool:
        """Take note of what has changed in the store, if anything has; raises Unavailable."""
        self._looked_at = self._clock.monotonic()
        revision = await self._store.keys_revision()
        if revision == self._revision:
            return False
        keys = await self._store.keys()
        self._callers = {
            key.digest: Caller(key.tenant, key.id, key.limits, key.scopes)
            for key in keys
            if key.revoked_at is None
        }
        self._revision = revision
        if (
            revision
        ):  # also when all were revoked, or none can be read: what was closed does not open by itself
            self._everybody = None
        return True

    async def _look_forever(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> bool:
        try:
            return await self.refresh()
        except Exception as error:  # those who are known stay so, and the next look may succeed
            expected = isinstance(error, ApiError)
            logger.warning("keys could not be read: %s", error, exc_info=not expected)
            return False
