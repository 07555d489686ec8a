"""The gateway against a bare relay, interleaved, before the same model server.

    make bench-gateway                              everything, a few minutes
    make bench-gateway ARGS=--quick                 about two minutes, as `make bench-check` runs it
    make bench-gateway ARGS="--rows burst,paced"    only these
    make bench-gateway ARGS=--rehearse              the relay in both places, to try the benchmark itself

docs/benchmarks.md says what each row means.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import gateway_client, gateway_processes, process_resources, result_table
from benchmarks.harness.gateway_client import BenchmarkTarget, TimedAnswer, UnexpectedAnswer
from benchmarks.harness.raw_http_client import RawHttpClient
from benchmarks.harness.raw_websocket_client import RawWebSocketClient
from benchmarks.harness.result_table import ResultRow, SampleSet

RESULTS = Path(__file__).parent / "results" / "gateway.json"
CHUNK_COUNT = 200
TEXT_MODEL = f"burst-{CHUNK_COUNT}"
LENGTHS = (200, 1100, 2000)  # of code and of texts, to tell what a delta costs from what a turn costs
TOOL_FRAGMENTS = 20
EARLY, LATE = 3, 100  # turns of a conversation
MB = 1_000_000
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


async def burst_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event when the model server sends as fast as it can."""
    scale, sides = bench.scale, (bench.ours, bench.relay, bench.joined)

    async def work(served: BenchmarkTarget) -> None:
        await request_texts(served, scale, stream=True)

    ours, relay, joined = await measure_interleaved(
        sides, scale.rounds, work, US / scale.requests / CHUNK_COUNT
    )
    title = f"CPU per streamed event, {CHUNK_COUNT} in a burst"
    return [
        ResultRow(
            "burst", title, "µs", ours, relay, {"p50": 1 / 2}, measures=("p50",), note="next goal: 0.83x"
        ),
        ResultRow("burst_joined", title, "µs", ours, joined, measures=("p50",)),
    ]


async def paced_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event when each arrives by itself."""
    scale = bench.scale

    async def work(served: BenchmarkTarget) -> None:
        await request_paced_streams(served, scale.streams, scale.paced_chunks)

    share = US / scale.streams / scale.paced_chunks
    ours, relay = await measure_interleaved((bench.ours, bench.relay), scale.paced_rounds, work, share)
    title = f"CPU per streamed event, 50/s × {scale.streams} streams"
    goals = {"p50": 1 / 1.3}
    return [ResultRow("paced", title, "µs", ours, relay, goals, measures=("p50",), note="next goal: 1x")]


async def websocket_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event over WebSocket, compared with SSE."""
    scale = bench.scale
    streamed = replace(bench.ours, name="gateway, streamed")
    with contextlib.closing(RawWebSocketClient(bench.ours.client.port)) as client:
        sides = (replace(bench.ours, name="gateway, WebSocket", client=client), streamed)

        async def burst(served: BenchmarkTarget) -> None:
            await request_texts(served, scale, stream=True)

        async def one_by_one(served: BenchmarkTarget) -> None:
            await request_paced_streams(served, scale.streams, scale.paced_chunks)

        share = US / scale.requests / CHUNK_COUNT
        bursts = await measure_interleaved(sides, scale.rounds, burst, share)
        share = US / scale.streams / scale.paced_chunks
        pacing = await measure_interleaved(sides, scale.paced_rounds, one_by_one, share)
    titles = (
        f"CPU per event over WebSocket, {CHUNK_COUNT} in a burst",
        f"CPU per event over WebSocket, 50/s × {scale.streams} connections",
    )
    return [
        ResultRow(key, title, "µs", ours, reference, {"p50": 1 / 1.5}, measures=("p50",))
        for key, title, (ours, reference) in zip(
            ("socket_burst", "socket_paced"), titles, (bursts, pacing), strict=True
        )
    ]


async def blocking_rows(bench: Bench) -> list[ResultRow]:
    """CPU of a blocking request; the gateway's response is on disk when it is sent."""
    scale, sides = bench.scale, (bench.ours, bench.relay)
    rounds = 4 * scale.rounds  # they are short
    found: list[ResultRow] = []
    for key, model, goals in (("blocking", TEXT_MODEL, {"p50": 1 / 3.5}), ("blocking_short", "burst-10", {})):

        async def work(served: BenchmarkTarget, model: str = model) -> None:
            await request_texts(served, scale, stream=False, model=model)

        ours, relay = await measure_interleaved(sides, rounds, work, MS / scale.requests)
        title = f"CPU per blocking request, stored, answer of {model.partition('-')[2]} tokens"
        note = "next goal: 0.57x" if goals else ""
        found.append(ResultRow(key, title, "ms", ours, relay, goals, measures=("p50",), note=note))
    return found


async def latency_rows(bench: Bench) -> list[ResultRow]:
    """Latency added to the model server's, with sequential requests."""
    kinds = (
        ("first_delta", "first delta", "paced-2"),
        ("whole_answer", f"{CHUNK_COUNT} chunks, whole", TEXT_MODEL),
    )
    found: list[ResultRow] = []
    for key, what, model in kinds:
        bare: list[float] = []
        sides = (bench.ours, bench.relay)
        taken = {one: list[float]() for one in sides}
        for number in range(bench.scale.latencies):
            bare.append((await gateway_client.time_completion(bench.model, model))[model == TEXT_MODEL])
            for one in sides if number % 2 else reversed(sides):
                answer = await one.ask_for_text(model, stream=True)
                taken[one].append(answer.whole if model == TEXT_MODEL else answer.first_delta)
        base = statistics.median(bare)
        ours, relay = (SampleSet(one.name, [value - base for value in taken[one]]) for one in sides)
        note = f"over {base:.2f} ms of the model server alone"
        goals = {"p50": 1 / 2, "p99": 1 / 2}
        found.append(
            ResultRow(key, f"added latency, one at a time: {what}", "ms", ours, relay, goals, note=note)
        )
    return found


async def memory_rows(bench: Bench) -> list[ResultRow]:
    """Resident memory after one request, and its peak under load."""
    idle, loaded = list[SampleSet](), list[SampleSet]()
    for one in (bench.ours, bench.relay):
        await one.ask_for_text(TEXT_MODEL, stream=False)
        idle.append(SampleSet(one.name, [process_resources.resident_bytes(one.pid) / MB]))
        process_resources.reset_peak(one.pid)
        await request_paced_streams(one, bench.scale.streams, bench.scale.paced_chunks)
        await request_texts(one, bench.scale, stream=True)
        loaded.append(SampleSet(one.name, [process_resources.peak_resident_bytes(one.pid) / MB]))
    below = (
        sum(
            process_resources.pss_bytes(pid)
            for pid in process_resources.process_tree(bench.ours.pid)
            if pid != bench.ours.pid
        )
        / MB
    )
    note = f"below it, PSS of the sandbox server and its sandboxes: {below:.0f} MB" if below else ""
    title, kept = "resident memory of the gateway", ("mean",)
    load = f"{title}, at most, {bench.scale.streams} streams"
    return [
        ResultRow(
            "memory_idle",
            f"{title}, idle",
            "MB",
            idle[0],
            idle[1],
            limits={"mean": 80},
            measures=kept,
            note=note,
        ),
        ResultRow("memory_loaded", load, "MB", loaded[0], loaded[1], limits={"mean": 120}, measures=kept),
    ]


async def code_rows(bench: Bench) -> list[ResultRow]:
    """CPU per delta of code, from the difference between lengths."""
    served, scale = bench.ours, bench.scale
    container = (await served.ask_with_code(8)).response.item("code_interpreter_call").container_id
    clock = cpu_clock_of(served)
    code, text = list[list[float]](), list[list[float]]()
    for number in range(scale.tool_rounds + 1):
        codes, words = list[float](), list[float]()
        for length in LENGTHS:
            writing = partial(served.ask_with_code, length, container)
            saying = partial(served.ask_for_text, f"burst-{length}", stream=True)
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
    served, scale = bench.ours, bench.scale
    container = (await served.ask_with_code(8)).response.item("code_interpreter_call").container_id
    outside = [
        pid for pid in process_resources.process_tree(served.pid) if _is_outside_sandbox(pid, served.pid)
    ]

    def clock() -> float:
        return sum(map(process_resources.cpu_clock, outside))

    code, function = list[float](), list[float]()
    kinds = (
        (partial(served.ask_with_code, TOOL_FRAGMENTS, container), code),
        (partial(served.ask_with_function, TOOL_FRAGMENTS), function),
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


async def growth_rows(bench: Bench) -> list[ResultRow]:
    """CPU time and disk bytes of a late turn of a conversation against an early one."""
    served, number = bench.ours, bench.scale.conversations
    tips, sizes = await database_growth(bench, number, LATE - 1)
    clock = cpu_clock_of(served)
    early, late = ([], []), ([], [])
    for old in tips:
        young = (await grow_conversations(served, [None], EARLY - 1))[0]
        for tip, kinds in ((young, early), (old, late)):
            for stream, values in zip((True, False), kinds, strict=True):
                turn = served.ask_for_text(TEXT_MODEL, stream=stream, previous_response_id=tip)
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


async def telemetry_rows(bench: Bench) -> list[ResultRow]:
    """What a gateway costs that sends telemetry, without content, against one that sends none. Two processes of the
    same program differ by some percent, whatever they do: so there are several of both.
    """
    if bench.observed is None:
        return []
    scale = bench.scale
    events, streams = scale.requests * CHUNK_COUNT, scale.streams

    async def burst(served: BenchmarkTarget) -> None:
        await request_texts(served, scale, stream=True)

    async def one_by_one(served: BenchmarkTarget) -> None:
        await request_paced_streams(served, streams, scale.paced_chunks)

    async def short(served: BenchmarkTarget) -> None:
        await request_texts(served, scale, stream=False, model="burst-10")

    async def code(served: BenchmarkTarget) -> None:
        await run_concurrently(1, [partial(served.ask_with_code, TOOL_FRAGMENTS)] * scale.tool_turns)

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
    told: list[list[float]] = [[] for _ in kinds]
    untold: list[list[float]] = [[] for _ in kinds]
    for _ in range(scale.pairs // 2):
        # Two pairs at a time: while one side works, the others idle, and what they do then is part of their samples.
        async with bench.observed() as first, bench.observed() as second:
            for number, (*_, work, rounds, share, _) in enumerate(kinds):
                taken = await measure_paired([*first, *second], scale.balances, rounds, work, share)
                told[number] += taken[0] + taken[2]
                untold[number] += taken[1] + taken[3]
    found: list[ResultRow] = []
    for (key, what, unit, *_, goals), on, off in zip(kinds, told, untold, strict=True):
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


# What is idle is measured first: everything after it has had load.
GROUPS: dict[str, Callable[[Bench], Awaitable[list[ResultRow]]]] = {
    "memory": memory_rows,
    "latency": latency_rows,
    "burst": burst_rows,
    "paced": paced_rows,
    "socket": websocket_rows,
    "blocking": blocking_rows,
    "code": code_rows,
    "tools": tool_rows,
    "telemetry": telemetry_rows,
    "growth": growth_rows,
}
REHEARSAL_GROUPS = (
    "memory",
    "latency",
    "burst",
    "paced",
    "blocking",
)  # a relay has no tools and remembers nothing


async def measure(scale: Scale, groups: Sequence[str], *, rehearse: bool) -> list[ResultRow]:
    found: list[ResultRow] = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fumehood-bench-")))
        url, model = await stack.enter_async_context(gateway_processes.run_model_server(directory))
        relay = await stack.enter_async_context(gateway_processes.run_relay(directory, url))
        if rehearse:
            ours = await stack.enter_async_context(gateway_processes.run_relay(directory, url))
            bench = Bench(replace(ours, name="relay again"), relay, model, scale, None)
        else:
            ours = await stack.enter_async_context(gateway_processes.run_gateway(directory, url))
            observed = partial(gateway_processes.telemetry_pair, directory, url)
            bench = Bench(ours, relay, model, scale, gateway_processes.database_path(directory), observed)
        try:
            for name in groups:
                began = time.perf_counter()
                found += await GROUPS[name](bench)
                print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        except UnexpectedAnswer as error:
            said = (
                ""
                if rehearse
                else f" The gateway said:\n{gateway_processes.read_log_tail(gateway_processes.log_path(directory))}"
            )
            raise UnexpectedAnswer(f"A wrong answer: {error}.{said}") from error
    return found


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("uvicorn", "aiohttp", "msgspec", "uvloop")}


def parse_groups(names: str, *, rehearse: bool) -> list[str]:
    able = list(REHEARSAL_GROUPS if rehearse else GROUPS)
    wanted = names.split(",") if names else able
    if unknown := [name for name in wanted if name not in able]:
        raise SystemExit(f"There are no rows {', '.join(unknown)}; there are {', '.join(able)}.")
    return [name for name in able if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway against a bare relay.")
    parser.add_argument("--quick", action="store_true", help="about two minutes instead of some minutes")
    parser.add_argument("--json", type=Path, help=f"where the result goes; default {RESULTS.name}")
    parser.add_argument("--rows", default="", metavar="NAMES", help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--rehearse", action="store_true", help="the relay in the gateway's place")
    chosen = parser.parse_args()
    groups = parse_groups(chosen.rows, rehearse=chosen.rehearse)
    scale = QUICK if chosen.quick else FULL
    try:
        found = asyncio.run(measure(scale, groups, rehearse=chosen.rehearse))
    except (gateway_processes.StartError, UnexpectedAnswer) as error:
        sys.exit(str(error))
    facts = result_table.describe_machine(versions())
    result_table.print_results("gateway", facts, found)
    if chosen.json is not None or not (chosen.quick or chosen.rehearse or chosen.rows):
        result_table.write_json(chosen.json or RESULTS, "gateway", facts, found)


if __name__ == "__main__":
    main()
