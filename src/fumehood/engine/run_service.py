"""Starts, drains and cancels runs. Each run is a task with an event log that any number of readers can follow."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.agent_loop import AgentLoop, LoopLimits
from fumehood.engine.attachment_resolver import AttachmentResolver
from fumehood.engine.compactor import DEFAULT_CONTEXT_WINDOW, Compactor
from fumehood.engine.context_truncation import check_length
from fumehood.engine.conversation_loader import ConversationLoader
from fumehood.engine.reasoning_sealer import ReasoningSealer
from fumehood.engine.request_preparation import PreparedRequest, RequestPreparer
from fumehood.engine.run_event_log import EventLog, ReaderLagLimits
from fumehood.engine.token_counter import TokenCounter, estimate_cost
from fumehood.gateway_stats import GatewayStats
from fumehood.interfaces import (
    AttachmentLoader,
    Caller,
    Clock,
    ConversationStore,
    HostedTool,
    ModelBackend,
    ModelProvider,
    ReserveMemory,
    ResponseLease,
    ResponseStore,
    Sealer,
)
from fumehood.protocol.conversation import ConversationSegment, conversation_pieces
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import ApiError, InternalServerError, ServiceUnavailable
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.responses import (
    CompactedResponse,
    CreateResponse,
    InputTokenCount,
    Response,
    Usage,
)

logger = logging.getLogger(__name__)

# Much shorter than a store's lease, so that a slow database does not end a run.
_LEASE_RENEWAL_SECONDS = 10.0


class EngineRun:
    """See `interfaces.Run`."""

    def __init__(
        self,
        response_id: str,
        warnings: Sequence[str],
        log: EventLog,
        loop: AgentLoop,
        on_done: Callable[["EngineRun"], None],
    ) -> None:
        self.id = response_id
        self.warnings = warnings
        self._log = log
        self._loop = loop
        self.open_reader = log.open_reader
        self.get_conversation = loop.get_conversation
        self._on_done = on_done
        self._is_done = False
        self._done_callbacks: list[Callable[[Response | BaseException], None]] = []
        self.task = asyncio.create_task(loop.run(), name=response_id)
        self.task.add_done_callback(self._finish)

    def _finish(self, _: object) -> None:
        self._log.close()
        self._is_done = True
        self._on_done(self)
        for callback in self._done_callbacks:
            callback(self._outcome())

    @property
    def holds_all_events(self) -> bool:
        return self._log.holds_all_events

    async def wait(self) -> Response:
        # Cancelling the waiter does not cancel the run; `cancel` does.
        await asyncio.shield(self.task)
        outcome = self._outcome()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def add_done_callback(self, callback: Callable[[Response | BaseException], None]) -> None:
        if self._is_done:
            callback(self._outcome())
        else:
            self._done_callbacks.append(callback)

    def _outcome(self) -> Response | BaseException:
        """What `wait` returns or raises."""
        try:
            response = self.task.result()
        except BaseException as error:
            return error
        failure = self._loop.failure
        if failure is not None and (self._loop.is_unstored or not response.output):
            return failure
        return response

    @property
    def lease(self) -> ResponseLease | None:
        return self._loop.lease

    def cancel(self, reason: str) -> None:
        if self._loop.request_cancel():
            # Callers with a reason of their own log it; a client that disconnects is in the request log.
            logger.debug("response %s is cancelled: %s", self.id, reason)
            self.task.cancel(reason)

    def abandon(self) -> None:
        """Stop the run and store nothing more of it."""
        if self._loop.abandon():
            logger.warning("response %s is abandoned: the server stops immediately", self.id)
            self.task.cancel()


class RunStore(ResponseStore, ConversationStore, Protocol):
    """Responses and the conversations that they continue."""


class EngineRunService:
    """See `interfaces.RunService`."""

    def __init__(
        self,
        models: ModelProvider,
        tools: Sequence[HostedTool],
        store: RunStore,
        clock: Clock,
        *,
        limits: LoopLimits | None = None,
        lag_limits: ReaderLagLimits | None = None,
        disabled_tools: frozenset[str] = frozenset(),
        sealer: Sealer | None = None,
        attachments: AttachmentLoader | None = None,
        stats: GatewayStats | None = None,
    ) -> None:
        self._models = models
        self._store = store
        self._clock = clock
        self._limits = limits or LoopLimits()
        self._lag_limits = lag_limits or ReaderLagLimits()
        self._stats = stats or GatewayStats()
        self._active_runs: set[EngineRun] = set()
        self._is_draining = False
        self._lease_renewal: asyncio.Task[None] | None = None
        self._reasoning_sealer = ReasoningSealer(sealer)
        history = ConversationLoader(
            store, {kind: tool for tool in tools for kind in tool.item_types}, self._reasoning_sealer
        )
        by_type = {kind: tool for tool in tools for kind in tool.types}
        self._token_counter = TokenCounter()
        self._compactor = Compactor(sealer, tools, self._token_counter)
        self._compaction_tasks: set[asyncio.Task[CompactedResponse]] = set()
        self._preparer = RequestPreparer(
            history, AttachmentResolver(attachments), models, self._compactor, by_type, disabled_tools, clock
        )

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[ConversationSegment] | None = None,
        reserve_memory: ReserveMemory | None = None,
        retain_bytes: int = 0,
    ) -> EngineRun:
        prepared = await self._preparer.prepare(request, caller, past, reserve_memory=reserve_memory)
        prepared.check_files()
        if prepared.store:
            await self._store.check_writable()
        if response_id is not None:
            prepared.response.id = response_id
        backend = self._models.get_backend(prepared.response.model)
        if backend.get_profile(prepared.response.model).counts_tokens and _must_fit_context_window(prepared):
            first_request = prepared.first_request
            # Renders it in the worker thread; otherwise counting would render it in the event loop.
            await run_in_worker(_count_unrendered_bytes(prepared), backend.validate_request, first_request)
            await check_length(self._token_counter, backend, caller, first_request)
        log = EventLog(
            recording=prepared.streamed,
            limits=self._lag_limits,
            monotonic=self._clock.monotonic,
            on_overrun=lambda: self._cancel_lagging_run(run),
            retain_bytes=retain_bytes,
        )
        loop = AgentLoop(
            prepared,
            backend,
            self._store,
            self._clock,
            log,
            self._limits,
            self._token_counter,
            self._compactor,
            self._reasoning_sealer,
        )
        await run_in_worker(_count_unrendered_bytes(prepared), loop.validate_first_request)
        self._reject_if_draining()
        run = EngineRun(
            prepared.response.id, prepared.response.warnings or (), log, loop, self._active_runs.discard
        )
        self._active_runs.add(run)
        if self._lease_renewal is None and prepared.streamed and prepared.store:
            self._lease_renewal = asyncio.create_task(self._renew_leases())
        return run

    async def count_tokens(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> InputTokenCount:
        prepared, backend, first_request = await self._prepare_first_request(request, caller, reserve_memory)
        count = await self._token_counter.count(backend, prepared.caller, first_request)
        return InputTokenCount(
            input_tokens=count.tokens, exact=count.exact, warnings=prepared.response.warnings
        )

    async def compact(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> CompactedResponse:
        # Files are left out: one that the model cannot read would make compaction fail for ever.
        prepared, backend, first_request = await self._prepare_first_request(
            request, caller, reserve_memory, forward_files=False
        )
        self._reject_if_draining()
        task = asyncio.create_task(self._compact(prepared, backend, first_request))
        self._compaction_tasks.add(task)
        task.add_done_callback(self._compaction_tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_draining and task.cancelled():
                self._reject_if_draining()
            raise

    async def _compact(
        self, prepared: PreparedRequest, backend: ModelBackend, model_request: ModelRequest
    ) -> CompactedResponse:
        context_window = backend.get_profile(model_request.model).context_window or DEFAULT_CONTEXT_WINDOW
        threshold = prepared.compaction.compact_threshold if prepared.compaction is not None else None
        limit = min(threshold or context_window, context_window)
        try:
            async with asyncio.timeout(self._limits.seconds):
                count = await self._token_counter.count(
                    backend, prepared.caller, model_request, threshold=limit
                )
                plan = await self._compactor.plan(
                    prepared.caller, model_request, count.tokens, limit, None if threshold else context_window
                )
                compacted = await self._compactor.compact(
                    backend, prepared.caller, model_request, prepared.window, plan, continues=False
                )
        except TimeoutError:
            raise InternalServerError(
                f"The compaction took longer than {self._limits.seconds:g} seconds."
            ) from None
        return CompactedResponse(
            id=new_id("resp"),
            created_at=int(self._clock.now()),
            output=[compacted.item],
            usage=compacted.usage or Usage(),
            warnings=prepared.response.warnings,
        )

    async def _prepare_first_request(
        self,
        request: CreateResponse,
        caller: Caller,
        reserve_memory: ReserveMemory | None,
        *,
        forward_files: bool = True,
    ) -> tuple[PreparedRequest, ModelBackend, ModelRequest]:
        """Prepare and validate the first model request. Raises ApiError."""
        prepared = await self._preparer.prepare(
            request, caller, forward_files=forward_files, reserve_memory=reserve_memory
        )
        backend = self._models.get_backend(prepared.response.model)
        first_request = prepared.first_request
        await run_in_worker(_count_unrendered_bytes(prepared), backend.validate_request, first_request)
        return prepared, backend, first_request

    def _reject_if_draining(self) -> None:
        if self._is_draining:
            raise ServiceUnavailable("The server is shutting down; try again.", retry_after=1.0)

    def _cancel_lagging_run(self, run: EngineRun) -> None:
        self._stats.dropped_readers["behind"] += 1
        logger.info("response %s is cancelled: its events were not read", run.id)
        run.cancel("its events were not read")

    async def _renew_leases(self) -> None:
        """Renew leases until the service drains, and cancel runs whose lease is lost.

        Also marks responses as failed whose end could not be stored.
        """
        while True:
            await self._clock.sleep(_LEASE_RENEWAL_SECONDS)
            held = {run.lease: run for run in self._active_runs if run.lease is not None}
            try:
                renewed = set(await self._store.renew_leases(list(held))) if held else set[ResponseLease]()
                orphaned = await self._store.fail_orphaned_responses()
            except Exception as error:  # anything: if this task ended, every run would lose its lease
                expected = isinstance(error, ApiError)
                logger.warning("leases could not be renewed: %s", error, exc_info=not expected)
                continue
            if orphaned:
                logger.warning("marked %d responses as failed: their end was not stored", orphaned)
            for lease, run in held.items():
                if lease not in renewed:
                    logger.warning("response %s is cancelled: its lease was lost", run.id)
                    run.cancel("its lease was lost")

    async def drain(self, grace_seconds: float) -> None:
        self._is_draining = True
        try:
            await self._end_active_runs(grace_seconds)
        except asyncio.CancelledError:
            for run in list(self._active_runs):
                run.abandon()
            raise
        finally:
            if self._lease_renewal is not None:
                self._lease_renewal.cancel()
                await asyncio.wait([self._lease_renewal])

    async def _end_active_runs(self, grace_seconds: float) -> None:
        tasks: list[asyncio.Task[Any]] = [*(run.task for run in self._active_runs), *self._compaction_tasks]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=grace_seconds)
        if self._active_runs:
            logger.info("%d responses are cancelled: the server is shutting down", len(self._active_runs))
        for run in list(self._active_runs):
            run.cancel("the server is shutting down")
        for task in list(self._compaction_tasks):
            task.cancel()
        await asyncio.wait(tasks)


def _count_unrendered_bytes(prepared: PreparedRequest) -> int:
    """Estimate the size of the segments at the end of the window that no model request has rendered yet."""
    unrendered: list[ConversationSegment] = []
    for piece in reversed(conversation_pieces(prepared.window.segments)):
        for segment in reversed(piece.segments):
            if piece.renderings or segment.renderings:
                return estimate_cost(unrendered)
            unrendered.append(segment)
    return estimate_cost(unrendered)


def _must_fit_context_window(prepared: PreparedRequest) -> bool:
    return prepared.response.truncation == "disabled" and prepared.compaction is None
