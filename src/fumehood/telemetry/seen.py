"""What happens at the seams, as records that listeners are told of; imports siblings and what is below.

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

from fumehood.figures import Distribution
from fumehood.interfaces import Take
from fumehood.parts.canonical import JsonObject
from fumehood.phases import Phase
from fumehood.protocol.models import AnyModelEvent, ModelRequest, Sampling, TurnEnded
from fumehood.protocol.responses import CreateResponse, Response, Usage
from fumehood.telemetry.conventions import SECONDS, finish_reason_of
from fumehood.telemetry.known import (
    Attributes,
    KnownCall,
    KnownPhase,
    KnownRun,
    KnownTurn,
    output_type,
    usage_attributes,
)
from fumehood.telemetry.quick_spans import Known, QuickSpan

_TOGETHER = 64  # records
_SECONDS_UNTIL_TOLD = 0.5

logger = logging.getLogger(__name__)


class Seen(QuickSpan, eq=False, kw_only=True):
    """Something that takes its time; it is its own span, where there are spans.

    since: when it began, by the performance counter.
    content: what was said, by attribute; empty unless it is to be recorded.
    """

    since: int = field(default_factory=perf_counter_ns)
    content: JsonObject = {}  # noqa: RUF012 - every struct gets its own

    @property
    def seconds(self) -> float:
        return self.took / 1e9

    def forget(self) -> None:
        """It has ended, and waits until it is told: whatever may be large is let go of."""


class Answer(Struct, frozen=True):
    """What is kept of a response."""

    id: str
    model: str
    usage: Usage | None


class RunSeen(Seen, eq=False, kw_only=True):
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
    answer: Answer | None = None
    turns: int = 0
    calls: int = 0
    first: int = 0
    writing: int = 0

    @override
    def forget(self) -> None:
        response = self.response
        if response is not None:
            self.answer = Answer(response.id, response.model, response.usage)
        self.request = self.response = None

    @override
    def known(self) -> Known:
        return KnownRun(self.model)

    @override
    def told(self) -> Attributes:
        answer = self.answer
        if answer is None:
            return {}
        told: Attributes = {"gen_ai.response.id": answer.id, "gen_ai.response.model": answer.model}
        return told if answer.usage is None else told | usage_attributes(answer.usage)


class TurnSeen(Seen, eq=False, kw_only=True):
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
    sampling: Sampling
    output_type: str | None = None
    server: tuple[str, int] | None = None
    run: RunSeen | None = None
    first: int = 0
    moments: "array[int] | None" = None
    pieces: list[AnyModelEvent] | None = None
    end: TurnEnded | None = None

    @staticmethod
    def of(
        request: ModelRequest, server: tuple[str, int] | None = None, run: RunSeen | None = None
    ) -> "TurnSeen":
        sampling = request.sampling
        seen = TurnSeen(
            request=request,
            model=request.model,
            streamed=request.streamed,
            sampling=sampling,
            server=server,
            run=run,
        )
        if sampling.text is not None:  # a schema may be large
            seen.output_type = output_type(sampling.text)
            seen.sampling = structs.replace(sampling, text=None)
        return seen

    @override
    def forget(self) -> None:
        self.request = self.pieces = None

    @override
    def known(self) -> Known:
        sampling = self.sampling
        return KnownTurn(
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
    def told(self) -> Attributes:
        told: Attributes = {}
        if self.first and self.streamed:
            told["gen_ai.response.time_to_first_chunk"] = self.first / 1e9
        end = self.end
        if end is None:
            return told
        told["gen_ai.response.finish_reasons"] = (finish_reason_of(end.reason),)
        return told if end.usage is None else told | usage_attributes(end.usage)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped, in the words of the conventions; nothing where it did not get that far."""
        return "" if self.end is None else finish_reason_of(self.end.reason)

    def note(self, events: Sequence[AnyModelEvent]) -> None:
        """A piece has come."""
        if not events:
            return
        now = perf_counter_ns()
        if not self.first:
            self.first = now - self.since
            run = self.run
            if run is not None and not run.first:
                run.first = now - run.since
        if self.moments is not None:
            self.moments.append(now)
        if self.pieces is not None:
            self.pieces += events
        if isinstance(events[-1], TurnEnded):
            self.end = events[-1]

    def noting(self, take: Take) -> Take:
        """The same, with what it takes noted. For most events this is all that telemetry does, and they find nothing
        of it in the processor's caches: so it is as little as can be.
        """
        if self.pieces is not None:
            return partial(self._keep, take)
        if self.moments is None:  # when its pieces come is nobody's question
            return take
        came, now = self.moments.append, perf_counter_ns

        def taking(events: Sequence[AnyModelEvent]) -> bool:
            if take(events):
                came(now())
                return True
            return False

        return taking

    def _keep(self, take: Take, events: Sequence[AnyModelEvent]) -> bool:
        taken = take(events)
        if taken:
            self.note(events)
        return taken

    def gaps(self) -> Distribution:
        """Seconds between its pieces, whose moments are forgotten then: there may be many."""
        moments, self.moments = self.moments or array("q"), None
        sizes = [*map(sub, moments[1:], moments)]
        found = Distribution(SECONDS)
        found.total = sum(sizes) / 1e9
        if max(sizes, default=0) <= SECONDS[0] * 1e9:  # as in a burst
            found.numbers[0] = len(sizes)
            return found
        sizes.sort()
        counted = [bisect_right(sizes, bound * 1e9) for bound in SECONDS]
        found.numbers = [*map(sub, [*counted, len(sizes)], [0, *counted])]
        return found


class CallSeen(Seen, eq=False, kw_only=True):
    """A call of a tool that the gateway runs itself.

    item_id: of the item that clients see of it, once it has ended.
    arguments, output: as the model wrote and read them; empty once they are forgotten.
    """

    name: str
    call_id: str
    run: RunSeen | None = None
    item_id: str = ""
    arguments: str = ""
    output: str = ""

    @override
    def forget(self) -> None:
        self.arguments = self.output = ""

    @override
    def known(self) -> Known:
        return KnownCall(self.name)

    @override
    def told(self) -> Attributes:
        told: Attributes = {"gen_ai.tool.call.id": self.call_id}
        if self.item_id:
            told["fumehood.item.id"] = self.item_id
        return told


class PhaseSeen(Seen, eq=False, kw_only=True):
    """A phase of a call: a sandbox was acquired, packages were installed, code has run, files were looked for. Nobody
    hears of it before it is over.
    """

    phase: Phase
    call: CallSeen

    @override
    def known(self) -> Known:
        return KnownPhase(self.phase.name, tuple(self.phase.facts.items()))


class Listener(ABC):
    """Who is told of what has ended.

    wants_moments: whether it looks at when the pieces of streamed turns came.
    """

    wants_moments: ClassVar[bool] = False

    @abstractmethod
    def ended(self, seen: Seen) -> None: ...


class Observer:
    """Tells all listeners; what goes wrong with one of them is logged, and is nobody else's trouble.

    begins: gives what begins its place in a trace, before anybody else knows of it.
    contents: sees what has ended at once, while it is whole, and puts into it what is recorded of it.
    records_content, wants_moments: whether somebody does.
    running: responses that are being made now.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        contents: Listener | None = None,
        begins: Callable[[Seen], None] | None = None,
    ) -> None:
        self._told_of_ends = [listener.ended for listener in listeners]
        self._begins = begins
        self._contents = contents
        self.records_content = contents is not None
        self.wants_moments = any(listener.wants_moments for listener in listeners)
        self._ended: list[Seen] = []
        self._timer: asyncio.TimerHandle | None = None
        self.running = 0

    def began(self, seen: Seen) -> None:
        if self._begins is not None:
            try:
                self._begins(seen)
            except Exception as error:
                _complain(error)

    def ended(self, seen: Seen) -> None:
        if not seen.took:
            seen.took = perf_counter_ns() - seen.since
        if self._contents is not None:
            _tell([seen], self._contents.ended)
        seen.forget()
        ended = self._ended
        ended.append(seen)
        if len(ended) >= _TOGETHER or seen.content:  # which may be large
            self.tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS_UNTIL_TOLD, self.tell)

    def tell(self) -> None:
        """Of everything that has ended, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        for listener in self._told_of_ends:
            _tell(ended, listener)


def _tell(ended: Sequence[Seen], listener: Callable[[Seen], None]) -> None:
    for seen in ended:
        try:
            listener(seen)
        except Exception as error:
            _complain(error)


def _complain(error: Exception) -> None:
    """Without its words: what was said may be among them."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("telemetry: %s at %s:%s", type(error).__name__, place.filename, place.lineno)
