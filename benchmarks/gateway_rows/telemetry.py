"""What telemetry costs a gateway."""

import asyncio
from collections.abc import Sequence
from functools import partial

from benchmarks.gateway_rows.bench import (
    CHUNK_COUNT,
    MS,
    TOOL_FRAGMENTS,
    US,
    Bench,
    Work,
    cpu_clock_of,
    request_paced_streams,
    request_texts,
    run_concurrently,
)
from benchmarks.harness import gateway_processes
from benchmarks.harness.gateway_client import BenchmarkTarget
from benchmarks.harness.result_table import ResultRow, SampleSet


async def telemetry_rows(bench: Bench) -> list[ResultRow]:
    """What a gateway costs that sends telemetry, without content, against one that sends none. Two processes of the
    same program differ by some percent, whatever they do: so there are several of both.
    """
    if bench.observed is None:
        return []
    scale = bench.scale
    events, streams = scale.requests * CHUNK_COUNT, scale.streams

    async def burst(target: BenchmarkTarget) -> None:
        await request_texts(target, scale, stream=True)

    async def one_by_one(target: BenchmarkTarget) -> None:
        await request_paced_streams(target, streams, scale.paced_chunks)

    async def short(target: BenchmarkTarget) -> None:
        await request_texts(target, scale, stream=False, model="burst-10")

    async def code(target: BenchmarkTarget) -> None:
        await run_concurrently(1, [partial(target.ask_with_code, TOOL_FRAGMENTS)] * scale.tool_turns)

    goal, none = {"mean": 0.85}, dict[str, float]()
    kinds = (
        ("burst", f"streamed event, {CHUNK_COUNT} in a burst", "µs", burst, 6, US / events, goal),
        (
            *("paced", f"streamed event, 50/s × {streams} streams", "µs"),
            *(one_by_one, 1, US / streams / scale.paced_chunks, goal),
        ),
        ("turn", "blocking request, answer of 10 tokens", "ms", short, 12, MS / scale.requests, none),
        ("code", "turn with code, gateway alone", "ms", code, 2, MS / scale.tool_turns, goal),
    )
    observed: list[list[float]] = [[] for _ in kinds]
    without: list[list[float]] = [[] for _ in kinds]
    for _ in range(scale.pairs // 2):
        # Two pairs at a time: while one side works, the others idle, and what they do then is part of their samples.
        async with bench.observed() as first, bench.observed() as second:
            for number, (*_, work, rounds, share, _) in enumerate(kinds):
                taken = await measure_paired([*first, *second], scale.balances, rounds, work, share)
                observed[number] += taken[0] + taken[2]
                without[number] += taken[1] + taken[3]
    found: list[ResultRow] = []
    for (key, what, unit, *_, goals), on, off in zip(kinds, observed, without, strict=True):
        both = SampleSet("with telemetry", on), SampleSet("without telemetry", off)
        title = f"CPU per {what}, with telemetry"
        found.append(ResultRow(f"telemetry_{key}", title, unit, *both, goals, measures=("mean",)))
    return found


async def measure_paired(
    sides: Sequence[BenchmarkTarget], balances: int, rounds: int, work: Work, share: float
) -> list[list[float]]:
    """CPU time of each side for so many rounds of the same work in a row, `share` of each; the sides take turns.
    Whatever a side does until its next sample begins is in it: what is sent by the batch has no round of its own.
    """
    found: list[list[float]] = [[] for _ in sides]
    clocks = [cpu_clock_of(one) for one in sides]
    before: list[float] = []
    for number in range(balances + 1):
        for one in sides if number % 2 else reversed(sides):
            for _ in range(rounds):
                await work(one)
        if number in (0, balances):
            await asyncio.sleep(gateway_processes.EXPORT_SECONDS)
        now = [clock() for clock in clocks]
        for samples, then, taken in zip(found, before, now, strict=False):  # the first has nothing before it
            samples.append((taken - then) * share / rounds)
        before = now
    return found
