"""Records of requests, runs, turns, tool calls and sandbox timings, from which spans, metrics and events are made."""

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from operator import sub
from time import perf_counter_ns, time_ns
from typing import ClassVar, override

from msgspec import Struct, field
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from fumehood.gateway_stats import BucketHistogram
from fumehood.interfaces import AcceptBatch
from fumehood.message_parts import JsonObject
from fumehood.protocol.model_turns import AnyModelEvent, ModelRequest, ModelTurnEnded
from fumehood.protocol.openai.responses import CreateResponse, Response, TextConfig, Usage
from fumehood.telemetry.semantic_conventions import (
    DURATION_BUCKETS,
    OWN_PROVIDER,
    map_finish_reason,
    map_provider,
)
from fumehood.timed_steps import TimedStep

type Attributes = dict[str, AttributeValue]

_BATCH_SIZE = 64  # records
_FLUSH_SECONDS = 0.5

logger = logging.getLogger(__name__)


class SpanRecord(Struct, eq=False, kw_only=True):
    """One operation: when it ran, how it ended, and its span.

    started_at_ns: nanoseconds since 1970. start_counter: the performance counter at the same moment.
    duration_ns: 0 until the operation has ended.
    error: code or type of the error; empty on success. Never a message, which may hold content.
    content: captured content by attribute name; empty unless content is captured.
    span: the SDK's span; invalid where traces are not exported.
    """

    kind: ClassVar[SpanKind] = SpanKind.INTERNAL
    started_at_ns: int = field(default_factory=time_ns)
    start_counter: int = field(default_factory=perf_counter_ns)
    duration_ns: int = 0
    error: str = ""
    content: JsonObject = {}
    span: Span = INVALID_SPAN

    @property
    def seconds(self) -> float:
        return self.duration_ns / 1e9

    def span_name(self) -> str:
        raise NotImplementedError

    def start_attributes(self) -> Attributes:
        """Return the attributes that are known at the start, which samplers see."""
        raise NotImplementedError

    def end_attributes(self) -> Attributes:
        """Return the attributes that are known only at the end."""
        return {}

    def as_context(self) -> Context:
        """Return a context for children and events of the span. It holds nothing of the ambient context."""
        return set_span_in_context(self.span, Context())

    def release_content(self) -> None:
        """Drop whatever may be large. Called at the end, before the record waits for its batch."""


class ResponseSummary(Struct, frozen=True):
    """The fields of a response that outlive `RunRecord.release_content`."""

    id: str
    model: str
    usage: Usage | None


class HttpRequestRecord(SpanRecord, eq=False, kw_only=True):
    """An HTTP request, from its headers until the end of the response.

    method: `_OTHER` if it is not one of HTTP. path: without the query, which may hold secrets.
    route: the pattern that the path matches, empty if there is none. status: 0 if no response was started.
    """

    kind: ClassVar[SpanKind] = SpanKind.SERVER
    method: str
    path: str
    scheme: str
    server: tuple[str, int] | None = None
    route: str = ""
    status: int = 0

    @override
    def span_name(self) -> str:
        method = "HTTP" if self.method == "_OTHER" else self.method
        return f"{method} {self.route}" if self.route else method

    @override
    def start_attributes(self) -> Attributes:
        attributes: Attributes = {
            "http.request.method": self.method,
            "url.path": self.path,
            "url.scheme": self.scheme,
        }
        if self.server is not None:
            attributes["server.address"], attributes["server.port"] = self.server
        return attributes

    @override
    def end_attributes(self) -> Attributes:
        attributes: Attributes = {}
        if self.route:
            attributes["http.route"] = self.route
        if self.status:
            attributes["http.response.status_code"] = self.status
        return attributes


class RunRecord(SpanRecord, eq=False, kw_only=True):
    """A response, from the request until it is durable.

    request: None after the end. response: None after the end, or if the run failed without one.
    time_to_first_token: nanoseconds until the first event of the first turn, 0 if there was none.
    generation_time: nanoseconds that models have generated after the first events of their turns.
    conversation_id: what all responses of a conversation share; empty until it is known.
    previous_response_id, previous_span: the response that this one continues, and its span if it is known here.
    call_timings: start and duration of each hosted call, in nanoseconds, by the id of its item.
    """

    request: CreateResponse | None
    model: str | None
    streamed: bool
    provider: str = OWN_PROVIDER
    conversation_id: str = ""
    previous_response_id: str | None = None
    previous_span: SpanContext | None = None
    call_timings: dict[str, tuple[int, int]] = {}
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
    def span_name(self) -> str:
        return "invoke_agent"

    @override
    def start_attributes(self) -> Attributes:
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": self.provider,
        }
        if self.model is not None:
            attributes["gen_ai.request.model"] = self.model
        if self.previous_response_id is not None:
            attributes["fumehood.previous_response.id"] = self.previous_response_id
        return attributes

    @override
    def end_attributes(self) -> Attributes:
        summary = self.response_summary
        attributes: Attributes = {}
        if self.conversation_id:
            attributes["gen_ai.conversation.id"] = self.conversation_id
        if summary is None:
            return attributes
        attributes["gen_ai.response.id"] = summary.id
        attributes["gen_ai.response.model"] = summary.model
        return attributes if summary.usage is None else attributes | build_usage_attributes(summary.usage)


class TurnRecord(SpanRecord, eq=False, kw_only=True):
    """One turn of a model.

    request: what is sent to the model server, None after the end. The span emitter puts the trace context in.
    request_attributes: the attributes of the request, which outlive it.
    server: host and port, None for a model without a server. provider: who runs it.
    replays_reasoning: whether the model is sent its earlier reasoning.
    time_to_first_chunk: nanoseconds until the first batch of events, 0 if there was none.
    chunk_times: the performance counter at each batch; None where no listener needs it, and once it is consumed.
    events: all events of the turn, None unless content is captured.
    """

    kind: ClassVar[SpanKind] = SpanKind.CLIENT
    request: ModelRequest | None
    model: str
    streamed: bool
    request_attributes: Attributes
    server: tuple[str, int] | None = None
    provider: str = OWN_PROVIDER
    replays_reasoning: bool = False
    run: RunRecord | None = None
    time_to_first_chunk: int = 0
    chunk_times: "array[int] | None" = None
    events: list[AnyModelEvent] | None = None
    end: ModelTurnEnded | None = None

    @staticmethod
    def start(
        request: ModelRequest,
        server: tuple[str, int] | None = None,
        run: RunRecord | None = None,
        provider: str | None = None,
    ) -> "TurnRecord":
        provider = provider or map_provider(server)
        return TurnRecord(
            request=request,
            model=request.model,
            streamed=request.streamed,
            request_attributes=_build_request_attributes(request, server, provider),
            server=server,
            provider=provider,
            run=run,
        )

    @override
    def release_content(self) -> None:
        self.request = self.events = None

    @override
    def span_name(self) -> str:
        return f"chat {self.model}"

    @override
    def start_attributes(self) -> Attributes:
        return self.request_attributes

    @override
    def end_attributes(self) -> Attributes:
        attributes: Attributes = {}
        if self.time_to_first_chunk and self.streamed:
            attributes["gen_ai.response.time_to_first_chunk"] = self.time_to_first_chunk / 1e9
        if self.run is not None and self.run.conversation_id:
            attributes["gen_ai.conversation.id"] = self.run.conversation_id
        end = self.end
        if end is None:
            return attributes
        attributes["gen_ai.response.finish_reasons"] = (map_finish_reason(end.reason),)
        if end.response_id is not None:
            attributes["gen_ai.response.id"] = end.response_id
        if end.response_model is not None:
            attributes["gen_ai.response.model"] = end.response_model
        return attributes if end.usage is None else attributes | build_usage_attributes(end.usage)

    @property
    def finish_reason(self) -> str:
        """The finish reason in the words of the conventions; empty if the turn did not finish."""
        return "" if self.end is None else map_finish_reason(self.end.reason)

    def add_events(self, events: Sequence[AnyModelEvent]) -> None:
        """Record a batch of events that has just arrived."""
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
        """Wrap `accept_batch` so that accepted batches are recorded.

        Most events pass through here, and this is all that telemetry does for them. So it does as little as possible.
        """
        if self.events is not None:
            return partial(self._forward_and_add, accept_batch)
        if self.chunk_times is None:
            return accept_batch
        append, now = self.chunk_times.append, perf_counter_ns

        def forward(events: Sequence[AnyModelEvent]) -> bool:
            if accept_batch(events):
                append(now())
                return True
            return False

        return forward

    def _forward_and_add(self, accept_batch: AcceptBatch, events: Sequence[AnyModelEvent]) -> bool:
        accepted = accept_batch(events)
        if accepted:
            self.add_events(events)
        return accepted

    def take_chunk_intervals(self) -> BucketHistogram:
        """Return the seconds between batches and drop their times, of which there may be many."""
        times, self.chunk_times = self.chunk_times or array("q"), None
        intervals = [*map(sub, times[1:], times)]
        histogram = BucketHistogram(DURATION_BUCKETS)
        histogram.sum = sum(intervals) / 1e9
        if max(intervals, default=0) <= DURATION_BUCKETS[0] * 1e9:  # as in a burst
            histogram.counts[0] = len(intervals)
            return histogram
        intervals.sort()
        cumulative = [bisect_right(intervals, bound * 1e9) for bound in DURATION_BUCKETS]
        histogram.counts = [*map(sub, [*cumulative, len(intervals)], [0, *cumulative])]
        return histogram


class ToolCallRecord(SpanRecord, eq=False, kw_only=True):
    """A call of a hosted tool.

    item_id: of the output item that clients see, once the call has ended.
    container_id: of the container that the call runs in, if any. exit_code: of the code, once it has ended.
    arguments, output: as the model wrote and read them; empty after the end.
    """

    name: str
    call_id: str
    run: RunRecord | None = None
    item_id: str = ""
    container_id: str = ""
    exit_code: int | None = None
    arguments: str = ""
    output: str = ""

    @override
    def release_content(self) -> None:
        self.arguments = self.output = ""

    @override
    def span_name(self) -> str:
        return f"execute_tool {self.name}"

    @override
    def start_attributes(self) -> Attributes:
        return {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self.name,
            "gen_ai.tool.type": "extension",
        }

    @override
    def end_attributes(self) -> Attributes:
        attributes: Attributes = {"gen_ai.tool.call.id": self.call_id}
        if self.item_id:
            attributes["fumehood.item.id"] = self.item_id
        if self.container_id:
            attributes["fumehood.container.id"] = self.container_id
        if self.exit_code is not None:
            attributes["process.exit.code"] = self.exit_code
        if self.run is not None and self.run.conversation_id:
            attributes["gen_ai.conversation.id"] = self.run.conversation_id
        return attributes


class SandboxPhaseRecord(SpanRecord, eq=False, kw_only=True):
    """A phase of a tool call in a sandbox: acquire, install packages, run, find files. Reported only at its end."""

    timing: TimedStep
    call: ToolCallRecord

    @override
    def span_name(self) -> str:
        return f"sandbox {self.timing.name}"

    @override
    def start_attributes(self) -> Attributes:
        attributes: Attributes = {
            _PHASE_ATTRIBUTES.get(name, f"fumehood.sandbox.{name}"): value
            for name, value in self.timing.attributes.items()
        }
        if self.call.container_id:
            attributes["fumehood.container.id"] = self.call.container_id
        return attributes


# Those that the conventions have a name for.
_PHASE_ATTRIBUTES = {"exit_code": "process.exit.code"}


def _build_request_attributes(
    request: ModelRequest, server: tuple[str, int] | None, provider: str
) -> Attributes:
    sampling = request.sampling
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": True if request.streamed else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.max_tokens": sampling.max_output_tokens,
        "gen_ai.output.type": None if sampling.text is None else _output_type_of(sampling.text),
    }
    if server is not None:
        attributes["server.address"], attributes["server.port"] = server
    return {name: value for name, value in attributes.items() if value is not None}


def _output_type_of(text: TextConfig) -> str | None:
    if text.format is None:
        return None
    return "text" if text.format.type == "text" else "json"


def build_usage_attributes(usage: Usage) -> Attributes:
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if cached := usage.input_tokens_details.cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = cached
    if written := usage.input_tokens_details.cache_write_tokens:
        attributes["gen_ai.usage.cache_creation.input_tokens"] = written
    if reasoning := usage.output_tokens_details.reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning
    return attributes


# --- dispatching ----------------------------------------------------------------------------------------


class RecordListener(ABC):
    """Receives records that have ended.

    needs_chunk_times: whether it reads `TurnRecord.chunk_times`.
    """

    needs_chunk_times: ClassVar[bool] = False

    @abstractmethod
    def on_end(self, record: SpanRecord) -> None: ...


class RecordDispatcher:
    """Passes ended records to listeners, in batches. It logs what a listener raises and goes on.

    A listener that runs once a request finds nothing of itself in the processor's caches and takes several times as
    long, so ended records wait for up to half a second (decision 0039).

    content_capture: is called at once, while the record still holds its content.
    on_start: starts the record's span.
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
            _notify([record], self._on_start)

    def end(self, record: SpanRecord) -> None:
        if not record.duration_ns:
            record.duration_ns = perf_counter_ns() - record.start_counter
        if self._content_capture is not None:
            _notify([record], self._content_capture.on_end)
        record.release_content()
        pending = self._pending
        pending.append(record)
        if len(pending) >= _BATCH_SIZE or record.content:  # which may be large
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Pass on all records that have ended, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        for handler in self._end_handlers:
            _notify(pending, handler)


def _notify(records: Sequence[SpanRecord], handler: Callable[[SpanRecord], None]) -> None:
    for record in records:
        try:
            handler(record)
        except Exception as error:
            # Without the message, which may hold content.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("telemetry: %s at %s:%s", type(error).__name__, frame.filename, frame.lineno)
