"""Requests with an Idempotency-Key: sent twice, they run once; imports `interfaces`, `protocol` and siblings.

While a run goes on, whoever repeats its request joins it, from the first event on. When it has ended, a response that
is kept is read from the store, and one that is not from here, as long as there is room to remember it; after that it
is still known that it ran. Few requests have such keys, so nothing here needs to be as quick as `sse`.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from fumehood.gateway.exchange import Exchange, Vigil, encode
from fumehood.gateway.following import GONE, TERMINAL
from fumehood.gateway.limits import Limits, Room
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.sse import DONE, HEADERS, SIGN_OF_LIFE, encode_events
from fumehood.interfaces import Caller, IdempotencyClaim, Run, Runs, Store, TakeRoom
from fumehood.protocol.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    RateLimited,
    ServerFault,
    to_detail,
)
from fumehood.protocol.events import ErrorOccurred
from fumehood.protocol.folding import project_response
from fumehood.protocol.ids import new_id
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.protocol.shortage import find_shortage
from fumehood.protocol.unfolding import unfold

HEADER = "Idempotency-Key"
RETENTION = 86_400.0
GRACE = 10.0
"""Seconds for which a run goes on that nobody sees: its client may be about to come back."""

_LONGEST_KEY = 255
_MOST_FOLLOWERS = 16
_LARGEST_TAPE = 32 << 20
_REMEMBERED_BYTES = 64 << 20
_TAPE_ITSELF = 6 << 10  # bytes, besides what is on it
_MOST_TRACES = 10_000  # of each tenant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, with the key that it came with. The same key in another request is a mistake of the client's."""

    caller: Caller
    key: str
    digest: bytes
    request: CreateResponse
    include: Collection[str]

    @property
    def place(self) -> tuple[str, str]:
        return self.caller.tenant, self.key

    @property
    def kept(self) -> bool:
        return self.request.store is not False


def body_digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def checked_key(header: bytes) -> str:
    """Raises InvalidRequest."""
    key = header.decode("latin-1").strip()
    if not 0 < len(key) <= _LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise InvalidRequest(
            f"{HEADER} must have 1 to {_LONGEST_KEY} visible ASCII characters.",
            param=HEADER,
            code="invalid_value",
        )
    return key


class Repeats:
    """All requests with keys that this process is serving, or remembers."""

    def __init__(self, runs: Runs, store: Store, limits: Limits, metrics: Metrics, silence: float) -> None:
        self._runs = runs
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._silence = silence
        self._running: dict[tuple[str, str], _Joint] = {}
        self._memory = _Memory()

    async def answer(self, exchange: Exchange, asked: Asked, room: Room) -> Response | None:
        """As the first request of that key was answered, or is going to be; how the response ended, if the client
        stayed for that. Raises Conflict for another request, and what a request without a key would raise.

        room: what holds the request's body; a run that begins takes it along.
        """
        joint = self._running.get(asked.place) or self._memory.find(asked)
        first = joint is None
        if joint is None:
            joint = self._running[asked.place] = _Joint(asked.digest, new_id("resp"))
            joint.task = asyncio.create_task(
                self._drive(joint, asked, room.hand_over()), name=f"{HEADER} of {asked.caller.key}"
            )
        elif joint.digest != asked.digest:
            raise _other_request()
        kept = await asyncio.shield(joint.begun)
        exchange.noted["response_id"] = joint.response_id if kept is None else kept.id
        if not first or kept is not None:
            exchange.extra.append((b"idempotent-replayed", b"true"))
        if kept is not None:
            return await self._show_kept(exchange, asked, kept)
        if not asked.request.stream:
            return await joint.show(exchange)
        self._metrics.streams += 1
        try:
            return await joint.show_stream(exchange, self._silence)
        finally:
            self._metrics.streams -= 1

    async def _show_kept(self, exchange: Exchange, asked: Asked, response: Response) -> Response:
        """Raises RateLimited, Unavailable; it is there for whoever comes again."""
        with self._limits.room(asked.caller) as room:
            if not asked.request.stream:
                body = encode(project_response(response, asked.include))
                room.take_large(len(body))
                await exchange.answer(body)
            else:
                events = encode_events(unfold(response), asked.include) + DONE
                room.take_large(len(events))
                await exchange.begin(200, [*HEADERS])
                await exchange.send(events, more=False)
        return response

    # ---- the run ----------------------------------------------------------------------------------------------

    async def _drive(self, joint: "_Joint", asked: Asked, room: Room) -> None:
        """A task of its own: whoever was first need not be the last to stay."""
        try:
            with room, self._limits.running(asked.caller):
                earlier = await self._earlier(asked, joint.response_id)
                if earlier is not None:
                    joint.begun.set_result(earlier)
                else:
                    await self._run(joint, asked, room.take)
        except Exception as error:
            if not isinstance(error, ApiError):
                lack = find_shortage(error)
                if lack is None:
                    logger.exception("A request with a key could not be served.")
                error = lack or ServerFault("The server failed; its log says why.")
            joint.fail(error)
        finally:
            del self._running[asked.place]
            # What is kept is asked of the store from now on: there it can be deleted.
            if joint.ran and not asked.kept:
                self._memory.add(asked.place, joint)

    async def _earlier(self, asked: Asked, response_id: str) -> Response | None:
        """What the key stands for; None if that is ours to make."""
        if asked.kept:
            claim = IdempotencyClaim(asked.digest, response_id)
            found = await self._store.claim(*asked.place, claim, RETENTION)
        else:  # nothing of it is written, but another one with this key may be
            found = await self._store.claimed(*asked.place)
        if found is None:
            return None
        if found.digest != asked.digest:
            raise _other_request()
        response = await self._store.response(asked.caller.tenant, found.response_id)
        if response is None:
            raise _gone(
                found, "it could not be stored, was deleted, or the server stopped before it was complete"
            )
        if response.status in ("queued", "in_progress"):
            raise Conflict(
                f"The request of this {HEADER} is still being served.",
                param=HEADER,
                code="idempotency_in_progress",
                retry_after=1.0,
            )
        return response

    async def _run(self, joint: "_Joint", asked: Asked, take: TakeRoom) -> None:
        """Whatever is refused, or fails before anything was made, does not use up the key."""
        try:
            run = await self._runs.start(asked.request, asked.caller, joint.response_id, take=take)
        except Exception:
            await self._release(joint, asked)
            raise
        joint.begin(run)
        try:
            response = await joint.record(run, asked)
        except ApiError as error:
            # A blocking one that raises has made nothing, unless it could not be stored.
            if not asked.request.stream and not error.may_have_run:
                joint.ran = False
                await self._release(joint, asked)
            raise
        self._metrics.streamed(joint.events)
        if response is not None:
            self._metrics.ended(response)

    async def _release(self, joint: "_Joint", asked: Asked) -> None:
        if asked.kept:
            await self._store.release(*asked.place, joint.response_id)


class _Past:
    """What is remembered of one tenant, by key, the oldest first.

    tapes: runs that can be told again; `weight` is that of all of them.
    traces: what else ran, and cannot be told again.
    """

    def __init__(self) -> None:
        self.tapes: OrderedDict[str, _Joint] = OrderedDict()
        self.traces: OrderedDict[str, IdempotencyClaim] = OrderedDict()
        self.weight = 0

    def keep(self, key: str, joint: "_Joint") -> None:
        self.tapes[key] = joint
        self.weight += joint.weight + _TAPE_ITSELF

    def erase_oldest(self) -> int:
        """Leave a trace of it; how much lighter that is."""
        key, joint = self.tapes.popitem(last=False)
        lighter = joint.weight + _TAPE_ITSELF
        self.weight -= lighter
        self.trace(key, joint)
        return lighter

    def trace(self, key: str, joint: "_Joint") -> None:
        self.traces[key] = IdempotencyClaim(joint.digest, joint.response_id)
        if len(self.traces) > _MOST_TRACES:
            self.traces.popitem(last=False)


class _Memory:
    """The runs that have ended, and whose responses are in no store. Room for them is shared, but whoever has taken
    most of it makes room for others; that something ran is forgotten by nobody else's doing.
    """

    def __init__(self) -> None:
        self._pasts: defaultdict[str, _Past] = defaultdict(_Past)
        self._weight = 0

    def find(self, asked: Asked) -> "_Joint | None":
        """Raises Conflict where it is only known that it ran."""
        past = self._pasts.get(asked.caller.tenant)
        if past is None:
            return None
        trace = past.traces.get(asked.key)
        if trace is None:
            return past.tapes.get(asked.key)
        if trace.digest != asked.digest:
            raise _other_request()
        raise _gone(
            trace, "it was not stored, and broke off, was too long to be remembered, or had to make room"
        )

    def add(self, place: tuple[str, str], joint: "_Joint") -> None:
        tenant, key = place
        past = self._pasts[tenant]
        if not joint.whole:
            past.trace(key, joint)
            return
        past.keep(key, joint)
        self._weight += joint.weight + _TAPE_ITSELF
        while self._weight > _REMEMBERED_BYTES:
            heaviest = max(self._pasts.values(), key=lambda one: one.weight)
            self._weight -= heaviest.erase_oldest()


@dataclass(slots=True, eq=False)
class _Follower:
    """Somebody who is shown a run.

    position: the number of the next piece.
    taken: the bytes before it.
    lost: too much had come that was not taken.
    """

    position: int = 0
    taken: int = 0
    lost: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        await self.news.wait()
        self.news.clear()


class _Joint:
    """A run that several may be shown, in the bytes that they all get.

    begun: done when the run has begun; or with the response that the key has stood for since long ago.
    ran: whether code may have run.
    events: how many were told.
    weight: their bytes.
    forgotten: it became too long to be told again; only what somebody still waits for is here.
    """

    def __init__(self, digest: bytes, response_id: str) -> None:
        self.digest = digest
        self.response_id = response_id
        self.begun: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None
        self.ran = False
        self.events = 0
        self.weight = 0
        self.forgotten = False
        self._run: Run | None = None
        self._response: Response | None = None
        self._pieces: list[bytes] = []
        self._first = 0  # the number of the first piece that is still here
        self._over = False
        self._followers: list[_Follower] = []
        self._leaving: asyncio.TimerHandle | None = None

    @property
    def whole(self) -> bool:
        """Whether it can be told again from the first event to the last."""
        return self._over and self.error is None and not self.forgotten

    # ---- by the one who makes it --------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        self._run = run
        self.ran = True
        self.begun.set_result(None)
        self._miss()

    async def record(self, run: Run, asked: Asked) -> Response | None:
        """Everything that the run says; raises ApiError where it ends with nothing but that."""
        if asked.request.stream:
            await self._record_events(run, asked.include)
        else:
            self._response = await run.wait()
            self._add(encode(project_response(self._response, asked.include)))
        self._end()
        return self._response

    async def _record_events(self, run: Run, include: Collection[str]) -> None:
        async for batch in run.subscribe():
            self._leave_behind()
            self._add(bytes(encode_events(batch, include)))
            self.events += len(batch)
            if isinstance(batch[-1], TERMINAL):
                self._response = batch[-1].response
        self._add(DONE)

    def fail(self, error: ApiError) -> None:
        self.error = error
        if not self.begun.done():
            self.begun.set_exception(error)
            self.begun.exception()  # perhaps nobody waits any more
        self._end()

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.weight += len(piece)
        self.forgotten = self.weight > _LARGEST_TAPE
        self._wake()

    def _leave_behind(self) -> None:
        """Before more comes: drop those for whom too much is waiting already, and then what nobody has yet to take."""
        for follower in [*self._followers]:
            if self.weight - follower.taken > _LARGEST_TAPE:
                follower.lost = True
                self._leave(follower)
        self._trim()

    def _end(self) -> None:
        self._over = True
        self._come()
        self._run = None  # it holds the whole conversation, and this may be remembered for long
        self._wake()

    def _wake(self) -> None:
        for follower in self._followers:
            follower.news.set()

    # ---- by those who see it ------------------------------------------------------------------------------------

    async def show(self, exchange: Exchange) -> Response | None:
        """The response, when it is there; None if the client did not wait for it."""
        with self._followed() as follower:
            with Vigil(exchange, follower.news.set) as vigil:
                while not self._over and not vigil.left:
                    await follower.wait()
            if vigil.left:
                return None
            if self.error is not None:
                raise self.error
            await exchange.answer(self._pieces[0])
        return self._response

    async def show_stream(self, exchange: Exchange, silence: float) -> Response | None:
        """As `show`, event by event."""
        with self._followed() as follower:
            await exchange.begin(200, [*HEADERS])
            with Vigil(exchange, follower.news.set, sign_of_life=SIGN_OF_LIFE, every=silence) as vigil:
                while not vigil.left and not follower.lost:
                    if pieces := self._take(follower):
                        await exchange.send(pieces)
                    elif self._over:
                        break
                    else:
                        await follower.wait()
            if vigil.left:
                return None
            error = _too_slow() if follower.lost else self.error
            await exchange.send(b"" if error is None else self._last_words(error), more=False)
        return None if follower.lost else self._response

    def _last_words(self, error: ApiError) -> bytearray:
        """What ends a stream that broke off."""
        told = ErrorOccurred(sequence_number=self.events, error=to_detail(error))
        return encode_events([told], ()) + DONE

    @contextlib.contextmanager
    def _followed(self) -> Generator[_Follower]:
        if self.forgotten and self._first:
            raise Conflict(
                f"The response of this {HEADER} is too long to be told again; if it is stored, GET "
                "/v1/responses/ID has it.",
                param=HEADER,
                code="idempotency_response_too_long",
            )
        if len(self._followers) >= _MOST_FOLLOWERS:
            raise RateLimited(f"Too many requests with this {HEADER} are waiting.", retry_after=1.0)
        follower = _Follower()
        self._followers.append(follower)
        self._come()
        try:
            yield follower
        finally:
            if not follower.lost:
                self._leave(follower)

    def _leave(self, follower: _Follower) -> None:
        self._followers.remove(follower)
        if not self._followers and not self._over:
            self._miss()

    def _take(self, follower: _Follower) -> bytes:
        """What has come since the last time."""
        pieces = b"".join(self._pieces[follower.position - self._first :])
        follower.position = self._first + len(self._pieces)
        follower.taken = self.weight
        self._trim()
        return pieces

    def _trim(self) -> None:
        """Of what cannot be told again, keep only what somebody has yet to take."""
        if self.forgotten:
            end = self._first + len(self._pieces)
            done = min((one.position for one in self._followers), default=end)
            del self._pieces[: done - self._first]
            self._first = done

    def _miss(self) -> None:
        """Nobody sees it now."""
        if self._run is not None:
            self._leaving = asyncio.get_running_loop().call_later(GRACE, self._run.cancel, GONE)

    def _come(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None


def _other_request() -> Conflict:
    return Conflict(
        f"This {HEADER} was used for another request; every request needs a key of its own.",
        param=HEADER,
        code="idempotency_key_reused",
    )


def _gone(claim: IdempotencyClaim, why: str) -> Conflict:
    return Conflict(
        f"The response of this {HEADER}, {claim.response_id}, is not there: {why}. Its code may have run; send another "
        "key to run it again.",
        param=HEADER,
        code="idempotency_response_gone",
    )


def _too_slow() -> ServerFault:
    return ServerFault("The events were not read fast enough, and more of them are not kept for this stream.")
