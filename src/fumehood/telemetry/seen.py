"""What happens at the seams, as records that listeners are told of; imports siblings and what is below.

Every record is made once, by whoever sees it happen, and is told twice: when it begins and when it has ended. What is
made of it (spans, metrics, events) is the listeners' affair.
"""

import logging
import traceback
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from time import perf_counter_ns, time_ns

from fumehood.figures import Distribution
from fumehood.interfaces import Take
from fumehood.parts.canonical import Json, JsonObject
from fumehood.phases import Phase
from fumehood.protocol.models import AnyModelEvent, ModelRequest, TurnEnded
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.telemetry.conventions import SECONDS, finish_reason_of
from fumehood.telemetry.quick_spans import NO_SPAN, QuickSpan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Seen:
    """Something that takes its time.

    began_at: nanoseconds since 1970. took: nanoseconds, 0 until it has ended.
    error: what kind of error it ended with, empty if with none; a code or a type, never a sentence.
    span: which listeners may need to tell what belongs together.
    content: what was said, by attribute; empty unless it is to be recorded.
    """

    began_at: int = field(default_factory=time_ns)
    took: int = 0
    error: str = ""
    span: QuickSpan = NO_SPAN
    content: JsonObject = field(default_factory=dict[str, Json])
    _since: int = field(default_factory=perf_counter_ns)

    def so_far(self) -> int:
        return perf_counter_ns() - self._since

    @property
    def seconds(self) -> float:
        return self.took / 1e9


@dataclass(slots=True, eq=False, kw_only=True)
class RunSeen(Seen):
    """A response, from the request until it is durable.

    response: as it ended, None if there was none.
    turns, calls: how many there were.
    first: nanoseconds until the first piece of its first turn came, 0 if none has.
    writing: nanoseconds that models have written, after the first pieces of their turns.
    """

    request: CreateResponse
    response: Response | None = None
    turns: int = 0
    calls: int = 0
    first: int = 0
    writing: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class TurnSeen(Seen):
    """A turn of a model.

    request: what the model's server is asked; a listener may put the trace in before it is sent.
    server: the host and the port of that server, None where there is none.
    first: nanoseconds until its first piece came, 0 if none has.
    moments: when each of its pieces came, by the performance counter.
    pieces: everything that it said, None unless content is recorded.
    """

    request: ModelRequest
    run: RunSeen | None = None
    server: tuple[str, int] | None = None
    first: int = 0
    moments: "array[int]" = field(default_factory=lambda: array("q"))
    pieces: list[AnyModelEvent] | None = None
    end: TurnEnded | None = None

    @property
    def finish_reason(self) -> str:
        """Why the model stopped, in the words of the conventions; nothing where it did not get that far."""
        if self.end is None:
            return ""
        return finish_reason_of(self.end.reason)

    def note(self, events: Sequence[AnyModelEvent]) -> None:
        """A piece has come."""
        if not events:
            return
        now = perf_counter_ns()
        self.moments.append(now)
        if not self.first:
            self.first = now - self._since
            if self.run is not None and not self.run.first:
                self.run.first = self.run.so_far()
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
        """Seconds between its pieces."""
        sizes = [*map(sub, self.moments[1:], self.moments)]
        found = Distribution(SECONDS)
        found.total = sum(sizes) / 1e9
        if max(sizes, default=0) <= SECONDS[0] * 1e9:  # as in a burst
            found.numbers[0] = len(sizes)
            return found
        sizes.sort()
        counted = [bisect_right(sizes, bound * 1e9) for bound in SECONDS]
        found.numbers = [*map(sub, [*counted, len(sizes)], [0, *counted])]
        return found


@dataclass(slots=True, eq=False, kw_only=True)
class CallSeen(Seen):
    """A call of a tool that the gateway runs itself; arguments and output as the model wrote and read them.

    item_id: of the item that clients see of it, once it has ended.
    """

    name: str
    call_id: str
    run: RunSeen | None = None
    item_id: str = ""
    arguments: str = ""
    output: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class PhaseSeen(Seen):
    """A phase of a call: a sandbox was acquired, packages were installed, code has run, files were looked for."""

    phase: Phase
    call: CallSeen


class Listener(ABC):
    """Who does not want to know of beginnings is not told of them."""

    def began(self, seen: Seen) -> None:  # noqa: B027 - not everybody has to
        pass

    @abstractmethod
    def ended(self, seen: Seen) -> None: ...


class Observer:
    """Tells all listeners; what goes wrong with one of them is logged, and is nobody else's trouble.

    records_content: whether what models say has to be kept for them.
    """

    def __init__(self, listeners: Sequence[Listener], *, records_content: bool = False) -> None:
        self._told_of_ends = [listener.ended for listener in listeners]
        self._told_of_beginnings = [
            listener.began for listener in listeners if type(listener).began is not Listener.began
        ]
        self.records_content = records_content

    def began(self, seen: Seen) -> None:
        for tell in self._told_of_beginnings:
            try:
                tell(seen)
            except Exception as error:
                _complain(error)

    def ended(self, seen: Seen) -> None:
        seen.took = seen.took or seen.so_far()
        for tell in self._told_of_ends:
            try:
                tell(seen)
            except Exception as error:
                _complain(error)


def _complain(error: Exception) -> None:
    """Without its words: what was said may be among them."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("telemetry: %s at %s:%s", type(error).__name__, place.filename, place.lineno)
