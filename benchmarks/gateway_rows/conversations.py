"""Long conversations: CPU time and disk bytes of a late turn against an early one."""

import contextlib
import itertools
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gateway_rows.bench import (
    MS,
    TEXT_MODEL,
    Bench,
    cpu_clock_of,
    measure_cpu,
    run_concurrently,
)
from benchmarks.harness.gateway_client import BenchmarkTarget
from benchmarks.harness.result_table import ResultRow, SampleSet

EARLY, LATE = 3, 100  # turns of a conversation


async def growth_rows(bench: Bench) -> list[ResultRow]:
    """CPU time and disk bytes of a late turn of a conversation against an early one."""
    target, number = bench.ours, bench.scale.conversations
    tips, sizes = await database_growth(bench, number, LATE - 1)
    clock = cpu_clock_of(target)
    early, late = ([], []), ([], [])
    for old in tips:
        young = (await grow_conversations(target, [None], EARLY - 1))[0]
        for tip, kinds in ((young, early), (old, late)):
            for stream, values in zip((True, False), kinds, strict=True):
                turn = target.ask_for_text(TEXT_MODEL, stream=stream, previous_response_id=tip)
                taken, answer = await measure_cpu(clock, turn)
                values.append(taken * MS)
                tip = answer.response.id
    found: list[ResultRow] = []
    kinds = (("growth", "streamed", {"p50": 1 / 1.3}), ("growth_blocking", "blocking", {}))
    for (key, how, goals), then, now in zip(kinds, early, late, strict=True):
        turn = int(how == "blocking")
        title = f"CPU of turn {LATE + turn} of a conversation, {how}"
        reference = SampleSet(f"turn {EARLY + turn}", then)
        found.append(ResultRow(key, title, "ms", SampleSet("late", now), reference, goals, measures=("p50",)))
    return found + stored_row(sizes, number)


async def grow_conversations(target: BenchmarkTarget, tips: Sequence[str | None], turns: int) -> list[str]:
    """Continue conversations concurrently; return their last responses."""
    found = list(tips)

    async def one(index: int) -> None:
        tip = found[index]
        more = {} if tip is None else {"previous_response_id": tip}
        found[index] = (await target.ask_for_text(TEXT_MODEL, stream=False, **more)).response.id

    for _ in range(turns):
        await run_concurrently(8, [lambda index=index: one(index) for index in range(len(found))])
    return [tip for tip in found if tip is not None]


async def database_growth(bench: Bench, number: int, turns: int) -> tuple[list[str], dict[int, int]]:
    """The last responses of the conversations, and the database size after every ten turns."""
    tips: Sequence[str | None] = [None] * number
    sizes: dict[int, int] = {}
    for done in range(0, turns, 10):
        tips = await grow_conversations(bench.ours, tips, min(10, turns - done))
        if bench.database is not None:
            sizes[done + 10] = file_sizes(bench.database)
    return [tip for tip in tips if tip is not None], sizes


def file_sizes(database: Path) -> int:
    """Bytes of used pages, including the write-ahead log."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


def stored_row(sizes: dict[int, int], number: int) -> list[ResultRow]:
    """Bytes added per turn, late against early; ten turns of all conversations are one sample."""
    steps = [
        (end, (sizes[end] - sizes[begin]) / 10 / number)
        for begin, end in itertools.pairwise(sorted(sizes))
        if end <= LATE - 10
    ]
    if len(steps) < 6:
        return []
    late, early = [size for _, size in steps[-3:]], [size for _, size in steps[:3]]
    title = f"bytes stored per turn, turns {steps[-4][0] + 1} to {steps[-1][0]}"
    reference = SampleSet(f"turns 11 to {steps[2][0]}", early)
    goals = {"mean": 1 / 1.1}
    return [
        ResultRow("growth_bytes", title, "B", SampleSet("late", late), reference, goals, measures=("mean",))
    ]
