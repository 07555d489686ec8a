"""Counters and histograms of the gateway.

Each is updated where the event happens, in one thread, at the cost of an addition. `/metrics` and OpenTelemetry read
them and choose the exposed names.
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
    """A histogram with ascending upper `bounds` and one bucket above the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = DURATION_BUCKETS) -> None:
        self.sum = 0.0
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.sum += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def merge(self, other: "BucketHistogram") -> None:
        """Add the counts of a histogram with the same bounds."""
        self.sum += other.sum
        for index, count in enumerate(other.counts):
            self.counts[index] += count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative count for each upper bound, as Prometheus expects it."""
        names = (*map(str, map(float, self.bounds)), "+Inf")
        return [*zip(names, accumulate(self.counts), strict=True)]

    @contextmanager
    def time(self, monotonic: Callable[[], float]) -> Generator[None]:
        """Observe the duration of the block, also if it raises."""
        started = monotonic()
        try:
            yield
        finally:
            self.observe(monotonic() - started)


@dataclass(slots=True, eq=False)
class ModelStats:
    """Turns of the models that match one pattern of the configuration.

    running_turns: turns that were requested and have not ended.
    ended_turns: by outcome: `ended`, `cancelled` by the gateway, or the kind of the error.
    turn_seconds, first_event_seconds: duration of a turn and time to its first event, both including failed attempts.
    retries: attempts after the first one.
    errors: errors of the model server by kind, including those that were retried.
    """

    running_turns: int = 0
    ended_turns: Counter[str] = field(default_factory=Counter[str])
    turn_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    first_event_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    retries: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True, eq=False)
class ContainerStats:
    """Containers and the calls that run in them.

    live_containers: running containers of all tenants; recounted at every sweep, since other processes may end some.
    created: containers created here. rejected: containers refused because the tenant reached its quota.
    ended: by reason: `idle`, `old`, `deleted`, `evicted` to make room for another, `lost` with the sandbox server.
    purged: expired containers whose files were deleted before the end of their retention, to make room.
    running_calls: calls of code or commands that run or wait.
    ended_calls: by the status of their end, or `abandoned` if the caller left first.
    sandbox_starts: `warm` or `cold`, or `new` if the server does not report which.
    acquire_seconds: until a sandbox was acquired, or the attempt ended.
    orphans: sandboxes that were destroyed because no container refers to them.
    run_seconds: of a call's code. file_seconds: to copy its files there, or to find and store what it wrote.
    """

    live_containers: int = 0
    created: int = 0
    rejected: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    purged: int = 0
    running_calls: int = 0
    ended_calls: Counter[str] = field(default_factory=Counter[str])
    sandbox_starts: Counter[str] = field(default_factory=Counter[str])
    orphans: int = 0
    acquire_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    run_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    file_seconds: BucketHistogram = field(default_factory=BucketHistogram)


@dataclass(slots=True, eq=False)
class ClaimStats:
    """Claims for sandboxes in pods.

    open_claims: claims that exist, of all replicas. in_flight: claims of this one that wait for a pod.
    ready_seconds: from the request for a claim until its pod was ready, for a `warm` one of the pool and a `cold` one.
    failures: claims that got no pod, by the reason; also `delete` for those that could not be deleted.
    watch_failures: how often the watch broke. is_watch_connected: whether the state of claims is current.
    """

    open_claims: int = 0
    in_flight: int = 0
    ready_seconds: dict[str, BucketHistogram] = field(
        default_factory=lambda: {"warm": BucketHistogram(), "cold": BucketHistogram()}
    )
    failures: Counter[str] = field(default_factory=Counter[str])
    watch_failures: int = 0
    is_watch_connected: bool = False


@dataclass(slots=True, eq=False)
class StoreStats:
    """Seconds until a write was durable, and the number of writes that shared a transaction."""

    write_seconds: BucketHistogram = field(default_factory=BucketHistogram)
    batch_sizes: BucketHistogram = field(default_factory=lambda: BucketHistogram(_BATCH_SIZE_BUCKETS))


@dataclass(slots=True, eq=False)
class GatewayStats:
    """All statistics of one gateway.

    models: by the pattern of the configuration; names that callers write would be unbounded.
    dropped_readers: by reason: `behind` the events of their run by too much, or `stalled`, with a connection that
        accepted no data.
    """

    models: dict[str, ModelStats] = field(default_factory=dict[str, ModelStats])
    containers: ContainerStats = field(default_factory=ContainerStats)
    claims: ClaimStats = field(default_factory=ClaimStats)
    store: StoreStats = field(default_factory=StoreStats)
    dropped_readers: Counter[str] = field(default_factory=Counter[str])
