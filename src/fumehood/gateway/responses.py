"""/v1/responses: make one, blocking or streamed, read it, delete it; imports `interfaces`, `protocol` and siblings."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from fumehood.gateway.exchange import Exchange, Vigil
from fumehood.gateway.listing import page
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.reading import check_include, read_request
from fumehood.gateway.shown import shown
from fumehood.gateway.sse import GONE, SILENCE, stream
from fumehood.interfaces import Caller, Run, Runs, Store
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import InvalidRequest, NotFound, RateLimited
from fumehood.protocol.folding import project_response
from fumehood.protocol.responses import CreateResponse, Deleted, Response

# Sends a run to its end; how many events that were, and how it ended, None if the client did not stay for it.
type Follow = Callable[[Run, Collection[str]], Awaitable[tuple[int, Response | None]]]


class Responses:
    """Handlers of one path each.

    concurrent: how many responses may be in the making at once.
    always: what every answer includes, asked for or not.
    """

    def __init__(
        self,
        runs: Runs,
        store: Store,
        metrics: Metrics,
        *,
        body_bytes: int,
        concurrent: int,
        always: Collection[str] = (),
        silence: float = SILENCE,
    ) -> None:
        self._runs = runs
        self._store = store
        self._metrics = metrics
        self._body_bytes = body_bytes
        self._concurrent = concurrent
        self._running = 0
        self._always = frozenset(always)
        self._silence = silence

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        request = await read_request(exchange, self._body_bytes)
        await self.make(exchange, caller, request, partial(self._stream, exchange))

    async def make(
        self,
        exchange: Exchange,
        caller: Caller,
        request: CreateResponse,
        follow: Follow,
        past: Sequence[Segment] | None = None,
    ) -> tuple[Run, Response | None]:
        """Make a response and answer with it, streamed by `follow`; how it ended, None if the client did not stay.

        past: as in `Runs.start`.
        """
        if self._running >= self._concurrent:
            raise RateLimited(
                f"This server makes {self._concurrent} responses at once; try again soon.", retry_after=1.0
            )
        self._running += 1
        try:
            return await self._make(exchange, caller, request, follow, past)
        finally:
            self._running -= 1

    async def _make(
        self,
        exchange: Exchange,
        caller: Caller,
        request: CreateResponse,
        follow: Follow,
        past: Sequence[Segment] | None,
    ) -> tuple[Run, Response | None]:
        include = self._always.union(request.include or ())
        exchange.noted["model"] = request.model
        run = await self._runs.start(request, caller, past)
        exchange.noted["response_id"] = run.id
        if request.stream:
            self._metrics.streams += 1
            try:
                events, response = await follow(run, include)
            finally:
                self._metrics.streams -= 1
            exchange.noted["events"] = events
            self._metrics.streamed(events)
        else:
            response = await self._wait(exchange, run, include)
        self._note(exchange, response)
        return run, response

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
            exchange.noted["input_tokens"] = response.usage.input_tokens
            exchange.noted["output_tokens"] = response.usage.output_tokens
        self._metrics.ended(response)

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        include = self._include(exchange)
        if exchange.query("stream") in ("true", "1"):
            raise InvalidRequest(
                "Only a response that was made in the background can be streamed again.", param="stream"
            )
        response = await self._find(exchange, caller)
        await exchange.answer_json(project_response(response, include))

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
        await exchange.answer_json(page(exchange, list(once.items()), lambda entry: shown(entry, include)))

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


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:100]!r} not found.", param="response_id")
