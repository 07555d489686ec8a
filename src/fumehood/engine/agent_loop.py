"""The agent loop: model turns and hosted calls, until the model answers.

`AgentLoop.run` owns one response from `in_progress` to its end. It requests a turn from the model, assembles items and
events from it, runs the hosted calls and sends their results back, until the model answers, calls a client tool, or
reaches a limit. It commits the response before it emits the terminal event.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.compaction_plan import compute_max_threshold, estimate_last_turn
from fumehood.engine.compactor import DEFAULT_CONTEXT_WINDOW, Compactor
from fumehood.engine.context_truncation import compute_input_token_limit, truncate_to_fit
from fumehood.engine.reasoning_sealer import ReasoningSealer
from fumehood.engine.request_preparation import PreparedRequest
from fumehood.engine.run_event_log import EventLog
from fumehood.engine.token_counter import TokenCounter, estimate_cost
from fumehood.engine.turn_output_assembler import HostedCall, ResponseOutput, Toolbox, TurnOutputAssembler
from fumehood.interfaces import (
    Clock,
    ModelBackend,
    ResponseLease,
    ResponseLeaseLost,
    ResponseStore,
    ToolCallContext,
    ToolCallResult,
)
from fumehood.protocol.conversation import (
    CallIdIndex,
    ConversationEntry,
    ConversationSegment,
    append_segments,
)
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InternalServerError,
    ModelRateLimited,
    ModelUnreachable,
    ServiceUnavailable,
    StorageUnavailable,
    detect_resource_exhaustion,
    to_error_detail,
)
from fumehood.protocol.openai.response_replay import make_terminal_events
from fumehood.protocol.openai.responses import (
    IncompleteDetails,
    Response,
    ResponseError,
    ResponseStatus,
    Usage,
)
from fumehood.protocol.openai.stream_events import (
    OutputItemAdded,
    OutputItemDone,
    ResponseCreated,
    ResponseInProgress,
)

logger = logging.getLogger(__name__)

# The codes that the OpenAI SDK knows; its strict mode rejects any other.
_RESPONSE_ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Limits of one response.

    turns: model turns; the last one offers no hosted tools, so that the model has to answer.
    seconds: total duration.
    characters: that the model may write in one turn, and a quarter of that in events; no honest model comes near.
    """

    turns: int = 64
    seconds: float = 1800.0
    characters: int = 1 << 22


class AgentLoop:
    """Makes one response.

    failure: the error that a blocking caller gets as an HTTP error, if any.
    is_unstored: whether the response should have been stored and is not; a blocking caller must not get its id.
    lease: the right to write to the response, once its row exists.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        backend: ModelBackend,
        store: ResponseStore,
        clock: Clock,
        log: EventLog,
        limits: LoopLimits,
        token_counter: TokenCounter,
        compactor: Compactor,
        reasoning_sealer: ReasoningSealer,
    ) -> None:
        self.failure: ApiError | None = None
        self.is_unstored = False
        self.lease: ResponseLease | None = None
        self._prepared = prepared
        self._backend = backend
        self._store = store
        self._clock = clock
        self._log = log
        self._limits = limits
        self._token_counter = token_counter
        self._compactor = compactor
        self._reasoning_sealer = reasoning_sealer
        self._compaction_threshold = _find_compaction_threshold(prepared, backend)  # in tokens
        self._deadline = clock.monotonic() + limits.seconds
        self._phase: Literal["new", "running", "finishing"] = "new"
        self._cancel_requested = False
        self._is_abandoned = False
        self._timeout = asyncio.timeout(limits.seconds)
        self._incomplete_reason: Literal["max_output_tokens", "content_filter"] | None = None
        # The conversation as the model sees it, and the segments that this response has added.
        self._window = prepared.window
        self._new_segments: list[ConversationSegment] = []
        self._call_ids = CallIdIndex(append_segments(prepared.past, (prepared.input,)))
        self._first_request: ModelRequest | None = None  # built by `validate_first_request`, until it is sent
        # The current turn and its request.
        self._turn: TurnOutputAssembler | None = None
        self._last_request: ModelRequest | None = None
        self._omitted_tokens = 0  # estimated tokens that truncation left out of the request
        # The result so far.
        self._output = ResponseOutput(log)
        self._entries: list[ConversationEntry] = []
        self._hosted_call_count = 0
        self._usage: Usage | None = None
        self._compaction_usage: Usage | None = None

    def validate_first_request(self) -> None:
        """Build the first model request. Raises InvalidRequest if the backend cannot send it."""
        self._call_ids.read_new_segments()
        self._first_request = self._build_model_request(1, self._select_toolbox(1))
        self._backend.validate_request(self._first_request)

    def request_cancel(self) -> bool:
        """Request cancellation; return whether the caller has to cancel the task now.

        Not before the turns, which check the request first; not after them, when little is left to do; and not a
        second time, when the loop may still be interrupting its code.
        """
        first, self._cancel_requested = not self._cancel_requested, True
        return first and self._phase == "running" and not self._timeout.expired()

    def abandon(self) -> bool:
        """As `request_cancel`, but store nothing: recovery marks the response as failed."""
        self._is_abandoned = True
        return self.request_cancel()

    async def run(self) -> Response:
        """Run from the first event to the last; return the response as emitted and stored."""
        opening = self._prepared.response
        self._log.append([ResponseCreated(response=opening), ResponseInProgress(response=opening)])
        status: ResponseStatus
        try:
            # A blocking caller learns the id only at the end, so there is no row to look up before.
            if self._prepared.store and self._prepared.streamed:
                self.lease = await self._store.begin_response(self._prepared.caller.tenant, opening)
            self._phase = "running"
            if self._cancel_requested:
                raise asyncio.CancelledError
            if self._prepared.generate:
                async with self._timeout:
                    await self._run_turns()
            else:
                self._usage = Usage()
            status = "incomplete" if self._incomplete_reason else "completed"
        except asyncio.CancelledError:
            self._clear_cancellation()
            status = "cancelled"
            self._abort_turn("the response was cancelled")
        except Exception as error:
            status = "failed"
            self.failure = self._describe_failure(error)
            self._abort_turn(
                "the response took too long" if self._timeout.expired() else "the response failed"
            )
        return await self._finish(status)

    def _clear_cancellation(self) -> None:
        """Let the short rest complete: storing the response and emitting its end."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()

    def _abort_turn(self, reason: str) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.abort(reason)
            self._record_turn(turn)

    def _describe_failure(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if self._timeout.expired():
            return InternalServerError(f"The response took longer than {self._limits.seconds:g} seconds.")
        exhaustion = detect_resource_exhaustion(error)
        if exhaustion is not None:
            logger.warning("response %s failed: %s", self._prepared.response.id, exhaustion)
            return exhaustion
        logger.error("response %s failed", self._prepared.response.id, exc_info=error)
        return InternalServerError("The server failed to make this response.")

    # --- turns ---

    async def _run_turns(self) -> None:
        for number in range(1, self._limits.turns + 1):
            if self._compaction_threshold is not None:
                if number == 1:
                    await self._warn_if_turn_is_large(self._compaction_threshold)
                await self._compact_if_needed(number, self._compaction_threshold, continues=True)
            turn = await self._run_turn(number)
            if not self._incomplete_reason and turn.hosted_calls:
                self._hosted_call_count += len(turn.hosted_calls)
                async with asyncio.TaskGroup() as group:
                    for call in turn.hosted_calls:
                        group.create_task(self._run_hosted_call(turn, call))
            self._turn = None
            self._record_turn(turn)
            if self._incomplete_reason or not turn.needs_next_turn:
                await self._compact_after_answer(number, turn)
                return
            self._new_segments.append(ConversationSegment((*turn.entries, *turn.rejected_call_entries)))
            if self._count_remaining_tokens() == 0:
                self._incomplete_reason = "max_output_tokens"
                return

    async def _run_turn(self, number: int) -> TurnOutputAssembler:
        toolbox = self._select_toolbox(number)
        turn = self._turn = TurnOutputAssembler(
            number,
            self._output,
            toolbox,
            self._make_call_context,
            max_hosted_calls=self._count_remaining_calls(),
            single_call=not self._prepared.response.parallel_tool_calls,
            max_characters=self._limits.characters,
            summarises_reasoning=self._prepared.response.reasoning.asks_for_summary,
            seal_reasoning=self._seal_reasoning if self._prepared.wants_encrypted_reasoning else None,
        )
        request = self._first_request or self._build_model_request(number, toolbox)
        self._first_request = None
        if self._prepared.response.truncation == "auto":
            segments, self._omitted_tokens = await truncate_to_fit(
                self._token_counter,
                self._backend,
                self._prepared.caller,
                request,
                self._window.compacted_segments,
            )
            request = msgspec.structs.replace(request, segments=segments)
        self._last_request = request
        async with contextlib.aclosing(self._backend.stream(request, turn.try_feed)) as batches:
            async for batch in batches:
                await turn.feed(batch)
        if turn.turn_end is None:
            raise ModelUnreachable("The model server ended its answer in the middle.")
        self._call_ids.update(turn.call_ids)
        self._usage = _add_usage(self._usage, turn.turn_end.usage)
        if turn.turn_end.reason == "length":
            self._incomplete_reason = "max_output_tokens"
        elif turn.turn_end.reason == "content_filter":
            self._incomplete_reason = "content_filter"
        await turn.finish("incomplete" if self._incomplete_reason else "completed")
        if self._incomplete_reason:
            turn.abort("the model's turn was cut off")
        return turn

    async def _run_hosted_call(self, turn: TurnOutputAssembler, call: HostedCall) -> None:
        """Run one call, beside the others of its turn. A tool that raises fails only its own call."""
        try:
            # Leaving the block early closes the generator, which interrupts the code.
            async with contextlib.aclosing(call.session.run()) as steps:
                async for step in steps:
                    if isinstance(step, ToolCallResult):
                        turn.record_result(call, step)
                        return
                    self._output.emit(step)
        except Exception:
            logger.exception("a hosted tool raised in call %s", call.call_id)
        else:
            logger.error("a hosted tool ended call %s without a result", call.call_id)
        turn.record_result(call, call.session.abort("the tool failed; this is a fault of the server"))

    def _record_turn(self, turn: TurnOutputAssembler) -> None:
        self._entries.extend(turn.entries)
        if turn.turn_end is not None and turn.turn_end.usage is not None and self._last_request is not None:
            usage = turn.turn_end.usage
            self._token_counter.record_usage(
                self._prepared.caller, self._last_request, usage, turn.entries, self._omitted_tokens
            )

    async def _warn_if_turn_is_large(self, limit: int) -> None:
        """Warn once per response: the last turn is not compacted before it is answered, however long it is."""
        segments = self._window.segments
        tokens = await run_in_worker(estimate_cost(segments[-1:]), estimate_last_turn, segments)
        if tokens > limit // 2:
            logger.warning(
                "response %s: the last turn has about %d tokens, more than half of the compaction threshold of %d: "
                "the conversation can exceed it until that turn is answered and compacted. Send less at once, or "
                "raise compact_threshold.",
                self._prepared.response.id,
                tokens,
                limit,
            )

    async def _compact_after_answer(self, number: int, turn: TurnOutputAssembler) -> None:
        """Compact after the answer, unless calls wait for the client: those have to stay in the window."""
        if (
            self._compaction_threshold is not None
            and not self._incomplete_reason
            and not turn.client_call_count
        ):
            self._new_segments.append(ConversationSegment((*turn.entries, *turn.rejected_call_entries)))
            await self._compact_if_needed(number, self._compaction_threshold, continues=False)

    async def _compact_if_needed(self, number: int, limit: int, *, continues: bool) -> None:
        """Compact the conversation if it exceeds `limit` tokens. If that fails, go on without."""
        request = self._build_model_request(number, self._select_toolbox(number))
        caller, window = self._prepared.caller, self._window
        count = await self._token_counter.count(self._backend, caller, request, threshold=limit)
        if count.tokens <= limit:
            return
        plan = await self._compactor.plan(caller, request, count.tokens, limit)
        if not plan.is_worthwhile:
            return
        try:
            compacted = await self._compactor.compact(
                self._backend, caller, request, window, plan, continues=continues
            )
        except ApiError as error:
            logger.warning("response %s was not compacted: %s", self._prepared.response.id, error)
            if not isinstance(error, ModelRateLimited | ModelUnreachable | ServiceUnavailable):
                self._compaction_threshold = None  # a retry would fail again
            return
        index, item = self._output.allocate_output_index(), compacted.item
        self._output.emit(
            [OutputItemAdded(output_index=index, item=item), OutputItemDone(output_index=index, item=item)]
        )
        self._output.set_item(index, item)
        self._entries.append(compacted.to_entry(number))
        self._window, self._new_segments, self._first_request = compacted.window, [], None
        self._compaction_usage = _add_usage(self._compaction_usage, compacted.usage)

    def _select_toolbox(self, number: int) -> Toolbox:
        """Leave out the hosted tools in the last turn and when no hosted call is left."""
        is_last = number == self._limits.turns or self._count_remaining_calls() == 0
        return self._prepared.toolbox.without_hosted() if is_last else self._prepared.toolbox

    def _count_remaining_calls(self) -> int | None:
        maximum = self._prepared.response.max_tool_calls
        return None if maximum is None else max(0, maximum - self._hosted_call_count)

    def _count_remaining_tokens(self) -> int | None:
        maximum = self._prepared.response.max_output_tokens
        if maximum is None or self._usage is None:
            return maximum
        return max(0, maximum - self._usage.output_tokens)

    def _build_model_request(self, number: int, toolbox: Toolbox) -> ModelRequest:
        first, hosted_tools = self._prepared.first_request, self._prepared.toolbox.hosted_tools
        # tool_choice forces a call in the first turn only: after it, the model must be able to answer.
        choice = first.tool_choice if number == 1 or first.tool_choice == "none" else "auto"
        return msgspec.structs.replace(
            first,
            segments=append_segments(self._window.segments, self._new_segments),
            function_tools=[
                spec
                for spec in first.function_tools
                if spec.name in toolbox.hosted_tools or spec.name not in hosted_tools
            ],
            tool_choice=choice,
            used_call_ids=self._call_ids,
            sampling=msgspec.structs.replace(
                first.sampling, max_output_tokens=self._count_remaining_tokens()
            ),
        )

    def _seal_reasoning(self, texts: Sequence[str]) -> str | None:
        return self._reasoning_sealer.seal(self._prepared.caller.tenant, texts)

    def _make_call_context(self, output_index: int, call_id: str) -> ToolCallContext:
        return ToolCallContext(
            caller=self._prepared.caller,
            response_id=self._prepared.response.id,
            output_index=output_index,
            call_id=call_id,
            deadline=self._deadline,
            allocate_output_index=self._output.allocate_output_index,
            accepts_images=self._backend.get_profile(self._prepared.response.model).takes_images,
            wants_contents=self._prepared.wants_contents,
        )

    # --- end of the response ---

    async def _finish(self, status: ResponseStatus) -> Response:
        self._phase = "finishing"
        for tool in self._prepared.toolbox.hosted_tools.values():
            tool.close()
        response = self._build_final_response(status)
        try:
            await self._commit(response)
        except Exception as error:
            self.failure = _describe_store_failure(error)
            self.is_unstored = self.lease is None
            self.failure.may_have_run = bool(self._output.items)
            expected = isinstance(error, ApiError | ResponseLeaseLost)
            logger.warning("response %s was not stored: %s", response.id, error, exc_info=not expected)
            response = self._build_final_response("failed")
        self._log.append(make_terminal_events(response, self.failure and to_error_detail(self.failure)))
        return response

    def _build_final_response(self, status: ResponseStatus) -> Response:
        return msgspec.structs.replace(
            self._prepared.response,
            status=status,
            output=self._output.items,
            usage=_add_usage(self._usage, self._compaction_usage),
            completed_at=int(self._clock.now()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason=self._incomplete_reason)
            if status == "incomplete" and self._incomplete_reason
            else None,
            error=_to_response_error(self.failure) if status == "failed" and self.failure else None,
        )

    async def _commit(self, response: Response) -> None:
        if not self._prepared.store:
            return
        if self._is_abandoned:
            raise ServiceUnavailable("The server stopped before the response had ended.", retry_after=1.0)
        if self.lease is None and response.status == "failed" and not response.output:
            return  # a blocking caller gets an error without an id, so nobody could retrieve it
        entries = (*self._list_unstored_entries(), *self._prepared.input.entries, *self._entries)
        await self._store.commit_response(self.lease, self._prepared.caller.tenant, response, entries)

    def _list_unstored_entries(self) -> list[ConversationEntry]:
        """The past that the caller holds and the store lacks: it is stored as if it had come with this request."""
        if not self._prepared.is_past_unstored:
            return []
        past = self._prepared.past
        return [msgspec.structs.replace(entry, turn=0) for segment in past for entry in segment.entries]

    def get_conversation(self) -> Sequence[ConversationSegment]:
        """After the end: the segments from the last compaction up to this response."""
        segments = (
            *self._prepared.past,
            ConversationSegment((*self._prepared.input.entries, *self._entries)),
        )
        compacted = (index for index in reversed(range(len(segments))) if segments[index].compacted >= 0)
        return segments[next(compacted, 0) :]


def _find_compaction_threshold(prepared: PreparedRequest, backend: ModelBackend) -> int | None:
    """The number of tokens beyond which the conversation is compacted; None if the client did not ask for it."""
    if prepared.compaction is None:
        return None
    context_window = backend.get_profile(prepared.response.model).context_window
    threshold = prepared.compaction.compact_threshold or (context_window or DEFAULT_CONTEXT_WINDOW) * 4 // 5
    if context_window is None:
        return threshold
    input_limit = compute_input_token_limit(context_window, prepared.response.max_output_tokens)
    return min(threshold, input_limit, compute_max_threshold(context_window))


def _add_usage(one: Usage | None, other: Usage | None) -> Usage | None:
    if one is None or other is None:
        return one or other
    return one + other


def _describe_store_failure(error: Exception) -> ApiError:
    if isinstance(error, StorageUnavailable):
        return StorageUnavailable(
            f"The response was made and could not be stored: {error.message} Its code may have run.",
            retry_after=error.retry_after,
        )
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ResponseLeaseLost):
        return InternalServerError("The response was deleted or taken over by another server while it ran.")
    return detect_resource_exhaustion(error) or InternalServerError("The response could not be stored.")


def _to_response_error(error: ApiError) -> ResponseError:
    code = error.wire_code if error.wire_code in _RESPONSE_ERROR_CODES else "server_error"
    return ResponseError(code=code, message=error.message)
