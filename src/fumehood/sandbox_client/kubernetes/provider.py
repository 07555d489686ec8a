"""A `SandboxProvider` whose sandboxes are pods, claimed from agent-sandbox."""

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urldefrag
from weakref import WeakValueDictionary

import msgspec

from fumehood.gateway_stats import ClaimStats
from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    InvalidServerToken,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    MemoryTier,
    ResourceName,
    SandboxInfo,
    SandboxSpec,
)
from fumehood.sandbox_client.kubernetes.api_client import KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.claim_objects import (
    MEMORY_LABEL,
    SANDBOX_ANNOTATION,
    ObjectMetadata,
    SandboxClaim,
)
from fumehood.sandbox_client.kubernetes.pod_sandbox import ClaimedPod, PodSandbox, make_pod_url
from fumehood.sandbox_client.kubernetes.sandbox_claims import ClaimSettings, SandboxClaims
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_client.server_connection import SandboxConnectionTimeouts

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_END_TIMEOUT = 1.0
_PARALLEL_REQUESTS = 32
_REPLACED = "The sandbox is gone: its pod has ended or was replaced."
# The pod is there, but there is no sandbox in it that this gateway could use.
_UNUSABLE = (SandboxGone, SandboxNotFound, InvalidServerToken)


class KubernetesSandboxProvider:
    """A `SandboxProvider` over the pods of one namespace; `async with` starts and closes it.

    Each sandbox has a claim and a pod of its own, and a pod is used once. Closing leaves the sandboxes running: a
    process with the same `gateway` finds them again. The address of a `SandboxRef` is the URL of the sandbox server in
    the pod, with the name and the UID of the claim as its fragment.

    api: closed with the provider. token: of the sandbox servers in the pods. port: on which they listen.
    timeouts: of requests to the sandbox servers. probe_seconds: how long a pod whose connection broke may be silent
        before it counts as lost.
    """

    def __init__(
        self,
        api: KubernetesApi,
        settings: ClaimSettings,
        *,
        token: str | None = None,
        port: int = 8080,
        stats: ClaimStats | None = None,
        timeouts: SandboxConnectionTimeouts | None = None,
        probe_seconds: float = _PROBE_SECONDS,
    ) -> None:
        self.stats = stats or ClaimStats()
        self.claims = SandboxClaims(api, settings, self.stats, self._forget_pod)
        self._api = api
        self._token = token
        self._port = port
        self._timeouts = timeouts or SandboxConnectionTimeouts()
        self._probe_seconds = probe_seconds
        self._pods: dict[str, ClaimedPod] = {}  # by the UID of the claim
        self._name_locks = WeakValueDictionary[str, asyncio.Lock]()
        self._background = set[asyncio.Task[None]]()
        self._closed = False

    def __repr__(self) -> str:
        return f"<KubernetesSandboxProvider {self._api.server} {self.claims.settings.namespace}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Raises SandboxServerUnreachable if the claims cannot be listed."""
        try:
            await self.claims.start()
        except KubernetesApiError as error:
            raise SandboxServerUnreachable(f"Sandbox claims cannot be listed: {error.message}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.claims.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        for pod in self._pods.values():
            await pod.remote.close()
        await self._api.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxServerUnreachable("The provider of sandboxes in pods has been closed.")

    @property
    def memory_tiers(self) -> tuple[MemoryTier, ...]:
        """The tiers that there are pools for, the smallest first."""
        return tuple(tier for tier in MEMORY_TIERS if tier in self.claims.settings.pools)

    @property
    def failures(self) -> int:
        """Count of requests to the API server that ended a watch."""
        return self.stats.watch_failures

    async def health(self) -> None:
        """Raise SandboxServerUnreachable if no sandbox can be used.

        While the API server is down the sandboxes that there are can be used, and the gateway stays ready.
        """
        self._check_open()

    # ---- the seam -----------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        self._check_open()
        name = secrets.token_hex(12) if name is None else name
        if not _is_valid_name(name):
            raise InvalidSandboxRequest(f"{name!r} cannot be the name of a sandbox.", param="name")
        async with self._name_lock(name):
            claim, is_new = await self.claims.claim(name, spec)
            pod = self._open_pod(claim, str(claim.pod_ip))
            try:
                await pod.remote.create(spec, name)
            except BaseException as error:
                if (
                    is_new
                    or isinstance(error, _UNUSABLE)
                    or (isinstance(error, SandboxServerUnreachable) and await pod.is_lost())
                ):
                    pod.lose()
                if isinstance(error, SandboxServerUnreachable | InvalidServerToken):
                    logger.error("The sandbox server at %s cannot be used: %s", pod.url, error.message)
                    raise SandboxStartFailed(
                        f"The pod of a new sandbox cannot be used: {error.message}"
                    ) from error
                raise
        return SandboxRef(name, _format_address(pod), from_warm_pool=claim.is_warm)

    async def attach(self, ref: SandboxRef) -> PodSandbox:
        self._check_open()
        if not _is_valid_name(ref.id):
            raise SandboxNotFound(f"There is no sandbox {ref.id!r}.")
        pod = await self._find_pod(ref)
        if not await self._is_current(pod, ask=False):
            pod.lose()
            raise SandboxGone(_REPLACED)
        try:
            await pod.read_info()
        except _UNUSABLE as error:
            pod.lose()
            raise SandboxGone(f"The sandbox is gone: {error.message}") from error
        except (SandboxServerUnreachable, TimeoutError) as error:
            if await pod.is_lost():
                pod.lose()
                raise SandboxGone(_REPLACED) from error
        return PodSandbox(pod)  # it answered, if late

    async def destroy(self, ref: SandboxRef) -> None:
        claims = await self._find_claims(ref)
        for claim in claims:
            self._end_sandbox(claim)
        await asyncio.gather(*(asyncio.shield(self.claims.release(claim)) for claim in claims))

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        self._check_open()
        claim = self.claims.find(ref.id, _parse_address(ref.address)[2])
        if claim is not None:
            await self.claims.extend(claim, until)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        self._check_open()
        limit = asyncio.Semaphore(_PARALLEL_REQUESTS)

        async def describe(claim: SandboxClaim) -> SandboxInfo:
            async with limit:
                return await self._describe(claim)

        return await asyncio.gather(*map(describe, self.claims.list_open()))

    # ---- claims and pods ----------------------------------------------------------------------------------------

    def _name_lock(self, name: str) -> asyncio.Lock:
        lock = self._name_locks.get(name)
        if lock is None:
            lock = self._name_locks[name] = asyncio.Lock()
        return lock

    async def _find_claims(self, ref: SandboxRef) -> list[SandboxClaim]:
        """Return the claim of a reference; without an address all claims of the sandbox."""
        _, name, uid = _parse_address(ref.address)
        known = self.claims.list_open(ref.id, uid)
        if not known and uid:  # another replica may have made it this moment
            return [_make_claim(ref.id, name, uid)]
        return known

    async def _find_pod(self, ref: SandboxRef) -> ClaimedPod:
        """Return the pod of a sandbox, even if it has ended. Raises SandboxNotFound, SandboxServerUnreachable."""
        url, name, uid = _parse_address(ref.address)
        claim = self.claims.find(ref.id, uid)
        if claim is None and uid:
            claim = _make_claim(ref.id, name, uid)
            try:
                claim = await self.claims.fetch(claim)
            except KubernetesApiError as error:  # the pod may well be reached
                logger.info("The claim of %s cannot be read now: %s", ref.id, error.message)
        if claim is None:
            raise SandboxNotFound(f"There is no sandbox {ref.id}.")
        if url:
            return self._open_pod(claim, url=url)
        if claim.pod_ip is None:
            raise SandboxServerUnreachable("The pod of the sandbox is not ready.")
        return self._open_pod(claim, claim.pod_ip)

    def _open_pod(self, claim: SandboxClaim, address: str = "", *, url: str = "") -> ClaimedPod:
        pod = self._pods.get(claim.uid)
        url = url or make_pod_url(address, self._port)
        if pod is None or pod.url != url:
            pod = self._pods[claim.uid] = ClaimedPod(
                claim,
                RemoteSandboxProvider(url, self._token, timeouts=self._timeouts),
                self.claims.release,
                self._is_current,
                self._probe_seconds,
            )
        return pod

    async def _is_current(self, pod: ClaimedPod, *, ask: bool = True) -> bool:
        """Whether the claim still has this pod, as far as one can tell. ask: the API server, not only the copy."""
        claim = self.claims.find(pod.sandbox, pod.claim.uid)
        if ask:
            try:
                claim = await self.claims.fetch(pod.claim)
            except KubernetesApiError:
                return True
            if claim is None:
                return False
        if claim is None:
            return not pod.has_ended
        if claim.is_deleting or claim.failure is not None:
            return False
        return claim.pod_ip is None or make_pod_url(claim.pod_ip, self._port) == pod.url

    def _end_sandbox(self, claim: SandboxClaim) -> None:
        """End the code at once: a pod has time to shut down."""
        pod = self._pods.get(claim.uid)
        if pod is None and claim.pod_ip is not None:
            pod = self._open_pod(claim, claim.pod_ip)
        if pod is None or pod.has_ended:
            return
        pod.end()

        async def end() -> None:
            with suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT):
                    await pod.remote.destroy(SandboxRef(pod.sandbox))

        pod.ending = self._run_in_background(end())

    def _forget_pod(self, claim: SandboxClaim) -> None:
        """Close the connection to a pod whose claim is gone."""
        pod = self._pods.pop(claim.uid, None)
        if pod is None:
            return
        pod.end()

        async def close() -> None:
            if pod.ending is not None:
                await pod.ending
            await pod.remote.close()

        self._run_in_background(close())

    def _run_in_background(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(step)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _describe(self, claim: SandboxClaim) -> SandboxInfo:
        """Return what the sandbox server says, or what the claim says if it does not answer."""
        if claim.pod_ip is not None:
            pod = self._open_pod(claim, claim.pod_ip)
            with suppress(SandboxError, TimeoutError):
                return await pod.read_info()
        memory = claim.metadata.labels.get(MEMORY_LABEL, "")
        created_at = claim.metadata.created_at
        return SandboxInfo(
            id=claim.sandbox_name,
            memory=memory if memory in MEMORY_TIERS else "1g",
            tenant="",
            created_at=created_at,
            last_used_at=created_at,
        )


def _format_address(pod: ClaimedPod) -> str:
    return f"{pod.url}#{pod.claim.name}/{pod.claim.uid}"


def _parse_address(address: str) -> tuple[str, str, str]:
    """Return the URL of the sandbox server, and the name and UID of the claim; empty without an address."""
    url, fragment = urldefrag(address)
    name, _, uid = fragment.partition("/")
    return url, name, uid


def _make_claim(sandbox: str, name: str, uid: str) -> SandboxClaim:
    """Return what is known of a claim without asking."""
    return SandboxClaim(
        metadata=ObjectMetadata(name=name, uid=uid, annotations={SANDBOX_ANNOTATION: sandbox})
    )


def _is_valid_name(text: str) -> bool:
    try:
        msgspec.convert(text, ResourceName)
    except msgspec.ValidationError:
        return False
    return True
