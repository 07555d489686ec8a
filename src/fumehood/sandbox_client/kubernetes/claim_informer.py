"""A copy of the gateway's claims, kept current by one list and one watch."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

import msgspec

from fumehood.gateway_stats import ClaimStats
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_objects import (
    GROUP,
    VERSION,
    ApiStatus,
    ClaimEvent,
    ClaimList,
    SandboxClaim,
)
from fumehood.sandbox_client.remote_provider import LineSplitter

logger = logging.getLogger(__name__)

_PAGE_SIZE = 500
_WATCH_SECONDS = 240  # the server ends a watch after so long; a little more, at random, for each
_WATCH_MARGIN = 15.0
_MAX_LINE_BYTES = 8 << 20
_INITIAL_BACKOFF = 0.2
_MAX_BACKOFF = 15.0
_HEALTHY_SECONDS = 5.0  # a watch that lasted so long ends the back-off
_GONE = 410

_decode_event = msgspec.json.Decoder(ClaimEvent).decode
_decode_claim = msgspec.json.Decoder(SandboxClaim).decode


def claims_path(namespace: str, name: str = "") -> str:
    """Return the path of a claim, or of all claims of a namespace."""
    base = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxclaims"
    return f"{base}/{name}" if name else base


class ClaimInformer:
    """The claims of a namespace that a label selector finds.

    It survives an outage of the API server: the copy stays as it was, and the watch resumes with back-off.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        selector: str,
        stats: ClaimStats,
        on_deleted: Callable[[SandboxClaim], None],
        watch_seconds: float = _WATCH_SECONDS,
    ) -> None:
        self._api = api
        self._path = claims_path(namespace)
        self._selector = selector
        self._stats = stats
        self._on_deleted = on_deleted
        self._watch_seconds = watch_seconds
        self._claims: dict[str, SandboxClaim] = {}
        self._by_sandbox: dict[str, dict[str, SandboxClaim]] = {}
        self._changes: dict[str, asyncio.Future[None]] = {}
        self._resource_version = ""
        self._task: asyncio.Task[None] | None = None

    # ---- the copy -----------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether the copy is current."""
        return self._stats.is_watch_connected

    @property
    def claims(self) -> list[SandboxClaim]:
        return [*self._claims.values()]

    def get(self, name: str) -> SandboxClaim | None:
        """Return the claim of that name."""
        return self._claims.get(name)

    def find_by_sandbox(self, sandbox: str) -> list[SandboxClaim]:
        """Return the claims that were made for a sandbox, the oldest first; more than one only by a race."""
        return [*self._by_sandbox.get(sandbox, {}).values()]

    def observe(self, claim: SandboxClaim) -> None:
        """Note a claim that the API server has returned; an older version than the known one is ignored."""
        known = self._claims.get(claim.name)
        if known is not None and known.uid == claim.uid and _is_older(claim, known):
            return
        if known is not None and known.uid != claim.uid:
            self._remove(known)
        self._claims[claim.name] = claim
        self._by_sandbox.setdefault(claim.sandbox_name, {})[claim.name] = claim
        self._stats.open_claims = len(self._claims)
        self._notify(claim.name)

    def forget(self, name: str, uid: str) -> None:
        """Note that a claim is gone."""
        known = self._claims.get(name)
        if known is not None and known.uid == uid:
            self._remove(known)
            self._notify(name)

    def _remove(self, claim: SandboxClaim) -> None:
        del self._claims[claim.name]
        siblings = self._by_sandbox.get(claim.sandbox_name, {})
        siblings.pop(claim.name, None)
        if not siblings:
            self._by_sandbox.pop(claim.sandbox_name, None)
        self._stats.open_claims = len(self._claims)
        self._on_deleted(claim)

    def _notify(self, name: str) -> None:
        change = self._changes.pop(name, None)
        if change is not None and not change.done():
            change.set_result(None)

    async def wait_until(
        self, name: str, is_done: Callable[[SandboxClaim | None], bool], poll_seconds: float
    ) -> SandboxClaim | None:
        """Return the claim, or None if it is gone, as soon as `is_done` says so.

        poll_seconds: silence after which the API server is asked for the claim itself.
        """
        while not is_done(claim := self._claims.get(name)):
            change = self._changes.get(name)
            if change is None:
                change = self._changes[name] = asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait({change}, timeout=poll_seconds)
            if not done:
                await self._refresh(name)
        return claim

    async def _refresh(self, name: str) -> None:
        known = self._claims.get(name)
        try:
            self.observe(await self._api.request("GET", f"{self._path}/{name}", SandboxClaim))
        except KubernetesApiError as error:
            if error.status == 404 and known is not None:
                self.forget(name, known.uid)

    # ---- list and watch -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """List the claims, and keep them current from then on. Raises KubernetesApiError if they cannot be listed."""
        await self._list()
        self._task = asyncio.create_task(self._run(), name="sandbox claims: watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._stats.is_watch_connected = False

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started_at = loop.time()
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
                failures = 0  # the server ended it in the ordinary way
            except KubernetesApiError as error:
                self._stats.is_watch_connected = False
                if error.status == _GONE:  # the version to resume from is too old
                    self._resource_version = ""
                if loop.time() - started_at > _HEALTHY_SECONDS:
                    failures = 0
                if failures == 1:  # a single break is ordinary
                    logger.warning("Watching sandbox claims fails, and is tried again: %s", error.message)
                await asyncio.sleep(_backoff(failures, error))
                failures += 1
                self._stats.watch_failures += 1
            except Exception:  # a defect here must not leave every later claim waiting
                self._stats.is_watch_connected = False
                logger.exception("Watching sandbox claims failed.")
                self._resource_version = ""
                await asyncio.sleep(_MAX_BACKOFF)

    async def _list(self) -> None:
        """Replace the copy by what the API server has. What was created meanwhile stays: its events come."""
        before = dict(self._claims)
        found: dict[str, SandboxClaim] = {}
        query = {"labelSelector": self._selector, "limit": str(_PAGE_SIZE)}
        while True:
            page = await self._api.request("GET", self._path, ClaimList, query=query)
            found |= {claim.name: claim for claim in page.items}
            if not page.metadata.continue_token:
                break
            query["continue"] = page.metadata.continue_token
        for name, claim in before.items():
            latest = found.get(name)
            if (latest is None or latest.uid != claim.uid) and self._claims.get(name) is claim:
                self.forget(name, claim.uid)
        for claim in found.values():
            self.observe(claim)
        self._resource_version = page.metadata.resource_version
        self._stats.is_watch_connected = True

    async def _watch(self) -> None:
        """Follow the events until the server ends the watch. Raises KubernetesApiError."""
        seconds = self._watch_seconds * random.uniform(1.0, 1.25)  # noqa: S311 - replicas should not move in step
        query = {
            "watch": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        lines = LineSplitter(_MAX_LINE_BYTES)
        async with self._api.open_stream(self._path, query, seconds + _WATCH_MARGIN) as chunks:
            self._stats.is_watch_connected = True
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    for line in lines.feed(chunk):
                        if line:
                            self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=ApiStatus)
                raise KubernetesApiError(status.code or 500, status.reason, status.message)
            claim = _decode_claim(event.object)
        except msgspec.MsgspecError as error:
            raise KubernetesApiError(500, "Undecodable", f"cannot decode an event: {error}") from error
        if event.type in ("ADDED", "MODIFIED"):
            self.observe(claim)
        elif event.type == "DELETED":
            self.forget(claim.name, claim.uid)
        self._resource_version = claim.metadata.resource_version or self._resource_version


def _is_older(claim: SandboxClaim, known: SandboxClaim) -> bool:
    """Whether the first one is an earlier version. Versions of one resource are comparable as numbers."""
    version, known_version = claim.metadata.resource_version, known.metadata.resource_version
    if not version.isdecimal() or not known_version.isdecimal():
        return False
    return int(version) < int(known_version)


def _backoff(failures: int, error: KubernetesApiError) -> float:
    """Return how long to wait: at random up to a bound that doubles, and not less than the server asks for."""
    bound = min(_INITIAL_BACKOFF * 2**failures, _MAX_BACKOFF)
    return max(bound * random.uniform(0.5, 1.0), error.retry_after or 0.0)  # noqa: S311
