"""An API server for tests, over HTTP: objects, lists, watches, preconditions, and faults on request.

It implements what the gateway uses, as a real one does: resource versions, bookmarks, 409, 410, pages, label
selectors, the status subresource, UID preconditions and the deletion of dependents.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from tests.support.kubernetes.object_store import (
    KINDS,
    ApiFailure,
    Change,
    Object,
    ObjectStore,
    merge,
    parse_selector,
    part,
)

TOKEN = "a-token-of-a-service-account"
GROUP, VERSION = "extensions.agents.x-k8s.io", "v1beta1"
CONTROLLER_IMAGE = "registry.k8s.io/agent-sandbox/agent-sandbox-controller:v1.0.3"

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ApiFaults:
    """What goes wrong; may be changed while the server runs.

    failing: status and number of the next requests that fail, by method.
    delay: seconds before an answer, by method. denied: verbs that the caller may not use.
    bookmark_seconds: pause between two bookmarks.
    """

    failing: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    delay: dict[str, float] = field(default_factory=dict[str, float])
    denied: set[str] = field(default_factory=set[str])
    bookmark_seconds: float = 60.0


class KubernetesApiServer:
    """One API server; `requests` are the method, path and query of what was asked."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.store = store or ObjectStore()
        self.faults = ApiFaults()
        self.tokens = {TOKEN}
        self.requests: list[str] = []
        self.controller_image = CONTROLLER_IMAGE
        self.port = 0
        self.max_page = 500
        self.bookmarked_version = 0  # of the last bookmark that was sent
        self._watches: set[asyncio.Task[Any]] = set()
        self._muted: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def count(self, method: str, part: str = "") -> int:
        """Count requests of a method whose path or query contains a text."""
        return sum(line.startswith(f"{method} ") and part in line for line in self.requests)

    async def start(self) -> None:
        """Listen, on the same port as before."""
        app = web.Application(middlewares=[self._handle], client_max_size=0)
        base = f"/apis/{GROUP}/{VERSION}/namespaces/{{namespace}}/{{plural}}"
        app.add_routes(
            [
                web.get("/version", self._version),
                web.get(base, self._list),
                web.post(base, self._create),
                web.get(base + "/{name}", self._get),
                web.patch(base + "/{name}", self._patch),
                web.patch(base + "/{name}/status", self._patch_status),
                web.delete(base + "/{name}", self._delete),
                web.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review_access),
                web.get("/apis/apps/v1/namespaces/{namespace}/deployments/{name}", self._deployment),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End, as an API server does that is restarted: connections break."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def cut_watches(self) -> None:
        for task in self._watches:
            task.cancel()

    def mute_watches(self) -> None:
        """Send nothing more on the watches that are open, as over a connection that is dead without an end."""
        self._muted |= self._watches

    # ---- requests -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        await asyncio.sleep(self.faults.delay.get(request.method, 0))
        try:
            self._authorize(request)
            if left := self.faults.failing.get(request.method):
                raise ApiFailure(left.pop(0), "InternalError", "a fault of the test")
            return await handler(request)
        except ApiFailure as failure:
            return _answer_failure(failure)

    def _authorize(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.tokens:
            raise ApiFailure(401, "Unauthorized", "Unauthorized")
        verb = {"GET": "list" if "name" not in request.match_info else "get"}.get(request.method, "")
        verb = verb or {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[request.method]
        plural = request.match_info.get("plural")
        if plural is not None and self.is_denied(verb, plural):
            raise ApiFailure(
                403, "Forbidden", f'{plural}.{GROUP} is forbidden: User "gateway" cannot {verb} resource'
            )
        if plural is not None and plural not in KINDS:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")

    def is_denied(self, verb: str, plural: str) -> bool:
        return bool(self.faults.denied & {verb, f"{verb} {plural}"})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"gitVersion": "v1.35.8", "major": "1", "minor": "35"})

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.store.get(*_key(request)))

    async def _create(self, request: web.Request) -> web.Response:
        plural, namespace = request.match_info["plural"], request.match_info["namespace"]
        return web.json_response(
            self.store.create(plural, namespace, await _read_object(request)), status=201
        )

    async def _patch(self, request: web.Request) -> web.Response:
        patch = await _read_object(request)
        patch.pop("status", None)
        return web.json_response(self._merge(request, patch))

    async def _patch_status(self, request: web.Request) -> web.Response:
        patch = await _read_object(request)
        return web.json_response(self._merge(request, {"status": patch.get("status")}))

    def _merge(self, request: web.Request, patch: Object) -> Object:
        if request.content_type != "application/merge-patch+json":
            raise ApiFailure(415, "UnsupportedMediaType", "only merge patches are supported here")
        plural, namespace, name = _key(request)
        wanted = part(patch, "metadata").get("uid")
        if wanted is not None and wanted != self.store.get(plural, namespace, name)["metadata"]["uid"]:
            raise ApiFailure(409, "Conflict", "Precondition failed: UID in precondition")
        return self.store.update(plural, namespace, name, lambda known: merge(known, patch))

    async def _delete(self, request: web.Request) -> web.Response:
        options = await _read_object(request)
        uid = part(options, "preconditions").get("uid")
        foreground = options.get("propagationPolicy") == "Foreground"
        deleted = self.store.delete(*_key(request), uid, foreground=foreground)
        return web.json_response({"kind": "Status", "status": "Success", "details": deleted["metadata"]})

    async def _review_access(self, request: web.Request) -> web.Response:
        review = await _read_object(request)
        asked = review["spec"]["resourceAttributes"]
        allowed = not self.is_denied(asked["verb"], asked["resource"])
        return web.json_response({**review, "status": {"allowed": allowed}}, status=201)

    async def _deployment(self, request: web.Request) -> web.Response:
        if not self.controller_image:
            raise ApiFailure(404, "NotFound", "deployments.apps not found")
        containers = [{"name": "controller", "image": self.controller_image}]
        return web.json_response({"spec": {"template": {"spec": {"containers": containers}}}})

    # ---- list and watch -----------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        plural, namespace, query = (
            request.match_info["plural"],
            request.match_info["namespace"],
            request.query,
        )
        if query.get("watch") == "true":
            return await self._watch(request, plural, namespace)
        found = self.store.list_objects(plural, namespace, query.get("labelSelector", ""))
        version = self.store.version
        start = 0
        if token := query.get("continue"):
            page_version, start = map(int, token.split(":"))
            if page_version < self.store.oldest_version:
                raise ApiFailure(410, "Expired", "the provided continue parameter is too old")
            version = page_version
        size = min(int(query.get("limit", self.max_page)), self.max_page)
        metadata: Object = {"resourceVersion": str(version)}
        if start + size < len(found):
            metadata["continue"] = f"{version}:{start + size}"
        return web.json_response({"metadata": metadata, "items": found[start : start + size]})

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or self.store.version)
        changes = self.store.read_changes(version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.ensure_future(
            self._send_changes(request, response, plural, namespace, version, changes)
        )
        self._watches.add(task)
        try:
            await asyncio.wait({task}, timeout=float(request.query.get("timeoutSeconds", 300)))
        finally:
            self._watches.discard(task)
            was_cut = task.cancelled()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if was_cut and request.transport is not None:
            request.transport.abort()
        return response

    async def _send_changes(
        self,
        request: web.Request,
        response: web.StreamResponse,
        plural: str,
        namespace: str,
        version: int,
        changes: list[Change],
    ) -> None:
        is_selected = parse_selector(request.query.get("labelSelector", ""))
        bookmarks = request.query.get("allowWatchBookmarks") == "true"
        with contextlib.suppress(ConnectionResetError):
            while True:
                for change in changes:
                    version = change.version
                    if asyncio.current_task() in self._muted:
                        continue
                    metadata = change.object["metadata"]
                    if change.kind == plural and metadata["namespace"] == namespace:
                        await _send_change(response, change, is_selected)
                try:
                    changes = self.store.read_changes(version)
                    if changes:
                        continue
                    async with asyncio.timeout(self.faults.bookmark_seconds):
                        await self.store.wait_for_news()
                    changes = self.store.read_changes(version)
                except TimeoutError:
                    if bookmarks:
                        mark = {"kind": KINDS[plural], "metadata": {"resourceVersion": str(version)}}
                        await _send_line(response, "BOOKMARK", mark)
                        self.bookmarked_version = version
                except ApiFailure as failure:
                    await _send_line(response, "ERROR", _to_status(failure))
                    return


async def _send_change(
    response: web.StreamResponse, change: Change, is_selected: Callable[[dict[str, str]], bool]
) -> None:
    """Send a change to a watch: what its selector no longer finds is deleted for it."""
    selected = is_selected(part(change.object["metadata"], "labels"))
    was_selected = change.labels_before is not None and is_selected(dict(change.labels_before))
    if selected:
        kind = "ADDED" if change.type == "MODIFIED" and not was_selected else change.type
        await _send_line(response, kind, change.object)
    elif was_selected:
        await _send_line(response, "DELETED", change.object)


async def _send_line(response: web.StreamResponse, kind: str, value: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": value}).encode() + b"\n")


def _to_status(failure: ApiFailure) -> Object:
    return {
        "kind": "Status",
        "status": "Failure",
        "code": failure.code,
        "reason": failure.reason,
        "message": failure.message,
    }


def _answer_failure(failure: ApiFailure) -> web.Response:
    return web.json_response(_to_status(failure), status=failure.code)


def _key(request: web.Request) -> tuple[str, str, str]:
    info = request.match_info
    return info["plural"], info["namespace"], info["name"]


async def _read_object(request: web.Request) -> Object:
    content = await request.read()
    return cast("Object", json.loads(content)) if content else {}


@asynccontextmanager
async def run_api_server() -> AsyncGenerator[KubernetesApiServer]:
    server = KubernetesApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
