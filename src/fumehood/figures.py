"""Plain numbers of what happens behind the gateway, for whoever shows them; imports the standard library.

They are counted where the thing happens, by one thread, and each costs an addition; what they are called, and how they
are shown, is for those who read them: `/metrics`, and OpenTelemetry where it is on.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
_GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Distribution:
    """How often something took how long, or was how much; `bounds` rise."""

    __slots__ = ("bounds", "numbers", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.total = 0.0
        self.bounds = bounds
        self.numbers = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.total += value
        self.numbers[bisect_left(self.bounds, value)] += 1

    def add_all(self, other: "Distribution") -> None:
        """What was counted elsewhere, under the same bounds."""
        self.total += other.total
        for place, number in enumerate(other.numbers):
            self.numbers[place] += number

    @property
    def number(self) -> int:
        return sum(self.numbers)

    def buckets(self) -> list[tuple[str, float]]:
        """Under each bound, how many were at most that; as Prometheus wants it."""
        names = (*map(str, map(float, self.bounds)), "+Inf")
        return [*zip(names, accumulate(self.numbers), strict=True)]

    @contextmanager
    def timed(self, monotonic: Callable[[], float]) -> Generator[None]:
        """Adds how long the block took, however it was left."""
        began = monotonic()
        try:
            yield
        finally:
            self.add(monotonic() - began)


@dataclass(slots=True, eq=False)
class TurnFigures:
    """Of the models that one pattern of the configuration stands for.

    running: turns that were asked for and have not ended.
    ended: by outcome: `ended`, `cancelled` where nobody here wanted more of it, or the kind of the error.
    seconds, first_piece: how long they took, and until something came; tries that failed before are part of both.
    retries: tries after the first one.
    errors: of the model's server, also those after which it was asked again, by kind.
    """

    running: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    seconds: Distribution = field(default_factory=Distribution)
    first_piece: Distribution = field(default_factory=Distribution)
    retries: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True, eq=False)
class ContainerFigures:
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

    live: int = 0
    begun: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    trimmed: int = 0
    running: int = 0
    calls: Counter[str] = field(default_factory=Counter[str])
    starts: Counter[str] = field(default_factory=Counter[str])
    acquire: Distribution = field(default_factory=Distribution)
    run: Distribution = field(default_factory=Distribution)
    files: Distribution = field(default_factory=Distribution)


@dataclass(slots=True, eq=False)
class StoreFigures:
    """Of writes, which share transactions: how long one took, until it was on the disk, and how many shared it."""

    seconds: Distribution = field(default_factory=Distribution)
    group: Distribution = field(default_factory=lambda: Distribution(_GROUP_SIZES))


@dataclass(slots=True, eq=False)
class Figures:
    """All of one gateway.

    models: by the pattern of the configuration; what callers wrote is no name for a figure.
    readers_cut: those who read nothing, by how they were told from others: `behind` the events of their run by too
        much, or `stalled`, with a connection that took nothing.
    """

    models: dict[str, TurnFigures] = field(default_factory=dict[str, TurnFigures])
    containers: ContainerFigures = field(default_factory=ContainerFigures)
    store: StoreFigures = field(default_factory=StoreFigures)
    readers_cut: Counter[str] = field(default_factory=Counter[str])
