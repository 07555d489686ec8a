"""What happens at the seams, as records that listeners are told of.

Every record is made once, by whoever sees it happen. Listeners hear of it a little after it has ended, of many in a
row: what is done once a request finds nothing of itself in the processor's caches, and takes several times as long.
What is made of a record (metrics, events) is their affair; as a span it is sent itself.
"""

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from operator import sub
from time import perf_counter_ns
from typing import ClassVar, override

from msgspec import Struct, field, structs

from fumehood.interfaces import AcceptBatch
from fumehood.message_parts import JsonObject
from fumehood.metrics import BucketHistogram
from fumehood.protocol.model_turns import AnyModelEvent, ModelRequest, ModelTurnEnded, SamplingParameters
from fumehood.protocol.openai.responses import CreateResponse, Response, Usage
from fumehood.telemetry.otlp_span_encoding import EncodableSpan, StartAttributes
from fumehood.telemetry.semantic_conventions import DURATION_BUCKETS, map_finish_reason
from fumehood.telemetry.span_attributes import (
    Attributes,
    CallStartAttributes,
    RunStartAttributes,
    SandboxTimingStartAttributes,
    TurnStartAttributes,
    build_usage_attributes,
    read_output_type,
)
from fumehood.timings import Timing

_BATCH_SIZE = 64  # records
_FLUSH_SECONDS = 0.5

logger = logging.getLogger(__name__)


class SpanRecord(EncodableSpan, eq=False, kw_only=True):
    """Something that takes its time; it is its own span, where there are spans.

    since: when it began, by the performance counter.
    content: what was said, by attribute; empty unless it is to be recorded.
    """

    start_counter: int = field(default_factory=perf_counter_ns)
    content: JsonObject = {}  # noqa: RUF012 - every struct gets its own

    @property
    def seconds(self) -> float:
        return self.duration_ns / 1e9

    def release_content(self) -> None:
        """It has ended, and waits until it is told: whatever may be large is let go of."""


class ResponseSummary(Struct, frozen=True):
    """What is kept of a response."""

    id: str
    model: str
    usage: Usage | None


class RunRecord(SpanRecord, eq=False, kw_only=True):
    """A response, from the request until it is durable.

    request: None once it has ended. model, streamed: as the request has them.
    response: as it ended, None if there was none, and once it is forgotten. answer: what is kept of it then.
    turns, calls: how many there were.
    first: nanoseconds until the first piece of its first turn came, 0 if none has.
    writing: nanoseconds that models have written, after the first pieces of their turns.
    """

    request: CreateResponse | None
    model: str | None
    streamed: bool
    response: Response | None = None
    response_summary: ResponseSummary | None = None
    turns: int = 0
    calls: int = 0
    time_to_first_token: int = 0
    generation_time: int = 0

    @override
    def release_content(self) -> None:
        response = self.response
        if response is not None:
            self.response_summary = ResponseSummary(response.id, response.model, response.usage)
        self.request = self.response = None

    @override
    def start_attributes(self) -> StartAttributes:
        return RunStartAttributes(self.model)

    @override
    def end_attributes(self) -> Attributes:
        answer = self.response_summary
        if answer is None:
            return {}
        told: Attributes = {"gen_ai.response.id": answer.id, "gen_ai.response.model": answer.model}
        return told if answer.usage is None else told | build_usage_attributes(answer.usage)


class TurnRecord(SpanRecord, eq=False, kw_only=True):
    """A turn of a model.

    request: what the model's server is asked, None once that has ended; a listener may put the trace in before it is
        sent. model, streamed, sampling, output_type: what is kept of it.
    server: the host and the port, None where there is none.
    first: nanoseconds until its first piece came, 0 if none has.
    moments: when each of its pieces came, by the performance counter; None where nobody wants to know, and once
        somebody has looked at them.
    pieces: everything that it said, None unless content is recorded.
    """

    request: ModelRequest | None
    model: str
    streamed: bool
    sampling: SamplingParameters
    output_type: str | None = None
    server: tuple[str, int] | None = None
    run: RunRecord | None = None
    time_to_first_chunk: int = 0
    chunk_times: "array[int] | None" = None
    events: list[AnyModelEvent] | None = None
    end: ModelTurnEnded | None = None

    @staticmethod
    def start(
        request: ModelRequest, server: tuple[str, int] | None = None, run: RunRecord | None = None
    ) -> "TurnRecord":
        sampling = request.sampling
        seen = TurnRecord(
            request=request,
            model=request.model,
            streamed=request.streamed,
            sampling=sampling,
            server=server,
            run=run,
        )
        if sampling.text is not None:  # a schema may be large
            seen.output_type = read_output_type(sampling.text)
            seen.sampling = structs.replace(sampling, text=None)
        return seen

    @override
    def release_content(self) -> None:
        self.request = self.events = None

    @override
    def start_attributes(self) -> StartAttributes:
        sampling = self.sampling
        return TurnStartAttributes(
            self.model,
            self.server,
            self.streamed,
            sampling.temperature,
            sampling.top_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.max_output_tokens,
            self.output_type,
        )

    @override
    def end_attributes(self) -> Attributes:
        told: Attributes = {}
        if self.time_to_first_chunk and self.streamed:
            told["gen_ai.response.time_to_first_chunk"] = self.time_to_first_chunk / 1e9
        end = self.end
        if end is None:
            return told
        told["gen_ai.response.finish_reasons"] = (map_finish_reason(end.reason),)
        return told if end.usage is None else told | build_usage_attributes(end.usage)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped, in the words of the conventions; nothing where it did not get that far."""
        return "" if self.end is None else map_finish_reason(self.end.reason)

    def add_events(self, events: Sequence[AnyModelEvent]) -> None:
        """A piece has come."""
        if not events:
            return
        now = perf_counter_ns()
        if not self.time_to_first_chunk:
            self.time_to_first_chunk = now - self.start_counter
            run = self.run
            if run is not None and not run.time_to_first_token:
                run.time_to_first_token = now - run.start_counter
        if self.chunk_times is not None:
            self.chunk_times.append(now)
        if self.events is not None:
            self.events += events
        if isinstance(events[-1], ModelTurnEnded):
            self.end = events[-1]

    def timestamp_events(self, accept_batch: AcceptBatch) -> AcceptBatch:
        """The same, with what it takes noted. For most events this is all that telemetry does, and they find nothing
        of it in the processor's caches: so it is as little as can be.
        """
        if self.events is not None:
            return partial(self._forward_and_add, accept_batch)
        if self.chunk_times is None:  # when its pieces come is nobody's question
            return accept_batch
        came, now = self.chunk_times.append, perf_counter_ns

        def taking(events: Sequence[AnyModelEvent]) -> bool:
            if accept_batch(events):
                came(now())
                return True
            return False

        return taking

    def _forward_and_add(self, accept_batch: AcceptBatch, events: Sequence[AnyModelEvent]) -> bool:
        taken = accept_batch(events)
        if taken:
            self.add_events(events)
        return taken

    def take_chunk_intervals(self) -> BucketHistogram:
        """Seconds between its pieces, whose moments are forgotten then: there may be many."""
        moments, self.chunk_times = self.chunk_times or array("q"), None
        sizes = [*map(sub, moments[1:], moments)]
        found = BucketHistogram(DURATION_BUCKETS)
        found.sum = sum(sizes) / 1e9
        if max(sizes, default=0) <= DURATION_BUCKETS[0] * 1e9:  # as in a burst
            found.counts[0] = len(sizes)
            return found
        sizes.sort()
        counted = [bisect_right(sizes, bound * 1e9) for bound in DURATION_BUCKETS]
        found.counts = [*map(sub, [*counted, len(sizes)], [0, *counted])]
        return found


class ToolCallRecord(SpanRecord, eq=False, kw_only=True):
    """A call of a tool that the gateway runs itself.

    item_id: of the item that clients see of it, once it has ended.
    arguments, output: as the model wrote and read them; empty once they are forgotten.
    """

    name: str
    call_id: str
    run: RunRecord | None = None
    item_id: str = ""
    arguments: str = ""
    output: str = ""

    @override
    def release_content(self) -> None:
        self.arguments = self.output = ""

    @override
    def start_attributes(self) -> StartAttributes:
        return CallStartAttributes(self.name)

    @override
    def end_attributes(self) -> Attributes:
        told: Attributes = {"gen_ai.tool.call.id": self.call_id}
        if self.item_id:
            told["fumehood.item.id"] = self.item_id
        return told


class SandboxTimingRecord(SpanRecord, eq=False, kw_only=True):
    """A phase of a call: a sandbox was acquired, packages were installed, code has run, files were looked for. Nobody
    hears of it before it is over.
    """

    timing: Timing
    call: ToolCallRecord

    @override
    def start_attributes(self) -> StartAttributes:
        return SandboxTimingStartAttributes(self.timing.name, tuple(self.timing.attributes.items()))


class RecordListener(ABC):
    """Who is told of what has ended.

    wants_moments: whether it looks at when the pieces of streamed turns came.
    """

    needs_chunk_times: ClassVar[bool] = False

    @abstractmethod
    def on_end(self, record: SpanRecord) -> None: ...


class RecordDispatcher:
    """Tells all listeners; what goes wrong with one of them is logged, and is nobody else's trouble.

    begins: gives what begins its place in a trace, before anybody else knows of it.
    contents: sees what has ended at once, while it is whole, and puts into it what is recorded of it.
    records_content, wants_moments: whether somebody does.
    running: responses that are being made now.
    """

    def __init__(
        self,
        listeners: Sequence[RecordListener],
        content_capture: RecordListener | None = None,
        on_start: Callable[[SpanRecord], None] | None = None,
    ) -> None:
        self._end_handlers = [listener.on_end for listener in listeners]
        self._on_start = on_start
        self._content_capture = content_capture
        self.captures_content = content_capture is not None
        self.needs_chunk_times = any(listener.needs_chunk_times for listener in listeners)
        self._pending: list[SpanRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self.running_count = 0

    def start(self, record: SpanRecord) -> None:
        if self._on_start is not None:
            try:
                self._on_start(record)
            except Exception as error:
                _log_failure(error)

    def end(self, record: SpanRecord) -> None:
        if not record.duration_ns:
            record.duration_ns = perf_counter_ns() - record.start_counter
        if self._content_capture is not None:
            _notify([record], self._content_capture.on_end)
        record.release_content()
        ended = self._pending
        ended.append(record)
        if len(ended) >= _BATCH_SIZE or record.content:  # which may be large
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Of everything that has ended, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._pending = self._pending, []
        for listener in self._end_handlers:
            _notify(ended, listener)


def _notify(records: Sequence[SpanRecord], listener: Callable[[SpanRecord], None]) -> None:
    for seen in records:
        try:
            listener(seen)
        except Exception as error:
            _log_failure(error)


def _log_failure(error: Exception) -> None:
    """Without its words: what was said may be among them."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("telemetry: %s at %s:%s", type(error).__name__, place.filename, place.lineno)
