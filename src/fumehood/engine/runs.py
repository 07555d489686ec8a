"""Runs: tasks of their own, whose logs anybody may read; imports `interfaces`, `protocol` and siblings."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fumehood.aside import aside
from fumehood.engine.attached import Attacher
from fumehood.engine.compaction import USUAL_LIMIT, Compactor
from fumehood.engine.history import History
from fumehood.engine.log import EventLog, LagLimits
from fumehood.engine.loop import Loop, LoopLimits
from fumehood.engine.preparation import Preparation, Prepared
from fumehood.engine.tokens import Tokens, effort, is_rendered
from fumehood.engine.truncation import check_length
from fumehood.figures import Figures
from fumehood.interfaces import (
    Attachments,
    Caller,
    Clock,
    HostedTool,
    Lease,
    ModelBackend,
    Models,
    Reading,
    Sealer,
    Store,
    TakeRoom,
)
from fumehood.protocol.conversation import Segment, pieces_of
from fumehood.protocol.errors import ApiError, ServerFault, Unavailable
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.ids import new_id
from fumehood.protocol.models import ModelRequest
from fumehood.protocol.responses import CompactedResponse, CreateResponse, InputTokens, Response, Usage

logger = logging.getLogger(__name__)

# A good deal shorter than any store's lease, so that a slow database costs no run.
_RENEW_SECONDS = 10.0


class EngineRun:
    """See `interfaces.Run`."""

    def __init__(
        self, response_id: str, log: EventLog, loop: Loop, forget: Callable[["EngineRun"], None]
    ) -> None:
        self.id = response_id
        self._log = log
        self._loop = loop
        self._forget = forget
        self._over = False
        self._tell_when_over: list[Callable[[Response | BaseException], None]] = []
        self.task = asyncio.create_task(self._drive(), name=response_id)
        self.task.add_done_callback(self._end)

    async def _drive(self) -> Response:
        try:
            return await self._loop.drive()
        finally:
            self._log.close()

    def _end(self, _: object) -> None:
        self._over = True
        self._forget(self)
        for tell in self._tell_when_over:
            tell(self._outcome())

    def subscribe(self, after: int = -1) -> AsyncGenerator[Sequence[StreamEvent]]:
        return self._log.read(after)

    def watch(self, wake: Callable[[], None], after: int = -1) -> Reading:
        return self._log.watch(after, wake)

    async def wait(self) -> Response:
        # A waiter that is cancelled leaves the run alone: ending it is somebody's decision.
        await asyncio.shield(self.task)
        outcome = self._outcome()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def when_over(self, tell: Callable[[Response | BaseException], None]) -> None:
        if self._over:
            tell(self._outcome())
        else:
            self._tell_when_over.append(tell)

    def _outcome(self) -> Response | BaseException:
        """What a waiter gets, or is raised to it."""
        try:
            response = self.task.result()
        except BaseException as error:
            return error
        failure = self._loop.failure
        if failure is not None and (self._loop.is_lost or not response.output):
            return failure
        return response

    def conversation(self) -> Sequence[Segment]:
        return self._loop.conversation()

    @property
    def lease(self) -> Lease | None:
        return self._loop.lease

    def cancel(self, reason: str) -> None:
        if self._loop.give_up():
            # Whoever has a reason of its own tells of it; that a client left is told with its request.
            logger.debug("response %s is cancelled: %s", self.id, reason)
            self.task.cancel(reason)

    def abandon(self) -> None:
        """Stop it and write nothing more of it."""
        if self._loop.abandon():
            logger.warning("response %s is abandoned: the server stops at once", self.id)
            self.task.cancel()


class EngineRuns:
    """See `interfaces.Runs`."""

    def __init__(
        self,
        models: Models,
        tools: Sequence[HostedTool],
        store: Store,
        clock: Clock,
        *,
        limits: LoopLimits | None = None,
        lag: LagLimits | None = None,
        disabled_tools: frozenset[str] = frozenset(),
        sealer: Sealer | None = None,
        attachments: Attachments | None = None,
        figures: Figures | None = None,
    ) -> None:
        self._models = models
        self._store = store
        self._clock = clock
        self._limits = limits or LoopLimits()
        self._lag = lag or LagLimits()
        self._figures = figures or Figures()
        self._running: set[EngineRun] = set()
        self._draining = False
        self._renewing: asyncio.Task[None] | None = None
        history = History(store, {kind: tool for tool in tools for kind in tool.item_types})
        by_type = {kind: tool for tool in tools for kind in tool.types}
        self._tokens = Tokens()
        self._compactor = Compactor(sealer, tools, self._tokens)
        self._compacting: set[asyncio.Task[CompactedResponse]] = set()
        self._preparation = Preparation(
            history, Attacher(attachments), models, self._compactor, by_type, disabled_tools, clock
        )

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[Segment] | None = None,
        take: TakeRoom | None = None,
    ) -> EngineRun:
        prepared = await self._preparation.prepare(request, caller, past, take=take)
        prepared.check_files()
        if prepared.store:
            await self._store.check_writable()
        if response_id is not None:
            prepared.response.id = response_id
        backend = self._models.backend(prepared.response.model)
        if backend.profile(prepared.response.model).counts and _must_fit(prepared):
            shown = prepared.first_request()
            await aside(_unrendered(prepared), backend.check, shown)  # or counting it would render it
            await check_length(self._tokens, backend, caller, shown)
        return await self._begin(prepared, backend)

    async def count(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> InputTokens:
        prepared, backend, shown = await self._shown(request, caller, take)
        count = await self._tokens.count(backend, prepared.caller, shown)
        return InputTokens(input_tokens=count.tokens, exact=count.exact)

    async def compact(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> CompactedResponse:
        # What one model could not read would keep the conversation from being compacted ever after.
        prepared, backend, shown = await self._shown(request, caller, take, gives_files=False)
        self._refuse_when_draining()
        task = asyncio.create_task(self._compact(prepared, backend, shown))
        self._compacting.add(task)
        task.add_done_callback(self._compacting.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._draining and task.cancelled():
                self._refuse_when_draining()
            raise

    async def _compact(
        self, prepared: Prepared, backend: ModelBackend, shown: ModelRequest
    ) -> CompactedResponse:
        context_window = backend.profile(shown.model).context_window or USUAL_LIMIT
        told = prepared.compaction.compact_threshold if prepared.compaction is not None else None
        limit = min(told or context_window, context_window)
        try:
            async with asyncio.timeout(self._limits.seconds):
                count = await self._tokens.count(backend, prepared.caller, shown, around=limit)
                plan = await self._compactor.plan(
                    prepared.caller, shown, count.tokens, limit, None if told else context_window
                )
                compacted = await self._compactor.compact(
                    backend, prepared.caller, shown, prepared.window, plan, goes_on=False
                )
        except TimeoutError:
            raise ServerFault(f"The compaction took longer than {self._limits.seconds:g} seconds.") from None
        return CompactedResponse(
            id=new_id("resp"),
            created_at=int(self._clock.now()),
            output=[compacted.item],
            usage=compacted.usage or Usage(),
        )

    async def _shown(
        self, request: CreateResponse, caller: Caller, take: TakeRoom | None, *, gives_files: bool = True
    ) -> tuple[Prepared, ModelBackend, ModelRequest]:
        """What the model would be shown first; raises ApiError."""
        prepared = await self._preparation.prepare(request, caller, gives_files=gives_files, take=take)
        backend = self._models.backend(prepared.response.model)
        shown = prepared.first_request()
        await aside(_unrendered(prepared), backend.check, shown)
        return prepared, backend, shown

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("The server is shutting down; try again.", retry_after=1.0)

    def _cut(self, run: EngineRun) -> None:
        self._figures.readers_cut["behind"] += 1
        logger.info("response %s is cancelled: its events were not read", run.id)
        run.cancel("its events were not read")

    async def _begin(self, prepared: Prepared, backend: ModelBackend) -> EngineRun:
        log = EventLog(
            kept=prepared.streamed,
            limits=self._lag,
            monotonic=self._clock.monotonic,
            on_overrun=lambda: self._cut(run),
        )
        loop = Loop(
            prepared, backend, self._store, self._clock, log, self._limits, self._tokens, self._compactor
        )
        await aside(_unrendered(prepared), loop.check)
        self._refuse_when_draining()
        run = EngineRun(prepared.response.id, log, loop, self._running.discard)
        self._running.add(run)
        if self._renewing is None and prepared.streamed and prepared.store:
            self._renewing = asyncio.create_task(self._renew_leases())
        return run

    async def _renew_leases(self) -> None:
        """Until the end: a run whose lease is lost has been given up by everybody else, and must not go on.

        What nobody renews any more, because its end could not be written, is marked as failed.
        """
        while True:
            await self._clock.sleep(_RENEW_SECONDS)
            held = {run.lease: run for run in self._running if run.lease is not None}
            try:
                ours = set(await self._store.renew(list(held))) if held else set[Lease]()
                lost = await self._store.recover()
            except Exception as error:  # whatever it was: without this task every run would lose its lease
                expected = isinstance(error, ApiError)
                logger.warning("leases could not be renewed: %s", error, exc_info=not expected)
                continue
            if lost:
                logger.warning("%d responses whose end was not written have failed", lost)
            for lease, run in held.items():
                if lease not in ours:
                    logger.warning("response %s is cancelled: its lease was lost", run.id)
                    run.cancel("its lease was lost")

    async def drain(self, grace_seconds: float) -> None:
        self._draining = True
        try:
            await self._end_runs(grace_seconds)
        except asyncio.CancelledError:
            for run in list(self._running):
                run.abandon()
            raise
        finally:
            if self._renewing is not None:
                self._renewing.cancel()

    async def _end_runs(self, grace_seconds: float) -> None:
        tasks: list[asyncio.Task[Any]] = [*(run.task for run in self._running), *self._compacting]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=grace_seconds)
        if self._running:
            logger.info("%d responses are cancelled: the server is shutting down", len(self._running))
        for run in list(self._running):
            run.cancel("the server is shutting down")
        for task in list(self._compacting):
            task.cancel()
        await asyncio.wait(tasks)


def _unrendered(prepared: Prepared) -> int:
    """About how many bytes the model server has not been told of yet; what it was told of comes before all of them."""
    unseen: list[Segment] = []
    for piece in reversed(pieces_of(prepared.window.segments)):
        for segment in reversed(piece.segments):
            if is_rendered(piece) or is_rendered(segment):
                return effort(unseen)
            unseen.append(segment)
    return effort(unseen)


def _must_fit(prepared: Prepared) -> bool:
    return prepared.response.truncation == "disabled" and prepared.compaction is None
