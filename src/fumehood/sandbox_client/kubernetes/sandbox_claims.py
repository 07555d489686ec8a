"""Makes claims for sandboxes, waits until they have a pod, extends and deletes them."""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from fumehood.gateway_stats import ClaimStats
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    SandboxConflict,
    SandboxError,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier, SandboxSpec
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_informer import ClaimInformer, claims_path
from fumehood.sandbox_client.kubernetes.claim_objects import (
    GATEWAY_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MEMORY_LABEL,
    REPLICA_LABEL,
    SANDBOX_ANNOTATION,
    ClaimLifecycle,
    ClaimSpec,
    ObjectMetadata,
    SandboxClaim,
    WarmPoolReference,
    format_time,
)

logger = logging.getLogger(__name__)

_MERGE_PATCH = "application/merge-patch+json"
_POLL_SECONDS = 5.0
_INITIAL_BACKOFF = 0.1
_MAX_BACKOFF = 5.0
_DELETE_SECONDS = 600.0  # a claim that cannot be deleted for so long is left to its shutdown time, or a sweep
_MAX_USED_NAMES = 10_000
# Names are derived within this namespace of UUIDs, which is itself derived.
_UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:fumehood:sandbox-claims")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSettings:
    """How claims are made.

    namespace: of the claims and of the pools. pools: the pool of each memory tier.
    gateway: identifies the containers' database: gateways with the same one share their claims.
    replica: identifies this process.
    lifetime: seconds after which the controller deletes a claim that nobody extends.
    slack: seconds that a claim outlives the sandbox that it is for.
    delete_seconds: how long a deletion is tried.
    poll_seconds: silence after which a claim that somebody waits for is asked for.
    in_flight: maximum of claims that wait for a pod; further ones queue in this process.
    """

    namespace: str
    pools: Mapping[MemoryTier, str]
    gateway: str
    replica: str
    lifetime: float = 3600.0
    slack: float = 600.0
    in_flight: int = 64
    delete_seconds: float = _DELETE_SECONDS
    poll_seconds: float = _POLL_SECONDS


class SandboxClaims:
    """The claims of one gateway in one namespace."""

    def __init__(
        self,
        api: KubernetesApi,
        settings: ClaimSettings,
        stats: ClaimStats,
        on_deleted: Callable[[SandboxClaim], None],
    ) -> None:
        self.settings = settings
        self.stats = stats
        self._api = api
        self._path = claims_path(settings.namespace)
        self._slots = asyncio.Semaphore(settings.in_flight)
        self._deletions: dict[str, asyncio.Task[None]] = {}  # by UID
        self._used_names: OrderedDict[str, None] = OrderedDict()
        self._on_deleted = on_deleted
        self.informer = ClaimInformer(
            api,
            settings.namespace,
            f"{MANAGED_BY_LABEL}={MANAGED_BY},{GATEWAY_LABEL}={settings.gateway}",
            stats,
            self._note_deleted,
        )

    async def start(self) -> None:
        """Raises KubernetesApiError if claims cannot be listed."""
        await self.informer.start()

    async def close(self) -> None:
        """Wait a moment for deletions that are under way; a later sweep finds what they leave."""
        if self._deletions:
            await asyncio.wait(self._deletions.values(), timeout=_MAX_BACKOFF)
        for task in self._deletions.values():
            task.cancel()
        await asyncio.gather(*self._deletions.values(), return_exceptions=True)
        await self.informer.close()

    def _note_deleted(self, claim: SandboxClaim) -> None:
        # The controller names a cold sandbox after its claim. While the old one is being removed, a new claim of the
        # same name would wait for it.
        self._used_names[claim.name] = None
        while len(self._used_names) > _MAX_USED_NAMES:
            self._used_names.popitem(last=False)
        self._on_deleted(claim)

    # ---- find ---------------------------------------------------------------------------------------------------

    def find(self, sandbox: str, uid: str = "") -> SandboxClaim | None:
        """Return the claim of a sandbox, as far as it is known: the one with that UID, if one is given."""
        return next(iter(self.list_open(sandbox, uid)), None)

    def list_open(self, sandbox: str | None = None, uid: str = "") -> list[SandboxClaim]:
        """Return the claims that are not being deleted: of one sandbox, or all; with that UID, if one is given."""
        found = self.informer.claims if sandbox is None else self.informer.find_by_sandbox(sandbox)
        return [
            claim
            for claim in found
            if uid in ("", claim.uid) and claim.uid not in self._deletions and not claim.is_deleting
        ]

    async def fetch(self, claim: SandboxClaim) -> SandboxClaim | None:
        """Return the claim as it is now, None if it is gone. Raises KubernetesApiError."""
        try:
            latest = await self._api.request("GET", f"{self._path}/{claim.name}", SandboxClaim)
        except KubernetesApiError as error:
            if error.status != 404:
                raise
            self.informer.forget(claim.name, claim.uid)
            return None
        self.informer.observe(latest)
        return latest if latest.uid == claim.uid else None

    # ---- claim --------------------------------------------------------------------------------------------------

    async def claim(self, sandbox: str, spec: SandboxSpec) -> tuple[SandboxClaim, bool]:
        """Return a claim for the sandbox whose pod is ready, and whether it is new. Raises SandboxError.

        It waits as long as the caller lets it. A new claim that does not become ready is deleted.
        """
        pool = self._choose_pool(spec.memory)
        known = self.find(sandbox)
        if known is not None and known.metadata.labels.get(MEMORY_LABEL, spec.memory) != spec.memory:
            raise SandboxConflict(f"The sandbox {sandbox} has another specification.", param="memory")
        if known is not None and known.pod_ip is not None:
            return known, False
        async with self._slots:
            self.stats.in_flight += 1
            started_at = time.monotonic()
            try:
                claim, is_new = await self._create_or_adopt(sandbox, pool, spec.memory)
                ready = await self._wait_ready(claim, is_new=is_new)
            except BaseException as error:
                self.stats.failures[_failure_label(error)] += 1
                raise
            finally:
                self.stats.in_flight -= 1
        if is_new:
            self.stats.ready_seconds["warm" if ready.is_warm else "cold"].observe(
                time.monotonic() - started_at
            )
        return ready, is_new

    def _choose_pool(self, memory: MemoryTier) -> str:
        pool = self.settings.pools.get(memory)
        if pool is None:
            raise InvalidSandboxRequest(
                f"There are no sandboxes with {memory} of memory here, only with "
                f"{', '.join(self.settings.pools)}.",
                param="memory",
            )
        return pool

    async def _create_or_adopt(
        self, sandbox: str, pool: str, memory: MemoryTier
    ) -> tuple[SandboxClaim, bool]:
        """Return a claim for the sandbox, and whether this call has made it."""
        backoff = _INITIAL_BACKOFF
        name = self._choose_name(sandbox)
        is_outcome_unknown = False
        while True:
            known = self.find(sandbox)
            if known is not None and known.failure is None:
                is_own = known.metadata.labels.get(REPLICA_LABEL) == self.settings.replica
                return known, is_outcome_unknown and is_own and known.name == name
            if known is not None:
                await asyncio.shield(self.release(known))
            if name in self._used_names:
                name, is_outcome_unknown = self._choose_name(sandbox), False
            try:
                return await self._create(name, sandbox, pool, memory), True
            except KubernetesApiError as error:
                if error.status == 409:
                    await self._adopt_existing(name)
                elif error.is_transient:
                    is_outcome_unknown = True  # it may have been made, and the response lost
                    logger.info("A claim could not be made, and is tried again: %s", error.message)
                else:
                    raise self._explain_refusal(error) from error
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF)

    def _choose_name(self, sandbox: str) -> str:
        """Derive the name from that of the sandbox, so that replicas cannot make two; a random one if it was used."""
        name = str(uuid.uuid5(_UUID_NAMESPACE, f"{self.settings.gateway}/{sandbox}"))
        return str(uuid.uuid4()) if name in self._used_names else name

    async def _create(self, name: str, sandbox: str, pool: str, memory: MemoryTier) -> SandboxClaim:
        shutdown_at = time.time() + self.settings.lifetime + self.settings.slack
        claim = SandboxClaim(
            metadata=ObjectMetadata(
                name=name,
                labels={
                    MANAGED_BY_LABEL: MANAGED_BY,
                    GATEWAY_LABEL: self.settings.gateway,
                    REPLICA_LABEL: self.settings.replica,
                    MEMORY_LABEL: memory,
                },
                annotations={SANDBOX_ANNOTATION: sandbox},
            ),
            spec=ClaimSpec(
                warm_pool_ref=WarmPoolReference(name=pool),
                lifecycle=ClaimLifecycle(shutdown_time=format_time(shutdown_at), shutdown_policy="Delete"),
            ),
        )
        # A task of its own: if the caller gives up now, the claim may already be there and must be deleted.
        request = asyncio.ensure_future(self._post(claim))
        try:
            created = await asyncio.shield(request)
        except asyncio.CancelledError:
            request.add_done_callback(self._release_abandoned)
            raise
        self.informer.observe(created)
        return created

    async def _post(self, claim: SandboxClaim) -> SandboxClaim:
        body = {
            "apiVersion": claim.api_version,
            "kind": claim.kind,
            "metadata": claim.metadata,
            "spec": claim.spec,
        }
        return await self._api.request("POST", self._path, SandboxClaim, body=body)

    def _release_abandoned(self, request: asyncio.Task[SandboxClaim]) -> None:
        if not request.cancelled() and request.exception() is None:
            self.informer.observe(request.result())
            self.release(request.result())

    async def _adopt_existing(self, name: str) -> None:
        """Learn of a claim whose name is taken: another replica has just made it, or it is being deleted."""
        try:
            existing = await self._api.request("GET", f"{self._path}/{name}", SandboxClaim)
        except KubernetesApiError as error:
            if error.status == 404:
                return
            raise SandboxStartFailed(f"A claim cannot be read: {error.message}") from error
        self.informer.observe(existing)
        if existing.is_deleting:
            self._used_names[name] = None

    async def _wait_ready(self, claim: SandboxClaim, *, is_new: bool) -> SandboxClaim:
        try:
            latest = await self.informer.wait_until(
                claim.name, lambda found: _is_settled(found, claim.uid), self.settings.poll_seconds
            )
            if latest is None or latest.uid != claim.uid or latest.is_deleting:
                raise SandboxStartFailed("The claim of a sandbox was deleted before it had a pod.")
            if latest.failure is not None:
                raise self._explain_failure(latest)
            return latest
        except BaseException as error:
            latest = self.informer.get(claim.name)
            if isinstance(error, asyncio.CancelledError) and latest is not None:
                logger.warning(
                    "The claim %s of %s got no pod in time: %s",
                    claim.name,
                    claim.spec.warm_pool_ref.name,
                    latest.describe_state(),
                )
            if is_new or isinstance(error, SandboxError):
                self.release(claim)
            raise

    def _explain_refusal(self, error: KubernetesApiError) -> SandboxError:
        if error.status == 403 and "exceeded quota" in error.message:
            logger.warning(
                "The namespace %s takes no further claims: %s", self.settings.namespace, error.message
            )
            return SandboxServerAtCapacity("the quota for sandboxes is used up.")
        logger.error(
            "The API server refuses claims in the namespace %s: %s. `fumehood doctor --config` says what is missing.",
            self.settings.namespace,
            error.message,
        )
        return SandboxServerUnreachable("Sandboxes cannot be claimed: the Kubernetes API refuses it.")

    def _explain_failure(self, claim: SandboxClaim) -> SandboxError:
        pool = claim.spec.warm_pool_ref.name
        logger.error("The claim %s of %s has failed: %s", claim.name, pool, claim.describe_state())
        if claim.failure == "configuration":
            return SandboxServerUnreachable(
                f"The warm pool {pool} cannot provide sandboxes: {claim.describe_state()}"
            )
        return SandboxStartFailed(f"The pod of a new sandbox has ended: {claim.describe_state()}")

    # ---- extend and delete --------------------------------------------------------------------------------------

    async def extend(self, claim: SandboxClaim, until: float) -> None:
        """Move the shutdown time so that the claim outlives a time, unless it does with most of the slack."""
        shutdown_at = claim.shutdown_at
        if shutdown_at is None or shutdown_at >= until + self.settings.slack / 2:
            return
        patch = {"spec": {"lifecycle": {"shutdownTime": format_time(until + self.settings.slack)}}}
        path = f"{self._path}/{claim.name}"
        body = {"metadata": {"uid": claim.uid}, **patch}  # refused if the name belongs to another claim now
        try:
            self.informer.observe(
                await self._api.request("PATCH", path, SandboxClaim, body=body, content_type=_MERGE_PATCH)
            )
        except KubernetesApiError as error:
            if error.status == 404:
                self.informer.forget(claim.name, claim.uid)
            elif error.status != 409:
                logger.warning("The claim %s could not be extended: %s", claim.name, error.message)

    def release(self, claim: SandboxClaim) -> asyncio.Task[None]:
        """Delete a claim in the background, and with it its pod; return the task, which ends when it is done."""
        task = self._deletions.get(claim.uid)
        if task is None:
            task = asyncio.create_task(self._delete(claim), name=f"sandbox claims: delete {claim.name}")
            self._deletions[claim.uid] = task
            task.add_done_callback(lambda _: self._deletions.pop(claim.uid, None))
        return task

    async def _delete(self, claim: SandboxClaim) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.delete_seconds
        backoff = _INITIAL_BACKOFF
        body = {"preconditions": {"uid": claim.uid}, "propagationPolicy": "Background"}
        while True:
            try:
                await self._api.request("DELETE", f"{self._path}/{claim.name}", msgspec.Raw, body=body)
                break
            except KubernetesApiError as error:
                if error.status in (404, 409):  # it is gone, or the name belongs to another claim
                    break
                if loop.time() + backoff > deadline:
                    logger.error(
                        "The claim %s could not be deleted and is left to its shutdown time: %s",
                        claim.name,
                        error.message,
                    )
                    self.stats.failures["delete"] += 1
                    return
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF)
        self.informer.forget(claim.name, claim.uid)


def _is_settled(claim: SandboxClaim | None, uid: str) -> bool:
    """Whether there is nothing more to wait for: a pod, a failure, or the end."""
    if claim is None or claim.uid != uid or claim.is_deleting:
        return True
    return claim.pod_ip is not None or claim.failure is not None


def _failure_label(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "timeout"
    return error.code if isinstance(error, SandboxError) else "error"
