"""/v1/responses: make one, blocking or streamed, read it, delete it; imports `interfaces`, `protocol` and siblings."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from fumehood.aside import aside
from fumehood.gateway.exchange import Exchange, Vigil, encode
from fumehood.gateway.following import GONE
from fumehood.gateway.limits import Limits, Room
from fumehood.gateway.listing import page
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.reading import RequestReader, check_include
from fumehood.gateway.repeats import Asked, Repeats, body_digest, checked_key
from fumehood.gateway.shown import shown
from fumehood.gateway.sse import SILENCE, stream
from fumehood.interfaces import Caller, Run, Runs, Store
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import InvalidRequest, NotFound
from fumehood.protocol.folding import OPENAIS_EVENTS, project_response
from fumehood.protocol.responses import CompactedResponse, CreateResponse, Deleted, Response, Usage
from fumehood.serving.exchange import CallerLeft

# Sends a run to its end; how many events that were, and how it ended, None if the client did not stay for it.
type Follow = Callable[[Run, Collection[str]], Awaitable[tuple[int, Response | None]]]


class Responses:
    """Handlers of one path each.

    always: what every answer includes, asked for or not.
    """

    def __init__(
        self,
        runs: Runs,
        store: Store,
        metrics: Metrics,
        *,
        limits: Limits,
        always: Collection[str] = (),
        silence: float = SILENCE,
        reader: RequestReader | None = None,
    ) -> None:
        self.reader = reader or RequestReader()
        self._runs = runs
        self._store = store
        self._metrics = metrics
        self._limits = limits
        self._always = frozenset(always)
        self._silence = silence
        self._repeats = Repeats(runs, store, limits, metrics, silence)

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        with self._limits.room(caller) as room:
            request, body = await self._read(exchange, caller, room)
            include = self._shown_to(exchange, request)
            header = exchange.headers.get(b"idempotency-key")
            if header is not None:
                digest = await aside(len(body), body_digest, body)
                del body  # it may be large, and the run long
                asked = Asked(caller, checked_key(header), digest, request, include)
                self._note(exchange, await self._repeats.answer(exchange, asked, room))
                return
            del body
            await self._make(exchange, caller, request, partial(self._stream, exchange), room)

    def room(self, caller: Caller) -> Room:
        """For the body of a request that came otherwise."""
        return self._limits.room(caller)

    def message_bytes(self, caller: Caller) -> int:
        """The largest request that may come as a message."""
        return self._limits.body_bytes(caller)

    async def make(
        self,
        exchange: Exchange,
        caller: Caller,
        request: CreateResponse,
        follow: Follow,
        room: Room,
        past: Sequence[Segment] | None,
    ) -> tuple[Run, Response | None]:
        """Make a response of a request that came otherwise, streamed by `follow`; how it ended, None if the client did
        not stay. `room` holds what the request takes, `past` is as in `Runs.start`.
        """
        self._limits.count(caller, exchange.extra)
        exchange.noted["model"] = request.model
        return await self._make(exchange, caller, request, follow, room, past)

    async def _read(self, exchange: Exchange, caller: Caller, room: Room) -> tuple[CreateResponse, bytes]:
        self._limits.count(caller, exchange.extra)
        request, body = await self.reader.read(exchange, self._limits.body_bytes(caller), room.take)
        exchange.noted["model"] = request.model
        return request, body

    async def _make(
        self,
        exchange: Exchange,
        caller: Caller,
        request: CreateResponse,
        follow: Follow,
        room: Room,
        past: Sequence[Segment] | None = None,
    ) -> tuple[Run, Response | None]:
        with self._limits.running(caller):
            run = await self._runs.start(request, caller, past=past, take=room.take)
            exchange.noted["response_id"] = run.id
            response = await self._answer(exchange, run, request, follow)
        self._note(exchange, response)
        if response is not None:
            self._metrics.ended(response)
        return run, response

    async def _answer(
        self, exchange: Exchange, run: Run, request: CreateResponse, follow: Follow
    ) -> Response | None:
        include = self._shown_to(exchange, request)
        if not request.stream:
            return await self._wait(exchange, run, include)
        self._metrics.streams += 1
        try:
            events, response = await follow(run, include)
        finally:
            self._metrics.streams -= 1
        exchange.noted["events"] = events
        self._metrics.streamed(events)
        return response

    def _stream(
        self, exchange: Exchange, run: Run, include: Collection[str]
    ) -> Awaitable[tuple[int, Response | None]]:
        return stream(exchange, run, include, self._silence)

    async def _wait(self, exchange: Exchange, run: Run, include: Collection[str]) -> Response:
        with Vigil(exchange, lambda: run.cancel(GONE)):
            response = await run.wait()
        await exchange.answer_json(project_response(response, include))
        return response

    def _note(self, exchange: Exchange, response: Response | None) -> None:
        if response is None:
            exchange.noted["outcome"] = GONE
            return
        exchange.noted["outcome"] = response.status
        if response.usage is not None:
            self._note_usage(exchange, response.usage)

    def _note_usage(self, exchange: Exchange, usage: Usage) -> None:
        exchange.noted["input_tokens"] = usage.input_tokens
        exchange.noted["output_tokens"] = usage.output_tokens

    def _shown_to(self, exchange: Exchange, request: CreateResponse) -> frozenset[str]:
        include = self._always.union(request.include or ())
        return include.union((OPENAIS_EVENTS,)) if _breaks_at_ours(exchange.headers) else include

    async def count(self, exchange: Exchange, caller: Caller) -> None:
        with self._limits.room(caller) as room:
            request, _ = await self._read(exchange, caller, room)
            with self._limits.running(caller):
                counted = await self._runs.count(request, caller, take=room.take)
        await exchange.answer_json(counted)

    async def compact(self, exchange: Exchange, caller: Caller) -> None:
        with self._limits.room(caller) as room:
            request, _ = await self._read(exchange, caller, room)
            with self._limits.running(caller):
                compacted = await self._compacted(exchange, caller, request, room)
        self._note_usage(exchange, compacted.usage)
        self._metrics.compacted(compacted.usage)
        await exchange.answer_json(compacted)

    async def _compacted(
        self, exchange: Exchange, caller: Caller, request: CreateResponse, room: Room
    ) -> CompactedResponse:
        task = asyncio.ensure_future(self._runs.compact(request, caller, take=room.take))
        with Vigil(exchange, lambda: _stop(task)) as vigil:
            try:
                return await task
            except asyncio.CancelledError:
                if vigil.left:
                    raise CallerLeft from None
                raise

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        include = self._include(exchange)
        if exchange.query("stream") in ("true", "1"):
            raise InvalidRequest(
                "Only a response that was made in the background can be streamed again.", param="stream"
            )
        response = await self._find(exchange, caller)
        with self._limits.room(caller) as room:
            await _show(exchange, room, project_response(response, include))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        response_id = exchange.parameters["response_id"]
        if not await self._store.delete_response(caller.tenant, response_id):
            raise _not_found(response_id)
        await exchange.answer_json(Deleted(id=response_id, object="response"))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        response = await self._find(exchange, caller)
        if not response.background:
            raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
        await exchange.answer_json(project_response(response, self._always))

    async def input_items(self, exchange: Exchange, caller: Caller) -> None:
        include = self._include(exchange)
        response_id = exchange.parameters["response_id"]
        entries = await self._store.input_entries(caller.tenant, response_id)
        if entries is None:
            raise _not_found(response_id)
        # What was referred to again is listed once: pages are found by ids.
        once = {entry.id or "": entry for entry in entries}
        size = sum([entry.size for entry in entries])
        with self._limits.room(caller) as room:
            room.take_large(size)
            listed = await aside(
                size, page, exchange, list(once.items()), lambda entry: shown(entry, include)
            )
            await _show(exchange, room, listed)

    async def _find(self, exchange: Exchange, caller: Caller) -> Response:
        response_id = exchange.parameters["response_id"]
        response = await self._store.response(caller.tenant, response_id)
        if response is None:
            raise _not_found(response_id)
        return response

    def _include(self, exchange: Exchange) -> frozenset[str]:
        asked = exchange.queries("include")
        check_include(asked)
        return self._always.union(asked)


async def _show(exchange: Exchange, room: Room, value: object) -> None:
    """Something that may be large, and may be asked for again by whoever is told to come later. Raises RateLimited,
    Unavailable.
    """
    body = encode(value)
    room.take_large(len(body))
    await exchange.answer(body)


def _breaks_at_ours(headers: Mapping[bytes, bytes]) -> bool:
    """Whether it is `responses.stream()` of openai-node, which throws at an event that it does not know."""
    return (
        headers.get(b"x-stainless-helper-method") == b"stream" and headers.get(b"x-stainless-lang") == b"js"
    )


def _stop(task: asyncio.Future[CompactedResponse]) -> None:
    task.cancel()


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:100]!r} not found.", param="response_id")
