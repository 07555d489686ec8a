"""Plain numbers of what happens behind the gateway, for whoever shows them.

They are counted where the thing happens, by one thread, and each costs an addition; what they are called, and how they
are shown, is for those who read them: `/metrics`, and OpenTelemetry where it is on.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

DURATION_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class BucketHistogram:
    """How often something took how long, or was how much; `bounds` rise."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = DURATION_BUCKETS) -> None:
        self.sum = 0.0
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.sum += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def merge(self, other: "BucketHistogram") -> None:
        """What was counted elsewhere, under the same bounds."""
        self.sum += other.sum
        for place, number in enumerate(other.counts):
            self.counts[place] += number

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Under each bound, how many were at most that; as Prometheus wants it."""
        names = (*map(str, map(float, self.bounds)), "+Inf")
        return [*zip(names, accumulate(self.counts), strict=True)]

    @contextmanager
    def time(self, monotonic: Callable[[], float]) -> Generator[None]:
        """Adds how long the block took, however it was left."""
        began = monotonic()
        try:
            yield
        finally:
            self.observe(monotonic() - began)


@dataclass(slots=True, eq=False)
class ModelStats:
    """Of the models that one pattern of the configuration stands for.

    running: turns that were asked for and have not ended.
    ended: by outcome: `ended`, `cancelled` where nobody here wanted more of it, or the kind of the error.
    seconds, first_piece: how long they took, and until something came; tries that failed before are part of both.
    retries: tries after the first one.
    errors: of the model's server, also those after which it was asked again, by kind.
    """

    running_turns: int = 0
    ended_turns: Counter[str] = field(default_factory=Counter[str])
    turn_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    first_event_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    retries: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True, eq=False)
class ContainerStats:
    """What happens in containers.

    live: containers that run, of all tenants; counted anew at every sweep, since other processes may end some.
    begun: those that began here. refused: those that did not, because their tenant had as many as it may have.
    ended: by the end: `idle`, `old`, `deleted`, `evicted` to make room for another, `lost` with the sandbox server.
    trimmed: expired ones whose files were let go of before their time, to make room.
    running: calls of code or commands that run or wait.
    calls: those that ended, by the status of their `End`, or `abandoned` where nobody stayed for it.
    starts: sandboxes that were had, `warm` or `cold`, or `new` from a server that does not tell.
    acquire: seconds until one was had, or was given up.
    run: seconds of a call's code. files: seconds to put its files there, or to find and keep what it wrote.
    """

    live_containers: int = 0
    created: int = 0
    rejected: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    purged: int = 0
    running_calls: int = 0
    ended_calls: Counter[str] = field(default_factory=Counter[str])
    sandbox_starts: Counter[str] = field(default_factory=Counter[str])
    acquire_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    run_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    file_seconds: BucketHistogram = field(default_factory=BucketHistogram)


@dataclass(slots=True, eq=False)
class StoreStats:
    """Of writes, which share transactions: how long one took, until it was on the disk, and how many shared it."""

    write_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    batch_sizes: BucketHistogram = field(default_factory=lambda: BucketHistogram(_BATCH_SIZE_BUCKETS))


@dataclass(slots=True, eq=False)
class GatewayStats:
    """All of one gateway.

    models: by the pattern of the configuration; what callers wrote is no name for a figure.
    readers_cut: those who read nothing, by how they were told from others: `behind` the events of their run by too
        much, or `stalled`, with a connection that took nothing.
    """

    models: dict[str, ModelStats] = field(default_factory=dict[str, ModelStats])
    containers: ContainerStats = field(default_factory=ContainerStats)
    store: StoreStats = field(default_factory=StoreStats)
    dropped_readers: Counter[str] = field(default_factory=Counter[str])
