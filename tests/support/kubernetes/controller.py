"""A stand-in for the controller of agent-sandbox: adopts pods from warm pools, or starts them."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tests.support.kubernetes.object_store import (
    CLAIMS,
    POOLS,
    SANDBOXES,
    TEMPLATES,
    ApiFailure,
    Change,
    Object,
    ObjectStore,
    now,
    part,
)
from tests.support.kubernetes.pods import Pod, PodHost

SANDBOX_ANNOTATION = "fumehood/sandbox"

type PodEnd = Literal["failed", "replaced", "unnoticed"]


@dataclass
class ControllerBehaviour:
    """How it behaves; may be changed while it runs.

    warm_seconds, cold_seconds: until a claim has a pod. max_pods: a quota; claims beyond it stay pending.
    is_paused: whether it does nothing at all.
    """

    warm_seconds: float = 0.0
    cold_seconds: float = 0.05
    max_pods: int = 1000
    is_paused: bool = False


class StandInController:
    """Reconciles claims, pools and pods of one namespace until it is closed."""

    def __init__(self, store: ObjectStore, namespace: str, host: PodHost) -> None:
        self.behaviour = ControllerBehaviour()
        self.pods: dict[str, Pod] = {}  # by the name of their Sandbox
        self.addresses: list[str] = []  # of all pods that were ever claimed
        self.problems: list[BaseException] = []
        self._store = store
        self._namespace = namespace
        self._host = host
        self._warm: dict[str, deque[str]] = {}
        self._starting = 0
        self._number = 0
        self._pod_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        store.on_change.append(self._on_change)

    async def close(self) -> None:
        self._store.on_change.remove(self._on_change)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(pod.stop("") for pod in self.pods.values()))
        assert not self.problems, self.problems

    def count_warm(self, pool: str) -> int:
        return len(self._warm.get(pool, ()))

    @property
    def is_idle(self) -> bool:
        """Whether no pod is being started or ended."""
        return not self._tasks

    # ---- events ---------------------------------------------------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        match change.kind, change.type:
            case ("sandboxclaims", "ADDED"):
                self._run(self._serve_claim(name, change.object["metadata"]["uid"]))
                self._schedule_shutdown(change.object)
            case ("sandboxclaims", "MODIFIED"):
                self._schedule_shutdown(change.object)
            case ("sandboxwarmpools", "ADDED"):
                self._run(self._fill_pool(name))
            case ("sandboxes", "DELETED"):
                self._run(self._stop_pod(name, change.object))
            case _:
                pass

    def _run(self, step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._check(step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except ApiFailure as failure:
            if failure.code != 404:  # the object was deleted meanwhile
                self.problems.append(failure)
        except Exception as error:
            self.problems.append(error)

    def _schedule_shutdown(self, claim: Object) -> None:
        at = part(claim["spec"], "lifecycle").get("shutdownTime")
        if at is None:
            return
        left = (datetime.fromisoformat(at) - datetime.now(UTC)).total_seconds()
        name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]

        def expire() -> None:
            with contextlib.suppress(ApiFailure):
                known = self._store.get(CLAIMS, self._namespace, name)
                if known["metadata"]["uid"] == uid and known["spec"]["lifecycle"]["shutdownTime"] == at:
                    self._store.delete(CLAIMS, self._namespace, name, uid)

        asyncio.get_running_loop().call_later(max(left, 0), expire)

    # ---- pools ----------------------------------------------------------------------------------------------------

    async def _fill_pool(self, pool: str) -> None:
        warm = self._warm.setdefault(pool, deque())
        wanted = self._store.get(POOLS, self._namespace, pool)["spec"].get("replicas", 1)
        while len(warm) < wanted and len(self.pods) + self._starting < self.behaviour.max_pods:
            owner = self._store.get(POOLS, self._namespace, pool)
            self._number += 1
            name = f"{pool}-{self._number:05d}"
            await self._start_pod(name, owner)
            warm.append(name)
        self._store.set_status(
            POOLS, self._namespace, pool, {"replicas": len(warm), "readyReplicas": len(warm)}
        )

    async def _start_pod(self, name: str, owner: Object) -> None:
        """Start a pod and its Sandbox, which ends with its owner."""
        self._starting += 1
        try:
            pod = await self._host.start_pod()
        finally:
            self._starting -= 1
        self.pods[name] = pod
        try:
            self._store.get(*_key_of(owner, self._namespace))
        except ApiFailure:  # the owner was deleted meanwhile
            await self.pods.pop(name).stop("")
            return
        body = {
            "metadata": {"name": name, "ownerReferences": [_refer_to(owner)]},
            "status": {"podIPs": [pod.address]},
        }
        self._store.create(SANDBOXES, self._namespace, body)

    async def _stop_pod(self, name: str, sandbox: Object) -> None:
        pod = self.pods.pop(name, None)
        if pod is not None:
            await pod.stop(sandbox["metadata"].get("annotations", {}).get(SANDBOX_ANNOTATION, ""))
        ended, self._pod_ended = self._pod_ended, asyncio.Event()
        ended.set()

    # ---- claims ---------------------------------------------------------------------------------------------------

    async def _serve_claim(self, name: str, uid: str) -> None:
        while self.behaviour.is_paused:
            await asyncio.sleep(0.01)
        claim = self._store.get(CLAIMS, self._namespace, name)
        pool = claim["spec"]["warmPoolRef"]["name"]
        if not self._check_pool(name, pool):
            return
        warm = self._warm.setdefault(pool, deque())
        sandbox = warm.popleft() if warm else None
        if sandbox is not None:
            await asyncio.sleep(self.behaviour.warm_seconds)
            self._adopt(sandbox, claim)
            self._run(self._fill_pool(pool))
        else:
            sandbox = name
            await self._start_cold(claim)
        if self._store.get(CLAIMS, self._namespace, name)["metadata"]["uid"] == uid:
            self._set_ready(name, sandbox)

    def _check_pool(self, claim: str, pool: str) -> bool:
        try:
            found = self._store.get(POOLS, self._namespace, pool)
        except ApiFailure:
            self._set_not_ready(claim, "WarmPoolNotFound", f'SandboxWarmPool "{pool}" not found')
            return False
        template = found["spec"]["sandboxTemplateRef"]["name"]
        try:
            self._store.get(TEMPLATES, self._namespace, template)
        except ApiFailure:
            self._set_not_ready(claim, "TemplateNotFound", f'SandboxTemplate "{template}" not found')
            return False
        return True

    def _adopt(self, sandbox: str, claim: Object) -> None:
        def adopt(known: Object) -> Object:
            return {
                **known,
                "metadata": {
                    **known["metadata"],
                    "ownerReferences": [_refer_to(claim)],
                    "annotations": _sandbox_annotation(claim),
                },
            }

        try:
            self._store.get(CLAIMS, self._namespace, claim["metadata"]["name"])
        except ApiFailure:  # deleted while it waited: the pod is not given to anybody else
            self._store.delete(SANDBOXES, self._namespace, sandbox)
            raise
        self._store.update(SANDBOXES, self._namespace, sandbox, adopt)

    async def _start_cold(self, claim: Object) -> None:
        name = claim["metadata"]["name"]
        self._set_not_ready(name, "DependenciesNotReady", "Pod does not exist")
        while len(self.pods) + self._starting >= self.behaviour.max_pods:
            await self._pod_ended.wait()
            self._store.get(CLAIMS, self._namespace, name)
        await asyncio.sleep(self.behaviour.cold_seconds)
        await self._start_pod(name, claim)
        self._adopt(name, claim)

    def _set_ready(self, claim: str, sandbox: str) -> None:
        pod = self.pods[sandbox]
        self.addresses.append(pod.address)
        status = {
            "conditions": [_condition("True", "DependenciesReady", "Pod is Ready")],
            "sandbox": {"name": sandbox, "podIPs": [pod.address]},
        }
        self._store.set_status(CLAIMS, self._namespace, claim, status)

    def _set_not_ready(self, claim: str, reason: str, message: str) -> None:
        known = self._store.get(CLAIMS, self._namespace, claim)
        sandbox = part(part(known, "status"), "sandbox")
        status = {
            "conditions": [_condition("False", reason, message)],
            "sandbox": {"name": sandbox.get("name", "")},
        }
        self._store.set_status(CLAIMS, self._namespace, claim, status)

    # ---- what a test does to a pod ----------------------------------------------------------------------------------

    async def kill_pod(self, claim: str, end: PodEnd = "failed") -> None:
        """Kill the pod of a claim. end: what becomes of it: as a whole it has failed, or a new one is started."""
        known = self._store.get(CLAIMS, self._namespace, claim)
        sandbox = known["status"]["sandbox"]["name"]
        await self.pods[sandbox].kill(known["metadata"]["annotations"].get(SANDBOX_ANNOTATION, ""))
        if end == "failed":
            self._set_not_ready(claim, "PodFailed", "Pod failed")
        elif end == "replaced":
            self._set_not_ready(claim, "DependenciesNotReady", "Pod does not exist")
            self.pods[sandbox] = await self._host.start_pod()
            self._set_ready(claim, sandbox)


def _condition(status: str, reason: str, message: str) -> Object:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
    }


def _refer_to(owner: Object) -> Object:
    return {"kind": owner["kind"], "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def _key_of(owner: Object, namespace: str) -> tuple[str, str, str]:
    plural = CLAIMS if owner["kind"] == "SandboxClaim" else POOLS
    return plural, namespace, owner["metadata"]["name"]


def _sandbox_annotation(claim: Object) -> dict[str, str]:
    return {SANDBOX_ANNOTATION: part(claim["metadata"], "annotations").get(SANDBOX_ANNOTATION, "")}
