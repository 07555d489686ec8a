"""The objects of the API server of tests, their versions, and what happens to their dependents."""

import asyncio
import copy
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

type Object = dict[str, Any]
type Key = tuple[str, str, str]

CLAIMS, POOLS, TEMPLATES = "sandboxclaims", "sandboxwarmpools", "sandboxtemplates"
SANDBOXES = "sandboxes"
KINDS = {
    CLAIMS: "SandboxClaim",
    POOLS: "SandboxWarmPool",
    TEMPLATES: "SandboxTemplate",
    SANDBOXES: "Sandbox",
}


class ApiFailure(Exception):
    """A refusal, as the API server words it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


@dataclass(frozen=True)
class Change:
    """One event of a watch."""

    version: int
    kind: str
    type: str
    object: Object
    labels_before: Mapping[str, str] | None = None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def part(value: Object, key: str) -> Object:
    """Return a part of an object; an empty one if there is none."""
    return cast("Object", value.get(key) or {})


def parse_selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Return what a label selector of the form `a=b,c=d` finds."""
    wanted = [part.partition("=")[::2] for part in text.split(",") if part]
    return lambda labels: all(labels.get(key) == value for key, value in wanted)


def merge(target: Object, patch: Object) -> Object:
    """Apply a JSON merge patch."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = merge(
                cast("Object", inner) if isinstance(inner, dict) else {}, cast("Object", value)
            )
        else:
            merged[key] = value
    return merged


class ObjectStore:
    """All objects by plural, namespace and name.

    history: how many changes a watch can resume from. on_change: hears of every change.
    """

    def __init__(self, history: int = 1000) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.changes: deque[Change] = deque(maxlen=history)
        self.oldest_version = self.version
        self.on_change: list[Callable[[Change], None]] = []
        self._news = asyncio.Event()

    # ---- read ---------------------------------------------------------------------------------------------------

    def get(self, plural: str, namespace: str, name: str) -> Object:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise ApiFailure(404, "NotFound", f'{plural}.extensions.agents.x-k8s.io "{name}" not found')
        return copy.deepcopy(found)

    def list_objects(self, plural: str, namespace: str, selector: str = "") -> list[Object]:
        is_selected = parse_selector(selector)
        return [
            copy.deepcopy(found)
            for (kind, space, _), found in sorted(self.objects.items())
            if (kind, space) == (plural, namespace) and is_selected(part(found["metadata"], "labels"))
        ]

    def read_changes(self, after: int) -> list[Change]:
        """Return the changes after a version. Raises ApiFailure if it is too old."""
        if after < self.oldest_version:
            raise ApiFailure(410, "Expired", f"too old resource version: {after} ({self.oldest_version})")
        return [change for change in self.changes if change.version > after]

    def compact(self) -> None:
        """Forget the history: whoever wants to resume has to list again."""
        self.changes.clear()
        self.version += 1
        self.oldest_version = self.version
        self.wake()

    async def wait_for_news(self) -> None:
        await self._news.wait()

    def wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- write --------------------------------------------------------------------------------------------------

    def create(self, plural: str, namespace: str, body: Object) -> Object:
        metadata = dict(part(body, "metadata"))
        name = metadata.get("name")
        if not name:
            raise ApiFailure(422, "Invalid", "metadata.name: Required value")
        key = (plural, namespace, str(name))
        if key in self.objects:
            raise ApiFailure(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if plural == CLAIMS:
            _complete_claim(body)
        metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        metadata["generation"] = 1
        created = {**body, "kind": KINDS[plural], "metadata": metadata}
        if plural == CLAIMS:
            created.pop("status", None)  # it is written by a subresource
        return self._put(key, created, "ADDED")

    def update(self, plural: str, namespace: str, name: str, change: Callable[[Object], Object]) -> Object:
        """Replace an object by what `change` makes of it."""
        known = self.get(plural, namespace, name)
        updated = change(copy.deepcopy(known))
        if updated == known:
            return known
        if updated.get("spec") != known.get("spec"):
            updated["metadata"]["generation"] = known["metadata"]["generation"] + 1
        return self._put((plural, namespace, name), updated, "MODIFIED")

    def set_status(self, plural: str, namespace: str, name: str, status: Object) -> Object:
        return self.update(plural, namespace, name, lambda known: {**known, "status": status})

    def delete(
        self, plural: str, namespace: str, name: str, uid: str | None = None, *, foreground: bool = False
    ) -> Object:
        """Delete an object, then those that it owns. With a finalizer, or in the foreground, it is only marked."""
        known = self.get(plural, namespace, name)
        if uid is not None and known["metadata"]["uid"] != uid:
            found = known["metadata"]["uid"]
            raise ApiFailure(
                409,
                "Conflict",
                f"Precondition failed: UID in precondition: {uid}, UID in object meta: {found}",
            )
        if known["metadata"].get("finalizers") or foreground:
            return self.update(plural, namespace, name, _mark_deleted)
        key = (plural, namespace, name)
        del self.objects[key]
        known["metadata"]["resourceVersion"] = str(self._next_version())
        self._record(Change(self.version, plural, "DELETED", known))
        self._delete_dependents(namespace, known["metadata"]["uid"])
        return known

    def finish_deletion(self, plural: str, namespace: str, name: str) -> None:
        """Remove an object that was only marked."""
        self.update(
            plural,
            namespace,
            name,
            lambda known: {**known, "metadata": {**known["metadata"], "finalizers": []}},
        )
        self.delete(plural, namespace, name)

    def _delete_dependents(self, namespace: str, uid: str) -> None:
        for (plural, space, name), found in [*self.objects.items()]:
            owners = cast("list[Object]", found["metadata"].get("ownerReferences") or [])
            if space == namespace and any(owner["uid"] == uid for owner in owners):
                self.delete(plural, space, name)

    def _put(self, key: Key, value: Object, kind: str) -> Object:
        before = self.objects.get(key)
        value["metadata"]["resourceVersion"] = str(self._next_version())
        self.objects[key] = value
        labels = None if before is None else part(before["metadata"], "labels")
        self._record(Change(self.version, key[0], kind, copy.deepcopy(value), labels))
        return copy.deepcopy(value)

    def _next_version(self) -> int:
        self.version += 1
        return self.version

    def _record(self, change: Change) -> None:
        if len(self.changes) == self.changes.maxlen:
            self.oldest_version = self.changes[0].version
        self.changes.append(change)
        for listener in self.on_change:
            listener(change)
        self.wake()


def _complete_claim(body: Object) -> None:
    """Check a claim against what the definition of the resource requires, and fill in its defaults."""
    spec = part(body, "spec")
    if not part(spec, "warmPoolRef").get("name"):
        raise ApiFailure(422, "Invalid", "spec.warmPoolRef.name: Required value")
    lifecycle = part(spec, "lifecycle")
    if lifecycle:
        policy = lifecycle.setdefault("shutdownPolicy", "Retain")
        if policy not in ("Delete", "DeleteForeground", "Retain"):
            raise ApiFailure(422, "Invalid", f'spec.lifecycle.shutdownPolicy: Unsupported value: "{policy}"')
        at = lifecycle.get("shutdownTime")
        if at is not None:
            try:
                datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            except ValueError:
                raise ApiFailure(422, "Invalid", "spec.lifecycle.shutdownTime: must be a date-time") from None


def _mark_deleted(known: Object) -> Object:
    return {**known, "metadata": {**known["metadata"], "deletionTimestamp": now()}}
