"""The loop: the model's turns and the calls between them, until it has answered; imports `interfaces`,
`protocol` and siblings.

`Loop.drive` owns one response from `in_progress` to its end. It asks the model for a turn, lets a `Turn` make items
and events of it, runs the hosted calls, and shows the model their results, until the model answers, calls something
of the client's, or a limit is met. Then the response is committed, and only then told to be over.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from fumehood.aside import aside
from fumehood.engine.assembler import Toolbox, Turn
from fumehood.engine.compaction import USUAL_LIMIT, Compactor
from fumehood.engine.compaction_budget import largest_threshold, tokens_of_turn
from fumehood.engine.dispatch import run_calls
from fumehood.engine.log import EventLog
from fumehood.engine.output import Output
from fumehood.engine.preparation import Prepared
from fumehood.engine.tokens import Tokens, effort
from fumehood.engine.truncation import fitted, room_for_input
from fumehood.interfaces import CallContext, Clock, Fenced, Lease, ModelBackend, Store
from fumehood.protocol.conversation import Entry, Segment, followed
from fumehood.protocol.errors import (
    ApiError,
    ModelRateLimited,
    ModelUnreachable,
    ServerFault,
    StorageUnavailable,
    Unavailable,
    to_detail,
)
from fumehood.protocol.events import (
    Completed,
    Created,
    ErrorOccurred,
    Failed,
    Incomplete,
    InProgress,
    ItemAdded,
    ItemDone,
    StreamEvent,
)
from fumehood.protocol.models import ModelRequest
from fumehood.protocol.responses import (
    IncompleteDetails,
    Response,
    ResponseError,
    ResponseStatus,
    Usage,
)
from fumehood.protocol.shortage import find_shortage
from fumehood.protocol.tools import FunctionSpec

logger = logging.getLogger(__name__)

# What the SDK knows; another code would not pass its strict mode.
_RESPONSE_ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """How much one response may take.

    turns: of the model in one response; in the last one it is offered no tools, so that it has to answer.
    seconds: that a response may take in all.
    characters: that the model may write in one turn, and a quarter of that in pieces; no honest model comes near.
    """

    turns: int = 64
    seconds: float = 1800.0
    characters: int = 1 << 22


class Loop:
    """One response.

    failure: what went wrong, where it is a fault that a blocking caller should get as an HTTP error.
    is_lost: whether nothing of the response is stored though it should be; a blocking caller must not be given its id.
    lease: the right to write to the response, once it is recorded.
    """

    def __init__(
        self,
        prepared: Prepared,
        backend: ModelBackend,
        store: Store,
        clock: Clock,
        log: EventLog,
        limits: LoopLimits,
        tokens: Tokens,
        compactor: Compactor,
    ) -> None:
        self.failure: ApiError | None = None
        self.is_lost = False
        self.lease: Lease | None = None
        self._prepared = prepared
        self._backend = backend
        self._store = store
        self._clock = clock
        self._log = log
        self._limits = limits
        self._tokens = tokens
        self._compactor = compactor
        self._too_long = _threshold(prepared, backend)  # tokens beyond which the conversation is compacted
        self._deadline = clock.monotonic() + limits.seconds
        self._phase: Literal["new", "turning", "concluding"] = "new"
        self._given_up = False
        self._abandoned = False
        self._late = False  # it was given up because its time was over
        self._incomplete: Literal["max_output_tokens", "content_filter"] | None = None
        # What the model is shown: the conversation, and what this response has added to it.
        self._window = prepared.window
        self._segments: list[Segment] = []
        self._first: ModelRequest | None = None  # the request that `check` made, until it is sent
        # The turn that is being made, and what the model was asked for it.
        self._turn: Turn | None = None
        self._asked: ModelRequest | None = None
        self._left_out = 0  # tokens of the conversation, estimated, that it was not shown
        # What the response has come to.
        self._output = Output(log)
        self._entries: list[Entry] = []
        self._hosted_calls = 0
        self._usage: Usage | None = None
        self._compaction_usage: Usage | None = None

    def check(self) -> None:
        """Raises InvalidRequest if the model cannot be shown what it would have to see first."""
        self._first = self._model_request(1, self._toolbox(1))
        self._backend.check(self._first)

    def give_up(self) -> bool:
        """Note that nobody wants the response any more; whether the task is to be cancelled for that, now.

        It is not before the turns: they will find the note. Nor after them, when what is left is short, nor a second
        time, when the loop may still be interrupting its code.
        """
        first, self._given_up = not self._given_up, True
        return first and self._phase == "turning"

    def abandon(self) -> bool:
        """As `give_up`, and write no end: whoever recovers the store will mark it failed."""
        self._abandoned = True
        return self.give_up()

    async def drive(self) -> Response:
        """From the first event to the last; the response as it was told and kept."""
        opening = self._prepared.response
        self._log.extend([Created(response=opening), InProgress(response=opening)])
        status: ResponseStatus
        try:
            # Nobody knows the id of a blocking call before it has ended, so nobody can ask what became of it.
            if self._prepared.store and self._prepared.streamed:
                self.lease = await self._store.begin(self._prepared.caller.tenant, opening)
            self._phase = "turning"
            if self._given_up:
                raise asyncio.CancelledError
            if self._prepared.generate:
                await self._turns_in_time()
            else:
                self._usage = Usage()
            status = "incomplete" if self._incomplete else "completed"
        except asyncio.CancelledError:
            self._take_back_the_cancellation()
            status = self._cancelled()
        except ApiError as error:
            status = "failed"
            self.failure = error
            self._cut_off("the response failed")
        except Exception as error:
            status = "failed"
            self.failure = find_shortage(error)
            if self.failure is None:
                logger.exception("response %s failed", opening.id)
                self.failure = ServerFault("The server failed to make this response.")
            else:
                logger.warning("response %s failed: %s", opening.id, self.failure)
            self._cut_off("the response failed")
        return await self._conclude(status)

    def _take_back_the_cancellation(self) -> None:
        """What is left to do is short and must not be lost."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()

    def _cut_off(self, reason: str) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cut_off(reason)
            self._keep(turn)

    def _cancelled(self) -> ResponseStatus:
        if not self._late:
            self._cut_off("the response was cancelled")
            return "cancelled"
        self.failure = ServerFault(f"The response took longer than {self._limits.seconds:g} seconds.")
        self._cut_off("the response took too long")
        return "failed"

    # --- turns ---

    async def _turns_in_time(self) -> None:
        """Give the turns up when the response has taken too long. With one timer: `asyncio.timeout` would cost several
        times as much.
        """
        task = asyncio.current_task()

        def expire() -> None:
            if self.give_up() and task is not None:
                self._late = True
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limits.seconds, expire)
        try:
            await self._turns()
        finally:
            timer.cancel()

    async def _turns(self) -> None:
        for number in range(1, self._limits.turns + 1):
            if self._too_long is not None:
                if number == 1:
                    await self._warn_of_a_large_turn(self._too_long)
                await self._compact(number, self._too_long, goes_on=True)
            turn = await self._one_turn(number)
            if not self._incomplete and turn.hosted:
                self._hosted_calls += len(turn.hosted)
                await run_calls(turn, self._output)
            self._turn = None
            self._keep(turn)
            if self._incomplete or not turn.goes_on:
                await self._compact_the_answered(number, turn)
                return
            self._segments.append(Segment((*turn.entries, *turn.hidden_entries)))
            if self._tokens_left() == 0:
                self._incomplete = "max_output_tokens"
                return

    async def _one_turn(self, number: int) -> Turn:
        toolbox = self._toolbox(number)
        turn = self._turn = Turn(
            number,
            self._output,
            toolbox,
            self._call_context,
            most_hosted=self._hosted_left(),
            one_call=not self._prepared.response.parallel_tool_calls,
            most_written=self._limits.characters,
        )
        request = self._first or self._model_request(number, toolbox)
        self._first = None
        if self._prepared.response.truncation == "auto":
            segments, self._left_out = await fitted(
                self._tokens, self._backend, self._prepared.caller, request, self._window.opened
            )
            request = msgspec.structs.replace(request, segments=segments)
        self._asked = request
        async with contextlib.aclosing(self._backend.stream(request, turn.take)) as batches:
            async for batch in batches:
                await turn.feed(batch)
        if turn.ended is None:
            raise ModelUnreachable("The model server ended its answer in the middle.")
        if turn.ended.usage is not None:
            self._usage = turn.ended.usage if self._usage is None else self._usage + turn.ended.usage
        if turn.ended.reason == "length":
            self._incomplete = "max_output_tokens"
        elif turn.ended.reason == "content_filter":
            self._incomplete = "content_filter"
        await turn.finish("incomplete" if self._incomplete else "completed")
        if self._incomplete:
            turn.cut_off("the model's turn was cut off")
        return turn

    def _keep(self, turn: Turn) -> None:
        self._entries.extend(turn.entries)
        if turn.ended is not None and turn.ended.usage is not None and self._asked is not None:
            usage = turn.ended.usage
            self._tokens.note(self._prepared.caller, self._asked, usage, turn.entries, self._left_out)

    async def _warn_of_a_large_turn(self, limit: int) -> None:
        """Once: with the next request the turn is answered. Until then it stays as it is, however long."""
        segments = self._window.segments
        tokens = await aside(effort(segments[-1:]), tokens_of_turn, segments)
        if tokens > limit // 2:
            logger.warning(
                "response %s: the last turn has about %d tokens, more than half of the compaction threshold of %d: "
                "the conversation can exceed it until that turn is answered and compacted. Send less at once, or "
                "raise compact_threshold.",
                self._prepared.response.id,
                tokens,
                limit,
            )

    async def _compact_the_answered(self, number: int, turn: Turn) -> None:
        """After the answer. What the client has to answer itself must stay in sight until it has."""
        if self._too_long is not None and not self._incomplete and not turn.client_calls:
            self._segments.append(Segment((*turn.entries, *turn.hidden_entries)))
            await self._compact(number, self._too_long, goes_on=False)

    async def _compact(self, number: int, limit: int, *, goes_on: bool) -> None:
        """Make the conversation short if it is too long. One that cannot be made short goes on as it is."""
        request = self._model_request(number, self._toolbox(number))
        caller, window = self._prepared.caller, self._window
        count = await self._tokens.count(self._backend, caller, request, around=limit)
        if count.tokens <= limit:
            return
        plan = await self._compactor.plan(caller, request, count.tokens, limit)
        if not plan.is_worthwhile:
            return
        try:
            compacted = await self._compactor.compact(
                self._backend, caller, request, window, plan, goes_on=goes_on
            )
        except ApiError as error:
            logger.warning("response %s was not compacted: %s", self._prepared.response.id, error)
            if not isinstance(error, ModelRateLimited | ModelUnreachable | Unavailable):
                self._too_long = None  # asked again, the model would say the same
            return
        index, item = self._output.place(), compacted.item
        self._output.emit([ItemAdded(output_index=index, item=item), ItemDone(output_index=index, item=item)])
        self._output.finish(index, item)
        self._entries.append(compacted.entry(number))
        self._window, self._segments, self._first = compacted.window, [], None
        if compacted.usage is not None:
            spent = self._compaction_usage
            self._compaction_usage = compacted.usage if spent is None else spent + compacted.usage

    def _toolbox(self, number: int) -> Toolbox:
        """In the last turn, and with no hosted call left, the model has to answer or to call the client."""
        over = number == self._limits.turns or self._hosted_left() == 0
        return self._prepared.toolbox.without_hosted() if over else self._prepared.toolbox

    def _hosted_left(self) -> int | None:
        most = self._prepared.response.max_tool_calls
        return None if most is None else max(0, most - self._hosted_calls)

    def _tokens_left(self) -> int | None:
        most = self._prepared.response.max_output_tokens
        if most is None or self._usage is None:
            return most
        return max(0, most - self._usage.output_tokens)

    def _model_request(self, number: int, toolbox: Toolbox) -> ModelRequest:
        prepared = self._prepared
        functions = [spec for spec in prepared.functions if _is_in(spec, toolbox)]
        # Whoever forces a call forces one: with the result there, the model must be able to answer.
        choice = prepared.choice if number == 1 or prepared.choice == "none" else "auto"
        sampling = msgspec.structs.replace(prepared.sampling, max_output_tokens=self._tokens_left())
        segments = followed(self._window.segments, self._segments)
        return prepared.request(segments, functions, choice, sampling)

    def _call_context(self, output_index: int, call_id: str) -> CallContext:
        return CallContext(
            caller=self._prepared.caller,
            response_id=self._prepared.response.id,
            output_index=output_index,
            call_id=call_id,
            deadline=self._deadline,
            place=self._output.place,
            takes_images=self._backend.profile(self._prepared.response.model).takes_images,
            wants_contents=self._prepared.wants_contents,
        )

    # --- the end ---

    async def _conclude(self, status: ResponseStatus) -> Response:
        self._phase = "concluding"
        for tool in self._prepared.toolbox.hosted.values():
            tool.close()
        response = self._closing(status)
        try:
            await self._commit(response)
        except Exception as error:
            self.failure = _why_not_kept(error)
            self.is_lost = self.lease is None
            self.failure.may_have_run = bool(self._output.items)
            expected = isinstance(error, ApiError | Fenced)
            logger.warning("response %s was not kept: %s", response.id, error, exc_info=not expected)
            response = self._closing("failed")
        self._log.extend(self._last_events(response))
        return response

    def _closing(self, status: ResponseStatus) -> Response:
        return msgspec.structs.replace(
            self._prepared.response,
            status=status,
            output=self._output.items,
            usage=self._whole_usage(),
            completed_at=int(self._clock.now()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason=self._incomplete)
            if status == "incomplete" and self._incomplete
            else None,
            error=_response_error(self.failure) if status == "failed" and self.failure else None,
        )

    def _whole_usage(self) -> Usage | None:
        if self._usage is None or self._compaction_usage is None:
            return self._usage or self._compaction_usage
        return self._usage + self._compaction_usage

    async def _commit(self, response: Response) -> None:
        if not self._prepared.store:
            return
        if self._abandoned:
            raise Unavailable("The server stopped before the response had ended.", retry_after=1.0)
        if self.lease is None and response.status == "failed" and not response.output:
            return  # a blocking caller gets an error and no id: there is nothing to come back to
        entries = (*self._unkept(), *self._prepared.input.entries, *self._entries)
        await self._store.commit(self.lease, self._prepared.caller.tenant, response, entries)

    def _unkept(self) -> list[Entry]:
        """What came before and the store does not have: it is kept now, as if it had come in with this request."""
        if not self._prepared.unkept:
            return []
        past = self._prepared.past
        return [msgspec.structs.replace(entry, turn=0) for segment in past for entry in segment.entries]

    def conversation(self) -> Sequence[Segment]:
        """Everything from the last compaction up to the end of this response, once it has ended."""
        whole = (*self._prepared.past, Segment((*self._prepared.input.entries, *self._entries)))
        compacted = (number for number in reversed(range(len(whole))) if whole[number].compacted >= 0)
        return whole[next(compacted, 0) :]

    def _last_events(self, response: Response) -> Sequence[StreamEvent]:
        if response.status == "completed":
            return [Completed(response=response)]
        if response.status == "failed" and self.failure is not None:
            return [ErrorOccurred(error=to_detail(self.failure)), Failed(response=response)]
        return [Incomplete(response=response)]


def _threshold(prepared: Prepared, backend: ModelBackend) -> int | None:
    """How many tokens are too many, where the client wants that to be minded."""
    if prepared.compaction is None:
        return None
    context_window = backend.profile(prepared.response.model).context_window
    wanted = prepared.compaction.compact_threshold or (context_window or USUAL_LIMIT) * 4 // 5
    if context_window is None:
        return wanted
    room = room_for_input(context_window, prepared.response.max_output_tokens)
    return min(wanted, room, largest_threshold(context_window))


def _is_in(spec: FunctionSpec, toolbox: Toolbox) -> bool:
    return spec.name in toolbox.hosted or spec.name in toolbox.functions or spec.name in toolbox.customs


def _why_not_kept(error: Exception) -> ApiError:
    if isinstance(error, StorageUnavailable):
        return StorageUnavailable(
            f"The response was made and could not be stored: {error.message} Its code may have run.",
            retry_after=error.retry_after,
        )
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Fenced):
        return ServerFault("The response was deleted or taken over by another server while it ran.")
    return find_shortage(error) or ServerFault("The response could not be kept.")


def _response_error(error: ApiError) -> ResponseError:
    code = error.wire_code if error.wire_code in _RESPONSE_ERROR_CODES else "server_error"
    return ResponseError(code=code, message=error.message)
