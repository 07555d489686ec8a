"""Both sides of the benchmark, and how CPU time is taken from them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import process_resources
from benchmarks.harness.gateway_client import BenchmarkTarget, TimedAnswer
from benchmarks.harness.raw_http_client import RawHttpClient
from benchmarks.harness.result_table import SampleSet

CHUNK_COUNT = 200
TEXT_MODEL = f"burst-{CHUNK_COUNT}"
TOOL_FRAGMENTS = 20
US, MS = 1e6, 1e3


@dataclass(frozen=True)
class Scale:
    """Repetitions of each measurement."""

    rounds: int
    requests: int  # of one side in one round
    at_once: int
    streams: int  # paced, at the same time
    paced_rounds: int
    paced_chunks: int
    latencies: int
    tool_rounds: int
    tool_turns: int  # of one kind in one round
    fresh_containers: int
    conversations: int
    pairs: int  # of a gateway with telemetry and one without, an even number
    balances: int  # of each pair


FULL = Scale(25, 48, 8, 100, 5, CHUNK_COUNT, 300, 7, 10, 8, 20, 6, 2)
QUICK = Scale(9, 24, 8, 100, 4, CHUNK_COUNT // 2, 100, 3, 4, 4, 8, 2, 2)


@dataclass(frozen=True)
class Bench:
    """Both sides, what is behind them, and where ours keeps its data (nowhere, in a rehearsal).

    observed: one that sends telemetry and one that does not; they are started when they are needed.
    """

    ours: BenchmarkTarget
    relay: BenchmarkTarget
    model: RawHttpClient
    scale: Scale
    database: Path | None
    observed: (
        Callable[[], contextlib.AbstractAsyncContextManager[tuple[BenchmarkTarget, BenchmarkTarget]]] | None
    ) = None

    @property
    def joined(self) -> BenchmarkTarget:
        return replace(self.relay, name="relay, events joined", path=f"/joined{self.relay.path}")


type Work = Callable[[BenchmarkTarget], Awaitable[object]]
type Clock = Callable[[], float]


def cpu_clock_of(target: BenchmarkTarget) -> Clock:
    return lambda: process_resources.cpu_clock(target.pid)


async def measure_cpu[T](clock: Clock, work: Awaitable[T]) -> tuple[float, T]:
    """CPU seconds of some work, and its result; includes what a server does after its response."""
    before = clock()
    result = await work
    await asyncio.sleep(0.01)
    return clock() - before, result


async def measure_interleaved(
    sides: Sequence[BenchmarkTarget], rounds: int, work: Work, share: float
) -> list[SampleSet]:
    """CPU time of each side for the same work, `share` of it, in turns; a round before the first is not counted."""
    found = [SampleSet(one.name, []) for one in sides]
    order = list(zip(sides, found, strict=True))
    for number in range(rounds + 1):
        for one, samples in order if number % 2 else reversed(order):
            taken, _ = await measure_cpu(cpu_clock_of(one), work(one))
            if number:
                samples.values.append(taken * share)
    return found


async def run_concurrently(number: int, works: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run all of them, with limited concurrency."""
    waiting = iter(works)

    async def worker() -> None:
        for work in waiting:
            await work()

    await asyncio.gather(*(worker() for _ in range(number)))


async def measure_per_turn(clock: Clock, turns: int, work: Callable[[], Awaitable[object]]) -> float:
    """Mean CPU seconds of sequential turns."""
    taken, _ = await measure_cpu(clock, run_concurrently(1, [work] * turns))
    return taken / turns


async def request_texts(
    target: BenchmarkTarget, scale: Scale, *, stream: bool, model: str = TEXT_MODEL
) -> None:
    async def one() -> TimedAnswer:
        return await target.ask_for_text(model, stream=stream)

    await run_concurrently(scale.at_once, [one] * scale.requests)


async def request_paced_streams(target: BenchmarkTarget, streams: int, chunks: int) -> None:
    """Concurrent streams that start at different times."""

    async def one(number: int) -> None:
        await asyncio.sleep(0.2 * number / streams)
        await target.ask_for_text(f"paced-{chunks}", stream=True)

    await asyncio.gather(*(one(number) for number in range(streams)))
