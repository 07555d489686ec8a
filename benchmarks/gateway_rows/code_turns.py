"""Turns of the code interpreter: CPU per delta of code, and per turn."""

import asyncio
import statistics
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.gateway_rows.bench import (
    MS,
    TOOL_FRAGMENTS,
    US,
    Bench,
    cpu_clock_of,
    measure_per_turn,
)
from benchmarks.harness import process_resources
from benchmarks.harness.result_table import ResultRow, SampleSet

LENGTHS = (200, 1100, 2000)  # of code and of texts, to tell what a delta costs from what a turn costs


async def code_rows(bench: Bench) -> list[ResultRow]:
    """CPU per delta of code, from the difference between lengths."""
    target, scale = bench.ours, bench.scale
    container = (await target.ask_with_code(8)).response.item("code_interpreter_call").container_id
    clock = cpu_clock_of(target)
    code, text = list[list[float]](), list[list[float]]()
    for number in range(scale.tool_rounds + 1):
        codes, words = list[float](), list[float]()
        for length in LENGTHS:
            writing = partial(target.ask_with_code, length, container)
            saying = partial(target.ask_for_text, f"burst-{length}", stream=True)
            codes.append(await measure_per_turn(clock, scale.tool_turns, writing) * US)
            words.append(await measure_per_turn(clock, scale.tool_turns, saying) * US)
        if number:
            code.append(codes)
            text.append(words)
    return code_table(code, text)


def code_table(code: Sequence[Sequence[float]], text: Sequence[Sequence[float]]) -> list[ResultRow]:
    """Rows of rounds, each round µs per turn by LENGTHS."""

    def slopes(rounds: Sequence[Sequence[float]], low: int, high: int) -> list[float]:
        return [(one[high] - one[low]) / (LENGTHS[high] - LENGTHS[low]) for one in rounds]

    whole = statistics.median(one[-1] for one in code) / LENGTHS[-1]
    delta = ResultRow(
        "code_delta",
        "CPU per streamed code delta, in a burst",
        "µs",
        SampleSet("code", slopes(code, 0, 2)),
        SampleSet("a text delta of ours", slopes(text, 0, 2)),
        {"p50": 1 / 1.5},
        measures=("p50",),
        note=f"with the whole turn of {LENGTHS[-1]} deltas and its execution {whole:.1f} µs",
    )
    low, middle, high = LENGTHS
    flat = ResultRow(
        "code_flat",
        f"CPU per code delta between the {middle}th and the {high}th",
        "µs",
        SampleSet("late", slopes(code, 1, 2)),
        SampleSet(f"between the {low}th and the {middle}th", slopes(code, 0, 1)),
        {"p50": 1 / 1.3},
        measures=("p50",),
    )
    return [delta, flat]


async def tool_rows(bench: Bench) -> list[ResultRow]:
    """A turn with hosted code against one with a client-side function."""
    target, scale = bench.ours, bench.scale
    container = (await target.ask_with_code(8)).response.item("code_interpreter_call").container_id
    outside = [
        pid for pid in process_resources.process_tree(target.pid) if _is_outside_sandbox(pid, target.pid)
    ]

    def clock() -> float:
        return sum(map(process_resources.cpu_clock, outside))

    code, function = list[float](), list[float]()
    kinds = (
        (partial(target.ask_with_code, TOOL_FRAGMENTS, container), code),
        (partial(target.ask_with_function, TOOL_FRAGMENTS), function),
    )
    for number in range(scale.tool_rounds + 1):
        for work, taken in kinds:
            cost = await measure_per_turn(clock, scale.tool_turns, work) * MS
            if number:
                taken.append(cost)
    reference = SampleSet("two turns with a function", function)
    ours = SampleSet("gateway and sandbox server", code)
    row = ResultRow(
        "code_turn",
        "CPU of a code-interpreter turn, beyond model and code",
        "ms",
        ours,
        reference,
        {"p50": 1 / 2},
        measures=("p50",),
        note=f"{len(outside)} processes outside of sandboxes, a container in use",
    )
    return [row, *await fresh_container_row(bench, reference)]


def _is_outside_sandbox(pid: int, root: int) -> bool:
    """Whether a process is neither in a sandbox nor a zygote."""
    return process_resources.pid_namespace(pid) == process_resources.pid_namespace(root)


async def fresh_container_row(bench: Bench, reference: SampleSet) -> list[ResultRow]:
    """The same, including the creation of the container and the code."""
    try:
        meter = process_resources.CpuMeter(bench.ours.pid)
    except process_resources.MeasurementUnavailable as error:
        print(f"A turn with a fresh container is left out: {error}", file=sys.stderr)
        return []
    try:
        meter.adopt(process_resources.process_tree(bench.ours.pid))
        taken = list[float]()
        for _ in range(bench.scale.fresh_containers):
            before = meter.cpu_seconds()
            await bench.ours.ask_with_code(TOOL_FRAGMENTS)
            await asyncio.sleep(0.2)  # until another sandbox waits in the pool
            taken.append((meter.cpu_seconds() - before) * MS)
    finally:
        meter.close()
    title = "the same in a fresh container, all processes, the code too"
    return [ResultRow("code_turn_fresh", title, "ms", SampleSet("all", taken), reference, measures=("p50",))]
