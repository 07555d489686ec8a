"""Requests with an Idempotency-Key: sent twice, they run once; imports `interfaces`, `protocol` and siblings.

While a run goes on, whoever repeats its request joins it, from the first event on. When it has ended, a response that
is kept is read from the store, and one that is not from here, as long as there is room to remember it. Few requests
have such keys, so nothing here needs to be as quick as `sse`.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from fumehood.gateway.exchange import Exchange, Vigil, encode
from fumehood.gateway.limits import Limits
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.sse import DONE, GONE, HEADERS, SIGN_OF_LIFE, TERMINAL, encode_events
from fumehood.interfaces import Caller, IdempotencyClaim, Run, Runs, Store
from fumehood.protocol.errors import ApiError, Conflict, InvalidRequest, RateLimited, ServerFault, to_detail
from fumehood.protocol.events import ErrorOccurred
from fumehood.protocol.folding import project_response
from fumehood.protocol.ids import new_id
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.protocol.unfolding import unfold

HEADER = "Idempotency-Key"
RETENTION = 86_400.0
GRACE = 10.0
"""Seconds for which a run goes on that nobody sees: its client may be about to come back."""

_LONGEST_KEY = 255
_MOST_FOLLOWERS = 16
_LARGEST_TAPE = 32 << 20
_REMEMBERED_BYTES = 64 << 20
_MOST_REMEMBERED = 10_000

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


def digest_of(body: bytes) -> bytes:
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
        self._remembered: OrderedDict[tuple[str, str], _Joint] = OrderedDict()
        self._remembered_bytes = 0

    async def answer(self, exchange: Exchange, asked: Asked) -> Response | None:
        """As the first request of that key was answered, or is going to be; how the response ended, if the client
        stayed for that. Raises Conflict for another request, and what a request without a key would raise.
        """
        joint = self._running.get(asked.place) or self._remembered.get(asked.place)
        first = joint is None
        if joint is None:
            joint = self._running[asked.place] = _Joint(asked.digest)
            joint.task = asyncio.create_task(
                self._drive(joint, asked), name=f"{HEADER} of {asked.caller.key}"
            )
        elif joint.digest != asked.digest:
            raise _other_request()
        found = await asyncio.shield(joint.begun)
        exchange.noted["response_id"] = found.id
        if not first or isinstance(found, Response):
            exchange.extra.append((b"idempotent-replayed", b"true"))
        if isinstance(found, Response):
            return await _show_kept(exchange, asked, found)
        if not asked.request.stream:
            return await joint.show(exchange)
        self._metrics.streams += 1
        try:
            return await joint.show_stream(exchange, self._silence)
        finally:
            self._metrics.streams -= 1

    # ---- the run ----------------------------------------------------------------------------------------------

    async def _drive(self, joint: "_Joint", asked: Asked) -> None:
        """A task of its own: whoever was first need not be the last to stay."""
        kept = asked.request.store is not False
        response_id = new_id("resp")
        try:
            with self._limits.running(asked.caller):
                earlier = await self._earlier(asked, response_id) if kept else None
                if earlier is not None:
                    joint.begun.set_result(earlier)
                else:
                    await self._run(joint, asked, response_id)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("A request with a key could not be served.")
                error = ServerFault("The server failed; its log says why.")
            joint.fail(error)
        finally:
            del self._running[asked.place]
            # What is kept is asked of the store from now on: there it can be deleted.
            if not kept and joint.error is None and not joint.forgotten:
                self._remember(joint, asked.place)

    def _remember(self, joint: "_Joint", place: tuple[str, str]) -> None:
        self._remembered[place] = joint
        self._remembered_bytes += joint.weight
        while self._remembered_bytes > _REMEMBERED_BYTES or len(self._remembered) > _MOST_REMEMBERED:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= oldest.weight

    async def _earlier(self, asked: Asked, response_id: str) -> Response | None:
        """What the key stands for; None if that is ours to make."""
        claim = IdempotencyClaim(asked.digest, response_id)
        found = await self._store.claim(*asked.place, claim, RETENTION)
        if found is None:
            return None
        if found.digest != asked.digest:
            raise _other_request()
        response = await self._store.response(asked.caller.tenant, found.response_id)
        if response is None:
            raise Conflict(
                f"The response of this {HEADER} is not there: it was deleted, or the server stopped before it was "
                "complete. Its code may have run; send another key to run it again.",
                param=HEADER,
                code="idempotency_response_gone",
            )
        if response.status in ("queued", "in_progress"):
            raise Conflict(
                f"The request of this {HEADER} is still being served.",
                param=HEADER,
                code="idempotency_in_progress",
                retry_after=1.0,
            )
        return response

    async def _run(self, joint: "_Joint", asked: Asked, response_id: str) -> None:
        """Whatever is refused, or fails before anything was made, does not use up the key."""
        made = False
        try:
            run = await self._runs.start(asked.request, asked.caller, response_id)
            made = bool(asked.request.stream)  # a blocking one that raises has made nothing
            joint.begin(run)
            response = await joint.record(run, asked)
        except ApiError:
            if not made and asked.request.store is not False:
                await self._store.release(*asked.place, response_id)
            raise
        self._metrics.streamed(joint.events)
        if response is not None:
            self._metrics.ended(response)


async def _show_kept(exchange: Exchange, asked: Asked, response: Response) -> Response:
    if asked.request.stream:
        await exchange.begin(200, [*HEADERS])
        await exchange.send(encode_events(unfold(response), asked.include) + DONE, more=False)
    else:
        await exchange.answer_json(project_response(response, asked.include))
    return response


@dataclass(slots=True, eq=False)
class _Follower:
    """Somebody who is shown a run; `position` is the number of the next piece."""

    position: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        await self.news.wait()
        self.news.clear()


class _Joint:
    """A run that several may be shown, in the bytes that they all get.

    begun: the run, once it has begun; or the response that the key has stood for since long ago.
    events: how many were told.
    forgotten: it became too long to be told again; only what somebody still waits for is here.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.begun: asyncio.Future[Run | Response] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None
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

    # ---- by the one who makes it --------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        self._run = run
        self.begun.set_result(run)
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

    def _end(self) -> None:
        self._over = True
        self._come()
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
        """The same, event by event."""
        with self._followed() as follower:
            await exchange.begin(200, [*HEADERS])
            with Vigil(exchange, follower.news.set, sign_of_life=SIGN_OF_LIFE, every=silence) as vigil:
                while not vigil.left:
                    if pieces := self._take(follower):
                        await exchange.send(pieces)
                    elif self._over:
                        break
                    else:
                        await follower.wait()
            if vigil.left:
                return None
            await exchange.send(b"" if self.error is None else self._last_words(self.error), more=False)
        return self._response

    def _last_words(self, error: ApiError) -> bytearray:
        """Of a stream that broke off, which should never happen to one that is read as fast as it is written."""
        told = ErrorOccurred(sequence_number=self.events, error=to_detail(error))
        return encode_events([told], ()) + DONE

    @contextlib.contextmanager
    def _followed(self) -> Generator[_Follower]:
        if self.forgotten and self._first:
            raise Conflict(
                f"The response of this {HEADER} is too long to be told again; GET /v1/responses/ID has it.",
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
            self._followers.remove(follower)
            if not self._followers and not self._over:
                self._miss()

    def _take(self, follower: _Follower) -> bytes:
        """What has come since the last time."""
        pieces = b"".join(self._pieces[follower.position - self._first :])
        follower.position = self._first + len(self._pieces)
        if self.forgotten:
            done = min(one.position for one in self._followers)
            del self._pieces[: done - self._first]
            self._first = done
        return pieces

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
